"""Commands that read runs and CSV maps: describe, report, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvatlas.core import Map

Inputs = Annotated[
    list[str], typer.Argument(metavar="RUN|CSV...", help="Folders of runs, CSV maps, or published:NAME.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Metric = Annotated[str, typer.Option(help="pass@1 or progress (runs only).")]
Partial = Annotated[bool, typer.Option("--partial", help="Draw maps with missing traces; they say so on their face.")]
PolicyOption = Annotated[str | None, typer.Option(help="Only this policy's maps.")]
Fix = Annotated[
    list[str] | None, typer.Option("--fix", metavar="AXIS=VALUE", help="Hold an axis beyond two to one value.")
]


def describe(
    inputs: Inputs,
    metric: Metric = "pass@1",
    partial: Partial = False,
    fix: Fix = None,
    policy: PolicyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Say what maps hold, in numbers: range, mean, peaks with intervals, paired comparisons."""
    from kvatlas.report.words import as_text
    from kvatlas.report.words import describe as describe_maps

    maps = maps_of(inputs, metric, partial, fix, policy)
    comparisons = [found for source in inputs for found in _comparisons(source, metric, fix)]
    if policy is not None:
        comparisons = [found for found in comparisons if policy in found.first or policy in found.second]
    description = describe_maps(maps, comparisons)
    typer.echo(json.dumps(description, indent=2) if as_json else as_text(description))


def report(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    partial: Partial = False,
    fix: Fix = None,
) -> None:
    """Write one self-contained HTML page of a run."""
    from kvatlas.report.page import write_report

    write_report(run, out, partial=partial, fix=fixed(fix))
    typer.echo(out)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    format_: Annotated[str, typer.Option("--format", help="csv (maps), jsonl or parquet (traces).")] = "csv",
    metric: Metric = "pass@1",
    partial: Partial = False,
    fix: Fix = None,
) -> None:
    """Export a run: its maps as CSV, or its traces as JSON lines or Parquet."""
    from kvatlas.results.export import export as write

    maps = maps_of([str(run)], metric, partial, fix, None) if format_ == "csv" else None
    write(run, format_, out, maps=maps)
    typer.echo(out)


def maps_of(inputs: list[str], metric: str, partial: bool, fix: list[str] | None, policy: str | None) -> list[Map]:
    """The maps of all inputs, of one policy if it is named."""
    from kvatlas.core import KvatlasError

    maps = [one for source in inputs for one in _maps_of(source, metric, partial, fix)]
    chosen = [one for one in maps if policy is None or one.policy == policy]
    if not chosen:
        there = ", ".join(dict.fromkeys(one.policy or "none named" for one in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {there}.")
    return chosen


def _maps_of(source: str, metric: str, partial: bool, fix: list[str] | None) -> list[Map]:
    from kvatlas.results import Store
    from kvatlas.results.csv_maps import read_maps
    from kvatlas.stats.estimates import with_binomial_bounds
    from kvatlas.stats.maps import maps_of_run

    if not Path(source).is_dir():
        return with_binomial_bounds(read_maps(source, partial))
    with Store.open(Path(source)) as store:
        return maps_of_run(store.manifest(), store.traces(texts=False), metric, partial, fixed(fix))


def _comparisons(source: str, metric: str, fix: list[str] | None) -> list[Any]:
    from kvatlas.results import Store
    from kvatlas.stats.comparisons import comparisons_of_run

    if not Path(source).is_dir():
        return []
    with Store.open(Path(source)) as store:
        return list(comparisons_of_run(store.manifest(), store.traces(texts=False), metric, fixed(fix)))


def fixed(fix: list[str] | None) -> dict[str, Any]:
    """The axes held to one value, from `--fix`."""
    from kvatlas.cli.sweeps import assignment

    return dict(assignment("--fix", text) for text in fix or [])


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (describe, report, export):
        app.command()(command)
