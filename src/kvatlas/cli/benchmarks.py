"""Benchmarks: which there are, and the exact text of a problem."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvatlas.cli.lists import Json, print_rows
from kvatlas.text import unfiltered, visible

QuestionField = Annotated[
    str, typer.Option(help="The field of a problem file that holds the question, if it has no usual name.")
]
AnswerField = Annotated[str, typer.Option(help="The same of the reference answer.")]
Name = Annotated[str, typer.Argument(metavar="BENCHMARK", help="CHAIN12, AIME24, AIME24@FILE, file:FILE.")]


def benchmarks(context: typer.Context, as_json: Json = False) -> None:
    """List the benchmarks; `show` prints a problem, `check` looks at a problem file."""
    if context.invoked_subcommand:
        return
    from kvatlas.benchmarks import families

    rows = [{"name": name, "benchmarks": family.examples, "summary": family.about} for name, family in families.items()]
    print_rows(rows, as_json)


def show(
    name: Name,
    problem: Annotated[int, typer.Option(min=1, help="Its number, from 1 up.")] = 1,
    model: Annotated[str | None, typer.Option(help="Through this model's chat template.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Another prompt format (r1, plain, dynts, line) or template.")
    ] = None,
    answer: Annotated[bool, typer.Option("--answer", help="The reference answer too, on standard error.")] = False,
    question_field: QuestionField = "",
    answer_field: AnswerField = "",
) -> None:
    """Print the exact text that is sent for one problem, and nothing else on standard output."""
    from kvatlas.benchmarks import asked_of, find, nth

    benchmark = find(name, **({"prompt": prompt} if prompt else {}), **fields(question_field, answer_field))
    asked = nth(benchmark, problem - 1)
    if model is None:
        typer.echo(benchmark.prompt(asked), file=unfiltered(sys.stdout))
    else:
        from kvatlas.models import find as find_model

        chosen = find_model(model)
        text = chosen.prompt(asked_of(benchmark, chosen.reads).prompt(asked))
        typer.echo(text, file=unfiltered(sys.stdout))
    if answer:
        typer.echo(visible(f"{asked.id}: {asked.answer}"), err=True)


def check(
    name: Name,
    model: Annotated[str | None, typer.Option(help="Lengths of prompts in tokens of this model.")] = None,
    question_field: QuestionField = "",
    answer_field: AnswerField = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of lines.")] = False,
) -> None:
    """Look at a problem file before a sweep: columns, count, damage, choices, reference answers, an example.

    Ends with exit code 2 if the file cannot be what it is taken for. A sweep makes the same check.
    """
    from kvatlas.benchmarks import asked_of, find
    from kvatlas.benchmarks.check import check as check_benchmark
    from kvatlas.cli.lists import print_findings

    benchmark = find(name, **fields(question_field, answer_field))
    if model is None:
        print_findings(check_benchmark(benchmark), as_json)
    else:
        from kvatlas.models import find as find_model

        chosen = find_model(model)
        asked = asked_of(benchmark, chosen.reads)
        print_findings(check_benchmark(asked, lambda text: len(chosen.encode(text)), "tokens"), as_json)


def fields(question: str, answer: str) -> dict[str, Any]:
    """The columns that a benchmark's problem file is to have, as options of it."""
    columns = {name: field for name, field in (("question", question), ("answer", answer)) if field}
    return {"columns": columns} if columns else {}


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(benchmarks)
    group.command()(show)
    group.command()(check)
    app.add_typer(group, name="benchmarks", help=benchmarks.__doc__)
