"""The command `autopsy`, and its summary as lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_text
from kvatlas.cli.progress import count_display
from kvatlas.text import counted, model_name

if TYPE_CHECKING:
    from kvatlas.autopsy.driver import LostCell

app = options.Commands()


@app.command("autopsy")
def autopsy_command(
    run: options.Run,
    policy: Annotated[
        str,
        typer.Option("--policy", metavar="CELL", help="As 'R1-Qwen dynts ratio=0.3'; all models without one."),
    ],
    most: Annotated[int, typer.Option(min=1, help="Lost answers to examine of a cell.")] = 100,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the evicted tokens that, put back within the budget, restore the answers that one cell lost.

    Each lost answer is decoded again some dozen times, and each cause is tested under random numbers that the search
    did not use. It has a paragraph; statistics come from ten answers on. Started again, the command goes on where it
    stopped.
    """
    from kvatlas.autopsy.autopsies import read_autopsies
    from kvatlas.autopsy.driver import find_lost, perform
    from kvatlas.autopsy.summary import answer_paragraphs, summarise
    from kvatlas.policies import permit
    from kvatlas.results import Store
    from kvatlas.sweeps.spec import named_classes

    # A file that the user names, or with --allow-code each of the run.
    permit(*policy.split())
    if allow_code:
        with Store.open(run) as store:
            manifest = store.manifest()
        permit(*(cell.setting.policy for cell in manifest.expected), *named_classes(manifest.spec))
    cells = find_lost(run, policy)
    if not quiet:
        done = read_autopsies(run)
        for cell in cells:
            note(work_text(cell, done, most))
    on_done = (lambda done, total: None) if quiet else count_display("autopsy", "lost answers")
    autopsies = perform(cells, run, most, on_done)

    documents: list[dict[str, Any]] = []
    for cell, of_cell in zip(cells, autopsies, strict=True):
        document = {
            "model": cell.model,
            "benchmark": cell.benchmark,
            "setting": str(cell.setting),
            "all_lost": len(cell.lost),
            "summary": summarise(of_cell, len(cell.lost) / cell.answers),
            "answers": list(answer_paragraphs(run, cell, of_cell)),
            "autopsies": [dataclasses.asdict(item) for item in of_cell],
        }
        documents.append(document)
    if as_json:
        typer.echo(json.dumps({"cells": documents}, indent=2, allow_nan=False))
        return
    print_text(autopsies_text(documents))


def work_text(cell: LostCell, done: Container[tuple[str, ...]], most: int) -> str:
    """Return how many of the first `most` lost answers of a cell are to be examined; `done` has those that were."""
    from kvatlas.autopsy.autopsies import key_of

    chosen = cell.lost[:most]
    missing = [answer for answer in chosen if key_of(answer) not in done]
    lost = counted(len(cell.lost), "lost answer")
    text = f"{model_name(cell.model)} | {cell.benchmark}: {lost}, {len(missing)} to examine"
    return text if len(missing) == len(chosen) else f"{text}, {len(chosen) - len(missing)} are done"


def autopsies_text(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a paragraph for each answer of a cell, and from `FEWEST` answers on what they show together."""
    from kvatlas.autopsy.summary import FEWEST
    from kvatlas.report.description import from_template

    return from_template("autopsies.md", {"cells": cells, "fewest": FEWEST})
