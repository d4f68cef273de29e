"""Commands that read, grade and import results: describe, view, grade, export, import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_rows, print_text
from kvatlas.core import KvatlasError, has_problem_suffix
from kvatlas.text import counted, unfiltered

if TYPE_CHECKING:
    from kvatlas.report.sources import ReadOptions

app = options.Commands()


@app.command("describe")
def describe_command(
    inputs: options.Inputs,
    metric: options.Metric = "pass@1",
    partial: options.Partial = False,
    fix: options.Fix = None,
    policy: options.OnlyPolicy = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Problems of a CSV map without them.")] = None,
    lose_at_most: options.LoseAtMost = None,
    claim: options.ClaimOption = None,
    long: Annotated[bool, typer.Option("--long", help="Every map, test and comparison instead of one page.")] = False,
    deaths: Annotated[bool, typer.Option("--deaths", help="Read lost answers, and count how they died.")] = False,
    as_json: options.Json = False,
) -> None:
    """Describe maps on a page: values, losses against the full cache, effects, the recommended setting."""
    from kvatlas.registry import features
    from kvatlas.report.description import as_document, every_map, one_page
    from kvatlas.report.result import analyse
    from kvatlas.report.sources import ReadOptions

    fixed_values = options.assignments("--fix", fix)
    read_options = ReadOptions(metric, partial, fixed_values, policy, lose_at_most, problems, claim=claim)
    result = analyse(inputs, read_options)
    cells = features.get("autopsy.deaths")(result) if deaths else []
    if as_json:
        document = as_document(result)
        if deaths:
            document["deaths"] = [cell.to_dict() for cell in cells]
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    print_text(every_map(result) if long else one_page(result))
    if deaths:
        print_text(features.get("autopsy.deaths_table")(cells))


@app.command("view")
def view_command(
    runs: options.Runs,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html|FOLDER", help="Write one page, or files for a web server.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on this machine; 0 takes a free one.")] = 0,
    metric: Annotated[str | None, typer.Option(help="As in describe; default: pass@1.")] = None,
    traces: Annotated[
        int | None, typer.Option(min=0, help="Traces of each cell in a page that cannot hold all; default: 2.")
    ] = None,
    partial: options.Partial = False,
    fix: options.Fix = None,
    lose_at_most: options.LoseAtMost = None,
) -> None:
    """Show runs in the browser, from the map to the single token, live while a sweep runs; or write them as HTML.

    A page of one run is self-contained. It holds all traces if they fit into 4 MB, else --traces of each cell.
    """
    from kvatlas.report.app.local_server import serve_runs
    from kvatlas.report.app.page import PAGE_SUFFIXES, check_page, write_bundle, write_report
    from kvatlas.report.app.run_source import open_runs
    from kvatlas.report.result import open_result
    from kvatlas.report.sources import ReadOptions
    from kvatlas.results.store import check_new_folder

    fixed_values = options.assignments("--fix", fix)
    if out is not None and out.suffix.lower() in PAGE_SUFFIXES:
        check_page(out)
        if len(runs) > 1:
            raise KvatlasError("--out: a page holds one run; name a folder for several.")
        per_cell = 2 if traces is None else traces
        read_options = ReadOptions(metric, partial, fixed_values, lose_at_most=lose_at_most)
        holds_all = write_report(open_result(runs, read_options), out, per_cell=per_cell)
        typer.echo(out)
        if per_cell and not holds_all:
            note(f"The page holds up to {counted(per_cell, 'trace')} of each cell; --out FOLDER writes all.")
        return

    if traces is not None:
        raise KvatlasError("--traces is for a page that cannot hold all traces; name one with --out FILE.html.")
    if out is not None:
        check_new_folder(out, f", or the page '{out.stem}.html'")
    opened = open_runs([run.absolute() for run in runs], fixed_values, metric, lose_at_most)
    if out is None:
        serve_runs(opened, port)
    else:
        typer.echo(f"{out}: {write_bundle(opened, out):,} files; any web server can host them.")


@app.command("export")
def export_command(
    run: options.Run,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A file; for a run a new folder.")] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="csv (maps), cells (settings, as CSV), jsonl, parquet (traces), run (all); default: by the suffix.",
        ),
    ] = None,
    metric: options.Metric = "pass@1",
    partial: options.Partial = False,
    fix: options.Fix = None,
) -> None:
    """Export a run: its maps and settings as CSV, its traces as JSON lines or Parquet, or all."""
    from kvatlas.report.sources import ReadOptions
    from kvatlas.results import Store
    from kvatlas.results.export import VALUE_FORMATS, check_export, format_of, json_lines, write_text, write_traces
    from kvatlas.results.store import check_new_folder

    kind = format_of(out, format_)
    if out is None and kind in ("run", "parquet"):
        raise KvatlasError(f"--format {kind} cannot go to standard output; name it with --out.")
    if kind not in VALUE_FORMATS:
        for option, is_given in (("--metric", metric != "pass@1"), ("--fix", bool(fix))):
            if is_given:
                raise KvatlasError(f"{option} is for --format csv and cells; {kind} has all traces.")
    if kind == "run" and out is not None:
        check_new_folder(out)
        with Store.open(run) as source:
            copied = source.copy(out)
        typer.echo(f"{out}: {copied:,} traces")
        return
    if out is not None:
        check_export(out)
    if kind in VALUE_FORMATS:
        text = _values_as_text(kind, run, ReadOptions(metric, partial, options.assignments("--fix", fix)))
        if out is None:
            typer.echo(text, nl=False, file=unfiltered(sys.stdout))
        else:
            write_text(text, out)
    elif out is not None:
        write_traces(run, kind, out)
    else:
        with Store.open(run) as source:
            for line in json_lines(source):
                typer.echo(line)
    if out is not None:
        typer.echo(out)


def _values_as_text(kind: str, run: Path, read_options: ReadOptions) -> str:
    """Return the maps or the settings of a run as CSV."""
    from kvatlas.api import Run
    from kvatlas.results.export import csv_text, table_text
    from kvatlas.stats.maps import check_complete, maps_of_run

    data = read_options.open_run(run)
    # An unknown metric is refused first.
    cells = data.cells
    if kind == "cells":
        check_complete(list(filter(data.fits, cells)), data.partial, "table")
        return table_text(Run(data).cells())
    if not data.has_maps:
        raise KvatlasError("The run has no map of two axes; --format cells writes a row for each setting.")
    return csv_text(maps_of_run(data))


@app.command("grade")
def grade_command(
    run: options.Run,
    grader: Annotated[str, typer.Option(help="kvatlas, dynts or math-verify.")] = "kvatlas",
    measure: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.py:NAME", help="Compute this number of each trace instead. Repeat it."),
    ] = None,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
) -> None:
    """Grade stored traces again, by another grader or by this version: the metric graded:NAME.

    Maps and reports show the first verdicts unless --metric names the new ones.
    """
    from kvatlas.results import regrade as again

    if measure:
        count = again.measure(run, measure)
        typer.echo(f"{run}: {counted(count, 'trace')} measured by {', '.join(measure)}; describe --long shows them")
        return
    rows = again.regrade(run, grader, allow_code)
    print_rows(rows, as_json)
    if as_json:
        return
    changed = sum(row["to_right"] + row["to_wrong"] for row in rows)
    typer.echo(f"{changed} verdicts changed; kvatlas map --metric graded:{grader} draws what they are now.")


@app.command("import")
def import_command(
    logs: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Inspect's logs (.eval, .json, .gz), or a file of answers.")
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, new or existing.")],
    scorer: Annotated[str, typer.Option(help="The score to take where a log has several; default: its first.")] = "",
    axis: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Answers: a column of their settings. Repeat it.")
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Answers: the reference; default: rows without values of the axes."),
    ] = None,
    benchmark: Annotated[str, typer.Option(metavar="FILE", help="Answers: the problems that grade their texts.")] = "",
) -> None:
    """Import logs of Inspect, to compare remote models with local ones, or answers under several settings, for a map.

    A file of answers has a row for each: problem, sample, correct or text, and the columns that --axis names.
    """
    if run.is_file():
        raise KvatlasError(f"{str(run)!r} is a file, and the run stands last: kvatlas import {run} RUN.")
    if any(log.name.startswith("samples_") for log in logs):
        raise KvatlasError("Samples of lm-eval are compared, not imported: kvatlas gate BEFORE AFTER.")
    if axis:
        from kvatlas.integrations.answer_rows import import_answers

        if len(logs) != 1:
            raise KvatlasError(f"--axis is for one file of answers; {len(logs)} were given.")
        if scorer:
            raise KvatlasError("--scorer chooses among the scores of a log; a file of answers has one grade.")
        settings, missing = import_answers(logs[0], run, axis, reference or (), benchmark)
        typer.echo(f"{run}: {counted(settings, 'setting')} and the reference; kvatlas describe {run} says what is lost")
        if missing:
            note(f"{logs[0].name} lacks {counted(missing, 'answer')}: problems or samples of some settings alone.")
        return
    are_logs = all(log.name.endswith((".json", ".json.gz")) or not has_problem_suffix(log.name) for log in logs)
    if reference or benchmark or not are_logs:
        raise KvatlasError("A file of answers needs --axis NAME, the column in which its settings differ.")

    from kvatlas.integrations.inspect_logs import import_log

    for log in logs:
        cell, added, metric = import_log(log, run, scorer)
        promised = len(cell.problems) * cell.samples
        remark = f"; its scores are graded, not right or wrong: see them by --metric {metric}" if metric else ""
        typer.echo(f"{run}: {added} of {promised} traces of {cell.model} on {cell.benchmark}{remark}")
