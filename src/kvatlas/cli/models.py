"""Models: which there are, and whether one can be trusted with a sweep."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.lists import Json, print_findings, print_rows
from kvatlas.cli.sweeps import ModelOption, assignments

#: What is asked where no benchmark is named: words, numbers, lines and LaTeX as benchmarks have them.
PROBE = (
    "Let $x$ and $y$ be real numbers with $x + y = 12$ and $xy \\le 35$.\n\nWhat is the largest value of "
    "$\\frac{x}{y}$? Please reason step by step, and put your final answer within \\boxed{}."
)
#: What is asked of models that ship with the package, whose vocabulary is that of their benchmarks.
OWN = "CHAIN8"


def models(context: typer.Context, as_json: Json = False) -> None:
    """List the models that ship with kvatlas; `check` looks at one of any kind (docs/models.md)."""
    if context.invoked_subcommand:
        return
    from kvatlas.models import embedded, find
    from kvatlas.models.claims import Claims

    rows = []
    for name in embedded():
        model = find(name)
        rows.append(
            {
                "name": name,
                "architecture": model.config["architectures"][0],
                "layers": model.shape.layers,
                "kv_heads": model.shape.kv_heads,
                "kv_bytes_per_token": model.shape.kv_bytes_per_token(),
                "solves": str(Claims.read(model.folder)),
            }
        )
    print_rows(rows, as_json)


def check(
    model: Annotated[
        str,
        typer.Argument(help="embedded:NAME, hf:FOLDER, hf:FILE.gguf or hf:OWNER/NAME."),
    ],
    benchmark: Annotated[
        list[str] | None,
        typer.Option(help="Its prompts are asked; again for more."),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Of each benchmark, its first problems.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the generation.")] = 64,
    model_option: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects instead of lines.")] = False,
) -> None:
    """Look at a model before a sweep: tokenizer, think tags, layers, one step against transformers' own, a generation.

    Ends with exit code 2 if the model cannot be run.
    """
    import torch

    from kvatlas.benchmarks import asked_of
    from kvatlas.benchmarks import find as find_benchmark
    from kvatlas.models import embedded, find
    from kvatlas.sweeps.model_check import check_model

    torch.set_num_threads(1)
    chosen = find(model, **assignments("--model-option", model_option))
    asked = [
        asked_of(find_benchmark(name), chosen.reads) for name in benchmark or ([OWN] if model in embedded() else [])
    ]
    messages = [benchmark.prompt(problem) for benchmark in asked for problem in benchmark.problems(problems)] or [PROBE]
    print_findings(check_model(chosen, messages, max_new_tokens), as_json)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(models)
    group.command()(check)
    app.add_typer(group, name="models", help=models.__doc__)
