"""Pairwise maps: one panel for every two systems, the number of problems at each pair of values, and the system ahead.

After the pairwise figure of seqBench (arXiv 2509.16866), with counts in place of densities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import SERVED, KvatlasError, Note, differing
from kvatlas.figures import style
from kvatlas.figures.style import Line, Look, Margins, fitting, save, settle, sheet, wrapped, write_above
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.systems import ModelSetting, Pair
from kvatlas.text import guarded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PANELS = 28
#: Inches: of a panel where there is room, in any figure, and of the values left of it and below it.
_WIDEST, _HIGHEST, _TICKS = 2.1, 3.0, 0.24
#: Values are counted in bins: 0, equal ones up to 1, and 1.
_INNER = 5
_BINS = _INNER + 2


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
        parameters = differing(e.setting.values for e in systems if e.setting.policy == system.setting.policy)
        values = [f"{name}={value}" for name, value in system.setting.parameters if name in parameters]
        parts = [style.model(system.model)] if len(models) > 1 else []
        parts += [system.setting.policy] if len(policies) > 1 or not values else []
        names.append(" ".join([*parts, ", ".join(values)]).strip())
    return names if len(set(names)) == len(names) else [f"{e.model} {e.setting}" for e in systems]


def check_panels(systems: Sequence[ModelSetting]) -> None:
    """Raise KvatlasError if so many systems make more panels than a figure holds."""
    panels = math.comb(len(systems), 2)
    if panels > MOST_PANELS:
        raise KvatlasError(
            f"{len(systems)} systems make {panels:,} panels, and a figure holds at most {MOST_PANELS} (8 systems); "
            "name those to compare with --policy, as in --policy full --policy 'dynts local_window=16 ratio=0.3'."
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
    look: Look | None = None,
) -> Figure:
    """One panel for every pair, three in a row for up to nine, with counts on one colour scale.

    Raises KvatlasError for more than 28 panels.
    """
    from matplotlib.colors import PowerNorm

    check_panels(systems)
    look = look or Look()
    short = [look.named(name) for name in names_of(systems)]
    names = [_whole_name(name, system) for name, system in zip(short, systems, strict=True)]
    counts = [_counts(pair) for _, _, pair in pairs]
    most = max(int(own.max()) for own in counts)
    problems = {len(pair.places) for _, _, pair in pairs}
    label = look.named(style.label(metric))
    title = f"{label}, problem by problem"
    if len(pairs) == 1:
        i, j, pair = pairs[0]
        ahead = names[i] if pair.difference.value > 0 else names[j]
        title = f"{label}: {ahead} is ahead by {_points(abs(pair.difference.value))} points"
        title += "" if pair.difference.low <= 0 <= pair.difference.high else ", proven"
    about = [f"{problems.pop():,} problems in each panel" if len(problems) == 1 else ""]
    about.append("numbers: problems at these values")
    about.append("±: half a 95 % interval over problems" if look.intervals is not False else "")
    with look.applied():

        def margins(across: int, width: float) -> tuple[Margins, list[list[str]]]:
            """Return the margins of panels and the lines of each name, which depend on each other."""
            lines = 1
            while True:
                side = lines * style.SMALL_TYPE * style.LINE + 0.04 + _TICKS
                own = Margins(side + 0.02, 0.1, side + 0.08, 0, _TICKS + lines * style.SMALL_TYPE * style.LINE + 0.08)
                inner = own.inner(width, across)
                wrapping = [wrapped(name, max(inner, 0.3)) for name in names]
                if lines >= max(map(len, wrapping)):
                    return own, wrapping
                lines += 1

        def is_legible(across: int) -> bool:
            inner = margins(across, look.widest)[0].inner(look.widest, across)
            return inner >= 0.7 and fitting(inner / _BINS, [str(most)], style.SMALL_TYPE) >= style.LEAST_TYPE

        across = style.across(len(pairs), 3 if len(pairs) <= 9 else 4, is_legible) or 1
        width = look.width or min(max(across * (_WIDEST + 0.5), style.WIDTHS[1]), look.widest)
        own, axis_labels = margins(across, width)
        # One panel alone needs no whole page.
        inner = min(own.inner(width, across), _HIGHEST)
        own = own._replace(right=width - own.left - across * inner - (across - 1) * own.between)
        heads = [_head(pair, names[i], names[j], inner, look) for i, j, pair in pairs]
        own = own._replace(above=max(sum(line.high for line in lines) for lines in heads) + 0.1)
        figure, panels = sheet(look, (width, inner), len(pairs), across, own, title=title, about=about, notes=notes)
        norm, size = PowerNorm(0.5, 0, most), fitting(inner / _BINS, [str(most)], 7.0)
        for panel, (i, j, _), own_counts, lines in zip(panels, pairs, counts, heads, strict=True):
            panel.pcolormesh(
                np.ma.masked_equal(own_counts, 0), cmap=style.colour_map(style.COUNTS), norm=norm, snap=True
            )
            for row, column in np.argwhere(own_counts > 0):
                panel.text(
                    column + 0.5, row + 0.5, f"{own_counts[row, column]:.0f}", fontsize=size,
                    color=style.ON_COLOUR, ha="center", va="center", zorder=4,
                )  # fmt: skip
            panel.set(xticks=_PLACES, xticklabels=_VALUES, yticks=_PLACES, yticklabels=_VALUES)
            ends = (0, _BINS)
            panel.plot(ends, ends, linestyle=(0, (4, 3)), color=look.colours.soft, linewidth=0.7, alpha=0.7, zorder=3)
            panel.set(xlim=ends, ylim=ends, facecolor="#ffffff")
            panel.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE - 0.5)
            panel.set_xlabel("\n".join(axis_labels[i]), labelpad=2, fontsize=style.SMALL_TYPE)
            panel.set_ylabel("\n".join(axis_labels[j]), labelpad=2, fontsize=style.SMALL_TYPE)
            write_above(panel, lines)
        settle(figure, look)
    return figure


#: Edges of the bins between 0 and 1, and the middles of the bins of 0 and 1, with their texts.
_PLACES = (0.5, *range(2, _INNER + 1), _BINS - 0.5)
_VALUES = ("0", *(f".{2 * n}" for n in range(1, _INNER)), "1")


def _points(share: float) -> str:
    """A difference of shares in points, whole from 10 on."""
    return style.percent(share, 0 if abs(share) >= 0.0995 else 1)


def _head(pair: Pair, x: str, y: str, inches: float, look: Look) -> list[Line]:
    """The lines over a panel: the system ahead and its lead, and the shares of problems above and below the line."""
    value = pair.difference
    half = f" ± {_points((value.high - value.low) / 2)}" if look.intervals is not False else ""
    ahead = f"{'x' if value.value > 0 else 'y'} ahead by {_points(abs(value.value))} points{half}"
    shares = f"above the line {style.percent(pair.above, 0)} %, below {style.percent(pair.below, 0)} %"
    lines = style.lines(ahead, inches, style.NAME_TYPE, look.colours.ink)
    return lines + style.lines(shares, inches, style.SMALL_TYPE, look.colours.soft)


def pair_text(pair: Pair, first: str, second: str) -> str:
    """Return a comparison of two systems in a sentence."""
    mean, low, high = (
        style.signed(value, 3, "-") for value in (pair.difference.value, pair.difference.low, pair.difference.high)
    )
    return (
        f"x: {first} vs y: {second}: x ahead on {100 * pair.below:.1f} %, equal on {100 * pair.on:.1f} %, y ahead on "
        f"{100 * pair.above:.1f} % of {len(pair.places)} problems; mean of x - y {mean} ({low} to {high})"
    )


def save_pairwise(figure: Figure, path: Path, systems: Sequence[ModelSetting], metric: str) -> list[Path]:
    """Write the figure, and next to it `NAME.data.csv`: a row for every problem, a column for every system."""
    means = [system.means() for system in systems]
    about = {key: facts for system in reversed(systems) for key, facts in system.about.items()}
    rows: list[list[Any]] = [["benchmark", "problem", "L", *(f"{metric}: {e.model} {e.setting}" for e in systems)]]
    for key in dict.fromkeys(key for values in means for key in values):
        values = ["" if key not in own else round(own[key], 6) for own in means]
        rows.append([*key, about.get(key, {}).get("L", ""), *values])
    return save(figure, path, data=style.rows_csv([list(map(guarded, row)) for row in rows]))


def _counts(pair: Pair) -> Floats:
    """[bins, bins] (rows: y) the number of problems in each pair of bins; a bin holds its upper edge."""
    bins = [np.clip(np.ceil(values.round(9) * _INNER), 1, _INNER) for values in (pair.x, pair.y)]
    for own, values in zip(bins, (pair.x, pair.y), strict=True):
        own[values <= 1e-9] = 0
        own[values >= 1 - 1e-9] = _BINS - 1
    counts = np.zeros((_BINS, _BINS))
    np.add.at(counts, (bins[1].astype(int), bins[0].astype(int)), 1)
    return counts
