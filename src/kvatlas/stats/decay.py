"""Success by difficulty, and its fall with depth: P(L) = exp(-L / L0), fitted (seqBench, arXiv 2509.16866)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from kvatlas.core import Estimate, KvatlasError
from kvatlas.stats.intervals import Floats, pass_at_1
from kvatlas.stats.systems import ModelSetting
from kvatlas.stats.table import ProblemKey

#: Characteristic depths published for B = 2, N = 0 (arXiv 2509.16866).
PUBLISHED_L0: Mapping[str, float] = {
    "gemini-2.5-flash-preview-04-17": 85.7,
    "gemini-2.0-flash": 40.2,
    "Llama-4-Maverick": 16.7,
    "Llama-3.3-70B": 10.2,
    "gemma-2-27b": 8.1,
    "Qwen2.5-Coder-32B": 4.8,
    "Qwen2.5-7B": 4.0,
    "Llama-3.2-3B": 1.6,
}

#: Half the 95 % quantile of chi-squared with one degree of freedom: how far a log-likelihood may fall.
_FALL = float(special.chdtri(1, 0.05)) / 2
#: The rates 1 / L0 that are looked at, times the mean depth.
_SLOWEST, _FASTEST = 1e-6, 200.0


@dataclass(frozen=True)
class Decay:
    """A fitted decay: L0 (`depth`, in actions) with its 95 % interval, infinite without decay, 0 without success."""

    depth: float
    low: float
    high: float
    outcomes: int
    problems: int

    def __call__(self, depth: Floats) -> Floats:
        """P at these depths."""
        rate = math.inf if self.depth == 0 else 1 / self.depth
        return np.asarray(np.exp(-rate * np.asarray(depth, float)))


def fit(outcomes: Mapping[Any, Sequence[float]], depths: Mapping[Any, float]) -> Decay:
    """Maximum likelihood on single outcomes: `outcomes[problem]` are 0 or 1 for each sample, `depths[problem]` its L.

    The interval is that of the profile likelihood, whose fall is scaled for samples of a problem that agree (Chandler
    and Bate 2007, Biometrika 94:167-183). Raises KvatlasError for no outcomes, values that are neither 0 nor 1, and
    depths that are not positive.
    """
    from scipy import optimize

    depth = np.array([float(depths[problem]) for problem in outcomes])
    hits, trials = (np.array([measure(samples) for samples in outcomes.values()], float) for measure in (sum, len))
    if not outcomes or not (depth > 0).all() or any(value not in (0, 1) for own in outcomes.values() for value in own):
        raise KvatlasError("A decay needs outcomes that are 0 or 1, at depths above 0; others or none were given.")
    unit = float(depth.mean())
    slowest, fastest = math.log(_SLOWEST / unit), math.log(_FASTEST / unit)

    def likelihood(log_rate: float) -> float:
        logs = -math.exp(log_rate) * depth
        return float(hits @ logs + special.xlog1py(trials - hits, -np.exp(logs)).sum())

    # A coarse look first: the likelihood is flat where nothing is left to fall.
    grid = np.linspace(slowest, fastest, 60)
    top = int(np.argmax([likelihood(point) for point in grid]))
    around = grid[max(0, top - 1)], grid[min(len(grid) - 1, top + 1)]
    best = float(optimize.minimize_scalar(lambda point: -likelihood(point), bounds=around, method="bounded").x)
    if hits.sum() == 0:
        best = fastest
    elif likelihood(slowest) > likelihood(best) - 1e-7:
        best = slowest
    level = likelihood(best) - _FALL * _inflation(depth, hits, trials, math.exp(best))

    def below(point: float) -> float:
        return likelihood(point) - level

    low = 0.0 if below(slowest) > 0 else math.exp(float(optimize.brentq(below, slowest, best, xtol=1e-9)))
    high = math.inf if below(fastest) > 0 else math.exp(float(optimize.brentq(below, best, fastest, xtol=1e-9)))
    rate = 0.0 if best <= slowest + 1e-6 else math.inf if best >= fastest - 1e-6 else math.exp(best)
    ends = rate, max(high, rate), min(low, rate)
    depth0, shallow, deep = (math.inf if end == 0 else 1 / end for end in ends)
    return Decay(depth0, shallow, deep, int(trials.sum()), len(depth))


def _inflation(depth: Floats, hits: Floats, trials: Floats, rate: float) -> float:
    """Return the ratio of the rate's variance with problems as units to that with outcomes, at least 1."""
    if float(trials.max()) == 1 or not 0 < float(hits.sum()) < float(trials.sum()):
        return 1.0
    share = np.clip(np.exp(-rate * depth), 1e-12, 1 - 1e-12)
    residual = (hits - trials * share) / (1 - share)
    information = depth**2 * trials * share / (1 - share)
    # A fit to few problems follows each of them: residuals are those without the problem (HC3), and the quantile is
    # Student's over problems.
    leverage = information / information.sum()
    scores = depth * residual / (1 - np.minimum(leverage, 0.99))
    clustered = float((scores**2).sum() / information.sum())
    student = float(special.stdtrit(max(len(depth) - 1, 1), 0.975)) ** 2 / (2 * _FALL)
    # Few problems say little of their variance. The disagreement of samples within problems says more: it gives the
    # likeness of two samples, and with it the design effect of so many a problem.
    within = float((hits * (trials - hits) / (trials - 1).clip(1)).sum())
    likeness = max(0.0, 1 - within / float((trials * share * (1 - share)).sum()))
    effect = 1 + (float((trials**2).sum() / trials.sum()) - 1) * likeness
    return max(1.0, clustered, effect) * student


#: Bins of problems of about equal size, where there are more difficulties than these and two.
_BINS = 8


@dataclass(frozen=True)
class DepthCurve:
    """One system's metric by difficulty: the mean difficulty of each bin with its estimate, and the fitted decay.

    `decay` is None where the metric is not success or the difficulty not L.
    """

    points: tuple[tuple[float, Estimate], ...]
    decay: Decay | None = None

    def to_json(self, by: str) -> dict[str, Any]:
        """Return plain data, with null for infinite numbers."""
        return {
            "points": [{by: level, **_finite(vars(estimate))} for level, estimate in self.points],
            "decays": [] if self.decay is None else [_finite(vars(self.decay))],
        }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value in (math.inf, -math.inf) else value for name, value in values.items()}


def depth_curve(system: ModelSetting, by: str, *, decay: bool = False) -> DepthCurve:
    """Estimates at each value, or in 8 bins of equally many problems; KvatlasError if no problem says a value."""
    levels = {key: float(system.about[key][by]) for key in system.outcomes if says(system, key, by)}
    if not levels:
        names = ", ".join(dict.fromkeys(benchmark for benchmark, _ in system.outcomes))
        raise KvatlasError(f"No benchmark of {system.model} says the {by} of its problems; there are: {names}.")
    outcomes = {key: list(system.outcomes[key].values()) for key in levels}
    points = [
        (math.fsum(levels[key] for key in keys) / len(keys), pass_at_1({str(key): outcomes[key] for key in keys}))
        for keys in _bins(levels)
    ]
    return DepthCurve(tuple(points), fit(outcomes, levels) if decay else None)


def says(system: ModelSetting, key: ProblemKey, by: str) -> bool:
    """Return whether the benchmark of a problem gives this difficulty."""
    return system.about.get(key, {}).get(by) is not None


def _bins(levels: Mapping[ProblemKey, float]) -> list[list[ProblemKey]]:
    """Problems with the same value together; where there are many values, in bins of about equal size."""
    values = sorted(set(levels.values()))
    size = 0 if len(values) <= _BINS + 2 else len(levels) / _BINS
    bins: list[list[ProblemKey]] = []
    for value in values:
        if not bins or sum(map(len, bins)) >= size * len(bins):
            bins.append([])
        bins[-1] += [key for key, level in levels.items() if level == value]
    return bins
