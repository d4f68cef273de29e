"""A cache of random tensors at the moment of a compression, and the contract once more in plain Python."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting, Shape
from kvatlas.policies import CacheView, CompressingPolicy, Policy, select_tokens

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32)
PROMPT, LENGTH, CACHED, STREAM = 9, 90, 60, 77

#: What each layer multiplies q k by: not 1 / sqrt(head size), and not the same in all.
SCALING = (0.25, 0.6)

#: The input embeddings of token ids below 100.
EMBEDDINGS = torch.randn(100, SHAPE.hidden, generator=torch.Generator().manual_seed(0))

#: Score of one token: (cached, layer, KV head, slot) -> float.
Score = Callable[[CacheView, int, int, int], float]


def make(name: str, **changes: Any) -> CompressingPolicy:
    """A policy that keeps the 10 newest tokens, and 20 of the 50 older ones."""
    return policies.from_setting(
        Setting.from_parameters(name, **{"kv_budget": CACHED, "local_window": 10, "ratio": 0.4, **changes})
    )


@dataclass(frozen=True)
class Scene(CacheView):
    """A view whose methods are given as functions."""

    model: Any
    positions: Tensor
    prompt_length: int
    thinking_end: int | None
    length: int
    stream: int
    columns: Mapping[str, Tensor]
    key: Callable[[int], Tensor]
    value: Callable[[int], Tensor]
    query: Callable[[int], Tensor]
    window: Callable[[int], int | None]
    scaling: Callable[[int], float]
    tokens: Callable[[], Tensor]
    softcap: Callable[[int], float | None] = lambda _: None
    sinks: Callable[[int], Tensor | None] = lambda _: None
    embedding: Callable[[Tensor], Tensor] = EMBEDDINGS.__getitem__


def scene(policy: Policy, seed: int, columns: Mapping[str, Tensor] | None = None) -> Scene:
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
        direction[:, torch.randint(6, (CACHED,), generator=random)] + 0.4 * noise
        for direction, noise in zip(directions, drawn(SHAPE.kv_heads, CACHED, SHAPE.head_dim), strict=True)
    ]
    values = drawn(SHAPE.kv_heads, CACHED, SHAPE.head_dim)
    queries = drawn(SHAPE.heads, policy.queries, SHAPE.head_dim)
    tokens = torch.randint(60, 100, (LENGTH,), generator=random)
    return Scene(
        model=SimpleNamespace(shape=SHAPE),
        positions=positions,
        prompt_length=PROMPT,
        thinking_end=None,
        length=LENGTH,
        stream=STREAM,
        columns=columns or {},
        key=keys.__getitem__,
        value=values.__getitem__,
        query=queries.__getitem__,
        window=lambda _: None,
        scaling=SCALING.__getitem__,
        tokens=lambda: tokens,
    )


def expected(policy: CompressingPolicy, cached: CacheView, score: Score) -> list[list[list[int]]]:
    """Slots that stay by layer and head: the published rule, one token at a time, on scores averaged by the scope."""
    layers, heads, count = cached.positions.shape
    shape = cached.model.shape
    each = product(range(shape.layers), range(shape.kv_heads), range(count))
    scores = torch.tensor([score(cached, *at) for at in each], dtype=torch.double).view(-1, shape.kv_heads, count)
    scores = scores.mean(0, keepdim=True) if layers == 1 else scores
    scores = scores.mean(1, keepdim=True) if heads == 1 else scores
    choices = zip(cached.positions.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True)
    kept = [rule(policy, positions, own, cached.prompt_length) for positions, own in choices]
    return [kept[layer * heads : (layer + 1) * heads] for layer in range(layers)]


def places(
    policy: CompressingPolicy, positions: list[int], prompt: int, end: int | None = None
) -> tuple[set[int], int]:
    """Slots before the local window that stay in any case, and how many of the others do."""
    older, ratio = range(len(positions) - policy.budget.window), Fraction(str(policy.budget.ratio))
    certain = {slot for slot in older if policy.budget.keep_prompt and positions[slot] < prompt}
    certain |= {slot for slot in older if end is not None and positions[slot] >= end}
    if policy.budget.ratio_over == "thinking":
        return certain, int(ratio * (len(older) - len(certain)))
    return certain, max(0, int(ratio * len(older)) - len(certain))


def rule(
    policy: CompressingPolicy, positions: list[int], scores: list[float], prompt: int, end: int | None = None
) -> list[int]:
    """Slots that stay, one token at a time; a strict budget keeps the oldest of those that stay in any case."""
    certain, room = places(policy, positions, prompt, end)
    older = range(len(positions) - policy.budget.window)
    others = sorted((slot for slot in older if slot not in certain), key=lambda slot: scores[slot], reverse=True)
    chosen = [*sorted(certain), *others[:room]]
    if policy.budget.strict_budget:
        chosen = chosen[: int(Fraction(str(policy.budget.ratio)) * len(older))]
    return sorted(chosen) + list(range(len(older), len(positions)))


def assert_keeps(policy: CompressingPolicy, cached: CacheView, score: Score) -> None:
    """The policy keeps what an independent score makes the rule keep, in every layer and head."""
    assert select_tokens(policy, cached).tolist() == expected(policy, cached, score)
