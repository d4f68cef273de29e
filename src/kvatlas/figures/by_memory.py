"""A metric by the tokens that stay after a compression: a line for each local window, and the settings worth theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import Cell, CellCoord, KvatlasError, Map, reference_words
from kvatlas.figures import colours, style
from kvatlas.figures.curves import LineEnd, write_names
from kvatlas.figures.panels import half_interval, interval_widths, problem_count
from kvatlas.figures.style import FigureOptions, Margins, finish_texts, line_axes, text_width
from kvatlas.stats.estimates import common
from kvatlas.stats.numerics.equal_memory import observed_front
from kvatlas.stats.windows_at_memory import WINDOW, EqualMemory
from kvatlas.text import axis_label, counted, guarded, model_name, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a panel with its margins where there is room, and of its height.
_PANEL_WIDTH = 3.5
_PANEL_HEIGHT = 2.1
#: Inches of the values left of a panel and below it.
_LEFT = 0.44
_BELOW = 0.44
#: Inches of a figure with one panel in a row.
_NARROW = 5.0
#: Points of a marker, and inches around it that names keep free.
_MARKER = 4.5
_FREE = 0.045
#: The order of drawing of names: above the grid, which their ground hides, and below all lines.
_NAME_ORDER = 0.8
#: Inches from a marker to the name of its line.
_NAME_GAP = 0.06


class MemoryMap(NamedTuple):
    """A map with the tokens of its cells, and its windows at equal memory; None without traces."""

    map: Map
    memory: EqualMemory | None

    @property
    def side(self) -> int:
        """The place of the local window in a coordinate."""
        return [name for name, _ in self.map.axes].index(WINDOW)

    @property
    def front(self) -> list[CellCoord]:
        """The settings than which none was better with no more tokens."""
        coords = list(self.map.cells)
        tokens = np.array([_stays_tokens(cell) for cell in self.map.cells.values()])
        values = np.array([cell.estimate.value for cell in self.map.cells.values()])
        return [coords[index] for index in observed_front(tokens, values)]

    @property
    def proven_off(self) -> list[CellCoord]:
        """The settings of which that is disproven."""
        return [] if self.memory is None else self.memory.proven_off

    @property
    def lines(self) -> dict[Any, list[tuple[CellCoord, Cell]]]:
        """The cells of each local window, ascending, from the fewest tokens up."""
        _, windows = self.map.axes[self.side]
        lines = {}
        for window in windows:
            cells = [(coord, cell) for coord, cell in self.map.cells.items() if coord[self.side] == window]
            lines[window] = sorted(cells, key=lambda item: _stays_tokens(item[1]))
        return {window: cells for window, cells in lines.items() if cells}

    @property
    def half_interval(self) -> float | None:
        """Half the interval of the median cell, in points."""
        return half_interval(interval_widths(cell.estimate for cell in self.map.cells.values()))

    @property
    def token_counts(self) -> set[tuple[int, ...]]:
        """The distinct numbers of tokens of a line, rounded."""
        counts = set()
        for line in self.lines.values():
            counts.add(tuple(round(_stays_tokens(cell)) for _, cell in line))
        return counts


def _stays_tokens(cell: Cell) -> float:
    assert cell.stays_tokens is not None
    return cell.stays_tokens


def _has_tokens(map_: Map) -> bool:
    """Return whether a map has local windows, and the tokens that stay in all of its cells."""
    has_windows = any(name == WINDOW for name, _ in map_.axes)
    return has_windows and bool(map_.cells) and all(cell.stays_tokens is not None for cell in map_.cells.values())


def memory_figure(
    maps: Sequence[Map],
    memories: Sequence[EqualMemory | None],
    facts: Sequence[str] = (),
    *,
    title: str = "",
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each map: its metric by the tokens that stay after a compression, a line for each window.

    Filled: on the observed front, where no setting with as few tokens is higher. A cross: proven off it. A grey line
    joins two settings at equal memory of which one is proven better. `facts` about each map stand over its panel.
    Raises KvatlasError for maps without windows, and for those of which the tokens are not known.
    """
    options = options or FigureOptions()
    drawn = [MemoryMap(map_, memory) for map_, memory in zip(maps, memories, strict=True) if _has_tokens(map_)]
    panel_facts = [fact for map_, fact in zip(maps, facts, strict=False) if _has_tokens(map_)]
    if not drawn:
        raise KvatlasError(
            "--by-memory: expected maps over local_window whose tokens after a compression are known: of runs, of CSV "
            "maps with a column stays_tokens, or published:NAME."
        )
    with options.applied():
        # In an equal-memory grid all lines have the same numbers of tokens: their ends are where they part most, and
        # their names stand right of the panels. Else names stand beside the lines.
        room = 0.0
        if all(len(one.token_counts) == 1 for one in drawn):
            window_names: list[str] = []
            for one in drawn:
                window_names += [options.named(f"window {window}") for window in one.lines]
            room = max(map(text_width, window_names)) + 0.03

        # Model, policy and benchmark of each panel.
        panel_names = []
        for one in drawn:
            benchmark = f"{one.map.benchmark} benchmarks" if one.map.is_mean else one.map.benchmark
            words = (model_name(one.map.model), one.map.policy, benchmark)
            panel_names.append(", ".join(options.named(word) for word in words if word))

        across = 1 if options.widest < _NARROW else min(len(drawn), 2)
        figure, panels = style.named_panels(
            options,
            panel_names,
            options.inches or min(max(across * _PANEL_WIDTH, 4.4), options.widest),
            across,
            Margins(_LEFT, 0.14 + room, 0.14 + room + _LEFT, 0.08, _BELOW),
            (0.9, _PANEL_HEIGHT),
            panel_facts,
            title=title,
            about=_clauses_about(drawn, options),
            notes=list(chain.from_iterable(one.map.notes for one in drawn)),
        )
        for panel, one in zip(panels, drawn, strict=True):
            _draw_memory_map(panel, one, room, options)
        label = options.named(axis_label(drawn[0].map.metric))
        for panel in panels[::across]:
            panel.set_ylabel(f"{label}, %", fontsize=style.NAME_TYPE, labelpad=2)
        finish_texts(figure, options)
        return figure


def _clauses_about(maps: Sequence[MemoryMap], options: FigureOptions) -> list[str]:
    """Return the clauses about all panels."""
    others = dict.fromkeys(one.map.axes[1 - one.side][0] for one in maps)
    about = [f"a line: one local window; a point: one {' or '.join(others)}"]
    problems = common([problem_count(one.map) for one in maps])
    if problems is not None:
        about.append(counted(problems, "problem"))
    about.append("filled: on the observed front (dotted), where no setting with as few tokens is higher")

    if any(one.proven_off for one in maps):
        about.append("crossed out: proven off it")
    if options.intervals is not False and all(one.half_interval is not None for one in maps):
        about.append("bar at the left: 95 % interval of the median cell")
    return about


def _draw_memory_map(panel: Axes, one: MemoryMap, room: float, options: FigureOptions) -> None:
    """Draw the lines of a map, its front, what is proven, and the full cache.

    With `room` in inches the names of lines stand right of the panel, else beside the lines.
    """
    line_axes(panel, options)
    cells = list(one.map.cells.values())
    full = one.map.full
    half = None if options.intervals is False else one.half_interval
    _set_limits(panel, one, half)
    panel.set_xticks(style.round_values(*panel.get_xlim()))
    bottom, top = panel.get_ylim()
    panel.set_yticks([value for value in style.round_values(bottom, top) if value <= 100])
    # A compression may come at the same number of tokens everywhere.
    totals = {round(cell.stays_tokens / cell.stays_share) for cell in cells if cell.stays_tokens and cell.stays_share}
    of_total = f" (of {totals.pop():,})" if len(totals) == 1 else ""
    panel.set_xlabel(f"tokens after a compression{of_total}", fontsize=style.NAME_TYPE, labelpad=2)

    if half is not None:
        # The 95 % interval of the median cell as a bar left of all points.
        bottom, top = panel.get_ylim()
        panel.errorbar(
            0.035,
            (bottom + top) / 2,
            half,
            transform=panel.get_yaxis_transform(),
            color=options.colours.soft,
            lw=1,
            capsize=2,
            zorder=2,
        )

    # The observed front as dotted steps: the highest value with at most so many tokens.
    front = sorted((one.map.cells[coord] for coord in set(one.front)), key=_stays_tokens)
    x = [*map(_stays_tokens, front), panel.get_xlim()[1]]
    y = [100 * cell.estimate.value for cell in front]
    panel.step(x, [*y, y[-1]], where="post", color=options.colours.soft, lw=0.8, ls=":", zorder=2)

    lines = []
    for order, (window, line) in enumerate(one.lines.items()):
        colour = options.colours.lines[order % len(options.colours.lines)]
        marker = colours.MARKERS[order % len(colours.MARKERS)]
        lines.append(_draw_window(panel, one, window, line, (colour, marker), options))

    # Settings that are proven off the front, and the surest proof that a window is better at equal memory.
    for coord in one.proven_off:
        place = _point_of(one.map.cells[coord])
        panel.plot(*place, "x", color=options.colours.ink, ms=_MARKER + 3.5, mew=1.2, zorder=5)
    best = None if one.memory is None else one.memory.best
    if best is not None:
        ends = [_point_of(one.map.cells[coord]) for coord in (best.better, best.other)]
        panel.plot(*zip(*ends, strict=True), color=options.colours.ink, lw=0.9, zorder=2.5)

    boxes = [] if full is None else [_draw_full(panel, full, lines, half is not None, options)]
    if room:
        write_names(panel, [LineEnd(line.y[-1], line.name, line.colour) for line in lines], room)
    else:
        _write_windows(panel, lines, boxes, front)


def _point_of(cell: Cell) -> tuple[float, float]:
    """Return the tokens of a cell, and its value in percent."""
    return _stays_tokens(cell), 100 * cell.estimate.value


class _WindowLine(NamedTuple):
    """A line as it is drawn: its name and colour, and its points."""

    name: str
    colour: str
    x: list[float]
    y: list[float]


def _draw_window(
    panel: Axes,
    one: MemoryMap,
    window: Any,
    line: Sequence[tuple[CellCoord, Cell]],
    stroke: tuple[str, str],
    options: FigureOptions,
) -> _WindowLine:
    """Draw the settings of a window as markers on a line, of a colour and a shape; those on the front are filled."""
    colour, marker = stroke
    front = set(one.front)
    x, y = zip(*(_point_of(cell) for _, cell in line), strict=True)
    panel.plot(x, y, color=colour, lw=1.2, zorder=3)
    for (coord, _), left, height in zip(line, x, y, strict=True):
        face = colour if coord in front else options.colours.ground
        panel.plot(left, height, marker, color=colour, mfc=face, ms=_MARKER, mew=1, zorder=4)
    return _WindowLine(options.named(f"window {window}"), colour, list(x), list(y))


def _set_limits(panel: Axes, one: MemoryMap, half: float | None) -> None:
    """Set the limits of both axes; the vertical one is as high as an interval at least, so that noise looks like it."""
    tokens, values = zip(*map(_point_of, one.map.cells.values()), strict=True)
    x_gap = 0.06 * (max(tokens) - min(tokens)) or 1.0
    left_gap = x_gap if half is None else 1.8 * x_gap
    panel.set_xlim(min(tokens) - left_gap, max(tokens) + x_gap)

    heights = values if one.map.full is None else (*values, 100 * one.map.full.estimate.value)
    reach = max(max(heights) - min(heights), 2 * (half or 0.0), 1.0)
    middle = (max(heights) + min(heights)) / 2
    bottom = middle - 0.6 * reach
    top = middle + 0.6 * reach
    # There are no percentages beyond, but the line at 100 needs a little room.
    if top > 104:
        bottom -= top - 104
        top = 104
    if one.map.full is not None:
        # The name of the full cache stands on its line.
        share = (style.SMALL_TYPE * style.LINE + 0.04) / style.panel_inches(panel)[1]
        top = max(top, (100 * one.map.full.estimate.value - share * bottom) / (1 - share))
    panel.set_ylim(bottom, top)


# -- names beside lines ------------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """A rectangle in inches from the lower left corner of a panel."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, x: float, y: float, gap: float = 0.0) -> bool:
        """Return whether a point lies within this box, or nearer than `gap`."""
        return self.left - gap < x < self.right + gap and self.bottom - gap < y < self.top + gap


def _draw_full(panel: Axes, full: Cell, lines: Sequence[_WindowLine], has_bar: bool, options: FigureOptions) -> _Box:
    """Draw the full cache as a line with its value where the fewest lines are; return the box of that text.

    The text stands right of the bar at the left, if there is one.
    """
    height = 100 * full.estimate.value
    panel.axhline(height, color=options.colours.ink, lw=0.8, zorder=1)
    name = reference_words([full.setting]).removeprefix("the ")
    text = f"{name} {percent_text(full.estimate.value)}"
    ((_, place),) = _in_inches(panel, [(0.0, height)])
    wide, high = style.panel_inches(panel)
    text_height = style.SMALL_TYPE * style.LINE + 0.03
    width = text_width(text) + 0.05
    # The text stands on the line, or below it; at the left or at the right.
    left = 0.06 * wide if has_bar else 0.0
    corners = product((place, place - text_height), (left, wide - width))
    boxes = [_Box(left, low, left + width, low + text_height) for low, left in corners]
    strokes = [_along_line(_in_inches(panel, list(zip(line.x, line.y, strict=True)))) for line in lines]
    points = list(chain.from_iterable(strokes))
    box = min(boxes, key=lambda one: sum(one.overlaps(x, y, _FREE) for x, y in points))
    panel.text(
        (box.left + 0.03) / wide,
        (box.bottom + text_height / 2) / high,
        text,
        transform=panel.transAxes,
        fontsize=style.SMALL_TYPE,
        color=options.colours.ink,
        va="center",
        zorder=_NAME_ORDER,
        bbox={"facecolor": panel.get_facecolor(), "edgecolor": "none", "pad": 0.3},
    )
    return box


def _in_inches(panel: Axes, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points in inches from the lower left corner of a panel."""
    wide, high = style.panel_inches(panel)
    left, right = panel.get_xlim()
    bottom, top = panel.get_ylim()
    return [((x - left) / (right - left) * wide, (y - bottom) / (top - bottom) * high) for x, y in points]


def _write_windows(panel: Axes, lines: Sequence[_WindowLine], texts: Sequence[_Box], front: Sequence[Cell]) -> None:
    """Write the name of each line beside one of its markers, where it hides least and no other line is nearer.

    `front` are the cells of the dotted steps, `texts` the boxes of texts that are there.
    """
    wide, high = style.panel_inches(panel)
    corners: list[tuple[float, float]] = []
    for place in _in_inches(panel, [_point_of(cell) for cell in front]):
        if corners:
            corners.append((place[0], corners[-1][1]))
        corners.append(place)
    markers = [_in_inches(panel, list(zip(line.x, line.y, strict=True))) for line in lines]
    strokes = [_along_line(points) for points in markers]
    shapes = _PanelShapes((wide, high), markers, strokes, _along_line(corners), list(texts))

    height = style.SMALL_TYPE * style.LINE
    for index, line in enumerate(lines):
        # The boxes around the markers of the line in which its name may stand.
        width = text_width(line.name, bold=True)
        boxes: list[_Box] = []
        for (x, y), gap in product(markers[index], (_NAME_GAP, 2 * _NAME_GAP)):
            starts = (x + gap, x - width / 2, x - width - gap)
            floors = (y - height - gap, y + gap, y - height / 2)
            boxes += [_Box(start, low, start + width, low + height) for start, low in product(starts, floors)]

        costs = [shapes.cost(box, index) for box in boxes]
        box = boxes[costs.index(min(costs))]
        shapes.texts.append(box)
        panel.text(
            box.left / wide,
            (box.bottom + height / 2) / high,
            line.name,
            transform=panel.transAxes,
            fontsize=style.SMALL_TYPE,
            fontweight="bold",
            color=line.colour,
            va="center",
            zorder=_NAME_ORDER,
            bbox={"facecolor": panel.get_facecolor(), "edgecolor": "none", "pad": 0.3},
        )


class _PanelShapes(NamedTuple):
    """The shapes of a panel of this size, in inches: markers and points along each line, steps, and texts."""

    size: tuple[float, float]
    markers: Sequence[Sequence[tuple[float, float]]]
    strokes: Sequence[Sequence[tuple[float, float]]]
    steps: Sequence[tuple[float, float]]
    texts: list[_Box]

    def cost(self, box: _Box, line: int) -> float:
        """Return how much the name of a line hides; much where it leaves the panel or is nearer to another line."""
        is_inside = box.left >= 0 and box.right <= self.size[0] and box.bottom >= 0 and box.top <= self.size[1]
        met = 0
        for other in self.texts:
            is_beside = box.left >= other.right or other.left >= box.right
            met += not is_beside and box.bottom < other.top and other.bottom < box.top
        hidden = sum(box.overlaps(x, y, _FREE) for x, y in chain.from_iterable(self.markers))
        crossed = sum(box.overlaps(x, y) for x, y in chain.from_iterable(self.strokes))
        stepped = sum(box.overlaps(x, y) for x, y in self.steps)

        distances = []
        for stroke in self.strokes:
            gaps = [(max(box.left - x, x - box.right, 0.0), max(box.bottom - y, y - box.top, 0.0)) for x, y in stroke]
            distances.append(min(math.hypot(*gap) for gap in gaps))
        is_nearer = min(distances) < distances[line]
        return 1000 * (not is_inside) + 500 * met + 30 * is_nearer + 20 * hidden + 4 * crossed + stepped


def _along_line(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points along a line through others, so close that a name cannot lie between two of them."""
    found = list(points)
    for (x, y), (next_x, next_y) in pairwise(points):
        steps = np.linspace(0, 1, 24)
        found += zip((x + steps * (next_x - x)).tolist(), (y + steps * (next_y - y)).tolist(), strict=True)
    return found


def memory_csv(maps: Sequence[Map], memories: Sequence[EqualMemory | None]) -> str:
    """Return the settings as CSV: the tokens that stay, the metric in percent, the front, and what is proven off it."""
    rows: list[list[Any]] = []
    header: list[Any] = []
    for map_, memory in zip(maps, memories, strict=True):
        if not _has_tokens(map_):
            continue
        one = MemoryMap(map_, memory)
        axes = [name for name, _ in map_.axes]
        header = header or [
            "model", "benchmark", "policy", *axes, "stays_tokens", map_.metric, "low", "high", "front", "proven_off",
        ]  # fmt: skip

        front = set(one.front)
        off = set(one.proven_off)
        for coord, cell in map_.cells.items():
            estimate = cell.estimate
            limits = [None if limit is None else round(100 * limit, 4) for limit in (estimate.low, estimate.high)]
            numbers = [round(_stays_tokens(cell), 3), round(100 * estimate.value, 4), *limits]
            names = map(guarded, (map_.model, map_.benchmark, map_.policy, *coord))
            rows.append([*names, *numbers, int(coord in front), int(coord in off)])
    return style.rows_csv([header, *rows])
