"""The output of commands: tables, findings, budget audits, runs, and the progress of a sweep."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from kvatlas import __version__
from kvatlas.columns import cell_document
from kvatlas.core import KvatlasError, Outcome, Setting, differing, grouped
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvatlas.core import AuditedCell, Finding, Trace
    from kvatlas.report.materials import RunMaterials
    from kvatlas.stats.table import CellTraces
    from kvatlas.sweeps import Progress

LOG = logging.getLogger("kvatlas")
# Without `--log` it goes nowhere.
LOG.addHandler(logging.NullHandler())
LOG.propagate = False
#: Columns of a table that goes to a file or a pipe.
_NO_EDGE = 10_000
#: A number, or an interval of two.
_NUMBER = re.compile(r"[-+]?[\d.,]+( to [-+]?[\d.,]+)?")
#: Columns of a text that wraps in a terminal, at least.
_NARROW = 12
#: Verdicts that are always counted; others (a grader's timeout) only where there are any.
VERDICTS = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)
#: Seconds between two lines of progress.
INTERVAL = 10.0


def note(sentence: str) -> None:
    """Print a sentence on standard error, and write it to the log."""
    typer.echo(visible(sentence), err=True)
    LOG.info(visible(sentence))


def warn(sentences: Iterable[str], quiet: bool = False) -> None:
    """Print warnings on standard error, unless `quiet`, and write them to the log."""
    for sentence in sentences:
        if not quiet:
            typer.echo(visible(f"Warning: {sentence}"), err=True)
        LOG.warning(visible(sentence))


@contextmanager
def logging_to(file: Path | None) -> Iterator[None]:
    """Append everything that is said to a log with times, its beginning and the reason of its end; None for no log."""
    if file is None:
        yield
        return
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise KvatlasError(f"The log {str(file)!r} cannot be written ({error.strerror}).") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    began = time.monotonic()
    LOG.info(visible(f"kvatlas {__version__} on {platform.node()}, process {os.getpid()}: {shlex.join(sys.argv[1:])}"))
    try:
        yield
        LOG.info("Ended after %.0f s.", time.monotonic() - began)
    except (KvatlasError, typer.Exit) as end:
        LOG.error(visible(str(end) or "Stopped."))
        raise
    except BaseException:
        LOG.exception("Ended by an error.")
        raise
    finally:
        LOG.removeHandler(handler)
        handler.close()


def print_text(text: str) -> None:
    """Print lines of text or Markdown; in a terminal sentences wrap between words, items under their text.

    Lines of tables and of code stay as they are.
    """
    console = table_console()
    if not console.is_terminal:
        typer.echo(text)
        return
    for line in text.split("\n"):
        wrapped = [line]
        if not line.startswith(("|", "    ")):
            indent = "  " if line.startswith("- ") else ""
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
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = table_console()
    texts = _texts_by_column(rows)
    numeric = [name for name in texts if _is_numeric(name, rows)]
    left_out = _columns_to_leave_out(texts, numeric, console.width)
    shown = {name: column for name, column in texts.items() if name not in left_out}
    console.print(_table(shown, numeric))
    if left_out:
        typer.echo(f"Left out at {console.width} columns: {', '.join(left_out).replace('_', ' ')}; --json has all.")


def _texts_by_column(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the texts of each column."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        for name, value in row.items():
            texts.setdefault(name, []).append(visible(_cell_text(value)))
    return texts


def _is_numeric(name: str, rows: Sequence[dict[str, Any]]) -> bool:
    return all(isinstance(row[name], int | float) or _NUMBER.fullmatch(str(row[name])) for row in rows)


def _width(name: str, texts: Sequence[str]) -> int:
    return max(map(len, (name, *texts)))


def _columns_to_leave_out(texts: dict[str, list[str]], numeric: Sequence[str], width: int) -> list[str]:
    """Return the columns of numbers, from the right, without which a table is not wider than a terminal."""
    # Names and numbers are never cut; other texts wrap.
    whole = {*numeric, *list(texts)[:1]}
    needed = 0
    for name, column in texts.items():
        needed += 2 + (_width(name, column) if name in whole else min(_width(name, column), _NARROW))
    left_out: list[str] = []
    for name in reversed(numeric):
        if needed <= width:
            break
        left_out.insert(0, name)
        needed -= 2 + _width(name, texts[name])
    return left_out


def _table(texts: dict[str, list[str]], numeric: Sequence[str]) -> Table:
    """Return a table whose names, in the first column, and numbers are never cut."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [*texts][:1]
    for name, column in texts.items():
        is_whole = name in names or name in numeric
        least = _width(name, column) if is_whole else None
        side: Literal["left", "right"] = "right" if name in numeric else "left"
        table.add_column(name.replace("_", " "), justify=side, no_wrap=is_whole, min_width=least, overflow="fold")
    for row in zip(*texts.values(), strict=True):
        table.add_row(*map(escape, row))
    return table


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


def print_run(folder: Path, show: int, as_json: bool = False, setting: Setting | None = None) -> None:
    """Print Pass@1, interval and cost of each benchmark, and answer and end of a few traces; as JSON whole traces.

    `setting` selects one of several settings of the run.
    """
    from kvatlas.report.materials import RunMaterials
    from kvatlas.results.export import trace_record
    from kvatlas.stats.run_data import RunData

    run = RunData.open(folder)
    cells = [cell for cell in run.cells if setting in (None, cell.expected.setting)]
    traces = _first_traces(folder, cells, show)
    if not as_json:
        _print_cells(cells, run.margin)
        _print_traces([trace for _, trace in traces], RunMaterials.from_manifest(run.manifest))
        return
    expected = cells[0].expected
    document = {
        "model": expected.model,
        "setting": {"policy": expected.setting.policy, **expected.setting.values},
        "benchmarks": [
            {"benchmark": cell.expected.benchmark, **cell_document(cell.cell), "verdicts": _verdicts(cell)}
            for cell in cells
        ],
        "traces": [trace_record(run_key, trace) for run_key, trace in traces],
    }
    print(json.dumps(document, indent=2, allow_nan=False))


def _first_traces(folder: Path, cells: Sequence[CellTraces], most: int) -> list[tuple[str, Trace]]:
    """Return the first traces of these cells with their run keys."""
    from kvatlas.results import Store

    names = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    with Store.open(folder) as store:
        chosen = (pair for pair in store.traces() if (pair[0], pair[1].setting, pair[1].benchmark) in names)
        return list(islice(chosen, min(most, sys.maxsize)))


def _verdicts(cell: CellTraces) -> dict[str, int]:
    """Return the number of traces with each outcome."""
    counts = cell.outcomes
    return {str(outcome): counts[outcome] for outcome in dict.fromkeys([*VERDICTS, *counts])}


def _print_cells(cells: Sequence[CellTraces], margin: float) -> None:
    """Print a table of the cells, and what their number of problems can prove about a loss of at most the margin."""
    from kvatlas.report.description import say
    from kvatlas.stats.losses import FULL
    from kvatlas.stats.power import provable
    from kvatlas.text import percent_text

    rows = []
    for cell in cells:
        estimate = cell.cell.estimate
        interval = "unknown"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{percent_text(estimate.low)} to {percent_text(estimate.high)}"
        verdicts = {outcome: count for outcome, count in _verdicts(cell).items() if count}
        rows.append(
            {
                "benchmark": cell.expected.benchmark,
                "Pass@1": percent_text(estimate.value),
                "95 %": interval,
                "problems": estimate.problems,
                "KV tokens": _whole(cell.cell.mean_kv_tokens),
                "new tokens": _whole(cell.cell.output_tokens_mean),
                "traces": ", ".join(f"{count} {outcome}" for outcome, count in verdicts.items()),
            }
        )
    print_rows(rows)
    sizes = [len(cell.problems) for cell in cells if cell.setting != FULL]
    if sizes:
        samples = cells[0].expected.samples
        print_text("\n" + " ".join(say("provable", provable(sizes, margin, 1, samples))))


def _whole(value: float | None) -> int | str:
    return "unknown" if value is None else round(value)


#: Characters of the end of a trace that are printed.
_END = 400


def _print_traces(traces: Sequence[Trace], materials: RunMaterials) -> None:
    """Print the outcome of each trace, its answer beside the reference, and its end, where the answer is."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for trace in traces:
        answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
        # Model output is data: printed as text, never as markup.
        title = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.outcome}{answer}"
        console.print(Text(visible(title), style="bold"))
        problem = materials.problem(trace)
        if problem is not None:
            console.print(Text(visible(f"reference: {problem.answer}")))
        text = " ".join(trace.text.split())
        if len(text) > _END:
            text = "... " + text[-_END:].partition(" ")[2]
        console.print(Text(visible(text)))


def print_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean maps, what was found and what to open."""
    from rich.console import Console
    from rich.text import Text

    from kvatlas.report.demo import write_demo
    from kvatlas.report.description import mean_tables, recommendation

    result, written = write_demo(folder)
    typer.echo(mean_tables(result))
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    lines = [
        *([("Found", result.headline)] if result.headline else []),
        *(("In words", recommendation(choice)) for choice in result.choices),
        ("Open", f"{folder / 'report.html'} (or: kvatlas view {folder})"),
        ("Figures", f"{pictures} (and svg, pdf) in {folder}, their numbers in maps.csv"),
    ]
    for name, text in lines:
        # Not wrapped: paths are copied.
        Console().print(Text(visible(f"{name:<9}{text}")), soft_wrap=True)


def progress_display(quiet: bool = False, verbose: bool = False) -> Callable[[Progress], None]:
    """Return the function that a sweep calls after each trace.

    On a terminal it moves a bar; elsewhere it says a line now and then, and at the end. A `verbose` one says each
    trace. A `quiet` one writes to the log alone.
    """
    from rich.console import Console

    console = Console(stderr=True)
    say = message_display(quiet)
    began = last = time.monotonic()
    before = -1
    bar = _ProgressBar(console) if console.is_terminal and not (quiet or verbose) else None

    def on_trace(progress: Progress) -> None:
        nonlocal before, last
        if before < 0:
            before = progress.done - 1
        now = time.monotonic()
        if verbose:
            trace = progress.trace
            tokens = trace.usage.output_tokens
            name = f"{trace.model} {trace.setting}, {trace.problem}, sample {trace.sample}"
            say(f"{name}: {trace.grade.outcome}, {tokens} tokens")
        is_last = progress.done == progress.total
        if bar is not None:
            bar.show(progress, progress.text(before, now - began))
        if now - last >= INTERVAL or is_last:
            last = now
            # Beside a bar the line is for the log.
            (say if bar is None else LOG.info)(progress.text(before, now - began))

    return on_trace


def message_display(quiet: bool) -> Callable[[str], None]:
    """Return the function that says a sentence; a quiet one writes to the log alone."""
    return (lambda sentence: LOG.info(visible(sentence))) if quiet else note


class _ProgressBar:
    """A bar on a terminal, which ends with the last trace, or with the command."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Display
        from rich.table import Column

        # Of a line that is too wide the end of the text is cut.
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        share = TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4))
        self._display = Display(BarColumn(12), share, text, console=console, expand=True)
        self._task = self._display.add_task("", total=None)
        # A bar that is left running hides the cursor.
        atexit.register(self._display.stop)

    def show(self, progress: Progress, text: str) -> None:
        """Show so many traces of all, and the text; the last trace ends the bar."""
        self._display.start()
        self._display.update(self._task, total=progress.total, completed=progress.done, description=visible(text))
        if progress.done == progress.total:
            self._display.stop()
            atexit.unregister(self._display.stop)


def count_display(name: str, unit: str) -> Callable[[int, int], None]:
    """Return the function that is called with the units that are done and all; it prints ten lines."""

    def on_done(done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            note(f"{name}: {done:,} of {total:,} {unit}")

    return on_done


def print_autopsies(cells: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> None:
    """Print what the autopsies of each cell show, one line for each figure; `names` are short ones of settings."""
    if not cells:
        typer.echo("No answer was lost that the full cache has.")
    for cell in cells:
        typer.echo(f"{cell['model']} | {cell['benchmark']} | {cell['setting']}")
        _print_cell(cell["summary"], cell["all_lost"], names)


def _print_cell(summary: Mapping[str, Any], all_lost: int, names: Mapping[str, str]) -> None:
    luck = "–" if summary["by_luck"] is None else f"{summary['by_luck']:.1f} %"
    rows = [
        ("lost answers", f"{all_lost}"),
        ("examined", f"{summary['lost']}, of which {summary['reproduced']} were decoded again alike"),
    ]
    for size, share in summary["cause_of_at_most"].items():
        rows.append((f"restored by at most {size} tokens", _with_limits(share)))
    rows += [
        ("restored by any one span", _with_limits(summary["any_cause"])),
        ("restored by random sets", _with_limits(summary["random_sets_save"])),
        ("restored by any one span, by luck alone", luck),
        ("right without compression until the death", _with_limits(summary["without_compression_until_the_death"])),
        ("median of tokens, of replays", f"{summary['tokens']}, {summary['replays']}"),
    ]
    kinds = ", ".join(f"{kind} {count}" for kind, count in summary["kinds"].items())
    rows.append(("kinds of saving tokens", kinds or "–"))
    _print_rows(rows)
    if summary["held_out"] is not None:
        _print_held_out(summary["held_out"])
    elif summary["causes"]:
        typer.echo("\nno cause was tested: at temperature 0 there are no other random numbers")
    if summary["in_right_answers"] is not None:
        _print_harm(summary["in_right_answers"])
    if summary["kept_by_others"]:
        _print_kept_by_others(summary["kept_by_others"], names)


def _print_held_out(test: Mapping[str, Any]) -> None:
    typer.echo(f"\nright under {test['streams']} held-out random streams, {test['answers']} answers with a cause")
    right = test["right"]
    rows = [
        ("nothing put back", _with_limits(right["nothing"])),
        ("random sets put back", _with_limits(right["random"])),
        ("the causes put back", _with_limits(right["cause"])),
        ("no compression until the death", _with_limits(right["no_compression"])),
        ("causes over random sets, points", _with_limits(test["cause_over_random"], "")),
        ("causes over nothing, points", _with_limits(test["cause_over_nothing"], "")),
        ("answers for which the cause is proven alone", f"{test['proven_alone']} of {test['answers']}"),
        ("causes over random sets, of all lost answers", _with_limits(test["of_all_lost"], "")),
        ("the same in points of all answers", _with_limits(test["room"], "")),
    ]
    _print_rows(rows)


def _print_harm(test: Mapping[str, Any]) -> None:
    typer.echo(f"\nlike tokens in {test['answers']} right answers")
    rows = [
        ("nothing put back", _with_limits(test["right"]["nothing"])),
        ("like tokens put back", _with_limits(test["right"]["like"])),
        ("difference, points", _with_limits(test["like_over_nothing"], "")),
    ]
    _print_rows(rows)


def _print_kept_by_others(table: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> None:
    typer.echo("\nkept by other settings at that compression: saving tokens, random tokens, difference in points")
    # Autopsies of before may have settings that the run no longer has.
    shown = {name: names.get(name, name) for name in table}
    width = max(20, 2 + max(map(len, shown.values())))
    for name, shares in table.items():
        texts = [_with_limits(shares["saving"]), _with_limits(shares["random"]), _with_limits(shares["difference"], "")]
        typer.echo(f"{shown[name]:<{width}}" + "".join(f"{text:<26}" for text in texts).rstrip())


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    for name, text in rows:
        typer.echo(f"{name:<46}{text}")


def _with_limits(values: Mapping[str, float | None] | None, unit: str = " %") -> str:
    """Return a share or a difference with its interval."""
    if values is None:
        return "–"
    return f"{values['value']:.1f}{unit} ({values['low']:.1f}–{values['high']:.1f})"
