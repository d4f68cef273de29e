"""The command that holds an endpoint against a map: verify."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.quantities import finite
from kvatlas.cli.sweeps import Quiet, check_start
from kvatlas.visible import visible

if TYPE_CHECKING:
    from collections.abc import Callable

#: The variable that holds the key where no other is named.
KEY = "KVATLAS_API_KEY"


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible endpoint, http://HOST:PORT.")],
    against: Annotated[Path, typer.Option(metavar="RUN", help="The run whose cell it is to be.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The run of its answers; resumed where it was begun.")],
    cell: Annotated[
        str, typer.Option(help="The cell by words, as 'dynts ratio=0.3 local_window=32'; default: the recommended one.")
    ] = "",
    served: Annotated[str, typer.Option(help="The model's name there; default: the only one.")] = "",
    versus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A second endpoint, set otherwise: does the knob do anything?"),
    ] = None,
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
    from kvatlas.integrations.endpoint import Endpoint
    from kvatlas.integrations.verification_report import as_text, report, to_json
    from kvatlas.integrations.verify import Reference, ask
    from kvatlas.stats.estimates.run_data import margin_of
    from kvatlas.stats.pairs.verification import Standing

    key = os.environ.get(key_env)
    if key is None and key_env != KEY:
        raise KvatlasError(f"The environment has no variable {key_env!r} with a key.")
    endpoints = [Endpoint(address, served, key) for address in (url, versus) if address is not None]
    check_start(out)
    reference = Reference.of(against, cell)
    margin = reference.run.margin if lose_at_most is None else margin_of({"lose_at_most": lose_at_most})

    def tell(what: str) -> Callable[[int, int], None]:
        def told(done: int, total: int) -> None:
            if not quiet and (done == total or done % max(1, total // 10) == 0):
                typer.echo(visible(f"{what}: {done:,} of {total:,} answers"), err=True)

        return told

    read = None
    if texts:
        from kvatlas.integrations.served_texts import compare

        told = tell(f"{endpoints[0].url}, temperature 0")
        read = compare(endpoints[0], reference, out / "texts", texts, concurrency=concurrency, on_trace=told)
    settings = [
        ask(
            endpoint,
            reference,
            out,
            problems=problems,
            samples=samples,
            concurrency=concurrency,
            top_k=top_k,
            on_trace=tell(endpoint.url),
        )
        for endpoint in endpoints
    ]
    result = report(reference, out, settings[0], margin, settings[1] if versus else None, read)
    typer.echo(json.dumps(to_json(result), indent=2) if as_json else as_text(result, endpoints[0].url))
    if result.alarmed:
        raise typer.Exit(1)
    if result.cell.standing is Standing.UNDECIDED:
        raise typer.Exit(3)


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(verify)
