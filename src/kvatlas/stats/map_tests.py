"""Tests on a map: do its settings behave alike, the plateau of the best, effects of the axes, what is missing.

Below them its local windows at equal memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from kvatlas.core import CellCoord, Claim, Map, MapName, Note, NoteKind, Stays, ascending, windows_apart, with_means
from kvatlas.stats.losses import GridLosses, family_of
from kvatlas.stats.numerics import equal_memory
from kvatlas.stats.numerics.arrays import (
    LEVEL,
    Difference,
    Floats,
    Ints,
    means_of_clusters,
    strata_of_clusters,
    weights,
)
from kvatlas.stats.numerics.equal_memory import LineEstimate, Pair
from kvatlas.stats.numerics.levels import average_levels, level_contrasts_of, level_units, permute_levels
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.run_data import Axes, RunData
from kvatlas.stats.table import CellTraces, GradeMatrix, matrix

#: Random orders of all cells of a problem; those of the levels of an axis are more (`levels.DRAWS`).
_CELL_DRAWS = 999


class Basis(StrEnum):
    """The data behind the tests of a map."""

    TRACES = "paired by problem and sample on all traces"
    BOUND = "binomial bound: as if all samples of the same problems were independent draws of equal difficulty"

    @property
    def method(self) -> str:
        """The test behind "not all settings behave alike"."""
        if self is Basis.BOUND:
            return f"chi-square test with the {self.value}"
        return (
            "permutation within problems of the levels of each axis and of all cells, largest studentised distance, "
            "Bonferroni over these tests: are the settings exchangeable; it says nothing of their means"
        )


class Test(NamedTuple):
    """A test of "all settings behave alike".

    `statistic` is the largest distance of a level or cell from the others in standard errors, or the chi-square over
    its degrees of freedom.
    """

    statistic: float
    p: float


@dataclass(frozen=True)
class Effect:
    """Each level of one axis minus the mean of the others, with limits and p-values that hold together.

    The joint test over several maps says in `over` what was pooled; `names` are those of the maps, `adjusted_p` allows
    for all effects that are tested. `below` counts, by level, the bare `maps` in which it lies below the others.
    `stays` has the tokens after a compression at each level; empty if unknown.
    """

    axis: str
    levels: tuple[tuple[Any, Difference], ...]
    over: str = ""
    names: frozenset[MapName] = frozenset()
    maps: int = 0
    below: tuple[int, ...] = ()
    adjusted_p: float = 1.0
    stays: Mapping[Any, Stays] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """The largest difference of a level's mean from the others' that may have been missed; of shares at most 1."""
        return min(1.0, max(max(-contrast.low, contrast.high) for _, contrast in self.levels))

    @property
    def p(self) -> float:
        """The p-value of "all levels have the same mean"."""
        return min(contrast.p for _, contrast in self.levels)

    @property
    def is_found(self) -> bool:
        """True if a level differs from the others after the adjustment: in its mean, over bare maps by permutation."""
        return self.adjusted_p <= LEVEL

    @property
    def is_proven(self) -> bool:
        """True if a level's mean differs from the others'; a permutation over bare maps proves nothing of means."""
        return self.is_found and not self.maps

    @property
    def strongest(self) -> tuple[int, Any, Difference]:
        """The level of the smallest p-value, after its number; of equal ones that which differs most."""
        numbered = [(index, level, contrast) for index, (level, contrast) in enumerate(self.levels)]
        return min(numbered, key=lambda item: (item[2].p, -abs(item[2].value)))


@dataclass(frozen=True)
class MapTests:
    """The tests of one map. Shares in [0, 1]; parts that were not tested are None or empty, `basis` if nothing was.

    `omnibus` tests "all settings behave alike". Without a full cache `plateau` holds the cells that are statistically
    tied with the best, `may_lose` by how much a cell may be below the best with 95 % confidence. `spread` is the
    standard deviation over cells, `noise` that by chance alone. `losses` are those against the full cache, `untested`
    the cells before which their tests ended. `memory` compares local windows at equal memory.
    """

    basis: Basis | None = None
    omnibus: Test | None = None
    effects: tuple[Effect, ...] = ()
    spread: float | None = None
    noise: float | None = None
    plateau: tuple[CellCoord, ...] = ()
    p_best: Mapping[CellCoord, float] = field(default_factory=dict)
    may_lose: Mapping[CellCoord, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    losses: Mapping[CellCoord, Difference] | None = None
    untested: frozenset[CellCoord] = frozenset()
    memory: EqualMemory | None = field(default=None, repr=False, compare=False)

    @property
    def evidence(self) -> bool | None:
        """True if there is evidence, at 5 %, that settings do not behave alike; None where that was not tested."""
        return None if self.omnibus is None else self.omnibus.p <= LEVEL

    @property
    def hidden(self) -> float | None:
        """The largest difference of a level from the others that may have been missed; None without levels."""
        return max((effect.hidden for effect in self.effects), default=None)

    @property
    def most_lost(self) -> float | None:
        """By how much a cell of the plateau may at most be below the best."""
        return max((self.may_lose.get(coord, 0.0) for coord in self.plateau), default=None)


def fixed_run_tests(run: RunData, losses: GridLosses) -> dict[MapName, MapTests]:
    """Return the tests of each map, and of the mean over benchmarks, with their part of the `losses`.

    For fixed sweeps. Maps without a problem that all their cells have are missing.
    """
    by_map: dict[MapName, MapTests] = {}
    for name, groups in with_means(run.groups).items():
        cells = matrix([_cells_by_place(group, run.axes) for group in groups])
        if cells is None:
            continue

        found = replace(map_tests(cells, run.axes, run.claim, run.look), memory=memory_of(cells, groups, run))

        # The losses of a family are by setting, those of a map by place.
        family = losses.get(family_of(groups))
        if family is not None:
            coords = {cell.setting.id: cell.coord(run.axes) for cell in groups[0]}
            of_map = {coords[id_]: loss for id_, loss in family.by_setting.items() if id_ in coords}
            untested = frozenset(coords[id_] for id_ in family.ends_of_tests(family.claim) if id_ in coords)
            found = replace(found, losses=of_map, untested=untested)
        by_map[name] = found
    return by_map


def _cells_by_place(cells: Sequence[CellTraces], axes: Axes) -> dict[Hashable, CellTraces]:
    return {cell.coord(axes): cell for cell in cells}


def map_tests(cells: GradeMatrix, axes: Axes, claim: Claim = Claim.LIKE, look: Look = ONE_LOOK) -> MapTests:
    """Return the tests of a table whose columns are pairs of values of the two `axes`, at a look at some samples."""
    places: list[CellCoord] = list(cells.columns)
    grades, promised = cells.first(look.samples)

    # Each axis: its levels against the mean of the others, and a test of "their order does not matter".
    effects = []
    permutations = []
    # Problems of a cluster are permuted together.
    means = means_of_clusters(cells.means.T, cells.clusters).T
    strata = strata_of_clusters(cells.strata, cells.clusters)
    for axis, levels, level_of_cell in levels_of(places, axes):
        by_trace = claim is Claim.THESE
        units = level_units(
            grades, promised, cells.all_strata, level_of_cell, by_trace=by_trace, clusters=cells.all_clusters
        )
        effects.append(Effect(axis, tuple(zip(levels, level_contrasts_of(units, look.widening), strict=True))))
        of_levels = np.ascontiguousarray(average_levels(means, level_of_cell).T)
        permutations.append(permute_levels(of_levels, strata))
    # With one axis of several levels its levels are the cells.
    if len(places) > 1 and not any(len(effect.levels) == len(places) for effect in effects):
        permutations.append(permute_levels(means, strata, _CELL_DRAWS))
    omnibus = Test(0.0, 1.0)
    if permutations:
        statistics, p_values = zip(*permutations, strict=True)
        omnibus = Test(max(statistics), min(1.0, len(p_values) * min(p_values)))

    # The standard deviation over cells, and that expected if the cells of each problem were in random order.
    spread = 0.0
    noise = 0.0
    weight = weights(strata)
    values = weight @ means
    if len(values) > 1:
        spread = float(np.std(values, ddof=1))
        noise = math.sqrt(float(weight**2 @ means.var(1, ddof=1)))

    text = f"{cells.left_out} problems that not every cell has are left out of the tests"
    notes = (Note(NoteKind.LEFT_OUT, text),) if cells.left_out else ()
    return MapTests(Basis.TRACES, omnibus, tuple(effects), spread, noise, notes=notes)


def levels_of(places: Sequence[CellCoord], axes: Axes) -> list[tuple[str, list[Any], list[int]]]:
    """Return each axis with two or more levels: its name, the levels, and the number of each cell's level.

    None unless every level of one axis meets every level of the other, so that effects are not mixed.
    """
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    if len(places) < len(rows) * len(columns):
        return []
    found = []
    for side, levels in enumerate((rows, columns)):
        if all(isinstance(level, int | float) for level in levels):
            levels = sorted(levels)
        if len(levels) > 1:
            found.append((axes[side], levels, [levels.index(coord[side]) for coord in places]))
    return found


# -- local windows at equal memory -------------------------------------------------------------------------------------

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
        pairs = equal_memory.dominance_pairs(self.tokens, self.window)
        return equal_memory.compare_pairs(self.values, self.strata, pairs, self.widening)

    @cached_property
    def best(self) -> Pair | None:
        """The settings of the surest proof that a window is better at equal memory; None without one."""
        return equal_memory.strongest(self.tests)

    @property
    def proven(self) -> list[Pair]:
        """All settings that are proven better, each with the one of another window that keeps no fewer tokens."""
        return [pair for pair, difference in self.tests.items() if difference.is_proven]

    @cached_property
    def estimate(self) -> LineEstimate | None:
        """The two windows farthest apart that have memory in common, compared by straight lines; None without such."""
        # The units that all cells have, of which every benchmark needs some.
        is_whole = ~np.isnan(self.values).any(1)
        strata = self.strata[is_whole]
        if not len(strata) or set(strata) != set(self.strata):
            return None
        return equal_memory.line_estimate(self.values[is_whole], strata, self.tokens, self.window)

    @cached_property
    def apart(self) -> list[tuple[Any, Any]]:
        """The pairs of windows that have no memory in common."""
        by_window = {level: self.tokens[self.window == index] for index, level in enumerate(self.windows)}
        return windows_apart({level: tokens.tolist() for level, tokens in by_window.items()})

    @property
    def is_blind(self) -> bool:
        """True if the narrowest and the widest window have no memory in common: nothing between them is compared."""
        return (self.windows[0], self.windows[-1]) in self.apart

    def keeps_more(self, pair: Pair) -> dict[str, float]:
        """Return the benchmarks on which the better setting of a pair keeps more, with the tokens.

        Prompts of unlike lengths make that possible.
        """
        better, other = pair
        more = {name: float(kept[better] - kept[other]) for name, kept in self.by_benchmark.items()}
        return {name: tokens for name, tokens in more.items() if tokens >= ONE_TOKEN / 2}


def memory_of(cells: GradeMatrix, benchmarks: Sequence[Sequence[CellTraces]], run: RunData) -> EqualMemory | None:
    """Return the local windows of a map at equal memory, from the table of its tests and its cells by benchmark.

    None for a map without that axis, without a second window, and with a cell whose tokens are not known.
    """
    if WINDOW not in run.axes:
        return None
    side = run.axes.index(WINDOW)
    windows = ascending(coord[side] for coord in cells.columns)
    by_benchmark: dict[str, Floats] = {}
    for group in benchmarks:
        tokens = {cell.coord(run.axes): cell.stays.tokens for cell in group if cell.stays is not None}
        kept = [tokens.get(coord, math.nan) for coord in cells.columns]
        by_benchmark[group[0].benchmark] = np.array(kept)

    mean_tokens = np.mean(list(by_benchmark.values()), axis=0)
    if len(windows) < 2 or np.isnan(mean_tokens).any():
        return None

    grades, promised = cells.first(run.look.samples)
    if run.claim is Claim.THESE:
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
        run.axes,
        by_benchmark,
        run.look.widening,
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
