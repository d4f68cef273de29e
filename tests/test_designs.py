"""The designs in bench/ by which statistics are judged: what they say is true is what large draws give."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.deep

BENCH = Path(__file__).parents[1] / "bench"
SOURCES = (("designs", "TUNING"), ("designs_kept", "KEPT"))
#: Between draws and truth, in standard errors; about 300 designs are checked with a fixed seed.
TOLERANCE = 5.0
Designs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=SOURCES, ids=[module for module, _ in SOURCES])
def designs(request: pytest.FixtureRequest) -> Iterator[Designs]:
    module, lists = request.param
    sys.path.insert(0, str(BENCH))
    try:
        yield getattr(importlib.import_module(module), lists)
    finally:
        sys.path.remove(str(BENCH))


def over_benchmarks(values: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Return means over problems, the last axis, with equal weight for each benchmark; NaN is left out."""
    return np.mean([np.nanmean(values[..., strata == benchmark], -1) for benchmark in np.unique(strata)], axis=0)


def agree(draws: np.ndarray, truth: np.ndarray | float, name: str) -> None:
    """Fail if the mean of draws (first axis) is not the truth. A rare event may be absent from all draws."""
    error = draws.std(0, ddof=1) / np.sqrt(len(draws))
    difference = np.abs(draws.mean(0) - truth)
    assert np.all(difference <= TOLERANCE * error + 2e-3), f"{name}: {draws.mean(0)} for {truth}"


@pytest.mark.parametrize("kind", ["two settings", "policies"])
def test_differences_have_their_true_mean(designs: Designs, kind: str) -> None:
    rng = np.random.default_rng(1)
    rounds = 150 if kind == "two settings" else 25
    for name, design in designs[kind].items():
        first, second = design.draw(rng, rounds)
        assert first.shape == second.shape == (rounds, sum(design.sizes))
        assert min(first.min(), second.min()) >= 0
        assert max(first.max(), second.max()) <= 1 + 1e-9
        agree(over_benchmarks(second - first, design.strata), design.truth, name)


def test_cells_have_their_true_means(designs: Designs) -> None:
    rng = np.random.default_rng(2)
    for name, design in designs["maps"].items():
        grades = np.array([design.draw(rng) for _ in range(15)])
        assert grades.shape[1:] == (len(design.strata), len(design.rows))
        assert len(design.rows) == len(design.columns) == len(design.truth)
        agree(over_benchmarks(grades.swapaxes(1, 2), design.strata), design.truth, name)


def test_an_exchangeable_axis_is_null_and_a_null_axis_has_equal_means(designs: Designs) -> None:
    for name, design in designs["maps"].items():
        assert design.exchangeable <= design.null <= design.equal_means <= design.axes, name
    assert any(design.null - design.exchangeable for design in designs["maps"].values())
    assert any(design.equal_means - design.null for design in designs["maps"].values())
    assert any(design.axes - design.equal_means for design in designs["maps"].values())


def test_levels_of_an_exchangeable_axis_are_alike_in_variance_and_covariance(designs: Designs) -> None:
    rng = np.random.default_rng(3)
    for name, design in designs["maps"].items():
        for axis in design.exchangeable:
            levels = design.rows if axis == "rows" else design.columns
            if len(design.rows) != design.shape[0] * design.shape[1]:
                continue
            grades = np.concatenate([design.draw(rng) for _ in range(4000 // len(design.strata) + 1)])
            means = np.stack([grades[:, levels == level].mean(1) for level in np.unique(levels)], 1)
            centred = means - means.mean(1, keepdims=True)
            powers = centred**2
            error = powers.std(0).max() / np.sqrt(len(powers)) * 2
            assert np.ptp(powers.mean(0)) <= TOLERANCE * error + 1e-9, f"{name}, {axis}"


def test_sequences_lose_what_they_say(designs: Designs) -> None:
    rng = np.random.default_rng(4)
    for name, design in designs["sequences"].items():
        differences = np.array([design.draw(rng) for _ in range(30)])
        assert differences.shape[1:] == (len(design.truth), len(design.strata))
        assert len(design.policy) == len(design.truth)
        agree(-over_benchmarks(differences, design.strata), design.truth, name)


def test_chains_are_solved_with_the_chance_of_their_depth(designs: Designs) -> None:
    rng = np.random.default_rng(5)
    for name, design in designs["depths"].items():
        residuals = []
        for _ in range(80):
            grades, depths = design.draw(rng)
            residuals.append(np.mean(np.nanmean(grades, 1) - np.exp(-depths / design.truth)))
        agree(np.array(residuals), 0.0, name)


def test_prices_have_their_true_ratio(designs: Designs) -> None:
    rng = np.random.default_rng(6)
    for name, design in designs["prices"].items():
        draws = np.array([over_benchmarks(design.draw(rng), design.strata) for _ in range(150)])
        true_means = design.means.mean(0)
        agree(draws / true_means, 1.0, name)
        cost, right, base_cost, base_right = true_means
        assert design.truth == pytest.approx(cost / right / (base_cost / base_right))


def test_kept_designs_have_other_structures() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        tuning = importlib.import_module("designs").TUNING
        kept = importlib.import_module("designs_kept").KEPT
    finally:
        sys.path.remove(str(BENCH))
    for kind, designs in kept.items():
        assert len(designs) >= len(tuning[kind])
        assert not set(designs.values()) & set(tuning[kind].values())
        parts = set().union(*[_structures(design) for design in designs.values()])
        known = set().union(*[_structures(design) for design in tuning[kind].values()])
        assert len(parts - known) >= 3, kind


def _structures(design: Any) -> set[str]:
    """Return the names of the classes that a design is made of."""
    parts = [design, getattr(design, "structure", design)]
    changes = [getattr(design, "change", None), *getattr(design, "changes", ())]
    return {type(part).__name__ for part in [*parts, *changes] if not isinstance(part, tuple)}
