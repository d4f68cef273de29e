"""Inference on a whole map, on arrays: is there any difference, which cells may be best, what do the axes do.

Everywhere `means` is [problems, cells]: the mean grade of a problem under each setting, in [0, 1]. `strata` is
[problems]: the number, from 0, of the benchmark that a problem belongs to. Benchmarks weigh equally and so do the
problems of one. Problems are the independent units; nothing is assumed about how alike cells are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.intervals import (
    LEVEL,
    Floats,
    Ints,
    Z,
    correlations,
    interval,
    p_value,
    score,
    simultaneous_p,
    simultaneous_quantile,
)

FLIPS = 10_000
#: Up to this many problems all sign patterns are tried instead of a sample of them.
EXACT_UP_TO = 14
#: The quantile to add for a power of 0.8.
POWER = float(stats.norm.ppf(0.8))


class TestMethod(StrEnum):
    """How "all cells equal" was tested."""

    LARGEST = "largest difference of a cell to the others, by problem, adjusted over all cells"
    CHI_SQUARE = (
        "chi-square test with the binomial bound: as if all samples of the same problems were independent draws of "
        "equal difficulty"
    )


@dataclass(frozen=True)
class Test:
    """A test of "all cells equal". `statistic` is the spread between cells over what chance gives: 1 is noise."""

    statistic: float
    p: float
    method: TestMethod


@dataclass(frozen=True)
class Plateau:
    """Which cells are statistically tied with the best: not shown worse than it.

    `p` [cells]: of "this cell is the best"; `member` [cells]: p of at least 0.05; `may_lose` [cells]: with 95 %
    confidence the cell is at most this far below the best cell.
    """

    member: NDArray[np.bool_]
    p: Floats
    may_lose: Floats


@dataclass(frozen=True)
class Contrast:
    """A difference with its 95 % interval and the two-sided p-value of "none"; NaN where that was not asked for."""

    value: float
    low: float
    high: float
    p: float = math.nan


def weights(strata: Ints) -> Floats:
    """The weight of each problem; they sum to 1, equal for every benchmark."""
    sizes = np.bincount(strata)
    return np.asarray(1.0 / (len(sizes) * sizes[strata]), float)


def omnibus(means: Floats, strata: Ints) -> Test:
    """Test "all cells have the same mean": each cell against the mean of the others, adjusted over all cells.

    The p-value is that of the largest score (`intervals.score`), so it holds where cells differ in how rarely they
    collapse, too. The statistic is the sum of squares of the cells' mean deviations over what chance gives.
    """
    count = means.shape[1]
    own = _weighed(means - means.mean(1, keepdims=True), strata)
    expected = float((own**2).sum())
    if count < 2 or expected < 1e-18:
        return Test(0.0, 1.0, TestMethod.LARGEST)
    deviations = (means - means.mean(1, keepdims=True)).T * (count / (count - 1))
    scores = score(deviations, 0.0, -1.0, 1.0, strata)
    p = simultaneous_p(scores, correlations(deviations, strata)).min()
    return Test(float((own.sum(0) ** 2).sum()) / expected, float(p), TestMethod.LARGEST)


def plateau(means: Floats, strata: Ints, *, flips: int = FLIPS, seed: int = 0, gate: bool = True) -> Plateau:
    """The cells that may be the best: for each, the test of "no other cell is better", over all others together.

    The statistic is the largest score of the others' differences to the cell (`intervals.score`). How far the largest
    goes by chance comes from flipping the signs of whole problems in all cells at once, so that the multiplicity and
    the likeness of cells are taken into account. With `gate` all cells stay where `omnibus` gives no evidence of any
    difference, so that the two never contradict each other.

    Source: Hsu (1981), Annals of Statistics 9:1026-1034 (multiple comparisons with the best); Romano and Wolf (2005),
    JASA 100:94-108 (maximum statistics by resampling).
    """
    count = means.shape[1]
    p, may_lose = np.ones(count), np.zeros(count)
    if count < 2:
        return Plateau(p >= LEVEL, p, may_lose)
    own = _weighed(means, strata)
    flipped, norms = signs(len(means), flips, seed) @ own, _norms(own)
    for cell in range(count):
        others = np.arange(count) != cell
        ahead = (means[:, others] - means[:, [cell]]).T
        chance = _largest_flip(flipped[:, others] - flipped[:, [cell]], norms[others, cell])
        best = float(score(ahead, 0.0, -1.0, 1.0, strata).max())
        p[cell] = _one_sided(best, chance)
        may_lose[cell] = float(interval(ahead, -1.0, 1.0, _one_sided_quantile(chance), strata)[1].max())
    member = p >= LEVEL
    if gate and omnibus(means, strata).p >= LEVEL:
        member = np.ones(count, bool)
    return Plateau(member, p, may_lose)


def _largest_flip(flipped: Floats, norms: Floats) -> Floats:
    """The sorted largest of the flipped sums in units of their root mean squares."""
    return np.sort((flipped / norms).max(1))


def _one_sided(best: float, chance: Floats) -> float:
    """The p-value of a largest score: no less than that of one test, no more than Bonferroni's would be."""
    beyond = (1 + len(chance) - np.searchsorted(chance, best - 1e-12)) / (1 + len(chance))
    return float(max(stats.norm.sf(best), beyond)) if best > 0 else 1.0


def _one_sided_quantile(chance: Floats) -> float:
    return max(float(np.quantile(chance, 1 - LEVEL)), float(stats.norm.isf(LEVEL)))


def contrast(means: Floats, strata: Ints, coefficients: Floats) -> Contrast:
    """The weighed sum over cells, by problem."""
    low, high = float(np.minimum(coefficients, 0).sum()), float(np.maximum(coefficients, 0).sum())
    return mean_contrast(means @ coefficients, strata, low, high)


def joint_contrasts(means: Floats, strata: Ints, rows: Floats) -> tuple[float, list[Contrast]]:
    """The contrasts of `rows` [k, cells] of coefficients, with limits that hold together, and the p-value of none."""
    values = rows @ means.T
    low, high = np.minimum(rows, 0).sum(1), np.maximum(rows, 0).sum(1)
    alike = correlations(values, strata)
    bottom, top = interval(values, low, high, simultaneous_quantile(alike), strata)
    p = simultaneous_p(score(values, 0.0, low, high, strata), alike)
    centre = values @ weights(strata)
    return float(p.min()), [Contrast(*map(float, numbers)) for numbers in zip(centre, bottom, top, p, strict=True)]


def mean_contrast(values: Floats, strata: Ints | None = None, low: float = -1.0, high: float = 1.0) -> Contrast:
    """The mean of `values` [problems] in [`low`, `high`], with its interval and the p-value of 0 (`score`)."""
    bottom, top = interval(values, low, high, Z, strata)
    p = p_value(score(values, 0.0, low, high, strata))
    value = values.mean() if strata is None else weights(strata) @ values
    return Contrast(float(value), float(bottom), float(top), float(p))


def slope(levels: Sequence[int], count: int) -> Floats:
    """Coefficients over cells of the rise of the least-squares line over equally spaced levels, lowest to highest.

    `levels` is the level of each cell, from 0 to `count` - 1, each level with any number of cells, which weigh equally.
    """
    sizes = np.bincount(levels, minlength=count)
    steps = np.arange(count) - (count - 1) / 2
    by_level = steps / (steps**2).sum() * (count - 1)
    return np.asarray([by_level[level] / sizes[level] for level in levels], float)


def level_effect(levels: Sequence[int], level: int) -> Floats:
    """Coefficients over cells of the mean of one level minus the mean of the others."""
    sizes = np.bincount(levels)
    others = max(int((sizes > 0).sum()) - 1, 1)
    return np.asarray([(1.0 if at == level else -1 / others) / sizes[at] for at in levels], float)


@dataclass(frozen=True)
class Need:
    """What it takes to show a difference as large as the observed one, with a power of 0.8 at p < 0.05, two-sided.

    `samples` of each of the same problems (None: more samples alone cannot do it, or what they would add is unknown),
    or `problems` with as many samples each as now (None: there is no difference to show).
    """

    samples: int | None
    problems: int | None


def need(first: Floats, second: Floats, strata: Ints) -> Need:
    """What it takes to tell two settings apart; both [problems, samples], the same samples of the same problems.

    The variance between problems stays however many samples there are; that within problems shrinks with them. With
    one sample a problem the two cannot be told apart, and only more problems can be reckoned.
    """
    differences = first - second
    samples = differences.shape[1]
    value = float((weights(strata) * differences.mean(1)).sum())
    if abs(value) < 1e-12:
        return Need(None, None)
    wanted = (value / (Z + POWER)) ** 2
    error, freedom = _error(differences.mean(1), strata)
    if freedom < 1:
        return Need(None, None)
    total = error**2
    # The imagined problem of the interval costs about 2 / difference problems.
    problems = math.ceil(len(differences) * total / wanted + 2 / abs(value))
    if samples < 2:
        return Need(1 if total <= wanted else None, problems)
    within = float((weights(strata) ** 2 * differences.var(1, ddof=1) / samples).sum())
    between = max(0.0, total - within)
    return Need(math.ceil(samples * within / (wanted - between)) if wanted > between else None, problems)


def peak_shares(means: Floats, strata: Ints, *, draws: int = 2_000, seed: int = 0) -> Floats:
    """[cells]: in what share of bootstrap samples of the problems (within benchmarks) each cell is the highest."""
    generator = np.random.default_rng(seed)
    totals = np.zeros((draws, means.shape[1]))
    for stratum in range(int(strata.max()) + 1):
        rows = means[strata == stratum]
        counts = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=draws)
        totals += counts @ rows / len(rows)
    return shares_of_best(totals)


def shares_of_best(values: Floats) -> Floats:
    """[cells]: the share of rows of `values` [draws, cells] in which a cell is highest; equals share the row."""
    best = values >= values.max(1, keepdims=True) - 1e-12
    return np.asarray((best / best.sum(1, keepdims=True)).mean(0), float)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the chance of any false claim among those below 0.05 is at most 0.05.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65-70.
    """
    adjusted, so_far = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjusted p-values: of the claims below 0.05, 5 % are expected to be false.

    Source: Benjamini and Hochberg (1995), J. Royal Statistical Society B 57:289-300; through scipy.
    """
    return [float(value) for value in stats.false_discovery_control(p)] if p else []


@lru_cache(maxsize=4)
def signs(problems: int, flips: int, seed: int) -> Floats:
    """[patterns, problems] of +1 and -1: every pattern for few problems, otherwise `flips` random ones of this seed."""
    if problems <= EXACT_UP_TO:
        bits = (np.arange(2**problems)[:, None] >> np.arange(problems)) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(flips, problems))
    return np.asarray(1 - 2 * bits, np.float64)


def _weighed(values: Floats, strata: Ints) -> Floats:
    return np.asarray(weights(strata)[:, None] * values, float)


def chosen_best(means: Floats, baseline: Floats, strata: Ints, *, flips: int = FLIPS, seed: int = 0) -> float:
    """The p-value of "no cell is better than the baseline" [problems], for the best cell that was chosen among all.

    The largest score over cells, against sign flips of whole problems: the choice is part of the test. Source: Romano
    and Wolf (2005), JASA 100:94-108.
    """
    ahead = means - baseline[:, None]
    own = _weighed(ahead, strata)
    norms = np.sqrt(np.maximum((own**2).sum(0), 1e-18))
    best = float(score(ahead.T, 0.0, -1.0, 1.0, strata).max())
    return _one_sided(best, _largest_flip(signs(len(means), flips, seed) @ own, norms))


def _norms(own: Floats) -> Floats:
    """[cells, cells]: the root of the summed squares of the weighed differences, never 0."""
    products = own.T @ own
    squares = np.diag(products)[:, None] + np.diag(products)[None] - 2 * products
    return np.asarray(np.sqrt(np.maximum(squares, 1e-18)), np.float64)


def _error(values: Floats, strata: Ints) -> tuple[float, int]:
    """The standard error of the weighed mean of `values` [problems], and its degrees of freedom."""
    count = int(strata.max()) + 1
    groups = [values[strata == stratum] for stratum in range(count)]
    if any(len(group) < 2 for group in groups):
        return math.inf, 0
    variance = math.fsum(float(group.var(ddof=1)) / len(group) for group in groups) / count**2
    return math.sqrt(variance), len(values) - count


#: The share of problems on which one setting is right and the other wrong, with one sample each: near settings and far
#: ones on the demo's grid.
DISCORDANCE = (0.05, 0.2)
#: Normal quantiles of a two-sided 5 % and of a power of 0.8, added.
_NEEDED = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))


def problems_for(difference: float, discordance: float) -> int:
    """Return the problems that show a paired `difference` in (0, 1), with a power of 0.8 at a two-sided p of 5 %.

    Raises KvatlasError for a difference outside (0, 1).
    """
    if not 0 < difference < 1:
        raise KvatlasError(f"A difference to detect lies between 0 and 100 points; {100 * difference:g} was given.")
    return math.ceil(_variance(discordance) * (_NEEDED / difference) ** 2)


def detectable(problems: float, discordance: float) -> float:
    """Return the difference in (0, 1] that `problems` show with a power of 0.8; 1 where none is shown."""
    return min(1.0, _NEEDED * math.sqrt(_variance(discordance) / problems))


def _variance(discordance: float) -> float:
    """Return the variance of a paired difference of -1, 0 or 1, without the squared mean.

    More samples of a problem remove an unknown share of it, so one sample is assumed.
    """
    if not 0 < discordance <= 1:
        raise KvatlasError(f"discordance is a share above 0 and at most 1; {discordance} was given.")
    return discordance


def designs(sizes: Sequence[int], points: float, discordances: Sequence[float]) -> list[dict[str, Any]]:
    """Return for each discordance the problems that show `points`, and the points that benchmarks of `sizes` show."""
    # Benchmarks weigh equally, so small ones decide.
    own = round(len(sizes) ** 2 / sum(1 / size for size in sizes))
    return [
        {
            "points": points,
            "discordance": share,
            "problems": problems_for(points / 100, share),
            "own_problems": own,
            "own_points": round(100 * detectable(own, share), 4),
        }
        for share in discordances or DISCORDANCE
    ]
