"""Every cell of a run's maps against a baseline, in pairs: the numbers of difference maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvatlas.core import CellCoord, MapName
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.grid import short_names
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.inference.resampling import Contrast, mean_contrast
from kvatlas.stats.pairs.paired import problem_differences

#: Cell minus baseline, in [-1, 1], by map and place on its axes.
Differences = Mapping[MapName, Mapping[CellCoord, Contrast]]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Cell minus `baseline` (its short name, such as `full`), on the problems and samples that both have.

    Means over benchmarks are there too. Cells without a pair are left out. Raises KvatlasError as `maps_of_run` does
    for axes and metric.
    """
    baselines = [cell for cell in run.cells if cell.expected.baseline and cell.measured]
    names = short_names(cell.expected.setting for cell in baselines)
    base = {
        (cell.expected.model, cell.expected.benchmark): cell
        for cell in baselines
        if names[cell.expected.setting.id] == baseline
    }
    by_map: dict[MapName, dict[CellCoord, Contrast]] = {}
    for name, group in run.with_cells([cell for cell in run.cells if cell.measured]).groups.items():
        other = base.get((name.model, name.benchmark))
        if other is not None:
            pairs = {cell.coord(run.axes): _pair(cell, other) for cell in group}
            by_map[name] = {coord: contrast for coord, contrast in pairs.items() if contrast is not None}
    return {**by_map, **_means(by_map)}


def _pair(cell: CellTraces, other: CellTraces) -> Contrast | None:
    """The mean over problems of the differences of the samples that both have; None where there are none."""
    differences, pairs = problem_differences(cell.compared(), other.compared())
    if not pairs:
        return None
    return mean_contrast(differences)


def _means(by_map: Differences) -> dict[MapName, dict[CellCoord, Contrast]]:
    groups: dict[tuple[str, str], list[Mapping[CellCoord, Contrast]]] = {}
    for name, contrasts in by_map.items():
        groups.setdefault((name.model, name.policy), []).append(contrasts)
    return {
        MapName.of_mean(model, len(group), policy): {
            coord: _mean([contrasts[coord] for contrasts in group])
            for coord in group[0]
            if all(coord in contrasts for contrasts in group)
        }
        for (model, policy), group in groups.items()
        if len(group) > 1
    }


def _mean(differences: Sequence[Contrast]) -> Contrast:
    """The mean over benchmarks; their problems are independent, so half widths add in squares (Zou and Donner 2008)."""
    count = len(differences)
    value = math.fsum(one.value for one in differences) / count
    below = math.hypot(*(one.value - one.low for one in differences)) / count
    above = math.hypot(*(one.high - one.value for one in differences)) / count
    return Contrast(value, max(-1.0, value - below), min(1.0, value + above))
