import math

import pytest
import torch
from scipy.stats import chisquare, kstest

from kvatlas.core import Sampling
from kvatlas.engine.sampling import sample
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


def test_uniform_numbers_are_uniform_and_unlike_sampling_noise() -> None:
    position = torch.arange(20_000)
    numbers = uniform(torch.full_like(position, 5), 100, position, torch.tensor(1))
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    other = uniform(torch.full_like(position, 5), 100, position, torch.tensor(2))
    assert abs(float(torch.corrcoef(torch.stack([numbers, other]))[0, 1])) < 4 / math.sqrt(20_000)


def test_stream_keys_differ() -> None:
    assert stream_key(0, "m", "CHAIN8", "p", 1) != stream_key(0, "m", "CHAIN8", "p", 2)
