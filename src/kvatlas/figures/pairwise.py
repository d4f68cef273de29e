"""Pairwise maps: one panel for every two systems, the number of problems at each pair of values, and the system ahead.

After the pairwise figure of seqBench (arXiv 2509.16866), with counts in place of densities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import SERVED, KvatlasError, Note, telling_parameters
from kvatlas.figures import colours, style
from kvatlas.figures.style import FigureOptions, Line, Margins, font_size, wrapped
from kvatlas.stats.numerics.arrays import LEVEL, Difference, Floats, holm
from kvatlas.stats.run_data import shown_policies, whole_names
from kvatlas.stats.systems import ModelSetting, Pair
from kvatlas.text import axis_label, counted, guarded, model_name, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 28
#: Inches of a panel where there is room.
_PANEL_WIDTH = 2.1
#: Inches of a panel in any figure, at most.
_PANEL_LIMIT = 3.0
#: Inches of a panel whose numbers can be read, at least.
_PANEL_LEAST = 0.7
#: Inches of the values left of a panel and below it.
_TICKS = 0.24
#: Equal bins of values between 0 and 1.
_INNER = 5
#: The parameters of a setting that names of systems have.
_NAMED_PARAMETERS = ("local_window", "ratio")
#: Inches of a narrow figure, and the names of its systems.
_NARROW = 5.0
_LETTERS = "ABCDEFGH"


def names_of(systems: Sequence[ModelSetting]) -> list[str]:
    """Return the shortest names that tell the systems apart: the model, the setting, or both, with parameters."""
    models = {system.model for system in systems}
    if len({system.setting for system in systems}) == 1:
        names = [model_name(system.model) for system in systems]
        return names if len(set(names)) == len(models) else [system.model for system in systems]

    # The parts in which systems differ.
    policies = shown_policies(system.setting.policy for system in systems)
    names = []
    for system in systems:
        setting = system.setting
        if setting == SERVED:
            names.append(model_name(system.model))
            continue
        parameters = telling_parameters(one.setting for one in systems if one.setting.policy == setting.policy)
        values = [f"{name}={value}" for name, value in setting.parameters if name in parameters]
        words = []
        if len(models) > 1:
            words.append(model_name(system.model))
        if len(policies) > 1 or not values:
            words.append(policies[setting.policy])
        names.append(" ".join([*words, ", ".join(values)]).strip())
    return names if len(set(names)) == len(names) else long_names(systems)


def long_names(systems: Sequence[ModelSetting]) -> list[str]:
    """Return the names of the systems with the model and all parameters."""
    settings = whole_names(system.setting for system in systems)
    return [f"{system.model} {settings[system.setting.id]}" for system in systems]


def check_panels(systems: Sequence[ModelSetting]) -> None:
    """Raise KvatlasError if so many systems make more panels than a figure holds."""
    panels = math.comb(len(systems), 2)
    if panels > MOST_PANELS:
        raise KvatlasError(
            f"{len(systems)} systems make {panels:,} panels, and a figure holds at most {MOST_PANELS} (8 systems); "
            "name those to compare, as in compare RUN full 'dynts local_window=16 ratio=0.3'."
        )


def pairwise_figure(
    systems: Sequence[ModelSetting],
    pairs: Sequence[tuple[int, int, Pair]],
    metric: str,
    notes: Sequence[Note] = (),
    *,
    options: FigureOptions | None = None,
) -> Figure:
    """Return one panel for every pair, three in a row for up to nine, with counts on one colour scale.

    Raises KvatlasError for more than 28 panels.
    """
    check_panels(systems)
    options = options or FigureOptions()
    # Names with the window and the ratio of their settings, where they do not say them; those of all stand above.
    shared = _shared_parameters(systems)
    names = []
    for name, system in zip(names_of(systems), systems, strict=True):
        values = system.setting.values
        unsaid = [key for key in _NAMED_PARAMETERS if key in values and key not in shared and f"{key}=" not in name]
        names.append(", ".join([options.named(name), *(options.in_words(f"{key}={values[key]}") for key in unsaid)]))
    label = options.named(axis_label(metric))
    # The pairs in which one is proven to be ahead, allowing for all pairs.
    p_values = [pair.difference.p for _, _, pair in pairs]
    proven = [p <= LEVEL for p in holm(p_values)]

    with options.applied():
        inner_bins = _inner_bins(pairs)
        counts = [_bin_counts(pair, inner_bins) for _, _, pair in pairs]
        most = max(int(count.max()) for count in counts)
        about = _about_pairs(systems, pairs, options)
        shown = names
        if options.widest < _NARROW and len(pairs) > 2:
            # In a narrow figure the names leave no room beside each other, so letters stand for them.
            shown = list(_LETTERS[: len(names)])
            about = [", ".join(f"{letter}: {name}" for letter, name in zip(shown, names, strict=True)), *about]
        across, width, margins, labels = _pair_layout(len(pairs), shown, most, options)
        inner = margins.inner(width, across)

        # The text above each panel says which system is ahead.
        heads = [_lead_lines(pair, won, inner, options) for (_, _, pair), won in zip(pairs, proven, strict=True)]

        figure, panels = style.make_panels(
            options,
            (width, inner),
            len(pairs),
            across,
            margins._replace(above=max(map(style.height_of, heads)) + 0.1),
            title=_pairs_title(pairs, proven, names, label),
            about=about,
            notes=notes,
        )
        _draw_counts(panels, counts, inner, options)
        for panel, (x, y, _), head in zip(panels, pairs, heads, strict=True):
            panel.set_xlabel("\n".join(labels[x]), labelpad=2, fontsize=style.SMALL_TYPE)
            panel.set_ylabel("\n".join(labels[y]), labelpad=2, fontsize=style.SMALL_TYPE)
            style.write_above(panel, head)
        style.finish_texts(figure, options)
    return figure


def _shared_parameters(systems: Sequence[ModelSetting]) -> dict[str, Any]:
    """Return the window and the ratio that all systems have alike."""
    shared = {}
    for key in _NAMED_PARAMETERS:
        values = {system.setting.values.get(key) for system in systems}
        if len(values) == 1 and None not in values:
            shared[key] = values.pop()
    return shared


def _pairs_title(
    pairs: Sequence[tuple[int, int, Pair]], proven: Sequence[bool], names: Sequence[str], label: str
) -> str:
    """Return the finding: the system that is ahead in a single pair, or in how many pairs one is proven to be."""
    if len(pairs) == 1:
        x, y, pair = pairs[0]
        difference = pair.difference
        ahead = names[x] if difference.value > 0 else names[y]
        if not proven[0]:
            return f"{label}: neither {names[x]} nor {names[y]} is proven to be ahead"
        return f"{label}: {ahead} is ahead by {_lead_text(difference)}, proven"

    # Systems that are not proven to be ahead in one of their pairs.
    behind: set[int] = set()
    for (x, y, pair), is_proven in zip(pairs, proven, strict=True):
        if is_proven:
            behind.add(y if pair.difference.value > 0 else x)
        else:
            behind |= {x, y}
    leaders = [name for index, name in enumerate(names) if index not in behind]
    if leaders:
        return f"{label}: {leaders[0]} is proven to be ahead of all others"

    if not any(proven):
        return f"{label}: in none of {len(pairs)} pairs one is proven to be ahead"
    return f"{label}: in {sum(proven)} of {len(pairs)} pairs one is proven to be ahead"


def _about_pairs(
    systems: Sequence[ModelSetting], pairs: Sequence[tuple[int, int, Pair]], options: FigureOptions
) -> list[str]:
    """Return the clauses about all panels: what all systems have in common, the problems, and the marks."""
    about = []
    models = {system.model for system in systems}
    if len(models) == 1:
        about.append(options.named(model_name(models.pop())))

    places = chain.from_iterable(pair.places for _, _, pair in pairs)
    benchmarks = dict.fromkeys(benchmark for benchmark, _ in places)
    about.append(", ".join(map(options.named, benchmarks)))
    shared = _shared_parameters(systems)
    policies = shown_policies(system.setting.policy for system in systems)
    if shared:
        words = [*policies.values()] if len(policies) == 1 else []
        about.append(options.in_words(", ".join([*words, *(f"{key}={value}" for key, value in shared.items())])))
    problems = {len(pair.places) for _, _, pair in pairs}
    if len(problems) == 1:
        each = " in each panel" if len(pairs) > 1 else ""
        about.append(f"{counted(problems.pop(), 'problem')}{each}")
    if options.intervals is not False:
        about.append("in brackets: 95 % intervals over problems")
    if len(pairs) > 1:
        about.append("bold: proven, allowing for all pairs")

    return [*about, "numbers: problems at these values"]


def _pair_layout(
    count: int, names: Sequence[str], most: int, options: FigureOptions
) -> tuple[int, float, Margins, list[list[str]]]:
    """Return the layout of `count` panels whose largest number is `most`.

    These are the number of panels in a row, the width of the figure, the margins, and the labels of axes in lines.
    """

    def is_legible(across: int) -> bool:
        margins, _ = _pair_margins(names, across, options.widest)
        inner = margins.inner(options.widest, across)
        size = font_size(inner / (_INNER + 2), [str(most)], style.SMALL_TYPE)
        return inner >= _PANEL_LEAST and size >= style.LEAST_TYPE

    across = style.panels_in_row(count, 3 if count <= 9 else 4, is_legible) or 1
    natural = max(across * (_PANEL_WIDTH + 0.5), style.WIDTHS[1])
    width = options.inches or min(natural, options.widest)
    margins, labels = _pair_margins(names, across, width)
    # One panel alone needs no whole page.
    inner = min(margins.inner(width, across), _PANEL_LIMIT)
    right = width - margins.left - across * inner - (across - 1) * margins.between
    return across, width, margins._replace(right=right), labels


def _pair_margins(names: Sequence[str], across: int, width: float) -> tuple[Margins, list[list[str]]]:
    """Return the margins of panels and the lines of each name, which depend on each other."""
    line = style.SMALL_TYPE * style.LINE
    lines = 1
    while True:
        side = lines * line + 0.04 + _TICKS
        margins = Margins(side + 0.02, 0.1, side + 0.14, 0, _TICKS + lines * line + 0.08)
        inner = margins.inner(width, across)
        labels = [wrapped(name, max(inner, 0.3)) for name in names]
        if lines >= max(map(len, labels)):
            return margins, labels
        lines += 1


def _draw_counts(panels: Sequence[Axes], counts: Sequence[Floats], inches: float, options: FigureOptions) -> None:
    """Draw the bins of all panels on one colour scale, with the number of problems in each."""
    from matplotlib.colors import PowerNorm

    most = max(int(count.max()) for count in counts)
    norm = PowerNorm(0.5, 0, most)
    palette = colours.colour_map(colours.COUNTS)
    bins = len(counts[0])
    size = font_size(inches / bins, [str(most)], 7.0)
    ink: dict[str, Any] = {"fontsize": size, "color": colours.ON_COLOUR, "ha": "center", "va": "center", "zorder": 4}
    # Ticks: the middles of the bins of 0 and 1, and the edges of bins between.
    ends = (0, bins)
    places = [0.5, *range(2, bins - 1), bins - 0.5]
    texts = ["0", *(f".{10 * n // (bins - 2)}" for n in range(1, bins - 2)), "1"]
    for panel, count in zip(panels, counts, strict=True):
        panel.pcolormesh(np.ma.masked_equal(count, 0), cmap=palette, norm=norm, snap=True)
        for row, column in np.argwhere(count > 0):
            panel.text(column + 0.5, row + 0.5, f"{count[row, column]:.0f}", **ink)

        panel.set(xticks=places, xticklabels=texts, yticks=places, yticklabels=texts)
        # The line of equal values runs behind the numbers and their bins.
        soft = options.colours.soft
        panel.plot(ends, ends, linestyle=(0, (4, 3)), color=soft, linewidth=0.8, zorder=0.5)
        panel.set(xlim=ends, ylim=ends)
        panel.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE - 0.5)


def _inner_bins(pairs: Sequence[tuple[int, int, Pair]]) -> int:
    """Return the number of equal bins between those of 0 and of 1: none where all values are 0 or 1."""
    values = np.concatenate([np.concatenate((pair.x, pair.y)) for _, _, pair in pairs])
    return _INNER if ((values > 1e-9) & (values < 1 - 1e-9)).any() else 0


def _bin_counts(pair: Pair, inner: int) -> Floats:
    """Return [bins, bins] (rows: y) the number of problems in each pair of bins; a bin holds its upper edge."""
    edges = [*(n / inner for n in range(inner)), 1 - 1e-9]
    places = (np.searchsorted(edges, pair.y.round(9)), np.searchsorted(edges, pair.x.round(9)))
    counts = np.zeros((inner + 2, inner + 2))
    np.add.at(counts, places, 1)
    return counts


def _lead_text(difference: Difference) -> str:
    """Return the lead of the system that is ahead with its limits: `80 points (74 to 86)`."""
    ends = [difference.low, difference.high] if difference.value >= 0 else [-difference.high, -difference.low]
    # Whole points from 10 on.
    digits = 0 if abs(difference.value) >= 0.0995 else 1
    interval = " to ".join(percent_text(end, digits) for end in ends).replace("-", "−")
    return f"{percent_text(abs(difference.value), digits)} points ({interval})"


def _lead_lines(pair: Pair, is_proven: bool, inches: float, options: FigureOptions) -> list[Line]:
    """Return the lines over a panel: the system ahead and its lead, and the shares of problems beside the line.

    A proven lead is bold.
    """
    difference = pair.difference
    ahead = f"{'x' if difference.value > 0 else 'y'} ahead by {_lead_text(difference)}"
    if difference.value == 0:
        ahead = f"equal: {_lead_text(difference)}"
    points, _, interval = ahead.partition(" (")
    shares = f"above the line {percent_text(pair.above, 0)} %, below {percent_text(pair.below, 0)} %"
    lines = style.text_lines(points, inches, style.NAME_TYPE, options.colours.ink, "bold" if is_proven else "normal")
    if options.intervals is not False:
        lines += style.text_lines(f"({interval}", inches, style.SMALL_TYPE, options.colours.ink)
    return lines + style.text_lines(shares, inches, style.SMALL_TYPE, options.colours.soft)


def save_pairwise(figure: Figure, path: Path, systems: Sequence[ModelSetting], metric: str) -> list[Path]:
    """Write the figure, and next to it `NAME.data.csv`: a row for every problem, a column for every system."""
    means = [system.means for system in systems]
    columns = [f"{metric}: {name}" for name in long_names(systems)]
    rows: list[list[Any]] = [["benchmark", "problem", "L", *columns]]
    for key in dict.fromkeys(chain.from_iterable(means)):
        values = [round(of_system[key], 6) if key in of_system else "" for of_system in means]
        # The first system that knows a problem tells its depth.
        facts = next((system.about[key] for system in systems if key in system.about), {})
        rows.append([*key, facts.get("L", ""), *values])
    guarded_rows = [list(map(guarded, row)) for row in rows]
    return style.save(figure, path, data=style.rows_csv(guarded_rows))
