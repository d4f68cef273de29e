"""Estimates against scipy, hand computation and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Setting
from kvatlas.stats.intervals import (
    BINOMIAL_NOTE,
    interval,
    mean_over_benchmarks,
    pass_at_1,
    with_binomial_bounds,
    yes_no_interval,
)


@pytest.mark.parametrize("n", [30, 40, 198])
def test_exact_coverage_of_one_sample_a_problem(n):
    """No simulation: the binomial probabilities of all outcomes that are covered, for chances from 1 % to 99 %."""
    right = np.arange(n + 1)
    low, high = interval(np.tri(n + 1, n, -1))
    chances = np.linspace(0.01, 0.99, 197)
    covers = (low <= chances[:, None]) & (chances[:, None] <= high)
    coverage = (stats.binom.pmf(right, n, chances[:, None]) * covers).sum(1)
    assert coverage.min() >= 0.94
    assert coverage.mean() < 0.98


def test_the_mean_weighs_problems_not_samples():
    estimate = pass_at_1({"a": [1, 1, 1, 1], "b": [0], "c": [1, 0]})
    assert estimate.value == pytest.approx(0.5)
    assert estimate.samples is None


def test_the_standard_error_by_hand():
    grades = {"a": [0, 0, 1], "b": [1, 0, 1], "c": [1, 1, 1], "d": [0, 0, 0]}
    estimate = pass_at_1(grades)
    means = np.array([1 / 3, 2 / 3, 1, 0])
    assert estimate.se_clustered == pytest.approx(means.std(ddof=1) / 2)
    assert estimate.low < estimate.value < estimate.high


def test_all_right_leaves_room_for_problems_that_were_not_seen():
    all_right = pass_at_1({f"p{i}": [1] * 64 for i in range(30)})
    assert all_right.high == 1.0
    assert all_right.low == pytest.approx(stats.beta.ppf(0.025, 30, 0.85), abs=2e-3)
    assert pass_at_1({f"p{i}": [0] * 64 for i in range(30)}).high == pytest.approx(1 - all_right.low)
    assert pass_at_1({f"p{i}": [1, 0] for i in range(10)}).low < 0.4


def test_one_problem_says_nothing_about_others():
    estimate = pass_at_1({"only": [1, 1, 0]})
    assert estimate.low < 0.02
    assert estimate.high > 0.98


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=12))
def test_always_a_number_and_inside_its_interval(grades):
    estimate = pass_at_1({str(i): samples for i, samples in enumerate(grades)})
    assert not any(math.isnan(v) for v in (estimate.value, estimate.low, estimate.high))
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


@pytest.mark.parametrize("outcomes", [{}, {"a": []}, {"a": [1], "b": []}])
def test_problems_without_samples_are_refused(outcomes):
    with pytest.raises(KvatlasError, match="at least one problem and one sample"):
        pass_at_1(outcomes)


@pytest.mark.parametrize("grade", [1.5, -0.1, float("nan")])
def test_grades_outside_0_to_1_are_refused(grade):
    with pytest.raises(KvatlasError, match="between 0 and 1"):
        pass_at_1({"a": [grade]})


@pytest.mark.parametrize(("problems", "samples"), [(30, 5), (40, 16), (198, 64)])
def test_coverage_where_problem_difficulty_is_spread(problems, samples):
    generator = np.random.default_rng(5)
    covered = 0
    rounds = 600
    for _ in range(rounds):
        chances = generator.beta(0.3, 0.3, problems)
        outcomes = generator.random((problems, samples)) < chances[:, None]
        estimate = pass_at_1({str(i): row.astype(float) for i, row in enumerate(outcomes)})
        covered += estimate.low <= 0.5 <= estimate.high
    # Three standard errors of 600 rounds around the bounds of bench/calibration.py.
    assert 0.94 - 0.029 <= covered / rounds <= 0.965 + 0.022


def test_mean_over_benchmarks_by_hand():
    mean = mean_over_benchmarks([Estimate(0.5, 0.4, 0.7, 30, 5), Estimate(0.9, 0.7, 1.0, 40, 5)])
    assert mean.value == pytest.approx(0.7)
    assert mean.low == pytest.approx(0.7 - math.hypot(0.1, 0.2) / 2)
    assert mean.high == pytest.approx(0.7 + math.hypot(0.2, 0.1) / 2)
    assert (mean.problems, mean.samples) == (70, 5)


def test_mean_over_benchmarks_knows_what_it_does_not_know():
    mean = mean_over_benchmarks([Estimate(0.5, None, None, None, None), Estimate(0.9, 0.7, 1.0, 40, 5)])
    assert (mean.low, mean.high, mean.problems, mean.samples) == (None, None, None, None)
    with pytest.raises(KvatlasError, match="at least one"):
        mean_over_benchmarks([])


def test_the_binomial_bound_holds_for_any_number_of_samples():
    low, high = yes_no_interval(0.5, 30)
    for samples in (1, 5, 64):
        half = samples // 2
        outcomes = {str(i): [1.0] * (half + i % 2) + [0.0] * (samples - half - i % 2) for i in range(30)}
        estimate = pass_at_1(outcomes)
        assert estimate.high - estimate.low <= high - low + 1e-5


def _bare(problems, low=None):
    cell = Cell(Setting.of("dynts"), Estimate(0.5, low, low and 0.6, problems, None))
    return Map("m", "B", "pass@1", "", (("a", (1,)), ("b", (2,))), {(1, 2): cell}, {"full": cell})


def test_bounds_are_filled_in_and_said():
    (filled,) = with_binomial_bounds([_bare(30)])
    assert filled.cells[1, 2].estimate.low == pytest.approx(yes_no_interval(0.5, 30)[0])
    assert filled.baselines["full"].estimate.high == pytest.approx(yes_no_interval(0.5, 30)[1])
    assert filled.notes == (BINOMIAL_NOTE,)


@pytest.mark.parametrize("bare", [_bare(None), _bare(30, low=0.4)])
def test_bounds_leave_alone_what_is_known_or_cannot_be(bare):
    assert with_binomial_bounds([bare]) == [bare]
