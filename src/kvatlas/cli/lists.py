"""Commands that list and check what can be run: policies, benchmarks, models, recipes, doctor."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import print_findings, print_rows
from kvatlas.core import KvatlasError
from kvatlas.text import unfiltered, visible

app = typer.Typer()
benchmarks = typer.Typer(invoke_without_command=True)
models = typer.Typer(invoke_without_command=True)
app.add_typer(benchmarks, name="benchmarks")
app.add_typer(models, name="models")


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Explain this one.")] = None, as_json: options.Json = False
) -> None:
    """List the policies and the presets of some, or explain one."""
    from kvatlas.policies import PRESETS, about
    from kvatlas.policies import policies as registry

    rows = [about(chosen) for chosen in ([name] if name else [*dict(registry.items()), *PRESETS])]
    if as_json:
        print_rows(rows, as_json)
    elif name:
        _explain(rows[0])
    else:
        short = [{"name": row["name"], "keeps": row["summary"].removeprefix("keeps ")} for row in rows]
        print_rows([row for row in short if row["name"] not in PRESETS], one_line=True)
        typer.echo(f"\nPresets, methods as somebody ran them: {', '.join(PRESETS)}.\nIn full: kvatlas policies NAME")


def _explain(row: dict[str, Any]) -> None:
    from kvatlas.policies import CompressingPolicy

    typer.echo(f"{row['name']}: {row['summary']}")
    if row["paper"]:
        typer.echo(row["paper"])
    typer.echo(f"\n{row['description']}\n")
    typer.echo(f"observes: {', '.join(row['observes']) or 'nothing'}; one choice for: {row['scope']}")
    for name, default in row["parameters"].items():
        published = f"   (published: {row['published'][name]})" if name in row["published"] else ""
        typer.echo(f"  {name} = {default}{published}")
    if "kv_budget" in row["parameters"]:
        _, _, shared = (inspect.getdoc(CompressingPolicy) or "").partition("\n\n")
        typer.echo(f"\nParameters of every policy that compresses:\n{shared}")


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="SPEC.yaml", help="Copy it to this file, to be changed.")] = None,
    as_json: options.Json = False,
) -> None:
    """List the sweep specs that come with the package, print one, or copy it."""
    from kvatlas.sweeps.spec import recipes

    texts = recipes()
    if name is None:
        # The first sentence of the comment that each begins with.
        heads = {recipe: text.partition("\n#\n")[0].replace("\n# ", " ") for recipe, text in texts.items()}
        rows = [{"name": recipe, "about": head.removeprefix("# ").partition("\n")[0]} for recipe, head in heads.items()]
        print_rows(rows, as_json, one_line=True)
    elif name not in texts:
        raise KvatlasError(f"There is no recipe {name!r}; expected: {', '.join(texts)}.")
    elif out is None:
        typer.echo(texts[name], nl=False)
    elif out.exists():
        raise KvatlasError(f"{str(out)!r} is there already; name another file with --out.")
    else:
        out.write_text(texts[name], "utf-8")
        typer.echo(f"{out}: check it with kvatlas plan {out}")


@benchmarks.callback()
def list_benchmarks(context: typer.Context, as_json: options.Json = False) -> None:
    """List the benchmarks; `show` prints a problem, `check` looks at a problem file."""
    if context.invoked_subcommand:
        return
    from kvatlas.benchmarks import families

    rows = [{"name": name, "benchmarks": family.examples, "summary": family.about} for name, family in families.items()]
    print_rows(rows, as_json)


@benchmarks.command()
def show(
    name: options.Benchmark,
    problem: Annotated[int, typer.Option(min=1, help="Its number, from 1 up.")] = 1,
    model: Annotated[str | None, typer.Option(help="Through this model's chat template.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Another format (r1, plain, dynts, line) or template.")] = None,
    answer: Annotated[bool, typer.Option("--answer", help="The reference answer too, on standard error.")] = False,
    question_field: options.QuestionField = "",
    answer_field: options.AnswerField = "",
) -> None:
    """Print the exact text that is sent for one problem, and nothing else on standard output."""
    from kvatlas.benchmarks import find, for_model, nth

    benchmark = find(
        name, **({"prompt": prompt} if prompt else {}), **options.problem_columns(question_field, answer_field)
    )
    chosen = nth(benchmark, problem - 1)
    if model is None:
        text = benchmark.prompt(chosen)
    else:
        from kvatlas.models import find as find_model

        reader = find_model(model)
        text = reader.prompt(for_model(benchmark, reader.reads).prompt(chosen))
    typer.echo(text, file=unfiltered(sys.stdout))
    if answer:
        typer.echo(visible(f"{chosen.id}: {chosen.answer}"), err=True)


@benchmarks.command("check")
def check_benchmark(
    name: options.Benchmark,
    model: Annotated[str | None, typer.Option(help="Lengths of prompts in tokens of this model.")] = None,
    question_field: options.QuestionField = "",
    answer_field: options.AnswerField = "",
    as_json: options.Json = False,
) -> None:
    """Look at a problem file before a sweep: columns, count, damage, choices, reference answers, an example.

    Ends with exit code 2 if the file cannot be read as its benchmark. A sweep makes the same check.
    """
    from kvatlas.benchmarks import find, for_model
    from kvatlas.benchmarks.check import check

    length: Any = ()
    benchmark = find(name, **options.problem_columns(question_field, answer_field))
    if model is not None:
        from kvatlas.models import find as find_model

        reader = find_model(model)
        benchmark, length = for_model(benchmark, reader.reads), (lambda text: len(reader.encode(text)), "tokens")
    print_findings(check(benchmark, *length), as_json)


@models.callback()
def list_models(context: typer.Context, as_json: options.Json = False) -> None:
    """List the models that ship with kvatlas; `check` looks at one of any kind (docs/models.md)."""
    if context.invoked_subcommand:
        return
    from kvatlas.models import embedded, find
    from kvatlas.models.checks import Claims

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


@models.command("check")
def check_model(
    model: options.Model,
    benchmark: Annotated[list[str] | None, typer.Option(help="Take its prompts. Repeat it for more.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="The number of problems of each benchmark.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the generation.")] = 64,
    model_option: options.ModelOption = None,
    as_json: options.Json = False,
) -> None:
    """Look at a model before a sweep: tokenizer, think tags, layers, one step against transformers' own, a generation.

    Ends with exit code 2 if the model cannot be run.
    """
    import torch

    from kvatlas.models import find
    from kvatlas.sweeps.checks import check_model as check
    from kvatlas.sweeps.checks import questions

    torch.set_num_threads(1)
    chosen = find(model, **options.assignments("--model-option", model_option))
    print_findings(check(chosen, questions(chosen, benchmark or [], problems), max_new_tokens), as_json)


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:N.")] = "auto",
    as_json: options.Json = False,
) -> None:
    """Check this machine in under a minute: versions, kernels, CUDA graphs, tokens, memory.

    Its output belongs into an issue report. Ends with exit code 2 if tokens are not those of plain torch.
    """
    import torch

    from kvatlas.sweeps.checks import check_machine

    torch.set_num_threads(1)
    fence = "" if as_json else "```\n"
    typer.echo(fence, nl=False)
    try:
        print_findings(check_machine(device), as_json)
    finally:
        typer.echo(fence, nl=False)
