"""Maps as panels of numbers and texts: a metric, a cost, or differences of either."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from kvatlas.core import Cell, CellCoord, Estimate, KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.figures import style
from kvatlas.stats.numerics.arrays import LEVEL, Contrast
from kvatlas.stats.pairs import Differences
from kvatlas.text import guarded

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
    colours: str = style.VALUES
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
        words = [value for value in (*rows, *columns) if isinstance(value, str)]
        if "kv_bits" not in (vertical, horizontal) or (words and "kv_budget" in (vertical, horizontal)):
            return []
        sizes = [
            [(self.map.cells[at].mean_kv_bytes if (at := (r, c)) in self.map.cells else None) or 0.0 for c in columns]
            for r in rows
        ]
        return sizes if min(len(rows), len(columns)) > 1 and all(map(all, sizes)) else []


def finding(panels: Sequence[Panel]) -> str:
    """State the number of cells of which the claim is proven; the range of the cells if none was tested."""
    first, claim = panels[0], panels[0].claim
    if not claim or any(panel.claim != claim for panel in panels):
        labels = dict.fromkeys(panel.label for panel in panels)
        cells = sorted(cell for panel in panels for cell in panel.cells.values())
        numbers = f" from {cells[0].text} to {cells[-1].text} {first.unit.removeprefix('in ')}" * (len(labels) == 1)
        return f"{' and '.join(labels)}{numbers}"
    count, proven = sum(len(panel.cells) for panel in panels), sum(len(panel.proven) for panel in panels)
    if claim == WORSE and not proven:
        return "no cell is shown to be better than another"
    if proven in (0, count):
        return f"{f'all {count} cells are' if proven else 'no cell is'} {claim}"
    return f"{proven} of {count} cells {'is' if proven == 1 else 'are'} {claim}"


def framed(map_: Map) -> tuple[frozenset[CellCoord], str]:
    """The cells in the frame, and what they have in common: the margin is kept; without a full cache, the plateau."""
    if map_.keeps is not None and map_.margin is not None:
        return map_.keeps, f"proven to stay within {round(100 * map_.margin, 4):g} points of the full cache"
    return map_.plateau or frozenset(), "statistically tied with the best"


def metric_panels(maps: Sequence[Map]) -> list[Panel]:
    """Maps of a metric: percent with the 95 % interval, highest cells in bold, and a frame around proven ones."""
    panels = []
    for map_ in maps:
        estimates = {coord: cell.estimate for coord, cell in map_.cells.items()}
        best = max((estimate.value for estimate in estimates.values()), default=0.0)
        cells = {
            coord: CellText(100 * e.value, style.percent(e.value), style.interval(e), e.value > best - 1e-9)
            for coord, e in estimates.items()
        }
        region, common = framed(map_)
        claim, proven = "", frozenset[CellCoord]()
        if map_.keeps is not None:
            claim, proven = common, region
        elif map_.plateau is not None:
            claim, proven = WORSE, frozenset(cells) - region
        if any(note.kind is NoteKind.VACUOUS for note in map_.remarks):
            claim = ""
        # A frame around everything would say nothing: the title does.
        outlined = frozenset[CellCoord]() if region >= set(cells) else region
        widths = _widths(estimates.values())
        panels.append(
            Panel(
                map_,
                cells,
                style.label(map_.metric),
                "in %",
                (BEST, *[f"framed: {common}"] * bool(outlined)),
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


def _widths(estimates: Iterable[Estimate | Contrast]) -> list[float]:
    """The widths of intervals in points: a scale narrower than their mean would show noise."""
    return [100 * (e.high - e.low) for e in estimates if e.low is not None and e.high is not None]


class Unit(NamedTuple):
    """A unit in which all numbers of a figure are printed, of a size, with as many `digits` after the point."""

    name: str
    size: float = 1.0
    digits: int = 0

    def text(self, value: float) -> str:
        """A cost in its own unit as it is printed in this one."""
        return f"{value / self.size:,.{self.digits}f}"


_TIMES = (Unit("ms", 0.001), Unit("s"), Unit("h", 3600))
_BYTES = (Unit("bytes"), Unit("KiB", 2**10), Unit("MiB", 2**20), Unit("GiB", 2**30))


class Cost(NamedTuple):
    """A cost that a map's cells carry: its label, the field of the cell, its units, and a factor for the first."""

    label: str
    field: str
    units: tuple[Unit, ...] = (Unit("tokens"),)
    factor: float = 1.0

    def of(self, cell: Cell) -> float | None:
        """The cost of a cell, None if it is not known."""
        if self.units is _BYTES and cell.mean_kv_bytes is not None:
            return cell.mean_kv_bytes
        value = getattr(cell, self.field)
        return None if value is None else self.factor * value

    def unit(self, values: Iterable[float]) -> Unit:
        """The unit in which the largest of the values has at most three digits before the point, with three in all."""
        largest = max(values, default=0.0)
        unit = next((unit for unit in self.units if largest < 1000 * unit.size), self.units[-1])
        whole = len(self.units) == 1 or largest <= 0
        return unit if whole else unit._replace(digits=max(0, 2 - math.floor(math.log10(largest / unit.size))))


#: Costs by the names under which `--metric` knows them.
COSTS: Mapping[str, Cost] = {
    "mean_kv_tokens": Cost("mean KV cache", "mean_kv_tokens"),
    "peak_kv_tokens": Cost("peak KV cache", "peak_kv_tokens"),
    "seconds": Cost("time per answer", "seconds_mean", _TIMES),
    "output_tokens": Cost("answer length", "output_tokens_mean"),
    "truncated": Cost("truncated answers", "truncated", (Unit("number"),)),
}
#: KV memory of cells without known bytes is the tokens' cost times the model's bytes per token.
KV_MEMORY = "kv_memory"


def cost_of(name: str, model: str) -> Cost:
    """The cost of that name; raises KvatlasError without one."""
    if name in COSTS:
        return COSTS[name]
    if name != KV_MEMORY:
        raise KvatlasError(f"Unknown cost {name!r}; expected: {', '.join((*COSTS, KV_MEMORY))}.")
    from kvatlas import models

    return Cost("mean KV memory", "mean_kv_tokens", _BYTES, models.find(model).kv_bytes_per_token)


def _known_costs(map_: Map, name: str) -> tuple[Cost, dict[CellCoord, float]]:
    """A cost and its values in the cells of a map that know it; raises KvatlasError if no cell does."""
    cost = cost_of(name, map_.model)
    known = {coord: value for coord, cell in map_.cells.items() if (value := cost.of(cell)) is not None}
    if not known:
        raise KvatlasError(f"The map of {map_.model} on {map_.benchmark} does not tell {name} of its cells.")
    return cost, known


def cost_panels(maps: Sequence[Map], name: str) -> list[Panel]:
    """Maps of a cost of `COSTS` or of `KV_MEMORY`, all in one unit; raises KvatlasError if the maps do not carry it."""
    costs = [_known_costs(map_, name) for map_ in maps]
    panels = []
    for map_, (cost, known) in zip(maps, costs, strict=True):
        unit = cost.unit(value for _, values in costs for value in values.values())
        cells = {coord: CellText(value / unit.size, unit.text(value)) for coord, value in known.items()}
        of_baselines = {text: value for text, cell in map_.baselines.items() if (value := cost.of(cell)) is not None}
        baselines = tuple((f"{text} {unit.text(value)}", "") for text, value in of_baselines.items())
        least = 0.02 * max(known.values()) / unit.size or 1.0
        panels.append(
            Panel(
                map_, cells, cost.label, f"in {unit.name}", colours=style.COSTS, least=least, digits=unit.digits,
                baselines=baselines, notes=map_.remarks,
            )
        )  # fmt: skip
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
        """The other side of the cells of a map; raises KvatlasError without one."""
        other = self.others[map_.name].cells
        shared = {coord: cell for coord, cell in other.items() if coord in map_.cells}
        if not shared:
            raise KvatlasError(f"{self.name} has no cell of the map of {map_.model} on {map_.benchmark} {map_.policy}.")
        return shared


def difference_panels(compared: Compared) -> list[Panel]:
    """Maps of cell minus the other side, in points; without intervals where the differences are not paired.

    Each interval speaks of its own cell; marks allow for all cells of a map (Holm). Raises KvatlasError if a map has
    nothing to be compared with.
    """
    panels = []
    for map_ in compared.maps:
        paired, cells = compared.differences.get(map_.name, {}), {}
        for coord, other in compared.cells(map_).items():
            contrast = paired.get(coord)
            value = 100 * (contrast.value if contrast else map_.cells[coord].estimate.value - other.estimate.value)
            limits = [style.signed(100 * limit, 0) for limit in (contrast.low, contrast.high)] if contrast else []
            is_proven = contrast is not None and contrast.p_holm <= LEVEL
            cells[coord] = CellText(value, style.signed(value), " to ".join(limits), is_proven)
        widths = _widths(paired.values())
        base = {name: cell for name, cell in map_.baselines.items() if name == compared.name}
        panels.append(
            Panel(
                map_,
                cells,
                f"{style.label(map_.metric)} minus {compared.name}",
                "in points",
                ("paired by problem", "bold: a difference is proven, allowing for all cells of the map")
                if paired
                else ("not paired",),
                style.DIFFERENCES,
                centred=True,
                least=max(NARROWEST, fmean(widths or [0])) / 2,
                claim=f"proven to differ from {compared.name}" if paired else "",
                proven=frozenset(coord for coord, cell in cells.items() if cell.bold),
                half_interval=median(widths) / 2 if widths else None,
                baselines=style.baseline_texts(base),
                notes=map_.remarks,
            )
        )
    return panels


def data_csv(panels: Sequence[Panel]) -> str:
    """The numbers of the panels, one row per cell: what is printed, and whether the cell is outlined."""
    axes = [name for name, _ in panels[0].map.axes]
    rows: list[list[Any]] = [["model", "benchmark", "policy", *axes, "shows", "value", "text", "small", "outlined"]]
    for panel in panels:
        for coord, cell in panel.cells.items():
            names = map(guarded, (*panel.map.name, *coord))
            numbers = [round(cell.value, 4), cell.text, cell.small, int(coord in panel.outlined)]
            rows.append([*names, f"{panel.label} {panel.unit}", *numbers])
    return style.rows_csv(rows)
