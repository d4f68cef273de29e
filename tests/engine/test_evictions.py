"""The recorded evictions of tokens equal what the cache really holds, compression by compression."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import EvictionTrace, Sampling, Setting
from kvatlas.engine import Engine, Request, scheduler
from kvatlas.engine.cache import CachedSequence, KVCache
from kvatlas.engine.rows import EvictionLog, Row, compress
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from tests.engine.test_loop import BUDGET, endless, grid, requests, run


def test_a_log_counts_holders_and_the_step_at_which_the_last_one_dropped_a_token() -> None:
    first = EvictionLog().after(torch.tensor([[[0, 1, 3]], [[0, 2, 3]]]), 4, 2)
    assert first.eviction_trace(5).held == (2, 1, 1, 2, 2)
    assert first.eviction_trace(5).left == (0, 0, 0, 0, 0)
    second = first.after(torch.tensor([[[0, 3, 5]], [[0, 3, 4]]]), 6, 4)
    assert second.eviction_trace(6) == EvictionTrace(2, (0, 4, 4, 0, 0, 0), (2, 0, 0, 2, 1, 1))
    third = second.after(torch.tensor([[[0, 5, 6]], [[0, 5, 6]]]), 7, 5)
    assert third.eviction_trace(7).left == (0, 4, 4, 5, 5, 0, 0)
    assert first.eviction_trace(4).held == (2, 1, 1, 2)


def selections() -> list[Policy]:
    """Every policy that this model can run without files, in each scope that it has."""
    results = []
    for name in policies.policies.names():
        try:
            policy = policies.of(Setting.of(name, kv_budget=BUDGET, local_window=8, ratio=0.3, ratio_over="thinking"))
        except policies.KvatlasError:
            continue
        results.append(policy)
    return results


def checked(model: ModelHandle, cache: KVCache, row: Row[Any]) -> int:
    """Compress, and compare the log with the positions that are held."""
    before = row.position
    evicted = compress(model, cache, row)
    stored = [set(head.tolist()) for layer in row.kept for head in layer]
    assert row.cached.length == len(stored[0])
    eviction_trace = row.evictions.eviction_trace(row.position)
    assert before == row.position == len(eviction_trace.left)
    for position in range(row.position):
        holding = sum(position in positions for positions in stored)
        assert eviction_trace.held[position] == holding
        assert (eviction_trace.left[position] == 0) == (holding > 0)
        assert eviction_trace.left[position] <= len(row.tokens)
    return evicted


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_log_equals_what_the_cache_holds_at_every_compression(
    random_models: dict[str, ModelHandle], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "compress", checked)
    model = endless(random_models[kind])
    chosen = [policy for policy in selections() if not _needs_files(policy, model)]
    assert {"window", "random"} <= {policy.name for policy in chosen}
    engine = Engine(model, model.load(), chosen, Sampling(0.9, 20, 0.95, 160), 16)
    generations = list(engine.run(requests(model, chosen, 3)))
    assert len(generations) == 3 * len(chosen)
    for generation in generations:
        eviction_trace = generation.eviction_trace
        cached = generation.usage.prompt_tokens + len(generation.tokens) - 1
        assert len(eviction_trace.left) == len(eviction_trace.held) == cached
        assert set(eviction_trace.left) > {0}
        # Steps at which tokens left are compressions: no more of them than were counted.
        assert len(set(eviction_trace.left) - {0}) <= generation.usage.compressions
        if generation.policy.keep_prompt:  # type: ignore[attr-defined]
            assert set(eviction_trace.held[: generation.usage.prompt_tokens]) == {eviction_trace.holders}
        layers, heads = generation.policy.scope.width(model.shape)
        assert eviction_trace.holders == layers * heads


def _needs_files(policy: Policy, model: ModelHandle) -> bool:
    try:
        policy.check(model)
    except policies.KvatlasError:
        return True
    return False


def test_cached_keys_are_those_of_the_tokens_that_the_log_calls_held(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First-layer keys depend on token and position alone: those in the cache are the held tokens', and no others'."""
    ended: list[torch.Tensor] = []
    end = KVCache.end

    def noted(self: KVCache, sequence: CachedSequence) -> None:
        ended.append(self.keys[0][:, self.slots(sequence)].clone())
        end(self, sequence)

    monkeypatch.setattr(KVCache, "end", noted)
    model = endless(random_models["llama"])
    policy = policies.of(Setting.of("random", kv_budget=BUDGET, local_window=8, ratio=0.3, ratio_over="thinking"))
    prompt = requests(model, [policy], 1)
    _, (generation,) = run(model, prompt, 1, max_new_tokens=110)
    tokens = (*prompt[0].prompt, *generation.tokens)[:-1]
    full = policies.of(Setting.of("full"))
    run(model, [Request(0, tokens, 1, (full,))], 1, max_new_tokens=2)
    mine, whole = ended
    stored = [sum(_holds(mine, whole, head, p) for head in range(model.shape.kv_heads)) for p in range(len(tokens))]
    assert mine.shape[1] < len(tokens)
    eviction_trace = generation.eviction_trace
    for position, count in enumerate(stored):
        if eviction_trace.held[position] == 0:
            assert count == 0
        if eviction_trace.held[position] == eviction_trace.holders:
            assert count == model.shape.kv_heads


def _holds(mine: torch.Tensor, whole: torch.Tensor, head: int, position: int) -> bool:
    return bool(((mine[head] - whole[head, position]).abs().amax(-1) < 1e-4).any())


def test_forks_share_and_never_change_each_others_log(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    together = {(g.key, g.policy): g.eviction_trace for g in run(model, requests(model, grid()), 16)[1]}
    for policy in grid():
        for generation in run(model, requests(model, [policy], 3), 16)[1]:
            assert together[generation.key, policy] == generation.eviction_trace
            if policy.budget is None:
                assert set(generation.eviction_trace.left) == {0}
