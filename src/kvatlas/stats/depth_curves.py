"""Success by difficulty, and its fall with depth (seqBench, arXiv 2509.16866)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from kvatlas.core import Estimate, KvatlasError
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.numerics.decay import Decay, fit_decay
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


def fit(outcomes: Mapping[Any, Sequence[float]], depths: Mapping[Any, float]) -> Decay:
    """Fit L0 to single outcomes: `outcomes[problem]` are 0 or 1 for each sample, `depths[problem]` its L.

    Raises KvatlasError for no outcomes, values that are neither 0 nor 1, and depths that are not positive.
    """
    depth = np.array([float(depths[problem]) for problem in outcomes])
    is_success = set(chain.from_iterable(outcomes.values())) <= {0, 1}
    if not outcomes or not (depth > 0).all() or not is_success:
        raise KvatlasError("A decay needs outcomes that are 0 or 1, at depths above 0; others or none were given.")
    right = np.array([sum(values) for values in outcomes.values()], float)
    samples = np.array([len(values) for values in outcomes.values()], float)
    return fit_decay(depth, right, samples)


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
            "points": [{by: level, **_with_null(vars(estimate))} for level, estimate in self.points],
            "decays": [] if self.decay is None else [_with_null(vars(self.decay))],
        }


def _with_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value in (math.inf, -math.inf) else value for name, value in values.items()}


def depth_curve(system: ModelSetting, by: str, *, decay: bool = False) -> DepthCurve:
    """Return the estimates at each value, or in 8 bins of equally many problems.

    Raises KvatlasError if no problem says a value.
    """
    levels = {key: float(system.about[key][by]) for key in system.outcomes if says(system, key, by)}
    if not levels:
        names = ", ".join(dict.fromkeys(benchmark for benchmark, _ in system.outcomes))
        raise KvatlasError(f"No benchmark of {system.model} says the {by} of its problems; there are: {names}.")
    outcomes = {key: list(system.outcomes[key].values()) for key in levels}
    points = []
    for keys in _level_bins(levels):
        mean_level = math.fsum(levels[key] for key in keys) / len(keys)
        points.append((mean_level, pass_at_1({str(key): outcomes[key] for key in keys})))
    return DepthCurve(tuple(points), fit(outcomes, levels) if decay else None)


def says(system: ModelSetting, key: ProblemKey, by: str) -> bool:
    """Return whether the benchmark of a problem gives this difficulty."""
    return system.about.get(key, {}).get(by) is not None


def _level_bins(levels: Mapping[ProblemKey, float]) -> list[list[ProblemKey]]:
    """Return the problems in bins: one for each value, or of about equal size where there are many values."""
    values = sorted(set(levels.values()))
    size = 0 if len(values) <= _BINS + 2 else len(levels) / _BINS
    bins: list[list[ProblemKey]] = []
    for value in values:
        # A value stays in one bin; the next bin begins when the bins so far hold their share of the problems.
        if not bins or sum(map(len, bins)) >= size * len(bins):
            bins.append([])
        bins[-1] += [key for key, level in levels.items() if level == value]
    return bins
