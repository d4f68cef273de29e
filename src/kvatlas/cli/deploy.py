"""A setting in another engine: deploy export, deploy verify."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.quantities import finite
from kvatlas.cli.sweeps import Quiet, check_start
from kvatlas.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable

#: The variable that holds the key if no other is named.
KEY = "KVATLAS_API_KEY"
Cell = Annotated[
    str, typer.Option(help="The cell by words, as 'dynts ratio=0.3 local_window=32'; default: the recommended one.")
]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose cell is exported.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET", help="tensorrt-llm, triattention-vllm, triattention-sglang, r-kv-vllm, kvpress."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the configuration is written.")],
    cell: Cell = "",
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Write the nearest that the target can, where it is not the same.")
    ] = False,
) -> None:
    """Write a cell as the configuration of a serving engine; what that cannot express is named."""
    from kvatlas.deploy.export import write_export

    for path in write_export(run, cell, to, out, nearest):
        typer.echo(path)


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible endpoint, http://HOST:PORT.")],
    against: Annotated[Path, typer.Option(metavar="RUN", help="The run whose cell it is to be.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run of its answers; resumed where it was begun.")],
    cell: Cell = "",
    served: Annotated[str, typer.Option(help="The model's name there; default: the only one.")] = "",
    problems: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each benchmark.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of each; default: the run's.")] = None,
    texts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also ask N problems greedily, and read the texts here; 32 will do.")
    ] = 0,
    lose_at_most: Annotated[
        float | None, typer.Option(metavar="POINTS", callback=finite, help="The margin; default: the sweep's own.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions under way at once.")] = 8,
    top_k: Annotated[bool, typer.Option("--top-k/--no-top-k", help="Send top_k, which OpenAI's API lacks.")] = True,
    key_env: Annotated[str, typer.Option(help="The environment variable with the key.")] = KEY,
    as_json: Annotated[bool, typer.Option("--json", help="As data instead of text.")] = False,
    quiet: Quiet = False,
) -> None:
    """Ask an endpoint a run's problems: is it the map's cell? Exit code 1 where it is not, 3 where that is open."""
    from kvatlas.core import KvatlasError
    from kvatlas.deploy.answers import ask
    from kvatlas.deploy.endpoint import Endpoint
    from kvatlas.deploy.reference import Reference
    from kvatlas.deploy.report import as_text, report
    from kvatlas.stats.losses import Standing
    from kvatlas.stats.run_data import margin_of

    key = os.environ.get(key_env)
    if key is None and key_env != KEY:
        raise KvatlasError(f"The environment has no variable {key_env!r} with a key.")
    endpoint = Endpoint(url, served, key)
    check_start(out)
    reference = Reference.of(against, cell)
    margin = reference.run.margin if lose_at_most is None else margin_of({"lose_at_most": lose_at_most})

    def progress(name: str) -> Callable[[int, int], None]:
        def show(done: int, total: int) -> None:
            if not quiet and (done == total or done % max(1, total // 10) == 0):
                typer.echo(visible(f"{name}: {done:,} of {total:,} answers"), err=True)

        return show

    read = None
    if texts:
        from kvatlas.deploy.texts import compare

        show = progress(f"{endpoint.url}, temperature 0")
        read = compare(endpoint, reference, out / "texts", texts, concurrency=concurrency, on_trace=show)
    limits = {"problems": problems, "samples": samples}
    show = progress(endpoint.url)
    answers = ask(endpoint, reference, out, **limits, concurrency=concurrency, top_k=top_k, on_trace=show)
    result = report(reference, answers, margin, read)
    typer.echo(json.dumps(result, indent=2) if as_json else as_text(result, endpoint.url))
    if result["alarmed"]:
        raise typer.Exit(1)
    if result["cell"]["verdict"] == Standing.UNDECIDED:
        raise typer.Exit(3)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(no_args_is_help=True, help=__doc__)
    group.command()(export)
    group.command()(verify)
    app.add_typer(group, name="deploy", help="A setting in another engine: its configuration, and proof.")
