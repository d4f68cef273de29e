"""What `run` and `demo` print when they are done."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.cli.lists import table_console
from kvatlas.core import Outcome, Setting, Trace

if TYPE_CHECKING:
    from kvatlas.stats.table import CellTraces

#: Verdicts that are always counted, others (a grader's timeout) where there are any.
VERDICTS = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)


def print_run(folder: Path, show: int, as_json: bool = False, setting: Setting | None = None) -> None:
    """Pass@1 with its interval and cost for each benchmark, and the beginning of a few traces; or the same as JSON.

    Of a run of several settings one is named.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvatlas.figures.style import percent
    from kvatlas.results import Store
    from kvatlas.stats.run_data import RunData
    from kvatlas.text import visible

    cells = [cell for cell in RunData.open(folder).cells if setting in (None, cell.expected.setting)]
    keys = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    with Store.open(folder) as store:
        own = ((key, trace) for key, trace in store.traces() if (key, trace.setting, trace.benchmark) in keys)
        traces = list(islice(own, show))
    if as_json:
        print(json.dumps(_as_data(cells, traces), indent=2, allow_nan=False))
        return
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    counted = list(dict.fromkeys([*VERDICTS, *(verdict for cell in cells for verdict in cell.verdicts)]))
    for column in ("benchmark", "Pass@1", "95 % interval", "problems", *counted, "kept tokens", "output tokens"):
        table.add_column(column, justify="left" if column == "benchmark" else "right", no_wrap=True)
    for shown in cells:
        cell = shown.cell()
        estimate = cell.estimate
        known = estimate.low is not None and estimate.high is not None
        table.add_row(
            Text(visible(shown.expected.benchmark)),
            percent(estimate.value),
            f"{percent(estimate.low or 0)} to {percent(estimate.high or 0)}" if known else "unknown",
            str(estimate.problems),
            *(str(shown.verdicts[verdict]) for verdict in counted),
            f"{cell.mean_kv_tokens:.0f}",
            f"{cell.output_tokens_mean:.0f}",
        )
    table_console().print(table)
    for _, trace in traces:
        answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
        # Model output is data: printed as text, never as markup.
        about = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.verdict}{answer}"
        console.print(Text(visible(about), style="bold"))
        console.print(Text(visible(textwrap.shorten(trace.text, 800, placeholder=" ..."))))


def _as_data(cells: Sequence[CellTraces], traces: Sequence[tuple[str, Trace]]) -> dict[str, Any]:
    """What `print_run` prints, in percent and tokens, with whole traces as `kvatlas export` has them."""
    from kvatlas.results.export import record

    def cell_data(traces: CellTraces) -> dict[str, Any]:
        cell, estimate = traces.cell(), traces.cell().estimate
        return {
            "benchmark": traces.expected.benchmark,
            "pass_at_1": 100 * estimate.value,
            "low": None if estimate.low is None else 100 * estimate.low,
            "high": None if estimate.high is None else 100 * estimate.high,
            "problems": estimate.problems,
            "samples": estimate.samples,
            "mean_kv_tokens": cell.mean_kv_tokens,
            "peak_kv_tokens": cell.peak_kv_tokens,
            "output_tokens_mean": cell.output_tokens_mean,
            "seconds_mean": cell.seconds_mean,
            "verdicts": {verdict: traces.verdicts[verdict] for verdict in dict.fromkeys([*VERDICTS, *traces.verdicts])},
        }

    expected = cells[0].expected
    return {
        "model": expected.model,
        "setting": {"policy": expected.setting.policy, **expected.setting.values},
        "benchmarks": [cell_data(cell) for cell in cells],
        "traces": [record(key, trace) for key, trace in traces],
    }


def finish_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean maps, what to choose and where everything is."""
    from rich.console import Console
    from rich.text import Text

    from kvatlas.report.demo import write_demo
    from kvatlas.report.summary import recommendation
    from kvatlas.report.terminal import print_map
    from kvatlas.text import visible

    analysis, written = write_demo(folder)
    console = Console()
    for mean in analysis.means:
        print_map(mean, table_console())
    for choice in analysis.choices:
        console.print(Text(visible(recommendation(choice))))
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    places = {"figures": f"{pictures} (and svg, pdf)", "data": folder / "maps.csv", "report": folder / "report.html"}
    for name, picture in places.items():
        # Not wrapped: paths are copied.
        console.print(Text(visible(f"{name:<9}{picture}")), soft_wrap=True)
