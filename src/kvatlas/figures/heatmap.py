"""Heatmaps for papers: a series of panels with a colour bar each, or panels side by side on one scale."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.panels import NARROWEST, SMALL, Panel, metric_panels
from kvatlas.figures.style import (
    LEAST_TYPE,
    LINE_HEIGHT,
    SMALL_TYPE,
    Foot,
    Look,
    canvas,
    colour_bar,
    fitting,
    settle,
    title,
    wrapped,
)
from kvatlas.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

#: Inches: of a cell; of the margins left (but for the values' names), right, above and below of a panel.
_CELL = (0.48, 0.34)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.36, 0.5, 0.3, 0.42
#: Inches between panels that share a vertical axis, and right of those whose colour bar has no label.
_BETWEEN, _BAR = 0.12, 0.36
_NARROWEST, _LOWEST = 2.1, 0.8
#: Points of a value and of an interval at most.
_VALUE, _INTERVAL = 8.0, 5.2
#: The share of a cell outside of the framed ones that the ground covers.
_DIMMED = 0.65
#: Square points of the mark in the corner of a cell.
_CORNER = 108
DIFFER = Note(NoteKind.SCALES, "Colour scales differ between panels.")


def map_figure(
    maps: Sequence[Map], *, one_bar: bool = False, shared: bool | None = None, look: Look | None = None
) -> Figure:
    """Maps of a metric as one figure (see `plot`): percent, 95 % intervals, baselines, and a frame."""
    return plot(metric_panels(maps), one_bar=one_bar, shared=shared, look=look)


def plot(
    panels: Sequence[Panel], *, shared: bool | None = None, one_bar: bool = False, look: Look | None = None
) -> Figure:
    """Panels as one figure: with `one_bar` side by side on one scale, else each with its colour bar.

    Titles are `MODEL | BENCHMARK`, with the policy where there are several. With `shared` all panels have one colour
    scale, otherwise each has its own, and the figure says so. A scale is at least as wide as an interval on average;
    with `shared=False` it goes from the lowest to the highest cell. Raises KvatlasError for no panels, panels without
    cells, and one bar for unlike measures.
    """
    look = look or Look()
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    if one_bar and len({panel.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.map.model} on {panel.map.benchmark} has no cells to draw.")
    if not look.intervals:
        panels = [panel.without_intervals() for panel in panels]
    scales = []
    for panel in panels:
        sharing = panels if shared or one_bar else [panel]
        least = NARROWEST if shared is False else max(other.least for other in sharing)
        values = [cell.value for other in sharing for cell in other.cells.values()]
        scales.append(style.span(values, panel.centred, least))
    with look.applied():
        layout = _layout(panels, one_bar, look)
        foot = _foot(panels, layout, len(set(scales)) > 1, look)
        figure, grid = canvas(layout.size, len(panels), layout.across, foot)
        meshes = [_mesh(axes, panel, scale, look) for axes, panel, scale in zip(grid, panels, scales, strict=True)]
        for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            _labels(axes, panel, layout.titles[number], layout, look)
            if layout.joined and number % layout.across:
                axes.set_ylabel("")
                axes.set_yticks([])
        if one_bar:
            _bar(figure, meshes[-1], grid, look.named(panels[0].label), layout)
        else:
            for number, (axes, mesh, panel) in enumerate(zip(grid, meshes, panels, strict=True), 1):
                last = number % layout.across == 0 or number == len(panels) or not layout.joined
                _bar(figure, mesh, [axes], look.named(panel.label) if last else "", layout)
        settle(figure, look)
        for axes, mesh, panel in zip(grid, meshes, panels, strict=True):
            _numbers(axes, mesh, panel, axes.get_position().width * layout.size[0], layout.intervals, look)
        return figure


def _name(panel: Panel, panels: Sequence[Panel], look: Look) -> str:
    words = [style.model(panel.map.model), panel.map.benchmark]
    words += [panel.map.policy] if len({other.map.policy for other in panels}) > 1 else []
    words += [panel.label] if len({other.label for other in panels}) > 1 else []
    return " | ".join(map(look.named, words))


class _Layout(NamedTuple):
    """Panels in a row; inches of the figure without its foot, and of a panel without its margins.

    Panels of a row are `joined` if they share the vertical axis and the label of their bars. `hidden` begins a sentence
    about numbers that are known and too small to print. `titles` are texts with their points.
    """

    across: int
    size: tuple[float, float]
    inner: tuple[float, float]
    joined: bool
    intervals: bool
    hidden: str
    titles: Sequence[tuple[str, float]]


def _layout(panels: Sequence[Panel], one_bar: bool, look: Look) -> _Layout:
    count, kinds = len(panels), len({(panel.map.policy, panel.label) for panel in panels})
    rows, columns = (max(len(panel.map.axes[axis][1]) for panel in panels) for axis in (0, 1))
    value, small = _longest(panels)
    left = _LEFT + 0.055 * max(len(str(row)) for panel in panels for row in panel.map.axes[0][1])
    alike = len({panel.map.axes[0] for panel in panels}) == 1

    def margins(across: int) -> float:
        """Inches of a row that no cell takes."""
        if alike and across > 2:
            bars = 0 if one_bar else (across - 1) * _BAR
            return left + (across - 1) * _BETWEEN + bars + _RIGHT
        return across * left + ((across - 1) * _BETWEEN + _RIGHT if one_bar else across * _RIGHT)

    def fits(across: int, characters: int) -> bool:
        return fitting((look.widest - margins(across)) / across / columns, characters, _INTERVAL) >= LEAST_TYPE

    # One for each policy and metric, if there are several; else two, which fill a page's width.
    usual = min(count, 2) if count <= 8 else math.ceil(math.sqrt(count))
    if look.columns == 1:
        usual = 1
    elif one_bar:
        usual = min(count, 4)
    elif 1 < kinds <= 4 and count % kinds == 0:
        usual = kinds
    across = look.across(count, usual)
    if look.layout is None:
        # Two in a row rather than four without intervals; and no cell narrower than its number.
        if look.columns is None and across % 2 == 0 and not fits(across, small):
            across = 2
        across = next((fewer for fewer in range(across, 1, -1) if fits(fewer, value)), 1)
    whole = look.width or min(across * max(_CELL[0] * columns, _NARROWEST) + margins(across), look.widest)
    intervals = bool(small) and fits(across, small)
    high = max((_CELL[1] if intervals else 0.25) * rows, _LOWEST)
    titles = [title(_name(panel, panels, look), whole / across - 0.1) for panel in panels]
    over = max(text.count("\n") for text, _ in titles) + max(len(_over(panel, whole / across)) for panel in panels)
    size = (whole, math.ceil(count / across) * (_TOP + over * LINE_HEIGHT + high + _BOTTOM))
    hidden = "Numbers are" if not fits(across, value) else "Intervals are" if small and not intervals else ""
    inner = ((whole - margins(across)) / across, high)
    return _Layout(across, size, inner, alike and across > 2, intervals, hidden, titles)


def _longest(panels: Sequence[Panel]) -> tuple[int, int]:
    """Characters of the longest value and of the longest interval."""
    cells = [cell for panel in panels for cell in panel.cells.values()]
    return max(len(cell.text) for cell in cells), max(len(cell.small) for cell in cells)


def _foot(panels: Sequence[Panel], layout: _Layout, differ: bool, look: Look) -> Foot:
    """The lines under the panels: the maps' notes (with their names where they differ), policy, and sentences."""
    by_note: dict[Note, list[str]] = {}
    for panel in panels:
        for note in panel.notes:
            by_note.setdefault(note, []).append(_name(panel, panels, look))
    notes = []
    for note, names in by_note.items():
        maps = "." if len(names) == len(panels) else f" ({', '.join(names)})."
        # A parameter's name stays as it is written.
        first = note.text[0] if "=" in note.text.split()[0] else note.text[0].upper()
        notes.append(replace(note, text=f"{first}{note.text[1:]}{maps}"))
    policies = {panel.map.policy for panel in panels} - {""}
    about = [f"Policy: {look.named(policies.pop())}."] if len(policies) == 1 else []
    about += dict.fromkeys(text for panel in panels for text in panel.about if layout.intervals or text != SMALL)
    about += [f"{layout.hidden} in the data next to the figure."] if layout.hidden else []
    return look.foot([*notes, *([DIFFER] if differ else [])], [" ".join(about)], layout.size[0])


def _over(panel: Panel, inches: float) -> list[str]:
    """The baselines, in lines that fit over a panel and its colour bar."""
    texts = [f"{text} ({between})" if between else text for text, between in panel.baselines]
    lines = wrapped(", ".join(text.replace(" ", "\u00a0") for text in texts), inches)
    return [line.replace("\u00a0", " ") for line in lines]


def _mesh(axes: Axes, panel: Panel, scale: tuple[float, float], look: Look) -> QuadMesh:
    """The cells in their colours, the largest vertical value on top, on a hatched ground that missing ones show.

    Where some cells are framed, the others are dimmed.
    """
    from matplotlib.patches import Rectangle

    (_, rows), (_, columns) = panel.map.axes
    values = [[cell.value if (cell := panel.cells.get((r, c))) else np.nan for c in columns] for r in rows]
    empty, lines = look.colours.missing
    axes.patch.set(facecolor=empty, edgecolor=lines, hatch="////", linewidth=0)
    frame(axes, {(columns.index(column), rows.index(row)) for row, column in panel.outlined})
    dim: dict[str, Any] = {"facecolor": look.colours.ground, "alpha": _DIMMED, "linewidth": 0, "zorder": 1.5}
    for row, column in panel.cells if panel.outlined else ():
        if (row, column) not in panel.outlined:
            axes.add_patch(Rectangle((columns.index(column), rows.index(row)), 1, 1, gid="dimmed", **dim))
    return axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=panel.colours, vmin=scale[0], vmax=scale[1],
        edgecolors=look.colours.ground, linewidth=0.4, snap=True,
    )  # fmt: skip


def border(cells: Collection[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The outer border of cells (x, y) of size 1: its sides as segments, without those around holes."""
    from scipy.ndimage import binary_fill_holes

    size = max((max(cell) for cell in cells), default=0) + 3
    inside = np.zeros((size, size), bool)
    for x, y in cells:
        inside[x + 1, y + 1] = True
    inside = np.asarray(binary_fill_holes(inside), bool)
    upright = [((x, y - 1), (x, y)) for x, y in np.argwhere(np.diff(inside, axis=0)).tolist()]
    return upright + [((x - 1, y), (x, y)) for x, y in np.argwhere(np.diff(inside, axis=1)).tolist()]


def frame(axes: Axes, cells: Collection[tuple[int, int]]) -> None:
    """The border of cells: a dark line in a light one, so that one of them stands out on any colour."""
    from matplotlib.collections import LineCollection

    for colour, width in (("#ffffff", 2.6), ("#111111", 1.3)) if cells else ():
        lines = LineCollection(border(cells), colors=colour, linewidths=width, capstyle="projecting", clip_on=False)
        lines.set(gid="plateau", zorder=2)
        axes.add_collection(lines, autolim=False)


def _labels(axes: Axes, panel: Panel, name: tuple[str, float], layout: _Layout, look: Look) -> None:
    (vertical, rows), (horizontal, columns) = panel.map.axes
    width = layout.inner[0] / len(columns)
    size = fitting(width, max(len(str(value)) for value in columns), 7.0)
    # Turned, a value is as wide as its type is high; of narrower columns only some are named.
    step = 1 if size >= LEAST_TYPE else math.ceil(1.2 * LEAST_TYPE / 72 / width)
    named = range(0, len(columns), step)
    axes.set_xticks([x + 0.5 for x in named], [visible(str(columns[x])) for x in named])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [visible(str(value)) for value in rows])
    axes.tick_params(length=0, pad=3, labelsize=7)
    axes.tick_params(axis="x", labelsize=max(LEAST_TYPE, size), labelrotation=0 if size >= LEAST_TYPE else 90)
    across, up = (look.named(style.label(name)) for name in (horizontal, vertical))
    axes.set_xlabel(across, labelpad=2)
    axes.set_ylabel(up, labelpad=3, fontsize=max(LEAST_TYPE, fitting(layout.inner[1], len(up), 8)))
    axes.spines[:].set_visible(False)
    over = _over(panel, layout.size[0] / layout.across)
    axes.set_title(name[0], fontsize=name[1], pad=5 + 72 * LINE_HEIGHT * len(over))
    axes.annotate(
        "\n".join(over), (0.5, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=SMALL_TYPE,
        color=look.colours.soft, ha="center", va="bottom", linespacing=1.15, in_layout=False,
    )  # fmt: skip


def _numbers(axes: Axes, mesh: QuadMesh, panel: Panel, inches: float, intervals: bool, look: Look) -> None:
    """Values in their cells, intervals under them, and corners where policies have nothing to choose."""
    from matplotlib.colors import to_hex, to_rgb

    scale: Any = mesh
    (_, rows), (_, columns) = panel.map.axes
    longest = _longest([panel])
    size = fitting(inches / len(columns), longest[0], _VALUE)
    tiny = max(LEAST_TYPE, fitting(inches / len(columns), longest[1], _INTERVAL))
    for coord, cell in panel.cells.items():
        x, y = columns.index(coord[1]), rows.index(coord[0])
        colour: Any = np.asarray(scale.to_rgba(cell.value)[:3])
        if panel.outlined and coord not in panel.outlined:
            colour = (1 - _DIMMED) * colour + _DIMMED * np.asarray(to_rgb(look.colours.ground))
        ink = style.text_on(to_hex(colour))
        text: dict[str, Any] = {"color": ink, "ha": "center", "va": "center"}
        small = cell.small if intervals else ""
        if size >= LEAST_TYPE:
            weight = "bold" if cell.bold else "normal"
            axes.text(x + 0.5, y + (0.62 if small else 0.5), cell.text, fontsize=size, fontweight=weight, **text)
        if small:
            axes.text(x + 0.5, y + 0.27, small, fontsize=tiny, **text)
        if coord in panel.cornered:
            # A triangle in the upper right; hollow unless in most problems.
            corner: Any = [(-0.25, -0.25), (-1.25, -0.25), (-0.25, -1.25), (-0.25, -0.25)]
            face = ink if panel.cornered[coord] > 0.5 else "none"
            axes.scatter(
                x + 1, y + 1, _CORNER, face, marker=corner, edgecolors=ink, linewidths=0.5, zorder=2, gid="no-choice"
            )


def _bar(figure: Figure, mesh: QuadMesh, panels: Sequence[Axes], label: str, layout: _Layout) -> None:
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    wide = layout.inner[0] * len(panels)
    lines = "\n".join(textwrap.wrap(label, int(layout.inner[1] * 72 / 4.1)))
    # Ticks as they are: an offset over the bar is easily missed and takes the panel's room.
    ticks: dict[str, Any] = {"ticks": MaxNLocator(5, steps=[1, 2, 5, 10]), "format": ScalarFormatter(useOffset=False)}
    colour_bar(figure, mesh, panels, lines, 7.5, fraction=0.09 / wide, pad=0.07 / wide, **ticks)
