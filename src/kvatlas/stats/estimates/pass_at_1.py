"""Means with their 95 % intervals: for problems like these, for these very problems, and over benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.stats.estimates.bounded_mean import LEVEL as LEVEL
from kvatlas.stats.estimates.bounded_mean import Floats as Floats
from kvatlas.stats.estimates.bounded_mean import Ints as Ints
from kvatlas.stats.estimates.bounded_mean import Z as Z
from kvatlas.stats.estimates.bounded_mean import interval, yes_no_interval

#: Imagined problems in the variance between samples, more for few samples, which leave it too small.
_UNSEEN_WITHIN = 1.5
#: Imagined samples that went the other way, for problems that nearly always end alike.
_UNSEEN_SAMPLES = 2.0
#: With fewer hits or misses than this, where its exact coverage falls below 94 %, Wilson's interval is joined by mid-P.
_FEW = 30.0

BINOMIAL_NOTE = Note(
    NoteKind.INTERVAL, "intervals are the binomial bound: n = problems, as if all samples of a problem agreed"
)


def share_interval(value: ArrayLike, n: ArrayLike, quantile: ArrayLike = Z) -> tuple[Floats, Floats]:
    """95 % intervals of shares in [0, 1] seen on `n` independent units (any shapes that broadcast; `n` not whole, too).

    The hull of Wilson's score interval and the mid-P exact one: either alone is too short for some values near 0 and 1
    (exact coverage at n = 30 falls to 0.84 and 0.93), the hull is not (0.94). A larger `quantile` than the normal's
    widens it, for an `n` that was estimated. Source: Wilson (1927); Berry and Armitage (1995), Statistician 44:417-423.
    """
    share, units, q = np.broadcast_arrays(
        np.asarray(value, float), np.asarray(n, float), np.minimum(np.asarray(quantile, float), 1e3)
    )
    low, high = wilson(share, units, q)
    reduced = units * (Z / q) ** 2
    low = np.minimum(low, _mid_p_low(share * reduced, reduced))
    high = np.maximum(high, 1 - _mid_p_low((1 - share) * reduced, reduced))
    return np.where(share <= 0, 0.0, np.maximum(low, 0.0)), np.where(share >= 1, 1.0, np.minimum(high, 1.0))


def wilson(share: Floats, n: Floats, quantile: Floats) -> tuple[Floats, Floats]:
    """Score intervals of shares seen on `n` units. Source: Wilson (1927), JASA 22:209-212."""
    square = quantile * quantile / n
    centre = (share + square / 2) / (1 + square)
    half = quantile / (1 + square) * np.sqrt(np.maximum(share * (1 - share), 0) / n + square / (4 * n))
    low = np.where(share <= 0, 0.0, np.maximum(centre - half, 0.0))
    return low, np.where(share >= 1, 1.0, np.minimum(centre + half, 1.0))


def _mid_p_low(hits: Floats, n: Floats) -> Floats:
    """The p at which P(X > hits) + P(X = hits) / 2 is 0.025, by bisection; `hits` and `n` need not be whole."""
    low, high = np.zeros(hits.shape), np.ones(hits.shape)
    misses = np.maximum(n - hits, 0.0)
    for _ in range(40):
        middle = (low + high) / 2
        at_least = np.where(hits > 0, special.betainc(np.maximum(hits, 1e-12), misses + 1, middle), 1.0)
        more = np.where(misses > 0, special.betainc(hits + 1, np.maximum(misses, 1e-12), middle), 0.0)
        below = (at_least + more) / 2 < 0.025
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.where(hits > 0, low, 0.0)


def conditional_interval(means: Floats, within: Floats, samples: ArrayLike) -> tuple[Floats, Floats]:
    """95 % intervals for the mean on these very problems, over new samples.

    `means` and `within` are [..., problems]: the mean of a problem's samples and the estimated variance of that mean,
    NaN where there is one sample. Then only a bound is possible, that of independent draws (Hoeffding 1956, Annals of
    Mathematical Statistics 27:713-721); otherwise Wilson's interval with as many units as give that variance, 1.5 to 2
    imagined problems of full spread added, and at least 2 imagined samples that went the other way. With few hits or
    misses it is a `share_interval`.
    """
    problems = means.shape[-1]
    share = means.mean(-1)
    full = share * (1 - share)
    values = np.asarray(samples, float)
    draws = problems * values
    unseen = np.maximum((_UNSEEN_WITHIN + 2 / values**2) * full / values, _UNSEEN_SAMPLES / values**2)
    variance = np.nan_to_num((within.sum(-1) + unseen) / problems**2, nan=np.inf)
    known = (variance > 1e-18) & (full > 1e-18)
    units = np.where(known, full / np.where(known, variance, 1.0), 0.0)
    units = np.maximum(units, draws)
    few = np.isinf(variance) | (units * np.minimum(share, 1 - share) < _FEW)
    (low, high), (wide_low, wide_high) = wilson(share, units, np.asarray(Z)), share_interval(share, units)
    return np.where(few, wide_low, low), np.where(few, wide_high, high)


def pass_at_1(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean over problems of the mean over a problem's samples, with both standard errors and both intervals.

    `outcomes` holds for each problem the grades of its samples, each in [0, 1]: correctness, or progress. `low` and
    `high` are clustered by problem (`bounded_mean.interval`): they speak of problems like these. `given_low` and
    `given_high` speak of these very problems (`conditional_interval`). `se_clustered` is the standard deviation of the
    problem means over the root of their number (Miller 2024, arXiv 2411.00640, section 2.2); `se_conditional` comes
    from the spread of samples within problems and is unknown for one sample a problem.

    Raises KvatlasError where a problem has no samples or a grade is outside [0, 1].
    """
    if not outcomes or not all(len(samples) for samples in outcomes.values()):
        raise KvatlasError(
            "Pass@1 needs at least one problem and one sample of each; a problem without samples was given."
        )
    counts = [len(samples) for samples in outcomes.values()]
    means = np.array([float(np.mean(samples)) for samples in outcomes.values()])
    # Not "outside", so that a grade that is no number is refused as well.
    if not bool(np.all((means >= 0) & (means <= 1))):
        raise KvatlasError("Pass@1 needs grades between 0 and 1; others were given.")
    within = np.array([_variance_of_mean(samples) for samples in outcomes.values()])
    return from_problem_means(means, within, counts)


def from_problem_means(means: Floats, within: Floats, counts: Sequence[int]) -> Estimate:
    """The estimate from problem means in [0, 1], the variances of these means (NaN: unknown), samples by problem."""
    average = float(np.mean(counts))
    low, high = interval(means)
    given_low, given_high = conditional_interval(means, within, average)
    problems = len(means)
    known = not bool(np.isnan(within).any())
    return Estimate(
        float(means.mean()),
        float(low),
        float(high),
        problems,
        counts[0] if len(set(counts)) == 1 else None,
        se_clustered=float(means.std(ddof=1)) / math.sqrt(problems) if problems > 1 else None,
        se_conditional=math.sqrt(float(within.sum())) / problems if known else None,
        given_low=float(given_low),
        given_high=float(given_high),
    )


def _variance_of_mean(samples: Sequence[float]) -> float:
    return float(np.var(samples, ddof=1)) / len(samples) if len(samples) > 1 else math.nan


def mean_over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean over benchmarks, which are taken as fixed, with its 95 % intervals.

    The benchmarks' problems are independent, so the distances from each value to its own limits add in squares, lower
    and upper side apart, and so do standard errors. Unknown where one of the benchmarks' is. Problems are summed;
    samples are given where equal.

    Source: Zou and Donner (2008), Statistics in Medicine 27:1693-1702 (recovery of variances from intervals).
    Raises KvatlasError for an empty sequence.
    """
    if not estimates:
        raise KvatlasError("A mean over benchmarks needs at least one estimate; none was given.")
    count = len(estimates)
    value = math.fsum(e.value for e in estimates) / count
    low, high = _recovered(value, [(e.value, e.low, e.high) for e in estimates])
    given_low, given_high = _recovered(value, [(e.value, e.given_low, e.given_high) for e in estimates])
    problems = [e.problems for e in estimates if e.problems is not None]
    samples = {e.samples for e in estimates}
    return Estimate(
        value,
        low,
        high,
        sum(problems) if len(problems) == count else None,
        samples.pop() if len(samples) == 1 else None,
        se_clustered=_mean_error([e.se_clustered for e in estimates]),
        se_conditional=_mean_error([e.se_conditional for e in estimates]),
        given_low=given_low,
        given_high=given_high,
    )


def _recovered(
    value: float, parts: Sequence[tuple[float, float | None, float | None]]
) -> tuple[float, float] | tuple[None, None]:
    below = [part - low for part, low, _ in parts if low is not None]
    above = [high - part for part, _, high in parts if high is not None]
    if not len(below) == len(above) == len(parts):
        return None, None
    return max(0.0, value - math.hypot(*below) / len(parts)), min(1.0, value + math.hypot(*above) / len(parts))


def _mean_error(errors: Sequence[float | None]) -> float | None:
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(errors) if len(known) == len(errors) else None


def binomial_bound(value: float, problems: int, samples: int | None = None) -> tuple[float, float]:
    """A 95 % interval for a bare Pass@1 in [0, 1]: for problems like these, or with `samples` for these very problems.

    Without `samples` the interval of one sample a problem: however alike the samples of one
    problem are, problem means vary no more than yes and no do. With `samples` a
    `share_interval` with n = problems * samples: samples of these problems vary at most like independent draws. Both
    are bounds: wide enough, and often too wide.
    """
    if samples is None:
        return yes_no_interval(value, problems)
    low, high = share_interval(value, problems * samples)
    return float(low), float(high)


def with_binomial_bounds(maps: Sequence[Map]) -> list[Map]:
    """The maps with `binomial_bound` where an interval is unknown and the problems are; a note says so on each."""
    return [_bounded(map_) for map_ in maps]


def _bounded(map_: Map) -> Map:
    cells = {coord: _with_bound(cell) for coord, cell in map_.cells.items()}
    baselines = {name: _with_bound(cell) for name, cell in map_.baselines.items()}
    if cells == dict(map_.cells) and baselines == dict(map_.baselines):
        return map_
    return replace(map_, cells=cells, baselines=baselines, notes=(*map_.notes, BINOMIAL_NOTE))


def _with_bound(cell: Cell) -> Cell:
    estimate = cell.estimate
    if estimate.low is not None or estimate.problems is None:
        return cell
    low, high = binomial_bound(estimate.value, estimate.problems)
    given_low, given_high = binomial_bound(estimate.value, estimate.problems, estimate.samples or 1)
    bounded = replace(estimate, low=low, high=high, given_low=given_low, given_high=given_high)
    return replace(cell, estimate=bounded)
