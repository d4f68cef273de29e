"""The command that brings in Inspect's logs: import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Inspect's logs (.eval, .json), of any scored task.")
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, new or existing.")],
    scorer: Annotated[str, typer.Option(help="Whose score counts, where a log has several; default: its first.")] = "",
) -> None:
    """Bring Inspect's logs into a run, to compare remote models with local ones."""
    from kvatlas.integrations.inspect_logs import import_log

    for log in logs:
        cell, added = import_log(log, run, scorer)
        promised = len(cell.problems) * cell.samples
        typer.echo(f"{run}: {added} of {promised} traces of {cell.model} on {cell.benchmark}")


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("import")(import_)
