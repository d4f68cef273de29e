"""Heatmaps for papers: panels under one title that states the finding, each on its own colour scale or all on one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import colours, style
from kvatlas.figures.panels import BEST, NARROWEST, CellText, Panel, finding, metric_panels
from kvatlas.figures.style import FigureOptions, Line, Margins, font_size, settle, sheet, text_width, wrapped
from kvatlas.stats.estimates import common
from kvatlas.text import axis_label, model_name, signed, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a cell's width where there is room.
_CELL_WIDTH = 0.44
#: Inches of a panel's width where there is room, at least.
_PANEL_WIDTH = 1.6
#: Inches of a row of cells, and of one whose cells have a second line.
_ROW_HEIGHT = 0.25
_TALL_ROW_HEIGHT = 0.34
#: Inches of all rows, at least.
_PANEL_HEIGHT = 0.8
#: Points of a value, of an interval, and of an axis' label at most.
_VALUE_TYPE = 8.0
_INTERVAL_TYPE = 5.6
_LABEL_TYPE = 7.0
#: Inches between panels.
_GAP = 0.12
#: Inches from a panel to its colour bar, and of the bar.
_BAR_GAP = 0.06
_BAR_WIDTH = 0.07
#: Above the colours of cells and below their numbers.
_FRAME_ORDER = 2.5


class _Layout(NamedTuple):
    """Panels in a row; inches of the figure's width and of a panel's height.

    Points are those of the vertical axis' label, of values and of intervals, 0 for none. Panels of a row are `joined`
    if they share the vertical axis. `above` has the lines over each panel.
    """

    across: int
    width: float
    high: float
    margins: Margins
    joined: bool
    above: Sequence[Sequence[Line]]
    label: float
    value: float
    interval: float

    @property
    def inner(self) -> float:
        """Inches of a panel's width."""
        return self.margins.inner(self.width, self.across)


class _Words(NamedTuple):
    """The subject of a title, the clauses about all panels, and the name of each panel: what differs."""

    subject: str
    about: list[str]
    names: list[str]


def map_figure(
    maps: Sequence[Map],
    *,
    one_bar: bool = False,
    shared: bool | None = None,
    options: FigureOptions | None = None,
) -> Figure:
    """Return maps of a metric as one figure (see `plot`): percent, baselines, and frames."""
    return plot(metric_panels(maps), one_bar=one_bar, shared=shared, options=options)


def plot(
    panels: Sequence[Panel],
    *,
    shared: bool | None = None,
    one_bar: bool = False,
    options: FigureOptions | None = None,
) -> Figure:
    """Return panels as one figure, on one colour scale with `shared` or `one_bar`, else each on its own.

    A scale is at least as wide as an interval on average; with `shared=False` it goes from the lowest to the highest
    cell. Differences are always on one scale around 0. Numbers that are not legible are left out. Raises KvatlasError
    for no panels, panels without cells, one scale for unlike measures, and cells without room for intervals.
    """
    options = options or FigureOptions()
    _check_panels(panels, one_bar)
    scales = _scales(panels, shared, one_bar)
    one_scale = len(set(scales)) == 1
    with options.applied():
        words = _words(panels, options)
        ends = [_ends(panel, scale) for panel, scale in zip(panels, scales, strict=True)]
        layout = _layout(panels, words.names, list(chain.from_iterable(ends)), one_scale, options)
        result = finding(panels)
        figure, grid = sheet(
            options,
            (layout.width, layout.high),
            len(panels),
            layout.across,
            layout.margins,
            title=f"{words.subject}: {result}" if words.subject else result[:1].upper() + result[1:],
            about=[*words.about, *_marks(panels, layout, one_scale, options)],
            notes=_notes(panels, layout),
        )
        for index, (axes, panel, scale) in enumerate(zip(grid, panels, scales, strict=True)):
            _draw_cells(axes, panel, scale, layout, options)
            _write_axes(axes, panel, layout, options)
            is_first_in_row = index % layout.across == 0
            if layout.joined and not is_first_in_row:
                axes.set_ylabel("")
                axes.set_yticks([])
            style.write_above(axes, layout.above[index])
            is_last_in_row = (index + 1) % layout.across == 0 or index + 1 == len(panels)
            if is_last_in_row or not one_scale:
                _draw_bar(axes, panel, ends[index], layout)
        settle(figure, options)
        return figure


def _check_panels(panels: Sequence[Panel], one_bar: bool) -> None:
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    if one_bar and len({panel.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.map.model} on {panel.map.benchmark} has no cells to draw.")


def _cells_of(panels: Sequence[Panel]) -> Iterator[CellText]:
    """Yield the cells of all panels."""
    for panel in panels:
        yield from panel.cells.values()


def _scales(panels: Sequence[Panel], shared: bool | None, one_bar: bool) -> list[tuple[float, float]]:
    """Return the ends of the colour scale of each panel."""
    is_shared = bool(shared or one_bar or panels[0].centred)
    scales = []
    for panel in panels:
        sharing = panels if is_shared else [panel]
        least = NARROWEST if shared is False else max(other.least for other in sharing)
        values = [cell.value for cell in _cells_of(sharing)]
        scales.append(colours.scale_limits(values, panel.centred, least))
    return scales


# -- words -------------------------------------------------------------------------------------------------------------


def _words(panels: Sequence[Panel], options: FigureOptions) -> _Words:
    """Return the subject of the title (models and policies), the clauses about all panels, and the panels' names."""
    by_panel = [_names(panel) for panel in panels]
    models, benchmarks, policies, labels = (list(dict.fromkeys(names)) for names in zip(*by_panel, strict=True))
    subject = [" and ".join(map(options.named, names)) for names in (models, policies) if _is_title(names)]
    about = ["units as named"]
    if len(labels) == 1:
        about = [f"{options.named(labels[0])} {panels[0].unit}"]
    kinds = (models, benchmarks, policies, labels)
    differing = [kind for kind, names in enumerate(kinds) if len(names) > 1] or [1]
    if len(benchmarks) == 1 and differing != [1]:
        about.append(options.named(benchmarks[0]))
    panel_names = [_panel_name(names, differing, options) for names in by_panel]
    return _Words(" under ".join(subject), about, panel_names)


def _is_title(names: Sequence[str]) -> bool:
    """Return whether a title has room for all of these names."""
    return len(names) <= 2 and all(names)


def _panel_name(names: Sequence[str], kinds: Sequence[int], options: FigureOptions) -> str:
    return ", ".join(options.named(names[kind]) for kind in kinds)


def _names(panel: Panel) -> tuple[str, str, str, str]:
    """Return model, benchmark, policy and measure of a panel."""
    benchmark = f"{panel.map.benchmark} benchmarks" if panel.map.is_mean else panel.map.benchmark
    return model_name(panel.map.model), benchmark, panel.map.policy, panel.label


def _marks(panels: Sequence[Panel], layout: _Layout, one_scale: bool, options: FigureOptions) -> list[str]:
    """Return what the marks and the small type of the panels stand for."""
    marks: list[str] = []
    for panel in panels:
        marks += panel.about
    if not layout.value:
        marks = [mark for mark in marks if mark != BEST]
    if options.intervals and layout.interval:
        marks.append("small type: 95 % intervals")
    elif options.intervals is None and any(panel.half_interval for panel in panels):
        marks.append("±: half the 95 % interval of the median cell")
    if any(panel.memory for panel in panels):
        marks.append("dotted: equal mean KV memory")
    if not one_scale:
        marks.append("each panel has its own colour scale")
    return marks


def _notes(panels: Sequence[Panel], layout: _Layout) -> list[Note]:
    notes = list(chain.from_iterable(panel.notes for panel in panels))
    if not layout.value:
        notes.append(Note(NoteKind.GRANULARITY, "The numbers are in the data next to the figure"))
    return notes


def _ends(panel: Panel, scale: tuple[float, float]) -> list[str]:
    """Return the ends of a colour scale as they are printed."""
    digits = panel.digits if scale[1] - scale[0] < 4 else 0
    if panel.centred:
        return [signed(value, digits) for value in scale]
    return [f"{value:,.{digits}f}" for value in scale]


# -- layout ------------------------------------------------------------------------------------------------------------


def _layout(
    panels: Sequence[Panel], names: Sequence[str], ends: Sequence[str], one_scale: bool, options: FigureOptions
) -> _Layout:
    """Return the layout with as many panels in a row as leave numbers legible.

    Raises KvatlasError if there is no room for intervals that were asked for.
    """
    columns = max(len(panel.map.axes[1][1]) for panel in panels)
    values = [cell.text for cell in _cells_of(panels)]
    intervals = _intervals(panels, options)
    high = _panel_height(panels, bool(intervals))
    label = _label_size(panels, high, options)
    joined = len({panel.map.axes[0] for panel in panels}) == 1
    margins = _side_margins(panels, ends, (high, label), joined, one_scale, options)

    def type_sizes(across: int, width: float) -> tuple[float, float]:
        """Return the points of values and of intervals."""
        cell_width = margins.inner(width, across) / columns
        value_size = font_size(cell_width, values, _VALUE_TYPE, bold=True)
        return value_size, font_size(cell_width, intervals, _INTERVAL_TYPE)

    across = style.panels_in_row(
        len(panels),
        _most_in_row(panels),
        lambda count: min(type_sizes(count, options.widest)) >= style.LEAST_TYPE,
    )
    if across:
        width = options.width or min(_natural_width(margins, across, columns), options.widest)
        value, interval = type_sizes(across, width)
    elif intervals:
        raise KvatlasError("--look intervals=true: the cells are too narrow for intervals; leave it out.")
    else:
        # A panel alone, without numbers.
        across = 1
        width = options.widest
        value = interval = 0.0
    inner = margins.inner(width, across)
    above = [_lines_above(panel, name, inner, options) for panel, name in zip(panels, names, strict=True)]
    margins = margins._replace(
        above=max(map(style.height_of, above)) + 0.1,
        below=_height_below(panels, inner, options),
    )
    return _Layout(across, width, high, margins, joined, above, label, value, interval if intervals else 0.0)


def _intervals(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return the intervals that stand in the cells."""
    if not options.intervals:
        return []
    return [cell.small for cell in _cells_of(panels) if cell.small]


def _panel_height(panels: Sequence[Panel], has_intervals: bool) -> float:
    rows = max(len(panel.map.axes[0][1]) for panel in panels)
    row_height = _TALL_ROW_HEIGHT if has_intervals else _ROW_HEIGHT
    return max(row_height * rows, _PANEL_HEIGHT)


def _label_size(panels: Sequence[Panel], high: float, options: FigureOptions) -> float:
    """Return the points of the label of the vertical axis."""
    return max(style.LEAST_TYPE, font_size(high, _vertical_labels(panels, options), _LABEL_TYPE))


def _vertical_labels(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    return [options.named(axis_label(panel.map.axes[0][0])) for panel in panels]


def _side_margins(
    panels: Sequence[Panel],
    ends: Sequence[str],
    vertical_axis: tuple[float, float],
    joined: bool,
    one_scale: bool,
    options: FigureOptions,
) -> Margins:
    """Return the margins at the sides of panels; `vertical_axis` is its length and the points of its label."""
    high, label = vertical_axis
    label_lines = max(len(wrapped(text, high, label)) for text in _vertical_labels(panels, options))
    rows = chain.from_iterable(panel.map.axes[0][1] for panel in panels)
    ticks = max(text_width(str(row), _LABEL_TYPE) for row in rows)
    left = style.EDGE + label_lines * label * style.LINE + 0.04 + ticks + 0.06
    bar = _BAR_GAP + _BAR_WIDTH + 0.04 + max(map(text_width, ends))
    between = _GAP
    if not joined:
        between += left
    if not one_scale:
        between += bar
    return Margins(left, style.EDGE + bar, between, 0, 0)


def _most_in_row(panels: Sequence[Panel]) -> int:
    """Return the largest number of panels in a row; rows begin with the same policy, if there are several."""
    count = len(panels)
    most = 4 if count <= 8 else math.ceil(math.sqrt(count))
    policies = len({panel.map.policy for panel in panels})
    if policies == 1:
        return most
    whole_rows = [size for size in range(policies, most + 1, policies) if count % size == 0]
    return whole_rows[-1] if whole_rows else most


def _natural_width(margins: Margins, across: int, columns: int) -> float:
    """Return the inches of a figure that has all the room that it needs."""
    panel_width = max(_CELL_WIDTH * columns, _PANEL_WIDTH)
    natural = margins.left + margins.right + across * panel_width + (across - 1) * margins.between
    return max(natural, style.WIDTHS[1])


def _lines_above(panel: Panel, name: str, inner: float, options: FigureOptions) -> list[Line]:
    """Return the lines over a panel: its name, then n, ± and the baselines."""
    facts = []
    problems = common([cell.estimate.problems for cell in panel.map.cells.values()])
    if problems:
        facts.append(f"n {problems}")
    if panel.half_interval and options.intervals is None:
        facts.append(f"± {panel.half_interval:.0f}")
    for text, interval in panel.baselines:
        facts.append(f"{text} ({interval})" if interval and options.intervals else text)
    # A fact breaks only where it is wider than the panel.
    unbroken = ", ".join(fact.replace(" ", "\u00a0") for fact in facts)
    lines = style.text_lines(name, inner, style.NAME_TYPE, options.colours.ink, "bold")
    return lines + style.text_lines(unbroken, inner, style.SMALL_TYPE, options.colours.soft)


def _height_below(panels: Sequence[Panel], inner: float, options: FigureOptions) -> float:
    """Return the inches of the values and the label below a panel."""
    labels = [options.named(axis_label(panel.map.axes[1][0])) for panel in panels]
    lines = max(len(wrapped(label, inner, _LABEL_TYPE)) for label in labels)
    return 0.12 + _LABEL_TYPE / 72 + lines * _LABEL_TYPE * style.LINE


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw_cells(axes: Axes, panel: Panel, scale: tuple[float, float], layout: _Layout, options: FigureOptions) -> None:
    """Draw the cells in their colours with their numbers, the largest vertical value on top.

    Missing cells are hatched, best ones bold, outlined ones framed.
    """
    (_, rows), (_, columns) = panel.map.axes
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), cell in panel.cells.items():
        values[rows.index(row), columns.index(column)] = cell.value
    empty, hatching = options.colours.missing
    axes.patch.set(facecolor=empty, edgecolor=hatching, hatch="////", linewidth=0)
    axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=colours.colour_map(panel.palette),
        vmin=scale[0],
        vmax=scale[1],
        edgecolors=options.colours.ground,
        linewidth=0.8,
        snap=True,
    )
    for (row, column), cell in panel.cells.items():
        corner = (columns.index(column), rows.index(row))
        _write_cell(axes, corner, cell, layout)
        if (row, column) in panel.outlined:
            _frame_cell(axes, corner)
    if panel.memory:
        _draw_memory(axes, panel.memory)


def _write_cell(axes: Axes, corner: tuple[int, int], cell: CellText, layout: _Layout) -> None:
    """Write the value of a cell, and its interval below where there is room for it."""
    x, y = corner
    ink: dict[str, Any] = {"color": colours.ON_COLOUR, "ha": "center", "va": "center"}
    has_interval = bool(layout.interval and cell.small)
    if layout.value:
        height = 0.62 if has_interval else 0.5
        weight = "bold" if cell.bold else "normal"
        axes.text(x + 0.5, y + height, cell.text, fontsize=layout.value, fontweight=weight, **ink)
    if has_interval:
        axes.text(x + 0.5, y + 0.25, cell.small, fontsize=layout.interval, **ink)


def _frame_cell(axes: Axes, corner: tuple[int, int]) -> None:
    """Draw a frame within a cell, where it stands out from its colour on a dark ground, too."""
    from matplotlib.patches import Rectangle

    x, y = corner
    axes.add_patch(
        Rectangle(
            (x + 0.04, y + 0.05),
            0.92,
            0.9,
            gid="framed",
            facecolor="none",
            edgecolor=colours.ON_COLOUR,
            linewidth=1.1,
            zorder=_FRAME_ORDER,
        )
    )


def _draw_memory(axes: Axes, memory: Sequence[Sequence[float]]) -> None:
    """Draw dotted lines of equal memory at three of the sizes between the smallest and the largest."""
    sizes = np.array(memory)
    levels = np.geomspace(sizes.min(), sizes.max(), 5)[1:-1]
    rows, columns = sizes.shape
    axes.contour(
        np.arange(columns) + 0.5,
        np.arange(rows) + 0.5,
        sizes,
        levels,
        colors=colours.ON_COLOUR,
        linewidths=0.7,
        linestyles="dotted",
        alpha=0.5,
    )


def _write_axes(axes: Axes, panel: Panel, layout: _Layout, options: FigureOptions) -> None:
    """Write the values of both axes and their labels."""
    (vertical, rows), (horizontal, columns) = panel.map.axes
    column_width = layout.inner / len(columns)
    texts = [visible(str(value)) for value in columns]
    size = max(style.LEAST_TYPE, font_size(column_width, texts, _LABEL_TYPE))
    # Of columns that are narrower than their values only some are named.
    step = math.ceil(max(text_width(text, size) for text in texts) / column_width)
    axes.set_xticks([x + 0.5 for x in range(0, len(columns), step)], texts[::step])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [visible(str(value)) for value in rows])
    axes.tick_params(length=0, pad=3, labelsize=_LABEL_TYPE)
    axes.tick_params(axis="x", labelsize=size)
    x_label = wrapped(options.named(axis_label(horizontal)), layout.inner, _LABEL_TYPE)
    y_label = wrapped(options.named(axis_label(vertical)), layout.high, layout.label)
    axes.set_xlabel("\n".join(x_label), labelpad=2, fontsize=_LABEL_TYPE)
    axes.set_ylabel("\n".join(y_label), labelpad=3, fontsize=layout.label)
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)))
    axes.spines[:].set_visible(False)


def _draw_bar(axes: Axes, panel: Panel, ends: Sequence[str], layout: _Layout) -> None:
    """Draw a colour bar right of a panel, with the numbers at its ends."""
    left = 1 + _BAR_GAP / layout.inner
    right = left + _BAR_WIDTH / layout.inner
    heights = np.linspace(0, 1, 129)
    axes.pcolormesh(
        [left, right],
        heights,
        heights[:-1, None],
        cmap=colours.colour_map(panel.palette),
        transform=axes.transAxes,
        clip_on=False,
    )
    text_place = right + 2 / 72 / layout.inner
    for height, text, side in zip((0, 1), ends, ("bottom", "top"), strict=True):
        axes.text(text_place, height, text, transform=axes.transAxes, fontsize=style.SMALL_TYPE, va=side)
