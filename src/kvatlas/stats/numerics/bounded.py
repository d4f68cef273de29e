"""Limits and p-values for the mean of bounded values: the one method for values, differences and losses.

A limit counts, beside the observed problems, one imagined problem at that end of the range. The lower limit of values
in [0, 1] is a quantile of the weighted mean of the values and of a 0, with weights that are uniform on the simplex
(Dirichlet weights of 1 each). This is Gaffke's bound. Assumptions: the values are independent, and lie in the range.
Nothing is assumed about the shape of their distribution, so a kind of problem that is rare and not met yet, on which a
setting fails altogether, is allowed for.

What a value belongs to is the **unit** of a claim. Fed with problems (the mean over a problem's samples), the limits
speak of problems like these. Fed with traces (problem and sample), they speak of these very problems, however often
they are sampled: the samples of given problems are independent draws, whose means may differ from problem to problem.
Everything below says "problem" for the unit.

What is known of it: for values of two kinds (yes and no, kept and lost) it is the bound of Clopper and Pearson (1934),
which never errs more often than its level; nor does it for traces with unlike chances, whose number of losses has a
lighter tail than that of alike ones (Hoeffding 1956). For other distributions it is proven for special cases only
(Learned-Miller and Thomas 2020) and no counter-example is known. With several benchmarks the imagined problem weighs as
much as a problem of the smallest benchmark; that this suffices is searched, not proven: bench/calibration.py looks for
the worst case and docs/statistics.md quotes it. A lighter imagined problem does not keep the level.

The quantiles come from a saddlepoint approximation, so nothing is drawn at random.

Source: Gaffke (2005), Mathematical Methods of Statistics 14:451-467; Learned-Miller and Thomas (2020), arXiv
1905.06208; Hoeffding (1956), Annals of Mathematical Statistics 27:713-721; Lugannani and Rice (1980), Advances in
Applied Probability 12:475-490.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Difference, Flags, Floats, Ints, Z, weights

#: Scores are cut off here; a p-value of 1e-15 is as good as 0.
LARGEST_SCORE = 8.0
#: Numbers below this count as 0.
_TINY = 1e-12
#: Logarithms of tilts stay within this.
_LARGEST_LOG_TILT = 60.0


def interval(
    values: Floats, low: float = 0.0, high: float = 1.0, z: float = Z, strata: Ints | None = None
) -> tuple[Floats, Floats]:
    """Return the lower and upper limits [...] of the means of `values` [..., problems].

    Each limit is one-sided at the normal quantile `z`, so both together have a chance of 5 % to err at the default.
    Values lie in [`low`, `high`]. With `strata` the mean is that over benchmarks.
    """
    return lower_limit(values, low, high, z, strata), upper_limit(values, low, high, z, strata)


def lower_limit(values: Floats, low: float, high: float, z: float, strata: Ints | None = None) -> Floats:
    """Return the one-sided lower limits [...] at the normal quantile `z`; else as `interval`."""
    limits = _RangeSide.from_values(values, low, high, strata).limit(z)
    return np.maximum(low, limits.reshape(values.shape[:-1]))


def upper_limit(values: Floats, low: float, high: float, z: float, strata: Ints | None = None) -> Floats:
    """Return the one-sided upper limits [...] at the normal quantile `z`; else as `interval`."""
    limits = _RangeSide.from_values(values, high, low, strata).limit(z)
    return np.minimum(high, limits.reshape(values.shape[:-1]))


def score(
    values: Floats,
    mean: ArrayLike,
    low: float = 0.0,
    high: float = 1.0,
    strata: Ints | None = None,
    highest: Floats | None = None,
) -> Floats:
    """Return the distance of the data from a hypothetical mean [...], in standard normal units, at most 8.

    The interval at quantile z holds exactly the means whose score is between -z and z. Where some values are missing,
    `values` has them at their lowest and `highest` at their highest.
    """
    target = np.broadcast_to(np.asarray(mean, float), values.shape[:-1]).ravel()
    above = _RangeSide.from_values(values, low, high, strata).distance(target)
    below = _RangeSide.from_values(values if highest is None else highest, high, low, strata).distance(target)
    return np.asarray((above - below).reshape(values.shape[:-1]), float)


def p_value(scores: ArrayLike) -> Floats:
    """Return the two-sided p-value of a `score`: at most 5 % exactly where the 95 % interval does not hold the mean."""
    return np.asarray(2 * special.ndtr(-np.abs(np.asarray(scores, float))), float)


def mean_difference(differences: Floats, strata: Ints | None = None) -> Difference:
    """Return the mean of paired `differences` [problems] in [-1, 1], with its 95 % interval and the p-value of 0."""
    if strata is None:
        strata = np.zeros(len(differences), int)
    row = differences[None]
    (low,), (high,) = interval(row, -1.0, 1.0, Z, strata)
    (p,) = p_value(score(row, 0.0, -1.0, 1.0, strata))
    (mean,) = row @ weights(strata)
    return Difference(float(mean), float(low), float(high), float(p))


def yes_no_interval(share: float, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the interval of `count` values that are all 0 or 1 with this mean: Clopper and Pearson's, exact."""
    right = share * count
    wrong = count - right
    low = float(special.betaincinv(right, wrong + 1, level / 2)) if right > _TINY else 0.0
    high = float(special.betainccinv(right + 1, wrong, level / 2)) if wrong > _TINY else 1.0
    return low, high


@dataclass(frozen=True)
class _RangeSide:
    """One side of the interval: `rows` [k, values] of distances from the end of the range, in [0, 1].

    A row has each of its values so many times as `counts` [k, values] says. A problem's distance counts `shares`
    [values] times; the imagined problem has the distance 0 and counts as often as the most. With several benchmarks the
    rows are centred within each, so that their differences in level add no spread. A distance d of the mean stands for
    the mean `origin` + `width` * d; `width` is negative on the upper side.
    """

    rows: Floats
    counts: Floats
    shares: Floats
    origin: Floats
    width: float

    @classmethod
    def from_values(cls, values: Floats, end: float, other_end: float, strata: Ints | None) -> _RangeSide:
        """Measure the values [..., problems] from the `end` of their range."""
        flat = values.reshape(-1, values.shape[-1])
        origin = np.full(len(flat), end)
        width = other_end - end
        if strata is None:
            strata = np.zeros(flat.shape[1], int)
        sizes = np.bincount(strata)
        distances = np.clip((flat - end) / width, 0.0, 1.0)
        rows, counts, row_strata = _distinct_values(distances, strata)
        if len(sizes) == 1:
            return cls(rows, counts, np.ones(rows.shape[1]), origin, width)
        shares = len(strata) / len(sizes) / sizes[row_strata]
        totals = counts * rows
        means = np.stack(
            [totals[:, row_strata == stratum].sum(1) / size for stratum, size in enumerate(sizes.tolist())], axis=1
        )
        # The benchmark of the highest mean stays in place; the others are lifted to its level.
        highest = means.max(1)
        lifts = highest[:, None] - means
        origin = origin - width * (highest - means.mean(1))
        return cls(rows + lifts[:, row_strata], counts, shares, origin, width)

    def limit(self, z: float) -> Floats:
        """Return the limits [k] on this side at a positive quantile, in the units of the values."""
        limits = np.zeros(len(self.rows))
        varied = self._has_distance()
        if varied.any():
            side = self._of(varied)
            log_z = np.log(z)
            # Near the centre the quantile is proportional to the tilt.
            first = log_z - np.log(np.sqrt((side.counts * (side.shares * side.rows) ** 2).sum(1)))
            log_tilt = _solve(lambda x: side.log_root(np.exp(x)) - log_z, first)
            limits[varied] = side.tilted_mean(np.exp(log_tilt))
        return self.origin + self.width * limits

    def distance(self, mean: Floats) -> Floats:
        """Return the standard units that `mean` [k] is on this side of the centre, at most 8; 0 where it is not."""
        at = (mean - self.origin) / self.width
        distances = np.where((at <= 0) & self._has_distance(), LARGEST_SCORE, 0.0)
        total = (self.counts * self.shares).sum(1) + self.shares.max()
        centre = (self.counts * self.shares * self.rows).sum(1) / total
        on_this_side = (at > 0) & (at < centre - _TINY)
        if on_this_side.any():
            side = self._of(on_this_side)
            target = at[on_this_side]
            gap = centre[on_this_side] - target
            squares = (side.counts * (side.shares * side.rows) ** 2).sum(1)
            first = np.log(gap * total[on_this_side] / squares)
            log_target = np.log(target)
            log_tilt = _solve(lambda x: log_target - np.log(side.tilted_mean(np.exp(x))), first)
            distances[on_this_side] = np.exp(side.log_root(np.exp(log_tilt)))
        return np.minimum(distances, LARGEST_SCORE)

    def _of(self, chosen: Flags) -> _RangeSide:
        """Return the same of some rows."""
        return _RangeSide(self.rows[chosen], self.counts[chosen], self.shares, self.origin[chosen], self.width)

    def _has_distance(self) -> Flags:
        """Return whether a row has any value away from the end."""
        return np.asarray((self.counts * self.rows).max(1) > _TINY)

    def tilted_mean(self, tilt: Floats) -> Floats:
        """Return the mean [k] at which a tilt is the saddlepoint.

        Newton's method from below; a single step is exact where all shares are equal.
        """
        shares = self.shares
        most = float(shares.max())
        slope = tilt[:, None]
        mean = np.zeros(len(self.rows))
        for _ in range(40):
            scale = 1 + slope * (shares * self.rows + (most - shares) * mean[:, None])
            value = (self.counts * shares * (self.rows - mean[:, None]) / scale).sum(1) - most * mean
            step = value / ((self.counts * shares * (1 + slope * most * self.rows) / scale**2).sum(1) + most)
            mean = mean + step
            has_converged = bool(np.all(np.abs(step) <= 1e-13 * (1 + mean)))
            if has_converged or not np.ptp(shares):
                break
        return mean

    def log_root(self, tilt: Floats) -> Floats:
        """Return log(-z): Phi(z) is the chance that the weighted mean of a row and of 0 is below `tilted_mean`."""
        mean = self.tilted_mean(tilt)
        shares = self.shares
        most = float(shares.max())
        whole = 1 + tilt * most * mean
        scale = (1 + tilt[:, None] * (shares * self.rows + (most - shares) * mean[:, None])) / whole[:, None]
        ratio = shares * (self.rows - mean[:, None]) / scale
        exponent = (self.counts * np.log(scale)).sum(1) - np.log(whole)
        curvature = (self.counts * ratio**2).sum(1) + (most * mean * whole) ** 2
        root = np.sqrt(np.maximum(2 * exponent, 1e-30))
        slope = np.maximum(tilt / whole * np.sqrt(curvature), 1e-30)
        return np.asarray(np.log(np.maximum(root + np.log(slope / root) / root, 1e-12)), float)


def _distinct_values(rows: Floats, strata: Ints) -> tuple[Floats, Floats, Ints]:
    """Return values [k, values], how often each row has each, and the benchmark of each value.

    Equal values of a benchmark are counted once: right and wrong traces are few values, however many there are.
    """
    levels = np.unique(rows)
    benchmarks = int(strata.max()) + 1
    width = benchmarks * len(levels)
    if width >= rows.shape[1]:
        return rows, np.ones(rows.shape), strata
    # Among few levels a search is faster than the order of all values, which the inverse of `unique` takes.
    places = strata * len(levels) + np.searchsorted(levels, rows)
    flat_places = np.arange(len(rows))[:, None] * width + places
    counts = np.bincount(flat_places.ravel(), minlength=len(rows) * width).reshape(len(rows), width)
    values = np.broadcast_to(np.tile(levels, benchmarks), counts.shape)
    return values, counts.astype(float), np.repeat(np.arange(benchmarks), len(levels))


def _solve(function: Callable[[Floats], Floats], first: Floats) -> Floats:
    """Return the zeros of increasing functions, all at once.

    The secant rule with a bracket that grows from a first guess. A zero that is found stays as it is, so that it does
    not depend on the functions solved beside it.
    """
    low = np.full(first.shape, -np.inf)
    high = np.full(first.shape, np.inf)
    now = first
    value = function(first)
    before = first + 0.1
    earlier = function(before)

    for _ in range(60):
        low = np.where(value < 0, now, low)
        high = np.where(value < 0, high, now)
        with np.errstate(all="ignore"):
            step = now - value * (now - before) / (value - earlier)
        step = np.where(np.isfinite(step), step, now - np.sign(value))
        step = np.clip(step, now - 2, now + 2)
        step = np.where((step > low) & (step < high), step, (low + high) / 2)
        before = now
        earlier = value
        now = np.where(np.abs(value) < 1e-8, now, np.clip(step, -_LARGEST_LOG_TILT, _LARGEST_LOG_TILT))
        value = function(now)
        if bool(np.all(np.abs(value) < 1e-8)):
            break
    return now
