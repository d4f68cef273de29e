"""The promises of the statistics on hard designs; `make deep` runs more of them, bench/calibration.py all."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvatlas.stats.map_tests import levels_of, map_tests
from kvatlas.stats.table import GradeMatrix

BENCH = Path(__file__).parents[2] / "bench"


def deep(*values: Any) -> Any:
    """A case of `make deep`."""
    return pytest.param(*values, marks=pytest.mark.deep)


@pytest.fixture(scope="module", autouse=True)
def _bench_is_importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    try:
        yield
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def exact_errors(_bench_is_importable: None) -> ModuleType:
    return importlib.import_module("exact_errors")


@pytest.fixture(scope="module")
def simulations(_bench_is_importable: None) -> ModuleType:
    return importlib.import_module("simulations")


@pytest.fixture(scope="module")
def designs(_bench_is_importable: None) -> dict[str, dict[str, Any]]:
    return importlib.import_module("designs").TUNING


def three_standard_errors(chance: float, rounds: int) -> float:
    return 3 * float(np.sqrt(chance * (1 - chance) / rounds))


# Exact sums.


def test_limits_err_at_most_at_their_level_whatever_the_true_loss(exact_errors: ModuleType) -> None:
    # Quantiles are approximate.
    assert max(row["over_level"] for row in exact_errors.limit_errors()) <= 0.0005


def test_limits_over_unlike_benchmarks_err_at_most_at_their_level(exact_errors: ModuleType) -> None:
    rows = exact_errors.limit_errors_over_benchmarks([(30, 30), (8, 198)], [0.05])
    assert max(row["over_level"] for row in rows) <= 0.0005


@pytest.mark.parametrize("settings", [1, deep(3)])
def test_a_setting_just_beyond_the_margin_is_kept_in_at_most_5_percent(exact_errors: ModuleType, settings: int) -> None:
    rows = list(exact_errors.recommendation_errors(margins=[0.03], sequences=[settings]))
    assert max(row["error"] for row in rows) <= 0.05
    # The bound is nearly reached, so the search has found the hard cases.
    assert min(row["error"] for row in rows) > 0.045


# Simulations with fixed seeds.


def simulate(function: Any, designs: dict[str, dict[str, Any]], kind: str, name: str, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = function(designs[kind][name], np.random.default_rng(7), rounds)
    return row


@pytest.mark.parametrize(
    "name",
    [
        "unseen collapse at 2.5 %, n 120",
        deep("2 points lost, n 600, k 1"),
        "equal, homogeneous .5, n 8, k 1",
        "unseen collapse in 30 + 30 of 30 + 30 + 40 + 198",
    ],
)
def test_differences_of_two_settings_are_covered(
    simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str
) -> None:
    row = simulate(simulations.simulate_differences, designs, "two settings", name, 2_000)
    chance_of_error = 0.025 + three_standard_errors(0.025, 2_000)
    assert row["coverage"] >= 0.94
    assert max(row["truth_above"], row["truth_below"]) <= chance_of_error
    assert row["contradictions"] == 0


@pytest.mark.parametrize("name", ["lost and gained wholly, n 120", "unseen collapse in 8 of 8 + 198"])
def test_differences_of_policies_are_covered(
    simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str
) -> None:
    row = simulate(simulations.simulate_differences, designs, "policies", name, 300)
    assert row["coverage"] >= 0.94
    assert row["contradictions"] == 0


@pytest.mark.parametrize(
    "name", [deep("rows alike, columns more alike"), "alike, AIME, n 30, k 16", deep("8 + 198 same columns, .9")]
)
def test_levels_that_could_be_exchanged_are_told_apart_in_5_percent(
    simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str
) -> None:
    row = simulate(simulations.simulate_maps, designs, "maps", name, 150)
    assert row["false_alarm_exchangeable"] <= 0.05 + three_standard_errors(0.05, 150)
    assert row["contradictions"] == 0


@pytest.mark.parametrize(
    "name",
    [deep("trunk, AIME, n 30, k 4"), deep("trunk, .95, n 60, k 1"), "trunk by columns alone, .97, 10 levels"],
)
def test_levels_that_share_trunks_are_told_apart_in_10_percent(
    simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str
) -> None:
    row = simulate(simulations.simulate_maps, designs, "maps", name, 150)
    assert row["false_alarm_trunk"] <= 0.10
    assert row["contradictions"] == 0


def test_a_level_that_loses_is_found_and_its_limits_exclude_0(
    simulations: ModuleType, designs: dict[str, dict[str, Any]]
) -> None:
    row = simulate(simulations.simulate_maps, designs, "maps", "column loses 5 points, n 240, k 4", 40)
    assert row["power"] >= 0.9
    assert row["proven_levels"] > 0
    assert row["contradictions"] == 0


def test_maps_are_judged_as_verdicts_judge_them(simulations: ModuleType, designs: dict[str, dict[str, Any]]) -> None:
    design = designs["maps"]["trunk, .5, n 60, k 1"]
    means = design.draw(np.random.default_rng(3))
    places = tuple(zip(design.rows.tolist(), design.columns.tolist(), strict=True))
    axes = ("rows", "columns")
    p, tests = simulations.tests_of_map(means, design.strata, levels_of(places, axes), seed=0)
    found = map_tests(GradeMatrix.from_means(places, means, design.strata), axes)
    assert found.omnibus is not None
    # Random orders differ in number.
    assert p == pytest.approx(found.omnibus.p, abs=0.05)
    assert [effect.axis for effect in found.effects] == list(tests)
    for effect in found.effects:
        values = [contrast.value for _, contrast in effect.levels]
        assert [contrast.value for contrast in tests[effect.axis]] == pytest.approx(values)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["just beyond in 30 + 30", "mixed, not in order of cost, n 60"])
def test_settings_beyond_the_margin_are_kept_in_5_percent(
    simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str
) -> None:
    row = simulate(simulations.simulate_sequences, designs, "sequences", name, 150)
    assert row["kept_but_breaks"] <= 0.05 + three_standard_errors(0.05, 150)
    assert row["broken_but_keeps"] <= 0.025


@pytest.mark.parametrize("name", [deep("n 40, k 5, L0 3, few shallow"), "n 60, k 8, L0 200, beta .3"])
def test_depths_are_covered(simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str) -> None:
    assert simulate(simulations.simulate_depths, designs, "depths", name, 500)["coverage"] >= 0.92


@pytest.mark.parametrize("name", ["90 % right, n 30, rare wrong costs 10 times", deep("half right, n 240, k 1")])
def test_prices_are_covered(simulations: ModuleType, designs: dict[str, dict[str, Any]], name: str) -> None:
    assert simulate(simulations.simulate_prices, designs, "prices", name, 200)["nothing_false_said"] >= 0.92
