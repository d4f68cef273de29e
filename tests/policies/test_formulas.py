"""Every policy against a slow reading of its paper's formula: float64, one token at a time, other code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.policies import Cached, Scope, Selection
from tests.policies.scenes import GROUP, SHAPE, assert_keeps, scene

COMMON = {"kv_budget": 60, "local_window": 10, "ratio": 0.4, "ratio_over": "thinking"}
SEEDS = range(3)


def make(name: str, **changes: Any) -> Selection:
    policy = policies.of(Setting.of(name, **{**COMMON, **changes}))
    assert isinstance(policy, Selection)
    return policy


def position(cached: Cached, layer: int, head: int, slot: int) -> int:
    layers, heads, _ = cached.positions.shape
    return int(cached.positions[min(layer, layers - 1), min(head, heads - 1), slot])


def logit(cached: Cached, layer: int, head: int, query: int, slot: int) -> float:
    """q k / sqrt(size) of query head `head` in float64; -inf for a token newer than the query."""
    vectors = cached.query(layer)[head].double()
    asked_at = cached.length - len(vectors) + query
    if position(cached, layer, head // GROUP, slot) > asked_at:
        return -math.inf
    key = cached.key(layer)[head // GROUP, slot].double()
    return float(vectors[query] @ key) / math.sqrt(SHAPE.head_dim)


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    parts = [math.exp(value - top) for value in values]
    return [part / sum(parts) for part in parts]


def in_window(cached: Cached, layer: int, head: int, slot: int, queries: int) -> bool:
    return position(cached, layer, head, slot) >= cached.length - queries


def neighbours(slot: int, kernel: int, count: int) -> range:
    return range(max(0, slot - kernel // 2), min(count, slot - kernel // 2 + kernel))


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
def test_h2o(scope: Scope, seed: int) -> None:
    policy = make("h2o", scope=scope)
    width = scope.width(SHAPE)
    mass = torch.rand(*width, 60, generator=torch.Generator().manual_seed(seed))

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        return float(mass[min(layer, width[0] - 1), min(head, width[1] - 1), slot])

    assert_keeps(policy, scene(policy, seed, {"mass": mass}), score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("queries", "window"), [(6, 10), (12, 4)])
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 5), ("max", 1)])
def test_snapkv(scope: Scope, seed: int, queries: int, window: int, pooling: str, kernel: int) -> None:
    policy = make("snapkv", scope=scope, queries=queries, local_window=window, pooling=pooling, kernel=kernel)
    votes: dict[tuple[int, int], list[float]] = {}

    def of_head(cached: Cached, layer: int, head: int) -> list[float]:
        """Sum over the observation window's queries of their softmax, before the window; of one query head."""
        count = cached.positions.shape[-1]
        rows = [softmax([logit(cached, layer, head, q, slot) for slot in range(count)]) for q in range(queries)]
        return [
            0.0 if in_window(cached, layer, head // GROUP, slot, queries) else sum(row[slot] for row in rows)
            for slot in range(count)
        ]

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        total = 0.0
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            if (layer, query_head) not in votes:
                votes[layer, query_head] = of_head(cached, layer, query_head)
            near = [votes[layer, query_head][i] for i in neighbours(slot, kernel, cached.positions.shape[-1])]
            total += max(near) if pooling == "max" else sum(near) / kernel
        return total / GROUP

    assert_keeps(policy, scene(policy, seed), score)


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mix", "window"), [(0.1, 10), (0.9, 4)])
def test_rkv(scope: Scope, seed: int, mix: float, window: int) -> None:
    queries, kernel, threshold = 8, 7, 0.5
    policy = make("rkv", scope=scope, mix=mix, local_window=window)
    memory: dict[Any, list[float]] = {}

    def importance(cached: Cached, layer: int, head: int) -> list[float]:
        slots = range(cached.positions.shape[-1])
        past = [slot for slot in slots if not in_window(cached, layer, head, slot, queries)]
        rows = []
        for q in range(queries):
            best = [max(logit(cached, layer, head * GROUP + g, q, slot) for g in range(GROUP)) for slot in past]
            rows.append(dict(zip(past, softmax(best), strict=True)))
        mean = [sum(row.get(slot, 0.0) for row in rows) / queries for slot in slots]
        return [max(mean[i] for i in neighbours(slot, kernel, len(mean))) for slot in slots]

    def redundancy(cached: Cached, layer: int, head: int) -> list[float]:
        keys = cached.key(layer)[head].double()
        count = len(keys)
        unit = [key / key.norm() for key in keys]
        total = [0.0] * count
        for i in range(count):
            similar = [0.0 if i == j else float(unit[i] @ unit[j]) for j in range(count)]
            repeats = [j for j in range(count) if similar[j] > threshold]
            if repeats:
                similar[max(repeats)] = 0.0
            total = [before + now for before, now in zip(total, similar, strict=True)]
        return softmax([value / count for value in total])

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        if in_window(cached, layer, head, slot, queries):
            return math.inf
        for what in (importance, redundancy):
            if (what, layer, head) not in memory:
                memory[what, layer, head] = what(cached, layer, head)
        return mix * memory[importance, layer, head][slot] - (1 - mix) * memory[redundancy, layer, head][slot]

    assert_keeps(policy, scene(policy, seed), score)


@pytest.mark.parametrize("keep_prompt", [True, False])
def test_streaming(keep_prompt: bool) -> None:
    policy = make("streaming", sinks=5, keep_prompt=keep_prompt, ratio_over="older", ratio=0.5)

    def score(cached: Cached, layer: int, head: int, slot: int) -> float:
        return math.inf if position(cached, layer, head, slot) < 5 else position(cached, layer, head, slot)

    cached = scene(policy, 0)
    assert_keeps(policy, cached, score)
    kept = policies.select(policy, cached)[0, 0].tolist()
    assert kept == [*range(9 if keep_prompt else 5), *range(60 - 10 - (25 - (9 if keep_prompt else 5)), 60)]
