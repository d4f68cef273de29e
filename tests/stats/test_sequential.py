"""Always-valid inference: exact cases, and what it promises, by simulation."""

import numpy as np
import pytest
from scipy import stats

from kvatlas.stats.estimates.anytime import mean_interval
from kvatlas.stats.inference.sequential import Block, largest_of, race


def _blocks(rng, truth, problems=120, count=12):
    chance = stats.norm.cdf(stats.norm.ppf(truth) * np.sqrt(5) + 2 * rng.standard_normal((problems, 1)))
    means = (rng.random((problems, len(truth))) < chance).astype(float)
    strata = np.arange(problems) % 2
    return [Block(part, own) for part, own in zip(np.split(means, count), np.split(strata, count), strict=True)]


def test_what_is_clearly_worse_is_dropped_early_and_stays_dropped():
    rng = np.random.default_rng(0)
    blocks = _blocks(rng, np.array([0.9, 0.9, 0.2, 0.1]))
    half = race(blocks[:6], 4, left=60)
    assert half.active.tolist() == [True, True, False, False]
    assert half.blocks.tolist() == [6, 6, half.blocks[2], half.blocks[3]]
    assert max(half.blocks[2:]) < 6
    # What a dropped setting would have done later changes nothing.
    for block in blocks[6:]:
        block.means[:, 2:] = np.nan
    late = race(blocks, 4)
    assert not late.active[2:].any()
    assert late.values[2] == half.values[2]


def test_the_state_is_a_function_of_the_blocks():
    blocks = _blocks(np.random.default_rng(1), np.array([0.5, 0.6, 0.4]))
    one, other = race(blocks[:5], 3, left=70), race(blocks[:5], 3, left=70)
    assert np.array_equal(one.log_e, other.log_e)
    assert one.leader == other.leader


def test_nothing_seen_and_one_setting():
    assert race([], 3).active.all()
    assert race(_blocks(np.random.default_rng(2), np.array([0.5])), 1, left=0).active.tolist() == [True]


def test_equal_settings_stop_early_and_keep_all():
    rng = np.random.default_rng(3)
    blocks = _blocks(rng, np.full(10, 0.5), problems=240, count=20)
    stopped = next(n for n in range(1, 21) if race(blocks[:n], 10, left=240 - 12 * n).hopeless)
    assert stopped <= 12
    assert race(blocks[:stopped], 10, left=240 - 12 * stopped).active.sum() >= 9


@pytest.mark.parametrize("truth", [np.full(8, 0.5), np.linspace(0.3, 0.6, 8)])
def test_the_best_is_ever_dropped_in_at_most_5_percent(truth):
    """Looked at after every block and at the end; three standard errors of 200 rounds."""
    rng = np.random.default_rng(4)
    dropped = sum(not race(_blocks(rng, truth), len(truth)).active[-1] for _ in range(200))
    assert dropped / 200 <= 0.05 + 0.047


def test_the_interval_holds_wherever_one_stops():
    """Stops at the moment that looks most like a mean above 0.5: a fixed-size interval would cover far less."""
    rng = np.random.default_rng(5)
    missed = 0
    for _ in range(150):
        grades = (rng.random(200) < 0.5).astype(float)
        running = np.cumsum(grades - 0.5)[19:] / np.sqrt(np.arange(20, 201))
        stop = 20 + int(running.argmax())
        low, high = mean_interval(grades[:stop], np.zeros(stop, int))
        missed += not low <= 0.5 <= high
    assert missed / 150 <= 0.05 + 0.054


def test_intervals_of_all_right_and_of_unequal_benchmarks():
    low, high = mean_interval(np.ones(40), np.zeros(40, int))
    assert high == 1.0
    assert 0.7 < low < 0.95
    grades, strata = np.repeat([1.0, 0.0], [30, 90]), np.repeat([0, 1], [30, 90])
    low, high = mean_interval(grades, strata)
    assert low < 0.5 < high


def test_the_largest_of_many_is_dunnetts():
    """Tabulated one-sided critical values with infinite degrees of freedom and equal correlation 1/2."""
    assert largest_of(1, 0.05) == pytest.approx(stats.norm.ppf(0.95))
    assert largest_of(2, 0.05) == pytest.approx(1.92, abs=0.005)
    assert largest_of(9, 0.05) == pytest.approx(2.42, abs=0.01)
    assert largest_of(0, 0.05) == np.inf
