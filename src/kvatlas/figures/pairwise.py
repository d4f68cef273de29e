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
from kvatlas.figures.style import LEAST_TYPE, Look, canvas, colour_bar, fitting, save, settle, title, wrapped
from kvatlas.stats.intervals import Floats
from kvatlas.stats.systems import Correlation, ModelSetting, Pair
from kvatlas.text import guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

MOST_PANELS = 28
#: Inches of a panel's labels, of the colour bar's strip, and between the bar and the panels' numbers.
_LABELS, _BAR, _GAP = 0.55, 0.55, 0.12
#: Points of names and numbers.
_NAMES = 6.0
#: Density is shown from this share of a panel's densest point on; below, the paper stays white.
_LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: Counts span more: one problem of hundreds is to differ from ten.
_COUNT_LEVELS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_GRID = 120
#: The least bandwidth (Scott's rule gives 0 where all problems agree), in units of the metric.
_NARROWEST = 0.025
_TICKS = (0.2, 0.4, 0.6, 0.8)
#: Where so few places hold this share of the problems, a density would be discs around them: problems are counted.
_PLACES, _SHARE = 4, 0.5
#: Values of both sides up to which each has its own row and column of counts; more are counted in tenths.
_VALUES = 11


def names_of(systems: Sequence[ModelSetting]) -> list[str]:
    """The shortest names that tell the systems apart: the model, the setting, or both, with parameters if need be."""
    models, policies = {e.model for e in systems}, {e.setting.policy for e in systems}
    if len({e.setting for e in systems}) == 1:
        names = [style.model(e.model) for e in systems]
        return names if len(set(names)) == len(models) else [e.model for e in systems]
    names = []
    for system in systems:
        if system.setting == SERVED:
            names.append(style.model(system.model))
            continue
        same = {e.setting for e in systems if e.setting.policy == system.setting.policy}
        differing = [
            f"{name}={value}"
            for name, value in system.setting.parameters
            if len({str(setting.values.get(name)) for setting in same}) > 1
        ]
        parts = [style.model(system.model)] if len(models) > 1 else []
        parts += [system.setting.policy] if len(policies) > 1 or not differing else []
        names.append(" ".join([*parts, ", ".join(differing)]).strip())
    return names if len(set(names)) == len(names) else [f"{e.model} {e.setting}" for e in systems]


def check_panels(systems: Sequence[ModelSetting]) -> None:
    """Raise KvatlasError if so many systems make more panels than a figure holds."""
    panels = math.comb(len(systems), 2)
    if panels > MOST_PANELS:
        raise KvatlasError(
            f"{len(systems)} systems make {panels:,} panels, and a figure holds at most {MOST_PANELS} (8 systems); "
            "name those to compare with --only, as in --only full --only 'dynts local_window=16 ratio=0.3'."
        )


def _whole_name(name: str, system: ModelSetting) -> str:
    """A name with the window and the ratio of its setting, where it does not say them."""
    values = system.setting.values
    left = [f"{key}={values[key]}" for key in ("local_window", "ratio") if key in values and f"{key}=" not in name]
    return f"{name} ({', '.join(left)})" if left else name


def pairwise_figure(
    systems: Sequence[ModelSetting],
    pairs: Sequence[tuple[int, int, Pair]],
    metric: str,
    notes: Sequence[Note] = (),
    *,
    density: bool = False,
    look: Look | None = None,
) -> Figure:
    """One panel for every pair, three in a row for up to nine; raises KvatlasError for more than 28 panels.

    Where a few places hold most problems they are counted, with `density` smoothed all the same.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    check_panels(systems)
    look = look or Look()
    short = [look.named(name) for name in names_of(systems)]
    names = [_whole_name(name, system) for name, system in zip(short, systems, strict=True)]
    across = look.across(len(pairs), 1 if look.columns == 1 else 3 if len(pairs) <= 9 else 4)
    bar = _BAR + _GAP if look.notes else _BAR
    wide = look.width or across * min(2.8, (look.widest - bar) / across) + bar
    step = (wide - bar) / across
    label = look.named(style.label(metric))
    titles = [_title(names[i], names[j], step - 0.15) for i, j, _ in pairs]
    axis_labels = [wrapped(f"{label}, {name}", step - _LABELS, _NAMES) for name in short]
    lines = [numbers(pair, look.intervals) for _, _, pair in pairs]
    # A panel is narrower beside many lines of a label.
    room = step - 0.25 - 0.1 * max(0, max(map(len, axis_labels)) - 2)
    beneath = [[part for line in own for part in wrapped(line, room, 1.05 * _NAMES)] for own in lines]
    if not look.notes:
        beneath = [[] for _ in pairs]
    over = max(text.count("\n") + 1 for text, _ in titles)
    below = max(len(axis_labels[i]) + len(own) for (i, _, _), own in zip(pairs, beneath, strict=True))
    high = step - _LABELS + 0.135 * over + 0.1 * below + 0.4
    counted = [not density and _is_discrete(pair) for _, _, pair in pairs]
    about = [f"{style.label(metric)} of a problem is the mean over its samples. Above the dashed line y is ahead."]
    if not all(counted):
        about.append("A dot is a problem, colour is density, none below 5 % of the densest point.")
    if any(counted):
        about.append("Numbers in a panel count the problems at these values.")
    if look.intervals:
        about.append("In brackets: 95 % intervals over problems.")
    if any(pair.given_depth for _, _, pair in pairs):
        about.append("Given L: partial Spearman correlation, with what a shared plan length explains taken out.")
    foot = look.foot(notes, [" ".join(about)], wide)
    if not look.notes:
        values = [
            f"x: {names[i]} vs y: {names[j]}: {'; '.join(own)}." for (i, j, _), own in zip(pairs, lines, strict=True)
        ]
        foot = foot._replace(caption=" ".join([foot.caption, *values]))
    with look.applied():
        figure, panels = canvas((wide, math.ceil(len(pairs) / across) * high), len(pairs), across, foot)
        levels = _COUNT_LEVELS if all(counted) else _LEVELS
        colours = ScalarMappable(BoundaryNorm(levels, 256), "viridis")
        for number, (panel, (i, j, pair)) in enumerate(zip(panels, pairs, strict=True)):
            _counts(panel, pair, colours, step - _LABELS) if counted[number] else _densities(panel, pair, colours)
            # The ground under the dashes, so that they are seen on dark colours as well.
            panel.plot([0, 1], [0, 1], color=look.colours.ground, linewidth=1.8, alpha=0.75, zorder=2)
            panel.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=look.colours.ink, linewidth=0.9, zorder=3)
            panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=_TICKS, yticks=_TICKS)
            panel.tick_params(length=2, width=0.5, pad=2, labelsize=6.5)
            panel.set_title(titles[number][0], fontsize=min(points for _, points in titles), pad=4)
            # Numbers belong to the label, whose width the panels need not make room for.
            text = "\n".join([*axis_labels[i], "", *beneath[number]])
            panel.set_xlabel(text, labelpad=2, fontsize=_NAMES, linespacing=1.15)
            panel.set_ylabel("\n".join(axis_labels[j]), labelpad=2, fontsize=_NAMES)
        ticks = levels if all(counted) else (0.05, 0.2, 0.4, 0.6, 0.8, 1.0)
        spacing = "uniform" if all(counted) else "proportional"
        text = "Problems (share of the panel's densest point)"
        pad = 0.01 + (bar - _BAR) / wide
        colour_bar(figure, colours, panels, text, _NAMES, spacing=spacing, ticks=ticks, pad=pad, fraction=0.04 / across)
        settle(figure, look)
    return figure


def _title(x: str, y: str, inches: float) -> tuple[str, float]:
    """Both names and the points of their type; each begins a line where they do not fit into one."""
    whole = title(f"x: {x} vs y: {y}", inches)
    if "\n" not in whole[0]:
        return whole
    (first, points), (second, others) = title(f"x: {x}", inches), title(f"vs y: {y}", inches)
    return f"{first}\n{second}", min(points, others)


def numbers(pair: Pair, intervals: bool = True) -> list[str]:
    """The lines under a panel."""

    def text(value: float, low: float, high: float, digits: int) -> str:
        between = f" ({style.signed(low, digits)} to {style.signed(high, digits)})" if intervals else ""
        return f"{style.signed(value, digits)}{between}"

    def correlation(value: Correlation | None) -> str:
        return "undefined, a side does not vary" if value is None else text(value.value, value.low, value.high, 2)

    ahead, equal, behind = (style.percent(share) for share in (pair.above, pair.on, pair.below))
    difference = pair.difference
    return [
        f"{len(pair.places)} problems",
        f"ahead: y {ahead} %, x {behind} %; equal {equal} %",
        f"mean of x − y {text(difference.value, difference.low, difference.high, 3)}",
        f"Spearman {correlation(pair.spearman)}",
        *([f"given L {correlation(pair.given_depth)}"] if pair.given_depth else []),
    ]


def pair_text(pair: Pair, first: str, second: str) -> str:
    """Return a comparison of two systems in a sentence."""
    mean, low, high = (
        style.signed(value, 3, "-") for value in (pair.difference.value, pair.difference.low, pair.difference.high)
    )
    return (
        f"x: {first} vs y: {second}: x ahead on {100 * pair.below:.1f} %, equal on {100 * pair.on:.1f} %, y ahead on "
        f"{100 * pair.above:.1f} % of {len(pair.places)} problems; mean of x - y {mean} ({low} to {high})"
    )


def save_pairwise(
    figure: Figure, path: Path, systems: Sequence[ModelSetting], metric: str, *, look: Look | None = None
) -> list[Path]:
    """Write the figure, and next to it `NAME.data.csv`: a row for every problem, a column for every system."""
    means = [system.means() for system in systems]
    about = {key: facts for system in reversed(systems) for key, facts in system.about.items()}
    rows: list[list[Any]] = [["benchmark", "problem", "L", *(f"{metric}: {e.model} {e.setting}" for e in systems)]]
    for key in dict.fromkeys(key for values in means for key in values):
        values = ["" if key not in own else round(own[key], 6) for own in means]
        rows.append([*key, about.get(key, {}).get("L", ""), *values])
    return save(figure, path, data=style.rows_csv([list(map(guarded, row)) for row in rows]), look=look)


def _is_discrete(pair: Pair) -> bool:
    """Whether a few places hold most of the problems."""
    _, counts = np.unique(np.column_stack([pair.x, pair.y]).round(9), axis=0, return_counts=True)
    return bool(np.sort(counts)[-_PLACES:].sum() >= _SHARE * counts.sum())


def density(x: Floats, y: Floats) -> Floats:
    """[grid, grid] (rows: y) Gaussian kernel density over the unit square, as a share of its densest point.

    Bandwidths follow Scott's rule for each axis; the part of a kernel outside the square is reflected into it.
    """
    from scipy.ndimage import gaussian_filter

    counts, _, _ = np.histogram2d(y, x, bins=_GRID, range=((0, 1), (0, 1)))
    bandwidths = [max(_NARROWEST, float(row.std(ddof=1)) * len(row) ** (-1 / 6)) * _GRID for row in (y, x)]
    smooth = gaussian_filter(counts, bandwidths, mode="reflect", truncate=5.0)
    return np.asarray(smooth / smooth.max(), float)


def _densities(panel: Axes, pair: Pair, colours: ScalarMappable) -> None:
    grid = (np.arange(_GRID) + 0.5) / _GRID
    # The outermost centres stand for the edges, so that colour reaches the frame.
    grid[0], grid[-1] = 0.0, 1.0
    panel.contourf(
        grid, grid, density(pair.x, pair.y), levels=_LEVELS, cmap=colours.get_cmap(), norm=colours.norm, zorder=1
    )
    panel.scatter(pair.x, pair.y, s=7, color="#a8a8a8", alpha=0.55, edgecolors="none", zorder=4, clip_on=False)


def _counts(panel: Axes, pair: Pair, colours: ScalarMappable, inches: float) -> None:
    """The number of problems at each value of both, or in each tenth, in their colours and as text."""
    from matplotlib.colors import to_hex

    values = np.unique(np.concatenate([pair.x, pair.y]).round(9))
    few = 1 < len(values) <= _VALUES
    edges = np.concatenate([[0.0], (values[1:] + values[:-1]) / 2, [1.0]]) if few else np.linspace(0, 1, 11)
    counts, _, _ = np.histogram2d(pair.y, pair.x, bins=[edges, edges])
    norm: Any = colours.norm
    shares = np.ma.masked_equal(np.maximum(counts / counts.max(), norm.vmin * (counts > 0)), 0)
    panel.pcolormesh(edges, edges, shares, cmap=colours.get_cmap(), norm=norm, zorder=1, snap=True)
    for row, column in np.argwhere(counts > 0):
        across, up = ((edges[n] + edges[n + 1]) / 2 for n in (column, row))
        text = f"{counts[row, column]:.0f}"
        size = fitting(inches * float(np.diff(edges)[[row, column]].min()), len(text), 7.0)
        if size >= LEAST_TYPE:
            ground: Any = colours.to_rgba(float(shares[row, column]))  # type: ignore[arg-type]
            panel.text(
                across, up, text, fontsize=size, color=style.text_on(to_hex(ground)), ha="center", va="center",
                zorder=5, bbox={"facecolor": ground, "edgecolor": "none", "pad": 0.4},
            )  # fmt: skip
