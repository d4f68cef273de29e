"""A result as text: the templates in `templates/`, and the words, numbers and tables that they use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvatlas.columns import Column, added_columns
from kvatlas.core import AGAIN, Cell, CellCoord, Claim, Setting, grouped
from kvatlas.report.as_data import Json
from kvatlas.report.next_steps import next_steps
from kvatlas.report.result import Evidence, MapResult, Result
from kvatlas.report.sentences import level_sentence, memory_lines
from kvatlas.stats.choice import Choice
from kvatlas.stats.estimates import problem_count
from kvatlas.stats.maps import SettingTable
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.run_data import setting_words
from kvatlas.text import axis_label, counted, interval_text, limit_text, model_name, p_text, percent_text, points_text

if TYPE_CHECKING:
    from jinja2 import Environment

#: Items that a sentence names before it only counts them.
_NAMED = 6


def one_page(result: Result) -> str:
    """Return the result as Markdown of about a page."""
    return from_template("describe.md", result)


def mean_tables(result: Result) -> str:
    """Return a Markdown table for each model and policy: the mean over benchmarks, else one for each benchmark."""
    return from_template("grids.md", result)


def every_map(result: Result) -> str:
    """Return the result as Markdown with every map, test and comparison."""
    return from_template("describe_long.md", result)


def as_document(result: Result) -> Json:
    """Return the document of `kvatlas describe --json`: the result as data, and what to try next, with specs."""
    return {**result.to_dict(), "next_steps": [vars(step) for step in next_steps(result)]}


def say(macro: str, about: Any, *others: Any) -> list[str]:
    """Return the sentences that a macro of `sentences.txt` makes of a result, or of a part of it: its paragraphs."""
    text = str(getattr(_environment().get_template("sentences.txt").module, macro)(about, *others))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def recommendation(choice: Choice) -> str:
    """Recommend a setting for one model, with its loss and cost."""
    return " ".join(say("recommendation", choice))


def from_template(template: str, result: Any) -> str:
    """Return a result, or what another template calls so, as the Markdown of a template."""
    text = _environment().get_template(template).render(result=result)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = resources.files("kvatlas.report") / "templates"
    # The text is Markdown: a page escapes each sentence where it puts it.
    environment = Environment(
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(lambda name: (folder / name).read_text("utf-8")),
    )
    # Functions have their names in templates, texts without `_text`.
    texts = (percent_text, limit_text, at_most_text, brief, p_text, setting_text, recommendation, estimates_text)
    filters = (*texts, level_sentence, memory_lines)
    environment.filters |= {function.__name__.removesuffix("_text"): function for function in filters}
    environment.filters |= {
        "model": model_name,
        "label": axis_label,
        "count": counted,
        "listed": listed_items,
        "grouped": lambda items, *names: grouped(items, attrgetter(*names)).items(),
        "share": lambda share: f"{100 * share:g}",
        "times": lambda ratio: f"{100 * ratio:.0f} %",
        "at": place_on_axes,
    }
    tables = (added_tables, changes_table, limits_table, grid_table, benchmark_table, comparison_table, settings_table)
    others = (say, next_steps, settings_by_benchmark, setting_comparisons)
    environment.globals |= {function.__name__: function for function in (*tables, *others)}
    return environment


# -- words and numbers ---------------------------------------------------------------------------------------------


def brief(share: float) -> str:
    """Return a share as points without more places than needed: 0.03 is `3`."""
    return f"{round(100 * share, 4):g}"


def at_most_text(limit: float, margin: float) -> str:
    """Return an upper limit of a loss, one below 0 as a gain: `at most 2.9`, `a gain of at least 1.2`."""
    text = limit_text(limit, margin)
    return f"a gain of at least {percent_text(-limit)}" if text.startswith("-") else f"at most {text}"


def listed_items(items: Iterable[str]) -> str:
    """Return the first items by name, the others as a number."""
    names = list(items)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def place_on_axes(coord: CellCoord, one: Any) -> str:
    """Return a place on the axes of a map: `local_window 16, ratio 0.3`."""
    return ", ".join(f"{name} {value}" for name, value in zip(one.map.axis_names, coord, strict=True))


def setting_text(choice: Choice, setting: Setting) -> str:
    """Return a setting by the parameters that differ between the candidates."""
    return setting_words(setting, list(choice.settings.values()))


def _exact_percent(one: MapResult, value: float) -> str:
    """Return a value in percent: to a tenth of a point, and of CSV maps to a hundredth where it was given so."""
    finer = f"{round(100 * value, 4):.2f}"
    return finer if one.map.validity is None and finer[-1] != "0" else percent_text(value)


def estimates_text(coords: Iterable[CellCoord], one: MapResult) -> str:
    """Return the values of cells with their intervals and places."""
    texts = []
    for coord in coords:
        estimate = one.map.cells[coord].estimate
        interval = interval_text(estimate)
        limits = f" ({interval})" if interval else ""
        texts.append(f"{percent_text(estimate.value)}{limits} at {place_on_axes(coord, one)}")
    return listed_items(texts)


# -- tables ----------------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned, so that a terminal shows it as one."""
    table = [list(map(_escaped, fields)) for fields in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    lines = []
    for fields in table:
        padded = [field.ljust(width) for field, width in zip(fields, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    ruler = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([lines[0], f"|{ruler}|", *lines[1:]])


def _escaped(field: str) -> str:
    """Return a field of a Markdown table in one line, its strokes escaped."""
    return field.replace("|", r"\|").replace("\n", " ")


def grid_table(result: Evidence, one: MapResult) -> str:
    """Return the values of a map, marked where a loss of at most the margin, or of more, is proven.

    The largest vertical value is on top, as in figures.
    """
    name = f"{model_name(one.map.model)} {one.map.policy_words}".strip()
    if len({grid.map.benchmark for grid in result.grids}) > 1:
        name += f" on {one.map.benchmark}"

    texts = {}
    for coord, cell in one.map.cells.items():
        texts[coord] = _exact_percent(one, cell.estimate.value) + _loss_mark(one.losses.get(coord))
    return _table_on_axes(one, name, texts)


def added_tables(one: MapResult) -> list[str]:
    """Return a table of each number that a user added to the cells of a map: measures, and titled columns."""
    tables = []
    for column in added_columns(list(one.map.cells.values())):
        texts = {coord: number_text(column, cell) for coord, cell in one.map.cells.items()}
        tables.append(_table_on_axes(one, column.page_words()["choice"], texts))
    return tables


def number_text(column: Column, cell: Cell) -> str:
    """Return the number of a cell in a column, shares and counts of traces in percent."""
    value = column.page_value(cell)
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.4g}"


def _table_on_axes(one: MapResult, title: str, texts: Mapping[CellCoord, str]) -> str:
    """Return a text of each cell of a map; the largest vertical value is on top, as in figures."""
    (down, rows), (across, columns) = one.map.axes
    lines = []
    for row in reversed(rows):
        in_row = [texts.get((row, column), "–") for column in columns]
        lines.append([str(row), *in_row])
    return markdown_table([f"{title}: {down} \\ {across}", *map(str, columns)], lines)


def _loss_mark(loss: Difference | None) -> str:
    """Return `*` where a loss of at most the margin is proven, `!` where a larger one is; twice by every claim."""
    if loss is None or not (loss.keeps_any or loss.breaks_any):
        return ""
    sign = "*" if loss.keeps_any else "!"
    return 2 * sign if loss.keeps_like or loss.breaks_like else sign


def limits_table(choice: Choice) -> str:
    """Return the losses of all settings with their limits by each claim, in points."""
    header = ["Setting", "Lost", "95 %"]
    for claim in Claim:
        header += [f"At most, {claim.words}", "Any margin"]
    header += ["p", "Pairs", "Compressed"]

    rows = []
    for id_, loss in choice.losses.items():
        name = setting_text(choice, choice.settings[id_]) + _loss_mark(loss)
        row = [name, percent_text(loss.value), f"{percent_text(loss.low)} to {percent_text(loss.high)}"]
        for claim in Claim:
            of_claim = loss.claims.get(claim)
            limits = () if of_claim is None or loss.is_control else (of_claim.limit, of_claim.joint_limit)
            row += [percent_text(limit) for limit in limits] or ["–", "–"]
        pairs = f"{loss.pairs - loss.missing:,} of {loss.pairs:,}" if loss.missing else f"{loss.pairs:,}"
        rows.append([*row, p_text(loss.p), pairs, f"{loss.compressed:,} of {loss.traces:,}"])
    return markdown_table(header, rows)


def changes_table(choice: Choice) -> str:
    """Return the changed answers of all settings beside the reference's, the reference asked again first."""
    settings = [one.setting for one in choice.changes]
    rows = []
    for one in choice.changes:
        name = "asked again" if one.setting == AGAIN else setting_words(one.setting, settings)
        texts = "–" if one.texts is None else str(one.texts)
        rows.append([name, str(one.pairs), texts, str(one.lost), str(one.gained)])
    return markdown_table(["Setting", "Problems", "Texts changed", "Answers lost", "Gained"], rows)


def benchmark_table(result: Result) -> str:
    """Return the lowest and the highest value of each policy, and the full cache's, by model and benchmark."""
    single = [one for one in result.maps if not one.map.is_mean]
    policies = list(dict.fromkeys(one.map.policy for one in single))
    rows = []
    for (model, benchmark), maps in grouped(single, attrgetter("map.model", "map.benchmark")).items():
        full = maps[0].map.full
        problems = problem_count(maps[0].map)
        ranges = {}
        for one in maps:
            ranges[one.map.policy] = f"{_exact_percent(one, min(one.values))} to {_exact_percent(one, max(one.values))}"
        count = "–" if problems is None else str(problems)
        full_text = "–" if full is None else percent_text(full.estimate.value)
        rows.append([model_name(model), benchmark, count, full_text, *(ranges.get(policy, "–") for policy in policies)])

    columns = [f"{policy or 'cells'}, lowest to highest" for policy in policies]
    reference = result.reference.removeprefix("the ").removesuffix(" cache")
    return markdown_table(["Model", "Benchmark", "Problems", reference, *columns], rows)


def settings_table(table: SettingTable) -> str:
    """Return the settings of a model with values, losses against the full cache and costs, the highest first."""
    has_losses = any(row.loss for row in table.rows)
    header = ["Setting", axis_label(table.metric), "95 %"]
    if has_losses:
        header += ["Points lost", "95 %"]
    added = added_columns([row.cell for row in table.rows])
    header += ["KV tokens", "New tokens", "Seconds", *(column.page_words()["choice"] for column in added)]

    rows = []
    for row in table.rows:
        cell = row.cell
        value = percent_text(cell.estimate.value) + _loss_mark(row.loss)
        fields = [row.name, value, interval_text(cell.estimate) or "–"]
        if row.loss is not None:
            fields += [percent_text(row.loss.value), f"{percent_text(row.loss.low)} to {percent_text(row.loss.high)}"]
        elif has_losses:
            fields += ["–", "–"]
        for cost in (cell.number("mean_kv_tokens"), cell.number("output_tokens")):
            fields.append("–" if cost is None else f"{cost:,.0f}")
        seconds = cell.number("seconds")
        fields.append("–" if seconds is None else f"{seconds:.3g}")
        rows.append([*fields, *(number_text(column, cell) for column in added)])
    return markdown_table(header, rows)


def settings_by_benchmark(table: SettingTable) -> str:
    """Return the value of each setting on each benchmark."""
    rows = []
    for row in table.rows:
        estimates = [row.by_benchmark[benchmark].estimate for benchmark in table.benchmarks]
        rows.append([row.name, *(percent_text(estimate.value) for estimate in estimates)])
    return markdown_table(["Setting", *table.benchmarks], rows)


#: Comparisons of settings that a page of text shows.
_COMPARISONS = 20


def setting_comparisons(result: Result) -> str:
    """Return the comparisons of settings, the surest first; of many the first ones."""
    surest = sorted(result.comparisons, key=lambda one: (one.difference.p_holm, -abs(one.difference.value)))
    rows = []
    for comparison in surest[:_COMPARISONS]:
        difference = comparison.difference
        limits = f"{points_text(difference.low)} to {points_text(difference.high)}"
        model = model_name(comparison.model) if comparison.model != comparison.first else ""
        names = [comparison.first, comparison.second]
        about = comparison.note or model
        rows.append([*names, points_text(difference.value), limits, p_text(difference.p_holm), about])

    text = markdown_table(["First", "Second", "First - second", "95 %", "p (Holm)", "Of"], rows)
    left_out = len(surest) - len(rows)
    return f"{text}\n\n{left_out} more: --long has all." if left_out else text


#: The columns of `comparison_table`.
_COMPARISON_COLUMNS = (
    "Model", "Benchmark", "First", "Second", "Cells", "Problems", "First - second (points)", "95 % interval", "p",
    "p (Holm)", "Note",
)  # fmt: skip


def comparison_table(result: Result) -> str:
    """Return the paired comparisons: first minus second in points."""
    rows = []
    for one in result.comparisons:
        difference = one.difference
        names = [one.model, one.benchmark, one.first, one.second, str(one.cells), str(difference.problems)]
        limits = f"{points_text(difference.low)} to {points_text(difference.high)}"
        p_values = [p_text(difference.p), p_text(difference.p_holm)]
        rows.append([*names, points_text(difference.value), limits, *p_values, one.note])
    return markdown_table(_COMPARISON_COLUMNS, rows)
