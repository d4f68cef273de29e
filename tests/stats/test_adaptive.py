"""Group-sequential looks: published boundaries, errors by simulation, and what is given up."""

import numpy as np
import pytest

from kvatlas.stats.adaptive import Seen, begin, last_quantile, look, replay

FOUR = np.repeat(np.arange(4), 60)


@pytest.mark.parametrize(("looks", "bound"), [(1, 1.960), (5, 2.040), (10, 2.087)])
def test_boundaries_are_those_of_the_tables(looks, bound):
    """Jennison and Turnbull (2000), Group Sequential Methods, table 2.3."""
    assert last_quantile(1, looks) == pytest.approx(bound, abs=6e-4)


@pytest.mark.parametrize(("settings", "looks"), [(1, 20), (20, 20)])
def test_boundaries_are_crossed_by_brownian_motions_in_five_percent(settings, looks):
    """Independent settings, up to the most looks that a spec allows; four standard errors of 40,000 sweeps."""
    rng, bound, crossed = np.random.default_rng(looks), last_quantile(settings, looks), 0
    sweeps = 40_000 // settings
    for _ in range(10):
        paths = rng.standard_normal((sweeps // 10, settings, looks)).cumsum(2) / np.sqrt(looks)
        crossed += int((np.abs(paths) > bound).any((1, 2)).sum())
    assert crossed / sweeps == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / sweeps))


def test_what_is_equal_is_shown_and_what_is_far_worse_is_dropped_early():
    rng = np.random.default_rng(0)
    differences = np.stack([np.zeros(400), -(rng.random(400) < 0.4).astype(float), np.zeros(400)])
    costs = np.array([3.0, 1.0, 2.0])
    end, took = replay(differences, [np.arange(400)], costs, 0.05, 20)
    assert (end.broken | end.hopeless).tolist() == [False, True, False]
    assert end.recommended == 2
    assert took[1] < 240
    assert took[2] < 400


def test_a_setting_waits_while_cheaper_ones_are_likely_to_be_shown():
    differences, places = np.zeros((3, 400)), np.arange(400)
    end, took = replay(differences, [places], np.array([3.0, 1.0, 2.0]), 0.05, 20)
    assert end.recommended == 1
    assert took[0] == took[2] < took[1] / 4


def test_a_setting_that_waited_goes_on_where_cheaper_ones_fail():
    rng = np.random.default_rng(3)
    late = np.zeros((2, 400))
    late[1, 100:] = -(rng.random(300) < 0.5).astype(float)
    seen = Seen(late, np.zeros(400, int), np.arange(400) // 20, [400], 20, np.array([2.0, 1.0]))
    state, waited = begin(2), False
    while state.next.any():
        state = look(state, seen, 0.05)
        waited |= state.open[0] and not state.next[0]
    assert waited
    assert (state.recommended, state.broken[1] or state.hopeless[1]) == (0, True)


def test_a_setting_that_breaks_the_margin_is_rarely_recommended():
    rng = np.random.default_rng(1)
    orders = [np.flatnonzero(item == FOUR) for item in range(4)]
    wrong = 0
    for _ in range(100):
        differences = -(rng.random((6, 240)) < 0.0501).astype(float)
        wrong += replay(differences, orders, np.arange(6.0), 0.05, 5)[0].recommended is not None
    assert wrong / 100 <= 0.025 + 0.05


def test_a_setting_without_hope_is_given_up():
    rng = np.random.default_rng(2)
    differences = np.where(rng.random((1, 240)) < 0.3, rng.choice([-1.0, 1.0], (1, 240)), 0.0)
    end, took = replay(differences, [np.arange(240)], np.ones(1), 0.01, 20)
    assert end.hopeless.tolist() == [True]
    assert took[0] < 240
