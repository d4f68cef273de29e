"""Policies against what their authors' own code keeps for fixed inputs, recorded in authors.json with its origin."""

import json
from dataclasses import dataclass
from pathlib import Path
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
from tests.conformance.agreement import Results

pytestmark = [pytest.mark.slow, pytest.mark.conformance]

FACTS = json.loads(Path(__file__).with_name("authors.json").read_text())


@dataclass(frozen=True)
class Inputs:
    """Random numbers of one layer: numpy's legacy generator gives the same ones in every version."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    statistics: dict[str, Tensor]


def inputs(seed: int, heads: int, kv_heads: int, tokens: int, size: int, queries: int) -> Inputs:
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
    return Inputs(keys, values, asking, statistics)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["name"])
def test_policies_keep_what_their_authors_code_keeps(fact: dict[str, Any], results: Results, tmp_path: Path) -> None:
    sizes, prompt = fact["input"], fact["prompt"]
    given = inputs(**sizes)
    values = dict(fact["parameters"])
    if fact["policy"] == "triattention":
        save_file(given.statistics, tmp_path / "statistics.safetensors")
        values["statistics"] = str(tmp_path / "statistics.safetensors")
    policy = policies.of(Setting.of(fact["policy"], kv_budget=sizes["tokens"], **values))
    assert isinstance(policy, CompressingPolicy)
    shape = Shape(1, sizes["heads"], sizes["kv_heads"], sizes["size"], sizes["size"] * sizes["heads"])

    class Model:
        def __init__(self) -> None:
            self.shape = shape

    cached = CacheView(
        model=Model(),  # type: ignore[arg-type]
        positions=torch.arange(sizes["tokens"]).expand(1, sizes["kv_heads"], -1),
        prompt_length=prompt,
        thinking_end=None,
        length=sizes["tokens"],
        stream=0,
        columns={},
        key=lambda _: given.keys,
        value=lambda _: given.values,
        query=lambda _: given.queries[:, -policy.queries :],
        window=lambda _: None,
        scaling=lambda _: sizes["size"] ** -0.5,
        tokens=lambda: torch.zeros(sizes["tokens"], dtype=torch.long),
    )
    peer = f"the authors' code, {fact['origin']['repository']} at {fact['origin']['commit'][:7]}"
    kept, scores = select_tokens(policy, cached).tolist(), policy.score(cached)
    assert results.compared(policy, peer, kept, [fact["kept"]], scores)
