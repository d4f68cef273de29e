"""Settings against one policy: a row for each setting, its difference to the policy with limits that hold at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvatlas.core import Note, grouped, mean_of
from kvatlas.figures import style
from kvatlas.figures.forest import Row, RowPanel, forest_figure
from kvatlas.figures.loss_axis import LossSpan
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.against_policy import AgainstTable
from kvatlas.stats.maps import POLICY
from kvatlas.stats.run_data import shown_policies
from kvatlas.text import axis_label, fixed, guarded, in_words, model_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def against_figure(
    tables: Sequence[AgainstTable],
    *,
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each model: the differences to the policy in points, the highest mean of a policy on top.

    Filled marks differ from the policy: their limits exclude 0.
    """
    options = options or FigureOptions()
    first = tables[0]
    every_row = list(chain.from_iterable(table.rows for table in tables))
    parameters = dict(chain.from_iterable(row.group for row in every_row))
    by_name = grouped(every_row, lambda row: row.name)
    means = {name: fmean(row.contrast.value for row in of_name) for name, of_name in by_name.items()}

    panels = []
    for table in tables:
        rows = []
        for row in sorted(table.rows, key=lambda row: -means[row.name]):
            values = dict(row.group)
            names = [style.tick_text(values.get(name, "")).lower() for name in parameters]
            span = LossSpan(100 * row.contrast.value, 100 * row.contrast.low, 100 * row.contrast.high)
            names = [options.named(row.name), *names]
            rows.append(Row(tuple(names), span, is_proven=row.contrast.excludes_zero))
        panels.append(RowPanel(model_name(table.model), (POLICY, *map(axis_label, parameters)), rows))
    return forest_figure(
        panels,
        f"{axis_label(first.metric)}, points above {in_words(first.policy)}",
        title=against_title(tables),
        about=list(_about_differences(tables, options)),
        notes=notes,
        options=options,
    )


def against_title(tables: Sequence[AgainstTable]) -> str:
    """Return how many settings are proven above the policy, and how many below it."""
    rows = list(chain.from_iterable(table.rows for table in tables))
    above = sum(row.contrast.low > 0 for row in rows)
    below = sum(row.contrast.high < 0 for row in rows)
    policy = tables[0].policy
    if not above and not below:
        return f"None of {len(rows)} settings is proven to differ from {policy}"
    return f"Of {len(rows)} settings {above} are proven above {policy} and {below} below it"


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
