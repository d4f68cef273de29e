"""Success against the depth of problems, with the decay P(L) = exp(-L / L0) of seqBench (arXiv 2509.16866).

    python examples/depth_curves.py runs/mazes --out curves.png

`--by` takes another difficulty that the problems tell: B (locked doors), N (noise), S (shuffle) or n (size, of chains
and ledgers); the decay is that of L alone. `--policy` names systems, by words as `kvatlas compare` takes them.

L0 is fitted by maximum likelihood to single outcomes. Its interval holds the depths that a score test does not reject:
the weighted sum of a problem's right answers minus the expected ones, in units of its standard deviation at that depth.
Samples of a problem agree, so the variance is that of independent samples times the design effect
1 + (samples - 1) * likeness, with the likeness estimated from the disagreement of samples within problems, plus one
standard error of that estimate. Few shallow problems may carry all of the information, so the quantile is Student's
with one degree of freedom less than the effective number of problems. An interval from 0 to infinity is an answer: the
depth cannot be said.

Source: Rao and Scott (1981), JASA 76:221-230 (design effect in a score test); Kish (1965), Survey Sampling, section 8.2
(effective number).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scipy import optimize, special

from kvatlas.core import Estimate, KvatlasError
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.numerics.arrays import LEVEL, Floats
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, choose, systems_of

#: Depths published for B = 2, N = 0 (arXiv 2509.16866).
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
#: Bins of problems of about equal size, where there are more difficulties than these and two.
BINS = 8

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


def curve_of(system: ModelSetting, by: str) -> tuple[list[tuple[float, Estimate]], Decay | None]:
    """Return Pass@1 at each difficulty, or in bins of about equally many problems, and the decay against L."""
    measured = {
        (cell.benchmark, problem): [grade for grade in samples if not math.isnan(grade)]
        for cell in system.cells
        for problem, samples in zip(cell.place, cell.values().tolist(), strict=True)
    }
    levels = {}
    for problem in filter(measured.get, measured):
        level = system.about.get(problem, {}).get(by)
        if level is not None:
            levels[problem] = float(level)
    if not levels:
        raise KvatlasError(f"No problem of {system.model} tells {by}; other difficulties are L, B, N, S and n.")
    outcomes = {problem: measured[problem] for problem in levels}

    values = sorted(set(levels.values()))
    size = 0 if len(values) <= BINS + 2 else len(levels) / BINS
    bins: list[list[Any]] = []
    for value in values:
        # A value stays in one bin; the next bin begins when the bins so far hold their share of the problems.
        if not bins or sum(map(len, bins)) >= size * len(bins):
            bins.append([])
        bins[-1] += [problem for problem, level in levels.items() if level == value]

    points = []
    for problems in bins:
        mean_level = math.fsum(levels[problem] for problem in problems) / len(problems)
        points.append((mean_level, pass_at_1({str(problem): outcomes[problem] for problem in problems})))
    return points, fit(outcomes, levels) if by == "L" else None


def main() -> None:
    """Draw the curves of the systems of some runs, and print L0 with its interval."""
    parser = argparse.ArgumentParser(description="Draw success against difficulty.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--by", default="L")
    parser.add_argument("--policy", action="append", default=[])
    options = parser.parse_args()
    systems = choose(systems_of([RunData.open(run) for run in options.runs], "pass@1"), options.policy, best=True)

    figure, panel = plt.subplots(figsize=(6, 4), layout="constrained")
    for system in systems:
        name = f"{system.model} {system.setting}"
        points, decay = curve_of(system, options.by)
        levels = np.array([level for level, _ in points])
        heights = [100 * estimate.value for _, estimate in points]
        ends = [(100 * (one.low or 0.0), 100 * (1.0 if one.high is None else one.high)) for _, one in points]
        limits = np.abs(np.transpose(ends) - heights)
        if decay is not None:
            name = f"{name}: L0 {decay.depth:.1f} ({decay.low:.1f} to {decay.high:.1f})"
            print(name)
        bars = panel.errorbar(levels, heights, limits, marker="o", ms=4, capsize=2, ls="" if decay else "-", label=name)
        if decay is not None:
            smooth = np.linspace(levels[0], levels[-1], 200)
            panel.plot(smooth, 100 * decay(smooth), color=bars.lines[0].get_color())
    if options.by == "L":
        smooth = np.linspace(1, panel.get_xlim()[1], 200)
        for name, depth in PUBLISHED_L0.items():
            panel.plot(smooth, 100 * np.exp(-smooth / depth), color="0.8", lw=0.8, zorder=0)
            panel.annotate(name, (smooth[-1], 100 * math.exp(-smooth[-1] / depth)), color="0.5", fontsize=6)
    panel.set(xlabel=options.by, ylabel="Pass@1, %", ylim=(0, 103))
    panel.legend(fontsize=7)
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
