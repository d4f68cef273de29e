"""A result as text: the templates in `templates/`, and the words, numbers and tables that they use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvatlas.core import Cell, CellCoord, Estimate, Setting
from kvatlas.figures import style
from kvatlas.report.result import MapResult, Result
from kvatlas.stats.choice import Choice, kv_tokens_of

if TYPE_CHECKING:
    from jinja2 import Environment

#: Items that a sentence names before it only counts them.
_NAMED = 6


def one_page(result: Result) -> str:
    """The result as Markdown of about a page."""
    return _rendered("describe.md", result)


def every_map(result: Result) -> str:
    """The result as Markdown with every map, test and comparison."""
    return _rendered("describe_long.md", result)


def say(macro: str, about: Any) -> list[str]:
    """The sentences that a macro of `sentences.txt` makes of a result, or of a part of it: its paragraphs."""
    text = str(getattr(_environment().get_template("sentences.txt").module, macro)(about))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def recommendation(choice: Choice) -> str:
    """Recommend a setting for one model, with its loss and cost."""
    return " ".join(say("recommendation", choice))


def _rendered(template: str, result: Result) -> str:
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
    environment.filters |= {
        "percent": style.percent,
        "points": style.difference,
        "model": style.model,
        "label": style.label,
        "brief": brief,
        "p": p_text,
        "count": count,
        "listed": listed,
        "grouped": grouped,
        "setting": setting_text,
        "kept": lambda cell: f"{kv_tokens_of(cell) or 0:,.0f}",
        "at": at,
        "estimates": _estimates,
    }
    environment.globals |= {
        "say": say,
        "grid_table": grid_table,
        "benchmark_table": benchmark_table,
        "overview_table": overview_table,
        "comparison_table": comparison_table,
    }
    return environment


# -- words and numbers ---------------------------------------------------------------------------------------------


def p_text(p: float) -> str:
    """A p-value to three places; below that, a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def brief(share: float) -> str:
    """A share as points without more places than needed: 0.03 is `3`."""
    return f"{round(100 * share, 4):g}"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 map`, `3,742 problems`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(items: Iterable[str]) -> str:
    """The first items by name, the others as a number."""
    names = list(items)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def grouped(items: Iterable[Any], *attributes: str) -> Iterable[tuple[Any, list[Any]]]:
    """Items by the value of one or more attributes, in their order."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(attrgetter(*attributes)(item), []).append(item)
    return groups.items()


def at(coord: CellCoord, one: Any) -> str:
    """A place on the axes of a map: `local_window 16, ratio 0.3`."""
    return ", ".join(f"{name} {value}" for name, value in zip(one.axes, coord, strict=True))


def setting_text(choice: Choice, setting: Setting) -> str:
    """A setting by the parameters that differ between the candidates."""
    others = list(choice.settings.values())
    if not others:
        return str(setting)
    names = [
        f"{name} {value}"
        for name, value in setting.values.items()
        if value != "" and len({repr(other.values.get(name)) for other in others}) > 1
    ]
    return f"{setting.policy} {', '.join(names)}"


def _exact(one: MapResult, value: float) -> str:
    """A value in percent: to a tenth of a point, and of CSV maps to a hundredth where it was given so."""
    finer = f"{round(100 * value, 4):.2f}"
    return finer if one.map.validity is None and finer[-1] != "0" else style.percent(value)


def _estimates(coords: Iterable[CellCoord], one: MapResult) -> str:
    return listed(f"{_estimate(one.map.cells[coord].estimate)} at {at(coord, one)}" for coord in coords)


def _estimate(estimate: Estimate) -> str:
    interval = style.interval(estimate)
    return style.percent(estimate.value) + (f" ({interval})" if interval else "")


# -- tables ----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""

    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", r"\|").replace("\n", " ") for field in fields) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)])


def grid_table(one: MapResult) -> str:
    """The values of a map, marked where a loss of at most the margin, or of more, is proven."""
    (down, rows), (across, columns) = one.map.axes

    def value(coord: CellCoord) -> str:
        if coord not in one.map.cells:
            return "–"
        loss = one.losses.get(coord)
        mark = "" if loss is None else "*" if loss.shown else "!" if loss.broken else ""
        return _exact(one, one.map.cells[coord].estimate.value) + mark

    return table(
        [f"{style.model(one.map.model)} {one.map.policy}".strip() + f": {down} \\ {across}", *map(str, columns)],
        ([str(row), *(value((row, column)) for column in columns)] for row in rows),
    )


def benchmark_table(result: Result) -> str:
    """The lowest and the highest value of each policy, and the full cache's, by model and benchmark."""
    policies = list(dict.fromkeys(one.map.policy for one in result.single))
    with_full = any(one.map.full for one in result.single)
    rows = []
    for (model, benchmark), maps in grouped(result.single, "map.model", "map.benchmark"):
        spans = {one.map.policy: f"{_exact(one, min(one.values))} to {_exact(one, max(one.values))}" for one in maps}
        full = [_percent(maps[0].map.full)] if with_full else []
        problems = _or_dash(maps[0].problems)
        rows.append([style.model(model), benchmark, problems, *full, *(spans.get(name, "–") for name in policies)])
    names = ["Model", "Benchmark", "Problems", *(["full"] if with_full else [])]
    return table([*names, *(f"{policy or 'cells'}, lowest to highest" for policy in policies)], rows)


def overview_table(result: Result) -> str:
    """A row for each map: its size, its values and whether a difference between its cells is proven."""
    header = ["Map", "Problems", "Samples", "Cells", "Mean", "Min", "Max", "Highest cells", "Difference?", "Baselines"]
    return table(header, map(_overview_row, result.every))


def _overview_row(one: MapResult) -> list[str]:
    test = one.verdict.omnibus
    baselines = [f"{name} {_estimate(cell.estimate)}" for name, cell in one.map.baselines.items()]
    return [
        one.title,
        _or_dash(one.problems),
        _or_dash(one.samples),
        str(len(one.map.cells)),
        *map(style.percent, (one.mean, min(one.values), max(one.values))),
        "; ".join(at(coord, one) for coord in one.peaks),
        "unknown" if test is None else f"{'proven' if one.verdict.evidence else 'not proven'}, p {p_text(test.p)}",
        "; ".join(baselines) or "–",
    ]


def comparison_table(result: Result) -> str:
    """Paired comparisons: first minus second in points."""
    header = ["Model", "Benchmark", "First", "Second", "Cells", "Problems", "First - second (points)", "95 % interval"]
    rows = [
        [
            comparison.model,
            comparison.benchmark,
            comparison.first,
            comparison.second,
            str(comparison.cells),
            str(difference.problems),
            style.difference(difference.value),
            f"{style.difference(difference.low)} to {style.difference(difference.high)}",
            *map(p_text, (difference.p, comparison.p_holm, comparison.p_bh)),
            comparison.note,
        ]
        for comparison in result.comparisons
        for difference in [comparison.difference]
    ]
    return table([*header, "p", "p (Holm)", "p (BH)", "Note"], rows)


def _percent(cell: Cell | None) -> str:
    return "–" if cell is None else style.percent(cell.estimate.value)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
