"""Tests of maps of which only averages are known: nothing of their problems and traces.

Three methods. The binomial bound knows the number of problems and takes the largest variance that sampling can have, so
it errs on the side of "no difference". Permutation of levels over benchmarks does not use the numbers of problems: if
an axis does nothing, its levels could stand in any order. Of few benchmarks it can find nothing: there the intervals of
the levels' own means are compared, which hold together by Bonferroni, whatever the cells of a problem share.

Source: Hsu (1981), Annals of Statistics 9:1026-1034 (comparison with the best); Pesarin and Salmaso (2010), Permutation
Tests for Complex Data, chapter 5 (restricted permutation).
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Difference, Floats, normal_quantile
from kvatlas.stats.numerics.bounded import yes_no_interval

#: Random draws of the largest of several normal values.
DRAWS = 10_000
#: Random orders of the levels of all benchmarks.
ORDERS = 40_000


def chi_square(values: Floats, variance: float) -> tuple[float, float]:
    """Return the chi-square statistic over its degrees of freedom, and the p-value of "all `values` are equal".

    `variance` is the largest that a value can have; a variance of 0 counts as 1.
    """
    scale = variance if variance > 1e-18 else 1.0
    square = float(((values - values.mean()) ** 2).sum()) / scale
    freedom = max(len(values) - 1, 1)
    return square / freedom, float(special.chdtrc(freedom, square))


def behind_best(values: Floats, deviation: float) -> tuple[Floats, Floats]:
    """Return [cells] each: the p-value of "this cell is the best", and how far it may be below the best.

    The distance to the largest of the others is compared with that of as many independent normal values.
    """
    count = len(values)
    if count < 2:
        return np.ones(count), np.zeros(count)
    # The largest of the other values minus this one, in units of the error of one difference.
    noise = np.random.default_rng(0).standard_normal((DRAWS, count))
    chance = np.sort((noise[:, 1:].max(1) - noise[:, 0]) / math.sqrt(2))
    behind = np.array([np.delete(values, cell).max() - values[cell] for cell in range(count)])
    unit = math.sqrt(2) * deviation
    p = 1 - np.searchsorted(chance, behind / unit) / DRAWS
    reach = float(np.quantile(chance, 1 - LEVEL)) * unit
    return np.maximum(p, 1 / (1 + DRAWS)), np.clip(behind + reach, 0.0, 1.0)


def level_contrasts(values: Floats, level_of_cell: Sequence[int], deviation: float) -> list[Difference]:
    """Return each level minus the mean of the others, of independent normal `values` [cells] of this deviation.

    The limits hold together, by Bonferroni.
    """
    numbers = np.asarray(level_of_cell)
    sizes = np.bincount(numbers)
    quantile = normal_quantile(LEVEL / 2 / len(sizes))
    contrasts = []
    for level, size in enumerate(sizes.tolist()):
        row = np.where(numbers == level, 1 / size, -1 / (len(sizes) - 1) / sizes[numbers])
        value = float(values @ row)
        error = deviation * math.sqrt(float((row**2).sum()))
        p = min(1.0, len(sizes) * 2 * float(special.ndtr(-abs(value) / error)))
        contrasts.append(Difference(value, value - quantile * error, value + quantile * error, p))
    return contrasts


def least_p(benchmarks: int, levels: int) -> float:
    """Return the smallest p-value that random orders of the levels of each benchmark can give."""
    # The same exchange of levels in all benchmarks changes no distance.
    return float(math.factorial(levels)) ** (1 - benchmarks)


def level_intervals(values: Floats, problems: Sequence[int]) -> list[Difference]:
    """Return each level minus the mean of the others, of `values` [maps, across, levels] on so many problems by map.

    A level's mean over cells is the mean over problems of a value in [0, 1], which varies no more than yes and no do.
    So the interval of yes and no holds for it, and for the mean of the others. The limits of a contrast are the
    distances of these, with the 5 % shared among all levels, both means and all maps; they hold whatever the means
    share. The p-value is the smallest level at which the limits exclude 0.
    """
    count = values.shape[2]
    level_means = values.mean(1)
    other_means = (level_means.sum(1, keepdims=True) - level_means) / (count - 1)

    def limits(level: int, alpha: float) -> tuple[float, float]:
        share = alpha / (2 * count * len(values))
        ends = []
        for level_mean, other_mean, size in zip(level_means[:, level], other_means[:, level], problems, strict=True):
            low, high = yes_no_interval(float(level_mean), size, share)
            others_low, others_high = yes_no_interval(float(other_mean), size, share)
            ends.append((low - others_high, high - others_low))
        low, high = np.mean(ends, axis=0).tolist()
        return low, high

    contrasts = []
    for level in range(count):
        # Limits come nearer as their level rises: where they first exclude 0 is found by halving.
        below = -40.0
        above = 0.0
        for _ in range(40):
            middle = (below + above) / 2
            low, high = limits(level, math.exp(middle))
            if low > 0 or high < 0:
                above = middle
            else:
                below = middle
        value = float((level_means[:, level] - other_means[:, level]).mean())
        contrasts.append(Difference(value, *limits(level, LEVEL), math.exp(above)))
    return contrasts


def permute_benchmarks(
    values: Floats, benchmarks: Sequence[Hashable] | None = None, *, draws: int = ORDERS, seed: int = 0
) -> tuple[list[Difference], list[int]]:
    """Return the effect of the last axis of `values` [maps, across, levels], and in how many maps each level is below.

    An effect is a level minus the mean of the others. Maps of one of the `benchmarks` [maps] rest on the same problems:
    they are averaged, and the benchmarks are the independent units; without them every map is. The statistic is the
    largest of the levels' mean distances from the others, in units of their error over benchmarks, against that of
    random orders of the levels of every benchmark. P-values hold for all levels together, and so do the limits:
    estimate +- c errors with the 95 % quantile c of the same orders. They are infinite for a single benchmark.
    """
    maps, _, levels = values.shape
    # Equal levels differ by rounding, which is no effect.
    by_map = np.round((values - values.mean(2, keepdims=True)).mean(1) * levels / (levels - 1), 12)
    names = [str(name) for name in benchmarks or range(maps)]
    units = np.array([by_map[np.array(names) == name].mean(0) for name in dict.fromkeys(names)])

    generator = np.random.default_rng(seed)
    orders = generator.permuted(np.broadcast_to(units, (draws, *units.shape)), axis=2)
    largest = np.sort((np.abs(orders.mean(1)) / _errors(orders)).max(1))
    effect = units.mean(0)
    error = _errors(units[None])[0]
    distance = np.abs(effect) / error
    p = (1 + draws - np.searchsorted(largest, distance - 1e-9)) / (1 + draws)
    # With fewer than this many orders beyond a distance its p-value is at most 5 %.
    critical = largest[draws - int(LEVEL * (1 + draws))]
    reach = critical * error if len(units) > 1 else np.full(levels, math.inf)
    rows = zip(effect.tolist(), (effect - reach).tolist(), (effect + reach).tolist(), p.tolist(), strict=True)
    below = (by_map < 0).sum(0).tolist()
    return [Difference(*row) for row in rows], below


def _errors(units: Floats) -> Floats:
    """Return [draws, levels]: the errors of the means over benchmarks of `units` [draws, benchmarks, levels].

    A level's variance over few benchmarks says little, so half the mean square of all, which no order changes, is
    added.
    """
    spread = units.var(1) + (units[:1] ** 2).mean() / 2
    return np.asarray(np.sqrt(spread / units.shape[1] + 1e-18), float)
