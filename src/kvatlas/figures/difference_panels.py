"""Difference maps as panels: every cell against a baseline, or against the same cell of another map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.core import Cell, CellCoord, KvatlasError, Map, MapName
from kvatlas.figures import style
from kvatlas.figures.panels import (
    CORNER,
    SMALL,
    Cost,
    Measure,
    Panel,
    Shown,
    cornered,
    cost_of,
    known_costs,
    noise,
)
from kvatlas.stats.inference import Contrast
from kvatlas.stats.intervals import LEVEL
from kvatlas.stats.pairs import Differences


@dataclass(frozen=True)
class Against:
    """What maps are compared with, under a `name`: a baseline of each, or other maps by the name of their partner."""

    name: str
    others: Mapping[MapName, Map] = field(default_factory=dict)

    def baseline(self, map_: Map) -> Cell | None:
        """The baseline of a map, None where it is compared cell by cell; KvatlasError where it has no such one."""
        if self.others:
            return None
        if self.name not in map_.baselines:
            known = ", ".join(map_.baselines) or "none"
            raise KvatlasError(
                f"The map of {map_.model} on {map_.benchmark} has no baseline {self.name!r}; its baselines are: "
                f"{known}."
            )
        return map_.baselines[self.name]

    def cells(self, map_: Map) -> Mapping[CellCoord, Cell]:
        """What each cell of a map is compared with; KvatlasError where there is nothing."""
        base = self.baseline(map_)
        if base is not None:
            return dict.fromkeys(map_.cells, base)
        other = self.others.get(map_.name)
        shared = {} if other is None else {coord: cell for coord, cell in other.cells.items() if coord in map_.cells}
        if not shared:
            raise KvatlasError(f"{self.name} has no cell of the map of {map_.model} on {map_.benchmark} {map_.policy}.")
        return shared


def difference_panels(maps: Sequence[Map], differences: Differences, against: Against) -> list[Panel]:
    """Maps of cell minus what it is compared with, in points; without intervals where `differences` has none.

    Raises KvatlasError where a map has nothing to be compared with.
    """
    return [_difference_panel(map_, differences.get(map_.name, {}), against) for map_ in maps]


def _difference_panel(map_: Map, paired: Mapping[CellCoord, Contrast], against: Against) -> Panel:
    base = against.baseline(map_)
    cells = {}
    for coord, other in against.cells(map_).items():
        contrast = paired.get(coord)
        value = 100 * (contrast.value if contrast else map_.cells[coord].estimate.value - other.estimate.value)
        small = f"{style.signed(100 * contrast.low, 0)} to {style.signed(100 * contrast.high, 0)}" if contrast else ""
        shown = contrast is not None and contrast.p < LEVEL
        cells[coord] = Shown(value, f"{style.signed(value)}{'*' if shown else ''}", small, shown)
    how = "paired by problem" if paired else "not paired"
    about = [f"{style.label(map_.metric)} minus that of {against.name}, in points, {how}."]
    if paired:
        about += [
            SMALL,
            "Intervals and marks hold over all cells of a map together; * and bold: a difference is shown.",
        ]
    corners = cornered(map_) if base else {}
    if corners:
        about.append(CORNER)
    label = f"{style.label(map_.metric)} minus {against.name}"
    measure = Measure(label, tuple(about), style.DIFFERENCES, True, noise(paired.values()) / 2)
    baselines = style.baseline_texts({against.name: base} if base else {})
    return Panel(
        map_.model, map_.benchmark, map_.policy, map_.axes, cells, measure, baselines, map_.remarks, cornered=corners
    )


def cost_change_panels(maps: Sequence[Map], name: str, against: Against) -> list[Panel]:
    """Maps of the change of a cost in percent of what it is compared with; KvatlasError where a cost is not known."""
    return [_change_panel(map_, cost_of(name, map_.model), name, against) for map_ in maps]


def _change_panel(map_: Map, cost: Cost, name: str, against: Against) -> Panel:
    known = known_costs(map_, cost, name)
    base = {coord: value for coord, cell in against.cells(map_).items() if (value := cost.value(cell))}
    changes = {coord: 100 * (value / base[coord] - 1) for coord, value in known.items() if coord in base}
    if not changes:
        raise KvatlasError(f"{against.name} of {map_.model} on {map_.benchmark} has no {name} to compare with.")
    cells = {coord: Shown(change, style.signed(change, 0)) for coord, change in changes.items()}
    about = f"Change of {cost.label} against {against.name}, in percent."
    measure = Measure(f"{cost.label} against {against.name} (%)", (about,), f"{style.DIFFERENCES}_r", centred=True)
    return Panel(map_.model, map_.benchmark, map_.policy, map_.axes, cells, measure, (), map_.remarks)
