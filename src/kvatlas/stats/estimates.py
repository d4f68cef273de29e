"""Estimates of a cell: Pass@1 with its interval, means over benchmarks, and the bound where only averages are known.

Below them the metrics of a run: what each trace is graded by, and pass@k and maj@k over the samples of a problem.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from kvatlas.core import Cell, Claim, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.stats.numerics.arrays import Floats, Ints, means_of_clusters
from kvatlas.stats.numerics.bounded import interval, yes_no_interval

if TYPE_CHECKING:
    from kvatlas.results.manifest import Manifest

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


def estimates(tables: Sequence[Floats], claim: Claim, clusters: Sequence[Ints | None]) -> list[Estimate | None]:
    """Return Pass@1 of tables of grades [problems, samples], NaN where one is missing; None where all are.

    The same as `pass_at_1` of each, with the limits of tables with equally many units computed at once. For these
    problems the units are traces, of tables with equally many samples of every problem. For problems like these they
    are problems, or the `clusters` of a table, which then weigh equally.
    """
    counts = []
    means = []
    units = []
    for table, of_table in zip(tables, clusters, strict=True):
        samples = (~np.isnan(table)).sum(1)
        has_samples = samples > 0
        grades = table[has_samples]
        counts.append(samples[has_samples])
        of_problems = np.nansum(grades, 1) / samples[has_samples]
        by_trace = claim is Claim.THESE and not bool(np.isnan(grades).any())
        if of_table is not None and not by_trace:
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


def problem_count(map_: Map) -> int | None:
    """Return the number of problems of each cell of a map; None where it differs or is unknown."""
    return common([cell.estimate.problems for cell in map_.cells.values()])


def sample_count(map_: Map) -> int | None:
    """Return the number of samples of each problem of a map; None where it differs or is unknown."""
    return common([cell.estimate.samples for cell in map_.cells.values()])


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


# -- metrics -----------------------------------------------------------------------------------------------------------

#: The vote of all right answers together: a grader takes them as equal however they are written.
RIGHT = "\0right"
#: What every trace is graded by, in [0, 1]. Truncated and answerless traces are not correct. Beside these: pass@K and
#: maj@K (`Rule`), and what the run's benchmarks measure themselves.
METRICS = ("pass@1", "progress")


def usual_metric(manifest: Manifest) -> str:
    """Return the metric that maps of a run show by default.

    Imported answers with graded scores (0.7) are neither right nor wrong: their scores are the metric, beside other
    answers the progress, which every trace has.
    """
    imported = manifest.provenance.get("imported", {})
    graded = {source["metric"] for source in imported.values() if source.get("metric")}
    if not graded:
        return "pass@1"
    metrics = {imported.get(f"{cell.model} {cell.benchmark}", {}).get("metric", "") for cell in manifest.expected}
    return graded.pop() if metrics == graded and len(graded) == 1 else "progress"


@dataclass(frozen=True)
class Rule:
    """A metric over several samples: `kind` is pass or maj, and `k` samples count."""

    kind: str
    k: int

    def values(self, grades: Sequence[Sequence[float]], votes: Sequence[Sequence[Hashable]]) -> Floats:
        """Return [problems]: the share of the subsets of k samples that hold a right one, or whose majority is right.

        Source: Chen et al. (2021), arXiv 2107.03374, section 2.1, equation 1. Raises KvatlasError where a problem has
        fewer than k samples.
        """
        k = self.k
        fewest = min((len(problem_grades) for problem_grades in grades), default=0)
        if fewest < k:
            raise KvatlasError(
                f"{self.kind}@{k} needs {k} samples of every problem; the fewest that one has is {fewest}."
            )
        if self.kind == "maj":
            return np.array([majority(samples, k) for samples in votes])

        values = []
        for problem_grades in grades:
            samples = len(problem_grades)
            right = round(math.fsum(problem_grades))
            # The share of the subsets of k samples that hold no right one, taken from 1.
            values.append(1 - math.comb(samples - right, k) / math.comb(samples, k))
        return np.array(values)

    def estimate(
        self, grades: Sequence[Sequence[float]], votes: Sequence[Sequence[Hashable]], clusters: Ints | None = None
    ) -> Estimate:
        """Return the metric with its interval, by clusters of problems if there are some.

        Raises KvatlasError where a problem has fewer than k samples.
        """
        means = means_of_clusters(self.values(grades, votes), clusters)
        samples = [len(problem_grades) for problem_grades in grades]
        return from_problem_means(means, samples, *interval(means))


def rule(metric: str) -> Rule | None:
    """Return the rule of `pass@K` or `maj@K`; None for any other name, `pass@1` included."""
    match = re.fullmatch(r"(pass|maj)@([1-9]\d{0,5})", metric)
    return None if match is None or metric == "pass@1" else Rule(match[1], int(match[2]))


def majority(votes: Sequence[Hashable], k: int) -> float:
    """Return the share of the subsets of k votes in which `RIGHT` has most votes; a tie among t answers counts 1 / t.

    A sample without an answer (None) has no vote; a subset without any vote is wrong. Subsets are counted by generating
    functions in two powers: the votes used, and the answers that are tied with the right one.

    Source: Wang et al. (2023), arXiv 2203.11171.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    right = counts.pop(RIGHT, 0)
    silent = sum(vote is None for vote in votes)

    won = 0.0
    # The right answer has `right_votes` in a subset, so no other one may have more.
    for right_votes in range(1, min(right, k) + 1):
        ways = {(0, 0): math.comb(right, right_votes)}
        for votes_of_answer in counts.values():
            most = min(votes_of_answer, right_votes)
            terms = [(used, math.comb(votes_of_answer, used), used == right_votes) for used in range(most + 1)]
            ways = _multiplied(ways, terms)
        ways = _multiplied(ways, [(used, math.comb(silent, used), False) for used in range(silent + 1)])
        won += sum(count / (ties + 1) for (used, ties), count in ways.items() if used == k - right_votes)
    return won / math.comb(len(votes), k)


def _multiplied(
    ways: Mapping[tuple[int, int], int], terms: Sequence[tuple[int, int, bool]]
) -> dict[tuple[int, int], int]:
    """Return the product of a generating function and another one of `terms`: votes, choices, and whether it ties."""
    product: Counter[tuple[int, int]] = Counter()
    for (used, ties), count in ways.items():
        for more, choices, is_tied in terms:
            product[used + more, ties + is_tied] += count * choices
    return dict(product)
