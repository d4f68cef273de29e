"""Heatmaps for papers: a series of panels with a colour bar each, or panels side by side on one scale."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.look import (
    LINE_HEIGHT,
    SMALL_TYPE,
    FootLine,
    Look,
    canvas,
    fitting,
    save,
    settle,
    title,
    wrapped,
)
from kvatlas.figures.panels import SMALL, Panel, metric_panels
from kvatlas.figures.plateau import frame
from kvatlas.visible import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

__all__ = ["means_figure", "plot", "save", "series_figure"]

#: Inches: of a cell, of what stands left (but for the values' names), right, above and below of a panel.
_CELL = (0.48, 0.34)
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.36, 0.6, 0.3, 0.42
_NARROWEST, _LOWEST = 2.1, 0.8
#: Points: of an interval at most, and those below which a number or an interval is left out rather than printed.
_TINY, _UNREADABLE, _UNREADABLE_SMALL = 5.2, 3.6, 3.4
#: Square points of the mark in the corner of a cell.
_CORNER = 108
DIFFER = Note(NoteKind.SCALES, "Colour scales differ between panels.")


def series_figure(maps: Sequence[Map], *, shared: bool = False, look: Look | None = None) -> Figure:
    """One panel per map, titled `MODEL | BENCHMARK`, each with its colour bar; two in a row, or the policies in a row.

    Cells show percent and, in small type, the 95 % interval; baselines stand under the title; the plateau of a map is
    framed. With `shared` all panels have one colour scale; otherwise each has its own, and the
    figure says so. Raises KvatlasError for no maps or maps without cells.
    """
    return plot(metric_panels(maps), shared=shared, look=look)


def means_figure(maps: Sequence[Map], *, look: Look | None = None) -> Figure:
    """Maps side by side on one shared colour scale with one bar, such as the means over benchmarks of two models.

    Titles are `MODEL | BENCHMARK`, with the policy where there are several. Raises KvatlasError as `series_figure`,
    and for maps of different metrics.
    """
    return plot(metric_panels(maps), one_bar=True, look=look)


def plot(panels: Sequence[Panel], *, shared: bool = False, one_bar: bool = False, look: Look | None = None) -> Figure:
    """Panels as one figure: with `one_bar` side by side on one scale, else each with its colour bar.

    Raises KvatlasError for no panels, panels without cells, and one bar for unlike measures.
    """
    look = look or Look()
    _check(panels, one_bar)
    scales = [_scale(panels if shared or one_bar else [panel]) for panel in panels]
    with look.applied():
        layout = _layout(panels, one_bar, look)
        foot = _foot(panels, layout, len(set(scales)) > 1, look)
        figure, grid = canvas(layout.size, len(panels), layout.across, foot)
        meshes = [
            _mesh(axes, panel, scale, layout, look) for axes, panel, scale in zip(grid, panels, scales, strict=True)
        ]
        for axes, panel in zip(grid, panels, strict=True):
            _labels(axes, panel, _name(panel, panels), layout, look)
        if one_bar:
            _bar(figure, meshes[-1], grid, panels[0], layout)
        else:
            for axes, mesh, panel in zip(grid, meshes, panels, strict=True):
                _bar(figure, mesh, [axes], panel, layout)
        settle(figure)
        for axes, mesh, panel in zip(grid, meshes, panels, strict=True):
            _numbers(axes, mesh, panel, axes.get_position().width * layout.size[0], bool(layout.small))
        return figure


def _scale(panels: Sequence[Panel]) -> tuple[float, float]:
    measure = panels[0].measure
    return style.span([v.value for panel in panels for v in panel.cells.values()], measure.centred, measure.least)


def _check(panels: Sequence[Panel], one_bar: bool) -> None:
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    for panel in panels:
        if not panel.cells:
            raise KvatlasError(f"The map of {panel.model} on {panel.benchmark} has no cells to draw.")
    if one_bar and len({panel.measure.label for panel in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")


def _name(panel: Panel, panels: Sequence[Panel]) -> str:
    kinds = [(each.policy, each.measure.label) for each in panels]
    several = [len(set(values)) > 1 for values in zip(*kinds, strict=True)]
    told = [word for word, needed in zip((panel.policy, panel.measure.label), several, strict=True) if needed]
    return " | ".join((style.model(panel.model), panel.benchmark, *told))


@dataclass(frozen=True)
class _Layout:
    """Panels in a row; inches of the figure without its foot, and of a panel without and with what is around it."""

    across: int
    size: tuple[float, float]
    inner: tuple[float, float]
    step: float
    #: Points of an interval; 0 where it would be unreadable, or is not known.
    small: float
    #: Whether intervals are known and left out.
    hidden: bool


def _layout(panels: Sequence[Panel], one_bar: bool, look: Look) -> _Layout:
    rows, columns = (max(len(panel.axes[axis][1]) for panel in panels) for axis in (0, 1))
    left = _LEFT + 0.055 * max(len(str(row)) for panel in panels for row in panel.axes[0][1])
    right = 0.12 if one_bar else _RIGHT
    bar = _RIGHT - right
    across = _across(panels, left + 0.24 * columns + right, one_bar, look)
    wide = max(_CELL[0] * columns, _NARROWEST)
    if look.width is not None:
        wide = (look.width - bar) / across - left - right
    longest = max(len(shown.small) for panel in panels for shown in panel.cells.values())
    small = fitting(wide / columns, longest, _TINY) if longest else 0.0
    small = small if small >= _UNREADABLE_SMALL else 0.0
    high = max((_CELL[1] if small else 0.25) * rows, _LOWEST)
    step = left + wide + right
    names = max(title(_name(panel, panels), step)[0].count("\n") for panel in panels)
    over = names + max(len(_over(panel, step)) for panel in panels)
    down = math.ceil(len(panels) / across)
    size = (across * step + bar, down * (_TOP + over * LINE_HEIGHT + high + _BOTTOM))
    return _Layout(across, size, (wide, high), step, small, bool(longest and not small))


def _across(panels: Sequence[Panel], narrowest: float, one_bar: bool, look: Look) -> int:
    """Panels in a row: one for each policy and metric, if there are several; else two, which fill a page's width."""
    kinds = len({(panel.policy, panel.measure.label) for panel in panels})
    if look.columns == 1:
        return 1
    if one_bar:
        wanted = min(len(panels), 4)
    elif 1 < kinds <= 4 and len(panels) % kinds == 0:
        wanted = kinds
    else:
        wanted = min(len(panels), 2) if len(panels) <= 8 else math.ceil(math.sqrt(len(panels)))
    # No cell narrower than its number.
    return wanted if look.width is None else max(1, min(wanted, int(look.width / narrowest)))


def _foot(panels: Sequence[Panel], layout: _Layout, differ: bool, look: Look) -> list[FootLine]:
    """The lines under the panels: the maps' notes (with their names where they differ), policy, what is shown."""
    by_note: dict[Note, list[str]] = {}
    for panel in panels:
        for note in panel.notes:
            by_note.setdefault(note, []).append(_name(panel, panels))
    notes = []
    for note, names in by_note.items():
        whose = "." if len(names) == len(panels) else f" ({', '.join(names)})."
        notes.append(replace(note, text=f"{note.text[0].upper()}{note.text[1:]}{whose}"))
    policies = {panel.policy for panel in panels} - {""}
    about = [f"Policy: {policies.pop()}."] if len(policies) == 1 else []
    about += dict.fromkeys(
        text for panel in panels for text in panel.measure.about if not layout.hidden or text != SMALL
    )
    about += ["Intervals are in the data next to the figure."] if layout.hidden else []
    return look.foot([*notes, *([DIFFER] if differ else [])], [" ".join(about)], layout.size[0])


def _over(panel: Panel, inches: float) -> list[str]:
    """The baselines, in lines that fit over a panel and its colour bar."""
    texts = ", ".join(text.replace(" ", "\u00a0") for text in panel.baselines)
    return [line.replace("\u00a0", " ") for line in wrapped(texts, inches)]


def _mesh(axes: Axes, panel: Panel, scale: tuple[float, float], layout: _Layout, look: Look) -> QuadMesh:
    """The cells in their colours, the largest vertical value on top, on a hatched ground that missing ones show."""
    (_, rows), (_, columns) = panel.axes
    values = [[shown.value if (shown := panel.cells.get((r, c))) else np.nan for c in columns] for r in rows]
    empty, lines = ("#1b2027", "#47505a") if look.dark else ("#eeeeee", "#bbbbbb")
    axes.patch.set(facecolor=empty, edgecolor=lines, hatch="////", linewidth=0)
    frame(axes, {(columns.index(column), rows.index(row)) for row, column in panel.outlined})
    low, high = scale
    return axes.pcolormesh(
        np.ma.masked_invalid(values), cmap=panel.measure.colours, vmin=low, vmax=high, edgecolors=look.ground,
        linewidth=0.4, snap=True,
    )  # fmt: skip


def _labels(axes: Axes, panel: Panel, name: str, layout: _Layout, look: Look) -> None:
    (vertical, rows), (horizontal, columns) = panel.axes
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [visible(str(value)) for value in columns])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [visible(str(value)) for value in rows])
    axes.tick_params(length=0, pad=3, labelsize=7)
    longest = max(len(str(value)) for value in columns)
    axes.tick_params(axis="x", labelsize=max(4.0, fitting(layout.inner[0] / len(columns), longest, 7.0)))
    axes.set_xlabel(style.label(horizontal), labelpad=2)
    axes.set_ylabel(style.label(vertical), labelpad=3, fontsize=fitting(layout.inner[1], len(style.label(vertical)), 8))
    axes.spines[:].set_visible(False)
    over = _over(panel, layout.step)
    text, size = title(name, layout.step)
    axes.set_title(text, fontsize=size, pad=5 + 72 * LINE_HEIGHT * len(over))
    axes.annotate(
        "\n".join(over), (0.5, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=SMALL_TYPE,
        color=look.soft, ha="center", va="bottom", linespacing=1.15, in_layout=False,
    )  # fmt: skip


def _numbers(axes: Axes, mesh: QuadMesh, panel: Panel, inches: float, intervals: bool) -> None:
    """Values in their cells, intervals under them, and corners where policies have nothing to choose."""
    from matplotlib.colors import to_hex

    scale: Any = mesh
    (_, rows), (_, columns) = panel.axes
    printed = panel.cells.values()
    cell = inches / len(columns)
    size = fitting(cell, max(len(shown.text) for shown in printed), 8.0)
    tiny = fitting(cell, max(len(shown.small) for shown in printed), _TINY)
    for coord, shown in panel.cells.items():
        x, y = columns.index(coord[1]), rows.index(coord[0])
        ink = style.text_on(to_hex(scale.to_rgba(shown.value)))
        text: dict[str, Any] = {"color": ink, "ha": "center", "va": "center"}
        small = shown.small if intervals else ""
        if size >= _UNREADABLE:
            weight = "bold" if shown.bold else "normal"
            axes.text(x + 0.5, y + (0.62 if small else 0.5), shown.text, fontsize=size, fontweight=weight, **text)
        if small:
            axes.text(x + 0.5, y + 0.27, small, fontsize=tiny, **text)
        if coord in panel.cornered:
            # A triangle in the upper right; hollow unless in most problems.
            corner: Any = [(-0.25, -0.25), (-1.25, -0.25), (-0.25, -1.25), (-0.25, -0.25)]
            face = ink if panel.cornered[coord] > 0.5 else "none"
            axes.scatter(x + 1, y + 1, _CORNER, face, marker=corner, edgecolors=ink, linewidths=0.5, gid="no-choice")


def _bar(figure: Figure, mesh: QuadMesh, panels: Sequence[Axes], panel: Panel, layout: _Layout) -> None:
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
    bar.set_label("\n".join(textwrap.wrap(panel.measure.label, int(high * 72 / 4.1))), fontsize=7.5, labelpad=3)
