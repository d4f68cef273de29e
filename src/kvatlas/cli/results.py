"""Commands that read runs and CSV maps: describe, check, report, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.quantities import finite

if TYPE_CHECKING:
    from kvatlas.core import Map

Inputs = Annotated[
    list[str], typer.Argument(metavar="RUN|CSV...", help="Folders of runs, CSV maps, or published:NAME.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Metric = Annotated[
    str,
    typer.Option(
        help="pass@1; of runs also progress, pass@K, avg@K, maj@K, bayes, or what the benchmark measures itself."
    ),
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
        typer.echo(as_text(description) if long else one_page(description))


def check(
    first: Annotated[str, typer.Argument(metavar="A.csv", help="A CSV map, published:NAME, or a run.")],
    second: Annotated[str, typer.Argument(metavar="B.csv", help="Another.")],
    mean: Annotated[str | None, typer.Option("--mean", metavar="M.csv", help="Their mean over benchmarks.")] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, callback=finite, help="Points that rounding may account for.")
    ] = 0.05,
    partial: Partial = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Do maps agree; which cells conflict; which of two contradicting maps fits a published mean."""
    from kvatlas.report.check import as_text, check_maps, to_json

    given = {name: _maps(name, partial) for name in (first, second)}
    if len(given) < 2:
        given = {"A": given[first], "B": given[first]}
    checked = check_maps(given, _maps(mean, True) if mean else None, tolerance / 100)
    typer.echo(json.dumps(to_json(checked), indent=2, allow_nan=False) if as_json else as_text(checked))


def _maps(source: str, partial: bool) -> list[Map]:
    from kvatlas.report.map_figure import maps_of_source
    from kvatlas.stats.estimates.run_data import RunData

    return maps_of_source(RunData.open(source, partial=partial) if Path(source).is_dir() else source, partial)


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
    from kvatlas.results.export import check_target

    check_target(out)
    from kvatlas.report.page import write_report
    from kvatlas.stats.estimates.run_data import RunData
    from kvatlas.stats.run_analysis import RunAnalysis

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
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write; a folder with --store.")],
    format_: Annotated[str, typer.Option("--format", help="csv (maps), jsonl or parquet (traces).")] = "csv",
    metric: Metric = "pass@1",
    partial: Partial = False,
    fix: Fix = None,
    store: Annotated[
        bool, typer.Option("--store", help="The run itself, into a new folder: while it is written, or damaged.")
    ] = False,
) -> None:
    """Export a run: its maps as CSV, its traces as JSON lines or Parquet, or all of it as a run.

    A run that was graded again (`kvatlas grade`) has a column for each grader in its CSV.
    """
    from kvatlas.results import Store

    if store:
        with Store.open(run) as found:
            typer.echo(f"{out}: {found.copy(out):,} traces")
        return
    from kvatlas.results.export import check_format, check_target
    from kvatlas.results.export import export as write

    check_format(format_)
    check_target(out)
    from kvatlas.stats.estimates.maps import maps_of_run
    from kvatlas.stats.estimates.run_data import RunData

    if format_ == "csv":
        with Store.open(run) as found:
            metrics = [metric, *(graded for graded in found.gradings() if graded != metric)]
        first, *also = (maps_of_run(RunData.open(run, each, partial, fixed(fix))) for each in metrics)
        write(run, format_, out, maps=first, also=also)
    else:
        write(run, format_, out)
    typer.echo(out)


def fixed(fix: list[str] | None) -> dict[str, str]:
    """The axes of `--fix`, with their values as they were written."""
    from kvatlas.cli.sweeps import assignments

    return assignments("--fix", fix)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (describe, check, report, export):
        app.command()(command)
