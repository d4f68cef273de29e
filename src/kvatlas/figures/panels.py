"""What a heatmap shows: maps as panels of numbers and texts, for a metric or a cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvatlas.core import Cell, CellCoord, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.stats.inference import Contrast
from kvatlas.text import guarded

#: How far apart the ends of a scale are at least where they are the lowest and the highest cell.
NARROWEST = 1.0


@dataclass(frozen=True)
class Shown:
    """A cell as it is printed: `value` places it on the colour scale, `small` is its second line."""

    value: float
    text: str
    small: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Measure:
    """What the numbers of a panel are: the label of its colour bar, sentences for the foot, its colour map."""

    label: str
    about: tuple[str, ...]
    colours: str = style.VALUES
    #: Whether 0 has the middle colour.
    centred: bool = False
    #: How far apart the ends of the scale are at least, so that colours do not tell of noise.
    least: float = NARROWEST


@dataclass(frozen=True)
class Panel:
    """One heatmap to draw; `outlined` cells are framed together and the others dimmed.

    `baselines` stand over the cells, each with its interval.

    `cornered` gives the share of problems in which policies have nothing to choose, for cells in which there are any.
    """

    model: str
    benchmark: str
    policy: str
    axes: tuple[tuple[str, tuple[Any, ...]], tuple[str, tuple[Any, ...]]]
    cells: Mapping[CellCoord, Shown]
    measure: Measure
    baselines: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()
    outlined: frozenset[CellCoord] = field(default_factory=frozenset)
    cornered: Mapping[CellCoord, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """A cost that a map's cells carry: how to read it and how to print it."""

    label: str
    about: str
    value: Callable[[Cell], float | None]
    text: Callable[[float], str]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _brief(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


#: Costs by the names under which `--metric` knows them.
COSTS: Mapping[str, Cost] = {
    "mean_kv_tokens": Cost("KV Tokens", "Mean cached tokens per sequence.", lambda cell: cell.mean_kv_tokens, _whole),
    "peak_kv_tokens": Cost("Peak KV Tokens", "Most tokens ever cached.", lambda cell: cell.peak_kv_tokens, _whole),
    "seconds": Cost("Seconds", "Mean decoding seconds per answer.", lambda cell: cell.seconds_mean, _brief),
    "output_tokens": Cost(
        "Output Tokens", "Mean tokens written per answer.", lambda cell: cell.output_tokens_mean, _whole
    ),
    "truncated": Cost("Truncated", "Traces cut at the token limit.", lambda cell: cell.truncated, _whole),
}
#: KV memory is the tokens' cost times the model's bytes per token, so it needs the model's shape.
KV_MEMORY = "kv_memory"
SMALL = "Small type: 95 % interval."
CORNER = "Corner: policies have nothing to choose in some problems, filled: in most."


class Frame(StrEnum):
    """Which cells of a map are framed; on a map without a full cache `margin` frames the plateau."""

    MARGIN = "margin"
    PLATEAU = "plateau"
    NONE = "none"


def framed(map_: Map, frame: Frame = Frame.MARGIN) -> tuple[frozenset[CellCoord], str]:
    """The cells in the frame, and what they are."""
    if frame is Frame.MARGIN and map_.keeps is not None and map_.margin is not None:
        return map_.keeps, f"shown to lose at most {round(100 * map_.margin, 4):g} points against the full cache"
    region = frozenset[CellCoord]() if frame is Frame.NONE else map_.plateau or frozenset()
    return region, "statistically tied with the best"


def metric_panels(maps: Sequence[Map], frame: Frame = Frame.MARGIN) -> list[Panel]:
    """Maps of a metric: percent with the 95 % interval, highest cells in bold, and a frame."""
    return [_metric_panel(map_, *framed(map_, frame)) for map_ in maps]


def _metric_panel(map_: Map, region: frozenset[CellCoord], about: str) -> Panel:
    best = max((cell.estimate.value for cell in map_.cells.values()), default=0.0)
    cells = {
        coord: Shown(
            100 * cell.estimate.value,
            style.percent(cell.estimate.value),
            style.interval(cell.estimate),
            cell.estimate.value > best - 1e-9,
        )
        for coord, cell in map_.cells.items()
    }
    label = style.label(map_.metric)
    sentences = [f"{label} in percent, highest in bold."]
    if any(cell.small for cell in cells.values()):
        sentences.append(SMALL)
    # A frame around everything would say nothing: a sentence does.
    everything = bool(region) and region >= set(cells)
    notes = map_.remarks
    if everything:
        notes = (*notes, Note(NoteKind.INTERVAL, f"all cells are {about}"))
    elif map_.keeps is not None and region is map_.keeps and not region:
        notes = (*notes, Note(NoteKind.INTERVAL, f"no cell is {about}"))
    outlined = frozenset() if everything else region
    if outlined:
        sentences.append(f"Outlined: {about}; others are dimmed.")
    corners = cornered(map_)
    if corners:
        sentences.append(CORNER)
    measure = Measure(label, tuple(sentences), least=noise(cell.estimate for cell in map_.cells.values()))
    baselines = style.baseline_texts(map_.baselines)
    return Panel(
        map_.model, map_.benchmark, map_.policy, map_.axes, cells, measure, baselines, notes, outlined, corners
    )


def noise(estimates: Iterable[Estimate | Contrast]) -> float:
    """The mean width of intervals in points: what colours of a scale as narrow as that would tell is noise."""
    widths = [
        100 * (estimate.high - estimate.low)
        for estimate in estimates
        if estimate.low is not None and estimate.high is not None
    ]
    return max(NARROWEST, math.fsum(widths) / max(len(widths), 1))


def cornered(map_: Map) -> dict[CellCoord, float]:
    """The share of problems in which policies have nothing to choose, where there are any."""
    return {coord: cell.audit.no_choice for coord, cell in map_.cells.items() if cell.audit and cell.audit.no_choice}


def cost_of(name: str, model: str) -> Cost:
    """The cost of that name; KV memory reckons with the model's shape. Raises KvatlasError for an unknown name."""
    if name in COSTS:
        return COSTS[name]
    if name != KV_MEMORY:
        raise KvatlasError(f"Unknown cost {name!r}; valid are: {', '.join((*COSTS, KV_MEMORY))}.")
    from kvatlas import models

    mebibytes = models.find(model).kv_bytes_per_token / 2**20

    def value(cell: Cell) -> float | None:
        return None if cell.mean_kv_tokens is None else cell.mean_kv_tokens * mebibytes

    return Cost("KV Memory (MiB)", "Mean memory of keys and values per sequence, in MiB.", value, _brief)


def cost_of_cell(name: str, model: str, benchmark: str, cell: Cell) -> float:
    """That cost of a cell; KvatlasError where it is not known."""
    value = cost_of(name, model).value(cell)
    if value is None:
        raise KvatlasError(f"The setting {cell.setting} of {model} on {benchmark} does not tell its {name}.")
    return value


def cost_panels(maps: Sequence[Map], name: str) -> list[Panel]:
    """Maps of a cost of `COSTS` or of `KV_MEMORY` (MiB); KvatlasError where the maps do not carry it."""
    return [_cost_panel(map_, cost_of(name, map_.model), name) for map_ in maps]


def known_costs(map_: Map, cost: Cost, name: str) -> dict[CellCoord, float]:
    """A cost of a map's cells, where it is known; KvatlasError where it is of none."""
    known = {coord: value for coord, cell in map_.cells.items() if (value := cost.value(cell)) is not None}
    if not known:
        raise KvatlasError(f"The map of {map_.model} on {map_.benchmark} does not tell {name} of its cells.")
    return known


def _cost_panel(map_: Map, cost: Cost, name: str) -> Panel:
    known = known_costs(map_, cost, name)
    cells = {coord: Shown(value, cost.text(value)) for coord, value in known.items()}
    of_baselines = {text: value for text, cell in map_.baselines.items() if (value := cost.value(cell)) is not None}
    baselines = tuple((f"{text} {cost.text(value)}", "") for text, value in of_baselines.items())
    measure = Measure(cost.label, (cost.about,), style.COSTS, least=0.02 * max(known.values()) or 1.0)
    return Panel(map_.model, map_.benchmark, map_.policy, map_.axes, cells, measure, baselines, map_.remarks)


def data_csv(panels: Sequence[Panel]) -> str:
    """The numbers of the panels, one row per cell: what is printed, and whether the cell is outlined."""
    import csv
    import io

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    axes = [name for name, _ in panels[0].axes]
    writer.writerow(["model", "benchmark", "policy", *axes, "shows", "value", "text", "small", "outlined"])
    for panel in panels:
        for (row, column), shown in panel.cells.items():
            outlined = int((row, column) in panel.outlined)
            known = [*map(guarded, (panel.model, panel.benchmark, panel.policy, row, column)), panel.measure.label]
            writer.writerow([*known, round(shown.value, 4), shown.text, shown.small, outlined])
    return file.getvalue()
