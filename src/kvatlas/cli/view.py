"""The command `view`: runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.results import Fix, fixed


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


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(view)
