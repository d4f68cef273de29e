"""Policies against kvpress' presses, on the same keys, values, states and attention, all layers and heads.

An exported setting is read by kvpress itself.
"""

from typing import Any

import pytest

from kvatlas.core import Setting
from kvatlas.deploy.engine_config import export_setting
from tests.conformance import environment
from tests.conformance.pairs import PAIRS, Theirs, compare, their_results
from tests.conformance.real import Activations, activations, real_model

pytestmark = [pytest.mark.slow, pytest.mark.conformance]
#: Scores may differ by this share of the greatest: sums in other orders.
TOLERANCE = 1e-4
#: Scores of two tokens that differ by less than this share of them are a tie.
EQUAL = 1e-5


@pytest.fixture(scope="module")
def real() -> Activations:
    """Activations of the real model on its own text."""
    return activations(real_model(environment.CACHE / "smollm2"))


@pytest.fixture(scope="module")
def theirs(real: Activations, tmp_path_factory: pytest.TempPathFactory) -> list[Theirs]:
    return their_results(real, tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: str(PAIRS[number]))
def test_policies_keep_what_presses_keep(real: Activations, theirs: list[Theirs], number: int) -> None:
    pair = PAIRS[number]
    compared = compare(real, pair, theirs[number])
    if pair.factor is not None:
        finite = compared.our_scores.isfinite()
        apart = (compared.our_scores * pair.factor - compared.their_scores)[finite].abs()
        assert apart.max() < TOLERANCE * compared.their_scores[finite].abs().max()
    scores = compared.our_scores.flatten(0, 1)
    for own, other, score in zip(compared.ours.flatten(0, 1), compared.theirs.flatten(0, 1), scores, strict=True):
        apart = score[(own != other)[: len(score)]]
        # Only tokens that score alike may differ.
        assert not len(apart) or apart.max() - apart.min() <= EQUAL * apart.abs().max()


@pytest.mark.parametrize(
    ("policy", "press", "values"),
    [
        ("snapkv", "SnapKVPress", {"queries": 16, "kernel": 5, "pooling": "avg", "local_window": 16}),
        ("tova", "TOVAPress", {"local_window": 1}),
        ("keydiff", "KeyDiffPress", {"local_window": 1}),
        ("knorm", "KnormPress", {"local_window": 1}),
        ("expected_attention", "ExpectedAttentionPress", {"queries": 32, "sinks": 6, "future": 100, "local_window": 1}),
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
    named = {"kernel": "kernel_size", "sinks": "n_sink", "future": "n_future_positions"}
    if policy == "snapkv":
        named["queries"] = "window_size"
    for ours, theirs in named.items():
        assert ours not in values or f"'{theirs}': {values[ours]}" in own
