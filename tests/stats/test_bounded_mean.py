"""Limits of bounded means: against exact beta quantiles, drawn Dirichlet weights and simulated collapse."""

import numpy as np
import pytest
from scipy import stats

from kvatlas.stats.intervals import (
    UNSEEN,
    Z,
    correlations,
    interval,
    p_value,
    score,
    simultaneous_p,
    simultaneous_quantile,
)

ONE = np.zeros(40, int)


@pytest.mark.parametrize(("right", "n"), [(30, 30), (1, 30), (15, 30), (0, 12), (499, 500), (1, 1)])
def test_yes_and_no_have_the_limits_of_a_beta_distribution(right, n):
    low, high = interval(np.tri(n + 1, n, -1)[right])
    assert low == pytest.approx(stats.beta.ppf(0.025, right, n - right + UNSEEN) if right else 0.0, abs=2e-3)
    assert high == pytest.approx(stats.beta.ppf(0.975, right + UNSEEN, n - right) if right < n else 1.0, abs=2e-3)


@pytest.mark.parametrize("z", [1.0, Z, 3.0])
def test_limits_are_quantiles_of_dirichlet_weights(z):
    rng = np.random.default_rng(0)
    values = rng.beta(0.3, 0.6, 25)
    weights = rng.standard_gamma(np.r_[np.ones(25), UNSEEN], size=(400_000, 26))
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
    assert (low, high) == (pytest.approx(-0.0140, abs=2e-4), pytest.approx(0.0140, abs=2e-4))
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


@pytest.mark.parametrize("samples", [1, 16, 64])
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


def test_simultaneous_quantiles_lie_between_one_interval_and_bonferroni():
    assert simultaneous_quantile(np.eye(1)) == pytest.approx(Z)
    alone, alike = (
        simultaneous_quantile(np.eye(20)),
        simultaneous_quantile(np.full((20, 20), 0.999) + 0.001 * np.eye(20)),
    )
    assert alone == pytest.approx(stats.norm.isf((1 - 0.95 ** (1 / 20)) / 2), abs=0.03)
    assert Z <= alike < 2.05
    p = simultaneous_p(np.array([3.0, 0.1]), np.eye(2))
    assert p[0] == pytest.approx(2 * 0.0027, abs=0.002)
    assert p[1] > 0.9


def test_correlations_of_constant_rows_are_zero():
    rng = np.random.default_rng(5)
    item = rng.standard_normal(40)
    result = correlations(np.stack([item, item * 2, np.zeros(40)]), ONE)
    assert result == pytest.approx(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]]))
