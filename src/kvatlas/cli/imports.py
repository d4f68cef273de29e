"""The command that brings in results of other programs: import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...",
            help="Inspect's logs (.eval, .json), lm-eval's samples_*.jsonl, lighteval's details_*.parquet.",
        ),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, new or existing.")],
    scorer: Annotated[str, typer.Option(help="Whose score counts, where a log has several; default: its first.")] = "",
) -> None:
    """Bring scored logs of other programs into a run, to be compared with local ones."""
    from kvatlas.integrations.inspect_logs import import_log
    from kvatlas.integrations.lighteval_details import import_details, is_details_file
    from kvatlas.integrations.lm_eval_samples import import_samples, is_sample_file

    for log in logs:
        foreign = import_samples if is_sample_file(log) else import_details if is_details_file(log) else import_log
        cell, added = foreign(log, run, scorer)
        promised = len(cell.problems) * cell.samples
        typer.echo(f"{run}: {added} of {promised} traces of {cell.model} on {cell.benchmark}")


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("import")(import_)
