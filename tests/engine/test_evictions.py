"""The recorded evictions of tokens equal what the cache really holds, compression by compression."""

from contextlib import suppress
from typing import Any

import pytest

from kvatlas import policies
from kvatlas.core import KvatlasError, Sampling, Setting
from kvatlas.engine import Engine, scheduler
from kvatlas.engine.cache import KVCache
from kvatlas.engine.rows import Row, compress
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy
from tests.decoding import BUDGET, endless, grid, requests, run


def selections(model: ModelHandle) -> list[Policy]:
    """Every policy that this model can run without files."""
    results = []
    for name in policies.policies.names():
        with suppress(KvatlasError):
            policy = policies.of(Setting.of(name, kv_budget=BUDGET, local_window=8, ratio=0.3, ratio_over="thinking"))
            policy.check(model)
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


def test_the_log_equals_what_the_cache_holds_at_every_compression(
    random_models: dict[str, ModelHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "compress", checked)
    model = endless(random_models["qwen3"])
    chosen = selections(model)
    assert {"window", "random"} <= {policy.name for policy in chosen}
    engine = Engine(model, model.load(), chosen, Sampling(0.9, 20, 0.95, 160), 16)
    generations = list(engine.run(requests(model, chosen, 2)))
    assert len(generations) == 2 * len(chosen)
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


def test_forks_share_and_never_change_each_others_log(random_models: dict[str, ModelHandle]) -> None:
    model = random_models["llama"]
    together = {(g.key, g.policy): g.eviction_trace for g in run(model, requests(model, grid(), 5), 16)[1]}
    for policy in grid()[::3]:
        for generation in run(model, requests(model, [policy], 3), 16)[1]:
            assert together[generation.key, policy] == generation.eviction_trace
            if policy.budget is None:
                assert set(generation.eviction_trace.left) == {0}
