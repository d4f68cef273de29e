"""Commands for result cards: card, reproduce."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.sweeps import BatchSize, Quiet, Replace, Workers, check_start, drive

Json = Annotated[bool, typer.Option("--json", help="As data instead of text.")]


def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(metavar="CARD.json", help="The file to write.")],
) -> None:
    """Write a result card: digests of weights, data, prompts and traces, sampling, versions, n and intervals."""
    from kvatlas.core import KvatlasError
    from kvatlas.report.card import card_of

    if not out.parent.is_dir():
        raise KvatlasError(f"There is no folder {str(out.parent)!r} to write the card into.")
    out.write_text(json.dumps(card_of(run), indent=1) + "\n", encoding="utf-8")
    typer.echo(out)


def reproduce(
    card: Annotated[Path, typer.Argument(metavar="CARD.json", help="A result card.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="The folder of the new run; resumed where it was begun.")],
    replace: Replace = False,
    as_json: Json = False,
    workers: Workers = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
) -> None:
    """Run a card's sweep again and say what agrees, token by token; exit code 1 where something differs."""
    from kvatlas.report.card import as_text, card_of, compare_cards, plan_of, read_card, to_json

    check_start(out)
    first = read_card(card)
    drive(plan_of(first), out, replace=replace, workers=workers, batch_size=batch_size, quiet=quiet)
    check = compare_cards(first, card_of(out), (str(card), str(out)))
    typer.echo(json.dumps(to_json(check), indent=2) if as_json else as_text(check))
    if not check.same:
        raise typer.Exit(1)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (card, reproduce):
        app.command()(command)
