"""Heatmaps for papers: panels under one title that states the finding, each on its own colour scale or all on one."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import Colormap, FuncNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvatlas.core import KvatlasError, Map, Note, NoteKind, grouped
from kvatlas.figures import colours, style
from kvatlas.figures.heatmap_layout import LABEL_TYPE, HeatmapLayout, Tick, arranged, name_of
from kvatlas.figures.marks import BOX, KeyEntry, add_mark
from kvatlas.figures.panels import BEST, NARROWEST, Baseline, Panel, metric_panels, panels_title
from kvatlas.figures.style import FigureOptions, Line, finish_texts, font_size, make_panels, text_width, wrapped
from kvatlas.stats.estimates import common, problem_count
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.text import axis_label, fixed, grouped_digits, signed

#: The order of drawing of a ring: above the colours of cells and below their numbers.
_RING_ORDER = 2.5
#: Points of the mark of a cell at most, and its share of the sides of the cell.
_MARK = 4.0
_MARK_SHARE = 0.24
#: The width of the ring of the recommended cell, and inches from the edge of the cell to it.
_RING = 1.2
_RING_INSET = 0.035
#: Inches of a tick beside a colour bar.
_TICK = 0.025
#: Strips of a colour bar.
_STRIPS = 96
#: Points by which the intervals of panels may differ and still be told together.
_LIKE_INTERVALS = 2.0
#: Letters of a baseline's name beside a colour bar, and baselines there, at most.
_SHORT = 12
_MOST_ON_BAR = 3


def map_figure(maps: Sequence[Map], options: FigureOptions | None = None) -> Figure:
    """Return maps of a metric as one figure (see `plot`): percent, baselines, and frames."""
    options = options or FigureOptions()
    return plot(metric_panels(maps, exact=options.plain), options=options)


def plot(
    panels: Sequence[Panel],
    *,
    shared: bool | None = None,
    one_bar: bool = False,
    title: str = "",
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return panels as one figure, on one colour scale with `shared` or `one_bar`, else each on its own.

    Panels of a benchmark share a scale. It is at least as wide as an interval on average, and holds the baselines; with
    `shared=False`, and in plain figures, each panel's goes from its lowest to its highest cell. Differences are always
    on one scale around 0. Numbers that are not legible are left out. The title is the finding of the panels, unless
    another one is given. `notes` stand below all panels.
    Raises KvatlasError for no panels, panels without cells, one scale for unlike measures, and cells without room for
    intervals.
    """
    options = options or FigureOptions()
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    if one_bar and len({panel.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.map.model} on {panel.map.benchmark} has no cells to draw.")
    if options.plain and shared is None and not one_bar:
        shared = False

    with options.applied():
        # The places of panels, their scales, and the ticks of their bars.
        arrangement = arranged(panels, options)
        panels = arrangement.panels
        scales = _colour_scales(panels, shared, one_bar)
        ticks = [_bar_ticks(panel, scale, options) for panel, scale in zip(panels, scales, strict=True)]
        layout = HeatmapLayout(arrangement, scales, ticks, options)
        bars = _ticks_of_bars(layout, ticks)
        # One bar beside all rows, where they would have the same.
        is_single_bar = layout.one_bar and len(set(map(tuple, bars.values()))) == 1
        if is_single_bar:
            first = min(bars)
            bars = {first: bars[first]}

        # Baselines that no bar has stand over their panels, those of all panels once.
        about_all: Sequence[str] = ()
        baselines: list[tuple[str, ...]] = []
        for index, panel in enumerate(panels):
            bar = bars.get(_bar_place(index, layout), bars[min(bars)])
            on_its_bar = [tick.baseline for tick in bar if tick.baseline is not None]
            baselines.append(() if options.plain else tuple(baseline_lines(panel, on_its_bar, options)))
        if len(set(baselines)) == 1:
            about_all = baselines[0]
            baselines = [()] * len(panels)
        layout.set_above(_lines_over_panels(layout, baselines))

        # The words over all panels.
        about = [*layout.arrangement.about, *marks_in_words(panels, bool(layout.value), bool(layout.interval), options)]
        about += about_all
        if not layout.has_one_scale:
            by_benchmark = len(set(scales)) < len(panels)
            about.append(f"each {'benchmark' if by_benchmark else 'panel'} has its own colour scale")
        if title:
            about = [about[0], *filter(None, [arrangement.subject]), *about[1:]]
        else:
            text = panels_title(panels)
            title = f"{arrangement.subject}: {text}" if arrangement.subject else text[:1].upper() + text[1:]

        figure, grid = make_panels(
            options,
            (layout.width, layout.high),
            len(panels),
            layout.across,
            layout.margins,
            title=title,
            about=about,
            notes=[*notes, *notes_of(panels, bool(layout.value))],
            key=key_of_panels(panels),
        )
        for index, axes in enumerate(grid):
            _draw_cells(axes, index, layout)
            _write_heatmap_axes(axes, index, layout)
            style.write_above(axes, layout.above[index])
            if index in bars:
                lowest = grid[index]
                if is_single_bar:
                    lowest = grid[-1]
                elif layout.has_column_bars:
                    lowest = grid[index + len(grid) - layout.across]
                _draw_colour_bar(axes, lowest, index, bars[index], layout)
        _write_row_names(figure, grid, layout)
        finish_texts(figure, options)
        return figure


def _colour_scales(panels: Sequence[Panel], shared: bool | None, one_bar: bool) -> list[tuple[float, float]]:
    """Return the ends of the colour scale of each panel."""
    is_shared = bool(shared or one_bar or panels[0].centred)
    scales = []
    for panel in panels:
        # One colour has one meaning on a benchmark, whatever the policy.
        sharing = panels
        if not is_shared:
            name = (panel.map.benchmark, panel.label)
            sharing = [other for other in panels if (other.map.benchmark, other.label) == name]
            sharing = [panel] if shared is False else sharing

        least = NARROWEST if shared is False else max(other.least for other in sharing)
        values = []
        for other in sharing:
            values += [cell.value for cell in other.cells.values()]
            if other.silent_loss is not None and other.centred:
                # The margin has a place on the scale.
                values.append(-other.silent_loss)
            elif other.silent_loss is not None:
                # From the full cache on, and as far beyond the margin as within it, at least.
                values += [0.0, 2 * other.silent_loss]
            if shared is not False:
                values += [baseline.value for baseline in other.baselines]
        if panel.silent_loss is not None and not panel.centred:
            values = [max(value, 0.0) for value in values]
        scales.append(colours.scale_limits(values, panel.centred, least))
    return scales


# -- words -----------------------------------------------------------------------------------------------------------


def _bar_ticks(panel: Panel, scale: tuple[float, float], options: FigureOptions) -> list[Tick]:
    """Return the ticks of a panel's bar: its ends, 0 between differences, and the baselines; if plain, round values."""
    if options.plain:
        return [Tick(value, f"{value:g}") for value in style.round_values(*scale)]
    values = sorted({scale[0], 0.0, scale[1]}) if panel.centred else list(scale)
    printed = signed if panel.centred else grouped_digits
    ticks = [Tick(value, printed(value, panel.digits)) for value in values]
    if panel.silent_loss is not None:
        margin = -panel.silent_loss if panel.centred else panel.silent_loss
        ticks = [tick for tick in ticks if tick.value != margin]
        ticks.append(Tick(margin, f"{printed(margin, 0 if margin.is_integer() else 1)} margin"))
    for baseline in on_bar([panel], scale):
        name = options.named(baseline.name)
        is_zero = panel.centred or (panel.silent_loss is not None and baseline.value == 0)
        text = f"0 = {name} {baseline.text}" if is_zero else f"{name} {baseline.text}"
        ticks.append(Tick(baseline.value, text, baseline))
    return ticks


def _ticks_of_bars(layout: HeatmapLayout, ticks: Sequence[Sequence[Tick]]) -> dict[int, list[Tick]]:
    """Return the ticks of the bars by the panels that they stand beside: baselines that all panels of a bar share."""
    by_bar = grouped(range(len(layout.panels)), lambda index: _bar_place(index, layout))
    bars = {}
    for place, indices in sorted(by_bar.items()):
        shared = on_bar([layout.panels[index] for index in indices], layout.scales[place])
        bars[place] = [tick for tick in ticks[place] if tick.baseline is None or tick.baseline in shared]
    return bars


def _bar_place(index: int, layout: HeatmapLayout) -> int:
    """Return the panel beside which the bar of a panel stands: the last of a row, the first of a column, or its own."""
    row_start = index - index % layout.across
    if layout.one_bar:
        return min(row_start + layout.across, len(layout.panels)) - 1
    return index % layout.across if layout.has_column_bars else index


def _lines_over_panels(layout: HeatmapLayout, baselines: Sequence[Sequence[str]]) -> list[list[Line]]:
    """Return the lines over each panel: its name, in a grid that of its column, and the facts that are its own."""
    options = layout.options
    above = []
    for index, panel in enumerate(layout.panels):
        lines: list[Line] = []
        if not layout.arrangement.is_grid or index < layout.across:
            name = layout.arrangement.names[index]
            # Names may stand above the bar, too.
            room = layout.inner + layout.margins.between - 0.08
            lines = style.text_lines(name, room, style.NAME_TYPE, options.colours.ink, "bold")

        facts = [] if options.plain else [*facts_of(panel, layout.panels, options), *baselines[index]]
        unbroken = []
        for fact in facts:
            # A fact breaks only where it is wider than the panel.
            is_narrow = text_width(fact, style.SMALL_TYPE) < layout.inner
            unbroken.append(fact.replace(" ", "\u00a0") if is_narrow else fact)
        lines += style.text_lines(", ".join(unbroken), layout.inner, style.SMALL_TYPE, options.colours.soft)
        above.append(lines)
    return above


def facts_of(panel: Panel, panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return what stands over a panel: n and ±, where panels do not share them."""
    facts = []
    problems = problem_count(panel.map)
    if problems and common([problem_count(other.map) for other in panels]) is None:
        facts.append(f"n {problems}")
    if panel.half_interval and options.intervals is None and not _shared_interval(panels):
        facts.append(f"± {fixed(panel.half_interval, panel.digits)}")
    return facts


def baseline_lines(panel: Panel, on_bar: Sequence[Baseline], options: FigureOptions) -> list[str]:
    """Return the baselines of a panel that are not on a bar; policies with the same parameters stand together."""
    # By the parameters in the name of a setting, `ratio=0.3` in `random(ratio=0.3)`; a label has none.
    by_parameters: dict[str, list[Baseline]] = {}
    for baseline in panel.baselines:
        if baseline not in on_bar:
            is_label = options.named(baseline.name) != options.in_words(baseline.name)
            parameters = "" if is_label else options.in_words(baseline.name.partition("(")[2].removesuffix(")"))
            by_parameters.setdefault(parameters, []).append(baseline)

    lines = []
    for parameters, baselines in by_parameters.items():
        if parameters and len(baselines) > 1:
            policies = [f"{item.name.partition('(')[0]} {_baseline_value(item, options)}" for item in baselines]
            lines.append(f"{parameters}: {', '.join(policies)}")
        else:
            for item in baselines:
                name = options.named(item.name)
                # A value is told apart from those of parameters.
                between = ": " if ", " in name else " "
                lines.append(f"{name}{between}{_baseline_value(item, options)}")
    return lines


def _baseline_value(baseline: Baseline, options: FigureOptions) -> str:
    return f"{baseline.text} ({baseline.interval})" if baseline.interval and options.intervals else baseline.text


def _shared_interval(panels: Sequence[Panel]) -> str:
    """Return half the interval of the panels' median cells in points, empty where it is unlike or unknown."""
    halves = [panel.half_interval for panel in panels if panel.half_interval]
    if len(halves) < len(panels) or max(halves) - min(halves) > _LIKE_INTERVALS:
        return ""
    digits = max(panel.digits for panel in panels)
    ends = dict.fromkeys((fixed(min(halves), digits), fixed(max(halves), digits)))
    return " to ".join(ends)


def marks_in_words(panels: Sequence[Panel], has_values: bool, has_intervals: bool, options: FigureOptions) -> list[str]:
    """Return what the marks and the small type of panels stand for, and how they tell their intervals."""
    words: list[str] = list(chain.from_iterable(panel.about for panel in panels))
    if not has_values:
        words = [mark for mark in words if mark != BEST]
    shared_interval = _shared_interval(panels)
    if has_intervals:
        words.append("small type: 95 % intervals")
    elif options.intervals is None and shared_interval:
        words.append(f"half the 95 % interval of the median cell: {shared_interval} points")
    elif options.intervals is None and any(panel.half_interval for panel in panels):
        words.append("±: half the 95 % interval of the median cell")
    return words


def key_of_panels(panels: Sequence[Panel]) -> list[KeyEntry]:
    """Return the key of the marks of panels, of which the ring comes first."""
    ringed = [panel.map for panel in panels if panel.map.recommended in panel.cells]
    key = []
    if ringed:
        # Marks are of a panel's own benchmark, the ring may be of the mean.
        others = {map_.recommended_for for map_ in ringed if map_.recommended_for != map_.benchmark}
        key.append(KeyEntry(BOX, "recommended" + "".join(f" for the {name} benchmarks" for name in sorted(others))))
    return [*key, *dict.fromkeys(chain.from_iterable(panel.key for panel in panels))]


def notes_of(panels: Sequence[Panel], has_values: bool) -> list[Note]:
    """Return the notes of panels; warnings that not all of them have name their panels, one of each kind in all."""
    notes: list[Note] = []
    warnings: dict[tuple[NoteKind, str], list[str]] = {}
    for panel in panels:
        for note in panel.map.remarks:
            if not note.is_warning or all(note in other.map.remarks for other in panels):
                notes.append(note)
                continue
            # The first word names the kind: `PARTIAL: 3 of 20 cells are missing`.
            kind, _, text = note.text.partition(": ")
            name = " ".join(filter(None, name_of(panel)[:3]))
            warnings.setdefault((note.kind, kind), []).append(f"{text} ({name})")
    notes += [Note(kind, f"{word}: {'; '.join(texts)}") for (kind, word), texts in warnings.items()]
    if not has_values:
        notes.append(Note(NoteKind.GRANULARITY, "The numbers are in the data next to the figure"))
    return notes


def on_bar(panels: Sequence[Panel], scale: tuple[float, float]) -> list[Baseline]:
    """Return the baselines that are ticks on the bar of these panels: those on its scale that all of them share."""
    found = []
    for baseline in panels[0].baselines:
        is_shared = len(baseline.name) <= _SHORT and all(baseline in panel.baselines for panel in panels)
        if is_shared and scale[0] - 1e-9 <= baseline.value <= scale[1] + 1e-9:
            found.append(baseline)
    return found[:_MOST_ON_BAR]


# -- drawing ---------------------------------------------------------------------------------------------------------


def _draw_cells(axes: Axes, index: int, layout: HeatmapLayout) -> None:
    """Draw the cells in their colours with their numbers and marks, the largest vertical value on top.

    Missing cells are hatched, best ones bold.
    """
    options = layout.options
    panel = layout.panels[index]
    (_, rows), (_, columns) = panel.map.axes
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), cell in panel.cells.items():
        values[rows.index(row), columns.index(column)] = cell.value
    empty, hatching = options.colours.missing
    axes.patch.set(facecolor=empty, edgecolor=hatching, hatch="////", linewidth=0)
    axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=_colour_map(panel, options),
        norm=_colour_norm(panel, layout.scales[index]),
        edgecolors=options.colours.ground,
        linewidth=0.8,
        snap=True,
    )
    # The value of a cell, and its interval below where there is room for it.
    ink: dict[str, Any] = {"color": colours.ON_COLOUR, "ha": "center", "va": "center"}
    for (row, column), cell in panel.cells.items():
        x = columns.index(column) + 0.5
        y = rows.index(row)
        has_interval = bool(layout.interval and cell.small)
        if layout.value:
            weight = "bold" if cell.bold and not options.plain else "normal"
            value_y = y + (0.62 if has_interval else 0.5)
            axes.text(x, value_y, cell.text, fontsize=layout.value, fontweight=weight, **ink)
        if has_interval:
            axes.text(x, y + 0.25, cell.small, fontsize=layout.interval, **ink)

    if not options.plain:
        # The mark of each cell in its corner: cells are pale on any ground.
        width = layout.inner / len(columns)
        height = layout.high / len(rows)
        size = min(_MARK, 72 * _MARK_SHARE * min(width, height))
        inset = _RING_INSET + 0.75 * size / 72
        for (row, column), state in panel.states.items():
            place = (columns.index(column) + 1 - inset / width, rows.index(row) + 1 - inset / height)
            add_mark(axes, place, state, colours.LIGHT, size)
        recommended = panel.map.recommended
        if recommended is not None and recommended in panel.cells:
            # A ring between the numbers and the edge of the cell; the halo sets it off from the colour of the cell.
            inset = min(_RING_INSET, 0.05 * width, 0.12 * height)
            across = inset / width
            up = inset / height
            corner = (columns.index(recommended[1]) + across, rows.index(recommended[0]) + up)
            for colour, line in zip(reversed(colours.RING), (2 * _RING, _RING), strict=True):
                ring = Rectangle(
                    corner, 1 - 2 * across, 1 - 2 * up, fill=False, edgecolor=colour, linewidth=line, joinstyle="round",
                    gid="ringed", zorder=_RING_ORDER,
                )  # fmt: skip
                axes.add_patch(ring)


def _colour_map(panel: Panel, options: FigureOptions) -> Colormap:
    """Return the colours of a panel, and below them that of the margin."""
    return colours.colour_map(panel.palette).with_extremes(under=options.colours.within_margin)


def _colour_norm(panel: Panel, scale: tuple[float, float]) -> Normalize:
    """Return the share of the colours for a value: those of losses begin just above the margin.

    Differences of one size have colours of one strength on both sides, which grows by the root of the size: a small
    difference beside large ones is seen.
    """
    if panel.centred:
        silent = panel.silent_loss or 0.0
        reach = max(-scale[0], scale[1], 2 * silent)

        def colour_share(values: Floats) -> Floats:
            beyond = np.maximum(np.abs(values) - silent, 0) / (reach - silent)
            share = np.asarray(0.5 + 0.5 * np.sign(values) * np.sqrt(beyond))
            # Below all colours is that of the margin.
            return np.where(np.abs(values) <= panel.silent_loss, -1.0, share) if panel.silent_loss else share

        return FuncNorm((colour_share, colour_share), -reach, reach)
    start = scale[0] if panel.silent_loss is None else panel.silent_loss + 1e-9
    return Normalize(start, scale[1])


def _write_heatmap_axes(axes: Axes, index: int, layout: HeatmapLayout) -> None:
    """Write the values of both axes and their labels, those of a joined axis once."""
    named = layout.options.named
    (vertical, rows), (horizontal, columns) = layout.panels[index].map.axes
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=3, labelsize=LABEL_TYPE)
    axes.set(xticks=[], yticks=[])

    if not layout.joined or index % layout.across == 0:
        axes.set_yticks([y + 0.5 for y in range(len(rows))], [style.tick_text(value) for value in rows])
        y_label = wrapped(named(axis_label(vertical)), layout.label_room, layout.label)
        axes.set_ylabel("\n".join(y_label), labelpad=3, fontsize=layout.label)

    if layout.joined_below and index + layout.across < len(layout.panels):
        return
    column_width = layout.inner / len(columns)
    texts = [style.tick_text(value) for value in columns]
    size = max(style.LEAST_TYPE, font_size(column_width, texts, LABEL_TYPE))
    # Of columns that are narrower than their values only some are named.
    step = math.ceil(max(text_width(text, size) for text in texts) / column_width)
    axes.set_xticks([x + 0.5 for x in range(0, len(columns), step)], texts[::step])
    axes.tick_params(axis="x", labelsize=size)
    x_label = wrapped(named(axis_label(horizontal)), layout.inner, LABEL_TYPE)
    axes.set_xlabel("\n".join(x_label), labelpad=2, fontsize=LABEL_TYPE)


def _draw_colour_bar(axes: Axes, lowest: Axes, index: int, ticks: Sequence[Tick], layout: HeatmapLayout) -> None:
    """Draw a colour bar right of a panel, down to the lowest one of its column; baselines are lines across it."""
    options = layout.options
    panel = layout.panels[index]
    scale = layout.scales[index]
    box = axes.get_position()
    bottom = (lowest.get_position().y0 - box.y0) / box.height
    high = 1 - bottom
    left, right = layout.bar_sides
    # Each strip reaches to the top, so that no ground shows through between two of them.
    starts = bottom + high * np.arange(_STRIPS) / _STRIPS
    strips = [[(left, low), (right, low), (right, 1), (left, 1)] for low in starts]
    values = scale[0] + (scale[1] - scale[0]) * (np.arange(_STRIPS) + 0.5) / _STRIPS
    shades = _colour_map(panel, options)(_colour_norm(panel, scale)(values))
    bar = PolyCollection(strips, facecolors=shades, edgecolors="none", transform=axes.transAxes, clip_on=False)
    axes.add_collection(bar, autolim=False)

    line = 1.2 * style.SMALL_TYPE / 72 / layout.high
    shares = {tick: (tick.value - scale[0]) / (scale[1] - scale[0]) for tick in sorted(ticks)}
    on_baselines = [share for tick, share in shares.items() if tick.baseline is not None]
    heights = {}
    for tick, share in shares.items():
        # Values that baselines stand on are left out.
        is_told = any(abs(share - other) < line / high for other in on_baselines)
        is_margin = panel.silent_loss is not None and abs(tick.value) == panel.silent_loss
        if tick.baseline is not None or is_margin or not is_told:
            heights[tick] = bottom + high * share

    stroke: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "solid_capstyle": "butt"}
    for tick, height in heights.items():
        if tick.baseline is not None:
            axes.plot((left, right), (height, height), color=colours.ON_COLOUR, lw=1.4, **stroke)
    outside = right + _TICK / layout.inner
    for height in heights.values():
        axes.plot((right, outside), (height, height), color=options.colours.ink, lw=0.8, **stroke)

    # Labels stand at their values, half a line beyond the ends of the bar; only those that would overlap move.
    floor = bottom - line / 2
    places = style.move_apart([height - floor for height in heights.values()], [line] * len(heights), high + line)
    text: dict[str, Any] = {"transform": axes.transAxes, "fontsize": style.SMALL_TYPE}
    for tick, place in zip(heights, places, strict=True):
        axes.text(outside + 1.5 / 72 / layout.inner, place + floor, tick.text, va="center_baseline", **text)
    if options.plain:
        beyond = outside + (4 / 72 + max(text_width(tick.text) for tick in ticks)) / layout.inner
        axes.text(beyond, 0.5, panel.label, rotation=90, va="center", **text)


def _write_row_names(figure: Figure, grid: Sequence[Axes], layout: HeatmapLayout) -> None:
    """Write the name of each row of a grid at the left edge."""
    for row, name in enumerate(layout.arrangement.rows):
        box = grid[row * layout.across].get_position()
        lines = "\n".join(layout.row_name_lines(name))
        figure.text(
            style.EDGE / layout.width, (box.y0 + box.y1) / 2, lines, fontsize=style.NAME_TYPE, fontweight="bold",
            color=layout.options.colours.ink, rotation=90, va="center", linespacing=1.1,
        )  # fmt: skip
