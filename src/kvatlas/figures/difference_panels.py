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
from kvatlas.stats.estimates.pass_at_1 import LEVEL
from kvatlas.stats.inference.resampling import Contrast
from kvatlas.stats.pairs.differences import Differences


@dataclass(frozen=True)
class Against:
    """What maps are compared with, under a `name`: a baseline of each, or other maps by the name of their partner."""

    name: str
    others: Mapping[MapName, Map] = field(default_factory=dict)

    def baseline(self, one: Map) -> Cell | None:
        """The baseline of a map, None where it is compared cell by cell; KvatlasError where it has no such one."""
        if self.others:
            return None
        if self.name not in one.baselines:
            known = ", ".join(one.baselines) or "none"
            raise KvatlasError(
                f"The map of {one.model} on {one.benchmark} has no baseline {self.name!r}; its baselines are: {known}."
            )
        return one.baselines[self.name]

    def cells(self, one: Map) -> Mapping[CellCoord, Cell]:
        """What each cell of a map is compared with; KvatlasError where there is nothing."""
        base = self.baseline(one)
        if base is not None:
            return dict.fromkeys(one.cells, base)
        other = self.others.get(one.name)
        shared = {} if other is None else {place: cell for place, cell in other.cells.items() if place in one.cells}
        if not shared:
            raise KvatlasError(f"{self.name} has no cell of the map of {one.model} on {one.benchmark} {one.policy}.")
        return shared


def difference_panels(maps: Sequence[Map], differences: Differences, against: Against) -> list[Panel]:
    """Maps of cell minus what it is compared with, in points; without intervals where `differences` has none.

    Raises KvatlasError where a map has nothing to be compared with.
    """
    return [_difference_panel(one, differences.get(one.name, {}), against) for one in maps]


def _difference_panel(one: Map, paired: Mapping[CellCoord, Contrast], against: Against) -> Panel:
    base = against.baseline(one)
    cells = {}
    for place, other in against.cells(one).items():
        found = paired.get(place)
        value = 100 * (found.value if found else one.cells[place].estimate.value - other.estimate.value)
        small = f"{style.signed(100 * found.low, 0)} to {style.signed(100 * found.high, 0)}" if found else ""
        shown = found is not None and found.p < LEVEL
        cells[place] = Shown(value, f"{style.signed(value)}{'*' if shown else ''}", small, shown)
    how = "paired by problem" if paired else "not paired"
    about = [f"{style.label(one.metric)} minus that of {against.name}, in points, {how}."]
    if paired:
        about += [
            SMALL,
            "Intervals and marks hold over all cells of a map together; * and bold: a difference is shown.",
        ]
    corners = cornered(one) if base else {}
    if corners:
        about.append(CORNER)
    label = f"{style.label(one.metric)} minus {against.name}"
    measure = Measure(label, tuple(about), style.DIFFERENCES, True, noise(paired.values()) / 2)
    baselines = style.baseline_texts({against.name: base} if base else {})
    return Panel(
        one.model, one.benchmark, one.policy, one.axes, cells, measure, baselines, one.remarks, cornered=corners
    )


def cost_change_panels(maps: Sequence[Map], name: str, against: Against) -> list[Panel]:
    """Maps of the change of a cost in percent of what it is compared with; KvatlasError where a cost is not known."""
    return [_change_panel(one, cost_of(name, one.model), name, against) for one in maps]


def _change_panel(one: Map, cost: Cost, name: str, against: Against) -> Panel:
    known = known_costs(one, cost, name)
    base = {place: value for place, cell in against.cells(one).items() if (value := cost.value(cell))}
    changes = {place: 100 * (value / base[place] - 1) for place, value in known.items() if place in base}
    if not changes:
        raise KvatlasError(f"{against.name} of {one.model} on {one.benchmark} has no {name} to compare with.")
    cells = {place: Shown(change, style.signed(change, 0)) for place, change in changes.items()}
    about = f"Change of {cost.label} against {against.name}, in percent."
    measure = Measure(f"{cost.label} against {against.name} (%)", (about,), f"{style.DIFFERENCES}_r", centred=True)
    return Panel(one.model, one.benchmark, one.policy, one.axes, cells, measure, (), one.remarks)
