"""The output of commands: tables, findings, budget audits, runs, and the progress of a sweep."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvatlas.core import Outcome, Setting, differing, grouped
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console

    from kvatlas.core import Finding
    from kvatlas.policies.audit import AuditedCell
    from kvatlas.sweeps import Progress

#: Columns of a table that goes to a file or a pipe, and of a text that wraps in a terminal at least.
_NO_EDGE, _NARROW = 10_000, 12
#: Verdicts that are always counted; others (a grader's timeout) only where there are any.
VERDICTS = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)
#: Seconds between two lines of progress.
INTERVAL = 10.0


def note(sentence: str) -> None:
    """Print a sentence on standard error."""
    typer.echo(visible(sentence), err=True)


def warn(sentences: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for sentence in sentences:
        note(f"Warning: {sentence}")


def print_rows(rows: Sequence[dict[str, Any]], as_json: bool = False, one_line: bool = False) -> None:
    """Print rows with equal keys as a table, or as JSON.

    In a terminal long texts wrap, or are cut to `one_line`. Names and numbers are never cut: a table that is too wide
    loses numbers from the right, and names them below.
    """
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    console = table_console()
    columns = {name: [visible(_cell_text(row[name])) for row in rows] for name in (rows[0] if rows else {})}
    widths = {name: max(map(len, (name, *texts))) for name, texts in columns.items()}
    numbers = [name for name in columns if all(isinstance(row[name], int | float) for row in rows)]
    left_out: list[str] = []

    def needed() -> int:
        whole = {*numbers, *list(columns)[:1]}
        return sum((widths[name] if name in whole else min(widths[name], _NARROW)) + 2 for name in columns)

    while numbers and needed() > console.width:
        left_out.insert(0, numbers.pop())
        del columns[left_out[0]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        whole = place == 0 or name in numbers
        table.add_column(name.replace("_", " "), no_wrap=one_line or whole, min_width=widths[name] if whole else None)
    for texts in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, texts))
    console.print(table)
    if left_out:
        typer.echo(f"Left out at {console.width} columns: {', '.join(left_out).replace('_', ' ')}; --json has all.")


def _cell_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(name if default == "required" else f"{name}={default}" for name, default in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def table_console() -> Console:
    """Return a console as wide as the terminal; tables of files and pipes do not wrap."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_NO_EDGE)


def print_findings(findings: Iterable[Finding], as_json: bool) -> None:
    """Print a line for each finding as it comes, or all of them as JSON; exit code 2 if one of them failed."""
    from kvatlas.core import Check

    rows = []
    for finding in findings:
        rows.append({**vars(finding), "status": finding.status.value})
        if not as_json:
            typer.echo(f"{finding.status.value:<8} {finding.name:<15} {finding}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if any(row["status"] == Check.FAILED for row in rows):
        raise typer.Exit(2)


def print_audit(cells: Sequence[AuditedCell]) -> None:
    """Print a table for each model, with the rules that policies share in rows and benchmarks in columns."""
    for model, own in grouped(cells, lambda cell: cell.model).items():
        names = differing(dict(cell.rule) for cell in own)
        same = ", ".join(f"{name} {value}" for name, value in own[0].rule if name not in names)
        rows: dict[object, dict[str, Any]] = {}
        for cell in own:
            values, audit = dict(cell.rule), cell.audit
            row = rows.setdefault(cell.rule, {name: values.get(name, "") for name in names})
            row[cell.benchmark] = f"{audit.median:,.0f} / {audit.worst:,} ({100 * audit.no_choice:.0f} %)"
        typer.echo(
            f"\nbudget audit of {model}{f' with {same}' if same else ''}: places for older thinking tokens at the "
            "first compression,\nmedian / worst problem (share of problems in which policies keep the same tokens)"
        )
        print_rows(list(rows.values()))


def print_run(folder: Path, show: int, as_json: bool = False, setting: Setting | None = None) -> None:
    """Print Pass@1, interval and cost of each benchmark and the beginning of a few traces; as JSON whole traces.

    `setting` selects one of several settings of the run.
    """
    from rich.console import Console
    from rich.text import Text

    from kvatlas.figures.style import percent
    from kvatlas.report.text import say
    from kvatlas.results import Store
    from kvatlas.results.export import record
    from kvatlas.stats.losses import FULL
    from kvatlas.stats.power import provable
    from kvatlas.stats.run_data import RunData

    run = RunData.open(folder)
    cells = [cell for cell in run.cells if setting in (None, cell.expected.setting)]
    keys = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    with Store.open(folder) as store:
        own = ((key, trace) for key, trace in store.traces() if (key, trace.setting, trace.benchmark) in keys)
        traces = list(islice(own, min(show, sys.maxsize)))
    rows: list[dict[str, Any]] = []
    for measured in cells:
        cell, counts = measured.cell.to_dict(), measured.verdicts
        named = {"benchmark": measured.expected.benchmark, "pass_at_1": cell["value"]}
        verdicts = {str(name): counts[name] for name in dict.fromkeys([*VERDICTS, *counts])}
        rows.append({**named, "mean_kv_tokens": cell["kept_tokens_mean"], **cell, "verdicts": verdicts})
    if as_json:
        expected = cells[0].expected
        document = {
            "model": expected.model,
            "setting": {"policy": expected.setting.policy, **expected.setting.values},
            "benchmarks": rows,
            "traces": [record(key, trace) for key, trace in traces],
        }
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    names = dict.fromkeys(name for row in rows for name in row["verdicts"])
    print_rows(
        [
            {
                "benchmark": row["benchmark"],
                "Pass@1": percent(row["pass_at_1"] / 100),
                "95 % interval": "unknown"
                if row["low"] is None or row["high"] is None
                else f"{percent(row['low'] / 100)} to {percent(row['high'] / 100)}",
                "problems": row["problems"],
                **{name: row["verdicts"].get(name, 0) for name in names},
                "kept tokens": round(row["mean_kv_tokens"]),
                "output tokens": round(row["output_tokens_mean"]),
            }
            for row in rows
        ],
    )
    compressing = [cell for cell in cells if cell.setting != FULL]
    if compressing:
        sizes = [len(cell.problems) for cell in compressing]
        typer.echo("\n" + " ".join(say("provable", provable(sizes, run.margin, 1))))
    console = Console()
    for _, trace in traces:
        answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
        # Model output is data: printed as text, never as markup.
        title = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.verdict}{answer}"
        console.print(Text(visible(title), style="bold"))
        console.print(Text(visible(textwrap.shorten(trace.text, 800, placeholder=" ..."))))


def print_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean maps, what was found and what to open."""
    from rich.console import Console
    from rich.text import Text

    from kvatlas.report.demo import write_demo
    from kvatlas.report.result import analyse
    from kvatlas.report.text import mean_tables, recommendation

    analysis, written = write_demo(folder)
    typer.echo(mean_tables(analyse([analysis])))
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    lines = [
        *(("Found", recommendation(choice)) for choice in analysis.choices),
        ("Open", f"{folder / 'report.html'} (or: kvatlas view {folder})"),
        ("Figures", f"{pictures} (and svg, pdf) in {folder}, their numbers in maps.csv"),
    ]
    for name, text in lines:
        # Not wrapped: paths are copied.
        Console().print(Text(visible(f"{name:<9}{text}")), soft_wrap=True)


def progress_display(quiet: bool = False) -> Callable[[Progress], None]:
    """Return the function that a sweep calls after each trace; it prints a line now and then, and at the end."""
    began = last = time.monotonic()
    before = -1

    def on_trace(progress: Progress) -> None:
        nonlocal before, last
        if before < 0:
            before = progress.done - 1
        now = time.monotonic()
        if not quiet and (now - last >= INTERVAL or progress.done == progress.total):
            last = now
            note(progress.text(before, now - began))

    return on_trace


def answers_display(name: str) -> Callable[[int, int], None]:
    """Return the function that is called after each answer of an endpoint; it prints ten lines."""

    def on_answer(done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            note(f"{name}: {done:,} of {total:,} answers")

    return on_answer
