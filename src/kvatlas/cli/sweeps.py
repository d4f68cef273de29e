"""Commands that decode: demo, plan, run, sweep, screen, predictor, calibrate."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_audit, print_demo, print_run, progress_display, warn
from kvatlas.core import KvatlasError, Setting

#: Problems of each benchmark for the demo's first maps, which have every second step of its axes.
FIRST_PROBLEMS = 12

app = typer.Typer()
predictor = typer.Typer(no_args_is_help=True)
app.add_typer(predictor, name="predictor", help="The DynTS importance predictor.")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The sweep spec.")]


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller grid on fewer problems.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Default: runs/demo or runs/demo-quick.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed gives other traces.")] = None,
    replace: options.Replace = False,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
) -> None:
    """Run the main job on an embedded model: sweep, maps, report."""
    import yaml

    from kvatlas.report.demo import first_look
    from kvatlas.results.store import FILE
    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps.executors import WorkerPool
    from kvatlas.sweeps.spec import recipes

    name = "demo-quick" if quick else "demo"
    data = yaml.safe_load(recipes()[name])
    if seed is not None:
        data["seed"] = seed
    folder = out or Path("runs") / name
    _check_start(folder)
    plan = make_plan(parse_spec(data, f"{name}.yaml"))
    if not quiet:
        warn(plan.warnings)
    with WorkerPool(workers) as pool:
        if data["problems"] > FIRST_PROBLEMS and (replace or not (folder / FILE).exists()):
            # A coarse grid on the first of the same problems: maps within the first minute.
            axes = {axis: values[::2] for axis, values in data["axes"].items()}
            coarse = make_plan(parse_spec(data | {"problems": FIRST_PROBLEMS, "axes": axes}, f"{name}.yaml"))
            _decode(coarse, folder, replace=replace, pool=pool, batch_size=batch_size, quiet=quiet)
            pictures = ", ".join(map(str, first_look(folder)))
            if not quiet:
                count = f"{FIRST_PROBLEMS} of {data['problems']} problems"
                note(f"First maps, of every second step and {count}: {pictures}")
        _decode(plan, folder, replace=replace, pool=pool, batch_size=batch_size, quiet=quiet)
    if not quiet:
        warn(_limits(folder))
        note("Drawing the figures and the report.")
    print_demo(folder)


@app.command()
def plan(
    spec: SpecFile,
    tokens_per_second: Annotated[float | None, typer.Option(callback=options.positive, help="Decoding rate.")] = None,
    rate_of: Annotated[Path | None, typer.Option(metavar="RUN", help="The rate of one worker in this run.")] = None,
    memory: Annotated[float | None, typer.Option(callback=options.positive, help="GiB for a batch.")] = None,
    strict_budget: options.StrictBudget = False,
    detect: Annotated[float | None, typer.Option(metavar="POINTS", help="Count the problems that show them.")] = None,
    discordance: Annotated[list[float] | None, typer.Option(help="Share of problems with unlike grades.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check a spec and estimate its cost: cells, traces, decoded tokens, memory and time; audit its budgets."""
    from kvatlas.results import Store
    from kvatlas.stats.inference import designs
    from kvatlas.sweeps import make_plan, read_spec

    if rate_of is not None:
        with Store.open(rate_of) as store:
            tokens_per_second = store.tokens_per_second()
    planned = make_plan(read_spec(spec, strict_budget))
    for sentence in planned.notes:
        note(sentence)
    estimate = planned.estimate(tokens_per_second, int(memory * 2**30) if memory else None)
    rows = []
    if detect is not None:
        rows = designs([len(problems) for problems in planned.problems.values()], detect, discordance or ())
    if as_json:
        typer.echo(json.dumps({**estimate, **({"detect": rows} if detect is not None else {})}))
        return
    tokens, peak = estimate["decoded_tokens"], estimate["peak_bytes"]
    weights = f"weights {peak['weights']:,}, cache {peak['slots']:,}, snapshots {peak['snapshots']:,}"
    lines = {
        "settings": (estimate["settings"], ""),
        "traces": (estimate["traces"], ""),
        "decoded tokens": (tokens["shared"], f"(expected; {tokens['separate']:,} without shared trunks)"),
        "KV bytes per sequence": (estimate["kv_bytes_per_sequence"], "(at the largest budget)"),
        "peak bytes of a worker": (peak["total"], f"({weights})"),
        "batch size": (estimate["batch_size"], "(fits into the memory)"),
        "seconds": (estimate["seconds"], f"({(estimate['seconds'] or 0) / 3600:,.1f} hours)"),
    }
    for name, (number, remark) in lines.items():
        if number is not None:
            typer.echo(f"{name:<24}{number:>14,}  {remark}".rstrip())
    print_audit(planned.audit)
    for row in rows:
        typer.echo(
            f"\nTwo settings that differ on {100 * row['discordance']:g} % of problems: {row['problems']:,} "
            f"problems show {row['points']:g} points with a power of 0.8; the {row['own_problems']:,} here "
            f"show {row['own_points']:.1f}."
        )
    for sentence in planned.warnings:
        typer.echo(f"\nWarning: {sentence}")


@app.command()
def run(
    model: options.Model,
    benchmarks: Annotated[
        list[str], typer.Argument(metavar="BENCHMARK|FILE...", help="Names, or files: JSON lines, JSON, CSV, Parquet.")
    ],
    policy: options.Policy = "full",
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    problems: options.FirstProblems = None,
    samples: Annotated[int, typer.Option(min=1, help="Generations for each problem.")] = 1,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.6,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: 16384, or what the model can.")] = None,
    model_option: options.ModelOption = None,
    strict_budget: options.StrictBudget = False,
    question_field: options.QuestionField = "",
    answer_field: options.AnswerField = "",
    show: Annotated[int, typer.Option(min=0, help="Traces to print.")] = 1,
    as_json: options.Json = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Keep the run in this folder, or add to it.")] = None,
    replace: options.Replace = False,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
) -> None:
    """Run one setting: Pass@1 with its interval, its cost, a few traces."""
    import tempfile

    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps.spec import setting_spec

    if out is not None:
        _check_start(out)
    common = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    parameters = {name: value for name, value in common.items() if value is not None}
    spec = setting_spec(
        model,
        [{"name": name, **options.problem_columns(question_field, answer_field)} for name in benchmarks],
        Setting.of(policy, **parameters, **policy_parameters(policy, set_)),
        problems=problems,
        samples=samples,
        seed=seed,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        model_options=options.assignments("--model-option", model_option),
        strict_budget=strict_budget,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        plan = make_plan(parse_spec(spec, "the options"))
        _drive(plan, folder, replace=replace, workers=workers, batch_size=batch_size, quiet=quiet)
        print_run(folder, show, as_json, plan.policies[0][0].setting)


@app.command()
def sweep(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run: new, to be resumed or added to.")],
    replace: options.Replace = False,
    executor: options.Executor = "local",
    ray_address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster; default: one is started.")] = "",
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    strict_budget: options.StrictBudget = False,
    quiet: options.Quiet = False,
) -> None:
    """Run a sweep, resume it, or add it to a run of the same models and benchmarks: missing traces are decoded."""
    _check_start(out, executor)
    from kvatlas.sweeps import make_plan, read_spec

    _drive(
        make_plan(read_spec(spec, strict_budget)),
        out,
        replace=replace,
        executor=executor,
        workers=workers,
        address=ray_address,
        batch_size=batch_size,
        quiet=quiet,
    )


@app.command()
def screen(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="SCREEN", help="Folder of the screen: new, to be resumed or added to.")],
    traces: Annotated[Path | None, typer.Option(metavar="RUN", help="A run with its full-cache traces.")] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Fewer than the spec's: the first of each.")] = None,
    replace: options.Replace = False,
    executor: options.Executor = "local",
    workers: options.Workers = None,
    batch_size: options.BatchSize = 64,
    strict_budget: options.StrictBudget = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where each setting would depart from the full cache: reads its traces, decodes nothing, has no Pass@1."""
    _check_start(out, executor)
    from kvatlas.stats.metrics import SCREENED
    from kvatlas.sweeps import make_plan, read_spec, screening
    from kvatlas.sweeps import screen as read_all
    from kvatlas.sweeps.screen import unanswered

    asked = read_spec(spec, strict_budget)
    if problems is not None:
        asked = asked.model_copy(update={"problems": min(problems, asked.problems or problems)})
    _drive(
        screening(make_plan(asked)),
        out,
        partial(read_all, traces=traces),
        replace=replace,
        executor=executor,
        workers=workers,
        batch_size=batch_size,
        quiet=quiet,
    )
    if not quiet:
        for sentence in unanswered(out):
            note(sentence)
        note(
            f"{out} is a screen: it says where settings depart from the full cache, not how often they are right. "
            f"Draw it with kvatlas map {out} --metric {SCREENED[0]} (or {', '.join(SCREENED[1:])})."
        )


def _check_start(folder: Path, executor: str = "local") -> None:
    """Raise KvatlasError for an unknown executor and a folder that cannot hold a run, before heavy imports."""
    from kvatlas.results.store import check_folder
    from kvatlas.sweeps.executors import executors

    check_folder(folder)
    executors.get(executor)


def _drive(plan: Any, folder: Path, work: Callable[..., None] | None = None, *, quiet: bool, **options: Any) -> None:
    """Sweep (or other `work`), after the plan's warnings and before the run's own."""
    if not quiet:
        warn(plan.warnings)
    _decode(plan, folder, work, quiet=quiet, **options)
    if not quiet:
        warn(_limits(folder))


def _decode(plan: Any, folder: Path, work: Callable[..., None] | None = None, *, quiet: bool, **options: Any) -> None:
    """Work with progress on standard error; Ctrl-C keeps finished traces and exits with 130."""
    from kvatlas.sweeps import sweep as decode_all

    try:
        with progress_display(quiet) as on_trace:
            on_message = (lambda _: None) if quiet else note
            (work or decode_all)(plan, folder, on_trace=on_trace, on_message=on_message, **options)
    except KeyboardInterrupt:
        note(f"Stopped. Everything finished is kept in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None


def _limits(folder: Path) -> list[str]:
    """Return what limits the conclusions from a finished run, beyond the warnings of its plan."""
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.validity import Kind, findings

    cells = RunData.open(folder, metric=None).cells
    return [finding.text for finding in findings(cells) if finding.kind is not Kind.NO_CHOICE]


def policy_parameters(policy: str, texts: list[str] | None) -> dict[str, Any]:
    """Return the parameters of a policy from its `--set` options, each read by its declared type."""
    from kvatlas.policies import policies
    from kvatlas.text import read_value

    pairs = options.assignments("--set", texts)
    return {name: read_value(policies.get(policy), name, value) for name, value in pairs.items()}


# The predictor: what `dynts` and `triattention` need to know of a model.

ModelName = Annotated[str, typer.Option("--model", help="embedded:NAME, hf:FOLDER or hf:OWNER/NAME.")]
Benchmarks = Annotated[list[str], typer.Option("--benchmark", help="A benchmark. Repeat it for more.")]
Skip = Annotated[int, typer.Option(min=0, help="Leave out the first problems, which a map is to be drawn from.")]
Samples = Annotated[int, typer.Option(min=1, help="Traces of each problem.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The longest trace.")]
Work = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for traces and hidden states, to use again.")]


@predictor.command()
def train(
    model: ModelName,
    benchmark: Benchmarks,
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="The head, for `dynts`.")],
    problems: options.FirstProblems = None,
    skip: Skip = 0,
    held_out: Annotated[int | None, typer.Option(min=0, help="Last problems, to judge on; default: a fifth.")] = None,
    samples: Samples = 1,
    tokens_per_trace: Annotated[int, typer.Option(min=0, help="Thinking tokens sampled of each trace; 0: all.")] = 2048,
    layout: Annotated[str, typer.Option(help="ours (biases, GELU) or authors (no biases, softplus).")] = "ours",
    loss: Annotated[
        str, typer.Option(help="ranked (ours), scaled (the authors' for R1-Llama) or power (theirs for R1-Qwen).")
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.6,
    max_new_tokens: MaxNewTokens = 16_384,
    model_option: options.ModelOption = None,
    work: Work = None,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
) -> None:
    """Train a head on the answer's attention in correct full-cache traces; prints provenance and quality as JSON."""
    from kvatlas.sweeps.learning import Material, full_cache_spec, learn, left_out_as_text

    if out.suffix != ".safetensors":
        raise KvatlasError(f"--out: expected a name that ends in .safetensors, got {str(out)!r}.")
    model_options = options.assignments("--model-option", model_option)
    count = None if problems is None else skip + problems
    spec = full_cache_spec(model, model_options, benchmark, count, samples, seed, temperature, max_new_tokens)
    if held_out is None:
        # A fifth of the smallest benchmark, at least one problem.
        held_out = max(1, min(len(entry.find().problems(spec.problems)) - skip for entry in spec.benchmarks) // 5)
    with progress_display(quiet) as on_trace:
        provenance = learn(
            Material(spec, skip, held_out, tokens_per_trace),
            work or out.with_suffix(".work"),
            out,
            steps=steps,
            layout=layout,
            loss=loss,
            workers=workers,
            batch_size=batch_size,
            on_trace=on_trace,
        )
    left_out = left_out_as_text(provenance["left_out"])
    note(f"learned from {provenance['traces']} traces; left out: {left_out}")
    typer.echo(json.dumps(provenance, indent=2))


@predictor.command("eval")
def evaluate(
    head: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The head to judge.")],
    model: ModelName,
    benchmark: Benchmarks,
    problems: options.FirstProblems = None,
    skip: Skip = 0,
    samples: Samples = 1,
    seed: options.Seed = 1,
    temperature: options.Temperature = 0.6,
    max_new_tokens: MaxNewTokens = 16_384,
    model_option: options.ModelOption = None,
    work: Work = None,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
) -> None:
    """Judge a head on traces that it was not trained on: rank correlation, overlap of the top 20 %; prints JSON."""
    from kvatlas.sweeps.learning import Material, full_cache_spec, judge

    if not head.is_file():
        raise KvatlasError(f"The predictor {str(head)!r} is not there.")
    model_options = options.assignments("--model-option", model_option)
    count = None if problems is None else skip + problems
    spec = full_cache_spec(model, model_options, benchmark, count, samples, seed, temperature, max_new_tokens)
    folder = work or head.with_suffix(".eval")
    with progress_display(quiet) as on_trace:
        quality = judge(head, Material(spec, skip), folder, workers=workers, batch_size=batch_size, on_trace=on_trace)
    typer.echo(json.dumps(quality, indent=2))


@app.command()
def calibrate(
    model: options.Model,
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...")],
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="File for the statistics.")],
    problems: Annotated[int, typer.Option(min=1, help="The number of problems of each benchmark.")] = 20,
    max_new_tokens: MaxNewTokens = 2048,
    model_option: options.ModelOption = None,
) -> None:
    """Make the statistics of queries that the policy triattention needs, from prompts and the model's own traces."""
    from kvatlas.sweeps.learning import calibrate as write

    tokens = write(
        model,
        benchmarks,
        out,
        problems=problems,
        max_new_tokens=max_new_tokens,
        model_options=options.assignments("--model-option", model_option),
    )
    typer.echo(f"{out}: means over the queries of {tokens:,} tokens")
