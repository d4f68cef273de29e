"""Pairwise maps: one panel for every two systems, a dot for every problem, densities, and its numbers.

After the pairwise figure of seqBench (arXiv 2509.16866): axes 0 to 1, filled viridis densities, a dashed line y = x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import SERVED, KvatlasError, Note
from kvatlas.figures import style
from kvatlas.figures.look import FootLine, Look, canvas, rows_csv, save, settle, title
from kvatlas.stats.pairs.pairwise import Correlation, Floats, Pair
from kvatlas.stats.pairs.systems import System

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

MOST_PANELS = 28
#: Inches of a panel with its labels and numbers, and of the colour bar's strip.
_STEP, _BAR = (4.03, 2.93), 0.75
#: Density is shown from this share of a panel's densest point on; below, the paper stays white.
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
        differing = [
            f"{name}={value}"
            for name, value in system.setting.parameters
            if len({str(setting.values.get(name)) for setting in same}) > 1
        ]
        parts = [style.model(system.model)] if len(models) > 1 else []
        parts += [system.setting.policy] if len(policies) > 1 or not differing else []
        shown.append(" ".join([*parts, ", ".join(differing)]).strip())
    return shown if len(set(shown)) == len(shown) else [f"{e.model} {e.setting}" for e in systems]


def check_panels(systems: Sequence[System]) -> None:
    """KvatlasError where so many systems make more panels than a figure holds."""
    panels = math.comb(len(systems), 2)
    if panels > MOST_PANELS:
        raise KvatlasError(
            f"{len(systems)} systems make {panels:,} panels, and a figure holds at most {MOST_PANELS} (8 systems); "
            "name those to compare with --only, as in --only full --only 'dynts local_window=16 ratio=0.3'."
        )


def _whole_name(name: str, system: System) -> str:
    """A name with the window and the ratio of its setting, where it does not say them."""
    values = system.setting.values
    left = [f"{key}={values[key]}" for key in ("local_window", "ratio") if key in values and f"{key}=" not in name]
    return f"{name} ({', '.join(left)})" if left else name


def pairwise_figure(
    systems: Sequence[System], pairs: Sequence[tuple[int, int, Pair]], metric: str, notes: Sequence[Note] = ()
) -> Figure:
    """One panel for every pair, three in a row for up to nine; KvatlasError for more than 28 panels."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    check_panels(systems)
    names = [_whole_name(name, system) for name, system in zip(names_of(systems), systems, strict=True)]
    titles = [title(f"x: {names[i]} vs y: {names[j]}", _STEP[0] - 0.4) for i, j, _ in pairs]
    over = 0.13 * max(text.count("\n") for text, _ in titles)
    across = _across(len(pairs))
    size = (across * _STEP[0] + _BAR, math.ceil(len(pairs) / across) * (_STEP[1] + over))
    look = Look()
    with look.applied():
        figure, panels = canvas(size, len(pairs), across, _foot(pairs, metric, notes, size[0], look))
        colours = ScalarMappable(BoundaryNorm(_LEVELS, 256), "viridis")
        for panel, (_, _, pair), (text, points) in zip(panels, pairs, titles, strict=True):
            _panel(panel, pair, metric, colours)
            panel.set_title(text, fontsize=points, pad=5, loc="left", x=-0.1)
        _bar(figure, panels, colours)
        settle(figure)
    return figure


def save_pairwise(figure: Figure, path: Path, systems: Sequence[System], metric: str) -> list[Path]:
    """Write the figure, and next to it `NAME.data.csv`: a row for every problem, a column for every system."""
    means = [system.means() for system in systems]
    keys = list(dict.fromkeys(key for values in means for key in values))
    about = {key: facts for system in reversed(systems) for key, facts in system.about.items()}
    rows: list[list[Any]] = [["benchmark", "problem", "L", *(f"{metric}: {e.model} {e.setting}" for e in systems)]]
    for key in keys:
        values = ["" if key not in own else round(own[key], 6) for own in means]
        rows.append([*key, about.get(key, {}).get("L", ""), *values])
    return save(figure, path, data=rows_csv(rows))


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


def _panel(panel: Axes, pair: Pair, metric: str, colours: ScalarMappable) -> None:
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
    panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=_TICKS, yticks=_TICKS)
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=7)
    panel.set_xlabel(f"{style.label(metric)} of x", labelpad=2, fontsize=7.5)
    panel.set_ylabel(f"{style.label(metric)} of y", labelpad=3, fontsize=7.5)
    panel.text(
        1.05, 1.0, "\n".join(numbers(pair)), transform=panel.transAxes, fontsize=6.6, color="#222222", va="top",
        linespacing=1.32,
    )  # fmt: skip


def numbers(pair: Pair) -> list[str]:
    """What stands right of a panel."""
    return [
        f"{len(pair.places)} problems",
        f"y ahead {style.percent(pair.above)} %",
        f"equal {style.percent(pair.on)} %",
        f"x ahead {style.percent(pair.below)} %",
        "",
        "mean of x − y",
        style.signed(pair.difference.value, 3),
        f"({style.signed(pair.difference.low, 3)} to {style.signed(pair.difference.high, 3)})",
        "",
        "Spearman",
        *_correlation(pair.spearman),
        "",
        "given L",
        *_given_depth(pair),
    ]


def _given_depth(pair: Pair) -> list[str]:
    if pair.depth is None:
        return ["unknown: problems", "have no plan length"]
    if np.ptp(pair.depth) == 0:
        return ["unknown: all plans", "are equally long"]
    return _correlation(pair.given_depth)


def _correlation(estimate: Correlation | None) -> list[str]:
    if estimate is None:
        return ["undefined: a side", "does not vary"]
    value, low, high = (style.signed(number, 2) for number in (estimate.value, estimate.low, estimate.high))
    return [value, f"({low} to {high})"]


def _bar(figure: Figure, panels: Sequence[Axes], colours: ScalarMappable) -> None:
    bar = figure.colorbar(
        colours, ax=panels, spacing="proportional", ticks=[0.05, 0.2, 0.4, 0.6, 0.8, 1.0], aspect=None, pad=0.01,
        fraction=0.03 / _across(len(panels)),
    )  # fmt: skip
    bar.outline.set_linewidth(0.4)
    bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
    bar.ax.minorticks_off()
    bar.set_label("Density of problems\n(share of the panel's densest point)", fontsize=7, labelpad=4)


def _foot(
    pairs: Sequence[tuple[int, int, Pair]], metric: str, notes: Sequence[Note], inches: float, look: Look
) -> list[FootLine]:
    about = (
        f"A dot is a problem: {style.label(metric).lower()}, mean over its samples. Above the dashed line y is ahead. "
        "Colour is density, white below 5 % of the densest point. In brackets: 95 % intervals over problems."
    )
    if any(pair.given_depth for _, _, pair in pairs):
        about += " Given L: partial Spearman correlation, with what a shared plan length explains taken out."
    return look.foot(notes, [about], inches)
