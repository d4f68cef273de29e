"""Estimates against scipy, hand computation and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Setting
from kvatlas.stats.estimates import (
    BINOMIAL_NOTE,
    binomial_bound,
    mean_over_benchmarks,
    pass_at_1,
    wilson,
    with_binomial_bounds,
)


@pytest.mark.parametrize(("right", "n"), [(0, 30), (1, 30), (15, 30), (40, 40), (91, 198)])
def test_one_sample_a_problem_is_the_binomial_wilson_interval(right, n):
    estimate = pass_at_1({f"p{i}": [float(i < right)] for i in range(n)})
    reference = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert estimate.value == pytest.approx(right / n)
    assert (estimate.low, estimate.high) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert (estimate.problems, estimate.samples) == (n, 1)


def test_the_mean_weighs_problems_not_samples():
    estimate = pass_at_1({"a": [1, 1, 1, 1], "b": [0], "c": [1, 0]})
    assert estimate.value == pytest.approx(0.5)
    assert estimate.samples is None


def test_the_interval_by_hand():
    means = np.array([0.0, 0.5, 1.0, 1.0])
    estimate = pass_at_1({"a": [0, 0], "b": [1, 0], "c": [1, 1], "d": [1, 1]})
    p, total, problems = 0.625, 8, 4
    variance = means.var(ddof=1) / problems
    effective = total / (variance / (p * (1 - p) / (total - 1)))
    effective *= (stats.t.ppf(0.975, total - 1) / stats.t.ppf(0.975, problems - 1)) ** 2
    assert (estimate.low, estimate.high) == pytest.approx(wilson(p, effective))


def test_equal_problem_means_fall_back_to_the_number_of_problems():
    assert pass_at_1({f"p{i}": [1, 0] for i in range(10)}).low == pytest.approx(wilson(0.5, 10)[0])
    all_right = pass_at_1({f"p{i}": [1] * 64 for i in range(30)})
    assert all_right.high == 1.0
    assert all_right.low == pytest.approx(30 / (30 + stats.norm.ppf(0.975) ** 2))


def test_one_problem_says_nothing_about_others():
    estimate = pass_at_1({"only": [1, 1, 0]})
    assert (estimate.low, estimate.high) == (0.0, 1.0)


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


@pytest.mark.parametrize(("problems", "samples"), [(30, 1), (30, 5), (40, 16)])
def test_coverage_where_problem_difficulty_is_spread(problems, samples):
    generator = np.random.default_rng(5)
    covered = 0
    rounds = 600
    for _ in range(rounds):
        chances = generator.beta(0.3, 0.3, problems)
        outcomes = generator.random((problems, samples)) < chances[:, None]
        estimate = pass_at_1({str(i): row.astype(float) for i, row in enumerate(outcomes)})
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.93 <= covered / rounds <= 0.985


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
    low, high = binomial_bound(0.5, 30)
    for samples in (1, 5, 64):
        half = samples // 2
        outcomes = {str(i): [1.0] * (half + i % 2) + [0.0] * (samples - half - i % 2) for i in range(30)}
        estimate = pass_at_1(outcomes)
        assert estimate.high - estimate.low <= high - low + 1e-9


def _bare(problems, low=None):
    cell = Cell(Setting.of("dynts"), Estimate(0.5, low, low and 0.6, problems, None))
    return Map("m", "B", "pass@1", "", (("a", (1,)), ("b", (2,))), {(1, 2): cell}, {"full": cell})


def test_bounds_are_filled_in_and_said():
    (filled,) = with_binomial_bounds([_bare(30)])
    assert filled.cells[1, 2].estimate.low == pytest.approx(wilson(0.5, 30)[0])
    assert filled.baselines["full"].estimate.high == pytest.approx(wilson(0.5, 30)[1])
    assert filled.notes == (BINOMIAL_NOTE,)


@pytest.mark.parametrize("bare", [_bare(None), _bare(30, low=0.4)])
def test_bounds_leave_alone_what_is_known_or_cannot_be(bare):
    assert with_binomial_bounds([bare]) == [bare]
