"""The machine: doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.lists import print_findings


def doctor(
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of lines.")] = False,
) -> None:
    """Check this machine in under a minute: versions, kernels, CUDA graphs, tokens, memory.

    What it prints belongs into an issue report. Ends with exit code 2 if tokens are not those of plain torch.
    """
    import torch

    from kvatlas.sweeps.doctor import check_machine

    torch.set_num_threads(1)
    fence = "" if as_json else "```\n"
    typer.echo(fence, nl=False)
    try:
        print_findings(check_machine(device), as_json)
    finally:
        typer.echo(fence, nl=False)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(doctor)
