"""Commands that list and check models, benchmarks, policies, recipes and this machine."""

import inspect
import re
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import print_check_results, print_rows, print_text
from kvatlas.cli.served_plan import check_servers
from kvatlas.core import Check, CheckResult, KvatlasError, has_problem_suffix, refusal
from kvatlas.text import counted, did_you_mean, unfiltered, visible

app = options.Commands()


@app.command("list")
def list_command(
    kind: Annotated[str, typer.Argument(metavar="policies|benchmarks|models|recipes")],
    name: Annotated[str | None, typer.Argument(help="Explain a policy, print a recipe or a problem.")] = None,
    problem: Annotated[str, typer.Option(metavar="ID", help="The problem; default: the first.")] = "",
    model: Annotated[str | None, typer.Option(help="The problem through this model's chat template.")] = None,
    column: options.Column = None,
    as_json: options.Json = False,
) -> None:
    """List policies, benchmarks, models that need no download, or recipes; with a name, show that one.

    Of a benchmark the exact prompt of a problem goes to standard output and its reference answer to standard error.
    """
    if kind == "benchmarks" and name:
        _print_problem(name, problem, model, column, as_json)
    elif kind == "benchmarks":
        from kvatlas.benchmarks import families

        rows = [
            {"name": name, "benchmarks": family.examples, "summary": family.about}
            for name, family in families.available()
        ]
        print_rows(rows, as_json)
    elif kind == "models":
        print_rows(_model_rows(), as_json)
    elif kind == "recipes":
        _print_recipes(name, as_json)
    elif kind == "policies":
        _print_policies(name, as_json)
    else:
        kinds = ("policies", "models", "recipes", "benchmarks")
        raise KvatlasError(f"list: expected {', '.join(kinds)}, got {kind!r}.{did_you_mean(kind, kinds)}")


def _print_policies(name: str | None, as_json: bool) -> None:
    from kvatlas.policies import OTHER_NAMES, PRESETS, BudgetRule, describe_policy, permit
    from kvatlas.policies import policies as registry

    permit(name or "")
    names = [name] if name else [*dict(registry.available()), *PRESETS]
    rows = [describe_policy(policy_name) for policy_name in names]
    if as_json:
        print_rows(rows, as_json)
    elif not name:
        methods = [row for row in rows if row["name"] not in PRESETS]
        print_rows([{"name": row["name"], "keeps": row["summary"].removeprefix("keeps ")} for row in methods])
        print_text(f"\nPresets, methods as others ran them: {', '.join(PRESETS)}.")
        other_names = ", ".join(f"{method} ({cell})" for method, cell in OTHER_NAMES.values())
        print_text(f"Papers' other names: {other_names}.")
        print_text("In full: kvatlas list policies NAME")
    else:
        row = rows[0]
        typer.echo("\n".join(filter(None, (f"{name}: {row['summary']}", row["paper"]))))
        typer.echo(f"\n{row['description']}\n")
        typer.echo(f"observes: {', '.join(row['observes']) or 'nothing'}; one choice for: {row['scope']}")
        for parameter, default in row["parameters"].items():
            value = row["published"].get(parameter)
            typer.echo(f"  {parameter} = {default}{f'   (published: {value})' if value is not None else ''}")
        if "kv_budget" in row["parameters"]:
            _, _, shared = (inspect.getdoc(BudgetRule) or "").partition("\n\n")
            typer.echo(f"\nParameters of every policy that compresses:\n{shared}")


def _print_recipes(name: str | None, as_json: bool) -> None:
    """Print the names of all recipes with what they are about, or the text of one."""
    from kvatlas.sweeps.spec import recipes

    texts = recipes()
    if name is None:
        rows = []
        for recipe, text in texts.items():
            # The first paragraph of the comment at its beginning, as one line.
            lines = takewhile(lambda line: line.startswith("# "), text.splitlines())
            rows.append({"name": recipe, "about": " ".join(line.removeprefix("# ") for line in lines)})
        print_rows(rows, as_json)
    elif name not in texts:
        raise KvatlasError(f"There is no recipe {name!r}; expected: {', '.join(texts)}.{did_you_mean(name, texts)}")
    else:
        typer.echo(texts[name], nl=False)


def _model_rows() -> list[dict[str, Any]]:
    from kvatlas.models import embedded, find
    from kvatlas.models.checks import Claims
    from kvatlas.models.gguf import PACKAGED

    rows = []
    for name in embedded():
        model = find(name)
        row = {
            "name": name,
            "architecture": model.config["architectures"][0],
            "layers": model.shape.layers,
            "kv_heads": model.shape.kv_heads,
            "kv_bytes_per_token": model.shape.kv_bytes_per_token(),
            "solves": str(Claims.read(model.folder)),
        }
        rows.append(row)
    # Models of other packages are GGUF files, which are converted at their first use and not for a list.
    for name, packaged in PACKAGED.items():
        about = str(packaged) if packaged.path() else f"{packaged}; not installed: {packaged.command}"
        rows.append({**dict.fromkeys(rows[0], ""), "name": name, "architecture": "GGUF", "solves": about})
    return rows


def _print_problem(name: str, problem: str, model: str | None, column: list[str] | None, as_json: bool) -> None:
    from kvatlas.benchmarks import find, for_model, prompt_of
    from kvatlas.benchmarks.base import problem_of
    from kvatlas.class_files import permit
    from kvatlas.models import find as find_model

    permit(name)
    benchmark = find(name, **options.file_columns(column))
    chosen = problem_of(benchmark, problem)
    text = prompt_of(benchmark, chosen)
    if model is not None:
        handle = find_model(model)
        model_benchmark = for_model(benchmark, handle.reads)
        text = handle.prompt(prompt_of(model_benchmark, chosen))
    if as_json:
        print_rows([{"problem": chosen.id, "prompt": text, "answer": chosen.answer}], as_json)
        return
    typer.echo(text, file=unfiltered(sys.stdout))
    typer.echo(visible(f"{chosen.id}: {chosen.answer}"), err=True)


@app.command("check")
def check_command(
    target: Annotated[
        str, typer.Argument(metavar="[MODEL|BENCHMARK|FILE|SPEC|cpu|cuda]", help="Default: this machine.")
    ] = "auto",
    benchmarks: Annotated[list[str] | None, typer.Argument(metavar="BENCHMARK...", help="Prompts of a model.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems of each benchmark for a model.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the generation of a model.")] = 64,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    column: options.Column = None,
    as_json: options.Json = False,
) -> None:
    """Check this machine, a model, a policy's, benchmark's or problem file before a sweep. Exit code 2 if one fails.

    Machine: versions, kernels, CUDA graphs, tokens; its output belongs in an issue report. Model: tokenizer, think
    tags, layers, one step against transformers, a generation. Policy: its class, and a problem for an embedded model.
    Benchmark: columns, count, reference answers. Spec of servers: the reference is started and asked, and whether it
    draws by seeds.
    """
    import torch

    from kvatlas.benchmarks import find
    from kvatlas.benchmarks.file_checks import check_benchmark
    from kvatlas.class_files import class_file, load_file, permit
    from kvatlas.models import embedded
    from kvatlas.models import find as find_model
    from kvatlas.models.gguf import PACKAGED
    from kvatlas.policies import names_policy
    from kvatlas.policies import policies as registry
    from kvatlas.sweeps.doctor import check_machine, check_model, messages_for
    from kvatlas.sweeps.spec import read_spec

    torch.set_num_threads(1)
    if target in ("auto", "cpu") or target.partition(":")[0] == "cuda":
        fence = "" if as_json else "```\n"
        typer.echo(fence, nl=False)
        try:
            print_check_results(check_machine(target), as_json)
        finally:
            typer.echo(fence, nl=False)
        return
    permit(target, *(benchmarks or ()))
    if Path(target).suffix in (".yaml", ".yml") and Path(target).is_file():
        spec = read_spec(Path(target))
        if not spec.is_served:
            raise KvatlasError(
                f"`kvatlas plan {target}` checks a spec; `check` starts the servers of one that has some."
            )
        print_check_results(check_servers(spec, Path(target)), as_json)
        return
    file = class_file(target)
    if file is not None:
        with refusal(f"The file {file} cannot be loaded"):
            load_file(str(file))
    if names_policy(target):
        print_check_results(_try_policy(target), as_json)
        return
    if target in registry.names():
        raise KvatlasError(
            f"{target!r} is a policy; `kvatlas list policies {target}` describes it. Give FILE.py of one."
        )
    columns = options.file_columns(column)
    try:
        benchmark = find(target, **columns)
    except KvatlasError as error:
        if file is not None or has_problem_suffix(target.partition(":")[0]):
            raise
        is_model = target.startswith(("embedded:", "hf:")) or target in PACKAGED
        is_model |= target.endswith(".gguf") or Path(target).expanduser().is_dir()
        # A path that names no file of another kind is that of a model's folder.
        is_model |= target.startswith(("./", "../", "/", "~")) and not re.search(r"\.[A-Za-z]+$", target)
        if not is_model:
            raise KvatlasError(
                f"{error} A model is embedded:NAME, a folder, FILE.gguf or hf:OWNER/NAME, this machine cpu or cuda."
                f"{did_you_mean(target, embedded())}"
            ) from None
        handle = find_model(target, **options.model_options(model_option, template_values))
        messages = messages_for(handle, benchmarks or [], problems, **columns)
        print_check_results(check_model(handle, messages, max_new_tokens), as_json)
        return
    print_check_results(check_benchmark(benchmark), as_json)


def _try_policy(name: str) -> Iterator[CheckResult]:
    """Yield the parameters of a policy in a file, and how it compressed an embedded model; KvatlasError for a fault."""
    from kvatlas.api import run
    from kvatlas.policies import Scope
    from kvatlas.policies import policies as registry
    from kvatlas.policies.contract import own_parameters

    policy = registry.get(name)
    names = ", ".join(item.name for item in own_parameters(policy)) or "none"
    yield CheckResult("policy", Check.OK, f"{policy.summary}; parameters of its own: {names}")
    choices = {Scope.GLOBAL: "one choice for all layers and heads", Scope.LAYER: "a choice for each layer"}
    choice = choices.get(policy.scope, "a choice for each head")
    yield CheckResult("scope", Check.OK, f"{policy.scope}: {choice}; another is declared, as scope = Scope.HEAD")
    values: dict[str, Any] = {"kv_budget": 96, "local_window": 8, "ratio": 0.5}
    tried = run("embedded:tiny-llama", "CHAIN8", policy=name, problems=1, max_new_tokens=200, workers=1, **values)
    (trace,) = tried.traces()
    compressions = trace.usage.compressions or 0
    message = f"{counted(compressions, 'time')} in {trace.usage.output_tokens} tokens of embedded:tiny-llama"
    yield CheckResult("compresses", Check.OK if compressions else Check.WARNING, message)
