"""`calibrate`: what a policy has to know of a model before it can run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.sweeps import ModelOption, assignments


def calibrate(
    model: Annotated[str, typer.Argument(help="embedded:NAME or hf:FOLDER.")],
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...")],
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the statistics go.")],
    problems: Annotated[int, typer.Option(min=1, help="Of each benchmark, its first problems.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest trace to take in.")] = 2048,
    model_option: ModelOption = None,
) -> None:
    """Make the statistics of queries that the policy triattention needs, from prompts and the model's own traces."""
    from kvatlas.sweeps.calibration import calibrate as write

    tokens = write(
        model,
        benchmarks,
        out,
        problems=problems,
        max_new_tokens=max_new_tokens,
        model_options=assignments("--model-option", model_option),
    )
    typer.echo(f"{out}: means over the queries of {tokens:,} tokens")


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(calibrate)
