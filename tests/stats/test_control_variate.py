"""A mean with the help of a screen: it covers, and is worth what the screen knows."""

import numpy as np
import pytest

from kvatlas.core import KvatlasError
from kvatlas.stats.inference.control_variate import powered_mean


def _rounds(informative, rounds=600, seed=0):
    rng = np.random.default_rng(seed)
    hits, worth = 0, []
    for _ in range(rounds):
        kept = rng.beta(2, 1, 240)
        values = -(rng.random(240) > kept).astype(float)
        decoded = rng.permutation(240) < 80
        screened = kept if informative else rng.random(240)
        found = powered_mean(values, screened, decoded)
        hits += found.low <= -1 / 3 <= found.high
        worth.append(found.worth)
    return hits / rounds, float(np.mean(worth))


def test_it_covers_with_a_screen_that_knows_and_one_that_does_not():
    for informative in (True, False):
        assert _rounds(informative)[0] >= 0.95 - 0.027


def test_a_screen_that_knows_is_worth_decoded_problems():
    knows, random = _rounds(True)[1], _rounds(False)[1]
    assert random == pytest.approx(1.0, abs=0.05)
    assert knows > 1.1


def test_a_perfect_screen_leaves_only_the_problems():
    rng = np.random.default_rng(1)
    screened = rng.random(200)
    found = powered_mean(2 * screened - 1, screened, np.arange(200) < 20)
    assert found.weight == pytest.approx(2)
    assert found.value == pytest.approx(float((2 * screened - 1).mean()))


def test_too_few_decoded_problems():
    with pytest.raises(KvatlasError, match="at least 3 decoded"):
        powered_mean(np.zeros(5), np.zeros(5), np.arange(5) < 2)
