"""Two sides on the same problems and samples: pairs of cells of runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from kvatlas.core import Claim, KvatlasError
from kvatlas.stats.numerics.arrays import (
    Difference,
    Flags,
    Floats,
    Ints,
    Z,
    cluster_numbers,
    mean_of_known,
    means_of_clusters,
    strata_of_clusters,
    strata_of_sizes,
)
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.numerics.units import Units, units_of_problems, units_of_traces
from kvatlas.stats.table import CellTraces, ProblemKey, check_same_problems, with_samples
from kvatlas.stats.table import units_of_problems as names_of_units

#: A cell and the one that it is compared with.
CellPair = tuple[CellTraces, CellTraces]


def difference_of_cells(
    pairs: Sequence[CellPair], claim: Claim, claims: Iterable[Claim], look: Look = ONE_LOOK
) -> Difference:
    """Compare two settings by their cells, a pair for each benchmark that both have; missing traces count at worst.

    The difference is the mean over benchmarks of the mean over problems of (first - second), on `pairs` of samples that
    both have. Benchmarks weigh equally, and so do the problems of one. Raises KvatlasError where the two have no pair
    of traces in common.
    """
    paired = paired_values([[pair] for pair in pairs], look.samples)
    by_claim: dict[str, Difference] = {}
    for one in claims:
        (contrast,) = paired.contrasts(one, look=look)
        if contrast is None:
            raise KvatlasError("The two have no problem and sample in common, so there is nothing to compare.")
        by_claim[one] = contrast
    is_known = ~np.isnan(paired.traces[0])
    problems = int(is_known.any(1).sum())
    return replace(by_claim[claim], problems=problems, pairs=int(is_known.sum()), claims=by_claim)


@dataclass(frozen=True)
class PairedValues:
    """First minus second of pairs of cells, [pairs, problems, samples], NaN where a pair lacks one of the two traces.

    `promised` tells the pairs of traces that the run was to have. `problems` are those of any of the cells, and
    `strata` number their benchmarks, `clusters` what they share, None where each problem stands for itself.
    """

    traces: Floats
    promised: Flags
    problems: tuple[ProblemKey, ...]
    strata: Ints
    clusters: Ints | None = None

    @cached_property
    def values(self) -> Floats:
        """The means over the samples of a problem, [pairs, problems]; NaN where a problem has no pair."""
        return mean_of_known(self.traces)

    @cached_property
    def unit_values(self) -> Floats:
        """The same by the units of problems like these, [pairs, units]: problems, or their clusters."""
        return means_of_clusters(self.values, self.clusters)

    @cached_property
    def unit_strata(self) -> Ints:
        """The benchmarks of these units."""
        return strata_of_clusters(self.strata, self.clusters)

    @cached_property
    def missing(self) -> Ints:
        """The number of promised pairs of traces that are missing, of each pair of cells."""
        return np.asarray((self.promised & np.isnan(self.traces)).sum((1, 2)))

    @cached_property
    def pairs(self) -> Ints:
        """The number of promised pairs of traces of each pair of cells."""
        return np.asarray(self.promised.sum((1, 2)))

    @property
    def has_samples(self) -> bool:
        """Return whether a problem has several values, so that traces are other units than problems."""
        return bool(self.traces.shape[2] > 1)

    def units(self, claim: Claim) -> Units:
        """Return the differences by the units of a claim, missing ones at worst."""
        by_trace = claim is Claim.THESE
        return units_of_traces(self.traces, self.promised, self.strata, by_trace=by_trace, clusters=self.clusters)

    def averaged(self, claim: Claim) -> Units:
        """Return the averages over all pairs of cells by the units of a claim, as a single row."""
        of_pairs = self.units(claim)
        pooled = np.moveaxis(self.traces, 0, 1).reshape(1, len(self.problems), -1)
        values = mean_of_known(pooled)
        strata = self.strata
        if claim is Claim.LIKE:
            values = means_of_clusters(values, self.clusters)
            strata = self.unit_strata
        return Units(
            units_of_problems(values, strata).means,
            mean_of_known(of_pairs.lowest.T)[None],
            mean_of_known(of_pairs.highest.T)[None],
            of_pairs.strata,
        )

    def contrasts(self, claim: Claim = Claim.LIKE, z: float = Z, look: Look = ONE_LOOK) -> list[Difference | None]:
        """Return the mean over benchmarks of each pair, with limits at `z`; None without a problem of each."""
        if not self.problems:
            return [None for _ in self.traces]
        return self.units(claim).contrasts(z, look.widening)


def paired_values(benchmarks: Sequence[Sequence[CellPair | None]], first: int | None = None) -> PairedValues:
    """Compare pairs of cells on the problems and samples of both; more samples of one are averaged (`folded_samples`).

    Only the `first` samples of each problem are compared, all of them for None. Each benchmark has the same pairs in
    the same order, None where it lacks one. Raises KvatlasError for cells of unlike problems.
    """
    traces = []
    promised = []
    keys: list[ProblemKey] = []
    units: list[Hashable] = []
    sizes = []
    for pairs in benchmarks:
        cells = list(chain.from_iterable(pair for pair in pairs if pair is not None))
        check_same_problems(cells)
        problems = dict.fromkeys(chain.from_iterable(cell.place for cell in cells))
        keys += [(cells[0].benchmark, problem) for problem in problems]
        units += names_of_units(cells[0].table.manifest.clusters, cells[0].benchmark, problems)
        sizes.append(len(problems))
        of_benchmark = _paired_on_problems(pairs, tuple(problems))
        traces.append(of_benchmark[0])
        promised.append(of_benchmark[1])

    samples = max(of_benchmark.shape[2] for of_benchmark in traces)
    return PairedValues(
        np.concatenate([with_samples(of_benchmark, samples, math.nan) for of_benchmark in traces], axis=1)[..., :first],
        np.concatenate([with_samples(of_benchmark, samples, False) for of_benchmark in promised], axis=1)[..., :first],
        tuple(keys),
        strata_of_sizes(sizes),
        cluster_numbers(units),
    )


def folded_samples(values: Floats, samples: int) -> Floats:
    """Return the values [..., samples] in so many groups, each sample with the later ones that are theirs alone.

    Where one cell has more samples than the other a trace of the other is paired with the mean of a group, that of
    sample 1 of 2 with the mean of 1, 3 and 5. No trace is in two groups, so pairs stay independent units in [-1, 1],
    and their mean is the same loss, with less noise from the cell that has more. A group that lacks a trace is missing.
    """
    groups = -(-values.shape[-1] // samples)
    lacking = groups * samples - values.shape[-1]
    shape = (*values.shape[:-1], groups, samples)
    padded = np.concatenate([values, np.zeros((*values.shape[:-1], lacking))], axis=-1).reshape(shape)
    counts = np.full(samples, groups)
    counts[samples - lacking :] -= 1
    return np.asarray(padded.sum(-2) / counts, float)


def _paired_on_problems(pairs: Sequence[CellPair | None], problems: Sequence[str]) -> tuple[Floats, Flags]:
    """Return first minus second of the pairs of one benchmark, [pairs, problems, samples], and which are promised."""
    # A full cache is in every pair, so its values are put in order once.
    in_order: dict[int, tuple[Floats, Flags]] = {}
    for cell in chain.from_iterable(pair for pair in pairs if pair is not None):
        if id(cell) not in in_order:
            values = cell.values()
            promised = cell.in_order(np.ones(values.shape, bool), problems, False)
            in_order[id(cell)] = (cell.in_order(values, problems), promised)

    samples = max((values.shape[1] for values, _ in in_order.values()), default=1)
    traces = np.full((len(pairs), len(problems), samples), math.nan)
    is_promised = np.zeros(traces.shape, bool)

    for row, pair in enumerate(pairs):
        if pair is None:
            continue
        (first, has_first), (second, has_second) = (in_order[id(cell)] for cell in pair)
        shared = min(first.shape[1], second.shape[1])
        traces[row, :, :shared] = folded_samples(first, shared) - folded_samples(second, shared)
        is_promised[row, :, :shared] = has_first[:, :shared] & has_second[:, :shared]
    return traces, is_promised
