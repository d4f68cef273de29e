"""Commands that read runs and CSV maps: describe, check, report, export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Say what maps hold: peaks, whether they are more than noise, plateaus, trends, comparisons, what to choose."""
    from kvatlas.report.describe import describe_sources
    from kvatlas.report.markdown import as_text

    description = describe_sources(
        inputs,
        metric=metric,
        partial=partial,
        fix=fixed(fix, inputs),
        policy=policy,
        problems=problems,
        samples=samples,
    )
    typer.echo(json.dumps(description, indent=2, allow_nan=False) if as_json else as_text(description))


def check(
    first: Annotated[str, typer.Argument(metavar="A.csv", help="A CSV map, published:NAME, or a run.")],
    second: Annotated[str, typer.Argument(metavar="B.csv", help="Another.")],
    mean: Annotated[str | None, typer.Option("--mean", metavar="M.csv", help="Their mean over benchmarks.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Points that rounding may account for.")] = 0.05,
    partial: Partial = False,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
) -> None:
    """Do maps agree; which cells conflict; which of two contradicting maps fits a published mean."""
    from kvatlas.report.check import as_text, check_maps

    given = {name: _maps_of(name, "pass@1", partial, None) for name in (first, second)}
    if len(given) < 2:
        given = {"A": given[first], "B": given[first]}
    means = _maps_of(mean, "pass@1", True, None) if mean else None
    found = check_maps(given, means, tolerance / 100)
    typer.echo(json.dumps(found, indent=2, allow_nan=False) if as_json else as_text(found))


def report(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
    metric: Metric = "pass@1",
    traces: Annotated[int, typer.Option(min=0, help="Traces of each cell in the page, where not all fit.")] = 2,
    megabytes: Annotated[float, typer.Option(min=0, help="Of traces in the page, at most.")] = 4.0,
    attention: Annotated[
        int, typer.Option(min=0, help="Traces whose importance and attention are measured with the model; 0: none.")
    ] = 4,
    folder: Annotated[
        bool, typer.Option("--folder/--no-folder", help="All traces in a folder beside the page, if they do not fit.")
    ] = True,
    partial: Partial = False,
    fix: Fix = None,
) -> None:
    """Write one self-contained HTML page of a run: from the map to the single token."""
    from kvatlas.report.page import write_report

    written = write_report(
        run, out, metric, partial, fixed(fix, [run]),
        per_cell=traces, measure=attention, limit=int(megabytes * 1e6), beside=folder and traces > 0,
    )  # fmt: skip
    typer.echo(written[0])
    if len(written) > 1:
        typer.echo(f"{written[1].parent} ({len(written) - 1} pages with all traces)")


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


def maps_of(
    inputs: list[str], metric: str | None, partial: bool, fix: list[str] | None, policy: str | None
) -> list[Map]:
    """The maps of all inputs, of one policy if it is named; without a metric of what each run usually shows."""
    from kvatlas.core import KvatlasError

    maps = [one for source in inputs for one in _maps_of(source, metric, partial, fix)]
    chosen = [one for one in maps if policy is None or one.policy == policy]
    if not chosen:
        there = ", ".join(dict.fromkeys(one.policy or "none named" for one in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {there}.")
    return chosen


def _maps_of(source: str, metric: str | None, partial: bool, fix: list[str] | None) -> list[Map]:
    from kvatlas.results import Store
    from kvatlas.results.csv_maps import read_maps
    from kvatlas.stats.estimates.maps import maps_of_run
    from kvatlas.stats.estimates.metrics import usual_metric
    from kvatlas.stats.estimates.pass_at_1 import with_binomial_bounds

    if not Path(source).is_dir():
        return with_binomial_bounds(read_maps(source, partial))
    with Store.open(Path(source)) as store:
        manifest = store.manifest()
        shown = metric or usual_metric(manifest)
        return maps_of_run(manifest, store.traces(texts=False), shown, partial, fixed(fix, [source]))


def fixed(fix: list[str] | None, inputs: Sequence[str | Path]) -> dict[str, Any]:
    """The axes held to one value, from `--fix`: a value that a run's axis has as text, else a number or a truth."""
    from kvatlas.cli.sweeps import assignment
    from kvatlas.parameters import spelled
    from kvatlas.results import Store

    pairs = dict(assignment("--fix", text) for text in fix or [])
    texts: set[tuple[str, Any]] = set()
    for source in inputs if pairs else ():
        if Path(source).is_dir():
            with Store.open(Path(source)) as store:
                texts |= {(name, value) for name, held in store.manifest().axes for value in held}
    return {name: value if (name, value) in texts else spelled(value) for name, value in pairs.items()}


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (describe, check, report, export):
        app.command()(command)
