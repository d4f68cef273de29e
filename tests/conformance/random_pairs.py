"""Policies and presses of kvpress on caches of random numbers, for presses that need no model."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas.policies import select_tokens
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
    """A layer of a pair: the slots that stay here and there [KV heads, kept]."""

    pair: RandomPair
    ours: Tensor
    theirs: Tensor
    #: Our scores [KV heads, cached].
    scores: Tensor


def compare(folder: Path) -> list[Case]:
    """Run the press of every pair on the same numbers, with `folder` for files."""
    stored: dict[str, Tensor] = {}
    asked = {}
    found = []
    for number, pair in enumerate(PAIRS):
        values = {"local_window": 1, "keep_prompt": False, **pair.parameters}
        policy = make(pair.policy, **values)
        cached = scene(policy, pair.seed)
        # No token was lost before: there sinks are the first cached tokens.
        positions = torch.arange(CACHED).expand(cached.positions.shape)
        cached = replace(cached, positions=positions, length=CACHED)

        selected = select_tokens(policy, cached)
        scores = policy.score(cached)
        for layer in range(SHAPE.layers):
            case = f"{number}.{layer}"
            kept = selected[min(layer, len(selected) - 1)].expand(SHAPE.kv_heads, -1)
            found.append((case, pair, kept, scores[layer].expand(SHAPE.kv_heads, -1), cached.key(layer)))
            asked[case] = (kept.shape[1], pair.arguments)
            for name, tensor in {"keys": cached.key(layer), "values": cached.value(layer)}.items():
                stored[f"{case}.{name}"] = tensor.float().expand(SHAPE.kv_heads, *tensor.shape[1:]).contiguous()

    save_file(stored, folder / "in", {"cases": json.dumps(asked)})
    program = Path(__file__).with_name("kvpress_random.py")
    environment.run(str(program), str(folder / "in"), str(folder / "out"))
    left = load_file(folder / "out")

    cases = []
    for case, pair, kept, scores, keys in found:
        # Random keys are all different.
        theirs = (left[f"{case}.keys"][:, :, None] == keys[:, None]).all(-1).int().argmax(-1)
        cases.append(Case(pair, kept, theirs.sort(-1).values, scores))
    return cases


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return a line of the table for each pair; the difference is that of values, as a share of the greatest."""
    cases = compare(folder)
    lines = []
    for pair in PAIRS:
        shares = []
        for case in cases:
            if case.pair is not pair:
                continue
            for ours, theirs in zip(case.ours.tolist(), case.theirs.tolist(), strict=True):
                shares.append(len({*ours} & {*theirs}) / len({*ours} | {*theirs}))
        lines.append(
            {
                "policy": pair.policy,
                "parameters": pair.parameters,
                "peer": f"kvpress {pair.press}",
                "on": "random numbers",
                "jaccard": round(sum(shares) / len(shares), 4),
                "least_jaccard": round(min(shares), 4),
                "score_difference": None,
            }
        )
    return lines
