"""Maps as panels of numbers and texts: a metric, a cost, or differences of either, and the finding as their title."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from kvatlas.columns import Column, cost_columns, measures_of, share_of_traces
from kvatlas.core import FULL, REFERENCE, Cell, CellCoord, Claim, Estimate, KvatlasError, Map, MapName, NoteKind
from kvatlas.figures import colours, style
from kvatlas.figures.marks import MARKS, KeyEntry, State, key_of, states_of
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.pairs import Differences
from kvatlas.text import axis_label, fixed, grouped_digits, guarded, interval_text, margin_text, percent_text, signed

K = TypeVar("K", bound=Hashable)

#: The least distance of the ends of a scale that are the lowest and the highest cell.
NARROWEST = 1.0
#: Points of half an interval from which on tenths of a point say nothing.
_WHOLE_FROM = 2.0
BEST = "bold: highest"


class CellText(NamedTuple):
    """A cell as printed: `value` places it on the colour scale, `small` is its second line."""

    value: float
    text: str
    small: str = ""
    bold: bool = False


class Baseline(NamedTuple):
    """A baseline of a panel: its name and value as printed, the value on the colour scale, and its interval."""

    name: str
    text: str
    value: float
    interval: str = ""


class CellQuestion(StrEnum):
    """A question that a test answers for each cell."""

    MARGIN = "Does it lose more than a margin?"
    DIFFERENCE = "Does it differ?"
    BEST = "Is it worse than the best?"


class TestedCells(NamedTuple):
    """A question, its reference in words, and the cells of which is proven that they are `good` and `bad`."""

    question: CellQuestion
    reference: str
    good: frozenset[CellCoord] = frozenset()
    bad: frozenset[CellCoord] = frozenset()


@dataclass(frozen=True)
class Panel:
    """One heatmap to draw: the numbers of a map under their `label` and `unit`, with words `about` their marks.

    With `centred` 0 has the middle colour; the ends of the scale are `least` apart at least, so that colours do not
    show noise, and are printed with `digits` decimals. Losses of at most `silent_loss` points have one colour, that of
    the margin; the scale of others begins there. In `centred` panels that holds for gains, too. `tested` has the
    outcomes of the tests of the cells. `half_interval` is half the interval of the median cell, in points.
    """

    map: Map
    cells: Mapping[CellCoord, CellText]
    label: str
    unit: str
    about: tuple[str, ...] = ()
    palette: str = colours.VALUES
    centred: bool = False
    silent_loss: float | None = None
    least: float = NARROWEST
    digits: int = 1
    tested: TestedCells | None = None
    half_interval: float | None = None
    baselines: tuple[Baseline, ...] = ()

    @property
    def states(self) -> Mapping[CellCoord, State]:
        """The states of cells, which have marks: beside the margin, without one those proven worse than the best."""
        if self.tested is None or self.tested.question is CellQuestion.DIFFERENCE:
            return {}
        return states_of(self.map) or dict.fromkeys(self.tested.bad, State.BEYOND)

    @property
    def key(self) -> list[KeyEntry]:
        """The words for the marks."""
        states = set(self.states.values())
        if self.map.margin is not None and self.map.keeps is not None:
            claim = "on these problems" if self.map.claim is Claim.THESE else ""
            return key_of(states, margin_text(self.map.margin), claim)
        return [KeyEntry(State.BEYOND, "proven worse than the best")] if states else []


def metric_panels(maps: Sequence[Map], *, exact: bool = False) -> list[Panel]:
    """Return maps of a metric: percent with 95 % intervals, the highest cells in bold, and proven ones framed.

    Numbers are whole where the intervals of all maps are wide, unless they shall be `exact`.
    """
    widths = []
    for map_ in maps:
        estimates = [cell.estimate for cell in map_.cells.values()]
        widths.append(interval_widths(estimates))
    digits = 1 if exact else _decimals(widths)
    panels = []
    for map_, map_widths in zip(maps, widths, strict=True):
        # Each cell in percent with its interval.
        best = max((cell.estimate.value for cell in map_.cells.values()), default=0.0)
        texts = {}
        for coord, cell in map_.cells.items():
            value = cell.estimate.value
            small = interval_text(cell.estimate)
            texts[coord] = CellText(100 * value, percent_text(value, digits), small, value > max(best - 1e-9, 0))

        about = [BEST] if best > 0 else []
        samples = max((cell.estimate.samples or 1 for cell in map_.cells.values()), default=1)
        if map_.claim is Claim.THESE and samples > 1:
            about.append("intervals: these problems, sampled anew")

        panel = Panel(
            map_,
            texts,
            axis_label(map_.metric),
            "in %",
            tuple(about),
            least=max(NARROWEST, fmean(map_widths or [0])),
            digits=digits,
            tested=_metric_tests(map_),
            half_interval=half_interval(map_widths),
            baselines=_percent_baselines(map_, digits),
        )
        panels.append(panel)
    return panels


def loss_panels(maps: Sequence[Map], losses: Mapping[MapName, Mapping[CellCoord, Difference]]) -> list[Panel]:
    """Return maps of what each cell loses against the full cache, in points; colours begin beyond the margin.

    The `losses` are paired by problem, of every cell of maps that have a full cache and a margin.
    """
    widths = [interval_widths(losses[map_.name].values()) for map_ in maps]
    digits = _decimals(widths)
    # What is proven of no cell has no colour: it may be noise.
    proven = chain.from_iterable(states_of(map_).values() for map_ in maps)
    is_noise = not any(MARKS[state].is_filled for state in proven)
    panels = []
    for metric, map_, map_widths in zip(metric_panels(maps), maps, widths, strict=True):
        assert map_.full is not None
        assert map_.margin is not None
        cells = {}
        for coord, loss in losses[map_.name].items():
            value = 100 * loss.value
            limits = f"{_loss_text(100 * loss.low, 0)} to {_loss_text(100 * loss.high, 0)}"
            cells[coord] = CellText(value, _loss_text(value, digits), limits)

        # The bar has the full cache at 0, with its metric, and what other baselines lose.
        baselines = []
        for baseline in metric.baselines:
            is_full = map_.baselines[baseline.name] is map_.full
            lost = 0.0 if is_full else 100 * map_.full.estimate.value - baseline.value
            text = f"{baseline.text} %" if is_full else f"loses {_loss_text(lost, digits)}"
            baselines.append(Baseline(baseline.name, text, lost))
        colour = "grey: lost, and nothing proven" if is_noise else f"red: more than {margin_text(map_.margin)} lost"
        about = (colour, *(words for words in metric.about if words != BEST))
        panel = replace(
            metric,
            cells=cells,
            label=f"{axis_label(map_.metric)} lost against {map_.reference}",
            unit="in points",
            about=about,
            palette=colours.NOISE if is_noise else colours.LOSSES,
            silent_loss=100 * map_.margin,
            least=max(NARROWEST, fmean(map_widths or [0])),
            digits=digits,
            half_interval=half_interval(map_widths),
            baselines=tuple(baselines),
        )
        panels.append(panel)
    return panels


def _loss_text(points: float, digits: int) -> str:
    """Return a loss with the true minus of a gain."""
    return fixed(points, digits).replace("-", "−")


def _decimals(widths: Sequence[Sequence[float]]) -> int:
    """Return the decimals of points whose intervals have these widths, by maps."""
    halves = [half_interval(of_map) for of_map in widths]
    is_wide = bool(halves) and all(half is not None and half >= _WHOLE_FROM for half in halves)
    return 0 if is_wide else 1


def half_interval(widths: Sequence[float]) -> float | None:
    """Return half the interval of the median cell."""
    return median(widths) / 2 if widths else None


def _percent_baselines(map_: Map, digits: int) -> tuple[Baseline, ...]:
    baselines = []
    for name, cell in map_.baselines.items():
        estimate = cell.estimate
        text = percent_text(estimate.value, digits)
        baselines.append(Baseline(name, text, 100 * estimate.value, interval_text(estimate)))
    return tuple(baselines)


def _metric_tests(map_: Map) -> TestedCells | None:
    """Return the outcomes of a map's tests; None if nothing was tested, or traces cannot show any difference."""
    if any(note.kind is NoteKind.VACUOUS for note in map_.remarks):
        return None
    if map_.keeps is not None and map_.margin is not None:
        states = states_of(map_)
        good = frozenset(at for at, state in states.items() if state is State.WITHIN)
        bad = frozenset(at for at, state in states.items() if state is State.BEYOND)
        return TestedCells(CellQuestion.MARGIN, margin_text(map_.margin), good, bad)
    if map_.plateau is not None:
        return TestedCells(CellQuestion.BEST, "the best", bad=frozenset(map_.cells) - map_.plateau)
    return None


def interval_widths(estimates: Iterable[Estimate | Difference]) -> list[float]:
    """Return the widths of intervals in points: a scale narrower than their mean would show noise."""
    limits = [(estimate.low, estimate.high) for estimate in estimates]
    return [100 * (high - low) for low, high in limits if low is not None and high is not None]


class CostUnit(NamedTuple):
    """A unit in which all numbers of a figure are printed, of a size, with as many `digits` after the point."""

    name: str
    size: float = 1.0
    digits: int = 0

    def text(self, value: float) -> str:
        """Return a cost in its own unit as it is printed in this one."""
        return grouped_digits(value / self.size, self.digits)


_TIMES = (CostUnit("ms", 0.001), CostUnit("s"), CostUnit("h", 3600))
_BYTES = (CostUnit("bytes"), CostUnit("KiB", 2**10), CostUnit("MiB", 2**20), CostUnit("GiB", 2**30))
#: The units in which figures print costs of a column's unit; others have one unit, under its name.
_UNITS = {"seconds": _TIMES, "bytes": _BYTES, "traces": (CostUnit("%"),)}
#: The unit of columns that count traces: figures show them as shares, which benchmarks of any size have alike.
_COUNTED = "traces"


def _cost(column: Column, cell: Cell) -> float | None:
    """Return the cost of a cell, None if it is not known."""
    if column.unit == _COUNTED:
        return share_of_traces(column.read(cell), cell)
    value: float | None = column.read(cell)
    return 100 * value if column.is_share and value is not None else value


def _known_costs(column: Column, cells: Mapping[K, Cell]) -> dict[K, float]:
    """Return the costs of the cells of which they are known."""
    costs = {key: _cost(column, cell) for key, cell in cells.items()}
    return {key: value for key, value in costs.items() if value is not None}


def _cost_unit(column: Column, values: Iterable[float]) -> CostUnit:
    """Return the unit in which the largest of the values has at most three digits before the point.

    It has three digits in all; tokens and traces have none behind the point.
    """
    units = _UNITS.get(column.unit, (CostUnit("%" if column.is_share else column.unit),))
    largest = max(values, default=0.0)
    unit = next((unit for unit in units if largest < 1000 * unit.size), units[-1])
    if column.unit in ("tokens", _COUNTED) or largest <= 0:
        return unit
    return unit._replace(digits=max(0, 2 - math.floor(math.log10(largest / unit.size))))


def cost_of(name: str, maps: Sequence[Map]) -> Column:
    """Return the cost that `--metric` knows under a name; raises KvatlasError for one that the maps do not declare."""
    columns = cost_columns(measures_of(chain.from_iterable(map_.cells.values() for map_ in maps)))
    if name not in columns:
        raise KvatlasError(f"Unknown cost {name!r}; expected: {', '.join(columns)}.")
    return columns[name]


def cost_panels(maps: Sequence[Map], name: str) -> list[Panel]:
    """Return maps of a cost (see `cost_of`), all in one unit; raises KvatlasError if the maps do not carry it."""
    column = cost_of(name, maps)
    costs = []
    for map_ in maps:
        values = _known_costs(column, map_.cells)
        if not values:
            raise KvatlasError(f"The map of {map_.model} on {map_.benchmark} does not tell {name} of its cells.")
        costs.append(values)

    unit = _cost_unit(column, chain.from_iterable(values.values() for values in costs))
    panels = []
    for map_, values in zip(maps, costs, strict=True):
        baselines = []
        for baseline, value in _known_costs(column, map_.baselines).items():
            baselines.append(Baseline(baseline, unit.text(value), value / unit.size))
        panel = Panel(
            map_,
            {coord: CellText(value / unit.size, unit.text(value)) for coord, value in values.items()},
            column.title,
            f"in {unit.name}" if unit.name else "",
            palette=column.scale,
            least=0.02 * max(values.values()) / unit.size or 1.0,
            digits=unit.digits,
            baselines=tuple(baselines),
        )
        panels.append(panel)
    return panels


@dataclass(frozen=True)
class ComparedMaps:
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


def difference_panels(compared: ComparedMaps) -> list[Panel]:
    """Return maps of cell minus the other side, in points; without intervals where the differences are not paired.

    Each interval speaks of its own cell; bold ones allow for all cells of a map (Holm). Against the full cache cells
    have the frames and marks of the margin, within which there is no colour. Raises KvatlasError if a map has nothing
    to be compared with.
    """
    widths = [interval_widths(compared.differences.get(map_.name, {}).values()) for map_ in compared.maps]
    digits = _decimals(widths)
    panels = []
    for map_, map_widths in zip(compared.maps, widths, strict=True):
        paired = compared.differences.get(map_.name, {})
        cells = {}
        for coord, other in compared.cells(map_).items():
            contrast = paired.get(coord)
            value = 100 * (map_.cells[coord].estimate.value - other.estimate.value)
            limits = ""
            if contrast is not None:
                value = 100 * contrast.value
                limits = f"{signed(100 * contrast.low, 0)} to {signed(100 * contrast.high, 0)}"
            is_proven = contrast is not None and contrast.is_proven
            cells[coord] = CellText(value, signed(value, digits), limits, is_proven)

        about = ["not paired"]
        tested = None
        if paired:
            about = ["paired by problem"]
            proven = [coord for coord, cell in cells.items() if cell.bold]
            if proven:
                about.append("bold: a difference is proven, allowing for all cells of the map")
            above = frozenset(coord for coord in proven if cells[coord].value > 0)
            reference = map_.reference if compared.name in (str(FULL), str(REFERENCE)) else compared.name
            tested = TestedCells(CellQuestion.DIFFERENCE, reference, above, frozenset(proven) - above)

        # The finding and the marks of the map itself.
        silent_loss = None
        is_to_full = map_.keeps is not None and map_.full is map_.baselines.get(compared.name)
        if is_to_full and map_.margin is not None:
            tested = _metric_tests(map_)
            silent_loss = 100 * map_.margin
            about.append(f"grey: within {margin_text(map_.margin)} of {map_.reference}")

        # The baseline that cells are compared with has the difference 0.
        baselines = [item for item in _percent_baselines(map_, digits) if item.name == compared.name]
        panel = Panel(
            map_,
            cells,
            f"{axis_label(map_.metric)} minus {compared.name}",
            "in points",
            tuple(about),
            colours.DIFFERENCES,
            centred=True,
            silent_loss=silent_loss,
            least=max(NARROWEST, fmean(map_widths or [0])) / 2,
            digits=digits,
            tested=tested,
            half_interval=half_interval(map_widths),
            baselines=tuple(baseline._replace(value=0.0) for baseline in baselines),
        )
        panels.append(panel)
    return panels


def panels_csv(panels: Sequence[Panel]) -> str:
    """Return the numbers of the panels, one row per cell: what is printed, and the marks of the cell."""
    axes = [name for name, _ in panels[0].map.axes]
    names_of_numbers = ["value", "text", "small", "proven", "loses_more", "recommended"]
    rows: list[list[Any]] = [["model", "benchmark", "policy", *axes, "shows", *names_of_numbers]]

    for panel in panels:
        map_ = panel.map
        for coord, cell in panel.cells.items():
            names = map(guarded, (*map_.name, *coord))
            numbers = [round(cell.value, 4), cell.text, cell.small]
            # Whether a cell keeps the margin, and loses more, is empty where that was not tested.
            proven: list[int | str] = ["", ""]
            if map_.keeps is not None:
                proven = [int(coord in map_.keeps), int(coord in (map_.breaks or ()))]
            rows.append([*names, f"{panel.label} {panel.unit}", *numbers, *proven, int(coord == map_.recommended)])
    return style.rows_csv(rows)


# -- titles ------------------------------------------------------------------------------------------------------------


def panels_title(panels: Sequence[Panel]) -> str:
    """State of how many cells something is proven; the range of the cells if nothing was tested."""
    tested = [panel.tested for panel in panels if panel.tested is not None]
    asked = {(one.question, one.reference) for one in tested}
    if len(tested) < len(panels) or len(asked) > 1:
        return _value_range(panels)

    counts = _CellCounts(panels, tested)
    if tested[0].question is CellQuestion.MARGIN:
        is_of_these = any(panel.map.claim is Claim.THESE for panel in panels)
        return _of_margin(counts, tested[0].reference, "on these problems" if is_of_these else "of full")
    if tested[0].question is CellQuestion.DIFFERENCE:
        return _of_difference(counts, tested[0].reference)
    # Which cells are worse than the best.
    if counts.bad:
        return f"{counts.some(counts.bad)} shown to be worse than the best"
    if counts.every == 1:
        return "there is only one setting, so nothing is compared"
    of_its_map = " of its map" if len(panels) > 1 else ""
    return f"no {counts.noun} is shown to be better than another{of_its_map}"


class _CellCounts:
    """The number of cells of panels, of those that are proven good and bad, and the noun for them."""

    def __init__(self, panels: Sequence[Panel], tested: Sequence[TestedCells]) -> None:
        self.every = sum(len(panel.cells) for panel in panels)
        self.good = sum(len(one.good) for one in tested)
        self.bad = sum(len(one.bad) for one in tested)
        # A cell is a setting on a benchmark.
        benchmarks = {panel.map.benchmark for panel in panels}
        self.noun = "setting" if len(benchmarks) == 1 else "cell"

    @property
    def all(self) -> str:
        """All cells in words."""
        return f"the only {self.noun}" if self.every == 1 else f"all {self.every} {self.noun}s"

    def some(self, count: int) -> str:
        """Return `9 of 40 settings are`."""
        return f"{count} of {self.every} {self.noun}s {'is' if count == 1 else 'are'}"

    def verb(self, singular: str, plural: str) -> str:
        """Return the form of a verb for all cells."""
        return singular if self.every == 1 else plural


def _of_margin(counts: _CellCounts, margin: str, claim: str) -> str:
    """State how many cells stay within a margin, and how many lose more, in few words.

    `claim` says of which problems, else of what.
    """
    within = f"proven within {margin} {claim}"
    if counts.good == counts.every:
        return f"{counts.all} {counts.verb('is', 'are')} {within}"
    if counts.bad == counts.every:
        return f"{counts.all} {counts.verb('loses', 'lose')} more than {margin}, proven"
    if counts.good:
        more = f", {counts.bad} beyond" if counts.bad else ""
        return f"{counts.some(counts.good)} {within}{more}"
    if counts.bad:
        return f"{counts.some(counts.bad)} proven to lose more than {margin}, none within"
    return f"no {counts.noun} is {within}, and none beyond"


def _of_difference(counts: _CellCounts, other: str) -> str:
    """State how many cells differ from another side, and in which direction."""
    if counts.good == counts.every:
        return f"{counts.all} {counts.verb('lies', 'lie')} above {other}, proven"
    if counts.bad == counts.every:
        return f"{counts.all} {counts.verb('lies', 'lie')} below {other}, proven"
    if counts.good:
        return f"{counts.some(counts.good)} proven to lie above {other}, {counts.bad or 'none'} below"
    if counts.bad:
        return f"{counts.some(counts.bad)} proven to lie below {other}, none above"
    return f"no {counts.noun} is proven to differ from {other}"


def _value_range(panels: Sequence[Panel]) -> str:
    """State what the panels show, and of one measure from which value to which."""
    labels = dict.fromkeys(panel.label for panel in panels)
    subject = " and ".join(labels)
    if len(labels) > 1:
        return subject
    cells = sorted(chain.from_iterable(panel.cells.values() for panel in panels))
    unit = panels[0].unit.removeprefix("in ")
    if cells[0].text == cells[-1].text:
        return f"{subject} {cells[0].text} {unit}"
    return f"{subject} from {cells[0].text} to {cells[-1].text} {unit}"
