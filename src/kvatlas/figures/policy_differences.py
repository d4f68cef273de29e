"""Settings against one policy: a row for each policy, a mark with its limits for each group of shared values."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Note, mean_of
from kvatlas.figures import colours, style
from kvatlas.figures.style import (
    FigureOptions,
    Line,
    Margins,
    finish_texts,
    line_axes,
    make_panels,
    text_width,
    write_above,
)
from kvatlas.stats.against_policy import AgainstPolicy, AgainstTable
from kvatlas.stats.run_data import shown_policies
from kvatlas.text import axis_label, fixed, guarded, in_words, model_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of the widest figure with one panel in a row.
_NARROW = 5.0
#: Inches of the names of rows, at most.
_NAMES = 1.6
#: Inches between two marks of a row, and beside them.
_MARK_STEP = 0.058
_ROW_GAP = 0.085
#: Inches below a panel.
_BELOW = 0.42

#: The values that a setting shares with its partner.
Group = tuple[tuple[str, object], ...]


class _GroupRows(NamedTuple):
    """The names of all rows, the highest first, and the groups of marks."""

    names: list[str]
    groups: list[Group]

    @property
    def high(self) -> float:
        """The height of a panel in inches."""
        return len(self.names) * (len(self.groups) * _MARK_STEP + _ROW_GAP)

    def place(self, row: AgainstPolicy) -> float:
        """Return the height of a mark; rows are one apart."""
        index = self.groups.index(row.group)
        inner = len(self.groups) * _MARK_STEP
        share = inner / (inner + _ROW_GAP)
        return self.names.index(row.name) + share * ((index + 0.5) / len(self.groups) - 0.5)


def against_figure(
    tables: Sequence[AgainstTable],
    *,
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each model: the differences to the policy in points, with limits that hold all at once.

    Filled marks differ from the policy: their limits exclude 0.
    """
    options = options or FigureOptions()
    every_row = list(chain.from_iterable(table.rows for table in tables))

    # The rows of names, the highest mean difference first, and the groups of marks in each.
    values: dict[str, list[float]] = {}
    for row in every_row:
        values.setdefault(row.name, []).append(row.contrast.value)
    names = sorted(values, key=lambda name: -statistics.fmean(values[name]))
    rows = _GroupRows(names, list(dict.fromkeys(row.group for row in every_row)))

    with options.applied():
        # A line for each group in its colour; none for a single group without a name.
        legend = []
        for index, group in enumerate(rows.groups):
            words = ", ".join(
                f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in group
            )
            if words:
                colour = _group_colour(index, options)
                legend.append(Line(f"{_MARK_NAMES[_marker(index)]} {in_words(words)}", style.SMALL_TYPE, colour))

        # The panel of each model under its name, the first one of a row under the legend, too.
        across = 1 if options.widest < _NARROW else min(len(tables), 2)
        models = [
            Line(options.named(model_name(table.model)), style.NAME_TYPE, options.colours.ink, "bold")
            for table in tables
        ]
        above = style.height_of([*legend, models[0]]) + 0.08
        names_width = max(text_width(options.named(name)) for name in rows.names)
        figure, panels = make_panels(
            options,
            (options.inches or options.widest, rows.high),
            len(tables),
            across,
            Margins(min(names_width, _NAMES) + 0.12, 0.08, 0.15, above, _BELOW),
            title=against_title(tables),
            about=_about_differences(tables, options),
            notes=notes,
        )
        low = min(100 * row.contrast.low for row in every_row)
        high = max(100 * row.contrast.high for row in every_row)
        gap = 0.04 * (high - low)
        for index, (panel, table) in enumerate(zip(panels, tables, strict=True)):
            is_first = index % across == 0
            write_above(panel, [models[index], *(legend if is_first else [])])
            _draw_differences(panel, table, rows, options)
            panel.set(
                ylim=(len(rows.names) - 0.5, -0.5),
                xlim=(low - gap, high + gap),
                xticks=style.round_values(low - gap, high + gap),
            )
            panel.set_yticks(range(len(rows.names)), [options.named(name) for name in rows.names] if is_first else [])
            panel.set_xlabel(
                f"{options.named(axis_label(table.metric))}, points above {options.named(table.policy)}",
                fontsize=style.NAME_TYPE,
                labelpad=2,
            )
        finish_texts(figure, options)
        return figure


def against_title(tables: Sequence[AgainstTable]) -> str:
    """Return how many settings are proven above the policy, and how many below it."""
    rows = list(chain.from_iterable(table.rows for table in tables))
    above = sum(row.contrast.low > 0 for row in rows)
    below = sum(row.contrast.high < 0 for row in rows)
    policy = tables[0].policy
    if not above and not below:
        return f"None of {len(rows)} settings is proven to differ from {policy}"
    return f"Of {len(rows)} settings {above} are proven above {policy} and {below} below it"


#: The marks as characters.
_MARK_NAMES: Mapping[str, str] = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}


def _marker(index: int) -> str:
    return list(_MARK_NAMES)[index % len(_MARK_NAMES)]


def _group_colour(index: int, options: FigureOptions) -> str:
    return options.colours.lines[index % len(colours.LINES)]


def _draw_differences(panel: Axes, table: AgainstTable, rows: _GroupRows, options: FigureOptions) -> None:
    """Draw the marks of a model with their limits, the line of no difference, and a pale band on every second row."""
    line_axes(panel, options, grid="x")
    for index in range(0, len(rows.names), 2):
        panel.axhspan(index - 0.5, index + 0.5, color=options.colours.soft, alpha=0.08, linewidth=0, zorder=0)
    panel.axvline(0, color=options.colours.ink, linewidth=0.8, zorder=1)
    panel.tick_params(axis="y", length=0)

    for row in table.rows:
        index = rows.groups.index(row.group)
        colour = _group_colour(index, options)
        place = rows.place(row)
        contrast = row.contrast
        if options.intervals is not False:
            panel.plot([100 * contrast.low, 100 * contrast.high], [place, place], color=colour, lw=0.7, zorder=2)
        face = colour if contrast.excludes_zero else options.colours.ground
        panel.plot(100 * contrast.value, place, _marker(index), color=colour, mfc=face, ms=2.8, mew=0.8, zorder=3)


def _about_differences(tables: Sequence[AgainstTable], options: FigureOptions) -> Iterator[str]:
    """Yield the clauses about all panels."""
    first = tables[0]
    yield f"each setting minus {options.named(first.policy)} with the same values, on the same problems"
    benchmarks = {table.benchmarks for table in tables}
    if len(benchmarks) == 1:
        names = first.benchmarks
        yield options.named(names[0]) if len(names) == 1 else f"{mean_of(len(names))} benchmarks"

    problems = sorted({table.problems for table in tables})
    yield " and ".join(f"{count:,}" for count in problems) + " problems"
    if options.intervals is not False:
        yield "lines: 95 % limits that hold for all settings of a model at once; filled: they exclude 0"
    reach = " and ".join(fixed(100 * table.detectable) for table in tables)
    yield f"differences of about {reach} points would have been shown"


def against_csv(tables: Sequence[AgainstTable]) -> str:
    """Return the differences as CSV, in points with their limits, and whether they are proven."""
    rows: list[list[Any]] = [["model", "setting", "against", "difference", "low", "high", "proven"]]
    every_row = chain.from_iterable(table.rows for table in tables)
    settings = chain.from_iterable((row.setting, row.partner) for row in every_row)
    shown = shown_policies(setting.policy for setting in settings)

    for table in tables:
        for row in table.rows:
            contrast = row.contrast
            setting = row.setting.shown_as(shown[row.setting.policy])
            partner = row.partner.shown_as(shown[row.partner.policy])
            names = map(guarded, (table.model, setting, partner))
            rows.append([*names, *contrast.in_percent().values(), int(contrast.excludes_zero)])
    return style.rows_csv(rows)
