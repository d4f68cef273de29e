"""The output of `run` and `demo`: values and traces of a run, and the figures of the demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvatlas.cli.output import print_rows, print_text
from kvatlas.columns import cell_document
from kvatlas.core import Outcome, Setting, is_reference
from kvatlas.text import visible

if TYPE_CHECKING:
    from kvatlas.core import Trace
    from kvatlas.report.materials import RunMaterials
    from kvatlas.stats.table import CellTraces

#: Outcomes that are always counted; others (a grader's timeout) only where there are any.
OUTCOMES = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)


def print_run(folder: Path, show: int, as_json: bool = False, setting: Setting | None = None) -> None:
    """Print Pass@1, interval and cost of each benchmark, and answer and end of a few traces; as JSON whole traces.

    `setting` selects one of several settings of the run.
    """
    from kvatlas.report.materials import RunMaterials
    from kvatlas.results.export import trace_record
    from kvatlas.stats.run_data import RunData

    run = RunData.open(folder)
    cells = [cell for cell in run.cells if setting in (None, cell.expected.setting)]

    # The first traces of these cells, with their run keys.
    names = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    with run.store() as store:
        chosen = (pair for pair in store.traces() if (pair[0], pair[1].setting, pair[1].benchmark) in names)
        traces = list(islice(chosen, min(show, sys.maxsize)))

    if not as_json:
        _print_cell_table(cells, run.margin)
        _print_traces([trace for _, trace in traces], RunMaterials.from_manifest(run.manifest))
        return
    expected = cells[0].expected
    document = {
        "model": expected.model,
        "setting": {"policy": expected.setting.policy, **expected.setting.values},
        "benchmarks": [
            {"benchmark": cell.expected.benchmark, **cell_document(cell.cell), "verdicts": _outcome_counts(cell)}
            for cell in cells
        ],
        "traces": [trace_record(run_key, trace) for run_key, trace in traces],
    }
    print(json.dumps(document, indent=2, allow_nan=False))


def _outcome_counts(cell: CellTraces) -> dict[str, int]:
    """Return the number of traces with each outcome."""
    counts = cell.outcomes
    return {str(outcome): counts[outcome] for outcome in dict.fromkeys([*OUTCOMES, *counts])}


def _print_cell_table(cells: Sequence[CellTraces], margin: float) -> None:
    """Print a table of the cells, and what their number of problems can prove about a loss of at most the margin."""
    from kvatlas.report.description import say
    from kvatlas.stats.power import provable
    from kvatlas.text import percent_text

    rows = []
    for cell in cells:
        estimate = cell.cell.estimate
        interval = "unknown"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{percent_text(estimate.low)} to {percent_text(estimate.high)}"
        outcomes = {outcome: count for outcome, count in _outcome_counts(cell).items() if count}
        rows.append(
            {
                "benchmark": cell.expected.benchmark,
                "Pass@1": percent_text(estimate.value),
                "95 %": interval,
                "problems": estimate.problems,
                "KV tokens": _whole_number(cell.cell.number("mean_kv_tokens")),
                "new tokens": _whole_number(cell.cell.number("output_tokens")),
                "traces": ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()),
            }
        )
    print_rows(rows)
    problems = []
    sizes = []
    for cell in cells:
        if not is_reference(cell.setting):
            problems.append(len(cell.problems))
            sizes.append(len(cell.problems) if cell.clusters is None else len(set(cell.clusters.tolist())))
    if sizes:
        samples = cells[0].expected.samples
        print_text("\n" + " ".join(say("provable", provable(sizes, margin, {}, samples, problems))))


def _whole_number(value: float | None) -> int | str:
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
