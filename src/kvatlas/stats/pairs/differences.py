"""Difference maps in pairs: every cell of a run's maps against a baseline, or against the same cell of another map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvatlas.core import CellCoord, MapName
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.grid import Axes, short_names
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.inference.map_tests import table, with_means
from kvatlas.stats.inference.resampling import Contrast, joint_contrasts

#: Cell minus what it is compared with, in [-1, 1], by map and place on its axes. Intervals and p-values hold over all
#: cells of a map together.
Differences = Mapping[MapName, Mapping[CellCoord, Contrast]]

#: The cells of a map, and what each of them is compared with.
_Sides = tuple[Sequence[CellTraces], Mapping[CellCoord, CellTraces]]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Cell minus `baseline` (its short name, such as `full`), on the problems and samples that all cells have.

    Means over benchmarks are there too. None of maps that share no sample with the baseline, and of adaptive sweeps:
    which problems two of their cells share depends on their outcomes. Raises KvatlasError as `maps_of_run` does for
    axes and metric.
    """
    baselines = [cell for cell in run.cells if cell.expected.baseline and cell.measured]
    names = short_names(cell.expected.setting for cell in baselines)
    base = {
        (cell.expected.model, cell.expected.benchmark): cell
        for cell in baselines
        if names[cell.expected.setting.id] == baseline
    }
    sides = {}
    for name, group in _groups(run).items():
        other = base.get((name.model, name.benchmark))
        if other is not None:
            sides[name] = group, {cell.coord(run.axes): other for cell in group}
    return {name: _contrasts(parts, run.axes) for name, parts in with_means(sides).items()}


def differences_of_runs(run: RunData, other: RunData, partner: Callable[[MapName], MapName]) -> Differences:
    """Cell minus the same cell of a map of `other`, the `partner` of the cell's map; else as `differences_of_run`.

    Nothing where the two runs have unlike axes.
    """
    if other.axes != run.axes:
        return {}
    theirs = _groups(other)
    sides = {}
    for name, group in _groups(run).items():
        if partner(name) in theirs and (other is not run or partner(name) != name):
            sides[name] = group, {cell.coord(run.axes): cell for cell in theirs[partner(name)]}
    return {name: _contrasts(parts, run.axes) for name, parts in with_means(sides).items()}


def _groups(run: RunData) -> Mapping[MapName, Sequence[CellTraces]]:
    return run.with_cells([cell for cell in run.cells if cell.measured and not cell.adaptive]).groups


def _contrasts(parts: Sequence[_Sides], axes: Axes) -> dict[CellCoord, Contrast]:
    """The differences over one or more benchmarks; empty where no problem has a sample that all cells have."""
    groups = []
    names: dict[int, tuple[str, str]] = {}
    for own, others in parts:
        mine = [cell for cell in own if cell.coord(axes) in others]
        theirs = {id(cell): cell for cell in others.values()}
        names |= {id(cell): ("theirs", cell.expected.setting.id) for cell in theirs.values()}
        names |= {id(cell): ("mine", cell.expected.setting.id) for cell in mine}
        groups.append([*mine, *theirs.values()])
    cells = table(groups, lambda cell: names[id(cell)])
    if cells is None:
        return {}
    at = {name: number for number, name in enumerate(cells.columns)}
    own, others = parts[0]
    pairs = {}
    for cell in own:
        other = others.get(cell.coord(axes))
        if other is not None:
            pair = names[id(cell)], names[id(other)]
            if pair[0] in at and pair[1] in at:
                pairs[cell.coord(axes)] = at[pair[0]], at[pair[1]]
    if not pairs:
        return {}
    rows = np.zeros((len(pairs), len(at)))
    for row, (plus, minus) in zip(rows, pairs.values(), strict=True):
        row[plus], row[minus] = 1, -1
    return dict(zip(pairs, joint_contrasts(cells.means, cells.strata, rows)[1], strict=True))
