"""Two sides on the same problems and samples: outcomes by problem, and cells of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np

from kvatlas.core import KvatlasError
from kvatlas.stats.numerics.arrays import Contrast, Floats, Ints, Z, complete_groups, strata_of_sizes
from kvatlas.stats.numerics.bounded import mean_difference, mean_differences
from kvatlas.stats.numerics.planning import needed_problems
from kvatlas.stats.table import CellTraces, ProblemKey, check_pairs

#: Grades by problem and sample.
Outcomes = Mapping[ProblemKey, Mapping[int, float]]


# -- outcomes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over benchmarks of the mean over problems of (first - second); `pairs` are samples that both have."""

    problems: int = 0
    pairs: int = 0


def paired_difference(first: Outcomes, second: Outcomes) -> Difference:
    """Compare two settings: `first[benchmark, problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    Problems are the independent units; benchmarks weigh equally, and so do the problems of one. Raises KvatlasError
    where the two have no pair in common.
    """
    differences, strata, pairs = _differences(first, second)
    return Difference(**vars(mean_difference(differences, strata)), problems=len(differences), pairs=pairs)


def _differences(first: Outcomes, second: Outcomes) -> tuple[Floats, Ints, int]:
    """Return the mean of first - second and the number of the benchmark of each problem, and the number of pairs."""
    by_problem: dict[ProblemKey, list[float]] = {}
    for problem in first:
        shared = [sample for sample in first[problem] if sample in second.get(problem, {})]
        if shared:
            by_problem[problem] = [first[problem][sample] - second[problem][sample] for sample in shared]
    if not by_problem:
        raise KvatlasError("The two have no problem and sample in common, so there is nothing to compare.")
    means = np.array([math.fsum(values) / len(values) for values in by_problem.values()])
    return means, strata_of(by_problem), sum(map(len, by_problem.values()))


def strata_of(problems: Iterable[ProblemKey]) -> Ints:
    """Return the number, from 0, of each problem's benchmark."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(benchmark, len(numbers)) for benchmark, _ in problems])


class Equivalence(StrEnum):
    """The interval of a loss against the margin on both sides."""

    EQUIVALENT = "equivalent"
    WORSE = "worse"
    BETTER = "better"
    UNDECIDED = "not decided"


@dataclass(frozen=True)
class Verification:
    """The loss of an endpoint against a reference, in [-1, 1], with its 95 % interval, which decides.

    `needed` problems in all would decide it with a power of 0.8 at the observed loss; None if decided or not
    practicable.
    """

    loss: Contrast
    standing: Equivalence
    problems: int
    needed: int | None


def verified(reference: Outcomes, served: Outcomes, margin: float) -> Verification:
    """Compare grades [problem][sample] on the problems and samples of both; benchmarks weigh equally.

    Raises KvatlasError where there is no problem in common.
    """
    lost, strata, _ = _differences(reference, served)
    loss = mean_difference(lost, strata)
    standing = _standing(loss, margin)
    needed = None
    if standing is Equivalence.UNDECIDED:
        # Each of the two limits errs in 2.5 % of cases, as with two sequences.
        upper = needed_problems(lost, strata, loss.value, margin, sequences=2)
        lower = needed_problems(-lost, strata, -loss.value, margin, sequences=2)
        needed = None if upper is None or lower is None else max(upper, lower)
    return Verification(loss, standing, len(strata), needed)


def _standing(loss: Contrast, margin: float) -> Equivalence:
    if loss.low > margin:
        return Equivalence.WORSE
    if loss.high < -margin:
        return Equivalence.BETTER
    if -margin <= loss.low and loss.high <= margin:
        return Equivalence.EQUIVALENT
    return Equivalence.UNDECIDED


def length_shift(reference: Outcomes, served: Outcomes) -> Contrast:
    """Return the mean change of output lengths (given as shares of the most new tokens), with the p-value of none."""
    differences, strata, _ = _differences(reference, served)
    return mean_difference(-differences, strata)


# -- cells -------------------------------------------------------------------------------------------------------------

#: A cell and the one that it is compared with.
CellPair = tuple[CellTraces, CellTraces]


@dataclass(frozen=True)
class PairedValues:
    """First minus second of pairs of cells, [pairs, problems], NaN where a pair shares no sample of a problem.

    `problems` are those of any of the cells, and `strata` number their benchmarks.
    """

    values: Floats
    problems: tuple[ProblemKey, ...]
    strata: Ints

    def contrasts(self, z: float = Z) -> list[Contrast | None]:
        """Return the mean over benchmarks of each pair, with limits at `z`; None without a problem of each."""
        found: list[Contrast | None] = [None for _ in self.values]
        if not self.problems:
            return found
        for rows, values, strata in complete_groups(self.values, self.strata):
            for row, contrast in zip(rows, mean_differences(values, strata, z), strict=True):
                found[row] = contrast
        return found


def paired_values(benchmarks: Sequence[Sequence[CellPair | None]]) -> PairedValues:
    """Compare pairs of cells on the problems and samples of both.

    Each benchmark has the same pairs in the same order, None where it lacks one. A problem's value is the mean over the
    samples of both. Raises KvatlasError for cells that cannot be compared in pairs.
    """
    values = []
    keys: list[ProblemKey] = []
    sizes = []
    for pairs in benchmarks:
        cells = list(chain.from_iterable(pair for pair in pairs if pair is not None))
        check_pairs(cells)
        problems = dict.fromkeys(chain.from_iterable(cell.place for cell in cells))
        keys += [(cells[0].benchmark, problem) for problem in problems]
        sizes.append(len(problems))
        values.append(_paired_on_problems(pairs, tuple(problems)))
    return PairedValues(np.concatenate(values, axis=1), tuple(keys), strata_of_sizes(sizes))


def _paired_on_problems(pairs: Sequence[CellPair | None], problems: Sequence[str]) -> Floats:
    """Return first minus second of the pairs of one benchmark, [pairs, problems]."""
    values = np.full((len(pairs), len(problems)), math.nan)
    # A full cache is in every pair, so its values are put in order once.
    in_order: dict[int, Floats] = {}
    for row, pair in enumerate(pairs):
        if pair is None:
            continue
        for cell in pair:
            if id(cell) not in in_order:
                in_order[id(cell)] = cell.in_order(cell.values(), problems)
        first = in_order[id(pair[0])]
        second = in_order[id(pair[1])]
        samples = min(first.shape[1], second.shape[1])
        values[row] = _mean_of_known(first[:, :samples] - second[:, :samples])
    return values


def _mean_of_known(values: Floats) -> Floats:
    """Return the means of the rows over the values that are known; NaN where none is."""
    count = (~np.isnan(values)).sum(1)
    return np.where(count > 0, np.nansum(values, axis=1) / np.maximum(count, 1), math.nan)
