"""Local windows at equal memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from kvatlas.core import CellCoord, Claim, Map, Stays, ascending, windows_apart
from kvatlas.stats.numerics.arrays import Difference, Floats, Ints, means_of_clusters, strata_of_clusters
from kvatlas.stats.numerics.equal_memory import (
    LineEstimate,
    Pair,
    compare_pairs,
    dominance_pairs,
    line_estimate,
    strongest,
)
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.table import CellTraces, GradeMatrix

#: The axis whose levels are compared at equal memory.
WINDOW = "local_window"
RATIO = "ratio"
#: Settings that differ by less than half of this keep the same number of tokens in words.
ONE_TOKEN = 1.0


@dataclass(frozen=True)
class EqualMemory:
    """The local windows of a map at equal memory, each part computed when it is asked for.

    `values` [units, cells] are those of the units of the claim, NaN where one is missing, `strata` their benchmarks.
    `tokens` [cells] stay after a compression, `window` [cells] numbers the local windows in `windows`, ascending.
    `axes` are those of the coordinates, `by_benchmark` has the tokens of each benchmark. `widening` is that of a look.
    """

    coords: tuple[CellCoord, ...]
    values: Floats
    strata: Ints
    tokens: Floats
    window: Ints
    windows: tuple[Any, ...]
    axes: tuple[str, str]
    by_benchmark: Mapping[str, Floats]
    widening: float = 1.0

    @cached_property
    def tests(self) -> dict[Pair, Difference]:
        """The settings that keep no more tokens than a setting of another window, against that."""
        return compare_pairs(self.values, self.strata, dominance_pairs(self.tokens, self.window), self.widening)

    @cached_property
    def best(self) -> Pair | None:
        """The settings of the surest proof that a window is better at equal memory; None without one."""
        return strongest(self.tests)

    @property
    def proven(self) -> list[Pair]:
        """All settings that are proven better, each with the one of another window that keeps no fewer tokens."""
        return [pair for pair, difference in self.tests.items() if difference.is_proven]

    @cached_property
    def estimate(self) -> LineEstimate | None:
        """The two windows farthest apart that have memory in common, compared by straight lines; None without such."""
        values, strata = self._whole
        return line_estimate(values, strata, self.tokens, self.window) if len(strata) else None

    @cached_property
    def apart(self) -> list[tuple[Any, Any]]:
        """The pairs of windows that have no memory in common."""
        by_window = {level: self.tokens[self.window == index] for index, level in enumerate(self.windows)}
        return windows_apart({level: tokens.tolist() for level, tokens in by_window.items()})

    @property
    def is_blind(self) -> bool:
        """True if the narrowest and the widest window have no memory in common: nothing between them is compared."""
        return (self.windows[0], self.windows[-1]) in self.apart

    @property
    def _whole(self) -> tuple[Floats, Ints]:
        """The units that all cells have, and their benchmarks; none if a benchmark has no such unit."""
        is_whole = np.asarray(~np.isnan(self.values).any(1))
        if set(self.strata[is_whole]) != set(self.strata):
            is_whole = np.zeros(len(self.strata), bool)
        return self.values[is_whole], self.strata[is_whole]

    def keeps_more(self, pair: Pair) -> dict[str, float]:
        """Return the benchmarks on which the better setting of a pair keeps more, with the tokens.

        Prompts of unlike lengths make that possible.
        """
        better, other = pair
        more = {name: float(kept[better] - kept[other]) for name, kept in self.by_benchmark.items()}
        return {name: tokens for name, tokens in more.items() if tokens >= ONE_TOKEN / 2}


def memory_of(
    cells: GradeMatrix,
    benchmarks: Sequence[Sequence[CellTraces]],
    axes: tuple[str, str],
    claim: Claim = Claim.LIKE,
    look: Look = ONE_LOOK,
) -> EqualMemory | None:
    """Return the local windows of a map at equal memory, from the table of its tests and its cells by benchmark.

    None for a map without that axis, without a second window, and with a cell whose tokens are not known.
    """
    if WINDOW not in axes:
        return None
    side = axes.index(WINDOW)
    windows = ascending(coord[side] for coord in cells.columns)
    by_benchmark: dict[str, Floats] = {}
    for group in benchmarks:
        tokens = {cell.coord(axes): cell.stays.tokens for cell in group if cell.stays is not None}
        kept = [tokens.get(coord, math.nan) for coord in cells.columns]
        by_benchmark[group[0].benchmark] = np.array(kept)

    mean_tokens = np.mean(list(by_benchmark.values()), axis=0)
    if len(windows) < 2 or np.isnan(mean_tokens).any():
        return None

    grades, promised = cells.first(look.samples)
    if claim is Claim.THESE:
        values = grades.transpose(0, 2, 1)[promised]
        strata = np.repeat(cells.all_strata, promised.sum(1))
    else:
        # A problem of which one sample is missing counts as missing.
        has_samples = promised.any(1)
        promised_grades = np.where(promised[:, None], grades, 0.0)[has_samples]
        values = promised_grades.sum(2) / promised.sum(1)[has_samples, None]
        strata = cells.all_strata[has_samples]
        if cells.all_clusters is not None:
            # A cluster of which one problem is missing counts as missing.
            clusters = np.unique(cells.all_clusters[has_samples], return_inverse=True)[1]
            is_whole = ~np.isnan(values)
            share = means_of_clusters(is_whole.T.astype(float), clusters).T
            values = np.where(share == 1, means_of_clusters(values.T, clusters).T, math.nan)
            strata = strata_of_clusters(strata, clusters)

    return EqualMemory(
        cells.columns,
        values,
        strata,
        mean_tokens,
        np.array([windows.index(coord[side]) for coord in cells.columns]),
        windows,
        axes,
        by_benchmark,
        look.widening,
    )


def level_stays(maps: Sequence[Map], axis: str) -> dict[Any, Stays]:
    """Return the tokens that stay at each level of an axis, the mean over the cells of maps; empty if one is unknown.

    The share is NaN where it is not known.
    """
    by_level: dict[Any, list[Stays]] = {}
    for map_ in maps:
        side = [name for name, _ in map_.axes].index(axis)
        for coord, cell in map_.cells.items():
            tokens = cell.number("stays_tokens")
            share = cell.number("stays_share")
            if tokens is None:
                return {}
            by_level.setdefault(coord[side], []).append(Stays(tokens, math.nan if share is None else share))
    return {level: Stays(*map(fmean, zip(*cells, strict=True))) for level, cells in by_level.items()}
