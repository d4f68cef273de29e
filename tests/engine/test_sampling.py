import math

import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers.generation import TopKLogitsWarper

from kvatlas.core import Sampling
from kvatlas.engine import sampling as sampling_module
from kvatlas.engine.sampling import TIES, UNSAMPLED, sample
from kvatlas.noise import philox, stream_key, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def counts(sampling: Sampling, rows: int = 40_000) -> list[int]:
    streams = torch.full((rows,), 42)
    tokens = sample(LOGITS.expand(rows, -1), sampling, streams, torch.arange(rows))
    return torch.bincount(tokens, minlength=len(LOGITS)).tolist()


def test_philox_known_answers() -> None:
    """The vectors that the authors publish with their reference implementation (Random123, kat_vectors)."""
    zero, full = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    assert [int(w) for w in philox(zero, zero, zero, zero, zero)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    key = torch.tensor([-1])
    assert [int(w) for w in philox(key, full, full, full, full)] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.6, 0), (1.0, 0), (2.0, 0), (1.0, 3)])
def test_draws_follow_the_softmax_of_the_k_likeliest(temperature: float, top_k: int) -> None:
    result, kept = counts(Sampling(temperature=temperature, top_k=top_k, top_p=1.0)), top_k or len(LOGITS)
    assert sum(result[kept:]) == 0
    wanted = (LOGITS[:kept].double() / temperature).softmax(-1) * sum(result)
    assert chisquare(result[:kept], wanted.tolist()).pvalue > 1e-3


def test_top_p_is_taken_of_what_top_k_left_at_the_temperature() -> None:
    """Temperature, then top-k, then top-p: with shares .63, .23, .14 after top-k 3, top-p 0.7 leaves two."""
    result = counts(Sampling(temperature=1.0, top_k=3, top_p=0.7))
    assert result[2:] == [0, 0, 0, 0]
    assert min(result[:2]) > 0
    # Taken before top-k, 0.95 of the whole would cut nothing from the three.
    assert counts(Sampling(temperature=1.0, top_k=2, top_p=0.72))[1] == 0


def test_temperature_zero_is_greedy() -> None:
    assert counts(Sampling(temperature=0.0), rows=8) == [8, 0, 0, 0, 0, 0]


def test_a_draw_depends_on_its_own_stream_position_and_logits_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 300, generator=generator)
    streams, positions = torch.arange(50) * 7919, torch.arange(50) % 13
    sampling = Sampling()
    together = sample(logits, sampling, streams, positions)
    alone = [int(sample(logits[i : i + 1], sampling, streams[i : i + 1], positions[i : i + 1])) for i in range(50)]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_k", [1, 20, 240])
def test_native_sampling_is_the_plain_one(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3000, 400, generator=torch.Generator().manual_seed(1)) * 3
    streams = torch.arange(3000) * 104729
    positions = torch.arange(3000) % 700
    limits = Sampling(temperature=0.6, top_k=top_k, top_p=0.95)
    native = sample(logits, limits, streams, positions)
    monkeypatch.setattr(sampling_module, "load", lambda: None)
    assert torch.equal(sample(logits, limits, streams, positions), native)


@pytest.mark.parametrize("top_p", [0.0, 1e-300])
def test_the_likeliest_token_always_stays(top_p: float) -> None:
    """Both by native code and without it; transformers allows a top_p of 0."""
    logits = torch.randn(50, 400, generator=torch.Generator().manual_seed(1))
    streams = torch.arange(50)
    for top_k in (20, 0):
        drawn = sample(logits, Sampling(temperature=0.6, top_k=top_k, top_p=top_p), streams, streams)
        assert torch.equal(drawn, logits.argmax(-1))


def test_all_logits_that_tie_with_the_last_of_top_k_stay() -> None:
    tied = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, 3.0]).expand(40_000, -1)
    tokens = sample(tied, Sampling(1.0, 2, 1.0), torch.full((40_000,), 42), torch.arange(40_000))
    counted = torch.bincount(tokens, minlength=6)[[1, 2, 3, 5]].tolist()
    assert sum(counted) == 40_000
    assert chisquare(counted).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("banned", [0, 280, 299])
def test_top_k_keeps_what_transformers_keeps(dtype: torch.dtype, banned: int) -> None:
    """At a temperature at which every token that stays is drawn, with forbidden tokens, too."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(7)).to(dtype)
    logits[:banned] = float("-inf")
    kept = TopKLogitsWarper(12)(None, logits[None])[0].isfinite().nonzero().flatten().tolist()
    assert (len(kept) > 12) == (dtype is torch.bfloat16 and banned == 0)
    draws = sample(logits.expand(4000, -1), Sampling(50.0, 12, 1.0), torch.full((4000,), 1), torch.arange(4000))
    assert sorted(set(draws.tolist())) == kept


def test_of_tied_logits_top_p_keeps_the_lowest_tokens() -> None:
    tied = torch.zeros(2000, 40)
    for top_k in (0, 10):
        draws = sample(tied, Sampling(1.0, top_k, 0.1), torch.full((2000,), 3), torch.arange(2000))
        assert sorted(set(draws.tolist())) == [0, 1, 2, 3]


def test_ties_and_fixed_shapes_change_no_other_row() -> None:
    """A row's draw is the same alone, beside rows with ties, and in a step of fixed shapes that has room for them."""
    logits = torch.randn(60, 500, generator=torch.Generator().manual_seed(1))
    logits[1::3] = logits[1::3].bfloat16().float()
    logits[2::3, : TIES + 40] = 9.0
    streams, positions = torch.arange(60) * 7919, torch.arange(60) % 13
    sampling = Sampling(0.9, 20, 0.95)
    together = sample(logits, sampling, streams, positions).tolist()
    fixed = sample(logits, sampling, streams, positions, fixed_shapes=True).tolist()
    for row in range(60):
        one = slice(row, row + 1)
        assert [together[row]] == sample(logits[one], sampling, streams[one], positions[one]).tolist()
        assert fixed[row] == (UNSAMPLED if row % 3 == 2 else together[row])


def test_uniform_numbers_are_uniform_and_unlike_sampling_noise() -> None:
    position = torch.arange(20_000)
    numbers = uniform(torch.full_like(position, 5), 100, position, torch.tensor(1))
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    other = uniform(torch.full_like(position, 5), 100, position, torch.tensor(2))
    assert abs(float(torch.corrcoef(torch.stack([numbers, other]))[0, 1])) < 4 / math.sqrt(20_000)


def test_stream_keys_differ() -> None:
    assert stream_key(0, "m", "CHAIN8", "p", 1) != stream_key(0, "m", "CHAIN8", "p", 2)
