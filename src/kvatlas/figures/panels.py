"""Maps as panels of numbers and texts: a metric, a cost, or differences of either."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from kvatlas.core import Cell, CellCoord, Estimate, KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.figures import style
from kvatlas.stats.inference import Contrast
from kvatlas.stats.intervals import LEVEL
from kvatlas.stats.pairs import Differences
from kvatlas.text import guarded

#: The least distance of the ends of a scale that are the lowest and the highest cell.
NARROWEST = 1.0
SMALL = "Small type: 95 % interval."
CORNER = "Corner: policies have nothing to choose in some problems, filled: in most."


class CellText(NamedTuple):
    """A cell as it is printed: `value` places it on the colour scale, `small` is its second line."""

    value: float
    text: str
    small: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Panel:
    """One heatmap to draw: the numbers of a map under the label of its colour bar, with sentences `about` them.

    With `centred` 0 has the middle colour; the ends of the scale are `least` apart at least, so that colours do not
    show noise. `baselines` stand over the cells, each with its interval. `outlined` cells are framed together and the
    others dimmed. `cornered` gives the share of problems in which policies have nothing to choose.
    """

    map: Map
    cells: Mapping[CellCoord, CellText]
    label: str
    about: tuple[str, ...]
    colours: str = style.VALUES
    centred: bool = False
    least: float = NARROWEST
    baselines: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()
    outlined: frozenset[CellCoord] = field(default_factory=frozenset)
    cornered: Mapping[CellCoord, float] = field(default_factory=dict)

    def without_intervals(self) -> Panel:
        """The same panel with values alone."""
        cells = {coord: cell._replace(small="") for coord, cell in self.cells.items()}
        return replace(self, cells=cells, baselines=tuple((text, "") for text, _ in self.baselines))


class Frame(StrEnum):
    """The cells of a map that are framed; on a map without a full cache `margin` frames the plateau."""

    MARGIN = "margin"
    PLATEAU = "plateau"
    NONE = "none"


def framed(map_: Map, frame: Frame = Frame.MARGIN) -> tuple[frozenset[CellCoord], str]:
    """The cells in the frame, and what they have in common."""
    if frame is Frame.MARGIN and map_.keeps is not None and map_.margin is not None:
        return map_.keeps, f"shown to lose at most {round(100 * map_.margin, 4):g} points against the full cache"
    region = frozenset[CellCoord]() if frame is Frame.NONE else map_.plateau or frozenset()
    return region, "statistically tied with the best"


def metric_panels(maps: Sequence[Map], frame: Frame = Frame.MARGIN) -> list[Panel]:
    """Maps of a metric: percent with the 95 % interval, highest cells in bold, and a frame."""
    panels = []
    for map_ in maps:
        estimates = {coord: cell.estimate for coord, cell in map_.cells.items()}
        best = max((estimate.value for estimate in estimates.values()), default=0.0)
        cells = {
            coord: CellText(100 * e.value, style.percent(e.value), style.interval(e), e.value > best - 1e-9)
            for coord, e in estimates.items()
        }
        label, notes, corners = style.label(map_.metric), map_.remarks, _cornered(map_)
        region, common = framed(map_, frame)
        about = [f"{label} in percent, highest in bold."]
        if any(cell.small for cell in cells.values()):
            about.append(SMALL)
        # A frame around everything would say nothing: a sentence does.
        outlined = frozenset[CellCoord]() if region >= set(cells) else region
        if region and not outlined:
            notes = (*notes, Note(NoteKind.INTERVAL, f"all cells are {common}"))
        elif region is map_.keeps and not region:
            notes = (*notes, Note(NoteKind.INTERVAL, f"no cell is {common}"))
        if outlined:
            about.append(f"Outlined: {common}; others are dimmed.")
        if corners:
            about.append(CORNER)
        baselines, least = style.baseline_texts(map_.baselines), _noise(estimates.values())
        panels.append(
            Panel(
                map_, cells, label, tuple(about), least=least, baselines=baselines, notes=notes, outlined=outlined,
                cornered=corners,
            )
        )  # fmt: skip
    return panels


def _noise(estimates: Iterable[Estimate | Contrast]) -> float:
    """The mean width of intervals in points: a scale as narrow as that would show noise."""
    widths = [100 * (e.high - e.low) for e in estimates if e.low is not None and e.high is not None]
    return max(NARROWEST, math.fsum(widths) / max(len(widths), 1))


def _cornered(map_: Map) -> dict[CellCoord, float]:
    """The share of problems in which policies have nothing to choose, where there are any."""
    return {coord: cell.audit.no_choice for coord, cell in map_.cells.items() if cell.audit and cell.audit.no_choice}


class Cost(NamedTuple):
    """A cost that a map's cells carry: its label, a sentence, the field of the cell, and the size of its unit."""

    label: str
    about: str
    field: str
    whole: bool = True
    unit: float = 1.0

    def of(self, cell: Cell) -> float | None:
        """The cost of a cell, None if it is not known."""
        value = getattr(cell, self.field)
        return None if value is None else self.unit * value

    def text(self, value: float) -> str:
        """The cost as it is printed."""
        return f"{value:,.0f}" if self.whole else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


#: Costs by the names under which `--metric` knows them.
COSTS: Mapping[str, Cost] = {
    "mean_kv_tokens": Cost("KV Tokens", "Mean cached tokens per sequence.", "mean_kv_tokens"),
    "peak_kv_tokens": Cost("Peak KV Tokens", "Most tokens ever cached.", "peak_kv_tokens"),
    "seconds": Cost("Seconds", "Mean decoding seconds per answer.", "seconds_mean", whole=False),
    "output_tokens": Cost("Output Tokens", "Mean tokens written per answer.", "output_tokens_mean"),
    "truncated": Cost("Truncated", "Traces cut at the token limit.", "truncated"),
}
#: KV memory is the tokens' cost times the model's bytes per token, so it needs the model's shape.
KV_MEMORY = "kv_memory"


def cost_of(name: str, model: str) -> Cost:
    """The cost of that name; raises KvatlasError if there is none."""
    if name in COSTS:
        return COSTS[name]
    if name != KV_MEMORY:
        raise KvatlasError(f"Unknown cost {name!r}; expected: {', '.join((*COSTS, KV_MEMORY))}.")
    from kvatlas import models

    mebibytes = models.find(model).kv_bytes_per_token / 2**20
    about = "Mean memory of keys and values per sequence, in MiB."
    return Cost("KV Memory (MiB)", about, "mean_kv_tokens", False, mebibytes)


def _known_costs(map_: Map, name: str) -> tuple[Cost, dict[CellCoord, float]]:
    """A cost and its values in the cells of a map that know it; raises KvatlasError if no cell does."""
    cost = cost_of(name, map_.model)
    known = {coord: value for coord, cell in map_.cells.items() if (value := cost.of(cell)) is not None}
    if not known:
        raise KvatlasError(f"The map of {map_.model} on {map_.benchmark} does not tell {name} of its cells.")
    return cost, known


def cost_panels(maps: Sequence[Map], name: str) -> list[Panel]:
    """Maps of a cost of `COSTS` or of `KV_MEMORY` (MiB); raises KvatlasError if the maps do not carry it."""
    panels = []
    for map_ in maps:
        cost, known = _known_costs(map_, name)
        cells = {coord: CellText(value, cost.text(value)) for coord, value in known.items()}
        of_baselines = {text: value for text, cell in map_.baselines.items() if (value := cost.of(cell)) is not None}
        baselines = tuple((f"{text} {cost.text(value)}", "") for text, value in of_baselines.items())
        least = 0.02 * max(known.values()) or 1.0
        panels.append(
            Panel(
                map_, cells, cost.label, (cost.about,), style.COSTS, least=least, baselines=baselines,
                notes=map_.remarks,
            )
        )  # fmt: skip
    return panels


@dataclass(frozen=True)
class Against:
    """The other side of a comparison: a baseline of each map by its `name`, or other maps by the partner's name."""

    name: str
    others: Mapping[MapName, Map] = field(default_factory=dict)

    def baselines(self, map_: Map) -> dict[str, Cell]:
        """The baseline of a map by its name; empty if maps are compared cell by cell."""
        if self.others:
            return {}
        if self.name not in map_.baselines:
            known = ", ".join(map_.baselines) or "none"
            raise KvatlasError(
                f"The map of {map_.model} on {map_.benchmark} has no baseline {self.name!r}; its baselines are: "
                f"{known}."
            )
        return {self.name: map_.baselines[self.name]}

    def cells(self, map_: Map) -> Mapping[CellCoord, Cell]:
        """The other side of each cell of a map; raises KvatlasError if there is none."""
        for base in self.baselines(map_).values():
            return dict.fromkeys(map_.cells, base)
        other = self.others.get(map_.name)
        shared = {} if other is None else {coord: cell for coord, cell in other.cells.items() if coord in map_.cells}
        if not shared:
            raise KvatlasError(f"{self.name} has no cell of the map of {map_.model} on {map_.benchmark} {map_.policy}.")
        return shared


def difference_panels(maps: Sequence[Map], differences: Differences, against: Against) -> list[Panel]:
    """Maps of cell minus the other side, in points; without intervals where `differences` has none.

    Raises KvatlasError if a map has nothing to be compared with.
    """
    panels = []
    for map_ in maps:
        paired, base, cells = differences.get(map_.name, {}), against.baselines(map_), {}
        for coord, other in against.cells(map_).items():
            contrast = paired.get(coord)
            value = 100 * (contrast.value if contrast else map_.cells[coord].estimate.value - other.estimate.value)
            limits = [style.signed(100 * limit, 0) for limit in (contrast.low, contrast.high)] if contrast else []
            is_shown = contrast is not None and contrast.p < LEVEL
            text = f"{style.signed(value)}{'*' if is_shown else ''}"
            cells[coord] = CellText(value, text, " to ".join(limits), is_shown)
        label, how = style.label(map_.metric), "paired by problem" if paired else "not paired"
        about = [f"{label} minus that of {against.name}, in points, {how}."]
        if paired:
            marks = "Intervals and marks hold over all cells of a map together; * and bold: a difference is shown."
            about += [SMALL, marks]
        corners = _cornered(map_) if base else {}
        if corners:
            about.append(CORNER)
        panels.append(
            Panel(
                map_, cells, f"{label} minus {against.name}", tuple(about), style.DIFFERENCES, True,
                _noise(paired.values()) / 2, style.baseline_texts(base), map_.remarks, cornered=corners,
            )
        )  # fmt: skip
    return panels


def cost_change_panels(maps: Sequence[Map], name: str, against: Against) -> list[Panel]:
    """Maps of the change of a cost in percent of the other side; raises KvatlasError if a cost is not known."""
    panels = []
    for map_ in maps:
        cost, known = _known_costs(map_, name)
        base = {coord: value for coord, cell in against.cells(map_).items() if (value := cost.of(cell))}
        changes = {coord: 100 * (value / base[coord] - 1) for coord, value in known.items() if coord in base}
        if not changes:
            raise KvatlasError(f"{against.name} of {map_.model} on {map_.benchmark} has no {name} to compare with.")
        cells = {coord: CellText(change, style.signed(change, 0)) for coord, change in changes.items()}
        about = f"Change of {cost.label} against {against.name}, in percent."
        label, colours = f"{cost.label} against {against.name} (%)", f"{style.DIFFERENCES}_r"
        panels.append(Panel(map_, cells, label, (about,), colours, centred=True, notes=map_.remarks))
    return panels


def data_csv(panels: Sequence[Panel]) -> str:
    """The numbers of the panels, one row per cell: what is printed, and whether the cell is outlined."""
    axes = [name for name, _ in panels[0].map.axes]
    rows: list[list[Any]] = [["model", "benchmark", "policy", *axes, "shows", "value", "text", "small", "outlined"]]
    for panel in panels:
        for coord, cell in panel.cells.items():
            names = map(guarded, (*panel.map.name, *coord))
            numbers = [round(cell.value, 4), cell.text, cell.small, int(coord in panel.outlined)]
            rows.append([*names, panel.label, *numbers])
    return style.rows_csv(rows)
