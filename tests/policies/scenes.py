"""A cache of random tensors at the moment of a compression, and the contract once more in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvatlas.models import Shape
from kvatlas.policies import Cached, Policy, Selection, select

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32)
GROUP = SHAPE.heads // SHAPE.kv_heads
PROMPT, LENGTH, CACHED, STREAM = 9, 90, 60, 77

#: What each layer multiplies q k by: not 1 / sqrt(head size), and not the same in all.
SCALING = (0.25, 0.6)

#: Score of one token: (cached, layer, KV head, slot) -> float.
Score = Callable[[Cached, int, int, int], float]


def scene(policy: Policy, seed: int, columns: Mapping[str, Tensor] | None = None, **changes: Any) -> Cached:
    """A cache that lost some of its thinking tokens before, each head others if the scope is that narrow."""
    random = torch.Generator().manual_seed(seed)
    layers, heads = policy.scope.width(SHAPE)

    def drawn(*sizes: int) -> list[Tensor]:
        return [torch.randn(*sizes, generator=random) for _ in range(SHAPE.layers)]

    def survivors() -> list[int]:
        old = PROMPT + torch.randperm(LENGTH - 40 - PROMPT, generator=random)[: CACHED - 40 - PROMPT]
        return [*range(PROMPT), *old.sort().values.tolist(), *range(LENGTH - 40, LENGTH)]

    positions = torch.tensor([[survivors() for _ in range(heads)] for _ in range(layers)])
    # Keys of few directions, so that some repeat others.
    directions = drawn(SHAPE.kv_heads, 6, SHAPE.head_dim)
    keys = [
        each[:, torch.randint(6, (CACHED,), generator=random)] + 0.4 * noise
        for each, noise in zip(directions, drawn(SHAPE.kv_heads, CACHED, SHAPE.head_dim), strict=True)
    ]
    values = drawn(SHAPE.kv_heads, CACHED, SHAPE.head_dim)
    queries = drawn(SHAPE.heads, policy.queries, SHAPE.head_dim)
    tokens = torch.randint(60, 100, (LENGTH,), generator=random)
    found = Cached(
        model=changes.pop("model", SimpleNamespace(shape=SHAPE)),
        positions=positions,
        prompt_length=PROMPT,
        thinking_end=None,
        length=LENGTH,
        stream=STREAM,
        columns=columns or {},
        key=keys.__getitem__,
        value=values.__getitem__,
        query=queries.__getitem__,
        window=changes.pop("window", lambda _: None),
        scaling=SCALING.__getitem__,
        tokens=lambda: tokens,
    )
    assert not changes
    return found


def expected(policy: Selection, cached: Cached, score: Score) -> list[list[list[int]]]:
    """Slots that stay by layer and head: the published rule, one token at a time, averaging as the scope says."""
    layers, heads, count = cached.positions.shape
    scores = [
        [[score(cached, layer, head, slot) for slot in range(count)] for head in range(SHAPE.kv_heads)]
        for layer in range(SHAPE.layers)
    ]
    kept = []
    for layer in range(layers):
        rows = []
        for head in range(heads):
            shared = [
                scores[a][b]
                for a in (range(SHAPE.layers) if layers == 1 else [layer])
                for b in (range(SHAPE.kv_heads) if heads == 1 else [head])
            ]
            mean = [sum(each[slot] for each in shared) / len(shared) for slot in range(count)]
            rows.append(_rule(policy, cached.positions[layer, head].tolist(), mean, cached.prompt_length))
        kept.append(rows)
    return kept


def _rule(policy: Selection, positions: list[int], scores: list[float], prompt: int) -> list[int]:
    older = range(len(positions) - policy.local_window)
    certain = [slot for slot in older if policy.keep_prompt and positions[slot] < prompt]
    others = sorted((slot for slot in older if slot not in certain), key=lambda slot: scores[slot], reverse=True)
    room = (
        int(policy.ratio * len(others) + 1e-9)
        if policy.ratio_over == "thinking"
        else int(policy.ratio * len(older) + 1e-9) - len(certain)
    )
    return sorted(certain + others[: max(0, room)]) + list(range(len(positions) - policy.local_window, len(positions)))


def assert_keeps(policy: Selection, cached: Cached, score: Score) -> None:
    """The policy keeps what an independent score makes the rule keep, in every layer and head."""
    assert select(policy, cached).tolist() == expected(policy, cached, score)
