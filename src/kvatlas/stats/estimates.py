"""Means with their 95 % intervals: clustered by problem, over benchmarks, and the bound for bare percentages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from kvatlas.core import Cell, Estimate, KvatlasError, Map

#: The 97.5 % quantile of the normal distribution.
Z = float(stats.norm.ppf(0.975))

BINOMIAL_NOTE = "intervals are the binomial bound: Wilson's with n = problems, as if all samples of a problem agreed"


def wilson(value: float, n: float) -> tuple[float, float]:
    """Score interval (95 %) of a share `value` in [0, 1] seen on `n` independent units; `n` need not be whole.

    Source: Wilson (1927), JASA 22:209-212. Holds near 0 and 1 and for small n, where the normal interval fails.
    """
    square = Z * Z / n
    centre = (value + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(max(value * (1 - value), 0.0) / n + square / (4 * n))
    low = 0.0 if value <= 0 else max(0.0, centre - half)
    high = 1.0 if value >= 1 else min(1.0, centre + half)
    return low, high


def pass_at_1(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean over problems of the mean over a problem's samples, with an interval clustered by problem.

    `outcomes` holds for each problem the grades of its samples, each in [0, 1]: correctness, or progress.

    The interval is Wilson's with an effective number of samples: all samples over the design effect, which is the
    variance between problem means against that of independent samples; never more than there are samples, and
    reduced by (t(samples - 1) / t(problems - 1))^2 since the variance is itself estimated from the problems. With one
    sample a problem this is the binomial Wilson interval. Where all problem means are equal (all right, all wrong)
    the variance says nothing, and the number of problems is taken. One problem says nothing about others: [0, 1].

    Source: Korn and Graubard (1998), Survey Methodology 24:193-201 (effective sample size); Dean and Pagano (2015),
    J. Survey Statistics and Methodology 3:484-503 (Wilson with it). Raises KvatlasError where a problem has no
    samples or a grade is outside [0, 1].
    """
    if not outcomes or not all(len(samples) for samples in outcomes.values()):
        raise KvatlasError(
            "Pass@1 needs at least one problem and one sample of each; a problem without samples was given."
        )
    means = np.array([float(np.mean(samples)) for samples in outcomes.values()])
    if not bool(np.all((means >= 0) & (means <= 1))):
        raise KvatlasError("Pass@1 needs grades between 0 and 1; others were given.")
    counts = {len(samples) for samples in outcomes.values()}
    value = float(means.mean())
    low, high = _clustered(value, means, sum(len(samples) for samples in outcomes.values()))
    return Estimate(value, low, high, len(means), counts.pop() if len(counts) == 1 else None)


def _clustered(value: float, means: np.ndarray, total: int) -> tuple[float, float]:
    problems = len(means)
    if problems == 1:
        return 0.0, 1.0
    variance = float(means.var(ddof=1)) / problems
    if variance < 1e-18:
        return wilson(value, problems)
    design_effect = variance / (value * (1 - value) / (total - 1))
    effective = min(total / design_effect, float(total))
    freedom = float(stats.t.ppf(0.975, total - 1) / stats.t.ppf(0.975, problems - 1)) ** 2
    return wilson(value, effective * freedom)


def mean_over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean over benchmarks, which are taken as fixed, with its 95 % interval.

    The benchmarks' problems are independent, so the distances from each value to its own limits add in squares, lower
    and upper side apart. Unknown where one of the intervals is. Problems are summed; samples are given where equal.

    Source: Zou and Donner (2008), Statistics in Medicine 27:1693-1702 (recovery of variances from intervals).
    Raises KvatlasError for an empty sequence.
    """
    if not estimates:
        raise KvatlasError("A mean over benchmarks needs at least one estimate; none was given.")
    count = len(estimates)
    value = math.fsum(e.value for e in estimates) / count
    below = [e.value - e.low for e in estimates if e.low is not None]
    above = [e.high - e.value for e in estimates if e.high is not None]
    known = len(below) == len(above) == count
    problems = [e.problems for e in estimates if e.problems is not None]
    samples = {e.samples for e in estimates}
    return Estimate(
        value,
        max(0.0, value - math.hypot(*below) / count) if known else None,
        min(1.0, value + math.hypot(*above) / count) if known else None,
        sum(problems) if len(problems) == count else None,
        samples.pop() if len(samples) == 1 else None,
    )


def binomial_bound(value: float, problems: int) -> tuple[float, float]:
    """A 95 % interval for a bare Pass@1 in [0, 1] of which only the number of problems is known.

    Wilson's interval with n = problems. However alike the samples of one problem are, the variance between problem
    means is at most value * (1 - value), so this is a bound: wide enough for any number of samples.
    """
    return wilson(value, problems)


def with_binomial_bounds(maps: Sequence[Map]) -> list[Map]:
    """The maps with `binomial_bound` where an interval is unknown and the problems are; a note says so on each."""
    return [_bounded(one) for one in maps]


def _bounded(one: Map) -> Map:
    cells = {place: _with_bound(cell) for place, cell in one.cells.items()}
    baselines = {name: _with_bound(cell) for name, cell in one.baselines.items()}
    if cells == dict(one.cells) and baselines == dict(one.baselines):
        return one
    return replace(one, cells=cells, baselines=baselines, notes=(*one.notes, BINOMIAL_NOTE))


def _with_bound(cell: Cell) -> Cell:
    estimate = cell.estimate
    if estimate.low is not None or estimate.problems is None:
        return cell
    low, high = binomial_bound(estimate.value, estimate.problems)
    return replace(cell, estimate=replace(estimate, low=low, high=high))
