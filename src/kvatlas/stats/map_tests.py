"""Tests on a map: do its settings behave alike, the plateau of the best, effects of the axes, what is missing."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from kvatlas.core import CellCoord, Claim, MapName, Note, NoteKind, Stays, with_means
from kvatlas.stats.losses import GridLosses, family_of
from kvatlas.stats.numerics.arrays import LEVEL, Difference, means_of_clusters, strata_of_clusters, weights
from kvatlas.stats.numerics.levels import average_levels, level_contrasts_of, level_units, permute_levels
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.run_data import Axes, RunData
from kvatlas.stats.table import CellTraces, GradeMatrix, matrix
from kvatlas.stats.windows_at_memory import EqualMemory, memory_of

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

        found = map_tests(cells, run.axes, run.claim, run.look)
        found = replace(found, memory=memory_of(cells, groups, run.axes, run.claim, run.look))

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
