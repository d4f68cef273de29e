"""What `run` and `demo` print when they are done."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from kvatlas.core import Map
from kvatlas.results import Store

#: Kinds of files that `demo` writes of each figure.
FIGURES = ("png", "svg", "pdf")
#: What a trace can come to, as `Grade.verdict` says it.
VERDICTS = ("correct", "wrong", "truncated", "no answer")


def print_run(folder: Path, show: int) -> None:
    """Pass@1 with its interval and cost for each benchmark, and the beginning and end of a few traces."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvatlas.stats.estimates.cells import gather

    console = Console()
    with Store.open(folder) as store:
        cells = gather(store.manifest(), store.traces(texts=False))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("benchmark", "Pass@1", "95 % interval", "problems", "kept tokens", "output tokens"):
            table.add_column(column, justify="left" if column == "benchmark" else "right")
        for gathered in cells:
            cell = gathered.cell()
            estimate = cell.estimate
            known = estimate.low is not None and estimate.high is not None
            table.add_row(
                gathered.expected.benchmark,
                f"{100 * estimate.value:.1f}",
                f"{100 * (estimate.low or 0):.1f} to {100 * (estimate.high or 0):.1f}" if known else "unknown",
                str(estimate.problems),
                f"{cell.mean_kv_tokens:.0f}",
                f"{cell.output_tokens_mean:.0f}",
            )
        console.print(table)
        console.print()
        for gathered in cells:
            # The usual verdicts always, others (a grader's timeout) where there are any.
            counted = ", ".join(
                f"{gathered.verdicts[verdict]} {verdict}" for verdict in dict.fromkeys([*VERDICTS, *gathered.verdicts])
            )
            console.print(Text(f"{gathered.expected.benchmark}: {counted}"), soft_wrap=True)
        for number, (_, trace) in enumerate(store.traces()):
            if number == show:
                break
            answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
            # Model output is data: printed as text, never as markup.
            about = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.verdict}{answer}"
            console.print(Text(about, style="bold"))
            console.print(Text(textwrap.shorten(trace.text, 800, placeholder=" ...")))


def finish_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean map and where everything is."""
    from rich.console import Console

    from kvatlas.figures.heatmap import means_figure, save, series_figure
    from kvatlas.figures.pairwise import pairwise_figure, save_pairwise
    from kvatlas.report.page import write_report
    from kvatlas.report.terminal import print_map
    from kvatlas.results.export import write_maps
    from kvatlas.stats.estimates.maps import maps_of_run, mean_maps
    from kvatlas.stats.pairs.pairwise import pairs_of
    from kvatlas.stats.pairs.systems import systems_of
    from kvatlas.stats.run_analysis import verdicts_of_run

    with Store.open(folder) as store:
        manifest, traces = store.manifest(), list(store.traces(texts=False))
    maps = maps_of_run(manifest, traces)
    outlined = {name: verdict.plateau for name, verdict in verdicts_of_run(manifest, traces).items()}
    means = mean_maps(maps)
    written = []
    for suffix in FIGURES:
        for model, policy in dict.fromkeys((one.model, one.policy) for one in maps):
            series = [one for one in maps if (one.model, one.policy) == (model, policy)]
            name = f"{model.rpartition(':')[2]}-{policy}.{suffix}"
            written += save(series_figure(series, outlined=outlined), folder / name, series)[:1]
        written += save(means_figure(means, outlined=outlined), folder / f"means.{suffix}", means)[:1]
    shown = _full_and_best(means)
    systems = [one for one in systems_of([(manifest, traces)]) if (one.model, one.setting.id) in shown]
    for suffix in FIGURES:
        drawn = pairwise_figure(systems, pairs_of(systems), "progress", [])
        written += save_pairwise(drawn, folder / f"progress-pairs.{suffix}", systems, "progress")[:1]
    write_maps(maps, folder / "maps.csv")
    write_report(folder, folder / "report.html")
    console = Console()
    for one in means:
        print_map(one, console)
    console.print(f"figures  {', '.join(path.name for path in written if path.suffix == '.png')} (and svg, pdf)")
    console.print(f"data     {folder / 'maps.csv'}")
    console.print(f"report   {folder / 'report.html'}")


def _full_and_best(means: Sequence[Map]) -> set[tuple[str, str]]:
    """(model, setting) of each model's full cache and of the best cell of its first policy's means."""
    first = {one.model: one for one in reversed(means)}
    best = {model: max(one.cells.values(), key=lambda cell: cell.estimate.value) for model, one in first.items()}
    full = {model: one.baselines["full"] for model, one in first.items() if "full" in one.baselines}
    return {(model, cell.setting.id) for part in (full, best) for model, cell in part.items()}
