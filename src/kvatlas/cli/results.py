"""Commands that read, grade and bring in results: describe, check, report, export, view, grade, import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli import options
from kvatlas.cli.output import print_markdown, print_rows
from kvatlas.core import KvatlasError
from kvatlas.text import unfiltered

app = typer.Typer()


@app.command()
def describe(
    inputs: options.Inputs,
    metric: options.Metric = "pass@1",
    partial: options.Partial = False,
    fix: options.Fix = None,
    policy: options.OnlyPolicy = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Problems of a CSV map without them.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples a problem of a CSV map without them.")] = None,
    lose_at_most: options.LoseAtMost = None,
    long: Annotated[bool, typer.Option("--long", help="Every map, test and comparison instead of one page.")] = False,
    as_json: options.Json = False,
) -> None:
    """Describe maps on a page: values, losses against the full cache, effects, the recommended setting."""
    from kvatlas.report.result import analyse
    from kvatlas.report.text import every_map, one_page

    result = analyse(
        inputs,
        metric=metric,
        partial=partial,
        fix=options.assignments("--fix", fix),
        policy=policy,
        problems=problems,
        samples=samples,
        lose_at_most=lose_at_most,
    )
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print_markdown(every_map(result) if long else one_page(result))


@app.command()
def check(
    first: Annotated[str, typer.Argument(metavar="A", help="A CSV map, published:NAME, or the folder of a run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    mean: Annotated[str | None, typer.Option("--mean", metavar="M.csv", help="Their mean over benchmarks.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, callback=options.finite, help="Points of rounding.")] = 0.05,
    partial: options.Partial = False,
    as_json: options.Json = False,
) -> None:
    """Compare maps cell by cell, and with a published mean; of two runs compare the tokens of every trace.

    Exit code 1 where two runs do not hold the same tokens.
    """
    from kvatlas.report.check import compare_maps, compare_runs, maps_as_text, runs_as_text

    if Path(first).is_dir() and Path(second).is_dir():
        compared = compare_runs(Path(first), Path(second))
        typer.echo(json.dumps(compared, indent=2) if as_json else runs_as_text(compared), nl=as_json)
        raise typer.Exit(0 if compared["same"] else 1)
    from kvatlas.report.map_figure import MapSource

    maps = {name: MapSource.open(name, partial=partial).maps for name in (first, second)}
    if len(maps) < 2:
        maps = {"A": maps[first], "B": maps[first]}
    means = MapSource.open(mean, partial=True).maps if mean else None
    compared = compare_maps(maps, means, tolerance / 100)
    typer.echo(json.dumps(compared, indent=2, allow_nan=False) if as_json else maps_as_text(compared), nl=as_json)


@app.command()
def report(
    run: options.Run,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    metric: options.Metric = "pass@1",
    traces: Annotated[int, typer.Option(min=0, help="Traces of each cell in the page, where not all fit.")] = 2,
    megabytes: Annotated[
        float, typer.Option(min=0, callback=options.finite, help="Limit for traces in the page.")
    ] = 4.0,
    attention: Annotated[int, typer.Option(min=0, help="Traces to measure attention of, with the model.")] = 4,
    folder: Annotated[bool, typer.Option(help="All traces in a folder beside the page, if they do not fit.")] = True,
    partial: options.Partial = False,
    fix: options.Fix = None,
    lose_at_most: options.LoseAtMost = None,
) -> None:
    """Write one self-contained HTML page of a run: from the map to the single token."""
    from kvatlas.report.app.page import check_page, write_report

    check_page(out)
    from kvatlas.stats.run_analysis import RunAnalysis
    from kvatlas.stats.run_data import RunData

    analysis = RunAnalysis(RunData.open(run, metric, partial, options.assignments("--fix", fix), lose_at_most))
    limit = int(megabytes * 1e6)
    written = write_report(
        analysis, out, per_cell=traces, measure=attention, limit=limit, trace_pages=folder and traces > 0
    )
    typer.echo(written[0])
    if len(written) > 1:
        typer.echo(f"{written[1].parent} ({len(written) - 1} pages with all traces)")


@app.command()
def export(
    run: options.Run,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A file, with --store a folder.")] = None,
    format_: Annotated[str, typer.Option("--format", help="csv (maps), jsonl or parquet (traces).")] = "csv",
    metric: options.Metric = "pass@1",
    partial: options.Partial = False,
    fix: options.Fix = None,
    store: Annotated[bool, typer.Option("--store", help="The run itself, into a new folder.")] = False,
) -> None:
    """Export a run: its maps as CSV, its traces as JSON lines or Parquet, or all of it as a run."""
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
    maps = None
    if format_ == "csv":
        from kvatlas.stats.maps import maps_of_run
        from kvatlas.stats.run_data import RunData

        maps = maps_of_run(RunData.open(run, metric, partial, options.assignments("--fix", fix)))
    if out is not None:
        write(run, format_, out, maps=maps)
        typer.echo(out)
    elif maps is not None:
        typer.echo(csv_text(maps), nl=False, file=unfiltered(sys.stdout))
    else:
        with Store.open(run) as source:
            for line in json_lines(source):
                typer.echo(line)


@app.command()
def view(
    runs: options.Runs,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on this machine; 0 takes a free one.")] = 0,
    bundle: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write files for a static host.")] = None,
    fix: options.Fix = None,
) -> None:
    """Show runs in the browser: maps, cells, problems and every trace, live while a sweep runs."""
    from kvatlas.report.app.page import write_bundle
    from kvatlas.report.app.run import open_runs
    from kvatlas.report.app.server import serve

    opened = open_runs([run.absolute() for run in runs], options.assignments("--fix", fix))
    if bundle is None:
        serve(opened, port)
    else:
        typer.echo(f"{bundle}: {write_bundle(opened, bundle):,} files; any web server can host them.")


@app.command()
def grade(
    run: options.Run,
    grader: Annotated[str, typer.Option(help="kvatlas, dynts or math-verify.")] = "kvatlas",
    overrule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Verdicts of a person: an audit.csv with corrected rows.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="List where math-verify differs; writes RUN/audit.csv.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Grade stored traces again, by another grader or by this version: the metric graded:NAME.

    Maps and reports show the first verdicts unless --metric names the new ones. Overruled verdicts are recorded in the
    run.
    """
    from kvatlas.results.regrade import read_overruled, regrade, write_audit

    cells, disagreements = regrade(run, grader, read_overruled(overrule) if overrule else (), audit)
    print_rows([cell.to_json(grader) for cell in cells], as_json)
    if audit:
        write_audit(disagreements, run / "audit.csv")
    if as_json:
        return
    for disagreement in disagreements:
        typer.echo(f"\n{disagreement}")
    if audit:
        typer.echo(
            f"\nmath-verify judges {len(disagreements)} answers otherwise: {run / 'audit.csv'}. Correct its column "
            "`correct` where a verdict is wrong, and grade again with --overrule."
        )
    changed = sum(cell.to_right + cell.to_wrong for cell in cells)
    typer.echo(f"{changed} verdicts changed; kvatlas map --metric graded:{grader} draws what they are now.")


@app.command("import")
def import_(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Inspect's logs (.eval, .json).")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, new or existing.")],
    scorer: Annotated[str, typer.Option(help="The score to take where a log has several; default: its first.")] = "",
) -> None:
    """Bring Inspect's logs into a run, to compare remote models with local ones."""
    from kvatlas.integrations.inspect_logs import import_log

    for log in logs:
        cell, added = import_log(log, run, scorer)
        promised = len(cell.problems) * cell.samples
        typer.echo(f"{run}: {added} of {promised} traces of {cell.model} on {cell.benchmark}")
