"""The fall of success with depth: P(L) = exp(-L / L0), fitted to single outcomes (seqBench, arXiv 2509.16866).

L0 is fitted by maximum likelihood. Its interval holds the depths that a score test does not reject: the weighted sum of
a problem's right answers minus the expected ones, in units of its standard deviation at that depth. Samples of a
problem agree, so the variance is that of independent samples times the design effect 1 + (samples - 1) * likeness, with
the likeness estimated from the disagreement of samples within problems, plus one standard error of that estimate. Few
shallow problems may carry all of the information, so the quantile is Student's with one degree of freedom less than the
effective number of problems. An interval from 0 to infinity is an answer: the depth cannot be said.

Source: Rao and Scott (1981), JASA 76:221-230 (design effect in a score test); Kish (1965), Survey Sampling, section 8.2
(effective number).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Floats

#: The rates 1 / L0 that are looked at, times the mean depth.
_SLOWEST = 1e-6
_FASTEST = 200.0
#: Rates at which the test is looked at on either side of the best, before its zero is found.
_LOOKS = 60


@dataclass(frozen=True)
class Decay:
    """A fitted decay: L0 (`depth`, in actions) with its 95 % interval, infinite without decay, 0 without success."""

    depth: float
    low: float
    high: float
    outcomes: int
    problems: int

    def __call__(self, depth: Floats) -> Floats:
        """Return P at these depths."""
        rate = math.inf if self.depth == 0 else 1 / self.depth
        return np.asarray(np.exp(-rate * np.asarray(depth, float)))


def fit_decay(depth: Floats, right: Floats, samples: Floats) -> Decay:
    """Fit problems of these depths above 0 with so many right answers of so many samples, arrays [problems]."""
    data = _Outcomes(depth, right, samples)
    unit = float(depth.mean())
    slowest = math.log(_SLOWEST / unit)
    fastest = math.log(_FASTEST / unit)
    if right.sum() == 0:
        best = fastest
    elif right.sum() == samples.sum():
        best = slowest
    else:
        best = _zero(data.score, slowest, fastest)
    slow = _first_rejected(data.excess, best, slowest)
    fast = _first_rejected(data.excess, best, fastest)
    return Decay(
        depth=_depth(best, slowest, fastest),
        low=0.0 if fast is None else math.exp(-fast),
        high=math.inf if slow is None else math.exp(-slow),
        outcomes=int(samples.sum()),
        problems=len(depth),
    )


def _depth(log_rate: float, slowest: float, fastest: float) -> float:
    if log_rate <= slowest + 1e-6:
        return math.inf
    if log_rate >= fastest - 1e-6:
        return 0.0
    return math.exp(-log_rate)


def _first_rejected(excess: Callable[[float], float], best: float, end: float) -> float | None:
    """Return the log rate nearest to the best one, towards the end, at which the test begins to reject; else None."""
    inside = best
    for point in np.linspace(best, end, _LOOKS)[1:].tolist():
        if excess(point) > 0:
            return _zero(excess, inside, point)
        inside = point
    return None


def _zero(function: Callable[[float], float], start: float, end: float) -> float:
    from scipy import optimize

    return float(optimize.brentq(function, start, end, xtol=1e-9))


@dataclass(frozen=True)
class _Outcomes:
    """Right answers of samples by problem."""

    depth: Floats
    right: Floats
    samples: Floats

    def score(self, log_rate: float) -> float:
        """Return the derivative of the log-likelihood, with its sign reversed: it increases with the rate."""
        share = self._share(log_rate)
        return float((self.depth * (self.right - self.samples * share) / (1 - share)).sum())

    def excess(self, log_rate: float) -> float:
        """Return by how much the score is larger than the test of this rate allows."""
        share = self._share(log_rate)
        information = self.depth**2 * self.samples * share / (1 - share)
        total = float(information.sum())
        if total <= 0:
            return abs(self.score(log_rate))
        likeness = self._likeness(share)
        variance = float((information * (1 + (self.samples - 1) * likeness)).sum())
        effective = total**2 / float((information**2).sum())
        quantile = float(special.stdtrit(max(effective - 1, 1.0), 1 - LEVEL / 2))
        return abs(self.score(log_rate)) - quantile * math.sqrt(variance)

    def _share(self, log_rate: float) -> Floats:
        return np.clip(np.exp(-math.exp(log_rate) * self.depth), 1e-300, 1 - 1e-12)

    def _likeness(self, share: Floats) -> float:
        """Return the correlation of two samples of a problem, one standard error above its estimate, from 0 to 1."""
        several = self.samples > 1
        if not several.any():
            return 0.0
        right = self.right[several]
        samples = self.samples[several]
        expected = samples * share[several] * (1 - share[several])
        total = float(expected.sum())
        if total <= 1e-300:
            return 1.0
        disagreement = right * (samples - right) / (samples - 1)
        ratio = float(disagreement.sum()) / total
        error = math.sqrt(float(((disagreement - ratio * expected) ** 2).sum())) / total
        return float(np.clip(1 - ratio + error, 0.0, 1.0))
