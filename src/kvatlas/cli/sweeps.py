"""Commands that decode: demo, plan, run, sweep, predictor."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_audit, print_autopsies, print_text, warn
from kvatlas.cli.progress import count_display, logging_to, message_display, progress_display
from kvatlas.cli.run_output import print_demo, print_run
from kvatlas.core import KvatlasError, Setting
from kvatlas.text import bytes_text

if TYPE_CHECKING:
    from kvatlas.autopsy.driver import LostCell
    from kvatlas.sweeps import Plan, Spec

#: Problems of each benchmark for the demo's first maps, which have every second step of its axes.
FIRST_PROBLEMS = 12

app = options.Commands()
predictor = options.Commands(no_args_is_help=True)
app.add_typer(predictor, name="predictor", help="What dynts and triattention need to know of a model.")

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC.yaml|RECIPE", help="A sweep spec, or a recipe's name.")]


@app.command("demo")
def demo_command(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller grid on fewer problems.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Default: runs/demo or runs/demo-quick.")] = None,
    workers: options.Workers = None,
    quiet: options.Quiet = False,
) -> None:
    """Run the main job on the embedded models: sweep, maps, report."""
    from kvatlas.report.demo import first_look
    from kvatlas.results.store import FILE
    from kvatlas.sweeps import make_plan, read_spec
    from kvatlas.sweeps import sweep as decode
    from kvatlas.sweeps.executors import WorkerPool

    name = "demo-quick" if quick else "demo"
    folder = out or Path("runs") / name
    _check_start(folder)
    spec = read_spec(Path(name))
    plan = make_plan(spec)
    has_first_maps = spec.problems is not None and spec.problems > FIRST_PROBLEMS and not (folder / FILE).exists()
    with WorkerPool(workers) as pool:
        if has_first_maps:
            # A coarse grid on the first of the same problems gives maps within the first minute.
            axes = {axis: values[::2] if len(values) > 2 else values for axis, values in spec.axes.items()}
            coarse = make_plan(spec.model_copy(update={"problems": FIRST_PROBLEMS, "axes": axes}))
            with _traces_are_kept(folder):
                decode(coarse, folder, pool=pool, on_trace=progress_display(quiet), on_message=message_display(quiet))
            pictures = ", ".join(map(str, first_look(folder)))
            if not quiet:
                count = f"{FIRST_PROBLEMS} of {spec.problems} problems"
                note(f"First maps, of every second step and {count}: {pictures}")

        # The whole sweep follows whatever the first maps show: it takes their place, and is no second look.
        warn(plan.warnings, quiet)
        with _traces_are_kept(folder):
            decode(
                plan,
                folder,
                pool=pool,
                replace=has_first_maps,
                on_trace=progress_display(quiet),
                on_message=message_display(quiet),
            )
        _warn_of_run(folder, quiet)
    if not quiet:
        note("Drawing the figures and the report.")
    print_demo(folder)


@app.command("plan")
def plan_command(
    spec: SpecFile,
    problems: options.FirstProblems = None,
    samples: options.SpecSamples = None,
    set_: options.Changes = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(callback=options.positive, help="Decoding rate; default: a few steps are timed.")
    ] = None,
    memory: Annotated[float | None, typer.Option(callback=options.positive, help="GiB for a batch.")] = None,
    detect: Annotated[float | None, typer.Option(metavar="POINTS", help="Count the problems that show them.")] = None,
    suggest: Annotated[
        str, typer.Option(metavar="MODEL", help="Propose a spec for this model, on a benchmark or problem file.")
    ] = "",
    model_option: options.ModelOption = None,
    as_json: options.Json = False,
) -> None:
    """Check a spec and estimate its cost: cells, traces, decoded tokens, memory and time; audit its budgets.

    With --suggest the argument is a benchmark or a problem file: five of its problems are decoded with the full cache,
    and a spec for it is printed.
    """
    from kvatlas.report.description import say
    from kvatlas.stats.power import designs
    from kvatlas.stats.power import provable as provable_losses
    from kvatlas.stats.run_data import margin_from_points
    from kvatlas.sweeps import make_plan, measure, read_spec

    if suggest:
        if problems or samples or set_ or as_json or detect is not None:
            raise KvatlasError("--suggest takes --model-option alone; change the spec that it prints.")
        _print_suggestion(suggest, str(spec), options.model_options(model_option))
        return
    if model_option:
        raise KvatlasError("--model-option belongs to --suggest; a spec has the options of its models.")

    planned = make_plan(read_spec(spec, options.spec_changes(set_, problems, samples)))
    for sentence in planned.notes:
        note(sentence)
    rate = tokens_per_second or measure(planned)
    if rate is None:
        note("No steps of a model on the hub are timed; give a rate with --tokens-per-second, or name a local folder.")
    estimate = planned.estimate(rate, int(memory * 2**30) if memory else None)
    rows = []
    if detect is not None:
        rows = designs([len(problems) for problems in planned.problems.values()], detect)

    # What the problems can prove of the settings, if a full cache is beside them.
    baselines = {policy.setting.policy for policy, is_baseline in planned.policies if is_baseline}
    compared = {policy.setting.policy for policy, is_baseline in planned.policies if not is_baseline}
    provable = None
    if "full" in baselines and compared:
        sizes = [len(problems) for problems in planned.problems.values()]
        margin = margin_from_points(planned.spec.lose_at_most)
        provable = provable_losses(sizes, margin, len(compared), planned.spec.samples)

    if as_json:
        document = {**estimate, "claim": planned.claim.value, "provable": provable.to_dict() if provable else None}
        if detect is not None:
            document["detect"] = rows
        typer.echo(json.dumps(document))
        return
    _print_estimate(estimate, rate, is_given=tokens_per_second is not None)
    print_audit(planned.audit)
    for row in rows:
        print_text(
            f"\nTwo settings that differ on {100 * row['discordance']:g} % of problems: {row['problems']:,} "
            f"problems show {row['points']:g} points with a power of 0.8; the {row['own_problems']:,} here "
            f"show {row['own_points']:.1f}."
        )
    if provable is not None:
        print_text(f"\nThe numbers will speak of {planned.claim.words}.")
        # One more sample takes so many tokens.
        tokens = estimate["decoded_tokens"]["shared"] // planned.spec.samples
        is_drawn = planned.spec.sampling.temperature > 0
        sentences = say("provable", provable, tokens) if is_drawn else say("provable_greedy", provable)
        print_text("\n" + " ".join(sentences))
        print_text(f"\n{control_sentence(planned)}")
    for sentence in planned.warnings:
        print_text(f"\nWarning: {sentence}")


def _print_suggestion(model: str, problems: str, model_options: Mapping[str, Any]) -> None:
    """Print a spec for a model and problems to standard output, its cost to standard error."""
    from kvatlas.sweeps import measure
    from kvatlas.sweeps.suggest import suggest

    suggestion = suggest(model, {"name": problems}, model_options=model_options, on_message=note)
    typer.echo(suggestion.text)

    planned = suggestion.plan
    estimate = planned.estimate(measure(planned))
    cost = f"{estimate['traces']:,} traces, {estimate['decoded_tokens']['shared']:,} decoded tokens"
    if estimate["seconds"] is not None:
        cost += f", about {timedelta(seconds=60 * math.ceil(estimate['seconds'] / 60))} on this machine"
    note(f"{cost}; {bytes_text(estimate['peak_bytes']['total'])} of memory for a worker.")
    for sentence in planned.warnings:
        note(f"Warning: {sentence}")


def _print_estimate(estimate: dict[str, Any], rate: float | None, *, is_given: bool) -> None:
    """Print the estimate of a plan; the decoding rate is given by the user, or measured on this machine."""
    tokens = estimate["decoded_tokens"]
    peak = estimate["peak_bytes"]
    hours = None
    if estimate["seconds"] is not None:
        hours = round(estimate["seconds"] / 3600, 2)

    rate_source = "at" if is_given else "this machine decodes"
    lines = {
        "settings": (estimate["settings"], ""),
        "traces": (estimate["traces"], ""),
        "decoded tokens": (tokens["shared"], f"({tokens['separate']:,} without shared trunks)"),
        "KV bytes per sequence": (estimate["kv_bytes_per_sequence"], "(at the largest budget)"),
        "peak bytes of a worker": (peak["total"], "(weights, cache and snapshots:)"),
        "  weights": (peak["weights"], ""),
        "  cache": (peak["slots"], ""),
        "  snapshots": (peak["snapshots"], ""),
        "batch size": (estimate["batch_size"], "(fits into the memory)"),
        "hours": (hours, f"({rate_source} {rate or 0:,.0f} tokens/s)"),
    }

    for name, (quantity, remark) in lines.items():
        if quantity is not None:
            print_text(f"{name:<23}{quantity:>14,}  {remark}".rstrip())


def control_sentence(planned: Plan) -> str:
    """Return a sentence on the setting of a plan that is to show that its run can see a loss."""
    from kvatlas.stats.controls import is_control

    controls = [policy.setting for policy, _ in planned.policies if is_control(policy.setting)]
    if not controls:
        return (
            "The plan has no control. Add one, as {policy: random, ratio: 0.1} with the budget of the others: a run "
            "that does not see its loss sees none."
        )
    least = min(controls, key=lambda setting: setting.values["ratio"])
    return f"The control is {least}: a run that does not see its loss sees none."


@app.command("run")
def run_command(
    model: options.Model,
    benchmarks: options.Benchmarks,
    policy: options.Policy = "full",
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    problems: options.FirstProblems = None,
    samples: Annotated[int, typer.Option(min=1, help="Generations for each problem.")] = 1,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    max_new_tokens: options.MaxNewTokens = None,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    template: options.Template = "",
    system: options.System = "",
    prompt: options.Prompt = "",
    column: options.Column = None,
    show: Annotated[int, typer.Option(min=0, help="Traces to print.")] = 1,
    as_json: options.Json = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Keep the run in this folder, or add to it.")] = None,
    replace: options.Replace = False,
    allow_code: options.AllowCode = False,
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    log: options.Log = None,
) -> None:
    """Run one setting: Pass@1 with its interval, its cost, a few traces."""
    import tempfile

    from kvatlas.policies.audit import check_choice
    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps import sweep as decode
    from kvatlas.sweeps.spec import setting_spec

    if out is not None:
        _check_start(out)
    spec = setting_spec(
        model,
        [{"name": name, "prompt": prompt, **options.file_columns(column)} for name in benchmarks],
        options.cell(policy, kv_budget, local_window, ratio, set_),
        problems=problems,
        samples=samples,
        seed=seed,
        sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens},
        model_options=options.model_options(model_option, template_values, template, system),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        with logging_to(log):
            plan = make_plan(parse_spec(spec, "the options"))
            check_choice(plan.audit)
            warn(plan.warnings, quiet)
            with _traces_are_kept(folder):
                decode(
                    plan,
                    folder,
                    workers=workers,
                    batch_size=batch_size,
                    replace=replace,
                    allow_code=allow_code,
                    on_trace=progress_display(quiet, verbose),
                    on_message=message_display(quiet),
                )
            _warn_of_run(folder, quiet)
        print_run(folder, show, as_json, plan.policies[0][0].setting)


@app.command("sweep")
def sweep_command(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run: new, to be resumed or added to.")],
    screen: Annotated[
        bool, typer.Option("--screen", help="Read full-cache traces under each setting instead.")
    ] = False,
    problems: options.FirstProblems = None,
    samples: options.SpecSamples = None,
    set_: options.Changes = None,
    from_: Annotated[Path | None, typer.Option("--from", metavar="RUN", help="Full-cache traces of a screen.")] = None,
    replace: options.Replace = False,
    allow_code: options.AllowCode = False,
    executor: Annotated[str, typer.Option(help="local, ray, or ray@HOST:PORT for a running cluster.")] = "local",
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    log: options.Log = None,
) -> None:
    """Run a sweep, resume it, or add it to a run of the same models and benchmarks: missing traces are decoded.

    With --screen every setting reads the full cache's traces: the run then shows where settings would depart from
    them, without decoding and without Pass@1.
    """
    executor, _, address = executor.partition("@")
    _check_start(out, executor)
    from kvatlas.screen.grid_screen import screen as read_full_traces
    from kvatlas.screen.grid_screen import screening
    from kvatlas.stats.metrics import SCREENED
    from kvatlas.sweeps import make_plan, read_spec
    from kvatlas.sweeps import sweep as decode

    if from_ is not None and not screen:
        raise KvatlasError("--from names the full-cache traces of a screen; add --screen.")
    with logging_to(log):
        changes = options.spec_changes(set_, problems, samples)
        plan = dataclasses.replace(make_plan(read_spec(spec, changes)), changes=changes)
        if screen:
            plan = screening(plan)
        warn(plan.warnings, quiet)
        with _traces_are_kept(out):
            if screen:
                read_full_traces(
                    plan,
                    out,
                    traces=from_,
                    executor=executor,
                    address=address,
                    workers=workers,
                    batch_size=batch_size or 64,
                    replace=replace,
                    allow_code=allow_code,
                    on_trace=progress_display(quiet, verbose),
                    on_message=message_display(quiet),
                )
            else:
                decode(
                    plan,
                    out,
                    executor=executor,
                    address=address,
                    workers=workers,
                    batch_size=batch_size,
                    replace=replace,
                    allow_code=allow_code,
                    on_trace=progress_display(quiet, verbose),
                    on_message=message_display(quiet),
                )
        _warn_of_run(out, quiet)
    if quiet:
        return
    if screen:
        note(
            f"{out} is a screen: it says where settings depart from the full cache, not how often they are right. "
            f"Draw it with kvatlas map {out} --metric {SCREENED[0]} (or {', '.join(SCREENED[1:])})."
        )
    else:
        note(f"Finished. Next: kvatlas describe {out}, or kvatlas view {out}")


def _check_start(folder: Path, executor: str = "local") -> None:
    """Raise KvatlasError for an unknown executor and a folder that cannot hold a run, before heavy imports."""
    from kvatlas.results.store import check_new_folder
    from kvatlas.sweeps.run import executor_of

    check_new_folder(folder)
    executor_of(executor)


@contextmanager
def _traces_are_kept(folder: Path) -> Iterator[None]:
    """Say at Ctrl-C that finished traces are kept, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"Stopped. Finished traces are kept in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None


def _warn_of_run(folder: Path, quiet: bool) -> None:
    """Warn of what a finished run cannot show; a plan warns of cells without a choice."""
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.validity import Kind, findings

    if not quiet:
        cells = RunData.open(folder, metric=None).cells
        warn(finding.text for finding in findings(cells) if finding.kind is not Kind.NO_CHOICE)


Head = Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="The head of dynts.")]
Skip = Annotated[int, typer.Option(min=0, help="Leave out the first problems, which a map is to be drawn from.")]
Samples = Annotated[int, typer.Option(min=1, help="Traces of each problem.")]
Work = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for traces and hidden states, to use again.")]


def _full_cache(
    model: str,
    benchmarks: list[str],
    model_options: dict[str, Any],
    problems: int | None,
    skip: int,
    max_new_tokens: int | None,
    **others: Any,
) -> Spec:
    from kvatlas.sweeps import parse_spec
    from kvatlas.sweeps.spec import setting_spec

    count = None if problems is None else skip + problems
    sampling = {"temperature": 0.6, "max_new_tokens": max_new_tokens}
    spec = setting_spec(
        model, benchmarks, Setting("full"), sampling=sampling, model_options=model_options, problems=count, **others
    )
    return parse_spec(spec, "the options")


def policies_of(run: Path, allow_code: bool) -> list[str]:
    """Return the policies of a run, each once; with `allow_code` their files may be run."""
    from kvatlas.policies import permit
    from kvatlas.results import Store
    from kvatlas.sweeps.spec import named_policies

    with Store.open(run) as store:
        manifest = store.manifest()
    names = list(dict.fromkeys(cell.setting.policy for cell in manifest.expected))
    if allow_code:
        permit(*names, *named_policies(manifest.spec))
    return names


@app.command()
def autopsy(
    run: options.Run,
    policy: Annotated[str, typer.Option("--policy", help="The policy, or the cell as 'dynts ratio=0.3'.")],
    kv_budget: options.KvBudget = None,
    local_window: options.LocalWindow = None,
    ratio: options.Ratio = None,
    set_: options.Set = None,
    most: Annotated[int, typer.Option(min=1, help="Lost answers to examine of a cell.")] = 100,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the held-out test: PNG, SVG or PDF.")] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write the saving (1) and the random tokens (0).")
    ] = None,
    allow_code: options.AllowCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the evicted tokens that, put back within the budget, restore the answers that one cell lost.

    Each lost answer is decoded again some dozen times, and each cause is tested under random numbers that the search
    did not use. Started again, the command goes on where it stopped.
    """
    from kvatlas.autopsy.autopsies import Autopsy, write_labels
    from kvatlas.autopsy.autopsy_figure import save_autopsies
    from kvatlas.autopsy.driver import find_lost, perform
    from kvatlas.autopsy.summary import summarise
    from kvatlas.figures.style import check_figure
    from kvatlas.results.export import check_target
    from kvatlas.text import model_name

    def tell(examined: Autopsy, done: int, total: int) -> None:
        if not quiet:
            note(f"{done}/{total} {examined.key[3]}: {examined.death}, {examined.cause_text}")

    # Before the search, which may take hours.
    if out is not None:
        check_figure(out)
    if export is not None:
        check_target(export, ".jsonl")
    cells = find_lost(run, options.cell(policy, kv_budget, local_window, ratio, set_, policies_of(run, allow_code)))
    autopsies = perform(cells, run, most, tell)
    if export is not None:
        write_labels(chain.from_iterable(autopsies), export)
    if out is not None:
        names = [f"{model_name(cell.model)} | {cell.benchmark}" for cell in cells]
        for path in save_autopsies(dict(zip(names, autopsies, strict=True)), out):
            note(f"wrote {path}")
    documents = []
    for cell, of_cell in zip(cells, autopsies, strict=True):
        about = {
            "model": cell.model,
            "benchmark": cell.benchmark,
            "setting": str(cell.setting),
            "all_lost": len(cell.lost),
        }
        summary = summarise(of_cell, len(cell.lost) / cell.answers)
        documents.append({**about, "summary": summary, "autopsies": [dataclasses.asdict(item) for item in of_cell]})
    if as_json:
        typer.echo(json.dumps({"cells": documents}, indent=2, allow_nan=False))
    else:
        print_autopsies(documents, _names_of_settings(cells))


def _names_of_settings(cells: Sequence[LostCell]) -> dict[str, str]:
    """Return short names of the settings of a run by their whole ones."""
    from kvatlas.stats.run_data import short_names

    settings = list(chain.from_iterable([cell.setting, *cell.others] for cell in cells))
    short = short_names(settings)
    return {str(setting): short[setting.id] for setting in settings}


@predictor.command()
def train(
    out: Head,
    model: options.Model,
    benchmarks: options.Benchmarks,
    problems: options.FirstProblems = None,
    skip: Skip = 0,
    held_out: Annotated[int | None, typer.Option(min=0, help="Last problems, to judge on; default: a fifth.")] = None,
    samples: Samples = 1,
    tokens_per_trace: Annotated[int, typer.Option(min=0, help="Thinking tokens sampled of each trace; 0: all.")] = 2048,
    head: Annotated[str, typer.Option(help="ours (biases, GELU) or authors (no biases, softplus).")] = "ours",
    loss: Annotated[
        str, typer.Option(help="ranked (ours), scaled (the authors' for R1-Llama) or power (theirs for R1-Qwen).")
    ] = "",
    target: Annotated[
        str, typer.Option(help="answer: one head for dynts. kv_head: one for each layer and KV head, for learned.")
    ] = "answer",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    seed: options.Seed = 0,
    max_new_tokens: options.MaxNewTokens = None,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    work: Work = None,
) -> None:
    """Train a head on later attention in correct full-cache traces; print provenance and quality as JSON.

    The attention is that of the answer, or with --target kv_head that of all later tokens by layer and KV head.
    """
    from kvatlas.predictor.learning import TrainingData, learn, learn_kv_heads, left_out_as_text

    if target not in ("answer", "kv_head"):
        raise KvatlasError(f"--target is {target!r}; expected answer or kv_head.")
    if target == "kv_head" and (head != "ours" or loss):
        raise KvatlasError("--target kv_head has its own head and loss; leave out --head and --loss.")

    if out.suffix != ".safetensors":
        raise KvatlasError(f"Expected the name of a head that ends in .safetensors, got {str(out)!r}.")
    limits = {"samples": samples, "seed": seed, "max_new_tokens": max_new_tokens}
    model_options = options.model_options(model_option, template_values)
    spec = _full_cache(model, benchmarks, model_options, problems, skip, **limits)
    if held_out is None:
        # A fifth of the smallest benchmark, at least one problem.
        held_out = max(1, min(len(entry.find().problems(spec.problems)) - skip for entry in spec.benchmarks) // 5)
    material = TrainingData(spec, skip, held_out, tokens_per_trace)
    folder = work or out.with_suffix(".work")
    shown: dict[str, Any] = {"on_trace": progress_display(), "on_step": count_display("training", "steps")}
    if target == "kv_head":
        provenance = learn_kv_heads(material, folder, out, steps=steps, **shown)
    else:
        provenance = learn(material, folder, out, steps=steps, layout=head, loss=loss, **shown)
    note(f"learned from {provenance['traces']} traces; left out: {left_out_as_text(provenance['left_out'])}")
    typer.echo(json.dumps(provenance, indent=2))


@predictor.command("eval")
def evaluate(
    head: Head,
    model: options.Model,
    benchmarks: options.Benchmarks,
    problems: options.FirstProblems = None,
    skip: Skip = 0,
    seed: options.Seed = 1,
    max_new_tokens: options.MaxNewTokens = None,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
    work: Work = None,
) -> None:
    """Judge a head on other traces than those of its training: rank correlation, overlap of the top 20 %, as JSON."""
    from kvatlas.predictor.learning import TrainingData, evaluate_head

    if not head.is_file():
        raise KvatlasError(f"The predictor {str(head)!r} does not exist.")
    model_options = options.model_options(model_option, template_values)
    spec = _full_cache(model, benchmarks, model_options, problems, skip, seed=seed, max_new_tokens=max_new_tokens)
    folder = work or head.with_suffix(".eval")
    quality = evaluate_head(head, TrainingData(spec, skip), folder, on_trace=progress_display())
    typer.echo(json.dumps(quality, indent=2))


@predictor.command()
def calibrate(
    out: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="File for the statistics.")],
    model: options.Model,
    benchmarks: options.Benchmarks,
    problems: Annotated[int, typer.Option(min=1, help="The number of problems of each benchmark.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of a trace.")] = 2048,
    model_option: options.ModelOption = None,
    template_values: options.TemplateValues = None,
) -> None:
    """Write the query statistics of the policy triattention, from prompts and the model's own traces."""
    from kvatlas.predictor.learning import calibrate as write

    model_options = options.model_options(model_option, template_values)
    tokens = write(
        model, benchmarks, out, problems=problems, max_new_tokens=max_new_tokens, model_options=model_options
    )
    typer.echo(f"{out}: means over the queries of {tokens:,} tokens")
