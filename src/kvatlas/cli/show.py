"""What `run` and `demo` print when they are done."""

from __future__ import annotations

import textwrap
from itertools import islice
from pathlib import Path

from kvatlas.core import Outcome

#: Verdicts that are always counted, others (a grader's timeout) where there are any.
VERDICTS = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)


def print_run(folder: Path, show: int) -> None:
    """Pass@1 with its interval and cost for each benchmark, and the beginning and end of a few traces."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvatlas.api import open_run
    from kvatlas.figures.style import percent
    from kvatlas.visible import visible

    console = Console()
    run = open_run(folder)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("benchmark", "Pass@1", "95 % interval", "problems", "kept tokens", "output tokens"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for traces in run.data.cells:
        cell = traces.cell()
        estimate = cell.estimate
        known = estimate.low is not None and estimate.high is not None
        table.add_row(
            Text(visible(traces.expected.benchmark)),
            percent(estimate.value),
            f"{percent(estimate.low or 0)} to {percent(estimate.high or 0)}" if known else "unknown",
            str(estimate.problems),
            f"{cell.mean_kv_tokens:.0f}",
            f"{cell.output_tokens_mean:.0f}",
        )
    console.print(table)
    console.print()
    for traces in run.data.cells:
        verdicts = dict.fromkeys([*VERDICTS, *traces.verdicts])
        counted = ", ".join(f"{traces.verdicts[verdict]} {verdict}" for verdict in verdicts)
        console.print(Text(visible(f"{traces.expected.benchmark}: {counted}")), soft_wrap=True)
    for trace in islice(run.traces(), show):
        answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
        # Model output is data: printed as text, never as markup.
        about = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.verdict}{answer}"
        console.print(Text(visible(about), style="bold"))
        console.print(Text(visible(textwrap.shorten(trace.text, 800, placeholder=" ..."))))


def finish_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean maps, what to choose and where everything is."""
    from rich.console import Console
    from rich.text import Text

    from kvatlas.report.demo import write_demo
    from kvatlas.report.summary import recommendation
    from kvatlas.report.terminal import print_map
    from kvatlas.visible import visible

    analysis, written = write_demo(folder)
    console = Console()
    for one in analysis.means:
        print_map(one, console)
    for choice in analysis.choices:
        console.print(Text(visible(recommendation(choice))))
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    places = {"figures": f"{pictures} (and svg, pdf)", "data": folder / "maps.csv", "report": folder / "report.html"}
    for name, place in places.items():
        # Not wrapped: paths are copied.
        console.print(Text(visible(f"{name:<9}{place}")), soft_wrap=True)
