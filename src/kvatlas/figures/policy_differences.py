"""Settings against one policy: a row for each policy, a mark with its limits for each group of shared values."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Note, mean_of
from kvatlas.figures import colours, style
from kvatlas.figures.style import FigureOptions, Line, Margins, line_axes, settle, sheet, text_width, write_above
from kvatlas.stats.against_policy import AgainstPolicy, AgainstTable
from kvatlas.stats.run_data import shown_policies
from kvatlas.text import axis_label, fixed, guarded, model_name

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


class _Rows(NamedTuple):
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
    rows = _Rows(_ordered_names(tables), _groups(tables))
    with options.applied():
        figure, panels = _panels(tables, rows, notes, options)
        across = _across(tables, options)
        limits = _limits(tables)
        for index, (panel, table) in enumerate(zip(panels, tables, strict=True)):
            _draw(panel, table, rows, options)
            panel.set(ylim=(len(rows.names) - 0.5, -0.5), xlim=limits)
            is_first = index % across == 0
            panel.set_yticks(range(len(rows.names)), [options.named(name) for name in rows.names] if is_first else [])
            panel.set_xlabel(
                f"{options.named(axis_label(table.metric))}, points above {options.named(table.policy)}",
                fontsize=style.NAME_TYPE,
                labelpad=2,
            )
        settle(figure, options)
        return figure


def finding(tables: Sequence[AgainstTable]) -> str:
    """Return how many settings are proven above the policy, and how many below it."""
    rows = _every_row(tables)
    above = sum(row.contrast.low > 0 for row in rows)
    below = sum(row.contrast.high < 0 for row in rows)
    policy = tables[0].policy
    if not above and not below:
        return f"None of {len(rows)} settings is proven to differ from {policy}"
    return f"Of {len(rows)} settings {above} are proven above {policy} and {below} below it"


def _every_row(tables: Sequence[AgainstTable]) -> list[AgainstPolicy]:
    return list(chain.from_iterable(table.rows for table in tables))


def _ordered_names(tables: Sequence[AgainstTable]) -> list[str]:
    """Return the names of all rows, the highest mean difference first."""
    values: dict[str, list[float]] = {}
    for row in _every_row(tables):
        values.setdefault(row.name, []).append(row.contrast.value)
    return sorted(values, key=lambda name: -statistics.fmean(values[name]))


def _groups(tables: Sequence[AgainstTable]) -> list[Group]:
    return list(dict.fromkeys(row.group for row in _every_row(tables)))


def _limits(tables: Sequence[AgainstTable]) -> tuple[float, float]:
    contrasts = [row.contrast for row in _every_row(tables)]
    lows = [100 * contrast.low for contrast in contrasts]
    highs = [100 * contrast.high for contrast in contrasts]
    gap = 0.04 * (max(highs) - min(lows))
    return min(lows) - gap, max(highs) + gap


def _across(tables: Sequence[AgainstTable], options: FigureOptions) -> int:
    return 1 if options.widest < _NARROW else min(len(tables), 2)


def _panels(
    tables: Sequence[AgainstTable], rows: _Rows, notes: Sequence[Note], options: FigureOptions
) -> tuple[Figure, list[Axes]]:
    across = _across(tables, options)
    width = options.inches or options.widest
    names = max(text_width(options.named(name)) for name in rows.names)
    legend = _legend(rows, options)
    named = [Line(options.named(model_name(tables[0].model)), style.NAME_TYPE, options.colours.ink, "bold")]
    above = style.height_of([*legend, *named]) + 0.08
    margins = Margins(min(names, _NAMES) + 0.12, 0.08, 0.15, above, _BELOW)
    figure, panels = sheet(
        options,
        (width, rows.high),
        len(tables),
        across,
        margins,
        title=finding(tables),
        about=_about(tables, options),
        notes=notes,
    )
    for index, (panel, table) in enumerate(zip(panels, tables, strict=True)):
        name = Line(options.named(model_name(table.model)), style.NAME_TYPE, options.colours.ink, "bold")
        write_above(panel, [name, *(legend if index % across == 0 else [])])
    return figure, panels


def _legend(rows: _Rows, options: FigureOptions) -> list[Line]:
    """Return a line for each group in its colour; none for a single group without a name."""
    lines = []
    for index, group in enumerate(rows.groups):
        values = ", ".join(f"{name} {_value_text(value)}" for name, value in group)
        if values:
            lines.append(Line(f"{_MARK_NAMES[_marker(index)]} {values}", style.SMALL_TYPE, _colour(index, options)))
    return lines


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


#: The marks as characters.
_MARK_NAMES: Mapping[str, str] = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚"}


def _marker(index: int) -> str:
    return list(_MARK_NAMES)[index % len(_MARK_NAMES)]


def _colour(index: int, options: FigureOptions) -> str:
    return options.colours.lines[index % len(colours.LINES)]


def _draw(panel: Axes, table: AgainstTable, rows: _Rows, options: FigureOptions) -> None:
    """Draw the marks of a model with their limits, the line of no difference, and a pale band on every second row."""
    line_axes(panel, options, grid="x")
    for index in range(0, len(rows.names), 2):
        panel.axhspan(index - 0.5, index + 0.5, color=options.colours.soft, alpha=0.08, linewidth=0, zorder=0)
    panel.axvline(0, color=options.colours.ink, linewidth=0.8, zorder=1)
    panel.tick_params(axis="y", length=0)
    for row in table.rows:
        index = rows.groups.index(row.group)
        colour = _colour(index, options)
        place = rows.place(row)
        contrast = row.contrast
        if options.intervals is not False:
            panel.plot([100 * contrast.low, 100 * contrast.high], [place, place], color=colour, lw=0.7, zorder=2)
        face = colour if row.is_proven else options.colours.ground
        panel.plot(100 * contrast.value, place, _marker(index), color=colour, mfc=face, ms=2.8, mew=0.8, zorder=3)


def _about(tables: Sequence[AgainstTable], options: FigureOptions) -> Iterator[str]:
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


def data_csv(tables: Sequence[AgainstTable]) -> str:
    """Return the differences as CSV, in points with their limits, and whether they are proven."""
    rows: list[list[Any]] = [["model", "setting", "against", "difference", "low", "high", "proven"]]
    settings = chain.from_iterable((row.setting, row.partner) for row in _every_row(tables))
    shown = shown_policies(setting.policy for setting in settings)
    for table in tables:
        for row in table.rows:
            contrast = row.contrast
            setting = row.setting.shown_as(shown[row.setting.policy])
            partner = row.partner.shown_as(shown[row.partner.policy])
            numbers = [round(100 * value, 4) for value in (contrast.value, contrast.low, contrast.high)]
            names = map(guarded, (table.model, setting, partner))
            rows.append([*names, *numbers, int(row.is_proven)])
    return style.rows_csv(rows)
