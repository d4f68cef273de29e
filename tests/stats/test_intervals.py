"""Estimates and limits of means, by hand, over benchmarks, and their coverage; pass@k and maj@k."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scorio import eval as scorio

from kvatlas.core import Cell, Claim, Estimate, KvatlasError, Map, Setting
from kvatlas.stats.estimates import (
    BINOMIAL_NOTE,
    RIGHT,
    Rule,
    majority,
    mean_over_benchmarks,
    pass_at_1,
    rule,
    with_binomial_bounds,
)
from kvatlas.stats.numerics.arrays import Z
from kvatlas.stats.numerics.bounded import interval, mean_difference, p_value, score, yes_no_interval


@pytest.mark.parametrize(("right", "n"), [(30, 30), (1, 30), (15, 30), (0, 12), (499, 500), (1, 1)])
def test_yes_and_no_have_the_limits_of_clopper_and_pearson(right, n):
    low, high = interval(np.tri(n + 1, n, -1)[right])
    exact = stats.binomtest(right, n).proportion_ci(method="exact")
    assert (low, high) == (pytest.approx(exact.low, abs=2e-3), pytest.approx(exact.high, abs=2e-3))
    assert yes_no_interval(right / n, n) == pytest.approx((exact.low, exact.high), abs=1e-9)


@pytest.mark.parametrize("z", [1.0, Z, 3.0])
def test_limits_are_quantiles_of_dirichlet_weights(z):
    rng = np.random.default_rng(0)
    values = rng.beta(0.3, 0.6, 25)
    weights = rng.standard_gamma(np.ones(26), size=(400_000, 26))
    drawn = weights @ np.r_[values, 0.0] / weights.sum(1)
    assert interval(values, z=z)[0] == pytest.approx(np.quantile(drawn, stats.norm.cdf(-z)), abs=2e-3)


def test_a_score_is_the_quantile_whose_limit_it_is():
    rng = np.random.default_rng(1)
    values = rng.choice([-1.0, 0.0, 1.0], p=[0.3, 0.6, 0.1], size=(5, 40))
    for strata in (None, np.repeat([0, 1, 2], [8, 12, 20])):
        low, high = interval(values, -1.0, 1.0, Z, strata)
        assert score(values, low, -1.0, 1.0, strata) == pytest.approx(Z, abs=1e-4)
        assert score(values, high, -1.0, 1.0, strata) == pytest.approx(-Z, abs=1e-4)
    assert p_value(Z) == pytest.approx(0.05)


def test_equal_values_leave_room_for_what_was_not_seen():
    low, high = interval(np.zeros(240), -1.0, 1.0)
    assert (low, high) == (pytest.approx(-0.0154, abs=2e-4), pytest.approx(0.0154, abs=2e-4))
    low, high = interval(np.array([0.5]))
    assert low < 0.02 < 0.98 < high
    assert score(np.zeros(240), 0.0, -1.0, 1.0) == 0.0


def test_benchmarks_of_unlike_size_weigh_equally_and_levels_add_no_spread():
    rng = np.random.default_rng(2)
    strata = np.repeat([0, 1], [30, 200])
    values = rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=230)
    low, high = interval(values, -1.0, 1.0, Z, strata)
    errors = [values[strata == item].std(ddof=1) / np.sqrt((strata == item).sum()) for item in (0, 1)]
    centre = (values[strata == 0].mean() + values[strata == 1].mean()) / 2
    assert low < centre < high
    assert 1.0 < (high - low) / (2 * Z * np.hypot(*errors) / 2) < 1.35
    even = np.repeat([0, 1], 100)
    apart = np.where(even == 0, 0.2, 0.9) + rng.uniform(-0.1, 0.1, 200)
    within, together = (np.subtract(*interval(apart, strata=by)[::-1]) for by in (even, None))
    assert within < 0.04 < 0.09 < together


@pytest.mark.parametrize("samples", [1, 64])
@pytest.mark.parametrize("problems", [30, 60])
def test_rare_collapse_is_covered(problems, samples):
    """95 % of problems at 0.995 and 5 % at 0.1; the usual interval covers 79 to 95 %."""
    rng = np.random.default_rng(3)
    chance = np.where(rng.random((2_000, problems)) < 0.05, 0.1, 0.995)
    means = rng.binomial(samples, chance) / samples
    result = score(means, 0.95 * 0.995 + 0.05 * 0.1)
    assert np.mean(np.abs(result) <= Z) >= 0.94


def test_differences_that_are_rarely_large_are_not_called_real():
    """Equal means: 3 % of problems lose 0.97, the others gain 0.03. Flipping signs rejects 40 % of these."""
    rng = np.random.default_rng(4)
    differences = np.where(rng.random((2_000, 40)) < 0.03, -0.97, 0.03)
    assert np.mean(p_value(score(differences, 0.0, -1.0, 1.0)) < 0.05) <= 0.06


def test_p_and_interval_of_a_difference_agree():
    rng = np.random.default_rng(5)
    for _ in range(40):
        result = mean_difference(rng.choice([-1.0, 0.0, 0.5, 1.0], p=[0.2, 0.5, 0.1, 0.2], size=30))
        assert (result.p <= 0.05) == (result.low > 0 or result.high < 0)


@pytest.mark.parametrize("n", [30, 40, 198])
def test_exact_coverage_of_one_sample_a_problem(n):
    """No simulation: the binomial probabilities of all outcomes that are covered, for chances from 1 % to 99 %."""
    right = np.arange(n + 1)
    low, high = interval(np.tri(n + 1, n, -1))
    chances = np.linspace(0.01, 0.99, 197)
    covers = (low <= chances[:, None]) & (chances[:, None] <= high)
    coverage = (stats.binom.pmf(right, n, chances[:, None]) * covers).sum(1)
    assert coverage.min() >= 0.949
    assert coverage.mean() < 0.985


def test_the_standard_error_by_hand():
    grades = {"a": [0, 0, 1], "b": [1, 0, 1], "c": [1, 1, 1], "d": [0, 0, 0]}
    estimate = pass_at_1(grades)
    means = np.array([1 / 3, 2 / 3, 1, 0])
    assert estimate.se_clustered == pytest.approx(means.std(ddof=1) / 2)
    assert estimate.low < estimate.value < estimate.high


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=12))
def test_always_a_number_and_inside_its_interval(grades):
    estimate = pass_at_1({str(i): samples for i, samples in enumerate(grades)})
    assert not any(math.isnan(v) for v in (estimate.value, estimate.low, estimate.high))
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


@pytest.mark.parametrize("outcomes", [{}, {"a": [1], "b": []}, {"a": [1.5]}, {"a": [-0.1]}, {"a": [float("nan")]}])
def test_problems_without_samples_and_grades_outside_0_to_1_are_refused(outcomes):
    with pytest.raises(KvatlasError, match="at least one problem, and samples of each with grades from 0 to 1"):
        pass_at_1(outcomes)


def test_mean_over_benchmarks_by_hand():
    mean = mean_over_benchmarks([Estimate(0.5, 0.4, 0.7, 30, 5), Estimate(0.9, 0.7, 1.0, 40, 5)])
    assert mean.value == pytest.approx(0.7)
    assert mean.low == pytest.approx(0.7 - math.hypot(0.1, 0.2) / 2)
    assert mean.high == pytest.approx(0.7 + math.hypot(0.2, 0.1) / 2)
    assert (mean.problems, mean.samples) == (70, 5)
    unknown = mean_over_benchmarks([Estimate(0.5, None, None, None, None), Estimate(0.9, 0.7, 1.0, 40, 5)])
    assert (unknown.low, unknown.high, unknown.problems, unknown.samples) == (None, None, None, None)


def _bare(problems, low=None):
    cell = Cell(Setting.from_parameters("dynts"), Estimate(0.5, low, low and 0.6, problems, None))
    return Map("m", "B", "pass@1", "", (("a", (1,)), ("b", (2,))), {(1, 2): cell}, {"full": cell})


def test_bounds_are_filled_in_and_said_where_limits_are_unknown():
    known = [_bare(None), _bare(30, low=0.4)]
    filled, *rest = with_binomial_bounds([_bare(30), *known])
    assert filled.cells[1, 2].estimate.low == pytest.approx(yes_no_interval(0.5, 30)[0])
    assert filled.baselines["full"].estimate.high == pytest.approx(yes_no_interval(0.5, 30)[1])
    assert filled.notes == (BINOMIAL_NOTE,)
    assert rest == known
    # Where the number of samples is not known, one is taken, on the claim for these problems, too.
    (these,) = with_binomial_bounds([_bare(30)], Claim.THESE)
    assert these.cells[1, 2].estimate.low == pytest.approx(yes_no_interval(0.5, 30)[0])


GRADES = {
    "a": [1.0, 0, 0, 1, 0, 0],
    "b": [0.0] * 6,
    "c": [1.0] * 6,
    "d": [0.0, 0, 0, 0, 0, 1],
    "e": [1.0, 1, 1, 0, 1, 0],
}
MATRIX = np.array(list(GRADES.values()), int)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_and_scorios(k):
    shares = [np.mean([any(subset) for subset in combinations(stored, k)]) for stored in GRADES.values()]
    assert Rule("pass", k).values(list(GRADES.values()), []) == pytest.approx(shares)
    estimate = Rule("pass", k).estimate(list(GRADES.values()), [])
    assert estimate.value == pytest.approx(float(scorio.pass_at_k(MATRIX, k)))
    assert 0 <= estimate.low < estimate.value < estimate.high <= 1
    assert (estimate.problems, estimate.samples) == (5, 6)


def _by_hand(votes, k):
    won = []
    for subset in combinations(votes, k):
        counts = {vote: subset.count(vote) for vote in subset if vote is not None}
        best = max(counts.values(), default=0)
        first = [vote for vote, count in counts.items() if count == best]
        won.append((RIGHT in first) / len(first) if first else 0.0)
    return float(np.mean(won))


@pytest.mark.parametrize(
    "votes",
    [
        [RIGHT, RIGHT, "7", "7", "8", None],
        [RIGHT, "7", "7", "7", "7", "7"],
        [None] * 6,
        [RIGHT] * 6,
        ["7", "8", "9", RIGHT, None, None],
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_majority_is_that_of_all_subsets(votes, k):
    assert majority(votes, k) == pytest.approx(_by_hand(votes, k))


def test_names_and_too_few_samples():
    assert rule("pass@4") == Rule("pass", 4)
    assert [rule(name) for name in ("pass@1", "progress", "pass@0", "maj@", "pass@-1")] == [None] * 5
    with pytest.raises(KvatlasError, match="maj@7 needs 7 samples of every problem; the fewest that one has is 6"):
        Rule("maj", 7).estimate(list(GRADES.values()), [])


def test_intervals_of_pass_at_k_hold_where_rare_problems_decide_the_mean():
    rng = np.random.default_rng(3)
    wrong = 64 - rng.binomial(64, rng.random((3_000, 30)))
    values = 1 - np.prod([np.maximum(wrong - i, 0) / (64 - i) for i in range(16)], axis=0)
    truth = 16 / 17
    low, high = interval(values)
    assert 0.95 < np.mean((low <= truth) & (truth <= high)) < 0.99
