"""Commands that draw: map, compare."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli import options
from kvatlas.core import KvatlasError, Note, NoteKind, differing

if TYPE_CHECKING:
    from kvatlas.stats.systems import ModelSetting

app = options.Commands()


@app.command("map")
def map_command(
    inputs: options.Inputs,
    out: options.FigureFile,
    mean: Annotated[
        bool, typer.Option("--mean", help="Means over benchmarks: points lost against the full cache.")
    ] = False,
    shared: Annotated[
        bool | None, typer.Option("--shared/--own", help="One colour scale, or the range of each panel's own cells.")
    ] = None,
    policy: options.OnlyPolicy = None,
    metric: Annotated[
        str | None, typer.Option(help="pass@1 (default), progress, ..., or a cost: mean_kv_tokens, seconds, ...")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME|RUN|CSV", help="Paired differences to a policy, model, run or map.")
    ] = None,
    forest: Annotated[bool, typer.Option("--forest", help="A row for each setting: what it saves and loses.")] = False,
    cost: Annotated[
        str | None, typer.Option(metavar="COST", help="Loss against memory, tokens_per_second or seconds.")
    ] = None,
    lose_at_most: options.LoseAtMost = None,
    claim: options.ClaimOption = None,
    partial: options.Partial = False,
    fix: options.Fix = None,
    look: options.LookOption = None,
) -> None:
    """Draw heatmaps over local window and ratio: a panel for each benchmark, or means side by side.

    Means show the points lost against the full cache; with --metric pass@1, or without a full cache, the metric.
    Runs that vary one parameter, or only the policy, have a row for each setting. The data is next to the figure.
    """
    from kvatlas.report.map_figure import MapOptions, plot_sources
    from kvatlas.report.sources import ReadOptions

    read = ReadOptions(metric, partial, options.assignments("--fix", fix), policy, lose_at_most, claim=claim)
    show = MapOptions(mean, shared, against, forest, cost, options.figure_options(look))
    written = plot_sources(inputs, out, read, show)
    for path in written:
        typer.echo(path)


@app.command("compare")
def compare_command(
    inputs: options.RunsAndSystems,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw pairs of systems: PNG, SVG or PDF.")] = None,
    metric: options.Metric = "pass@1",
    benchmark: Annotated[list[str] | None, typer.Option(help="Only this benchmark. Repeat it for more.")] = None,
    partial: options.Partial = False,
    as_json: options.Json = False,
    look: options.LookOption = None,
) -> None:
    """Compare systems problem by problem, or two runs token by token.

    Systems stand after the runs, as in `compare RUN rkv "dynts ratio=0.3"`; --out draws every two of them. Two runs
    without systems are compared token by token, and the exit code is 1 if they do not hold the same.
    """
    runs = [Path(name) for name in inputs if Path(name).is_dir()]
    names = [name for name in inputs if not Path(name).is_dir()]
    if not runs:
        raise KvatlasError(
            f"compare: expected folders of runs, then systems of them, got {', '.join(inputs)}. Two maps are compared "
            "by map MAP --against MAP."
        )
    of_systems = out is not None or names or benchmark or metric != "pass@1"
    if out is None and look is not None:
        raise KvatlasError("--look is for a figure of systems, and none is asked for; name it with --out.")
    if len(runs) == 2 and not of_systems:
        from kvatlas.report.agreement import compare_runs, runs_as_text

        agreement = compare_runs(*runs)
        typer.echo(json.dumps(agreement, indent=2) if as_json else runs_as_text(agreement), nl=as_json)
        raise typer.Exit(0 if agreement["same"] else 1)
    from kvatlas.figures.pairwise import check_panels, names_of, pairwise_figure, save_pairwise
    from kvatlas.figures.style import check_figure
    from kvatlas.stats.systems import pairs_of

    if out is not None:
        check_figure(out)
    all_systems, systems, notes = _chosen_systems(runs, metric, names, partial, benchmark)
    check_panels(systems)
    pairs = pairs_of(systems)
    # Settings that were chosen for the reader have names that tell them from those that were not.
    told_apart = all_systems if any(note.kind is NoteKind.LEFT_OUT for note in notes) else systems
    name_of = dict(zip(map(id, told_apart), names_of(told_apart), strict=True))
    shown = [name_of[id(system)] for system in systems]
    written = []
    if out is not None:
        figure = pairwise_figure(systems, pairs, metric, notes, options=options.figure_options(look))
        written = save_pairwise(figure, out, systems, metric)
    documents = [compared.to_json(shown[i], shown[j]) for i, j, compared in pairs]
    if as_json:
        typer.echo(json.dumps({"metric": metric, "pairs": documents, "files": list(map(str, written))}, indent=2))
        return
    for path in written:
        typer.echo(path)
    for i, j, compared in pairs:
        subject = "" if metric == "pass@1" else f"{metric}: "
        typer.echo(f"{subject}{compared.in_words(shown[i], shown[j])}")
    if len(pairs) > 1:
        typer.echo("Each pair is judged by itself.")
    for note in notes:
        typer.echo(f"Note: {note.text}.")


def _chosen_systems(
    runs: list[Path], metric: str, names: list[str] | None, partial: bool, benchmarks: list[str] | None = None
) -> tuple[list[ModelSetting], list[ModelSetting], list[Note]]:
    """Return the systems of runs, those of them that are compared, and what to note of the choice."""
    from kvatlas.stats.maps import check_complete, partial_note
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.systems import choose, fitting_systems, systems_of

    systems = systems_of([RunData.open(run) for run in runs], metric, benchmarks)
    chosen = choose(systems, names or [], best=True)
    cells = list(chain.from_iterable(system.cells for system in chosen))
    check_complete(cells, partial, "figure")
    notes = list(partial_note(cells))

    # Settings that were chosen by their values, where a name fits several.
    for name in names or ():
        fits = [system.setting.values for system in fitting_systems(systems, name)]
        if len(fits) > 1:
            text = (
                f"{name!r} fits {len(fits)} settings, and the highest of them is compared; name "
                f"{' and '.join(differing(fits))} to choose"
            )
            notes.append(Note(NoteKind.LEFT_OUT, text))
    if not names and len(chosen) < len(systems):
        notes.append(Note(NoteKind.LEFT_OUT, "of each policy the highest setting is compared"))
    return systems, chosen, notes
