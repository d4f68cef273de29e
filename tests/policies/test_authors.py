"""Policies against what their authors' own code keeps for fixed inputs, recorded in authors.json with its origin."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.models import Shape
from kvatlas.policies import CacheView, CompressingPolicy, select_tokens

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


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_policies_keep_what_their_authors_code_keeps(fact: dict[str, Any], tmp_path: Path) -> None:
    sizes, prompt = fact["input"], fact["prompt"]
    keys, numbers, queries, statistics = inputs(**sizes)
    values = dict(fact["parameters"])
    if fact["policy"] == "triattention":
        save_file(statistics, tmp_path / "statistics.safetensors")
        values["statistics"] = str(tmp_path / "statistics.safetensors")
    policy = policies.of(Setting.of(fact["policy"], kv_budget=sizes["tokens"], **values))
    assert isinstance(policy, CompressingPolicy)
    shape = Shape(1, sizes["heads"], sizes["kv_heads"], sizes["size"], sizes["size"] * sizes["heads"])
    cached = CacheView(
        model=SimpleNamespace(shape=shape),
        positions=torch.arange(sizes["tokens"]).expand(1, sizes["kv_heads"], -1),
        prompt_length=prompt,
        thinking_end=None,
        length=sizes["tokens"],
        stream=0,
        columns={},
        key=lambda _: keys,
        value=lambda _: numbers,
        query=lambda _: queries[:, -policy.queries :],
        window=lambda _: None,
        scaling=lambda _: sizes["size"] ** -0.5,
        tokens=lambda: torch.zeros(sizes["tokens"], dtype=torch.long),
    )
    (ours,), scores = select_tokens(policy, cached).tolist(), policy.score(cached)[0].double()
    for head, (kept, theirs) in enumerate(zip(ours, fact["kept"], strict=True)):
        apart = scores[head, sorted(set(kept) ^ set(theirs))]
        # torch.topk breaks ties arbitrarily.
        assert len(kept) == len(theirs)
        assert not len(apart) or apart.max() - apart.min() <= 1e-5 * apart.abs().max()
