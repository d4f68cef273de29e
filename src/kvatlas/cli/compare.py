"""Commands that set systems (models under settings) against each other: compare, curves, maze."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli.figure_options import with_figure_options

if TYPE_CHECKING:
    from kvatlas.core import Note
    from kvatlas.stats.systems import System

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; imported ones, too.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="PNG, SVG or PDF by its suffix.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="NAME",
        help="A system by words that fit it alone, as 'R1-Qwen full' or 'dynts ratio=0.3'. Repeat it; default: all.",
    ),
]
Partial = Annotated[bool, typer.Option("--partial", help="Draw what is there although traces are missing.")]
Json = Annotated[bool, typer.Option("--json", help="The numbers as data.")]


@with_figure_options
def compare(
    runs: Runs,
    out: Out,
    metric: Annotated[
        str, typer.Option(help="progress, pass@1, or any graded metric in [0, 1], such as progress_valid.")
    ] = "progress",
    only: Only = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="Problems of this benchmark alone. Repeat it; default: all.")
    ] = None,
    density: Annotated[
        bool, typer.Option("--density", help="Densities also where a few values hold most problems, which are counted.")
    ] = False,
    partial: Partial = False,
    as_json: Json = False,
    *,
    look: Any,
) -> None:
    """Draw every two systems against each other, problem by problem, with the line where they are equal."""
    from kvatlas.figures.look import check_figure
    from kvatlas.figures.pairwise import check_panels, names_of, pairwise_figure, save_pairwise
    from kvatlas.figures.style import signed
    from kvatlas.stats.systems import pairs_of

    check_figure(out)
    systems, notes = _systems(runs, metric, only, partial, benchmark)
    check_panels(systems)
    pairs = pairs_of(systems)
    names = names_of(systems)
    figure = pairwise_figure(systems, pairs, metric, notes, density=density, look=look)
    written = save_pairwise(figure, out, systems, metric, look=look)
    documents = [compared.to_json(names[i], names[j]) for i, j, compared in pairs]
    if as_json:
        typer.echo(
            json.dumps({"metric": metric, "pairs": documents, "files": [str(path) for path in written]}, indent=2)
        )
        return
    for path in written:
        typer.echo(path)
    for pair in documents:
        mean, low, high = (signed(pair["difference"][key], 3, "-") for key in ("value", "low", "high"))
        typer.echo(
            f"x: {pair['x']} vs y: {pair['y']}: x ahead on {100 * pair['below']:.1f} %, "
            f"equal on {100 * pair['on']:.1f} %, y ahead on {100 * pair['above']:.1f} % of {pair['problems']} "
            f"problems; mean of x - y {mean} ({low} to {high})"
        )


@with_figure_options
def curves(
    runs: Runs,
    out: Out,
    by: Annotated[
        str, typer.Option(help="L (logical depth), B (locked doors), N (noise), S (shuffle) or n (CHAIN).")
    ] = "L",
    only: Only = None,
    published: Annotated[bool, typer.Option(help="Published decays as grey lines.")] = True,
    partial: Partial = False,
    as_json: Json = False,
    *,
    look: Any,
) -> None:
    """Draw success and progress against difficulty; against L with the fitted decay exp(-L / L0)."""
    from kvatlas.figures.decay import curves_figure, depth_text
    from kvatlas.figures.look import check_figure, save
    from kvatlas.figures.pairwise import names_of

    check_figure(out)
    success, notes = _systems(runs, "pass@1", only, partial)
    progress, _ = _systems(runs, "progress", only, partial)
    names = names_of(success)
    figure, fitted = curves_figure(success, progress, names, by=by, published=published, notes=notes, look=look)
    written = save(figure, out, look=look)
    if as_json:
        data = [
            {
                "entrant": name,
                "points": [{by: level, **_plain(vars(estimate))} for level, estimate in curve.points],
                "decays": [_plain(vars(decay)) for decay in curve.decays],
            }
            for name, curve in zip(names, fitted, strict=True)
        ]
        typer.echo(json.dumps({"by": by, "curves": data, "files": [str(path) for path in written]}, indent=2))
        return
    for path in written:
        typer.echo(path)
    for name, curve in zip(names, fitted, strict=True):
        if curve.decays:
            amplitude_one, free = curve.decays
            typer.echo(f"{name}: L0 {depth_text(amplitude_one)}; amplitude {free.amplitude:.2f}: L0 {depth_text(free)}")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers as JSON knows them: what is infinite is null."""
    return {name: None if value in (float("inf"), float("-inf")) else value for name, value in values.items()}


def _systems(
    runs: list[Path], metric: str, only: list[str] | None, partial: bool, benchmarks: list[str] | None = None
) -> tuple[list[System], list[Note]]:
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.systems import check_complete, choose, systems_of

    chosen = choose(systems_of([RunData.open(run) for run in runs], metric, benchmarks), only or [])
    return chosen, check_complete(chosen, partial)


@with_figure_options
def maze(
    benchmark: Annotated[str, typer.Argument(metavar="SEQBENCH-...", help="A seqBench benchmark.")],
    out: Out,
    problem: Annotated[str, typer.Option(help="Number of the maze from 0, or its id.")] = "0",
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Draw a model's path from this run as well.")] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME", help="Whose path, if the run has several.")
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Which of its samples.")] = 0,
    *,
    look: Any,
) -> None:
    """Draw one maze with the optimal path and, from a run, a model's path with its first error."""
    from kvatlas.benchmarks import find, nth
    from kvatlas.core import KvatlasError
    from kvatlas.figures.look import check_figure, save
    from kvatlas.figures.maze import maze_figure
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.systems import trace_of

    if not benchmark.startswith("SEQBENCH"):
        raise KvatlasError(f"{benchmark!r} has no mazes; valid are the benchmarks SEQBENCH-...")
    check_figure(out)
    seqbench = find(benchmark)
    number = problem.isascii() and problem.isdecimal() and len(problem) < 10
    problems = [nth(seqbench, int(problem))] if number else seqbench.problems()
    asked = next((candidate for candidate in problems if number or candidate.id == problem), None)
    if asked is None:
        raise KvatlasError(f"{seqbench.name} has no maze {problem!r}; its first is {problems[0].id}.")
    trace = None
    if run is not None:
        trace = trace_of(RunData.open(run), asked.id, sample, only)
    for path in save(maze_figure(asked, trace, look=look), out, look=look):
        typer.echo(path)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (compare, curves, maze):
        app.command()(command)
