"""A metric by the tokens that stay after a compression: a line for each local window, and the settings worth theirs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from itertools import chain, pairwise, product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import Cell, CellCoord, KvatlasError, Map
from kvatlas.figures import colours, style
from kvatlas.figures.curves import End, write_names
from kvatlas.figures.style import FigureOptions, Margins, line_axes, settle, sheet, text_width, write_above
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
        tokens = np.array([_tokens(cell) for cell in self.map.cells.values()])
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
            lines[window] = sorted(cells, key=lambda item: _tokens(item[1]))
        return {window: cells for window, cells in lines.items() if cells}


def _tokens(cell: Cell) -> float:
    assert cell.stays_tokens is not None
    return cell.stays_tokens


def _has_tokens(map_: Map) -> bool:
    """Return whether a map has local windows, and the tokens that stay in all of its cells."""
    has_windows = any(name == WINDOW for name, _ in map_.axes)
    return has_windows and bool(map_.cells) and all(cell.stays_tokens is not None for cell in map_.cells.values())


def memory_figure(
    maps: Sequence[Map],
    memories: Sequence[EqualMemory | None],
    *,
    title: str = "",
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each map: its metric by the tokens that stay after a compression, a line for each window.

    Filled: on the observed front, where no setting with as few tokens is higher. A cross: proven off it. A grey line
    joins two settings at equal memory of which one is proven better. Raises KvatlasError for maps without windows, and
    for those of which the tokens are not known.
    """
    options = options or FigureOptions()
    drawn = [MemoryMap(map_, memory) for map_, memory in zip(maps, memories, strict=True) if _has_tokens(map_)]
    if not drawn:
        raise KvatlasError(
            "--by-memory: expected maps over local_window whose tokens after a compression are known: of runs, of CSV "
            "maps with a column stays_tokens, or published:NAME."
        )
    with options.applied():
        across = 1 if options.widest < _NARROW else min(len(drawn), 2)
        width = options.inches or min(max(across * _PANEL_WIDTH, 4.4), options.widest)
        room = _room_of_names(drawn, options)
        margins = Margins(_LEFT, 0.14 + room, 0.14 + room + _LEFT, 0, 0)
        names = _panel_names(drawn, options)
        inner = margins.inner(width, across)
        ink = options.colours.ink
        above = [style.text_lines(name, inner, style.NAME_TYPE, ink, "bold") for name in names]
        margins = margins._replace(above=max(map(style.height_of, above)) + 0.08, below=_BELOW)
        rows = math.ceil(len(drawn) / across)
        high = min(_PANEL_HEIGHT, (style.PAGE_HEIGHT - 0.6) / rows - margins.above - margins.below)
        figure, panels = sheet(
            options,
            (width, max(high, 0.9)),
            len(drawn),
            across,
            margins,
            title=title,
            about=_about(drawn, options),
            notes=list(chain.from_iterable(one.map.notes for one in drawn)),
        )
        for panel, lines, one in zip(panels, above, drawn, strict=True):
            write_above(panel, lines)
            _draw(panel, one, room, options)
        label = options.named(axis_label(drawn[0].map.metric))
        for panel in panels[::across]:
            panel.set_ylabel(f"{label}, %", fontsize=style.NAME_TYPE, labelpad=2)
        settle(figure, options)
        return figure


def _room_of_names(maps: Sequence[MemoryMap], options: FigureOptions) -> float:
    """Return the inches of the names of lines at the right; 0 where lines part, so that names stand beside them.

    In an equal-memory grid all lines have the same numbers of tokens, and their ends are where they part most.
    """
    names = []
    for one in maps:
        distinct = set(map(_rounded_tokens, one.lines.values()))
        if len(distinct) > 1:
            return 0.0
        names += [options.named(f"window {window}") for window in one.lines]
    return max(map(text_width, names)) + 0.03


def _rounded_tokens(line: Sequence[tuple[CellCoord, Cell]]) -> tuple[int, ...]:
    return tuple(round(_tokens(cell)) for _, cell in line)


def _panel_names(maps: Sequence[MemoryMap], options: FigureOptions) -> list[str]:
    """Return model, policy and benchmark of each panel."""
    names = []
    for one in maps:
        benchmark = f"{one.map.benchmark} benchmarks" if one.map.is_mean else one.map.benchmark
        words = (model_name(one.map.model), one.map.policy, benchmark)
        names.append(", ".join(options.named(word) for word in words if word))
    return names


def _about(maps: Sequence[MemoryMap], options: FigureOptions) -> list[str]:
    """Return the clauses about all panels."""
    others = dict.fromkeys(one.map.axes[1 - one.side][0] for one in maps)
    about = [f"a line: one local window; a point: one {' or '.join(others)}"]
    problems = common([_problems(one) for one in maps])
    if problems is not None:
        about.append(counted(problems, "problem"))
    about.append("filled: on the observed front (dotted), where no setting with as few tokens is higher")
    if any(one.proven_off for one in maps):
        about.append("crossed out: proven off it")
    halves = [half for half in map(_half_interval, maps) if half is not None]
    if len(halves) == len(maps) and options.intervals is not False:
        about.append("bar at the left: 95 % interval of the median cell")
    return about


def _problems(one: MemoryMap) -> int | None:
    return common([cell.estimate.problems for cell in one.map.cells.values()])


def _half_interval(one: MemoryMap) -> float | None:
    estimates = [cell.estimate for cell in one.map.cells.values()]
    widths = [one.high - one.low for one in estimates if one.low is not None and one.high is not None]
    return 50 * median(widths) if widths else None


def _draw(panel: Axes, one: MemoryMap, room: float, options: FigureOptions) -> None:
    """Draw the lines of a map, its front, what is proven, and the full cache.

    With `room` in inches the names of lines stand right of the panel, else beside the lines.
    """
    line_axes(panel, options)
    cells = list(one.map.cells.values())
    tokens = [_tokens(cell) for cell in cells]
    values = [100 * cell.estimate.value for cell in cells]
    full = one.map.full
    heights = values if full is None else [*values, 100 * full.estimate.value]
    half = None if options.intervals is False else _half_interval(one)
    _set_limits(panel, tokens, heights, half)
    panel.set_xticks(style.round_values(*panel.get_xlim()))
    panel.set_yticks(style.round_values(*panel.get_ylim()))
    panel.set_xlabel(f"tokens after a compression{_of_total(cells)}", fontsize=style.NAME_TYPE, labelpad=2)

    if half is not None:
        _draw_interval(panel, half, options)
    front = set(one.front)
    _draw_front(panel, [one.map.cells[coord] for coord in front], options)
    names = []
    for order, (window, line) in enumerate(one.lines.items()):
        colour = options.colours.lines[order % len(options.colours.lines)]
        marker = colours.MARKERS[order % len(colours.MARKERS)]
        name = options.named(f"window {window}")
        names.append(_draw_line(panel, line, front, _Stroke(name, colour, marker), options))
    for coord in one.proven_off:
        cell = one.map.cells[coord]
        place = (_tokens(cell), 100 * cell.estimate.value)
        panel.plot(*place, "x", color=options.colours.ink, ms=_MARKER + 3.5, mew=1.2, zorder=5)
    _draw_pair(panel, one, options)
    boxes = [] if full is None else [_draw_full(panel, full, options)]
    if room:
        write_names(panel, [End(line.y[-1], line.name, line.colour) for line in names], room)
    else:
        _write_windows(panel, names, boxes, _front_points(panel, one))


class _Stroke(NamedTuple):
    """The name of a line, its colour and its marker."""

    name: str
    colour: str
    marker: str


class _Drawn(NamedTuple):
    """A line as it is drawn: its name and colour, and its points."""

    name: str
    colour: str
    x: list[float]
    y: list[float]


def _draw_line(
    panel: Axes,
    line: Sequence[tuple[CellCoord, Cell]],
    front: Set[CellCoord],
    stroke: _Stroke,
    options: FigureOptions,
) -> _Drawn:
    """Draw the settings of a window as markers on a line, those on the front filled."""
    x = [_tokens(cell) for _, cell in line]
    y = [100 * cell.estimate.value for _, cell in line]
    panel.plot(x, y, color=stroke.colour, lw=1.2, zorder=3)
    for (coord, _), left, height in zip(line, x, y, strict=True):
        face = stroke.colour if coord in front else options.colours.ground
        panel.plot(left, height, stroke.marker, color=stroke.colour, mfc=face, ms=_MARKER, mew=1, zorder=4)
    return _Drawn(stroke.name, stroke.colour, x, y)


def _set_limits(panel: Axes, tokens: Sequence[float], heights: Sequence[float], half: float | None) -> None:
    """Set the limits of both axes; the vertical one is as high as an interval at least, so that noise looks like it."""
    x_gap = 0.06 * (max(tokens) - min(tokens)) or 1.0
    left_gap = x_gap if half is None else 1.8 * x_gap
    panel.set_xlim(min(tokens) - left_gap, max(tokens) + x_gap)
    reach = max(max(heights) - min(heights), 2 * (half or 0.0), 1.0)
    middle = (max(heights) + min(heights)) / 2
    bottom = middle - 0.6 * reach
    top = middle + 0.6 * reach
    # There are no percentages beyond, but the line at 100 needs a little room.
    if top > 104:
        bottom -= top - 104
        top = 104
    panel.set_ylim(bottom, top)


def _draw_interval(panel: Axes, half: float, options: FigureOptions) -> None:
    """Draw the 95 % interval of the median cell as a bar left of all points."""
    bottom, top = panel.get_ylim()
    middle = (bottom + top) / 2
    panel.errorbar(
        0.035,
        middle,
        half,
        transform=panel.get_yaxis_transform(),
        color=options.colours.soft,
        lw=1,
        capsize=2,
        zorder=2,
    )


def _of_total(cells: Iterable[Cell]) -> str:
    """Return ` (of 320)` where a compression comes at the same number of tokens everywhere."""
    totals = {round(cell.stays_tokens / cell.stays_share) for cell in cells if cell.stays_tokens and cell.stays_share}
    return f" (of {totals.pop():,})" if len(totals) == 1 else ""


def _draw_front(panel: Axes, cells: Sequence[Cell], options: FigureOptions) -> None:
    """Draw the observed front as dotted steps: the highest value with at most so many tokens."""
    ordered = sorted(cells, key=_tokens)
    x = [*map(_tokens, ordered), panel.get_xlim()[1]]
    y = [100 * cell.estimate.value for cell in ordered]
    panel.step(x, [*y, y[-1]], where="post", color=options.colours.soft, lw=0.8, ls=":", zorder=2)


def _front_points(panel: Axes, one: MemoryMap) -> list[tuple[float, float]]:
    """Return the corners of the dotted steps in inches."""
    wide, high = _inches(panel)
    left, right = panel.get_xlim()
    bottom, top = panel.get_ylim()
    corners: list[tuple[float, float]] = []
    for cell in sorted((one.map.cells[coord] for coord in one.front), key=_tokens):
        place = (
            (_tokens(cell) - left) / (right - left) * wide,
            (100 * cell.estimate.value - bottom) / (top - bottom) * high,
        )
        if corners:
            corners.append((place[0], corners[-1][1]))
        corners.append(place)
    return corners


def _draw_pair(panel: Axes, one: MemoryMap, options: FigureOptions) -> None:
    """Join the two settings of the surest proof that a window is better at equal memory."""
    best = None if one.memory is None else one.memory.best
    if best is None:
        return
    ends = [one.map.cells[coord] for coord in (best.better, best.other)]
    x = [_tokens(cell) for cell in ends]
    y = [100 * cell.estimate.value for cell in ends]
    panel.plot(x, y, color=options.colours.ink, lw=0.9, zorder=2.5)


class _Box(NamedTuple):
    """A rectangle in inches from the lower left corner of a panel."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, x: float, y: float, gap: float = 0.0) -> bool:
        """Return whether a point lies within this box, or nearer than `gap`."""
        return self.left - gap < x < self.right + gap and self.bottom - gap < y < self.top + gap

    def distance_to(self, points: Iterable[tuple[float, float]]) -> float:
        """Return the distance of the nearest of some points from this box."""
        return min(
            math.hypot(max(self.left - x, x - self.right, 0.0), max(self.bottom - y, y - self.top, 0.0))
            for x, y in points
        )

    def meets(self, other: _Box) -> bool:
        """Return whether two boxes overlap."""
        meets_across = self.left < other.right and other.left < self.right
        return meets_across and self.bottom < other.top and other.bottom < self.top


def _inches(panel: Axes) -> tuple[float, float]:
    """Return the width and the height of a panel."""
    box = panel.get_position()
    size = panel.figure.get_size_inches()  # type: ignore[union-attr]
    return float(box.width * size[0]), float(box.height * size[1])


def _draw_full(panel: Axes, full: Cell, options: FigureOptions) -> _Box:
    """Draw the full cache as a line with its value; return the box of that text."""
    height = 100 * full.estimate.value
    panel.axhline(height, color=options.colours.ink, lw=0.8, zorder=1)
    text = f"full cache {percent_text(full.estimate.value)}"
    panel.annotate(
        text,
        (0, height),
        (2, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=style.SMALL_TYPE,
        color=options.colours.ink,
        va="bottom",
    )
    _, high = _inches(panel)
    bottom, top = panel.get_ylim()
    place = (height - bottom) / (top - bottom) * high
    return _Box(0, place, text_width(text) + 0.05, place + style.SMALL_TYPE * style.LINE + 0.03)


def _write_windows(
    panel: Axes, lines: Sequence[_Drawn], texts: Sequence[_Box], front: Sequence[tuple[float, float]]
) -> None:
    """Write the name of each line beside one of its markers, where it hides least and no other line is nearer.

    `front` are the corners of the dotted steps in inches, `texts` the boxes of texts that are there.
    """
    wide, high = _inches(panel)
    left, right = panel.get_xlim()
    bottom, top = panel.get_ylim()
    markers = []
    for line in lines:
        across = (np.array(line.x) - left) / (right - left) * wide
        up = (np.array(line.y) - bottom) / (top - bottom) * high
        markers.append(list(zip(across.tolist(), up.tolist(), strict=True)))
    scene = _Scene((wide, high), markers, [_along(points) for points in markers], _along(front), list(texts))
    height = style.SMALL_TYPE * style.LINE
    for index, line in enumerate(lines):
        boxes = _places(markers[index], text_width(line.name, bold=True), height)
        costs = [scene.cost(box, index) for box in boxes]
        box = boxes[costs.index(min(costs))]
        scene.texts.append(box)
        panel.text(
            box.left / wide,
            (box.bottom + height / 2) / high,
            line.name,
            transform=panel.transAxes,
            fontsize=style.SMALL_TYPE,
            fontweight="bold",
            color=line.colour,
            va="center",
            zorder=6,
        )


def _places(markers: Sequence[tuple[float, float]], width: float, height: float) -> list[_Box]:
    """Return the boxes of this size around markers in which a name may stand."""
    boxes: list[_Box] = []
    for (x, y), gap in product(markers, (_NAME_GAP, 2 * _NAME_GAP)):
        starts = (x + gap, x - width / 2, x - width - gap)
        floors = (y - height - gap, y + gap, y - height / 2)
        boxes += [_Box(start, low, start + width, low + height) for start, low in product(starts, floors)]
    return boxes


class _Scene(NamedTuple):
    """The shapes of a panel of this size, in inches: markers and points along each line, steps, and texts."""

    size: tuple[float, float]
    markers: Sequence[Sequence[tuple[float, float]]]
    strokes: Sequence[Sequence[tuple[float, float]]]
    steps: Sequence[tuple[float, float]]
    texts: list[_Box]

    def cost(self, box: _Box, line: int) -> float:
        """Return how much the name of a line hides; much where it leaves the panel or is nearer to another line."""
        is_inside = box.left >= 0 and box.right <= self.size[0] and box.bottom >= 0 and box.top <= self.size[1]
        met = sum(box.meets(other) for other in self.texts)
        hidden = sum(box.overlaps(x, y, _FREE) for x, y in chain.from_iterable(self.markers))
        crossed = sum(box.overlaps(x, y) for x, y in chain.from_iterable(self.strokes))
        stepped = sum(box.overlaps(x, y) for x, y in self.steps)
        distances = [box.distance_to(stroke) for stroke in self.strokes]
        is_nearer = min(distances) < distances[line]
        return 1000 * (not is_inside) + 500 * met + 30 * is_nearer + 20 * hidden + 4 * crossed + stepped


def _along(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points along a line through others, so close that a name cannot lie between two of them."""
    found = list(points)
    for (x, y), (next_x, next_y) in pairwise(points):
        steps = np.linspace(0, 1, 24)
        found += zip((x + steps * (next_x - x)).tolist(), (y + steps * (next_y - y)).tolist(), strict=True)
    return found


def data_csv(maps: Sequence[Map], memories: Sequence[EqualMemory | None]) -> str:
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
            numbers = [round(_tokens(cell), 3), round(100 * estimate.value, 4), *limits]
            names = map(guarded, (map_.model, map_.benchmark, map_.policy, *coord))
            rows.append([*names, *numbers, int(coord in front), int(coord in off)])
    return style.rows_csv([header, *rows])
