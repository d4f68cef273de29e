"""Do several settings, or the levels of an axis, behave alike? Whole levels are permuted within each problem.

Hypothesis: within a problem the levels of an axis could stand in any order (they are exchangeable). Levels are averaged
over the other axis first, and a problem is permuted as a whole, with all of its cells and samples, so nothing is
assumed about how much traces of one level share. A rejection means "the levels do not behave alike". It does not
mean "their means differ": levels of equal means that are unlike in another way are rejected, too.

The statistic is the largest of the levels' mean distances from the others, each in units of its standard error. It is
studentised, since the raw one errs often where one level is unlike the others. Limits are estimate +- c standard
errors with the 95 % quantile c of the same permutations, so a limit excludes 0 exactly where the level's p-value is at
most 5 %. With two levels this is the sign-flip test of two settings.

What is known of it: exact where levels are exchangeable; docs/statistics.md quotes the worst designs known where they
are equal and not exchangeable (shared trunks, one noisier level).

Source: Pesarin and Salmaso (2010), Permutation Tests for Complex Data, chapters 5 and 6; Westfall and Young (1993),
Resampling-Based Multiple Testing, chapter 2 (largest statistic); Janssen (1997), Statistics & Probability Letters
36:9-21 (studentised permutation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.stats.numerics.arrays import LEVEL, Contrast, Floats, Ints, normal_quantile, problems_by_benchmark
from kvatlas.stats.numerics.bounded import interval

#: Random orders of the levels of each problem.
DRAWS = 9_999
#: Numbers below this count as 0.
_TINY = 1e-12
#: The statistic of a mean that is not 0 and has no spread.
_INFINITE = 1e6
#: Permuted numbers that are held at once: what fits in the cache of a core.
_CHUNK = 100_000


@dataclass(frozen=True)
class LevelTest:
    """Each level minus the mean of the others.

    `contrasts` have limits and p-values that hold for all levels together, `statistic` is the largest distance in
    standard errors, and `p` that of "all levels behave alike". `hidden` is the largest difference of a level's mean
    from the others' that bounded limits allow, for all levels together.
    """

    contrasts: tuple[Contrast, ...]
    statistic: float
    p: float
    hidden: float


def average_levels(means: Floats, level_of_cell: Sequence[int]) -> Floats:
    """Return [problems, levels]: the mean over the cells of each level of `means` [problems, cells]."""
    numbers = np.asarray(level_of_cell)
    columns = [means[:, numbers == level].mean(1) for level in range(int(numbers.max()) + 1)]
    return np.stack(columns, axis=1)


def permute_levels(values: Floats, strata: Ints, draws: int = DRAWS, seed: int = 0) -> LevelTest:
    """Test "the levels behave alike" on `values` [problems, levels], with two levels or more."""
    levels = values.shape[1]
    if levels < 2:
        raise ValueError(f"expected two levels or more, got {levels}")
    deviations = values - values.mean(1, keepdims=True)
    # A problem on which all levels are equal stays as it is in every order.
    varied = np.abs(deviations).max(1) > _TINY
    sizes = np.bincount(strata)
    statistic = _Statistic(sizes, strata[varied])
    observed = statistic(deviations[varied][None])[0]
    largest = np.zeros(draws)
    generator = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // max(1, int(varied.sum()) * levels))
    for start in range(0, draws, at_once):
        count = min(at_once, draws - start)
        repeated = np.broadcast_to(deviations[varied], (count, int(varied.sum()), levels))
        permuted = generator.permuted(repeated, axis=2)
        largest[start : start + count] = statistic(permuted).max(1)
    largest.sort()
    beyond = draws - np.searchsorted(largest, observed - 1e-9 * np.maximum(observed, 1.0))
    p = (1 + beyond) / (1 + draws)
    # With fewer than this many permutations beyond a statistic its p-value is at most 5 %.
    critical = largest[draws - int(LEVEL * (1 + draws))]
    factor = levels / (levels - 1)
    low, high = _bounded_limits(factor * deviations.T, strata)
    means, errors = statistic.moments(deviations[varied][None])
    value = factor * means[0]
    error = factor * errors[0]
    # The variance of a benchmark with a single problem is unknown, and a level without spread has no standard error.
    by_error = (error > _TINY) & (sizes.min() > 1)
    bottom = np.where(by_error, np.maximum(value - critical * error, -1.0), low)
    top = np.where(by_error, np.minimum(value + critical * error, 1.0), high)
    rows = zip(value.tolist(), bottom.tolist(), top.tolist(), p.tolist(), strict=True)
    contrasts = tuple(Contrast(*row) for row in rows)
    hidden = float(np.maximum(-low, high).max())
    return LevelTest(contrasts, float(observed.max()), float(p.min()), hidden)


def _bounded_limits(contrasts: Floats, strata: Ints) -> tuple[Floats, Floats]:
    """Return the limits [levels] of the means of `contrasts` [levels, problems], for all levels together."""
    z = normal_quantile(LEVEL / 2 / len(contrasts))
    return interval(contrasts, -1.0, 1.0, z, strata)


@dataclass(frozen=True)
class _Statistic:
    """The distance of each level from 0 in standard errors, over benchmarks of these `sizes`.

    It takes deviations [draws, varied problems, levels]; all other problems of a benchmark have deviations of 0.
    """

    sizes: Ints
    strata: Ints

    def __call__(self, deviations: Floats) -> Floats:
        means, errors = self.moments(deviations)
        lengths = np.abs(means)
        distances = np.minimum(lengths / np.maximum(errors, _TINY), _INFINITE)
        return np.asarray(np.where(lengths > _TINY, distances, 0.0))

    def moments(self, deviations: Floats) -> tuple[Floats, Floats]:
        """Return the means over benchmarks and their standard errors, both [draws, levels]."""
        total = np.zeros((len(deviations), deviations.shape[2]))
        variances = np.zeros_like(total)
        for size, problems in self._benchmarks():
            of_benchmark = deviations[:, problems]
            mean = of_benchmark.sum(1) / size
            squares = np.einsum("dpl,dpl->dl", of_benchmark, of_benchmark)
            # Problems that are not varied are counted by `size` and add 0 to the squares.
            variance = (squares - size * mean**2) / max(size - 1, 1)
            total += mean
            variances += np.maximum(variance, 0.0) / size
        return total / len(self.sizes), np.sqrt(variances) / len(self.sizes)

    def _benchmarks(self) -> list[tuple[int, Ints | slice]]:
        """Return the size of each benchmark with the indices of its varied problems."""
        if len(self.sizes) == 1:
            return [(int(self.sizes[0]), slice(None))]
        # A problem of the last benchmark is added for a moment, so that benchmarks without a varied one are there too.
        indices = problems_by_benchmark(np.append(self.strata, len(self.sizes) - 1))
        indices[-1] = indices[-1][:-1]
        return list(zip(self.sizes.tolist(), indices, strict=True))
