"""Heatmaps for papers: panels under one title that states the finding, each on its own colour scale or all on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.panels import BEST, NARROWEST, Panel, finding, metric_panels
from kvatlas.figures.style import LINE, Line, Look, Margins, fitting, settle, sheet, text_width, wrapped, write_above
from kvatlas.stats.estimates import common
from kvatlas.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a cell's width and of a panel's where there is room; of a row, of one with intervals, of all rows.
_CELL, _NARROWEST, _ROW, _ROW_OF_TWO, _LOWEST = 0.44, 1.6, 0.25, 0.34, 0.8
#: Points of a value, of an interval, and of an axis' label at most.
_VALUE, _INTERVAL, _LABEL = 8.0, 5.6, 7.0
#: Inches between panels; from a panel to its colour bar, and of the bar.
_GAP, _BAR = 0.12, (0.06, 0.07)


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


def map_figure(
    maps: Sequence[Map], *, one_bar: bool = False, shared: bool | None = None, look: Look | None = None
) -> Figure:
    """Maps of a metric as one figure (see `plot`): percent, baselines, and frames."""
    return plot(metric_panels(maps), one_bar=one_bar, shared=shared, look=look)


def plot(
    panels: Sequence[Panel], *, shared: bool | None = None, one_bar: bool = False, look: Look | None = None
) -> Figure:
    """Panels as one figure, on one colour scale with `shared` or `one_bar`, else each on its own.

    A scale is at least as wide as an interval on average; with `shared=False` it goes from the lowest to the highest
    cell. Differences are always on one scale around 0. Numbers that are not legible are left out. Raises KvatlasError
    for no panels, panels without cells, one scale for unlike measures, and cells without room for intervals.
    """
    look = look or Look()
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    if one_bar and len({panel.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.map.model} on {panel.map.benchmark} has no cells to draw.")
    one_scale, scales = bool(shared or one_bar or panels[0].centred), list[tuple[float, float]]()
    for panel in panels:
        sharing = panels if one_scale else [panel]
        least = NARROWEST if shared is False else max(other.least for other in sharing)
        values = [cell.value for other in sharing for cell in other.cells.values()]
        scales.append(style.span(values, panel.centred, least))
    one_scale = len(set(scales)) == 1
    with look.applied():
        subject, about, names = _names(panels, look)
        ends = [[_end(value, panel, scale) for value in scale] for panel, scale in zip(panels, scales, strict=True)]
        layout = _layout(panels, names, [text for texts in ends for text in texts], one_scale, look)
        about += [text for panel in panels for text in panel.about if layout.value or text != BEST]
        if look.intervals and layout.interval:
            about.append("small type: 95 % intervals")
        elif look.intervals is None and any(panel.half_interval for panel in panels):
            about.append("±: half the 95 % interval of the median cell")
        about += ["dotted: equal mean KV memory"] * any(panel.memory for panel in panels)
        about += [] if one_scale else ["each panel has its own colour scale"]
        notes = [note for panel in panels for note in panel.notes]
        if not layout.value:
            notes.append(Note(NoteKind.GRANULARITY, "The numbers are in the data next to the figure"))
        result = finding(panels)
        figure, grid = sheet(
            look,
            (layout.width, layout.high),
            len(panels),
            layout.across,
            layout.margins,
            title=f"{subject}: {result}" if subject else result[:1].upper() + result[1:],
            about=about,
            notes=notes,
        )
        for number, (axes, panel, scale) in enumerate(zip(grid, panels, scales, strict=True)):
            _cells(axes, panel, scale, layout, look)
            _labels(axes, panel, layout, look)
            if layout.joined and number % layout.across:
                axes.set_ylabel("")
                axes.set_yticks([])
            write_above(axes, layout.above[number])
            if not one_scale or (number + 1) % layout.across == 0 or number + 1 == len(panels):
                _bar(axes, panel, ends[number], layout)
        settle(figure, look)
        return figure


def _names(panels: Sequence[Panel], look: Look) -> tuple[str, list[str], list[str]]:
    """The models and policies of a title, the words about all panels, and the name of each: what differs."""
    words = [
        (style.model(panel.map.model), f"{panel.map.benchmark}{' benchmarks' * panel.map.is_mean}", panel.map.policy,
         panel.label)
        for panel in panels
    ]  # fmt: skip
    models, benchmarks, policies, labels = (list(dict.fromkeys(kind)) for kind in zip(*words, strict=True))
    subject = [" and ".join(map(look.named, names)) for names in (models, policies) if len(names) <= 2 and all(names)]
    about = [f"{look.named(labels[0])} {panels[0].unit}" if len(labels) == 1 else "units as named"]
    differing = [place for place, names in enumerate((models, benchmarks, policies, labels)) if len(names) > 1] or [1]
    if len(benchmarks) == 1 and differing != [1]:
        about.append(look.named(benchmarks[0]))
    names = [", ".join(look.named(own[place]) for place in differing) for own in words]
    return " under ".join(subject), about, names


def _end(value: float, panel: Panel, scale: tuple[float, float]) -> str:
    """An end of a colour scale as it is printed."""
    digits = panel.digits if scale[1] - scale[0] < 4 else 0
    return style.signed(value, digits) if panel.centred else f"{value:,.{digits}f}"


def _layout(panels: Sequence[Panel], names: Sequence[str], ends: Sequence[str], one_scale: bool, look: Look) -> _Layout:
    rows, columns = (max(len(panel.map.axes[axis][1]) for panel in panels) for axis in (0, 1))
    values = [cell.text for panel in panels for cell in panel.cells.values()]
    small = [cell.small for panel in panels for cell in panel.cells.values() if cell.small] if look.intervals else []
    high = max((_ROW_OF_TWO if small else _ROW) * rows, _LOWEST)
    labels = [look.named(style.label(panel.map.axes[0][0])) for panel in panels]
    label = max(style.LEAST_TYPE, fitting(high, labels, _LABEL))
    ticks = max(text_width(str(row), _LABEL) for panel in panels for row in panel.map.axes[0][1])
    left = style.EDGE + max(len(wrapped(text, high, label)) for text in labels) * label * LINE + 0.04 + ticks + 0.06
    bar = sum(_BAR) + 0.04 + max(map(text_width, ends))
    joined = len({panel.map.axes[0] for panel in panels}) == 1
    between = _GAP + (0 if joined else left) + (0 if one_scale else bar)
    margins = Margins(left, style.EDGE + bar, between, 0, 0)

    def sizes(across: int, width: float) -> tuple[float, float]:
        """Points of values and of intervals."""
        cell = margins.inner(width, across) / columns
        return fitting(cell, values, _VALUE, True), fitting(cell, small, _INTERVAL)

    count, kinds = len(panels), len({panel.map.policy for panel in panels})
    most = 4 if count <= 8 else math.ceil(math.sqrt(count))
    # Rows that begin with the same policy, if there are several.
    whole = [number for number in range(kinds, most + 1, kinds) if count % number == 0] if kinds > 1 else []
    across = style.across(
        count, whole[-1] if whole else most, lambda number: min(sizes(number, look.widest)) >= style.LEAST_TYPE
    )
    if across == 0 and small:
        raise KvatlasError("--look intervals=true: the cells are too narrow for intervals; leave it out.")
    natural = left + margins.right + across * max(_CELL * columns, _NARROWEST) + (across - 1) * between
    width = look.width or (min(max(natural, style.WIDTHS[1]), look.widest) if across else look.widest)
    value, interval = sizes(across, width) if across else (0.0, 0.0)
    across = max(across, 1)
    inner = margins.inner(width, across)
    above = [_above(panel, name, inner, look) for panel, name in zip(panels, names, strict=True)]
    over = max(sum(line.high for line in lines) for lines in above) + 0.1
    lines = max(len(wrapped(look.named(style.label(panel.map.axes[1][0])), inner, _LABEL)) for panel in panels)
    under = 0.12 + _LABEL / 72 + lines * _LABEL * LINE
    margins = margins._replace(above=over, below=under)
    return _Layout(across, width, high, margins, joined, above, label, value, interval if small else 0.0)


def _above(panel: Panel, name: str, inner: float, look: Look) -> list[Line]:
    """The lines over a panel: its name, then n, ± and the baselines."""
    colours = look.colours
    problems = common([cell.estimate.problems for cell in panel.map.cells.values()])
    facts = [f"n {problems}"] if problems else []
    facts += [f"± {panel.half_interval:.0f}"] if panel.half_interval and look.intervals is None else []
    facts += [f"{text} ({between})" if between and look.intervals else text for text, between in panel.baselines]
    # A fact breaks only where it is wider than the panel.
    small = ", ".join(fact.replace(" ", "\u00a0") for fact in facts)
    lines = style.lines(name, inner, style.NAME_TYPE, colours.ink, "bold")
    return lines + style.lines(small, inner, style.SMALL_TYPE, colours.soft)


def _cells(axes: Axes, panel: Panel, scale: tuple[float, float], layout: _Layout, look: Look) -> None:
    """The cells in their colours with their numbers, the largest vertical value on top; missing ones are hatched.

    Best cells are bold, outlined ones have a frame.
    """
    from matplotlib.patches import Rectangle

    (_, rows), (_, columns) = panel.map.axes
    values = [[cell.value if (cell := panel.cells.get((r, c))) else np.nan for c in columns] for r in rows]
    empty, lines = look.colours.missing
    axes.patch.set(facecolor=empty, edgecolor=lines, hatch="////", linewidth=0)
    ink: dict[str, Any] = {"color": style.ON_COLOUR, "ha": "center", "va": "center"}
    for coord, cell in panel.cells.items():
        x, y = columns.index(coord[1]), rows.index(coord[0])
        if layout.value:
            weight, up = "bold" if cell.bold else "normal", 0.62 if layout.interval and cell.small else 0.5
            axes.text(x + 0.5, y + up, cell.text, fontsize=layout.value, fontweight=weight, **ink)
        if layout.interval and cell.small:
            axes.text(x + 0.5, y + 0.25, cell.small, fontsize=layout.interval, **ink)
        if coord in panel.outlined:
            frame = Rectangle((x + 0.04, y + 0.05), 0.92, 0.9, gid="framed")
            axes.add_patch(frame)
            frame.set(facecolor="none", edgecolor=style.ON_COLOUR, linewidth=1.1)
    axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=style.colour_map(panel.colours), vmin=scale[0], vmax=scale[1],
        edgecolors=look.colours.ground, linewidth=0.8, snap=True,
    )  # fmt: skip
    if sizes := panel.memory:
        levels = np.geomspace(np.min(sizes), np.max(sizes), 5)[1:-1]
        at = (np.arange(len(columns)) + 0.5, np.arange(len(rows)) + 0.5)
        axes.contour(*at, sizes, levels, colors=style.ON_COLOUR, linewidths=0.7, linestyles="dotted", alpha=0.5)


def _labels(axes: Axes, panel: Panel, layout: _Layout, look: Look) -> None:
    (vertical, rows), (horizontal, columns) = panel.map.axes
    inner = layout.margins.inner(layout.width, layout.across)
    texts = [visible(str(value)) for value in columns]
    size = max(style.LEAST_TYPE, fitting(inner / len(columns), texts, _LABEL))
    # Of columns that are narrower than their values only some are named.
    step = math.ceil(max(text_width(text, size) for text in texts) / (inner / len(columns)))
    axes.set_xticks([x + 0.5 for x in range(0, len(columns), step)], texts[::step])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [visible(str(value)) for value in rows])
    axes.tick_params(length=0, pad=3, labelsize=_LABEL)
    axes.tick_params(axis="x", labelsize=size)
    across, up = (look.named(style.label(name)) for name in (horizontal, vertical))
    axes.set_xlabel("\n".join(wrapped(across, inner, _LABEL)), labelpad=2, fontsize=_LABEL)
    axes.set_ylabel("\n".join(wrapped(up, layout.high, layout.label)), labelpad=3, fontsize=layout.label)
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)))
    axes.spines[:].set_visible(False)


def _bar(axes: Axes, panel: Panel, ends: Sequence[str], layout: _Layout) -> None:
    """Draw a colour bar right of a panel, with the numbers at its ends."""
    inner = layout.margins.inner(layout.width, layout.across)
    left = 1 + _BAR[0] / inner
    right = left + _BAR[1] / inner
    steps = np.linspace(0, 1, 129)
    axes.pcolormesh(
        [left, right], steps, steps[:-1, None], cmap=style.colour_map(panel.colours), transform=axes.transAxes,
        clip_on=False,
    )  # fmt: skip
    for y, text in enumerate(ends):
        x, place = right + 2 / 72 / inner, ("bottom", "top")[y]
        axes.text(x, y, text, transform=axes.transAxes, fontsize=style.SMALL_TYPE, va=place)
