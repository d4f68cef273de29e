"""Policies against kvpress' presses, on the same keys, values, states and attention, all layers and heads.

An exported setting is read by kvpress itself.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvatlas import policies
from kvatlas.core import Setting
from kvatlas.deploy.export import export_setting
from kvatlas.policies import CompressingPolicy, select_tokens
from tests.conformance import environment
from tests.conformance.real import Activations, activations, real_model

pytestmark = [pytest.mark.slow, pytest.mark.conformance]
#: Scores may differ by this share of the greatest: sums in other orders.
TOLERANCE = 1e-4
#: Scores of two tokens that differ by less than this share of them are a tie.
EQUAL = 1e-5


@dataclass(frozen=True)
class Pair:
    """A policy's parameters and the press that does the same. kvpress knows no prompt, so none is protected."""

    policy: str
    press: str
    arguments: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    ratio: float = 0.3
    #: Whether the cache lost tokens before.
    again: bool = False
    #: What our score is multiplied by to give theirs; None where theirs says no more than which tokens stay.
    factor: float | None = 1.0
    #: Whether their means over the queries that saw a token are compared as sums.
    as_sums: bool = False

    def __str__(self) -> str:
        return f"{self.policy}-{self.ratio}-{'again' if self.again else 'first'}"

    @property
    def selection(self) -> CompressingPolicy:
        values = {"kv_budget": 300, "local_window": 1, "ratio": self.ratio, "keep_prompt": False, **self.parameters}
        return policies.from_setting(Setting.from_parameters(self.policy, **values))

    @property
    def scene(self) -> str:
        return f"{self.selection.scope}-{self.again}"


def snapkv(queries: int, kernel: int) -> dict[str, Any]:
    """Their SnapKV averages over queries where the paper's listing sums, and over neighbours; so can ours."""
    return {
        "policy": "snapkv",
        "press": "SnapKVPress",
        "arguments": {"window_size": queries, "kernel_size": kernel},
        "parameters": {"queries": queries, "local_window": queries, "kernel": kernel, "pooling": "avg"},
        "factor": 1 / queries,
    }


PAIRS = [
    *(
        Pair(**pair, again=again, ratio=ratio)
        for again in (False, True)
        for ratio in (0.1, 0.5)
        for pair in (
            {"policy": "window", "press": "StreamingLLMPress", "arguments": {"n_sink": 0}, "factor": None},
            {"policy": "streaming", "press": "StreamingLLMPress", "arguments": {"n_sink": 4}, "factor": None},
            snapkv(32, 7),
            snapkv(64, 5),
            {"policy": "tova", "press": "TOVAPress"},
            {"policy": "keydiff", "press": "KeyDiffPress"},
        )
    ),
    *(Pair("h2o", "ObservedAttentionPress", ratio=ratio, as_sums=True) for ratio in (0.1, 0.5)),
    *(Pair("h2o", "ObservedAttentionPress", parameters={"per_query": True}, ratio=ratio) for ratio in (0.1, 0.5)),
    # Of the queries of all tokens, as the press takes them; it keeps the first ones by a score of its own.
    *(
        Pair("expected_attention", "ExpectedAttentionPress", {"n_sink": 0}, {"sinks": 0, "queries": 10_000}, ratio)
        for ratio in (0.1, 0.5)
    ),
]


@pytest.fixture(scope="module")
def real() -> Activations:
    """Activations of the real model on its own text."""
    return activations(real_model(environment.CACHE / "smollm2"))


@pytest.fixture(scope="module")
def theirs(real: Activations, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tensor, Tensor]]:
    """The tokens that the press of each pair keeps, best first, and its scores [layers, KV heads, ...]."""
    folder = tmp_path_factory.mktemp("peer")
    layers = range(real.model.shape.layers)
    stored = {f"states.{layer}": real.states[layer] for layer in layers}
    stored |= {f"attention.{layer}": real.weights(layer).float() for layer in layers}
    for pair in {pair.scene: pair for pair in PAIRS}.values():
        cached = real.cached(pair.selection, pair.again)
        stored |= {f"{pair.scene}.keys.{layer}": cached.key(layer) for layer in layers}
        stored |= {f"{pair.scene}.values.{layer}": cached.value(layer) for layer in layers}
    asked = {
        number: (pair.press, pair.arguments, pair.scene, ours(real, pair).shape[-1])
        for number, pair in enumerate(PAIRS)
    }
    save_file({name: part.contiguous() for name, part in stored.items()}, folder / "in", {"presses": json.dumps(asked)})
    program = Path(__file__).with_name("kvpress_peer.py")
    environment.run(str(program), str(real.model.folder), str(folder / "in"), str(folder / "out"))
    result = load_file(folder / "out")

    def stacked(number: int, what: str) -> Tensor:
        return torch.stack([result[f"{number}.{what}.{layer}"] for layer in layers])

    return [(stacked(number, "kept"), stacked(number, "scores")) for number in asked]


def ours(real: Activations, pair: Pair) -> Tensor:
    """Kept slots in each head: one that shares its layer's or the model's choice keeps what that keeps."""
    kept = select_tokens(pair.selection, real.cached(pair.selection, pair.again))
    return kept.expand(real.model.shape.layers, real.model.shape.kv_heads, -1)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: str(PAIRS[number]))
def test_policies_keep_what_presses_keep(real: Activations, theirs: list[tuple[Tensor, Tensor]], number: int) -> None:
    pair, (ranked, their_scores) = PAIRS[number], theirs[number]
    policy, kept = pair.selection, ours(real, pair)
    cached = real.cached(policy, pair.again)
    length, older = cached.positions.shape[-1], cached.positions.shape[-1] - policy.local_window
    scores = policy.score(cached).double().expand(*their_scores.shape)
    if pair.as_sums:
        their_scores = their_scores.double() * torch.arange(length, 0, -1)
        ranked = their_scores.argsort(-1, descending=True)[..., : kept.shape[-1]]
    if pair.factor is not None:
        ours_, theirs_ = scores[..., :older] * pair.factor, their_scores[..., :older].double()
        assert (ours_ - theirs_).abs().max() < TOLERANCE * theirs_.abs().max()
    wanted = under_contract(ranked, length, policy.local_window)
    for own, other, score in zip(kept.flatten(0, 1), wanted.flatten(0, 1), scores.flatten(0, 1), strict=True):
        apart = score[sorted(set(own.tolist()) ^ set(other.tolist()))]
        # Only tokens that score alike may differ.
        assert not len(apart) or apart.max() - apart.min() <= EQUAL * apart.abs().max()


def under_contract(ranked: Tensor, cached: int, window: int) -> Tensor:
    """Return the tokens that a press keeps, best first, under the rule that the local window stays in any case."""
    newest = torch.arange(cached - window, cached)
    rows = [torch.cat([row[row < cached - window][: len(row) - window], newest]) for row in ranked.flatten(0, 1)]
    return torch.stack(rows).view(ranked.shape)


@pytest.mark.parametrize(
    ("policy", "press", "values"),
    [
        ("snapkv", "SnapKVPress", {"queries": 16, "kernel": 5, "pooling": "avg", "local_window": 16}),
        ("tova", "TOVAPress", {"local_window": 1}),
        ("keydiff", "KeyDiffPress", {"local_window": 1}),
        ("streaming", "StreamingLLMPress", {"sinks": 6, "local_window": 32}),
        ("random", "RandomPress", {"local_window": 1}),
    ],
)
def test_kvpress_reads_what_is_exported(policy: str, press: str, values: dict[str, Any]) -> None:
    common = {"kv_budget": 512, "every": 64, "every_from": "prompt", "keep_prompt": False}
    text = export_setting(Setting.from_parameters(policy, **common, **values), "kvpress").text
    shown = (
        "print(type(press.base_press).__name__, press.compression_interval, press.target_size, vars(press.base_press))"
    )
    name, interval, size, own = environment.run("-c", f"{text}\n{shown}").strip().splitlines()[-1].split(" ", 3)
    assert (name, interval, size) == (press, "64", "512")
    for theirs, ours in (("window_size", "queries"), ("kernel_size", "kernel"), ("n_sink", "sinks")):
        assert ours not in values or f"'{theirs}': {values[ours]}" in own
