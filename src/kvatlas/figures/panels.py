"""Maps as panels of numbers and texts: a metric, a cost, or differences of either."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from kvatlas.columns import KV_MEMORY, Column, cost_columns, cost_names
from kvatlas.core import Cell, CellCoord, Estimate, KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.figures import colours, style
from kvatlas.stats.numerics.arrays import LEVEL, Contrast
from kvatlas.stats.pairs import CellDifference, Differences
from kvatlas.text import axis_label, guarded, interval_text, percent_text, signed

K = TypeVar("K", bound=Hashable)

#: The least distance of the ends of a scale that are the lowest and the highest cell.
NARROWEST = 1.0
BEST = "bold: highest"
WORSE = "shown to be worse than the best"


class CellText(NamedTuple):
    """A cell as it is printed: `value` places it on the colour scale, `small` is its second line."""

    value: float
    text: str
    small: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Panel:
    """One heatmap to draw: the numbers of a map under their `label` and `unit`, with words `about` their marks.

    With `centred` 0 has the middle colour; the ends of the scale are `least` apart at least, so that colours do not
    show noise, and are printed with `digits` decimals. `claim` is what was tested of each cell and `proven` the cells
    of which it is proven. `half_interval` is half the interval of the median cell, in points. `baselines` stand over
    the cells, each with its interval. `outlined` cells are framed.
    """

    map: Map
    cells: Mapping[CellCoord, CellText]
    label: str
    unit: str
    about: tuple[str, ...] = ()
    palette: str = colours.VALUES
    centred: bool = False
    least: float = NARROWEST
    digits: int = 1
    claim: str = ""
    proven: frozenset[CellCoord] = frozenset()
    half_interval: float | None = None
    baselines: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()
    outlined: frozenset[CellCoord] = frozenset()

    @property
    def memory(self) -> list[list[float]]:
        """The mean KV bytes of each cell by rows, for lines of equal memory across a map of bits and another axis.

        Empty for other maps, for a budget in bytes, of which each value is such a line, and where bytes are unknown.
        """
        (vertical, rows), (horizontal, columns) = self.map.axes
        names = (vertical, horizontal)
        has_words = str in set(map(type, (*rows, *columns)))
        if "kv_bits" not in names or ("kv_budget" in names and has_words):
            return []
        if min(len(rows), len(columns)) < 2 or len(self.map.cells) < len(rows) * len(columns):
            return []
        sizes = {coord: cell.mean_kv_bytes or 0.0 for coord, cell in self.map.cells.items()}
        return _table(sizes, rows, columns) if all(sizes.values()) else []


def _table(values: Mapping[CellCoord, float], rows: Sequence[Any], columns: Sequence[Any]) -> list[list[float]]:
    """Return values by rows and columns."""
    return [_row(values, row, columns) for row in rows]


def _row(values: Mapping[CellCoord, float], row: Any, columns: Sequence[Any]) -> list[float]:
    return [values[row, column] for column in columns]


def finding(panels: Sequence[Panel]) -> str:
    """State the number of cells of which the claim is proven; the range of the cells if none was tested."""
    claim = panels[0].claim
    if not claim or any(panel.claim != claim for panel in panels):
        return _range(panels)
    count = sum(len(panel.cells) for panel in panels)
    proven = sum(len(panel.proven) for panel in panels)
    if claim == WORSE and not proven:
        return "no cell is shown to be better than another"
    if proven == 0:
        return f"no cell is {claim}"
    if proven == count:
        return f"all {count} cells are {claim}"
    return f"{proven} of {count} cells {'is' if proven == 1 else 'are'} {claim}"


def _range(panels: Sequence[Panel]) -> str:
    """State what the panels show, and of one measure from which value to which."""
    labels = dict.fromkeys(panel.label for panel in panels)
    subject = " and ".join(labels)
    if len(labels) > 1:
        return subject
    cells = sorted(chain.from_iterable(panel.cells.values() for panel in panels))
    return f"{subject} from {cells[0].text} to {cells[-1].text} {panels[0].unit.removeprefix('in ')}"


def framed(map_: Map) -> tuple[frozenset[CellCoord], str]:
    """Return the cells in the frame, and what they have in common.

    They keep the margin; without a full cache they are the plateau.
    """
    if map_.keeps is not None and map_.margin is not None:
        return map_.keeps, f"proven to stay within {round(100 * map_.margin, 4):g} points of the full cache"
    return map_.plateau or frozenset(), "statistically tied with the best"


def metric_panels(maps: Sequence[Map]) -> list[Panel]:
    """Return maps of a metric: percent with 95 % intervals, the highest cells in bold, and proven ones framed."""
    panels = []
    for map_ in maps:
        region, common_claim = framed(map_)
        claim, proven = _claim(map_)
        # A frame around everything would say nothing: the title does.
        outlined = frozenset[CellCoord]() if region >= set(map_.cells) else region
        about = [BEST]
        if outlined:
            about.append(f"framed: {common_claim}")
        widths = _widths(cell.estimate for cell in map_.cells.values())
        panels.append(
            Panel(
                map_,
                _estimate_texts(map_),
                axis_label(map_.metric),
                "in %",
                tuple(about),
                least=max(NARROWEST, fmean(widths or [0])),
                claim=claim,
                proven=proven,
                half_interval=median(widths) / 2 if widths else None,
                baselines=style.baseline_texts(map_.baselines),
                notes=map_.remarks,
                outlined=outlined,
            )
        )
    return panels


def _estimate_texts(map_: Map) -> dict[CellCoord, CellText]:
    """Return the cells of a map in percent with their intervals, the highest in bold."""
    best = max((cell.estimate.value for cell in map_.cells.values()), default=0.0)
    texts = {}
    for coord, cell in map_.cells.items():
        estimate = cell.estimate
        is_best = estimate.value > best - 1e-9
        texts[coord] = CellText(100 * estimate.value, percent_text(estimate.value), interval_text(estimate), is_best)
    return texts


def _claim(map_: Map) -> tuple[str, frozenset[CellCoord]]:
    """Return what was tested of each cell, and the cells of which it is proven; no claim if traces cannot show any."""
    region, common_claim = framed(map_)
    claim = ""
    proven = frozenset[CellCoord]()
    if map_.keeps is not None:
        claim = common_claim
        proven = region
    elif map_.plateau is not None:
        claim = WORSE
        proven = frozenset(map_.cells) - region
    if any(note.kind is NoteKind.VACUOUS for note in map_.remarks):
        claim = ""
    return claim, proven


def _widths(estimates: Iterable[Estimate | Contrast]) -> list[float]:
    """Return the widths of intervals in points: a scale narrower than their mean would show noise."""
    return [
        100 * (estimate.high - estimate.low)
        for estimate in estimates
        if estimate.low is not None and estimate.high is not None
    ]


class Unit(NamedTuple):
    """A unit in which all numbers of a figure are printed, of a size, with as many `digits` after the point."""

    name: str
    size: float = 1.0
    digits: int = 0

    def text(self, value: float) -> str:
        """Return a cost in its own unit as it is printed in this one."""
        return f"{value / self.size:,.{self.digits}f}"


_TIMES = (Unit("ms", 0.001), Unit("s"), Unit("h", 3600))
_BYTES = (Unit("bytes"), Unit("KiB", 2**10), Unit("MiB", 2**20), Unit("GiB", 2**30))
#: The units in which figures print costs of a column's unit; others have one unit, under its name.
_UNITS = {"seconds": _TIMES, "traces": (Unit("number"),)}


class Cost(NamedTuple):
    """A cost that a map's cells carry: its label, its column, its units, and a factor for the first of them."""

    label: str
    column: Column
    units: tuple[Unit, ...] = (Unit("tokens"),)
    factor: float = 1.0

    def of(self, cell: Cell) -> float | None:
        """Return the cost of a cell, None if it is not known."""
        if self.units is _BYTES and cell.mean_kv_bytes is not None:
            return cell.mean_kv_bytes
        value = self.column.read(cell)
        return None if value is None else self.factor * value

    def known(self, cells: Mapping[K, Cell]) -> dict[K, float]:
        """Return the costs of the cells of which they are known."""
        costs = {key: self.of(cell) for key, cell in cells.items()}
        return {key: value for key, value in costs.items() if value is not None}

    def unit(self, values: Iterable[float]) -> Unit:
        """Return the unit in which the largest of the values has at most three digits before the point.

        It has three digits in all, where a cost has several units.
        """
        largest = max(values, default=0.0)
        unit = next((unit for unit in self.units if largest < 1000 * unit.size), self.units[-1])
        if len(self.units) == 1 or largest <= 0:
            return unit
        return unit._replace(digits=max(0, 2 - math.floor(math.log10(largest / unit.size))))


def cost_of(name: str, model: str) -> Cost:
    """Return the cost that `--metric` knows under a name; raises KvatlasError without one."""
    columns = cost_columns()
    if name in columns:
        column = columns[name]
        return Cost(column.title, column, _UNITS.get(column.unit, (Unit(column.unit),)))
    if name != KV_MEMORY:
        raise KvatlasError(f"Unknown cost {name!r}; expected: {', '.join(cost_names())}.")
    from kvatlas import models

    # Where the bytes of a cell are unknown, they are its tokens times the model's bytes per token.
    return Cost("mean KV memory", columns["mean_kv_tokens"], _BYTES, models.find(model).kv_bytes_per_token)


def _known_costs(map_: Map, name: str) -> tuple[Cost, dict[CellCoord, float]]:
    """Return a cost and its values in the cells of a map that know it; raises KvatlasError if no cell does."""
    cost = cost_of(name, map_.model)
    values = cost.known(map_.cells)
    if not values:
        raise KvatlasError(f"The map of {map_.model} on {map_.benchmark} does not tell {name} of its cells.")
    return cost, values


def cost_panels(maps: Sequence[Map], name: str) -> list[Panel]:
    """Return maps of a cost (see `cost_of`), all in one unit; raises KvatlasError if the maps do not carry it."""
    costs = [_known_costs(map_, name) for map_ in maps]
    every_value = list(chain.from_iterable(values.values() for _, values in costs))
    panels = []
    for map_, (cost, values) in zip(maps, costs, strict=True):
        unit = cost.unit(every_value)
        baselines = cost.known(map_.baselines)
        panels.append(
            Panel(
                map_,
                {coord: CellText(value / unit.size, unit.text(value)) for coord, value in values.items()},
                cost.label,
                f"in {unit.name}",
                palette=colours.COSTS,
                least=0.02 * max(values.values()) / unit.size or 1.0,
                digits=unit.digits,
                baselines=tuple((f"{text} {unit.text(value)}", "") for text, value in baselines.items()),
                notes=map_.remarks,
            )
        )
    return panels


@dataclass(frozen=True)
class Compared:
    """Maps, and the map that each is compared with, by its name: that of `name`, with the differences that are paired.

    Where `name` is a baseline all cells of the other map are its cell.
    """

    maps: Sequence[Map]
    name: str
    others: Mapping[MapName, Map]
    differences: Differences

    def cells(self, map_: Map) -> dict[CellCoord, Cell]:
        """Return the other side of the cells of a map; raises KvatlasError without one."""
        other = self.others[map_.name].cells
        shared = {coord: cell for coord, cell in other.items() if coord in map_.cells}
        if not shared:
            raise KvatlasError(f"{self.name} has no cell of the map of {map_.model} on {map_.benchmark} {map_.policy}.")
        return shared


def difference_panels(compared: Compared) -> list[Panel]:
    """Return maps of cell minus the other side, in points; without intervals where the differences are not paired.

    Each interval speaks of its own cell; marks allow for all cells of a map (Holm). Raises KvatlasError if a map has
    nothing to be compared with.
    """
    panels = []
    for map_ in compared.maps:
        paired = compared.differences.get(map_.name, {})
        cells = {
            coord: _difference_text(map_.cells[coord], other, paired.get(coord))
            for coord, other in compared.cells(map_).items()
        }
        about: tuple[str, ...] = ("not paired",)
        if paired:
            about = ("paired by problem", "bold: a difference is proven, allowing for all cells of the map")
        widths = _widths(paired.values())
        panels.append(
            Panel(
                map_,
                cells,
                f"{axis_label(map_.metric)} minus {compared.name}",
                "in points",
                about,
                colours.DIFFERENCES,
                centred=True,
                least=max(NARROWEST, fmean(widths or [0])) / 2,
                claim=f"proven to differ from {compared.name}" if paired else "",
                proven=frozenset(coord for coord, cell in cells.items() if cell.bold),
                half_interval=median(widths) / 2 if widths else None,
                baselines=style.baseline_texts(
                    {name: cell for name, cell in map_.baselines.items() if name == compared.name}
                ),
                notes=map_.remarks,
            )
        )
    return panels


def _difference_text(cell: Cell, other: Cell, contrast: CellDifference | None) -> CellText:
    """Return the difference of two cells; with its limits, and bold if it is proven, where it is paired."""
    if contrast is None:
        value = 100 * (cell.estimate.value - other.estimate.value)
        return CellText(value, signed(value))
    value = 100 * contrast.value
    limits = f"{signed(100 * contrast.low, 0)} to {signed(100 * contrast.high, 0)}"
    return CellText(value, signed(value), limits, contrast.p_holm <= LEVEL)


def data_csv(panels: Sequence[Panel]) -> str:
    """Return the numbers of the panels, one row per cell: what is printed, and if the cell is outlined."""
    axes = [name for name, _ in panels[0].map.axes]
    rows: list[list[Any]] = [["model", "benchmark", "policy", *axes, "shows", "value", "text", "small", "outlined"]]
    for panel in panels:
        for coord, cell in panel.cells.items():
            names = map(guarded, (*panel.map.name, *coord))
            numbers = [round(cell.value, 4), cell.text, cell.small, int(coord in panel.outlined)]
            rows.append([*names, f"{panel.label} {panel.unit}", *numbers])
    return style.rows_csv(rows)
