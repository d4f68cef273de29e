"""Intervals that hold at any stop: bets against every value that a mean may have (Waudby-Smith and Ramdas 2024)."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from kvatlas.stats.estimates.pass_at_1 import LEVEL, Floats, Ints

#: Shares of the wealth that are staked; the bettor starts with as much on each, which needs no foresight.
STAKES = (0.05, 0.1, 0.2, 0.35, 0.6, 0.9)


def stake_shares(strata: Ints) -> Floats:
    """What each problem may stake, at most 1: benchmarks alike in all."""
    sizes = np.bincount(strata)
    weights = 1.0 / sizes[strata]
    return np.asarray(weights / weights.max(), float)


def benchmark_means(grades: Floats, strata: Ints) -> Floats:
    """[cells]: the mean over benchmarks of the means over their problems, of [problems, cells]."""
    count = int(strata.max()) + 1
    return np.asarray(np.stack([grades[strata == stratum].mean(0) for stratum in range(count)]).mean(0), float)


def mean_interval(values: Floats, strata: Ints) -> tuple[float, float]:
    """A 95 % interval for the mean over benchmarks that holds whenever and for whatever reason one stopped.

    `values` [problems] are in [0, 1]. All means against which neither a bet that the grades are higher nor one that
    they are lower has won 40 times the stake; weighed so that benchmarks count equally.
    """
    share = stake_shares(strata)
    guesses = np.linspace(0.0, 1.0, 1001)
    gains = share[:, None] * (values[:, None] - guesses)
    kept = np.ones(len(guesses), bool)
    for sign in (1.0, -1.0):
        log_wealth = np.stack([np.log1p(sign * stake * gains).sum(0) for stake in STAKES])
        kept &= special.logsumexp(log_wealth, axis=0) - math.log(len(STAKES)) < math.log(2 / LEVEL)
    centre = float(benchmark_means(values[:, None], strata)[0])
    left = guesses[kept]
    return min(centre, float(left.min(initial=1.0))), max(centre, float(left.max(initial=0.0)))
