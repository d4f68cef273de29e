"""Whole maps on arrays: against other packages, exact cases, and simulation."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvatlas.stats import inference
from kvatlas.stats.inference import mean_contrast

ONE = np.zeros(30, int)


def _map(rng, truth, problems=30, samples=5):
    """A copula like bench/calibration.py's, cells alike."""
    chance = stats.norm.cdf(stats.norm.ppf(truth) * np.sqrt(5) + 2 * rng.standard_normal((problems, 1)))
    shared = 0.8 * rng.standard_normal((problems, samples, 1)) + 0.6 * rng.standard_normal(
        (problems, samples, len(truth))
    )
    return (stats.norm.cdf(shared) < chance[:, None, :]).mean(1)


def test_no_difference_at_all_is_no_evidence():
    same = np.repeat(np.random.default_rng(0).random((30, 1)), 6, axis=1)
    test = inference.omnibus(same, ONE)
    assert (test.statistic, test.p) == (0.0, 1.0)
    assert inference.omnibus(same[:, :1], ONE).p == 1.0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_and_all_wrong(value):
    means = np.full((30, 4), value)
    assert inference.omnibus(means, ONE).p == 1.0
    (result,) = inference.joint_contrasts(means, ONE, np.array([[-1.0, 0.0, 0.0, 1.0]]))
    assert (result.value, result.p) == (0.0, 1.0)
    assert result.low < 0 < result.high


def test_two_cells_are_the_paired_test():
    rng = np.random.default_rng(1)
    means = _map(rng, np.array([0.4, 0.55]), problems=200)
    strata = np.zeros(200, int)
    wanted = mean_contrast(means[:, 1] - means[:, 0])
    assert inference.omnibus(means, strata).p == pytest.approx(1 / 10_001)
    (result,) = inference.joint_contrasts(means, strata, np.array([[-1.0, 1.0]]))
    assert (result.value, result.low, result.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    reference = stats.ttest_1samp(means[:, 1] - means[:, 0], 0)
    assert (result.low, result.high) == pytest.approx(tuple(reference.confidence_interval(0.95)), abs=0.006)
    assert result.p == pytest.approx(reference.pvalue, rel=0.5)


def test_a_collapse_that_was_not_seen_is_a_difference():
    """The hypothesis is that settings are the same, not that their means are: here they are equal, 0.973."""
    rng = np.random.default_rng(7)
    means = 1 - 0.027 * rng.uniform(0.5, 1.5, (30, 6))
    means[:, 0] = 1.0
    assert inference.omnibus(means, ONE).p < 0.05


def test_a_column_that_loses_is_found():
    """Sixty problems of five samples and one level of an axis that loses 6.7 points: found in nine of ten maps."""
    rng = np.random.default_rng(8)
    column = np.arange(20) % 5
    rows = np.array([inference.level_effect(column.tolist(), level) for level in range(5)])
    found = sum(
        inference.omnibus(_map(rng, 0.5 - 0.067 * (column == 0), 60), np.zeros(60, int), rows).p < 0.05
        for _ in range(40)
    )
    assert found >= 34


def test_few_problems_are_tested_with_every_pattern_of_signs():
    means = np.repeat([[0.0, 1.0]], 6, axis=0)
    assert inference.omnibus(means, np.zeros(6, int)).p == pytest.approx(2 / 2**6)


def test_benchmarks_weigh_equally():
    means = np.concatenate([np.tile([0.0, 1.0], (10, 1)), np.tile([0.5, 0.5], (30, 1))])
    strata = np.repeat([0, 1], [10, 30])
    assert inference.weights(strata).sum() == pytest.approx(1)
    assert inference.joint_contrasts(means, strata, np.array([[-1.0, 1.0]]))[0].value == pytest.approx(0.5)


def test_size_of_the_omnibus_test():
    """0.05 with three standard errors of 200 rounds; the whole grid is in bench/calibration.py."""
    rng = np.random.default_rng(2)
    rejected = sum(inference.omnibus(_map(rng, np.full(12, 0.45)), ONE).p < 0.05 for _ in range(200))
    assert rejected / 200 <= 0.05 + 0.047


def test_adjusted_p_values_are_statsmodels():
    p = [0.001, 0.04, 0.03, 0.2, 0.0004, 0.04]
    assert inference.holm(p) == pytest.approx(list(multipletests(p, method="holm")[1]))
    assert inference.holm([]) == []
