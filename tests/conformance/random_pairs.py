"""Policies and presses of kvpress on caches of random numbers, for presses that need no model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas.policies.selection import make_selection
from tests.conformance import environment
from tests.policies.scenes import CACHED, SHAPE, make, scene


@dataclass(frozen=True)
class RandomPair:
    """A policy's parameters and the press that does the same, with the seed of the cache."""

    policy: str
    press: str
    parameters: dict[str, Any]
    arguments: dict[str, Any]
    seed: int


PAIRS = [
    # kvpress chooses once for each layer, by the mean over its KV heads.
    *(
        RandomPair("cam", "CAMPress", {"scope": "layer", "neighbours": count}, {"neighbours": count}, count)
        for count in (1, 4, 32)
    ),
    # Partitions are the same where those after the sinks are whole.
    *(
        RandomPair(
            "lagkv", "LagKVPress", {"sinks": sinks, "local_window": lag}, {"n_sink": sinks, "lag_size": lag}, lag
        )
        for sinks, lag in ((4, 8), (4, 14), (0, 20))
    ),
]


@dataclass(frozen=True)
class Case:
    """A layer of a pair: the slots that stay here and there [KV heads, kept], and the values of both."""

    pair: RandomPair
    ours: Tensor
    theirs: Tensor
    our_values: Tensor
    their_values: Tensor
    #: Our scores [KV heads, cached], and the values before.
    scores: Tensor
    values_before: Tensor


def compare(folder: Path) -> list[Case]:
    """Run the press of every pair on the same numbers, with `folder` for files."""
    stored: dict[str, Tensor] = {}
    asked = {}
    found = []
    for number, pair in enumerate(PAIRS):
        values = {"local_window": 1, "keep_prompt": False, **pair.parameters}
        policy = make(pair.policy, **values)
        cached = scene(policy, pair.seed)
        if pair.policy == "lagkv":
            # No token was lost before: there sinks are the first cached tokens.
            positions = torch.arange(CACHED).expand(cached.positions.shape)
            cached = replace(cached, positions=positions, length=CACHED)
        mass = torch.rand(cached.positions.shape, generator=torch.Generator().manual_seed(pair.seed))
        # The newest token stays in any case, there by its score.
        mass[..., -1] = 2.0
        if policy.columns:
            cached = replace(cached, columns={"mass": mass})

        selection = make_selection(policy, cached)
        merged = selection.merged_values(policy, cached)
        result: Any = policy.score(cached)
        scores = result.scores if policy.merges else result
        for layer in range(SHAPE.layers):
            case = f"{number}.{layer}"
            kept = selection.kept[min(layer, len(selection.kept) - 1)].expand(SHAPE.kv_heads, -1)
            before = cached.value(layer)
            new = merged[layer] if merged else before.gather(1, kept[..., None].expand(-1, -1, SHAPE.head_dim))
            found.append((case, pair, kept, new, scores[layer].expand(SHAPE.kv_heads, -1), before, cached.key(layer)))
            asked[case] = (pair.press, kept.shape[1], pair.arguments)
            numbers = {
                "keys": cached.key(layer),
                "values": before,
                "mass": mass[layer],
                "draws": cached.uniform()[layer],
            }
            for name, tensor in numbers.items():
                stored[f"{case}.{name}"] = tensor.float().expand(SHAPE.kv_heads, *tensor.shape[1:]).contiguous()

    save_file(stored, folder / "in", {"cases": json.dumps(asked)})
    program = Path(__file__).with_name("kvpress_random.py")
    environment.run(str(program), str(folder / "in"), str(folder / "out"))
    left = load_file(folder / "out")

    cases = []
    for case, pair, kept, new, scores, before, keys in found:
        # Random keys are all different.
        theirs = (left[f"{case}.keys"][:, :, None] == keys[:, None]).all(-1).int().argmax(-1)
        order = theirs.argsort(-1)
        their_values = left[f"{case}.values"].gather(1, order[..., None].expand(-1, -1, SHAPE.head_dim))
        cases.append(Case(pair, kept, theirs.gather(1, order), new, their_values, scores, before))
    return cases


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return a line of the table for each pair; the difference is that of values, as a share of the greatest."""
    cases = compare(folder)
    lines = []
    for pair in PAIRS:
        shares = []
        apart = 0.0
        for case in cases:
            if case.pair is not pair:
                continue
            for ours, theirs in zip(case.ours.tolist(), case.theirs.tolist(), strict=True):
                shares.append(len({*ours} & {*theirs}) / len({*ours} | {*theirs}))
            if torch.equal(case.ours, case.theirs):
                difference = (case.our_values - case.their_values).abs().max() / case.their_values.abs().max()
                apart = max(apart, float(difference))
        lines.append(
            {
                "policy": pair.policy,
                "parameters": pair.parameters,
                "peer": f"kvpress {pair.press}",
                "on": "random numbers",
                "jaccard": round(sum(shares) / len(shares), 4),
                "least_jaccard": round(min(shares), 4),
                "score_difference": None,
                "value_difference": float(f"{apart:.2g}"),
            }
        )
    return lines
