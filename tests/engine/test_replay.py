"""Replay writes what decoding writes: every token, compression and observation, for every policy."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvatlas.engine.chunks import _line_by_line, _together
from kvatlas.engine.replay import Reader

from kvatlas import models, policies
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, Generation, Replay, Request
from kvatlas.engine.sampling import near_ties
from kvatlas.models import Model
from kvatlas.noise import gumbel, stream_key
from kvatlas.policies import Policy
from tests.engine.test_loop import BUDGET, endless, prompts
from tests.r1 import save_model

FULL = policies.of(Setting.of("full"))


def everyone(model: Model, **values: Any) -> list[Policy]:
    """The full cache and every policy that this model can run without a reference, each in each of its scopes."""
    common = {"kv_budget": BUDGET, "local_window": 32, "ratio": 0.6, "ratio_over": "thinking", **values}
    found = [FULL]
    for name in policies.policies.names():
        if name in ("full", "oracle"):
            continue
        try:
            policy = policies.of(Setting.of(name, **common))
            policy.check(model)
        except KvatlasError:
            continue
        found.append(policy)
    return found


def decoded(
    model: Model, work: list[Request[Any]], replay: Replay, batch_size: int = 16, **sampling: Any
) -> tuple[Engine, list[Generation[Any]]]:
    settings = dict.fromkeys(policy for request in work for policy in request.policies)
    drawn = Sampling(**{"temperature": 0.4, "top_k": 20, "top_p": 0.95, "max_new_tokens": 150, **sampling})
    engine = Engine(model, model.network(), settings, drawn, batch_size, replay)
    return engine, list(engine.run(work))


def outcome(generations: Iterable[Generation[Any]]) -> dict[Any, Any]:
    return {
        (g.key, g.policy.setting.id): (
            g.tokens,
            g.finished,
            g.thinking_end,
            g.decoded,
            g.fate,
            g.usage.compressions,
            g.usage.peak_kv_tokens,
            g.usage.mean_kv_tokens,
        )
        for g in generations
    }


def smudged(tokens: tuple[int, ...], seed: int, every: int) -> tuple[int, ...]:
    """The tokens with some of them wrong, one in `every` on average."""
    rng = random.Random(seed)
    return tuple(token if rng.randrange(every) else rng.randrange(20, 40) for token in tokens)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_whatever_a_script_proposes_what_comes_out_is_what_decoding_writes(
    random_models: dict[str, Model], kind: str, seed: int
) -> None:
    """Scripts that are right for long stretches and wrong in between, for every policy in one batch."""
    model = endless(random_models[kind])
    settings = everyone(model)
    assert len(settings) > 10
    work = [
        Request((i, policy.name), prompt, 1000 * seed + i, (policy,))
        for i, prompt in enumerate(prompts(model, 1 if kind == "gemma3" else 2, seed))
        for policy in settings
    ]
    _, wanted = decoded(model, work, Replay.OFF, 64)
    written = {g.key: g.tokens for g in wanted}
    scripted = [replace(one, script=smudged(written[one.key], seed, 25)) for one in work]
    engine, found = decoded(model, scripted, Replay.AUTO, 7 * seed)
    assert outcome(found) == outcome(wanted)
    for generation in found:
        assert generation.usage.replayed_tokens > 40, generation.policy
    assert engine.replayed_tokens == sum(g.usage.replayed_tokens for g in found)
    assert engine.passes < engine.decoded_tokens - engine.replayed_tokens


@pytest.mark.parametrize("name", models.embedded())
def test_embedded_models_replay_under_every_policy(name: str) -> None:
    model, benchmark = models.find(name), find("CHAIN6")
    prompts = [model.encode(benchmark.prompt(problem)) for problem in benchmark.problems(2)]
    chosen = everyone(model, kv_budget=max(map(len, prompts)) + 40)
    # All but the oracle, which needs a finished trace.
    assert {policy.name for policy in chosen} == set(policies.policies.names()) - {"oracle"}
    work = [Request((seed, i), p, stream_key(seed, i), tuple(chosen)) for seed in (0, 1) for i, p in enumerate(prompts)]
    _, wanted = decoded(model, work, Replay.OFF, max_new_tokens=160)
    engine, found = decoded(model, work, Replay.STRICT, max_new_tokens=160)
    assert outcome(found) == outcome(wanted)
    assert engine.replayed_tokens > 0
    assert sum(g.usage.compressions for g in found) > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_branches_replay_the_full_cache_of_their_own_tree(random_models: dict[str, Model], kind: str) -> None:
    model = endless(random_models[kind])
    gentle = everyone(model, local_window=80, ratio=0.95)
    budgets = everyone(model, local_window=80, ratio=0.95, kv_budget=BUDGET + 30)[1:4]
    work = [Request(i, p, 70 + i, (*gentle, *budgets)) for i, p in enumerate(prompts(model, 1))]
    plain, wanted = decoded(model, work, Replay.OFF)
    fast, found = decoded(model, work, Replay.STRICT)
    assert outcome(found) == outcome(wanted)
    assert plain.replayed_tokens == 0
    assert fast.replayed_tokens == sum(g.usage.replayed_tokens for g in found) > 0
    assert fast.decoded_tokens == plain.decoded_tokens
    assert all(g.usage.replayed_tokens == 0 for g in found if g.policy == FULL)
    without = [replace(one, policies=one.policies[1:]) for one in work]
    assert decoded(model, without, Replay.AUTO)[0].replayed_tokens == 0


def test_chunks_grow_while_all_agree_and_stop_after_a_difference() -> None:
    script = list(range(100))
    reader, written, sizes = Reader(), 0, []
    while written < 60:
        proposal = reader.proposal(script, written, 30)
        sizes.append(len(proposal))
        for token in [*proposal, script[written + len(proposal)]]:
            reader.note(script, written, token)
            written += 1
    assert sizes == [4, 9, 19, 30]
    reader.note(script, written, -1)
    assert reader.proposal(script, written + 1, 30) == []
    for place in range(written + 1, written + 5):
        reader.note(script, place, place)
    assert reader.proposal(script, written + 5, 30) == script[written + 5 : written + 9]
    # The last token of a script never enters a cache, and nothing is proposed past it.
    reader = Reader(streak=50)
    assert reader.proposal(script, 97, 30) == [97, 98]
    assert reader.proposal(script, 99, 30) == reader.proposal(script, 120, 30) == []
    assert reader.proposal(script, 5, -3) == []


def test_who_is_wary_stops_before_near_ties() -> None:
    proposal, own, near = [5, 6, 7], [5, 6, 7, 8], [False, True, False]
    calm, wary = Reader(), Reader()
    assert calm.take_over(proposal, own, near, wary=False) == 3
    assert wary.take_over(proposal, own, near, wary=True) == 1
    assert (calm.replayed, calm.near_ties) == (3, 1)
    assert (wary.replayed, wary.near_ties) == (1, 1)
    # The own draw after the last accepted token counts, those after a difference do not.
    assert Reader().take_over([5, 9, 7], own, [False, False, True], wary=True) == 1
    assert Reader().take_over([9, 6, 7], own, [True, True, True], wary=True) == 0


def test_near_ties_are_draws_that_other_roundings_might_turn() -> None:
    streams, positions = torch.tensor([1, 1, 1]), torch.tensor([5, 5, 5])
    logits = torch.tensor([[3.0, 3.0, 1.0], [3.0, 3.0 + 3e-7, 1.0], [3.0, 3.1, 1.0]])
    assert near_ties(logits, Sampling(temperature=0), streams, positions).tolist() == [True, True, False]
    assert not near_ties(logits, Sampling(temperature=1.0, top_k=1), streams, positions).any()
    drawn = Sampling(temperature=1.0, top_k=0, top_p=1.0)
    noise = gumbel(streams[:1, None], positions[:1, None], torch.arange(3)[None])
    assert near_ties((-noise).float(), drawn, streams[:1], positions[:1]).tolist() == [True]
    assert not near_ties(torch.zeros(1, 3), drawn, streams[:1], positions[:1]).any()


@pytest.mark.parametrize("heads", [1, 2])
def test_queries_of_a_chunk_read_the_cache_together_as_one_by_one(heads: int) -> None:
    """What GPUs do; where layers have windows, masks differ between KV heads."""
    torch.manual_seed(0)
    lines, group, size, slots = 7, 3, 16, 64
    query = torch.randn(lines, 2, group, size)
    keys, values = torch.randn(1, 2, slots, size), torch.randn(1, 2, slots, size)
    mask = torch.zeros(lines, heads, 1, slots)
    mask[torch.rand(mask.shape) < 0.3] = float("-inf")
    alone = _line_by_line(query, keys, values, mask, 0.25)
    torch.testing.assert_close(_together(query, keys, values, mask, 0.25), alone, rtol=1e-5, atol=1e-6)


def test_a_model_that_reads_chunks_together_replays_too(random_models: dict[str, Model]) -> None:
    model = endless(random_models["gemma3"])
    chosen = [policy for policy in everyone(model) if policy.name in ("window", "h2o", "snapkv")]
    work = [Request(policy.name, prompts(model, 1)[0], 3, (policy,)) for policy in chosen]
    written = {g.key: g.tokens for g in decoded(model, work, Replay.OFF)[1]}
    engine = Engine(model, model.network(), chosen, Sampling(0.4, 20, 0.95, 150), 8)
    engine.exact = False
    found = list(engine.run([replace(one, script=written[one.key]) for one in work]))
    # Roundings differ in the last bits, choices then only at near ties.
    assert all(g.tokens == written[g.key] for g in found if not g.usage.near_ties)
    assert engine.replayed_tokens > 300


def test_strict_replay_in_half_precision_draws_near_ties_again(tmp_path: Path) -> None:
    model = models.find(save_model("llama", tmp_path / "m").name, dtype="bfloat16", think_close="")
    vars(model).update(stops=frozenset())
    window = policies.of(Setting.of("window", kv_budget=BUDGET, local_window=64, ratio=0.9, ratio_over="thinking"))
    work = [Request(i, p, i, (window,)) for i, p in enumerate(prompts(model, 2))]
    written = {g.key: g.tokens for g in decoded(model, work, Replay.OFF, temperature=1.0)[1]}
    scripted = [replace(one, script=written[one.key]) for one in work]
    fast, _ = decoded(model, scripted, Replay.AUTO, temperature=1.0)
    wary, found = decoded(model, scripted, Replay.STRICT, temperature=1.0)
    assert (fast.wary, wary.wary) == (False, True)
    assert all(len(g.tokens) == 150 for g in found)
    assert sum(g.usage.near_ties for g in found) > 0
    assert wary.replayed_tokens > 0
    assert wary.passes > fast.passes
