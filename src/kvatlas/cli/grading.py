"""The command `grade`: a run's stored traces graded again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.lists import print_rows
from kvatlas.cli.results import Run

if TYPE_CHECKING:
    from kvatlas.sweeps.regrade import Disagreement


def grade(
    run: Run,
    grader: Annotated[str, typer.Option(help="kvatlas, dynts or math-verify.")] = "kvatlas",
    overrule: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A person's verdicts: CSV of benchmark, problem, answer, correct, reason."),
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="List the answers that math-verify judges otherwise; also in RUN/audit.csv.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of a table.")] = False,
) -> None:
    """Grade stored traces again, by another grader or by this version: the metric graded:NAME.

    Maps and reports show the first verdicts unless --metric asks for it. What is overruled is recorded in the run.
    """
    from kvatlas.sweeps.regrade import read_overruled, regrade

    cells, disagreements = regrade(run, grader, read_overruled(overrule) if overrule else (), audit)
    rows = [
        {
            "model": cell.model,
            "benchmark": cell.benchmark,
            "setting": str(cell.setting),
            "traces": cell.traces,
            "pass@1": round(100 * cell.before / cell.traces, 1),
            f"graded:{grader}": round(100 * cell.after / cell.traces, 1),
            "to_right": cell.to_right,
            "to_wrong": cell.to_wrong,
        }
        for cell in cells
    ]
    print_rows(rows, as_json)
    if audit:
        _write(disagreements, run / "audit.csv")
    if as_json:
        return
    for disagreement in disagreements:
        verdict, other = ("right", "wrong") if disagreement.correct else ("wrong", "right")
        typer.echo(
            f"\n{disagreement.problem}: reference {disagreement.reference}, answer {disagreement.answer} in "
            f"{disagreement.traces} traces, graded {verdict}; math-verify says {other}.\n    ..."
            + disagreement.text.replace("\n", "\n    ")
        )
    if audit:
        typer.echo(
            f"\nmath-verify judges {len(disagreements)} answers otherwise: {run / 'audit.csv'}. Correct its column "
            "`correct` where a verdict is wrong, and grade again with --overrule."
        )
    changed = sum(cell.to_right + cell.to_wrong for cell in cells)
    typer.echo(f"{changed} verdicts changed; kvatlas map --metric graded:{grader} draws what they are now.")


def _write(disagreements: list[Disagreement], path: Path) -> None:
    import csv

    from kvatlas.results.export import replacing
    from kvatlas.text import guarded

    names = ["benchmark", "problem", "answer", "correct", "reason", "reference", "traces", "text"]
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(
            {name: guarded(value) for name, value in {"reason": "", **vars(disagreement)}.items()}
            for disagreement in disagreements
        )


def add_to(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(grade)
