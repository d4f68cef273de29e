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

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvatlas.stats.estimates.pass_at_1 import LEVEL, Floats, Ints, Z

FLIPS = 10_000
#: Up to this many problems all sign patterns are tried instead of a sample of them.
EXACT_UP_TO = 14
#: The quantile to add for a power of 0.8.
POWER = float(stats.norm.ppf(0.8))


class TestMethod(StrEnum):
    """How "all cells equal" was tested."""

    SIGN_FLIPS = "permutation test by problem (sign flips of each problem's deviations from its own mean)"
    CHI_SQUARE = (
        "chi-square test with the binomial bound: as if all samples of the same problems were independent draws of "
        "equal difficulty"
    )
    E_VALUES = "e-values of an adaptive sweep, over all its settings on the mean over benchmarks; valid at any stop"


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


def omnibus(means: Floats, strata: Ints, *, flips: int = FLIPS, seed: int = 0) -> Test:
    """Test "all cells equal" by flipping the sign of whole problems.

    A problem's deviations from its own mean over cells could under "no difference" as well have the other sign; the
    statistic is the sum of squares of the cells' mean deviations. Unlike shuffling the cells of each problem this does
    not take cells to be equally alike: settings that share the beginning of a trace are more alike the nearer they
    are, and shuffling then rejects in up to 10 % of maps without any difference (bench/results/calibration.json).
    Source: Romano (1990), JASA 85:686-692 (sign changes); Phipson and Smyth (2010), SAGMB 9:39 (p is never 0).
    """
    if means.shape[1] < 2:
        return Test(0.0, 1.0, TestMethod.SIGN_FLIPS)
    deviations = _weighed(means - means.mean(1, keepdims=True), strata)
    observed = float((deviations.sum(0) ** 2).sum())
    chance = ((signs(len(means), flips, seed) @ deviations) ** 2).sum(1)
    expected = float((deviations**2).sum())
    if expected < 1e-18:
        return Test(0.0, 1.0, TestMethod.SIGN_FLIPS)
    return Test(observed / expected, _share(chance >= observed - 1e-12, len(means)), TestMethod.SIGN_FLIPS)


def plateau(means: Floats, strata: Ints, *, flips: int = FLIPS, seed: int = 0, gate: bool = True) -> Plateau:
    """The cells that may be the best: for each, the test of "no other cell is better", over all others together.

    The statistic is the largest, over the other cells, of the summed differences over the root of their summed squares;
    its distribution comes from flipping the signs of whole problems in all cells at once, so that the multiplicity and
    the likeness of cells are taken into account. The best cell stays on the plateau with at least 95 %. With `gate` all
    cells stay where `omnibus` gives no evidence of any difference, so that the two never contradict each other.

    Source: Hsu (1981), Annals of Statistics 9:1026-1034 (multiple comparisons with the best); Romano and Wolf (2005),
    JASA 100:94-108 (maximum statistics by resampling).
    """
    count = means.shape[1]
    own = _weighed(means, strata)
    observed, flipped = own.sum(0), signs(len(means), flips, seed) @ own
    norms = _norms(own)
    errors = difference_errors(means, strata)
    p, may_lose = np.ones(count), np.zeros(count)
    for cell in range(count):
        others = np.arange(count) != cell
        scale = norms[others, cell]
        best = ((observed[others] - observed[cell]) / scale).max(initial=0.0)
        chance = ((flipped[:, others] - flipped[:, [cell]]) / scale).max(1, initial=0.0)
        p[cell] = _share(chance >= best - 1e-12, len(means)) if best > 0 else 1.0
        reach = observed[others] - observed[cell] + np.quantile(chance, 1 - LEVEL) * errors[others, cell]
        may_lose[cell] = min(1.0, reach.max(initial=0.0))
    member = p >= LEVEL
    if gate and omnibus(means, strata, flips=flips, seed=seed).p >= LEVEL:
        member = np.ones(count, bool)
    return Plateau(member, p, may_lose)


def contrast(means: Floats, strata: Ints, coefficients: Floats, *, flips: int = FLIPS, seed: int = 0) -> Contrast:
    """The weighted sum over cells with its interval (Student's over problems) and sign-flip p-value."""
    each = means @ coefficients
    value = float((weights(strata) * each).sum())
    error, freedom = _error(each, strata)
    reach = float(np.abs(coefficients).sum())
    half = reach if freedom < 1 else float(stats.t.ppf(0.975, freedom)) * error
    if freedom >= 1 and error < 1e-12:
        # No spread says nothing; as for two settings, one problem each of the extremes is added.
        half = Z * float(np.append(each, [reach, -reach]).std()) / math.sqrt(len(each) + 2)
    p = sign_flip_p(weights(strata) * each, flips=flips, seed=seed)
    return Contrast(value, max(-reach, value - half), min(reach, value + half), p)


def sign_flip_p(differences: Floats, *, flips: int = FLIPS, seed: int = 0) -> float:
    """Two-sided permutation p-value of "no difference" from a difference (weighed, if need be) for each problem.

    Under "no difference" each could as well have the other sign (Romano 1990, JASA 85:686-692). Problems without a
    difference do not count; without any that has one p is 1. Exact for few problems, else never 0 (Phipson and Smyth
    2010, SAGMB 9:39).
    """
    nonzero = differences[np.abs(differences) > 1e-12 * np.abs(differences).max(initial=1e-12)]
    if not len(nonzero):
        return 1.0
    bar = abs(float(nonzero.sum())) - 1e-12
    return _share(np.abs(signs(len(nonzero), flips, seed) @ nonzero) >= bar, len(nonzero))


def slope(levels: Sequence[int], count: int) -> Floats:
    """Coefficients over cells of the rise of the least-squares line over equally spaced levels, lowest to highest.

    `levels` is the level of each cell, from 0 to `count` - 1, each level with any number of cells, which weigh equally.
    """
    sizes = np.bincount(levels, minlength=count)
    steps = np.arange(count) - (count - 1) / 2
    by_level = steps / (steps**2).sum() * (count - 1)
    return np.asarray([by_level[level] / sizes[level] for level in levels], float)


def level_effect(levels: Sequence[int], level: int) -> Floats:
    """Coefficients over cells of the mean of one level minus the mean of all levels."""
    sizes = np.bincount(levels)
    used = int((sizes > 0).sum())
    return np.asarray([((at == level) - 1 / used) / sizes[at] for at in levels], float)


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
    problems = math.ceil(len(differences) * total / wanted)
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
    for rank, place in enumerate(sorted(range(len(p)), key=lambda one: p[one])):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = so_far
    return adjusted


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjusted p-values: of the claims below 0.05, 5 % are expected to be false.

    Source: Benjamini and Hochberg (1995), J. Royal Statistical Society B 57:289-300; through scipy.
    """
    return [float(one) for one in stats.false_discovery_control(p)] if p else []


@lru_cache(maxsize=4)
def signs(problems: int, flips: int, seed: int) -> Floats:
    """[patterns, problems] of +1 and -1: every pattern for few problems, otherwise `flips` random ones of this seed."""
    if problems <= EXACT_UP_TO:
        bits = (np.arange(2**problems)[:, None] >> np.arange(problems)) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, size=(flips, problems))
    return np.asarray(1 - 2 * bits, np.float64)


def _share(hits: NDArray[np.bool_], problems: int) -> float:
    if problems <= EXACT_UP_TO:
        return float(hits.mean())
    return float((1 + np.count_nonzero(hits)) / (1 + len(hits)))


def _weighed(values: Floats, strata: Ints) -> Floats:
    return np.asarray(weights(strata)[:, None] * values, float)


def chosen_best(means: Floats, baseline: Floats, strata: Ints, *, flips: int = FLIPS, seed: int = 0) -> float:
    """The p-value of "no cell is better than the baseline" [problems], for the best cell that was chosen among all.

    The largest over cells of the summed differences over the root of their summed squares, against sign flips of whole
    problems: the choice is part of the test. Source: Romano and Wolf (2005), JASA 100:94-108.
    """
    own = _weighed(means - baseline[:, None], strata)
    scale = np.sqrt(np.maximum((own**2).sum(0), 1e-18))
    best = float((own.sum(0) / scale).max())
    chance = ((signs(len(means), flips, seed) @ own) / scale).max(1)
    return _share(chance >= best - 1e-12, len(means)) if best > 1e-12 else 1.0


def _norms(own: Floats) -> Floats:
    """[cells, cells]: the root of the summed squares of the weighed differences, never 0."""
    products = own.T @ own
    squares = np.diag(products)[:, None] + np.diag(products)[None] - 2 * products
    return np.asarray(np.sqrt(np.maximum(squares, 1e-18)), np.float64)


def difference_errors(means: Floats, strata: Ints) -> Floats:
    """[cells, cells]: the standard errors of the weighed mean differences, by problem within benchmarks."""
    total = np.zeros((means.shape[1],) * 2)
    count = int(strata.max()) + 1
    for stratum in range(count):
        rows = means[strata == stratum]
        if len(rows) > 1:
            spread = np.cov(rows, rowvar=False, ddof=1).reshape(total.shape)
            total += (np.diag(spread)[:, None] + np.diag(spread)[None] - 2 * spread) / len(rows) / count**2
        else:
            total += 1.0
    return np.asarray(np.sqrt(np.maximum(total, 0.0)), np.float64)


def _error(each: Floats, strata: Ints) -> tuple[float, int]:
    """The standard error of the weighed mean of `each` [problems], and its degrees of freedom."""
    count = int(strata.max()) + 1
    groups = [each[strata == stratum] for stratum in range(count)]
    if any(len(group) < 2 for group in groups):
        return math.inf, 0
    variance = math.fsum(float(group.var(ddof=1)) / len(group) for group in groups) / count**2
    return math.sqrt(variance), len(each) - count
