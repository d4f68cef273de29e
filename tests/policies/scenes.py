"""A cache of random tensors at the moment of a compression, and the contract once more in plain Python."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.models import Shape
from kvatlas.policies import CacheView, CompressingPolicy, Policy, Step, select_tokens

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32)
GROUP = SHAPE.heads // SHAPE.kv_heads
PROMPT, LENGTH, CACHED, STREAM = 9, 90, 60, 77

#: What each layer multiplies q k by: not 1 / sqrt(head size), and not the same in all.
SCALING = (0.25, 0.6)

#: Score of one token: (cached, layer, KV head, slot) -> float.
Score = Callable[[CacheView, int, int, int], float]


def make(name: str, **changes: Any) -> CompressingPolicy:
    """A policy that keeps the 10 newest tokens, and 20 of the 50 older ones."""
    policy = policies.of(Setting.of(name, **{"kv_budget": CACHED, "local_window": 10, "ratio": 0.4, **changes}))
    assert isinstance(policy, CompressingPolicy)
    return policy


def scene(policy: Policy, seed: int, columns: Mapping[str, Tensor] | None = None) -> CacheView:
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
    return CacheView(
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
    """Slots that stay by layer and head: the published rule, one token at a time."""
    return [
        [
            rule(policy, cached.positions[layer, head].tolist(), scores, cached.prompt_length)
            for head, scores in enumerate(rows)
        ]
        for layer, rows in enumerate(shared_scores(cached, score))
    ]


def shared_scores(cached: CacheView, score: Score) -> list[list[list[float]]]:
    """Scores by layer, head and slot, averaged as the scope says."""
    layers, heads, count = cached.positions.shape
    shape = cached.model.shape
    scores = [
        [[score(cached, layer, head, slot) for slot in range(count)] for head in range(shape.kv_heads)]
        for layer in range(shape.layers)
    ]
    results = []
    for layer in range(layers):
        rows = []
        for head in range(heads):
            shared = [
                scores[a][b]
                for a in (range(shape.layers) if layers == 1 else [layer])
                for b in (range(shape.kv_heads) if heads == 1 else [head])
            ]
            rows.append([sum(item[slot] for item in shared) / len(shared) for slot in range(count)])
        results.append(rows)
    return results


def places(policy: CompressingPolicy, positions: list[int], prompt: int) -> tuple[set[int], int]:
    """Slots before the local window that stay in any case, and how many of the others do."""
    older = range(len(positions) - policy.local_window)
    certain = {slot for slot in older if policy.keep_prompt and positions[slot] < prompt}
    room = (
        int(policy.ratio * (len(older) - len(certain)) + 1e-9)
        if policy.ratio_over == "thinking"
        else int(policy.ratio * len(older) + 1e-9) - len(certain)
    )
    return certain, max(0, room)


def rule(policy: CompressingPolicy, positions: list[int], scores: list[float], prompt: int) -> list[int]:
    """Slots that stay, one token at a time."""
    certain, room = places(policy, positions, prompt)
    older = range(len(positions) - policy.local_window)
    others = sorted((slot for slot in older if slot not in certain), key=lambda slot: scores[slot], reverse=True)
    return sorted([*certain, *others[:room]]) + list(range(len(older), len(positions)))


class Noted:
    """Columns of one sequence, as the loop keeps them."""

    def __init__(self, policy: CompressingPolicy, layers: int, heads: int, slots: int) -> None:
        self.policy = policy
        self.held = {name: torch.zeros(1, layers, heads, slots) for name in policy.columns}

    def show(self, positions: Tensor, attention: Tensor | None = None, hidden: Tensor | None = None) -> None:
        """One step: `attention` [1, layers, heads, slots], `hidden` [entered, size]; several tokens are a prompt."""
        self.entered = positions
        states = None if hidden is None else hidden[None]
        prompt = len(positions) if len(positions) > 1 else None
        self.policy.observe(Step(None, positions[None], states, attention, self, prompt))  # type: ignore[arg-type]

    def enter(self, name: str, values: Tensor) -> None:
        self.held[name][..., self.entered] = values[:, None, None].to(torch.float32)

    def read(self, name: str) -> Tensor:
        return self.held[name].clone()

    def write(self, name: str, values: Tensor) -> None:
        self.held[name] = values


def assert_keeps(policy: CompressingPolicy, cached: CacheView, score: Score) -> None:
    """The policy keeps what an independent score makes the rule keep, in every layer and head."""
    assert select_tokens(policy, cached).tolist() == expected(policy, cached, score)
