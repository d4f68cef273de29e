"""Limits and tests for the mean of bounded values that hold under skew, saturation and rare collapse.

A few dozen problems have often missed the rare kind on which a setting fails altogether. So the limit on either side
counts 0.85 of an imagined problem at that end of the range: the lower limit of values x in [0, 1] is a quantile of the
weighted mean of the x and of 0, with Dirichlet weights of 1 for each problem and 0.85 for the 0. With a whole imagined
problem this is Gaffke's bound, which for yes and no is that of Clopper and Pearson; 0.85 is the smallest weight, in
steps of 0.05, at which the exact coverage for yes and no is at least 94 % for chances from 1 to 99 % and 16 to 500
problems. Nothing is assumed about the values but independence and the range. The quantiles come from a saddlepoint
approximation, accurate to some percent of the tail's chance, so that nothing is drawn at random.

Source: Gaffke (2005), Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable, Mathematical Methods of Statistics 14:451-467; Learned-Miller and Thomas (2020), arXiv 1905.06208;
Lugannani and Rice (1980), Advances in Applied Probability 12:475-490.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: What passes for evidence, and what is left out of a 95 % interval.
LEVEL = 0.05
#: The 97.5 % quantile of the normal distribution.
Z = float(special.ndtri(0.975))
#: The weight of the imagined problem at an end of the range.
UNSEEN = 0.85
#: Its least weight where problems have several samples.
LEAST_UNSEEN = 0.45
#: The least change of a problem's mean that several samples leave possible.
LEAST_CHANGE = 0.75
#: Scores are cut off here; a p-value of 1e-15 is as good as 0.
_LARGEST = 8.0
_TINY = 1e-12
#: Logarithms of tilts stay within this.
_FAR = 60.0


def interval(
    values: Floats,
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
    z: ArrayLike = Z,
    strata: Ints | None = None,
    unseen: float = UNSEEN,
) -> tuple[Floats, Floats]:
    """Two-sided confidence intervals [...] of means; `values` [..., n] lie in [`low`, `high`], one range for each row.

    `z` is the normal quantile of each side. With `strata` [n], the numbers from 0 of the benchmarks, the mean is that
    over benchmarks, which weigh equally. `unseen` is the weight of the imagined problem at each end.
    """
    sides = [_Side.of(values, low, high, strata, flipped, unseen) for flipped in (False, True)]
    quantile = np.broadcast_to(np.asarray(z, float), values.shape[:-1]).ravel()
    bottom, top = (side.limit(quantile).reshape(values.shape[:-1]) for side in sides)
    return np.maximum(low, bottom), np.minimum(high, top)


def yes_no_interval(share: float, n: int) -> tuple[float, float]:
    """The interval of n values that are all 0 or 1, with this mean; exact."""
    right = share * n
    low = float(special.betaincinv(right, n - right + UNSEEN, LEVEL / 2)) if right > _TINY else 0.0
    high = float(special.betainccinv(right + UNSEEN, n - right, LEVEL / 2)) if n - right > _TINY else 1.0
    return low, high


def score(
    values: Floats,
    mean: ArrayLike,
    low: ArrayLike = 0.0,
    high: ArrayLike = 1.0,
    strata: Ints | None = None,
    unseen: float = UNSEEN,
) -> Floats:
    """Return the distance of the data from a hypothetical mean [...], in standard normal units, at most 8.

    The interval at quantile z holds exactly the means whose score is between -z and z; p is 2 Phi(-|score|).
    """
    at = np.broadcast_to(np.asarray(mean, float), values.shape[:-1]).ravel()
    above, below = (_Side.of(values, low, high, strata, flipped, unseen).distance(at) for flipped in (False, True))
    return np.asarray((above - below).reshape(values.shape[:-1]), float)


def imagined_ends(
    values: Floats, low: ArrayLike, high: ArrayLike, samples: int, ends: tuple[ArrayLike, ArrayLike] = (-1.0, 1.0)
) -> tuple[Floats, Floats, float]:
    """Return the places of the imagined problems of the differences `values` [..., n] on either side, and their weight.

    With one sample a problem they lie at the `ends` of the range, with weight 0.85. With several, a typical problem
    cannot move further than from its mean to 0 or 1: the imagined ones lie at `low` and `high`, no nearer than 0.75,
    and no nearer than some problem was seen to move; their weight falls with the root of the samples, to 0.45. Chosen
    on the pairs of bench/calibration.py for a coverage of 94 % where 1 to 6 % of the problems collapse.
    """
    if samples < 2:
        bottom, top = (np.broadcast_to(np.asarray(end, float), values.shape[:-1]) for end in ends)
        return bottom, top, UNSEEN
    bottom = np.minimum(np.minimum(low, -LEAST_CHANGE), values.min(-1))
    top = np.maximum(np.maximum(high, LEAST_CHANGE), values.max(-1))
    return bottom, top, max(LEAST_UNSEEN, UNSEEN / math.sqrt(samples))


def p_value(scores: ArrayLike) -> Floats:
    """The two-sided p-value of a `score`."""
    return np.asarray(2 * special.ndtr(-np.abs(np.asarray(scores, float))), float)


def groups(strata: Ints) -> list[Ints]:
    """The places of the problems of each benchmark."""
    return [np.flatnonzero(strata == stratum) for stratum in range(int(strata.max()) + 1)]


def simultaneous_quantile(correlation: Floats, level: float = LEVEL) -> float:
    """The value that the largest of |normal variables| of this correlation [k, k] exceeds with chance `level`.

    With intervals at this quantile all k hold together; never more than Bonferroni's, never less than one interval's.
    Source: Dunnett (1955), JASA 50:1096-1121; Hothorn, Bretz and Westfall (2008), Biometrical Journal 50:346-363.
    """
    count = len(correlation)
    single, bonferroni = (float(-special.ndtri(level / (2 * k))) for k in (1, count))
    if count < 2:
        return single
    return float(np.clip(np.quantile(largest_normal(correlation), 1 - level), single, bonferroni))


def simultaneous_p(scores: Floats, correlation: Floats) -> Floats:
    """Adjusted two-sided p-values [k]: the chance that the largest of k such normal variables is as far out."""
    drawn = np.sort(largest_normal(correlation))
    beyond = (1 + len(drawn) - np.searchsorted(drawn, np.abs(scores) - _TINY)) / (1 + len(drawn))
    return np.asarray(np.maximum(p_value(scores), np.minimum(beyond, len(scores) * p_value(scores))), float)


def largest_normal(correlation: Floats, draws: int = 20_000) -> Floats:
    """[draws]: the largest of |normal variables| of this correlation."""
    values, vectors = np.linalg.eigh(correlation)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return np.asarray(np.abs(_normal(draws, len(correlation)) @ root.T).max(1), float)


@lru_cache(maxsize=4)
def _normal(draws: int, count: int) -> Floats:
    return np.random.default_rng(0).standard_normal((draws, count))


def correlations(values: Floats, strata: Ints) -> Floats:
    """[k, k]: the correlation of the means over benchmarks of `values` [k, problems]; of constant rows 0.

    Values that are NaN are missing: each pair of rows is compared on the problems of both.
    """
    total = np.zeros((len(values),) * 2)
    for part in groups(strata):
        known = ~np.isnan(values[:, part])
        count = known.sum(1)
        shared = (known.astype(float) @ known.T).clip(2)
        centred = np.where(known, values[:, part], 0.0)
        centred -= known * centred.sum(1, keepdims=True) / count.clip(1)[:, None]
        total += centred @ centred.T / (shared - 1) * shared / np.outer(count, count).clip(1)
    scale = np.sqrt(np.diag(total))
    known = scale > 1e-9
    safe = np.where(known, scale, 1.0)
    matrix = np.where(known[:, None] & known[None], total / safe[:, None] / safe[None], 0.0)
    np.fill_diagonal(matrix, 1.0)
    return np.clip(matrix, -1.0, 1.0)


@dataclass(frozen=True)
class _Side:
    """One side of the interval: rows [k, n] of distances from the end of the range, at least 0.

    A problem's distance counts `shares` [n] times; the imagined problem lies at 0 and counts as often as the most. With
    several benchmarks the rows are centred within each, so that their differences in level add no spread.
    """

    rows: Floats
    shares: Floats
    origin: Floats
    width: Floats
    unseen: float

    @classmethod
    def of(
        cls, values: Floats, low: ArrayLike, high: ArrayLike, strata: Ints | None, flipped: bool, unseen: float
    ) -> _Side:
        shape = values.shape[:-1]
        ends = [np.broadcast_to(np.asarray(end, float), shape).ravel() for end in (low, high)]
        end, width = ends[flipped], ends[1 - flipped] - ends[flipped]
        rows = np.clip((values.reshape(-1, values.shape[-1]) - end[:, None]) / width[:, None], 0.0, 1.0)
        shares = np.ones(rows.shape[1])
        if strata is None or int(strata.max()) == 0:
            return cls(rows, shares, end, width, unseen)
        parts = groups(strata)
        means = np.stack([rows[:, part].mean(1) for part in parts], axis=1)
        shift = means.max(1, keepdims=True) - means
        sizes = np.array([len(part) for part in parts])
        # The benchmark of the highest mean stays in place; the others are lifted to its level.
        lift = means.max(1) - means.mean(1)
        return cls(rows + shift[:, strata], len(strata) / len(parts) / sizes[strata], end - width * lift, width, unseen)

    def limit(self, z: Floats) -> Floats:
        """The limit on this side at positive quantiles [k], in the units of the values."""
        limits = np.zeros(len(z))
        known = self.rows.max(1) > _TINY
        if known.any():
            rows, log_z = self.rows[known], np.log(z[known])
            # Near the centre the quantile is proportional to the tilt.
            first = log_z - np.log(np.sqrt(((self.shares * rows) ** 2).sum(1)))
            tilt = np.exp(_solve(lambda x: _log_root(rows, self.shares, np.exp(x), self.unseen) - log_z, first))
            limits[known] = _tilted_mean(rows, self.shares, tilt, self.unseen)
        return self.origin + self.width * limits

    def distance(self, mean: Floats) -> Floats:
        """Return the standard units that `mean` [k] is on this side of the centre, at most 8; 0 where it is not."""
        rows, shares, at = self.rows, self.shares, (mean - self.origin) / self.width
        distances = np.where((at <= 0) & (rows.max(1) > _TINY), _LARGEST, 0.0)
        total = shares.sum() + self.unseen * shares.max()
        below = (at > 0) & (at < (shares * rows).sum(1) / total - _TINY)
        if below.any():
            rows, at = rows[below], at[below]
            centre = (shares * rows).sum(1) / total
            first = np.log((centre - at) * total / ((shares * rows) ** 2).sum(1))
            log_tilt = _solve(lambda x: np.log(at) - np.log(_tilted_mean(rows, shares, np.exp(x), self.unseen)), first)
            distances[below] = np.exp(_log_root(rows, shares, np.exp(log_tilt), self.unseen))
        return np.minimum(distances, _LARGEST)


def _tilted_mean(rows: Floats, shares: Floats, tilt: Floats, unseen: float) -> Floats:
    """[k]: the mean at which a tilt is the saddlepoint; Newton from below, exact at once where shares are equal."""
    most = float(shares.max())
    slope = tilt[:, None]
    mean = np.zeros(len(rows))
    for _ in range(40):
        scale = 1 + slope * (shares * rows + (most - shares) * mean[:, None])
        value = (shares * (rows - mean[:, None]) / scale).sum(1) - unseen * most * mean
        step = value / ((shares * (1 + slope * most * rows) / scale**2).sum(1) + unseen * most)
        mean = mean + step
        if bool(np.all(np.abs(step) <= 1e-13 * (1 + mean))) or not np.ptp(shares):
            break
    return mean


def _log_root(rows: Floats, shares: Floats, tilt: Floats, unseen: float) -> Floats:
    """log(-z) with Phi(z) the chance that the weighted mean of each row and of 0 is below `_tilted_mean`."""
    mean, most = _tilted_mean(rows, shares, tilt, unseen), float(shares.max())
    whole = 1 + tilt * most * mean
    scale = (1 + tilt[:, None] * (shares * rows + (most - shares) * mean[:, None])) / whole[:, None]
    ratio = shares * (rows - mean[:, None]) / scale
    exponent = np.log(scale).sum(1) - unseen * np.log(whole)
    curvature = (ratio**2).sum(1) + unseen * (most * mean * whole) ** 2
    root = np.sqrt(np.maximum(2 * exponent, 1e-30))
    slope = np.maximum(tilt / whole * np.sqrt(curvature), 1e-30)
    return np.asarray(np.log(np.maximum(root + np.log(slope / root) / root, 1e-12)), float)


def _solve(function: Callable[[Floats], Floats], first: Floats) -> Floats:
    """Return the zeros of increasing functions, all at once: the secant rule with a bracket that grows from a first
    guess."""
    low, high = np.full(first.shape, -np.inf), np.full(first.shape, np.inf)
    now, value = first, function(first)
    before, earlier = first + 0.1, function(first + 0.1)
    for _ in range(60):
        low, high = np.where(value < 0, now, low), np.where(value < 0, high, now)
        with np.errstate(all="ignore"):
            step = now - value * (now - before) / (value - earlier)
        step = np.clip(np.where(np.isfinite(step), step, now - np.sign(value)), now - 2, now + 2)
        step = np.where((step > low) & (step < high), step, (low + high) / 2)
        before, earlier = now, value
        # What is found stays, so that it does not depend on what is solved beside it.
        now = np.where(np.abs(value) < 1e-8, now, np.clip(step, -_FAR, _FAR))
        value = function(now)
        if bool(np.all(np.abs(value) < 1e-8)):
            break
    return now


BINOMIAL_NOTE = Note(
    NoteKind.INTERVAL, "Only averages were published, so each problem counts once; these intervals are cautious"
)


def pass_at_1(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean over problems of the mean over a problem's samples, with its standard error and interval.

    `outcomes` holds for each problem the grades of its samples, each in [0, 1]. `se_clustered` is that of the problem
    means (Miller 2024, arXiv 2411.00640, section 2.2). Raises KvatlasError where a problem has no samples or a grade is
    outside [0, 1].
    """
    counts = [len(samples) for samples in outcomes.values()]
    means = np.array([math.nan if not len(samples) else float(np.mean(samples)) for samples in outcomes.values()])
    # Not "outside", so that a grade that is no number is refused as well.
    if not counts or not bool(np.all((means >= 0) & (means <= 1))):
        raise KvatlasError(
            "Pass@1 needs at least one problem, and samples of each with grades from 0 to 1; others were given."
        )
    return from_problem_means(means, counts, *interval(means))


def estimates(tables: Sequence[Floats]) -> list[Estimate | None]:
    """Pass@1 of tables of grades [problems, samples], NaN where one is missing; None where all are.

    The same as `pass_at_1` of each, with the limits of tables with equally many problems computed at once.
    """
    counts = [own[own > 0] for own in ((~np.isnan(table)).sum(1) for table in tables)]
    means = [np.nansum(table[~np.isnan(table).all(1)], 1) / n for table, n in zip(tables, counts, strict=True)]
    found: list[Estimate | None] = [None] * len(tables)
    for size in {len(own) for own in means} - {0}:
        places = [number for number, own in enumerate(means) if len(own) == size]
        limits = interval(np.stack([means[place] for place in places]))
        for place, low, high in zip(places, *limits, strict=True):
            found[place] = from_problem_means(means[place], counts[place].tolist(), low, high)
    return found


def from_problem_means(means: Floats, counts: Sequence[int], low: ArrayLike, high: ArrayLike) -> Estimate:
    """The estimate from problem means in [0, 1], the number of samples of each problem, and the limits."""
    problems = len(means)
    return Estimate(
        float(means.mean()),
        float(np.asarray(low)),
        float(np.asarray(high)),
        problems,
        common(counts),
        se_clustered=float(means.std(ddof=1)) / math.sqrt(problems) if problems > 1 else None,
    )


def common(values: Sequence[int | None]) -> int | None:
    """The number that all of them are; None where they differ."""
    return values[0] if len(set(values)) == 1 else None


def mean_over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean over benchmarks, which are taken as fixed, with its 95 % interval.

    The benchmarks' problems are independent, so the distances from each value to its own limits add in squares, lower
    and upper side apart, and so do standard errors. Unknown where one of the benchmarks' is.

    Source: Zou and Donner (2008), Statistics in Medicine 27:1693-1702 (recovery of variances from intervals).
    """

    def error(parts: Sequence[float | None]) -> float | None:
        return None if None in parts else math.hypot(*filter(None, parts)) / len(parts)

    value = math.fsum(e.value for e in estimates) / len(estimates)
    below = error([None if e.low is None else e.value - e.low for e in estimates])
    above = error([None if e.high is None else e.high - e.value for e in estimates])
    problems = [e.problems for e in estimates]
    return Estimate(
        value,
        None if below is None else max(0.0, value - below),
        None if above is None else min(1.0, value + above),
        None if None in problems else sum(filter(None, problems)),
        common([e.samples for e in estimates]),
        se_clustered=error([e.se_clustered for e in estimates]),
    )


def with_binomial_bounds(maps: Sequence[Map]) -> list[Map]:
    """The maps with the binomial bound where an interval is unknown and the problems are; a note says so on each.

    It is the interval of one sample a problem: problem means vary no more than yes and no do.
    """

    made = []
    for map_ in maps:
        cells = {coord: _bounded(cell) for coord, cell in map_.cells.items()}
        baselines = {name: _bounded(cell) for name, cell in map_.baselines.items()}
        if (cells, baselines) != (map_.cells, map_.baselines):
            map_ = replace(map_, cells=cells, baselines=baselines, notes=(*map_.notes, BINOMIAL_NOTE))
        made.append(map_)
    return made


def _bounded(cell: Cell) -> Cell:
    estimate = cell.estimate
    if estimate.low is not None or estimate.problems is None:
        return cell
    low, high = yes_no_interval(estimate.value, estimate.problems)
    return replace(cell, estimate=replace(estimate, low=low, high=high))
