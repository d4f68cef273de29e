"""Paired differences of traces as the units of a claim: traces themselves, problems (means over samples), or clusters
(means over problems that share a passage, a seed or a template).

A pair of traces that was promised and is missing counts at worst: +1 in upper limits and -1 in lower ones. Left out, as
if lost pairs were like the others, a large loss is "proven" to be small where lost pairs are those that go missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvatlas.stats.numerics.arrays import (
    Difference,
    Flags,
    Floats,
    Ints,
    Z,
    mean_of_known,
    means_of_clusters,
    strata_of_clusters,
    strata_of_sizes,
)
from kvatlas.stats.numerics.bounded import lower_limit, p_value, score, upper_limit


@dataclass(frozen=True)
class Group:
    """The `rows` that have the same units: values at their `lowest` and `highest` [rows of the group, units]."""

    rows: list[int]
    lowest: Floats
    highest: Floats
    strata: Ints

    def upper_limit(self, z: float) -> Floats:
        """Return the one-sided upper limits of the means at the normal quantile `z`."""
        return upper_limit(self.highest, -1.0, 1.0, z, self.strata)

    def score(self, mean: float) -> Floats:
        """Return the distance of the data from a hypothetical mean in standard units."""
        return score(self.lowest, mean, -1.0, 1.0, self.strata, self.highest)


@dataclass(frozen=True)
class Units:
    """Values in [-1, 1] of rows by independent units, with limits and p-values of their means over benchmarks.

    `means` [rows] are over what is known, NaN where nothing of a benchmark is. `lowest` and `highest` [rows, units]
    have missing values at their ends, NaN where nothing was promised. `strata` [units] number benchmarks.
    """

    means: Floats
    lowest: Floats
    highest: Floats
    strata: Ints

    @cached_property
    def groups(self) -> list[Group]:
        """The rows that are known on every benchmark, in groups with the same units."""
        promised = ~np.isnan(self.lowest)
        rows_of_units: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~np.isnan(self.means)).tolist():
            rows_of_units.setdefault(promised[row].tobytes(), []).append(row)
        found = []
        for rows in rows_of_units.values():
            units = promised[rows[0]]
            found.append(Group(rows, self.lowest[rows][:, units], self.highest[rows][:, units], self.strata[units]))
        return found

    def contrasts(self, z: float = Z, stretch: float = 1.0) -> list[Difference | None]:
        """Return the mean of each row with its limits and the p-value of 0; None where a benchmark is not known.

        Limits lie at the normal quantile `z`, `stretch` times as far away at an early look (`looks`).
        """
        found: list[Difference | None] = [None for _ in self.means]
        for group in self.groups:
            low = lower_limit(group.lowest, -1.0, 1.0, z * stretch, group.strata)
            high = group.upper_limit(z * stretch)
            p = p_value(group.score(0.0) / stretch)
            numbers = zip(group.rows, low.tolist(), high.tolist(), p.tolist(), strict=True)
            for row, bottom, top, p_of_row in numbers:
                found[row] = Difference(float(self.means[row]), bottom, top, p_of_row)
        return found

    def negated(self) -> Units:
        """Return the same of the negative values."""
        return Units(-self.means, -self.highest, -self.lowest, self.strata)

    def units(self, row: int) -> int:
        """Return the number of units of a row."""
        return int(np.count_nonzero(~np.isnan(self.lowest[row])))


def units_of_traces(
    values: Floats, promised: Flags, strata: Ints, *, by_trace: bool, clusters: Ints | None = None
) -> Units:
    """Return the units of values [rows, problems, samples] in [-1, 1], NaN where one is missing or not promised.

    Traces are the units, or else problems, or their clusters.
    """
    is_missing = promised & np.isnan(values)
    kept = np.where(promised, values, math.nan)
    lowest = np.where(is_missing, -1.0, kept)
    highest = np.where(is_missing, 1.0, kept)
    return units_between(kept, lowest, highest, strata, by_trace=by_trace, clusters=clusters)


def units_between(
    values: Floats, lowest: Floats, highest: Floats, strata: Ints, *, by_trace: bool, clusters: Ints | None = None
) -> Units:
    """Return the units of values [rows, problems, samples] that may lie between the `lowest` and the `highest`.

    The ends are NaN where nothing was promised, the values where nothing is known.
    """
    if not by_trace:
        of_units = [means_of_clusters(mean_of_known(one), clusters) for one in (values, lowest, highest)]
        unit_strata = strata_of_clusters(strata, clusters)
        return Units(_mean_of_strata(of_units[0], unit_strata), of_units[1], of_units[2], unit_strata)
    means = _mean_of_strata(mean_of_known(values), strata)
    flat = (len(values), -1)
    return Units(means, lowest.reshape(flat), highest.reshape(flat), np.repeat(strata, values.shape[2]))


def joined_units(benchmarks: Sequence[Units]) -> Units:
    """Return the units of several benchmarks, each of one benchmark alone with the same rows, as one."""
    means = np.stack([one.means for one in benchmarks]).mean(0)
    lowest = np.concatenate([one.lowest for one in benchmarks], axis=1)
    highest = np.concatenate([one.highest for one in benchmarks], axis=1)
    return Units(means, lowest, highest, strata_of_sizes([one.lowest.shape[1] for one in benchmarks]))


def _mean_of_strata(values: Floats, strata: Ints) -> Floats:
    """Return the mean over benchmarks of the means over their problems that are known; NaN where one has none."""
    if not len(strata):
        return np.full(len(values), math.nan)
    means = [mean_of_known(values[:, strata == stratum]) for stratum in range(int(strata.max()) + 1)]
    return np.asarray(np.stack(means).mean(0), float)
