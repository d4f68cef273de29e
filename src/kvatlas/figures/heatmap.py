"""Heatmaps for papers: the benchmarks of one model, and the means of several side by side on one scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import Cell, KvatlasError, Map
from kvatlas.figures import style
from kvatlas.results.export import csv_text, replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
#: Inches: of a cell, of what stands left, right, above and below of a panel, and the least that a panel's title needs.
_CELL = (0.48, 0.34)
_LEFT, _RIGHT, _TOP, _BOTTOM, _LINE = 0.58, 0.56, 0.30, 0.42, 0.125
_NARROWEST = 2.1
_SMALL, _TINY = 6.5, 5.2
_RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvatlas",
    "pdf.fonttype": 42,
    "text.parse_math": False,
}


def series_figure(maps: Sequence[Map], *, shared: bool = False) -> Figure:
    """One panel per map, titled `MODEL | BENCHMARK`, each with its colour bar; two in a row, or the policies in a row.

    Cells show percent and, in small type, the 95 % interval; baselines stand under the title. With `shared` all
    panels have one colour scale; otherwise each has its own, and the figure says so. Raises KvatlasError for no maps
    or maps without cells.
    """
    _check(maps)
    across = _across(maps)
    scales = [style.scale(maps if shared else [one]) for one in maps]
    notes = [] if len(set(scales)) == 1 else ["Colour scales differ between panels."]
    with look():
        figure, panels = _canvas(maps, across, notes, bars=len(maps))
        for one, panel, (low, high) in zip(maps, panels, scales, strict=True):
            image = _panel(
                panel, one, low, high, f"{style.model(one.model)} | {one.benchmark}{_policy_if_several(one, maps)}"
            )
            _bar(figure, image, panel, one)
        return figure


def means_figure(maps: Sequence[Map]) -> Figure:
    """Maps side by side on one shared colour scale with one bar, such as the means over benchmarks of two models.

    Titles are `MODEL | BENCHMARK`, with the policy where there are several. Raises KvatlasError as `series_figure`,
    and for maps of different metrics.
    """
    _check(maps)
    if len({one.metric for one in maps}) > 1:
        raise KvatlasError("Maps side by side share one colour scale, so they must show the same metric.")
    low, high = style.scale(maps)
    with look():
        figure, panels = _canvas(maps, min(len(maps), 4), [], bars=1)
        images = [
            _panel(panel, one, low, high, f"{style.model(one.model)} | {one.benchmark}{_policy_if_several(one, maps)}")
            for one, panel in zip(maps, panels, strict=True)
        ]
        _bar(figure, images[-1], panels[min(len(maps), 4) - 1], maps[0])
        return figure


def save(figure: Figure, path: Path, maps: Sequence[Map] = ()) -> list[Path]:
    """Write a figure as PNG (300 dpi), SVG (text as text) or PDF (fonts embedded) and return the paths written.

    Where `maps` are given, their data is written beside it as `NAME.data.csv`. Equal figures give equal bytes.
    Raises KvatlasError for another suffix and for a path that cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise KvatlasError(f"A figure cannot be written as {path.name!r}; the name must end in {', '.join(SUFFIXES)}.")
    dates = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    with look(), replacing(path) as part, part.open("wb") as file:
        figure.savefig(file, format=suffix[1:], dpi=300, metadata=dates)
    if not maps:
        return [path]
    data = path.with_suffix(".data.csv")
    with replacing(data) as part:
        part.write_text(csv_text(maps), "utf-8", newline="")
    return [path, data]


@contextmanager
def look() -> Iterator[None]:
    """Fonts, lines and bytes that all figures share."""
    import matplotlib as mpl

    with mpl.rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _across(maps: Sequence[Map]) -> int:
    """Panels in a row: one for each policy, if there are several; else two, which fill the width of a page."""
    policies = len({one.policy for one in maps})
    if 1 < policies <= 4 and len(maps) % policies == 0:
        return policies
    return min(len(maps), 2) if len(maps) <= 8 else math.ceil(math.sqrt(len(maps)))


def _check(maps: Sequence[Map]) -> None:
    if not maps:
        raise KvatlasError("There is no map to draw; a mean needs maps of two or more benchmarks of one model.")
    for one in maps:
        if not one.cells:
            raise KvatlasError(f"The map of {one.model} on {one.benchmark} has no cells to draw.")


def _policy_if_several(one: Map, maps: Sequence[Map]) -> str:
    return f" | {one.policy}" if len({other.policy for other in maps}) > 1 else ""


def _canvas(maps: Sequence[Map], across: int, notes: list[str], bars: int) -> tuple[Figure, list[Axes]]:
    """A figure with one set of axes per map, every cell of the same size in inches, and the notes at its foot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = math.ceil(len(maps) / across)
    columns, rows = (max(len(one.axes[axis][1]) for one in maps) for axis in (1, 0))
    wide, high = max(_CELL[0] * columns, _NARROWEST), max(_CELL[1] * rows, 0.8)
    right = _RIGHT if bars > 1 else 0.12
    under = max(len(_under(one, wide)) for one in maps)
    step = _LEFT + wide + right, _TOP + under * _LINE + high + _BOTTOM
    lines = _foot(maps, notes, across * step[0])
    foot = 0.06 + _LINE * len(lines)
    width, height = across * step[0] + (0 if bars > 1 else _RIGHT - right), down * step[1] + foot
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panels = []
    for index in range(len(maps)):
        left = index % across * step[0] + _LEFT
        bottom = height - (index // across + 1) * step[1] + _BOTTOM
        panels.append(figure.add_axes((left / width, bottom / height, wide / width, high / height)))
    for index, line in enumerate(reversed(lines)):
        strong = line.startswith("PARTIAL")
        figure.text(
            0.12 / width,
            (0.06 + index * _LINE) / height,
            line,
            fontsize=_SMALL,
            color="#a11a1a" if strong else "#444444",
            fontweight="bold" if strong else "normal",
        )
    return figure, panels


def _foot(maps: Sequence[Map], notes: list[str], inches: float) -> list[str]:
    """The lines under the panels: the maps' notes (with their names where they differ), policy, what is small type."""
    by_note: dict[str, list[str]] = {}
    for one in maps:
        for note in one.notes:
            by_note.setdefault(note, []).append(f"{style.model(one.model)} | {one.benchmark}")
    lines = [
        f"{note[0].upper()}{note[1:]}" + ("." if len(names) == len(maps) else f" ({', '.join(names)}).")
        for note, names in by_note.items()
    ]
    policies = {one.policy for one in maps} - {""}
    about = [f"Policy: {policies.pop()}."] if len(policies) == 1 else []
    about.append(f"{style.label(maps[0].metric)} in percent.")
    if any(style.interval(cell.estimate) for one in maps for cell in one.cells.values()):
        about.append("Small type: 95 % interval.")
    return _wrapped([*lines, " ".join([*about, *notes])], inches)


def _wrapped(lines: Sequence[str], inches: float) -> list[str]:
    import textwrap

    letters = max(30, int(inches * 72 / (_SMALL * 0.56)))
    return [part for line in lines for part in textwrap.wrap(line, letters)]


def _under(one: Map, inches: float) -> list[str]:
    """The baselines, in lines that fit over a panel and its colour bar."""
    unbroken = [text.replace(" ", "\u00a0") for text in style.beside(one.baselines)]
    return [line.replace("\u00a0", " ") for line in _wrapped([", ".join(unbroken)], inches + _RIGHT)]


def _panel(panel: Axes, one: Map, low: float, high: float, title: str) -> ScalarMappable:
    """Draw one map: the largest vertical value on top, missing cells hatched. Returns what a colour bar needs."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    (vertical, rows), (horizontal, columns) = one.axes
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            _cell(panel, x, y, one.cells.get((row, column)), low, high)
    panel.set_xlim(0, len(columns))
    panel.set_ylim(0, len(rows))
    panel.set_xticks([x + 0.5 for x in range(len(columns))], [str(value) for value in columns])
    panel.set_yticks([y + 0.5 for y in range(len(rows))], [str(value) for value in rows])
    panel.tick_params(length=0, pad=3, labelsize=7)
    panel.set_xlabel(style.label(horizontal), labelpad=2)
    panel.set_ylabel(style.label(vertical), labelpad=3)
    for spine in panel.spines.values():
        spine.set_visible(False)
    box, figure = panel.get_position(), panel.figure.get_figure(root=True)
    inches = box.width * figure.get_figwidth()
    under = _under(one, inches)
    size = min(9.0, (inches + _LEFT + _RIGHT) * 72 / (0.56 * len(title)))
    panel.set_title(title, fontsize=size, pad=5 + 72 * _LINE * len(under))
    above = 1 + 0.04 / (box.height * figure.get_figheight())
    panel.text(
        0.5, above, "\n".join(under), transform=panel.transAxes, fontsize=_SMALL, color="#333333",
        ha="center", va="bottom", linespacing=1.15,
    )  # fmt: skip
    colours = LinearSegmentedColormap.from_list("YlGnBu", style.YLGNBU)
    return ScalarMappable(Normalize(low, high), colours)


def _cell(panel: Axes, x: int, y: int, cell: Cell | None, low: float, high: float) -> None:
    from matplotlib.patches import Rectangle

    if cell is None:
        panel.add_patch(Rectangle((x, y), 1, 1, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="////", linewidth=0.6))
        return
    background = style.colour(100 * cell.estimate.value, low, high)
    panel.add_patch(Rectangle((x, y), 1, 1, facecolor=background, edgecolor="white", linewidth=0.6))
    ink = style.text_on(background)
    between = style.interval(cell.estimate)
    panel.text(
        x + 0.5, y + (0.62 if between else 0.5), style.percent(cell.estimate.value), fontsize=8, color=ink,
        ha="center", va="center",
    )  # fmt: skip
    if between:
        panel.text(x + 0.5, y + 0.27, between, fontsize=_TINY, color=ink, ha="center", va="center")


def _bar(figure: Figure, image: ScalarMappable, panel: Axes, one: Map) -> None:
    """A colour bar right of a panel, as high as the panel."""
    from matplotlib.ticker import MaxNLocator

    box = panel.get_position()
    width = figure.get_figwidth()
    axes = figure.add_axes((box.x1 + 0.08 / width, box.y0, 0.09 / width, box.height))
    bar = figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5, steps=[1, 2, 5, 10])
    bar.update_ticks()
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    bar.set_label(style.label(one.metric), fontsize=7.5, labelpad=3)
