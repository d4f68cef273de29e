"""Heatmaps for papers: a series of panels with a colour bar each, or panels side by side on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.core import CellCoord, KvatlasError, Map, Note
from kvatlas.figures import style
from kvatlas.figures.look import FootLine, Look, save
from kvatlas.figures.panels import SMALL, Panel, Shown, metric_panels
from kvatlas.figures.plateau import frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

__all__ = ["draw", "means_figure", "save", "series_figure"]

#: Inches: of a cell, of what stands left, right, above and below of a panel, and the least that a panel's title needs.
_CELL = (0.48, 0.34)
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 0.58, 0.58, 0.30, 0.42, 0.125
_NARROWEST = 2.1
_SMALL, _TINY = 6.5, 5.2
#: Inches of the mark in the corner of a cell.
_CORNER = 0.06
#: Points below which a number or an interval is left out rather than printed.
_UNREADABLE, _UNREADABLE_SMALL = 3.6, 3.4
DIFFER = "Colour scales differ between panels."


def series_figure(
    maps: Sequence[Map],
    *,
    shared: bool = False,
    look: Look | None = None,
) -> Figure:
    """One panel per map, titled `MODEL | BENCHMARK`, each with its colour bar; two in a row, or the policies in a row.

    Cells show percent and, in small type, the 95 % interval; baselines stand under the title; the plateau of a map is
    framed. With `shared` all panels have one colour scale; otherwise each has its own, and the
    figure says so. Raises KvatlasError for no maps or maps without cells.
    """
    return draw(metric_panels(maps), shared=shared, look=look)


def means_figure(
    maps: Sequence[Map],
    *,
    look: Look | None = None,
) -> Figure:
    """Maps side by side on one shared colour scale with one bar, such as the means over benchmarks of two models.

    Titles are `MODEL | BENCHMARK`, with the policy where there are several. Raises KvatlasError as `series_figure`,
    and for maps of different metrics.
    """
    return draw(metric_panels(maps), one_bar=True, look=look)


def draw(panels: Sequence[Panel], *, shared: bool = False, one_bar: bool = False, look: Look | None = None) -> Figure:
    """Panels as one figure: with `one_bar` side by side on one scale, else each with its colour bar.

    Raises KvatlasError for no panels, panels without cells, and one bar for unlike measures.
    """
    look = look or Look()
    _check(panels)
    if one_bar and len({one.measure.label for one in panels}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    everything = _scale(panels)
    scales = [everything if shared or one_bar else _scale([one]) for one in panels]
    notes = [] if len(set(scales)) == 1 else [DIFFER]
    with look.applied():
        layout = _layout(panels, notes, one_bar, look)
        figure, axes = _canvas(panels, layout, look)
        images = [
            _panel(on, one, scale, _title(one, panels), layout, look)
            for one, on, scale in zip(panels, axes, scales, strict=True)
        ]
        if one_bar:
            _bar(figure, images[-1], axes, panels[0])
        else:
            for one, on, image in zip(panels, axes, images, strict=True):
                _bar(figure, image, [on], one)
        return figure


def _scale(panels: Sequence[Panel]) -> tuple[float, float]:
    measure = panels[0].measure
    return style.span([v.value for one in panels for v in one.cells.values()], measure.centred, measure.least)


def _check(panels: Sequence[Panel]) -> None:
    if not panels:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    for one in panels:
        if not one.cells:
            raise KvatlasError(f"The map of {one.model} on {one.benchmark} has no cells to draw.")


def _title(one: Panel, panels: Sequence[Panel]) -> str:
    several = len({other.policy for other in panels}) > 1
    return f"{style.model(one.model)} | {one.benchmark}" + (f" | {one.policy}" if several else "")


@dataclass(frozen=True)
class _Layout:
    """Inches and points: panels `across` and `down`, the size of a cell and of the panels, sizes of text."""

    across: int
    down: int
    cell: tuple[float, float]
    inner: tuple[float, float]
    right: float
    under: int
    foot: tuple[FootLine, ...]
    value: float
    small: float
    one_bar: bool


def _layout(panels: Sequence[Panel], notes: Sequence[str], one_bar: bool, look: Look) -> _Layout:
    columns, rows = (max(len(one.axes[axis][1]) for one in panels) for axis in (1, 0))
    right = 0.12 if one_bar else _RIGHT
    across = _across(panels, columns, one_bar, look)
    if look.width is None:
        wide = max(_CELL[0] * columns, _NARROWEST)
    else:
        free = look.width - (_RIGHT - right if one_bar else 0)
        wide = free / across - _LEFT - right
    texts = [shown for one in panels for shown in one.cells.values()]
    value = min(8.0, _fitting(wide / columns, max(len(shown.text) for shown in texts)))
    longest = max(len(shown.small) for shown in texts)
    small = min(_TINY, _fitting(wide / columns, longest)) if longest else 0.0
    small = small if small >= _UNREADABLE_SMALL else 0.0
    if longest and not small:
        notes = [*notes, "Intervals are in the data beside the figure."]
    high = max((_CELL[1] if small else 0.25) * rows, 0.8)
    foot = _foot(panels, notes, look.width or across * (_LEFT + wide + right), bool(small))
    return _Layout(
        across=across,
        down=math.ceil(len(panels) / across),
        cell=(wide / columns, high / rows),
        inner=(wide, high),
        right=right,
        under=max(len(_under(one, wide)) for one in panels),
        foot=tuple(foot),
        value=value if value >= _UNREADABLE else 0.0,
        small=small,
        one_bar=one_bar,
    )


def _fitting(inches: float, letters: int) -> float:
    """The size in points at which so many letters fit into a cell."""
    return (inches * 72 - 2) / (0.6 * max(letters, 1))


def _across(panels: Sequence[Panel], columns: int, one_bar: bool, look: Look) -> int:
    """Panels in a row: one for each policy, if there are several; else two, which fill the width of a page."""
    policies = len({one.policy for one in panels})
    if look.columns == 1:
        return 1
    if one_bar:
        wanted = min(len(panels), 4)
    elif 1 < policies <= 4 and len(panels) % policies == 0:
        wanted = policies
    else:
        wanted = min(len(panels), 2) if len(panels) <= 8 else math.ceil(math.sqrt(len(panels)))
    if look.width is None:
        return wanted
    # No cell narrower than its number.
    return max(1, min(wanted, int(look.width / (_LEFT + 0.24 * columns + (0.12 if one_bar else _RIGHT)))))


def _canvas(panels: Sequence[Panel], layout: _Layout, look: Look) -> tuple[Figure, list[Axes]]:
    """A figure with one set of axes per panel, every cell of the same size in inches, and the notes at its foot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide, high = layout.inner
    step = _LEFT + wide + layout.right, _TOP + layout.under * _LINE + high + _BOTTOM
    foot = 0.06 + _LINE * len(layout.foot)
    width = layout.across * step[0] + (_RIGHT - layout.right if layout.one_bar else 0)
    height = layout.down * step[1] + foot
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = []
    for index in range(len(panels)):
        left = index % layout.across * step[0] + _LEFT
        bottom = height - (index // layout.across + 1) * step[1] + _BOTTOM
        axes.append(figure.add_axes((left / width, bottom / height, wide / width, high / height)))
    for index, line in enumerate(reversed(layout.foot)):
        figure.text(
            0.12 / width,
            (0.06 + index * _LINE) / height,
            line.text,
            fontsize=_SMALL,
            color=look.warning if line.warning or line.text == DIFFER else look.soft,
            fontweight="bold" if line.warning else "normal",
        )
    return figure, axes


def _foot(panels: Sequence[Panel], notes: Sequence[str], inches: float, small: bool) -> list[FootLine]:
    """The lines under the panels: the maps' notes (with their names where they differ), policy, what is shown."""
    by_note: dict[Note, list[str]] = {}
    for one in panels:
        for note in one.notes:
            by_note.setdefault(note, []).append(_title(one, panels))
    lines = []
    for note, names in by_note.items():
        whose = "." if len(names) == len(panels) else f" ({', '.join(names)})."
        first, *more = _wrapped([f"{note.text[0].upper()}{note.text[1:]}{whose}"], inches)
        lines += [FootLine(first, note.is_warning), *map(FootLine, more)]
    policies = {one.policy for one in panels} - {""}
    about = [f"Policy: {policies.pop()}."] if len(policies) == 1 else []
    about += dict.fromkeys(text for one in panels for text in one.measure.about if small or text != SMALL)
    return [*lines, *map(FootLine, _wrapped([" ".join(about), *notes], inches))]


def _wrapped(lines: Sequence[str], inches: float) -> list[str]:
    import textwrap

    letters = max(30, int((inches - 0.2) * 72 / (_SMALL * 0.53)))
    whole = [line.replace(" %", "\u00a0%") for line in lines]
    return [part.replace("\u00a0", " ") for line in whole for part in textwrap.wrap(line, letters)]


def _under(one: Panel, inches: float) -> list[str]:
    """What stands beside the grid, in lines that fit over a panel and its colour bar."""
    return _wrapped([", ".join(text.replace(" ", "\u00a0") for text in one.beside)], inches + _RIGHT)


def _panel(
    axes: Axes, one: Panel, scale: tuple[float, float], title: str, layout: _Layout, look: Look
) -> ScalarMappable:
    """Draw one panel: the largest vertical value on top, missing cells hatched. Returns what a colour bar needs."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    (vertical, rows), (horizontal, columns) = one.axes
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            _cell(axes, x, y, one.cells.get((row, column)), one, scale, layout, look)
            if (row, column) in one.cornered and (row, column) in one.cells:
                _corner(axes, x, y, one, (row, column), scale, layout)
    frame(axes, {(columns.index(column), rows.index(row)) for row, column in one.outlined})
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, len(rows))
    axes.set_xticks([x + 0.5 for x in range(len(columns))], [str(value) for value in columns])
    axes.set_yticks([y + 0.5 for y in range(len(rows))], [str(value) for value in rows])
    labels = max(len(str(value)) for value in columns)
    axes.tick_params(length=0, pad=3, labelsize=7)
    axes.tick_params(axis="x", labelsize=max(4.0, min(7.0, _fitting(layout.cell[0], labels))))
    axes.set_xlabel(style.label(horizontal), labelpad=2)
    axes.set_ylabel(style.label(vertical), labelpad=3)
    for spine in axes.spines.values():
        spine.set_visible(False)
    wide, high = layout.inner
    under = _under(one, wide)
    size = min(9.0, (wide + _LEFT + layout.right) * 72 / (0.58 * len(title)))
    axes.set_title(title, fontsize=size, pad=5 + 72 * _LINE * len(under))
    axes.text(
        0.5, 1 + 0.04 / high, "\n".join(under), transform=axes.transAxes, fontsize=_SMALL, color=look.soft,
        ha="center", va="bottom", linespacing=1.15,
    )  # fmt: skip
    colours = LinearSegmentedColormap.from_list("kvatlas", one.measure.colours)
    return ScalarMappable(Normalize(*scale), colours)


def _cell(
    axes: Axes, x: int, y: int, shown: Shown | None, one: Panel, scale: tuple[float, float], layout: _Layout, look: Look
) -> None:
    from matplotlib.patches import Rectangle

    if shown is None:
        empty, lines = ("#1b2027", "#47505a") if look.dark else ("#eeeeee", "#bbbbbb")
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=empty, edgecolor=lines, hatch="////", linewidth=0.6))
        return
    background = style.colour(shown.value, *scale, one.measure.colours)
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=background, edgecolor=look.ground, linewidth=0.6))
    ink = style.text_on(background)
    weight = "bold" if shown.bold else "normal"
    small = shown.small if layout.small else ""
    if layout.value:
        axes.text(
            x + 0.5, y + (0.62 if small else 0.5), shown.text, fontsize=layout.value, color=ink, fontweight=weight,
            ha="center", va="center",
        )  # fmt: skip
    if small:
        axes.text(x + 0.5, y + 0.27, small, fontsize=layout.small, color=ink, ha="center", va="center")


def _corner(
    axes: Axes, x: int, y: int, one: Panel, place: CellCoord, scale: tuple[float, float], layout: _Layout
) -> None:
    """A triangle in the upper right of a cell where policies have nothing to choose; hollow unless in most problems."""
    from matplotlib.patches import Polygon

    ink = style.text_on(style.colour(one.cells[place].value, *scale, one.measure.colours))
    across, down = (_CORNER / inches for inches in layout.cell)
    right, top = x + 1 - across / 4, y + 1 - down / 4
    points = [(right - across, top), (right, top), (right, top - down)]
    face = ink if one.cornered[place] > 0.5 else "none"
    corner = Polygon(points, closed=True, facecolor=face, edgecolor=ink, linewidth=0.5)
    corner.set_gid("no-choice")
    axes.add_patch(corner)


def _bar(figure: Figure, image: ScalarMappable, panels: Sequence[Axes], one: Panel) -> None:
    """A colour bar right of the panels, as high as all of them together."""
    from matplotlib.ticker import MaxNLocator

    boxes = [panel.get_position() for panel in panels]
    right, bottom, top = max(box.x1 for box in boxes), min(box.y0 for box in boxes), max(box.y1 for box in boxes)
    width = figure.get_figwidth()
    axes = figure.add_axes((right + 0.08 / width, bottom, 0.09 / width, top - bottom))
    bar = figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5, steps=[1, 2, 5, 10])
    bar.update_ticks()
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    points = (top - bottom) * figure.get_figheight() * 72
    bar.set_label(one.measure.label, fontsize=min(7.5, points / (0.6 * len(one.measure.label))), labelpad=3)
