"""The levels of an axis: bounded limits of their means, and a permutation test of "they could stand in any order".

**Means.** A level minus the mean of the others, averaged over the other axis, is a value in [-1, 1] of each unit of the
claim (`level_units`). Its limits are those of `bounded`, for all levels together, so a level that is said to lie below
the others does: also where a level fails on a few problems that were not met, on which tests without an imagined
problem err in 18 to 33 %.

**Exchangeable** (`permute_levels`). Hypothesis: within a problem the levels could stand in any order. Levels are
averaged over the other axis first, and a problem is permuted as a whole, with all of its cells and samples, so nothing
is assumed about how much traces of one level share. A rejection means "the levels do not behave alike". It does not
mean "their means differ", and is never called proven: levels of equal means that are unlike in another way are
rejected, too. The statistic is the largest of the levels' mean distances from the others, each in units of its standard
error. It is studentised, since the raw one errs often where one level is unlike the others. With two levels this is the
sign-flip test of two settings. It is exact where levels are exchangeable.

Source: Pesarin and Salmaso (2010), Permutation Tests for Complex Data, chapters 5 and 6; Westfall and Young (1993),
Resampling-Based Multiple Testing, chapter 2 (largest statistic); Janssen (1997), Statistics & Probability Letters
36:9-21 (studentised permutation).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvatlas.stats.numerics.arrays import LEVEL, Difference, Flags, Floats, Ints, normal_quantile
from kvatlas.stats.numerics.units import Units, units_between

#: Random orders of the levels of each problem.
DRAWS = 9_999
#: Numbers below this count as 0.
_TINY = 1e-12
#: The statistic of a mean that is not 0 and has no spread.
_INFINITE = 1e6
#: Permuted numbers that are held at once: what fits in the cache of a core.
_CHUNK = 100_000


def average_levels(values: Floats, level_of_cell: Sequence[int]) -> Floats:
    """Return [levels, problems, ...]: the mean over the cells of each level of `values` [problems, cells, ...]."""
    numbers = np.asarray(level_of_cell)
    return np.stack([values[:, numbers == level].mean(1) for level in range(int(numbers.max()) + 1)])


def permute_levels(values: Floats, strata: Ints, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """Return the largest distance of a level in standard errors, and the p-value of "the levels behave alike".

    `values` [problems, levels] are of two levels or more.
    """
    levels = values.shape[1]
    deviations = values - values.mean(1, keepdims=True)
    # A problem on which all levels are equal stays as it is in every order.
    varied = np.abs(deviations).max(1) > _TINY
    sizes = np.bincount(strata)
    benchmarks: list[Ints | slice] = [slice(None)]
    if len(sizes) > 1:
        benchmarks = [np.flatnonzero(strata[varied] == stratum) for stratum in range(len(sizes))]
    observed = _distances(deviations[varied][None], sizes, benchmarks).max()
    largest = np.zeros(draws)

    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // max(1, int(varied.sum()) * levels))
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        repeated = np.broadcast_to(deviations[varied], (count, int(varied.sum()), levels))
        permuted = generator.permuted(repeated, axis=2)
        largest[start : start + count] = _distances(permuted, sizes, benchmarks).max(1)
    beyond = np.count_nonzero(largest >= observed - 1e-9 * max(observed, 1.0))
    return float(observed), float((1 + beyond) / (1 + draws))


def level_units(
    grades: Floats,
    promised: Flags,
    strata: Ints,
    level_of_cell: Sequence[int],
    *,
    by_trace: bool,
    clusters: Ints | None = None,
) -> Units:
    """Return each level minus the mean of the others, by units.

    `grades` [problems, cells, samples] are in [0, 1], NaN where one is missing; missing ones count at worst. `promised`
    [problems, samples] are those that all cells were to have.
    """
    is_known = ~np.isnan(grades)
    low = average_levels(np.where(is_known, grades, 0.0), level_of_cell)
    high = average_levels(np.where(is_known, grades, 1.0), level_of_cell)
    others = len(low) - 1
    lowest = np.where(promised, low - (high.sum(0) - high) / others, math.nan)
    highest = np.where(promised, high - (low.sum(0) - low) / others, math.nan)
    middle = (lowest + highest) / 2
    return units_between(middle, lowest, highest, strata, by_trace=by_trace, clusters=clusters)


def level_contrasts_of(units: Units, widening: float = 1.0) -> list[Difference]:
    """Return the contrast of each level, with limits and p-values that hold for all levels together."""
    levels = len(units.means)
    contrasts = units.contrasts(normal_quantile(LEVEL / 2 / levels), widening)
    return [replace(contrast, p=min(1.0, levels * contrast.p)) for contrast in contrasts if contrast is not None]


def _distances(deviations: Floats, sizes: Ints, benchmarks: Sequence[Ints | slice]) -> Floats:
    """Return the distance of each level from 0 in standard errors, over benchmarks of these `sizes` [draws, levels].

    `deviations` [draws, varied problems, levels] are those of the problems that `benchmarks` lists; all other problems
    of a benchmark have deviations of 0.
    """
    total = np.zeros((len(deviations), deviations.shape[2]))
    variances = np.zeros_like(total)
    for size, problems in zip(sizes.tolist(), benchmarks, strict=True):
        of_benchmark = deviations[:, problems]
        mean = of_benchmark.sum(1) / size
        squares = np.einsum("dpl,dpl->dl", of_benchmark, of_benchmark)
        # Problems that are not varied are counted by `size` and add 0 to the squares.
        variance = (squares - size * mean**2) / max(size - 1, 1)
        total += mean
        variances += np.maximum(variance, 0.0) / size

    lengths = np.abs(total / len(sizes))
    errors = np.sqrt(variances) / len(sizes)
    distances = np.minimum(lengths / np.maximum(errors, _TINY), _INFINITE)
    return np.asarray(np.where(lengths > _TINY, distances, 0.0))
