"""The output of commands: sentences, tables, results of checks, budget audits."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from kvatlas.core import AuditedCell, Check, CheckResult, differing, grouped
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a table that goes to a file or a pipe.
_NO_EDGE = 10_000
#: A number, or an interval of two.
_NUMBER = re.compile(r"[-+]?[\d.,]+( to [-+]?[\d.,]+)?")
#: Columns of a text that wraps in a terminal, at least.
_NARROW = 12


def note(sentence: str) -> None:
    """Print a sentence on standard error."""
    typer.echo(visible(sentence), err=True)


def warn(sentences: Iterable[str]) -> None:
    """Print warnings on standard error."""
    for sentence in sentences:
        note(f"Warning: {sentence}")


def print_text(text: str) -> None:
    """Print lines of text or Markdown; in a terminal sentences wrap between words, items under their text.

    A remark in brackets behind columns wraps under itself. Lines of tables and of code stay as they are.
    """
    console = table_console()
    if not console.is_terminal:
        typer.echo(text)
        return

    for line in text.split("\n"):
        wrapped = [line]
        if not line.startswith(("|", "    ")):
            remark = re.match(r".*\S {2,}(?=\()", line)
            indent = " " * remark.end() if remark else ""
            if line.startswith("- "):
                indent = "  "
            wrapper = textwrap.TextWrapper(
                console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            wrapped = wrapper.wrap(line) or [""]
        typer.echo("\n".join(wrapped))


def print_rows(rows: Sequence[dict[str, Any]], as_json: bool = False) -> None:
    """Print rows with equal keys as a table, or as JSON; numbers are aligned at their right.

    In a terminal long texts wrap. Names and numbers are never cut: a table that is too wide loses numbers from the
    right, and names them below.
    """
    from rich.markup import escape
    from rich.table import Table

    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    texts: dict[str, list[str]] = {}
    widths: dict[str, int] = {}
    numeric = []
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        texts[name] = [visible(str(value)) for value in values]
        widths[name] = max(map(len, (name, *texts[name])))
        if all(isinstance(value, int | float) or _NUMBER.fullmatch(str(value)) for value in values):
            numeric.append(name)

    # Names, in the first column, and numbers need their whole width; other texts wrap.
    console = table_console()
    whole = {*numeric, *list(texts)[:1]}
    needed = sum(2 + (width if name in whole else min(width, _NARROW)) for name, width in widths.items())
    left_out: list[str] = []
    for name in reversed(numeric):
        if needed <= console.width:
            break
        left_out.insert(0, name)
        needed -= 2 + widths[name]

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [name for name in texts if name not in left_out]
    for name in shown:
        is_whole = name in numeric or name == shown[0]
        table.add_column(
            name.replace("_", " "),
            justify="right" if name in numeric else "left",
            no_wrap=is_whole,
            min_width=widths[name] if is_whole else None,
            overflow="fold",
        )
    for cells in zip(*(texts[name] for name in shown), strict=True):
        table.add_row(*map(escape, cells))
    console.print(table)
    if left_out:
        typer.echo(f"Left out at {console.width} columns: {', '.join(left_out).replace('_', ' ')}; --json has all.")


def table_console() -> Console:
    """Return a console as wide as the terminal; tables of files and pipes do not wrap."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_NO_EDGE)


def print_check_results(results: Iterable[CheckResult], as_json: bool) -> None:
    """Print a line for each result as it comes, or all of them as JSON; exit code 2 if one of the checks failed."""
    rows = []
    for result in results:
        rows.append({**vars(result), "status": result.status.value})
        if not as_json:
            typer.echo(f"{result.status.value:<8} {result.name:<15} {result}")
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    if any(row["status"] == Check.FAILED for row in rows):
        raise typer.Exit(2)


def print_audit(cells: Sequence[AuditedCell]) -> None:
    """Print a table for each model, with the rules that policies share in rows and benchmarks in columns."""
    for model, audited in grouped(cells, lambda cell: cell.model).items():
        names = differing(dict(cell.rule) for cell in audited)
        same = ", ".join(f"{name} {value}" for name, value in audited[0].rule if name not in names)
        rows: dict[object, dict[str, Any]] = {}
        for cell in audited:
            values = dict(cell.rule)
            audit = cell.audit
            row = rows.setdefault(cell.rule, {name: values.get(name, "") for name in names})
            row[cell.benchmark] = f"{audit.median:,.0f} / {audit.worst:,} ({100 * audit.no_choice:.0f} %)"

        print_text(
            f"\nbudget audit of {model}{f' with {same}' if same else ''}: places for older thinking tokens at the "
            "first compression, median / worst problem (share of problems in which policies keep the same tokens)"
        )
        print_rows(list(rows.values()))
