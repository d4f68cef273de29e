"""Means with their 95 % intervals: over problems like these, and over benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.stats.estimates.bounded_mean import LEVEL as LEVEL
from kvatlas.stats.estimates.bounded_mean import Floats as Floats
from kvatlas.stats.estimates.bounded_mean import Ints as Ints
from kvatlas.stats.estimates.bounded_mean import Z as Z
from kvatlas.stats.estimates.bounded_mean import interval, yes_no_interval

BINOMIAL_NOTE = Note(
    NoteKind.INTERVAL, "intervals are the binomial bound: n = problems, as if all samples of a problem agreed"
)


def pass_at_1(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean over problems of the mean over a problem's samples, with its standard error and interval.

    `outcomes` holds for each problem the grades of its samples, each in [0, 1]: correctness, or progress. `low` and
    `high` are clustered by problem (`bounded_mean.interval`). `se_clustered` is the standard deviation of the problem
    means over the root of their number (Miller 2024, arXiv 2411.00640, section 2.2).

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
    return from_problem_means(means, counts)


def from_problem_means(means: Floats, counts: Sequence[int]) -> Estimate:
    """The estimate from problem means in [0, 1] and the number of samples of each problem."""
    low, high = interval(means)
    problems = len(means)
    return Estimate(
        float(means.mean()),
        float(low),
        float(high),
        problems,
        counts[0] if len(set(counts)) == 1 else None,
        se_clustered=float(means.std(ddof=1)) / math.sqrt(problems) if problems > 1 else None,
    )


def mean_over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean over benchmarks, which are taken as fixed, with its 95 % interval.

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
    problems = [e.problems for e in estimates if e.problems is not None]
    samples = {e.samples for e in estimates}
    return Estimate(
        value,
        low,
        high,
        sum(problems) if len(problems) == count else None,
        samples.pop() if len(samples) == 1 else None,
        se_clustered=_mean_error([e.se_clustered for e in estimates]),
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


def with_binomial_bounds(maps: Sequence[Map]) -> list[Map]:
    """The maps with the binomial bound where an interval is unknown and the problems are; a note says so on each.

    The interval of one sample a problem: however alike the samples of a problem are, problem means vary no more than
    yes and no do. A bound: wide enough, and often too wide.
    """
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
    low, high = yes_no_interval(estimate.value, estimate.problems)
    return replace(cell, estimate=replace(estimate, low=low, high=high))
