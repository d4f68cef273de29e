"""The command that brings in results of other programs: import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    log: Annotated[Path, typer.Argument(metavar="LOG.eval", help="Inspect's log of a kvatlas task.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, new or existing.")],
) -> None:
    """Bring an Inspect log of a remote model into a run, to be compared with local ones."""
    from kvatlas.integrations.inspect_logs import import_log

    cell, added = import_log(log, run)
    promised = len(cell.problems) * cell.samples
    typer.echo(f"{run}: {added} of {promised} traces of {cell.model} on {cell.benchmark}")


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("import")(import_)
