"""The command `autopsy`, and its summary as lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note
from kvatlas.core import KvatlasError
from kvatlas.text import counted, duration_text, model_name

if TYPE_CHECKING:
    from kvatlas.autopsy.driver import LostCell

app = options.Commands()


@app.command("autopsy")
def autopsy_command(
    run: options.Run,
    policy: Annotated[
        str, typer.Option("--policy", help="The cell, as 'R1-Qwen dynts ratio=0.3'; all models without one.")
    ],
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    most: Annotated[int, typer.Option(min=1, help="Lost answers to examine of a cell.")] = 100,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the evicted tokens that, put back within the budget, restore the answers that one cell lost.

    Each lost answer is decoded again some dozen times, and each cause is tested under random numbers that the search
    did not use. Started again, the command goes on where it stopped.
    """
    from kvatlas.autopsy.autopsies import Autopsy, read_autopsies
    from kvatlas.autopsy.driver import find_lost, perform
    from kvatlas.autopsy.summary import held_out_text, summarise
    from kvatlas.policies import permit
    from kvatlas.results import Store
    from kvatlas.sweeps.spec import named_classes

    def tell(examined: Autopsy, done: int, total: int) -> None:
        if not quiet:
            note(f"{done}/{total} {examined.key[3]}: {examined.death}, {examined.cause_text}{held_out_text(examined)}")

    with Store.open(run) as store:
        manifest = store.manifest()
    policies = list(dict.fromkeys(cell.setting.policy for cell in manifest.expected))
    if allow_code:
        permit(*policies, *named_classes(manifest.spec))
    model, rest = model_and_cell(policy, list(dict.fromkeys(cell.model for cell in manifest.expected)))
    setting = options.cell(rest, kv_budget, local_window, ratio, set_, policies)
    cells = find_lost(run, setting, model)
    if not quiet:
        done = read_autopsies(run)
        for cell in cells:
            note(work_text(cell, done, most))
    autopsies = perform(cells, run, most, tell)

    documents: list[dict[str, Any]] = []
    for cell, of_cell in zip(cells, autopsies, strict=True):
        document = {
            "model": cell.model,
            "benchmark": cell.benchmark,
            "setting": str(cell.setting),
            "all_lost": len(cell.lost),
            "summary": summarise(of_cell, len(cell.lost) / cell.answers),
            "autopsies": [dataclasses.asdict(item) for item in of_cell],
        }
        documents.append(document)
    if as_json:
        typer.echo(json.dumps({"cells": documents}, indent=2, allow_nan=False))
        return
    print_autopsies(documents)


def model_and_cell(text: str, models: Sequence[str]) -> tuple[str | None, str]:
    """Return the model of the run that a word of `--policy` names, whole or by its last part, and the other words.

    Raises KvatlasError for words that are no model beside a policy.
    """
    named = []
    others = []
    for word in text.split():
        fitting = [model for model in models if word in (model, model.rpartition(":")[2], model.rpartition("/")[2])]
        named += fitting
        if not fitting:
            others.append(word)

    plain_words = [word for word in others if "=" not in word]
    if len(named) > 1 or len(plain_words) > 1:
        raise KvatlasError(
            f"--policy: expected a model of the run, a policy and PARAMETER=VALUE, got {text!r}; the models are "
            f"{', '.join(models)}."
        )
    return (named[0] if named else None), " ".join(others)


def work_text(cell: LostCell, done: Container[tuple[str, ...]], most: int) -> str:
    """Return what there is to do for the first `most` lost answers of a cell, with an estimate of the time.

    `done` are the keys of autopsies that were made. There is no time if the store does not say how long answers took.
    """
    from kvatlas.autopsy.autopsies import key_of
    from kvatlas.autopsy.driver import AUTOPSY_TRACES

    chosen = cell.lost[:most]
    missing = [answer.trace.usage.seconds for answer in chosen if key_of(answer) not in done]
    lost = counted(len(cell.lost), "lost answer")
    text = f"{model_name(cell.model)} | {cell.benchmark}: {lost}, {len(missing)} to examine"
    if len(missing) < len(chosen):
        text += f", {len(chosen) - len(missing)} are done"
    known_seconds = [seconds for seconds in missing if seconds is not None]
    if missing and len(known_seconds) == len(missing):
        text += f"; about {duration_text(AUTOPSY_TRACES * sum(known_seconds))}"
    return text


def print_autopsies(cells: Sequence[Mapping[str, Any]]) -> None:
    """Print what the autopsies of each cell show, one line for each figure."""
    if not cells:
        typer.echo("No answer was lost that the full cache has.")
    for cell in cells:
        typer.echo(f"{cell['model']} | {cell['benchmark']} | {cell['setting']}")
        summary = cell["summary"]
        _print_search(summary, cell["all_lost"])
        if summary["held_out"] is not None:
            _print_held_out(summary["held_out"])
        elif summary["causes"]:
            typer.echo("\nno cause was tested: at temperature 0 there are no other random numbers")

        test = summary["in_right_answers"]
        if test is not None:
            typer.echo(f"\nlike tokens in {test['answers']} right answers")
            rows = [
                ("nothing put back", _with_limits(test["right"]["nothing"])),
                ("like tokens put back", _with_limits(test["right"]["like"])),
                ("difference, points", _with_limits(test["like_over_nothing"], "")),
            ]
            _print_figures(rows)


def _print_search(summary: Mapping[str, Any], all_lost: int) -> None:
    luck = "–" if summary["by_luck"] is None else f"{summary['by_luck']:.1f} %"
    rows = [
        ("lost answers", f"{all_lost}"),
        ("examined", f"{summary['lost']}, of which {summary['reproduced']} were decoded again alike"),
    ]
    for size, share in summary["cause_of_at_most"].items():
        rows.append((f"restored by at most {size} tokens", _with_limits(share)))
    rows += [
        ("restored by any one span", _with_limits(summary["any_cause"])),
        ("restored by random sets", _with_limits(summary["random_sets_save"])),
        ("restored by any one span, by luck alone", luck),
        ("right without compression until the death", _with_limits(summary["without_compression_until_the_death"])),
        ("median of tokens, of replays", f"{summary['tokens']}, {summary['replays']}"),
    ]
    kinds = ", ".join(f"{kind} {count}" for kind, count in summary["kinds"].items())
    rows.append(("kinds of saving tokens", kinds or "–"))
    _print_figures(rows)


def _print_held_out(test: Mapping[str, Any]) -> None:
    typer.echo(f"\nright under {test['streams']} held-out random streams, {test['answers']} answers with a cause")
    right = test["right"]
    rows = [
        ("nothing put back", _with_limits(right["nothing"])),
        ("random sets put back", _with_limits(right["random"])),
        ("others of the causes' kinds put back", _with_limits(right["kind"])),
        ("the causes put back", _with_limits(right["cause"])),
        ("no compression from there on", _with_limits(right["no_compression"])),
        ("the causes put back until the death", _with_limits(right["cause_until_death"])),
        ("no compression until the death", _with_limits(right["no_compression_until_death"])),
        ("causes over others of their kinds, points", _with_limits(test["cause_over_kind"], "")),
        ("causes over random sets, points", _with_limits(test["cause_over_random"], "")),
        ("causes over nothing, points", _with_limits(test["cause_over_nothing"], "")),
        ("answers for which the cause is proven alone", f"{test['proven_alone']} of {test['answers']}"),
        ("causes over random sets, of all lost answers", _with_limits(test["of_all_lost"], "")),
        ("the same in points of all answers", _with_limits(test["room"], "")),
    ]
    _print_figures(rows)


def _print_figures(rows: Sequence[tuple[str, str]]) -> None:
    for name, text in rows:
        typer.echo(f"{name:<46}{text}")


def _with_limits(values: Mapping[str, float | None] | None, unit: str = " %") -> str:
    """Return a share or a difference with its interval."""
    if values is None:
        return "–"
    return f"{values['value']:.1f}{unit} ({values['low']:.1f}–{values['high']:.1f})"
