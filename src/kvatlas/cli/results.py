"""Commands that read runs and CSV maps: describe, check, report, export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.quantities import finite
from kvatlas.text import unfiltered, visible

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="RUN|CSV...", help="Folders of runs, CSV maps, or published:NAME."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Metric = Annotated[
    str,
    typer.Option(help="pass@1; of runs also progress, pass@K, avg@K, maj@K, or what the benchmark measures itself."),
]
Partial = Annotated[bool, typer.Option("--partial", help="Draw maps with missing traces; they say so on their face.")]
PolicyOption = Annotated[str | None, typer.Option(help="Only this policy's maps.")]
Problems = Annotated[int | None, typer.Option(min=1, help="Problems of each benchmark of a CSV map without them.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Samples a problem of a CSV map without them.")]
LoseAtMost = Annotated[
    float | None,
    typer.Option(metavar="POINTS", help="What a setting may lose against the full cache; default: the sweep's own, 3."),
]
Fix = Annotated[
    list[str] | None, typer.Option("--fix", metavar="AXIS=VALUE", help="Hold an axis beyond two to one value.")
]


def describe(
    inputs: Inputs,
    metric: Metric = "pass@1",
    partial: Partial = False,
    fix: Fix = None,
    policy: PolicyOption = None,
    problems: Problems = None,
    samples: Samples = None,
    lose_at_most: LoseAtMost = None,
    long: Annotated[bool, typer.Option("--long", help="Every map, test and comparison instead of one page.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Describe maps on a page: values, what is lost against the full cache, effects, what to choose."""
    from kvatlas.report.describe import describe_sources
    from kvatlas.report.description_json import to_json
    from kvatlas.report.markdown import as_text
    from kvatlas.report.summary import one_page

    description = describe_sources(
        inputs,
        metric=metric,
        partial=partial,
        fix=fixed(fix),
        policy=policy,
        problems=problems,
        samples=samples,
        lose_at_most=lose_at_most,
    )
    if as_json:
        typer.echo(json.dumps(to_json(description), indent=2, allow_nan=False))
    else:
        _print_markdown(as_text(description) if long else one_page(description))


def _print_markdown(text: str) -> None:
    """As it is, and laid out for a person where a terminal shows it."""
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # No name in it is HTML, which Rich would leave out.
    Console().print(Markdown(visible(text).replace("<", r"\<")))


def check(
    first: Annotated[str, typer.Argument(metavar="A", help="A CSV map, published:NAME, or the folder of a run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    mean: Annotated[str | None, typer.Option("--mean", metavar="M.csv", help="Their mean over benchmarks.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, callback=finite, help="Points that rounding may account for.")
    ] = 0.05,
    partial: Partial = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Compare maps cell by cell, and with a published mean; of two runs compare the tokens of every trace.

    Exit code 1 where two runs do not hold the same tokens.
    """
    from kvatlas.report.check import compare_maps, compare_runs, maps_as_text, runs_as_text

    if Path(first).is_dir() and Path(second).is_dir():
        compared = compare_runs(Path(first), Path(second))
        typer.echo(json.dumps(compared, indent=2) if as_json else runs_as_text(compared), nl=as_json)
        raise typer.Exit(0 if compared["same"] else 1)
    from kvatlas.report.map_source import MapSource

    given = {name: MapSource.open(name, partial=partial).maps for name in (first, second)}
    if len(given) < 2:
        given = {"A": given[first], "B": given[first]}
    means = MapSource.open(mean, partial=True).maps if mean else None
    compared = compare_maps(given, means, tolerance / 100)
    typer.echo(json.dumps(compared, indent=2, allow_nan=False) if as_json else maps_as_text(compared), nl=as_json)


def report(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    metric: Metric = "pass@1",
    traces: Annotated[int, typer.Option(min=0, help="Traces of each cell in the page, where not all fit.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0, callback=finite, help="Of traces in the page, at most.")] = 4.0,
    attention: Annotated[
        int, typer.Option(min=0, help="Traces whose importance and attention are measured with the model; 0: none.")
    ] = 4,
    folder: Annotated[
        bool, typer.Option("--folder/--no-folder", help="All traces in a folder next to the page, if they do not fit.")
    ] = True,
    partial: Partial = False,
    fix: Fix = None,
    lose_at_most: LoseAtMost = None,
) -> None:
    """Write one self-contained HTML page of a run: from the map to the single token."""
    from kvatlas.report.page import check_page, write_report

    check_page(out)
    from kvatlas.stats.run_analysis import RunAnalysis
    from kvatlas.stats.run_data import RunData

    analysis = RunAnalysis(RunData.open(run, metric, partial, fixed(fix), lose_at_most))
    limit = int(megabytes * 1e6)
    written = write_report(
        analysis, out, per_cell=traces, measure=attention, limit=limit, trace_pages=folder and traces > 0
    )
    typer.echo(written[0])
    if len(written) > 1:
        typer.echo(f"{written[1].parent} ({len(written) - 1} pages with all traces)")


def export(
    run: Run,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file to write, a folder with --store; default: standard output."),
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="csv (maps), jsonl or parquet (traces).")] = "csv",
    metric: Metric = "pass@1",
    partial: Partial = False,
    fix: Fix = None,
    store: Annotated[
        bool, typer.Option("--store", help="The run itself, into a new folder, also while it is written.")
    ] = False,
) -> None:
    """Export a run: its maps as CSV, its traces as JSON lines or Parquet, or all of it as a run."""
    from kvatlas.core import KvatlasError
    from kvatlas.results import Store

    if out is None and (store or format_ == "parquet"):
        raise KvatlasError(f"{'--store' if store else 'parquet'} cannot go to standard output; name it with --out.")
    if store and out is not None:
        with Store.open(run) as source:
            typer.echo(f"{out}: {source.copy(out):,} traces")
        return
    from kvatlas.results.export import check_format, check_target, csv_text, json_lines
    from kvatlas.results.export import export as write

    check_format(format_)
    if out is not None:
        check_target(out)
    from kvatlas.stats.maps import maps_of_run
    from kvatlas.stats.run_data import RunData

    if format_ == "csv":
        maps = maps_of_run(RunData.open(run, metric, partial, fixed(fix)))
        if out is None:
            typer.echo(csv_text(maps), nl=False, file=unfiltered(sys.stdout))
        else:
            write(run, format_, out, maps=maps)
    elif out is None:
        with Store.open(run) as source:
            for line in json_lines(source):
                typer.echo(line)
    else:
        write(run, format_, out)
    if out is not None:
        typer.echo(out)


def fixed(fix: list[str] | None) -> dict[str, str]:
    """The axes of `--fix`, with their values as they were written."""
    from kvatlas.cli.sweeps import assignments

    return assignments("--fix", fix)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (describe, check, report, export):
        app.command()(command)
