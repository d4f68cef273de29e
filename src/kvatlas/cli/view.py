"""Commands that show traces: view, in the browser, and animate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli import completing
from kvatlas.cli.results import Fix, Run, fixed


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, also while a sweep writes.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port on this machine; 0 takes a free one.")] = 0,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the app as files for a static host instead.")
    ] = None,
    fix: Fix = None,
) -> None:
    """Show runs in the browser: maps, cells, problems and every trace, live while a sweep runs."""
    from kvatlas.core import KvatlasError

    try:
        from kvatlas.view.app import named, serve
        from kvatlas.view.bundle import write_bundle
    except ModuleNotFoundError as error:
        raise KvatlasError("kvatlas view needs the extra: pip install 'kvatlas[serve]'.") from error
    views = named([run.absolute() for run in runs], fixed(fix))
    if bundle is None:
        serve(views, port)
    else:
        typer.echo(f"{bundle}: {write_bundle(views, bundle):,} files; any web server can host them.")


def animate(
    run: Run,
    problem: Annotated[str, typer.Option(help="The problem's name, as `view` and `export` have it.")],
    out: Annotated[Path, typer.Option(metavar="FILE.gif", help="The file to write.")],
    policy: Annotated[str, typer.Option(help="KV-cache token selection.", autocompletion=completing.policies)],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the policy's setting.")
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Which of the problem's samples.")] = 0,
    model: Annotated[str | None, typer.Option(help="Which model, where the run has several.")] = None,
) -> None:
    """Animate the cache of a trace, with the full cache's next to it, as a GIF."""
    from kvatlas.cli.sweeps import assignments
    from kvatlas.report.animation import animate as write

    write(run, out, problem, sample, policy, assignments("--set", set_), model)
    typer.echo(out)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (view, animate):
        app.command()(command)
