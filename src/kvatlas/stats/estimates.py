"""Estimates of a cell: Pass@1 with its interval, means over benchmarks, and the bound where only averages are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from kvatlas.core import Cell, Claim, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.stats.numerics.arrays import Floats, Ints, means_of_clusters
from kvatlas.stats.numerics.bounded import interval, yes_no_interval

BINOMIAL_NOTE = Note(
    NoteKind.INTERVAL, "Only averages are known, so each problem counts once; these intervals are cautious"
)
SAMPLES_NOTE = Note(
    NoteKind.INTERVAL, "Each sample counts, since independent samples were declared: intervals are of these problems"
)


def pass_at_1(outcomes: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the mean over problems of the mean over a problem's samples, with its standard error and interval.

    `outcomes` holds for each problem the grades of its samples, each in [0, 1]. `se_clustered` is that of the problem
    means (Miller 2024, arXiv 2411.00640, section 2.2). Raises KvatlasError where a problem has no samples or a grade is
    outside [0, 1].
    """
    counts = [len(samples) for samples in outcomes.values()]
    means = np.array([float(np.mean(samples)) if len(samples) else math.nan for samples in outcomes.values()])
    # Not "outside", so that a grade that is no number is refused as well.
    if not counts or not bool(np.all((means >= 0) & (means <= 1))):
        raise KvatlasError(
            "Pass@1 needs at least one problem, and samples of each with grades from 0 to 1; others were given."
        )
    return from_problem_means(means, counts, *interval(means))


def estimates(
    tables: Sequence[Floats], claim: Claim = Claim.LIKE, clusters: Sequence[Ints | None] = ()
) -> list[Estimate | None]:
    """Return Pass@1 of tables of grades [problems, samples], NaN where one is missing; None where all are.

    The same as `pass_at_1` of each, with the limits of tables with equally many units computed at once. For these
    problems the units are traces, of tables with equally many samples of every problem. For problems like these they
    are problems, or the `clusters` of a table, which then weigh equally.
    """
    counts = []
    means = []
    units = []
    for index, table in enumerate(tables):
        samples = (~np.isnan(table)).sum(1)
        has_samples = samples > 0
        grades = table[has_samples]
        counts.append(samples[has_samples])
        of_problems = np.nansum(grades, 1) / samples[has_samples]
        by_trace = claim is Claim.THESE and not bool(np.isnan(grades).any())
        of_table = clusters[index] if clusters and not by_trace else None
        if of_table is not None:
            of_problems = means_of_clusters(of_problems, np.unique(of_table[has_samples], return_inverse=True)[1])
        means.append(of_problems)
        units.append(grades.ravel() if by_trace else means[-1])

    found: list[Estimate | None] = [None for _ in tables]
    # Tables with equally many units at once.
    for size in {len(of_table) for of_table in units} - {0}:
        places = [index for index, of_table in enumerate(units) if len(of_table) == size]
        lows, highs = interval(np.stack([units[place] for place in places]))
        for place, low, high in zip(places, lows, highs, strict=True):
            found[place] = from_problem_means(means[place], counts[place].tolist(), low, high)
    return found


def from_problem_means(means: Floats, counts: Sequence[int], low: ArrayLike, high: ArrayLike) -> Estimate:
    """Return the estimate from the means of units in [0, 1], the limits, and the number of samples of each problem."""
    units = len(means)
    return Estimate(
        float(means.mean()),
        float(np.asarray(low)),
        float(np.asarray(high)),
        len(counts),
        common(counts),
        se_clustered=float(means.std(ddof=1)) / math.sqrt(units) if units > 1 else None,
    )


def common(values: Sequence[int | None]) -> int | None:
    """Return the number that all of them are; None where they differ."""
    return values[0] if len(set(values)) == 1 else None


def mean_over_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """Return the plain mean over benchmarks, which are taken as fixed, with its 95 % interval.

    The benchmarks' problems are independent, so the distances from each value to its own limits add in squares, lower
    and upper side apart, and so do standard errors. Unknown where one of the benchmarks' is.

    Source: Zou and Donner (2008), Statistics in Medicine 27:1693-1702 (recovery of variances from intervals).
    """
    value = math.fsum(estimate.value for estimate in estimates) / len(estimates)
    below = _error_of_mean([None if one.low is None else abs(one.low - one.value) for one in estimates])
    above = _error_of_mean([None if one.high is None else abs(one.high - one.value) for one in estimates])

    problems = [estimate.problems for estimate in estimates]
    return Estimate(
        value,
        None if below is None else max(0.0, value - below),
        None if above is None else min(1.0, value + above),
        None if None in problems else sum(filter(None, problems)),
        common([estimate.samples for estimate in estimates]),
        se_clustered=_error_of_mean([estimate.se_clustered for estimate in estimates]),
    )


def _error_of_mean(errors: Sequence[float | None]) -> float | None:
    """Return the error of the mean of independent values with these errors; None where one is unknown."""
    if None in errors:
        return None
    return math.hypot(*filter(None, errors)) / len(errors)


def with_binomial_bounds(maps: Sequence[Map], claim: Claim = Claim.LIKE) -> list[Map]:
    """Return the maps with the binomial bound where an interval is unknown and the problems are; a note says so.

    It is the interval of one sample a problem: problem means vary no more than yes and no do. For these problems, whose
    samples are then declared to be independent, all samples count.
    """
    bounded = []
    for map_ in maps:
        cells = {coord: _bounded(cell, claim) for coord, cell in map_.cells.items()}
        baselines = {name: _bounded(cell, claim) for name, cell in map_.baselines.items()}
        if cells != map_.cells or baselines != map_.baselines:
            note = SAMPLES_NOTE if claim is Claim.THESE else BINOMIAL_NOTE
            map_ = replace(map_, cells=cells, baselines=baselines, notes=(*map_.notes, note), claim=claim)
        bounded.append(map_)
    return bounded


def _bounded(cell: Cell, claim: Claim) -> Cell:
    estimate = cell.estimate
    if estimate.low is not None or estimate.problems is None:
        return cell
    samples = (estimate.samples or 1) if claim is Claim.THESE else 1
    low, high = yes_no_interval(estimate.value, samples * estimate.problems)
    return replace(cell, estimate=replace(estimate, low=low, high=high))
