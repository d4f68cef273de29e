"""The tokens that authors' own code keeps for fixed inputs, with its origin, and the same input for our policies."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting, Shape
from kvatlas.policies import CompressingPolicy
from tests.policies.scenes import Scene, scene

FACTS = json.loads(Path(__file__).with_name("authors.json").read_text())


def inputs(
    seed: int, heads: int, kv_heads: int, tokens: int, size: int, queries: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Keys, values, queries and statistics of one layer, from numpy's legacy generator: the same in every version."""
    random = np.random.RandomState(seed)

    def drawn(*sizes: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(sizes)).float()

    # Keys of few directions, so that some repeat others.
    directions, which = drawn(kv_heads, 6, size), torch.from_numpy(random.randint(6, size=tokens))
    keys = directions[:, which] + 0.5 * drawn(kv_heads, tokens, size)
    values, asking = drawn(kv_heads, tokens, size), drawn(heads, queries, size)
    real, imaginary = drawn(1, heads, size // 2), drawn(1, heads, size // 2)
    statistics = {
        "center_real": real,
        "center_imag": imaginary,
        "norm": (real**2 + imaginary**2).sqrt() + drawn(1, heads, size // 2).abs(),
        "frequency": 100.0 ** -(torch.arange(size // 2) / (size // 2)),
    }
    return keys, values, asking, statistics


def choosing(fact: dict[str, Any], folder: Path) -> tuple[CompressingPolicy, Scene]:
    """The policy of a fact and what it chooses from, with `folder` for files."""
    sizes = fact["input"]
    prompt = fact["prompt"]
    keys, numbers, queries, statistics = inputs(**sizes)
    values = dict(fact["parameters"])
    if fact["policy"] == "triattention":
        save_file(statistics, folder / "statistics.safetensors")
        values["statistics"] = str(folder / "statistics.safetensors")
    policy = policies.from_setting(Setting.from_parameters(fact["policy"], kv_budget=sizes["tokens"], **values))
    shape = Shape(1, sizes["heads"], sizes["kv_heads"], sizes["size"], sizes["size"] * sizes["heads"])
    return policy, replace(
        scene(policy, 0),
        model=SimpleNamespace(shape=shape),
        positions=torch.arange(sizes["tokens"]).expand(*policy.scope.width(shape), -1),
        prompt_length=prompt,
        length=sizes["tokens"],
        key=lambda _: keys,
        value=lambda _: numbers,
        query=lambda _: queries[:, -policy.queries :],
        scaling=lambda _: sizes["size"] ** -0.5,
    )
