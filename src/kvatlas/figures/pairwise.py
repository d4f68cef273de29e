"""Pairwise maps: one panel for every two systems, a dot for every problem, densities, and the numbers beside.

After the pairwise figure of seqBench (arXiv 2509.16866): axes 0 to 1, filled viridis densities, a dashed line y = x.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvatlas.core import SERVED, KvatlasError, Note
from kvatlas.figures import style
from kvatlas.figures.look import FootLine, Look, save
from kvatlas.stats.pairs.pairwise import Correlation, Floats, Pair
from kvatlas.stats.pairs.systems import System

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

MOST_PANELS = 28
#: Inches: a panel's side, what stands left, right (the numbers), above and below of it, and the colour bar's strip.
_SIDE, _LEFT, _RIGHT, _TOP, _BOTTOM, _BAR = 2.15, 0.52, 1.36, 0.34, 0.44, 0.75
#: Density is drawn from this share of a panel's densest point on; below, the paper stays white.
_LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_GRID = 120
#: The least bandwidth (Scott's rule gives 0 where all problems agree), in units of the metric.
_NARROWEST = 0.025
_TICKS = (0.2, 0.4, 0.6, 0.8)


def names_of(systems: Sequence[System]) -> list[str]:
    """The shortest names that tell the systems apart: the model, the setting, or both, with parameters if need be."""
    models, policies = {e.model for e in systems}, {e.setting.policy for e in systems}
    if len({e.setting for e in systems}) == 1:
        shown = [style.model(e.model) for e in systems]
        return shown if len(set(shown)) == len(models) else [e.model for e in systems]
    shown = []
    for system in systems:
        if system.setting == SERVED:
            shown.append(style.model(system.model))
            continue
        same = {e.setting for e in systems if e.setting.policy == system.setting.policy}
        told = [
            f"{name}={value}"
            for name, value in system.setting.parameters
            if len({str(setting.values.get(name)) for setting in same}) > 1
        ]
        words = [style.model(system.model)] if len(models) > 1 else []
        words += [system.setting.policy] if len(policies) > 1 or not told else []
        shown.append(" ".join([*words, ", ".join(told)]).strip())
    return shown if len(set(shown)) == len(shown) else [f"{e.model} {e.setting}" for e in systems]


def pairwise_figure(
    systems: Sequence[System], pairs: Sequence[tuple[int, int, Pair]], metric: str, notes: Sequence[Note] = ()
) -> Figure:
    """One panel for every pair, three in a row for up to nine; KvatlasError for more than 28 panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if len(pairs) > MOST_PANELS:
        raise KvatlasError(
            f"{len(systems)} systems make {len(pairs)} panels; at most {MOST_PANELS} (8 systems) can be drawn."
        )
    names = names_of(systems)
    across = _across(len(pairs))
    down = math.ceil(len(pairs) / across)
    step = _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BOTTOM
    foot = _foot(pairs, metric, notes, across * step[0])
    under = 0.1 + 0.135 * len(foot)
    width, height = across * step[0] + _BAR, down * step[1] + under
    with Look().applied():
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        colours = _colours()
        for number, (i, j, pair) in enumerate(pairs):
            left = number % across * step[0] + _LEFT
            bottom = height - (number // across + 1) * step[1] + _BOTTOM
            panel = figure.add_axes((left / width, bottom / height, _SIDE / width, _SIDE / height))
            _panel(panel, pair, names[i], names[j], metric, colours)
        bar = figure.add_axes(
            (
                (width - _BAR + 0.08) / width,
                (under + _BOTTOM) / height,
                0.1 / width,
                (down * step[1] - _BOTTOM - _TOP) / height,
            )
        )
        _bar(figure, bar, colours)
        for line, (text, strong) in enumerate(reversed(foot)):
            figure.text(
                0.12 / width, (0.08 + 0.135 * line) / height, text, fontsize=6.5,
                color="#a11a1a" if strong else "#444444", fontweight="bold" if strong else "normal",
            )  # fmt: skip
    return figure


def save_pairwise(figure: Figure, path: Path, systems: Sequence[System], metric: str) -> list[Path]:
    """Write the figure, and beside it `NAME.data.csv`: a row for every problem, a column for every system."""
    means = [system.means() for system in systems]
    places = list(dict.fromkeys(place for each in means for place in each))
    about = {place: found for system in reversed(systems) for place, found in system.about.items()}
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["benchmark", "problem", "L", *(f"{metric}: {e.model} {e.setting}" for e in systems)])
    for place in places:
        cells = ["" if place not in each else round(each[place], 6) for each in means]
        rows.writerow([*place, about.get(place, {}).get("L", ""), *cells])
    return save(figure, path, data=text.getvalue())


def _across(panels: int) -> int:
    if panels <= 9:
        return min(panels, 3)
    return 5 if panels <= 15 else 7


def density(x: Floats, y: Floats) -> Floats:
    """[grid, grid] (rows: y) Gaussian kernel density over the unit square, as a share of its densest point.

    Bandwidths follow Scott's rule for each axis; what a kernel would put outside the square is reflected into it.
    """
    from scipy.ndimage import gaussian_filter

    counts, _, _ = np.histogram2d(y, x, bins=_GRID, range=((0, 1), (0, 1)))
    bandwidths = [max(_NARROWEST, float(row.std(ddof=1)) * len(row) ** (-1 / 6)) * _GRID for row in (y, x)]
    smooth = gaussian_filter(counts, bandwidths, mode="reflect", truncate=5.0)
    return np.asarray(smooth / smooth.max(), float)


def _colours() -> ScalarMappable:
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    colours = mpl.colormaps["viridis"]
    return ScalarMappable(BoundaryNorm(_LEVELS, colours.N), colours)


def _panel(panel: Axes, pair: Pair, first: str, second: str, metric: str, colours: ScalarMappable) -> None:
    grid = (np.arange(_GRID) + 0.5) / _GRID
    # The outermost centres stand for the edges, so that colour reaches the frame.
    grid[0], grid[-1] = 0.0, 1.0
    panel.contourf(
        grid, grid, density(pair.x, pair.y), levels=_LEVELS, cmap=colours.get_cmap(), norm=colours.norm, zorder=1
    )
    # White under the dashes, so that they are seen on dark colours as well.
    panel.plot([0, 1], [0, 1], color="white", linewidth=1.8, alpha=0.75, zorder=2)
    panel.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color="#222222", linewidth=0.9, zorder=3)
    panel.scatter(pair.x, pair.y, s=7, color="#a8a8a8", alpha=0.55, edgecolors="none", zorder=4, clip_on=False)
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1)
    panel.set_aspect("equal")
    panel.set_xticks(_TICKS)
    panel.set_yticks(_TICKS)
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=7)
    panel.set_xlabel(f"{style.label(metric)} of x", labelpad=2, fontsize=7.5)
    panel.set_ylabel(f"{style.label(metric)} of y", labelpad=3, fontsize=7.5)
    title = f"x: {first} vs y: {second}"
    size = min(9.0, (_LEFT + _SIDE + _RIGHT - 0.15) * 72 / (0.56 * len(title)))
    panel.set_title(title, fontsize=size, pad=5, loc="left", x=-0.1)
    panel.text(
        1.05, 1.0, "\n".join(numbers(pair)), transform=panel.transAxes, fontsize=6.6, color="#222222", va="top",
        linespacing=1.32,
    )  # fmt: skip


def numbers(pair: Pair) -> list[str]:
    """What stands beside a panel."""
    return [
        f"{len(pair.places)} problems",
        f"y ahead {style.percent(pair.above)} %",
        f"equal {style.percent(pair.on)} %",
        f"x ahead {style.percent(pair.below)} %",
        "",
        "mean of x − y",
        _signed(pair.difference.value),
        f"({_signed(pair.difference.low)} to {_signed(pair.difference.high)})",
        "",
        "Spearman",
        *_correlation(pair.spearman),
        "",
        "given L" if pair.given_depth else "given L: unknown",
        *(_correlation(pair.given_depth) if pair.given_depth else []),
    ]


def _correlation(found: Correlation | None) -> list[str]:
    if found is None:
        return ["undefined: a side", "does not vary"]
    return [f"{_signed(found.value, 2)}", f"({_signed(found.low, 2)} to {_signed(found.high, 2)})"]


def _signed(value: float, digits: int = 3) -> str:
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def _bar(figure: Figure, axes: Axes, colours: ScalarMappable) -> None:
    bar = figure.colorbar(colours, cax=axes, spacing="proportional", ticks=[0.05, 0.2, 0.4, 0.6, 0.8, 1.0])
    bar.outline.set_linewidth(0.4)
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    bar.ax.minorticks_off()
    bar.set_label("Density of problems\n(share of the panel's densest point)", fontsize=7, labelpad=4)


def _foot(pairs: Sequence[tuple[int, int, Pair]], metric: str, notes: Sequence[Note], inches: float) -> list[FootLine]:
    import textwrap

    about = (
        f"A dot is a problem: {style.label(metric).lower()}, mean over its samples. Above the dashed line y is ahead. "
        "Colour is density, white below 5 % of the densest point. In brackets: 95 % intervals over problems."
    )
    if any(pair.given_depth for _, _, pair in pairs):
        about += " Given L: partial Spearman correlation, with what a shared plan length explains taken out."
    letters = int(inches * 72 / (6.5 * 0.53))
    lines = []
    for note in notes:
        first, *more = textwrap.wrap(note.text, letters)
        lines += [FootLine(first, note.is_warning), *map(FootLine, more)]
    return [*lines, *map(FootLine, textwrap.wrap(about, letters))]
