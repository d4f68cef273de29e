"""Heatmaps for papers: a series of panels with a colour bar each, or panels side by side on one scale."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.look import (
    LEAST_TYPE,
    LINE_HEIGHT,
    SMALL_TYPE,
    Foot,
    Look,
    canvas,
    fitting,
    save,
    settle,
    title,
    wrapped,
)
from kvatlas.figures.panels import NARROWEST, SMALL, Panel, Shown, metric_panels
from kvatlas.figures.plateau import frame
from kvatlas.text import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

__all__ = ["means_figure", "plot", "save", "series_figure"]

#: Inches: of a cell; of what stands left (but for the values' names), right, above and below of a panel.
_CELL = (0.48, 0.34)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.36, 0.5, 0.3, 0.42
#: Inches between panels that share a vertical axis, and right of those whose colour bar has no label.
_BETWEEN, _BAR = 0.12, 0.36
_NARROWEST, _LOWEST = 2.1, 0.8
#: Points of a value and of an interval at most.
_VALUE, _INTERVAL = 8.0, 5.2
#: How much of a cell outside of the framed ones the ground covers.
_DIMMED = 0.65
#: Square points of the mark in the corner of a cell.
_CORNER = 108
DIFFER = Note(NoteKind.SCALES, "Colour scales differ between panels.")


def series_figure(maps: Sequence[Map], *, shared: bool | None = None, look: Look | None = None) -> Figure:
    """One panel per map, titled `MODEL | BENCHMARK`, each with its colour bar; two in a row, or the policies in a row.

    Cells show percent and, in small type, the 95 % interval; baselines stand under the title; the plateau of a map is
    framed. Scales are those of `plot`. Raises KvatlasError for no maps or maps without cells.
    """
    return plot(metric_panels(maps), shared=shared, look=look)


def means_figure(maps: Sequence[Map], *, look: Look | None = None) -> Figure:
    """Maps side by side on one shared colour scale with one bar, such as the means over benchmarks of two models.

    Titles are `MODEL | BENCHMARK`, with the policy where there are several. Raises KvatlasError as `series_figure`,
    and for maps of different metrics.
    """
    return plot(metric_panels(maps), one_bar=True, look=look)


def plot(
    panels: Sequence[Panel], *, shared: bool | None = None, one_bar: bool = False, look: Look | None = None
) -> Figure:
    """Panels as one figure: with `one_bar` side by side on one scale, else each with its colour bar.

    With `shared` all panels have one colour scale, otherwise each has its own, and the figure says so. A scale is at
    least as wide as an interval on average; with `shared=False` it goes from the lowest to the highest cell. Raises
    KvatlasError for no panels, panels without cells, and one bar for unlike measures.
    """
    look = look or Look()
    _check(panels, one_bar)
    if not look.intervals:
        panels = [_without_intervals(panel) for panel in panels]
    scales = [_scale(panels if shared or one_bar else [panel], shared is False) for panel in panels]
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
            _bar(figure, meshes[-1], grid, look.named(panels[0].measure.label), layout)
        else:
            for number, (axes, mesh, panel) in enumerate(zip(grid, meshes, panels, strict=True), 1):
                last = number % layout.across == 0 or number == len(panels) or not layout.joined
                _bar(figure, mesh, [axes], look.named(panel.measure.label) if last else "", layout)
        settle(figure, look)
        for axes, mesh, panel in zip(grid, meshes, panels, strict=True):
            _numbers(axes, mesh, panel, axes.get_position().width * layout.size[0], bool(layout.small), look)
        return figure


def _without_intervals(panel: Panel) -> Panel:
    cells = {coord: replace(shown, small="") for coord, shown in panel.cells.items()}
    return replace(panel, cells=cells, baselines=tuple((text, "") for text, _ in panel.baselines))


def _scale(panels: Sequence[Panel], exact: bool) -> tuple[float, float]:
    values = [shown.value for panel in panels for shown in panel.cells.values()]
    least = NARROWEST if exact else max(panel.measure.least for panel in panels)
    return style.span(values, panels[0].measure.centred, least)


def _check(panels: Sequence[Panel], one_bar: bool) -> None:
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.model} on {panel.benchmark} has no cells to draw.")
    if one_bar and len({panel.measure.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")


def _name(panel: Panel, panels: Sequence[Panel], look: Look) -> str:
    kinds = [(panel.policy, panel.measure.label) for panel in panels]
    several = [len(set(values)) > 1 for values in zip(*kinds, strict=True)]
    told = [word for word, needed in zip((panel.policy, panel.measure.label), several, strict=True) if needed]
    return " | ".join(look.named(word) for word in (style.model(panel.model), panel.benchmark, *told))


@dataclass(frozen=True)
class _Layout:
    """Panels in a row; inches of the figure without its foot, of a panel, and of one with what is around it."""

    across: int
    size: tuple[float, float]
    inner: tuple[float, float]
    step: float
    #: Whether panels of a row share the vertical axis and the label of their bars.
    joined: bool
    #: Points of an interval; 0 where it would be unreadable, or is not known.
    small: float
    #: What is known and left out.
    hidden: str
    #: By panel, its title and points.
    titles: Sequence[tuple[str, float]]


def _layout(panels: Sequence[Panel], one_bar: bool, look: Look) -> _Layout:
    rows, columns = (max(len(panel.axes[axis][1]) for panel in panels) for axis in (0, 1))
    value, small = (_longest(panels, text) for text in (lambda shown: shown.text, lambda shown: shown.small))
    left = _LEFT + 0.055 * max(len(str(row)) for panel in panels for row in panel.axes[0][1])
    alike = len({panel.axes[0] for panel in panels}) == 1

    def margins(across: int) -> float:
        """Inches of a row that no cell takes."""
        joined = alike and across > 2
        bars = _RIGHT if one_bar else _RIGHT + (across - 1) * _BAR if joined else across * _RIGHT
        between = across - 1 if one_bar and not joined else 0
        return bars + (left + (across - 1) * _BETWEEN if joined else across * left + between * _BETWEEN)

    def fits(across: int, characters: int) -> bool:
        return fitting((look.widest - margins(across)) / across / columns, characters, _INTERVAL) >= LEAST_TYPE

    across = _across(panels, one_bar, look)
    if look.layout is None:
        # Two in a row rather than four without intervals; and no cell narrower than its number.
        if look.columns is None and across % 2 == 0 and not fits(across, small):
            across = 2
        across = next((fewer for fewer in range(across, 1, -1) if fits(fewer, value)), 1)
    natural = across * max(_CELL[0] * columns, _NARROWEST) + margins(across)
    whole = look.width or min(natural, look.widest)
    wide = (whole - margins(across)) / across
    kept = fits(across, small) if small else False
    high = max((_CELL[1] if kept else 0.25) * rows, _LOWEST)
    step = whole / across
    titles = [title(_name(panel, panels, look), step - 0.1) for panel in panels]
    over = max(text.count("\n") for text, _ in titles) + max(len(_over(panel, step, look)) for panel in panels)
    size = (whole, math.ceil(len(panels) / across) * (_TOP + over * LINE_HEIGHT + high + _BOTTOM))
    hidden = "" if kept or not small else "Intervals are"
    hidden = hidden if fits(across, value) else "Numbers are"
    points = fitting(wide / columns, small, _INTERVAL) if kept else 0.0
    return _Layout(across, size, (wide, high), step, alike and across > 2, points, hidden, titles)


def _longest(panels: Sequence[Panel], text: Callable[[Shown], str]) -> int:
    return max(len(text(shown)) for panel in panels for shown in panel.cells.values())


def _across(panels: Sequence[Panel], one_bar: bool, look: Look) -> int:
    """Panels in a row: one for each policy and metric, if there are several; else two, which fill a page's width."""
    kinds = len({(panel.policy, panel.measure.label) for panel in panels})
    if look.columns == 1:
        wanted = 1
    elif one_bar:
        wanted = min(len(panels), 4)
    elif 1 < kinds <= 4 and len(panels) % kinds == 0:
        wanted = kinds
    else:
        wanted = min(len(panels), 2) if len(panels) <= 8 else math.ceil(math.sqrt(len(panels)))
    return look.across(len(panels), wanted)


def _foot(panels: Sequence[Panel], layout: _Layout, differ: bool, look: Look) -> Foot:
    """The lines under the panels: the maps' notes (with their names where they differ), policy, what is shown."""
    by_note: dict[Note, list[str]] = {}
    for panel in panels:
        for note in panel.notes:
            by_note.setdefault(note, []).append(_name(panel, panels, look))
    notes = []
    for note, names in by_note.items():
        whose = "." if len(names) == len(panels) else f" ({', '.join(names)})."
        # A parameter's name stays as it is written.
        first = note.text[0] if "=" in note.text.split()[0] else note.text[0].upper()
        notes.append(replace(note, text=f"{first}{note.text[1:]}{whose}"))
    policies = {panel.policy for panel in panels} - {""}
    about = [f"Policy: {look.named(policies.pop())}."] if len(policies) == 1 else []
    about += dict.fromkeys(text for panel in panels for text in panel.measure.about if layout.small or text != SMALL)
    about += [f"{layout.hidden} in the data next to the figure."] if layout.hidden else []
    return look.foot([*notes, *([DIFFER] if differ else [])], [" ".join(about)], layout.size[0])


def _over(panel: Panel, inches: float, look: Look) -> list[str]:
    """The baselines, in lines that fit over a panel and its colour bar."""
    texts = [f"{text} ({between})" if between else text for text, between in panel.baselines]
    lines = wrapped(", ".join(text.replace(" ", "\u00a0") for text in texts), inches)
    return [line.replace("\u00a0", " ") for line in lines]


def _mesh(axes: Axes, panel: Panel, scale: tuple[float, float], look: Look) -> QuadMesh:
    """The cells in their colours, the largest vertical value on top, on a hatched ground that missing ones show.

    Where some cells are framed, the others are dimmed.
    """
    from matplotlib.patches import Rectangle

    (_, rows), (_, columns) = panel.axes
    values = [[shown.value if (shown := panel.cells.get((r, c))) else np.nan for c in columns] for r in rows]
    empty, lines = ("#1b2027", "#47505a") if look.dark else ("#eeeeee", "#bbbbbb")
    axes.patch.set(facecolor=empty, edgecolor=lines, hatch="////", linewidth=0)
    frame(axes, {(columns.index(column), rows.index(row)) for row, column in panel.outlined})
    for row, column in panel.cells if panel.outlined else ():
        if (row, column) not in panel.outlined:
            position = columns.index(column), rows.index(row)
            axes.add_patch(
                Rectangle(position, 1, 1, facecolor=look.ground, alpha=_DIMMED, linewidth=0, zorder=1.5, gid="dimmed")
            )
    low, high = scale
    return axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=panel.measure.colours, vmin=low, vmax=high, edgecolors=look.ground,
        linewidth=0.4, snap=True,
    )  # fmt: skip


def _labels(axes: Axes, panel: Panel, name: tuple[str, float], layout: _Layout, look: Look) -> None:
    (vertical, rows), (horizontal, columns) = panel.axes
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
    over = _over(panel, layout.step, look)
    axes.set_title(name[0], fontsize=name[1], pad=5 + 72 * LINE_HEIGHT * len(over))
    axes.annotate(
        "\n".join(over), (0.5, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=SMALL_TYPE,
        color=look.soft, ha="center", va="bottom", linespacing=1.15, in_layout=False,
    )  # fmt: skip


def _numbers(axes: Axes, mesh: QuadMesh, panel: Panel, inches: float, intervals: bool, look: Look) -> None:
    """Values in their cells, intervals under them, and corners where policies have nothing to choose."""
    from matplotlib.colors import to_hex, to_rgb

    scale: Any = mesh
    (_, rows), (_, columns) = panel.axes
    cell = inches / len(columns)
    size = fitting(cell, _longest([panel], lambda shown: shown.text), _VALUE)
    tiny = max(LEAST_TYPE, fitting(cell, _longest([panel], lambda shown: shown.small), _INTERVAL))
    for coord, shown in panel.cells.items():
        x, y = columns.index(coord[1]), rows.index(coord[0])
        colour: Any = np.asarray(scale.to_rgba(shown.value)[:3])
        if panel.outlined and coord not in panel.outlined:
            colour = (1 - _DIMMED) * colour + _DIMMED * np.asarray(to_rgb(look.ground))
        ink = style.text_on(to_hex(colour))
        text: dict[str, Any] = {"color": ink, "ha": "center", "va": "center"}
        small = shown.small if intervals else ""
        if size >= LEAST_TYPE:
            weight = "bold" if shown.bold else "normal"
            axes.text(x + 0.5, y + (0.62 if small else 0.5), shown.text, fontsize=size, fontweight=weight, **text)
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
    """A colour bar right of the panels, as high as all of them together."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    wide, high = layout.inner
    bar = figure.colorbar(
        mesh, ax=panels, fraction=0.09 / wide / len(panels), pad=0.07 / wide / len(panels), aspect=None,
        # Ticks as they are: an offset over the bar is read by nobody and takes the panel's room.
        ticks=MaxNLocator(5, steps=[1, 2, 5, 10]), format=ScalarFormatter(useOffset=False),
    )  # fmt: skip
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    bar.set_label("\n".join(textwrap.wrap(label, int(high * 72 / 4.1))), fontsize=7.5, labelpad=3)
