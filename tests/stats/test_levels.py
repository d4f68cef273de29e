"""Do levels behave alike: by hand, exact cases and simulation; verdicts on whole maps; adjusted p-values."""

import itertools

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from kvatlas.stats.map_tests import map_tests
from kvatlas.stats.numerics.arrays import holm, weights
from kvatlas.stats.numerics.levels import average_levels, level_contrasts_of, level_units, permute_levels
from kvatlas.stats.table import GradeMatrix

ONE = np.zeros(30, int)
AXES = ("local_window", "ratio")


def graded(rng, lost=0.0, problems=60, samples=5):
    """Return [problems, 4, 5] means of a grid whose first column loses; cells share most of their random numbers."""
    chance = 0.2 + 0.6 * rng.beta(0.6, 0.6, (problems, 1, 1, 1))
    shared = rng.random((problems, 1, 1, samples))
    own = rng.random((problems, 4, 5, samples))
    uniform = np.where(rng.random(own.shape) < 0.7, shared, own)
    loss = np.zeros((1, 1, 5, 1))
    loss[:, :, 0] = lost
    return (uniform < chance - loss).mean(3)


def contrasts(values, strata):
    """Return each level of values [problems, levels] minus the others, for problems like these."""
    promised = np.ones((len(values), 1), bool)
    return level_contrasts_of(level_units(values[:, :, None], promised, strata, range(values.shape[1]), by_trace=False))


def grid_verdict(means):
    coords = tuple(itertools.product((8, 16, 32, 64), (0.1, 0.2, 0.3, 0.4, 0.5)))
    cells = means.reshape(len(means), 20)
    strata = np.zeros(len(means), int)
    promised = np.ones((len(means), 1), bool)
    return map_tests(GradeMatrix(coords, cells, strata, 0, cells[:, :, None], promised, strata), AXES)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_levels_are_no_evidence_but_may_hide_a_rare_loss(value):
    test = permute_levels(np.full((30, 4), value), ONE)
    assert test == (0.0, 1.0)
    found = contrasts(np.full((30, 4), value), ONE)
    # What 30 problems of which none differs can hide, for four levels together: -log(0.05 / 8) / 30 at most.
    assert all(-0.17 < contrast.low < -0.14 and 0.14 < contrast.high < 0.17 for contrast in found)


def test_the_p_value_is_that_of_all_orders():
    values = np.array([[0.2, 0.9, 0.4], [0.1, 0.5, 0.5], [0.3, 0.8, 0.1], [0.0, 0.6, 0.2]])

    def statistic(table):
        centred = table - table.mean(1, keepdims=True)
        return np.abs(centred.mean(0) / (centred.std(0, ddof=1) / 2)).max()

    orders = list(itertools.permutations(range(3)))
    beyond = [
        statistic(np.array([row[list(order)] for row, order in zip(values, chosen, strict=True)]))
        >= statistic(values) - 1e-9
        for chosen in itertools.product(orders, repeat=4)
    ]
    distance, p = permute_levels(values, np.zeros(4, int))
    assert distance == pytest.approx(statistic(values))
    assert p == pytest.approx(np.mean(beyond), abs=0.01)
    level = contrasts(values, np.zeros(4, int))[1]
    assert level.value == pytest.approx(0.7 - np.delete(values, 1, axis=1).mean())


def test_limits_exclude_0_exactly_where_the_level_is_found():
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(30):
        levels = average_levels(graded(rng, 0.15).reshape(60, 20), np.arange(20) % 5).T
        for contrast in contrasts(levels, np.zeros(60, int)):
            assert (contrast.p <= 0.05) == (contrast.low > 0 or contrast.high < 0)
            found += contrast.p <= 0.05
    assert found > 5


def test_a_level_that_fails_everywhere_is_found():
    values = np.ones((30, 5))
    values[:, 0] = 0.0
    assert permute_levels(values, ONE)[1] < 0.02
    level = contrasts(values, ONE)[0]
    assert level.p < 0.02
    assert level.value == pytest.approx(-1.0)
    assert level.high < 0


def test_benchmarks_weigh_equally():
    values = np.concatenate([np.tile([0.0, 1.0], (10, 1)), np.tile([0.5, 0.5], (30, 1))])
    strata = np.repeat([0, 1], [10, 30])
    assert weights(strata).sum() == pytest.approx(1)
    assert contrasts(values, strata)[1].value == pytest.approx(0.5)


def test_equal_settings_on_easy_and_hard_problems_are_rarely_told_apart():
    """Sign flips of "level minus the rest" find a difference in 82 of 100 of these maps."""
    rng = np.random.default_rng(3)
    for chance, problems, levels in ((0.05, 30, 10), (0.97, 60, 5)):
        found = 0
        for seed in range(150):
            values = (rng.random((problems, levels)) < chance).astype(float)
            found += permute_levels(values, np.zeros(problems, int), draws=199, seed=seed)[1] <= 0.05
        assert found / 150 <= 0.05 + 0.053


def test_one_level_unlike_the_others_is_rarely_found():
    """All levels are right equally often, and all but one share their outcomes; the raw statistic errs in 8 to 30 %."""
    rng = np.random.default_rng(4)
    found = 0
    for seed in range(150):
        values = np.repeat((rng.random((60, 1)) < 0.95).astype(float), 5, axis=1)
        values[:, 4] = rng.random(60) < 0.95
        found += permute_levels(values, np.zeros(60, int), draws=199, seed=seed)[1] <= 0.05
    assert found / 150 <= 0.05


def test_a_column_that_loses_is_found_and_named():
    rng = np.random.default_rng(8)
    found = 0
    for _ in range(10):
        result = grid_verdict(graded(rng, 0.2))
        ratio = next(effect for effect in result.effects if effect.axis == "ratio")
        level, contrast = min(ratio.levels, key=lambda item: item[1].p)
        found += result.evidence and level == 0.1 and contrast.high < 0
    assert found >= 8


def test_equal_maps_are_rarely_told_apart():
    """0.05 with three standard errors of 100 rounds; hostile designs are in bench/chain_designs.py."""
    rng = np.random.default_rng(2)
    rejected = sum(grid_verdict(graded(rng, problems=20, samples=1)).evidence for _ in range(100))
    assert rejected / 100 <= 0.05 + 0.066


def test_adjusted_p_values_are_statsmodels():
    p = [0.001, 0.04, 0.03, 0.2, 0.0004, 0.04]
    assert holm(p) == pytest.approx(list(multipletests(p, method="holm")[1]))
    assert holm([]) == []
