"""The command that takes a setting to a serving engine: export-setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_setting(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose cell is exported.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="tensorrt-llm, triattention-vllm, triattention-sglang, r-kv-vllm or kvpress.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the configuration is written.")],
    setting: Annotated[
        str, typer.Option(help="The cell by words, as 'rkv kv_budget=512'; default: the recommended one.")
    ] = "",
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Write the nearest that the target can, where it is not the same.")
    ] = False,
) -> None:
    """Write a cell as the configuration of a serving engine; what that cannot express is named."""
    from kvatlas.integrations.exported_files import write_export

    for path in write_export(run, setting, to, out, nearest):
        typer.echo(path)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command("export-setting")(export_setting)
