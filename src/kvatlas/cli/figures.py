"""Commands that draw: map, compare, curves, maze. `context.obj` is the look that the figure options describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli import options
from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from kvatlas.core import Note
    from kvatlas.stats.systems import ModelSetting

app = typer.Typer()


@app.command("map", cls=options.FigureCommand)
def map_(
    context: typer.Context,
    inputs: options.Inputs,
    out: options.FigureFile,
    mean: Annotated[bool, typer.Option("--mean", help="Means over benchmarks, models side by side.")] = False,
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
    frame: Annotated[
        str, typer.Option(metavar="margin|plateau|none", help="Outline cells shown to keep the margin, or tied.")
    ] = "margin",
    lose_at_most: options.LoseAtMost = None,
    partial: options.Partial = False,
    fix: options.Fix = None,
) -> None:
    """Draw heatmaps over local window and ratio: a panel for each benchmark, or means side by side.

    Runs that vary one parameter, or only the policy, become line charts. The data is written next to the figure.
    """
    from kvatlas.figures.panels import Frame
    from kvatlas.report.map_figure import plot_sources

    if frame not in list(Frame):
        raise KvatlasError(f"--frame: expected one of {', '.join(Frame)}, got {frame!r}.")
    written = plot_sources(
        inputs,
        out,
        mean=mean,
        shared=shared,
        policy=policy,
        metric=metric,
        against=against,
        frame=Frame(frame),
        lose_at_most=lose_at_most,
        look=context.obj,
        partial=partial,
        fix=options.assignments("--fix", fix),
    )
    for path in written:
        typer.echo(path)


@app.command(cls=options.FigureCommand)
def compare(
    context: typer.Context,
    runs: options.Runs,
    out: options.FigureFile,
    metric: options.Metric = "progress",
    only: options.Only = None,
    benchmark: Annotated[list[str] | None, typer.Option(help="Only this benchmark. Repeat it for more.")] = None,
    density: Annotated[bool, typer.Option("--density", help="Densities also of a few common values.")] = False,
    partial: options.Partial = False,
    as_json: options.Json = False,
) -> None:
    """Draw every two systems against each other, problem by problem, with the line where they are equal."""
    from kvatlas.figures.pairwise import check_panels, names_of, pair_text, pairwise_figure, save_pairwise
    from kvatlas.figures.style import check_figure
    from kvatlas.stats.systems import pairs_of

    check_figure(out)
    systems, notes = _systems(runs, metric, only, partial, benchmark)
    check_panels(systems)
    pairs = pairs_of(systems)
    names = names_of(systems)
    figure = pairwise_figure(systems, pairs, metric, notes, density=density, look=context.obj)
    written = save_pairwise(figure, out, systems, metric, look=context.obj)
    documents = [compared.to_json(names[i], names[j]) for i, j, compared in pairs]
    if as_json:
        typer.echo(json.dumps({"metric": metric, "pairs": documents, "files": list(map(str, written))}, indent=2))
        return
    for path in written:
        typer.echo(path)
    for i, j, compared in pairs:
        typer.echo(pair_text(compared, names[i], names[j]))


@app.command(cls=options.FigureCommand)
def curves(
    context: typer.Context,
    runs: options.Runs,
    out: options.FigureFile,
    by: Annotated[str, typer.Option(help="L (depth), B (locked doors), N (noise), S (shuffle), n (CHAIN).")] = "L",
    only: options.Only = None,
    published: Annotated[bool, typer.Option(help="Published decays as grey lines.")] = True,
    partial: options.Partial = False,
    as_json: options.Json = False,
) -> None:
    """Draw success and progress against difficulty; against L with the fitted decay exp(-L / L0)."""
    from kvatlas.figures.curves import depth_figure, depth_text
    from kvatlas.figures.pairwise import names_of
    from kvatlas.figures.style import check_figure, save

    check_figure(out)
    success, notes = _systems(runs, "pass@1", only, partial)
    progress, _ = _systems(runs, "progress", only, partial)
    names = names_of(success)
    figure, fits = depth_figure(success, progress, names, by=by, published=published, notes=notes, look=context.obj)
    written = save(figure, out, look=context.obj)
    if as_json:
        data = [{"entrant": name, **curve.to_json(by)} for name, curve in zip(names, fits, strict=True)]
        typer.echo(json.dumps({"by": by, "curves": data, "files": list(map(str, written))}, indent=2))
        return
    for path in written:
        typer.echo(path)
    for name, curve in zip(names, fits, strict=True):
        if curve.decays:
            amplitude_one, free = curve.decays
            typer.echo(f"{name}: L0 {depth_text(amplitude_one)}; amplitude {free.amplitude:.2f}: L0 {depth_text(free)}")


def _systems(
    runs: list[Path], metric: str, only: list[str] | None, partial: bool, benchmarks: list[str] | None = None
) -> tuple[list[ModelSetting], list[Note]]:
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.systems import check_complete, choose, systems_of

    chosen = choose(systems_of([RunData.open(run) for run in runs], metric, benchmarks), only or [])
    return chosen, check_complete(chosen, partial)


@app.command(cls=options.FigureCommand)
def maze(
    context: typer.Context,
    benchmark: Annotated[str, typer.Argument(metavar="SEQBENCH-...", help="A seqBench benchmark.")],
    out: options.FigureFile,
    problem: Annotated[str, typer.Option(help="Number of the maze from 0, or its id.")] = "0",
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Draw a model's path from this run as well.")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAME", help="The system, if the run has several.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="The sample of its path.")] = 0,
) -> None:
    """Draw one maze with the optimal path and, from a run, a model's path with its first error."""
    from kvatlas.benchmarks import find, nth
    from kvatlas.figures.maze import maze_figure
    from kvatlas.figures.style import check_figure, save
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.systems import trace_of

    if not benchmark.startswith("SEQBENCH"):
        raise KvatlasError(f"{benchmark!r} has no mazes; expected the benchmarks SEQBENCH-...")
    check_figure(out)
    seqbench = find(benchmark)
    is_number = problem.isascii() and problem.isdecimal() and len(problem) < 10
    problems = [nth(seqbench, int(problem))] if is_number else seqbench.problems()
    chosen = next((candidate for candidate in problems if is_number or candidate.id == problem), None)
    if chosen is None:
        raise KvatlasError(f"{seqbench.name} has no maze {problem!r}; its first is {problems[0].id}.")
    trace = None if run is None else trace_of(RunData.open(run), chosen.id, sample, only)
    for path in save(maze_figure(chosen, trace, look=context.obj), out, look=context.obj):
        typer.echo(path)
