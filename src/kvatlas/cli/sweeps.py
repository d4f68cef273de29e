"""Commands that decode: demo, plan, run, sweep; and what `run` and `demo` print."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli import options
from kvatlas.cli.output import note, print_audit, print_rows, print_text, warn
from kvatlas.cli.progress import count_display, message_display, progress_display
from kvatlas.cli.served_plan import print_served_plan
from kvatlas.columns import cell_document
from kvatlas.core import KvatlasError, Outcome, Setting, Trace, is_reference
from kvatlas.text import bytes_text, duration_text, percent_text, visible

if TYPE_CHECKING:
    from kvatlas.report.materials import RunMaterials
    from kvatlas.stats.table import CellTraces
    from kvatlas.sweeps import Plan

#: Problems of each benchmark for the demo's first maps, which have every second step of its axes.
FIRST_PROBLEMS = 12

app = options.Commands()

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
            _decode_plan(coarse, folder, quiet, pool=pool)
            pictures = ", ".join(map(str, first_look(folder)))
            if not quiet:
                count = f"{FIRST_PROBLEMS} of {spec.problems} problems"
                note(f"First maps, of every second step and {count}: {pictures}")

        # The whole sweep follows whatever the first maps show: it takes their place, and is no second look.
        warn(plan.warnings)
        _decode_plan(plan, folder, quiet, pool=pool, replace=has_first_maps)
        _warn_of_run(folder)
    if not quiet:
        note("Drawing the figures and the report.")
    print_demo(folder)


@app.command("plan")
def plan_command(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.yaml|RECIPE|PROBLEMS",
            help="A sweep spec, a recipe's name, or with --suggest a benchmark or problem file.",
        ),
    ],
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
    from kvatlas.sweeps import make_plan, read_spec
    from kvatlas.sweeps.measured_rate import decoding_rate

    if suggest:
        if problems or samples or set_ or as_json or detect is not None:
            raise KvatlasError("--suggest takes --model-option alone; change the spec that it prints.")
        _print_suggestion(suggest, str(spec), options.model_options(model_option))
        return
    if model_option:
        raise KvatlasError("--model-option belongs to --suggest; a spec has the options of its models.")

    changed_spec = read_spec(spec, options.spec_changes(set_, problems, samples))
    if changed_spec.is_served:
        if memory or detect is not None:
            raise KvatlasError("--memory and --detect are for models that kvatlas decodes.")
        print_served_plan(changed_spec, spec, tokens_per_second, as_json)
        return
    planned = make_plan(changed_spec)
    for sentence in planned.notes:
        note(sentence)
    rate = tokens_per_second or decoding_rate(planned)
    if rate is None:
        note("No steps of a model on the hub are timed; give a rate with --tokens-per-second, or name a local folder.")
    estimate = planned.estimate(rate, int(memory * 2**30) if memory else None)
    rows = [] if detect is None else designs(planned.sizes, detect)

    # What the problems can prove of the settings, if a full cache is beside them.
    baselines = {policy.setting.policy for policy, is_baseline in planned.policies if is_baseline}
    compared = {policy.setting.policy for policy, is_baseline in planned.policies if not is_baseline}
    provable = planned.provable() if "full" in baselines and compared else None

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
    from kvatlas.sweeps.measured_rate import decoding_rate
    from kvatlas.sweeps.suggest import suggest

    planned, text = suggest(model, {"name": problems}, model_options=model_options, on_message=note)
    typer.echo(text)

    estimate = planned.estimate(decoding_rate(planned))
    cost = f"{estimate['traces']:,} traces, {estimate['decoded_tokens']['shared']:,} decoded tokens"
    if estimate["seconds"] is not None:
        cost += f", about {duration_text(estimate['seconds'])} on this machine"
    note(f"{cost}; {bytes_text(estimate['peak_bytes']['total'])} of memory for a worker.")
    warn(planned.warnings)


def _print_estimate(estimate: dict[str, Any], rate: float | None, *, is_given: bool) -> None:
    """Print the estimate of a plan; the decoding rate is given by the user, or measured on this machine."""
    tokens = estimate["decoded_tokens"]
    peak = estimate["peak_bytes"]
    rate_source = "at" if is_given else "this machine decodes"
    lines = {
        "settings": (f"{estimate['settings']:,}", ""),
        "traces": (f"{estimate['traces']:,}", ""),
        "decoded tokens": (f"{tokens['shared']:,}", f"({tokens['separate']:,} without shared trunks)"),
        "KV cache of a sequence": (bytes_text(estimate["kv_bytes_per_sequence"]), "(at the largest budget)"),
        "memory of a worker": (bytes_text(peak["total"]), "(weights, cache and snapshots:)"),
        "  weights": (bytes_text(peak["weights"]), ""),
        "  cache": (bytes_text(peak["slots"]), ""),
        "  snapshots": (bytes_text(peak["snapshots"]), ""),
    }
    if estimate["batch_size"] is not None:
        lines["batch size"] = (f"{estimate['batch_size']:,}", "(fits into the memory)")
    if estimate["seconds"] is not None:
        lines["time"] = (duration_text(estimate["seconds"]), f"({rate_source} {rate or 0:,.0f} tokens/s)")
        with_loops = duration_text(estimate["seconds_with_loops"])
        if with_loops != lines["time"][0]:
            lines["  with loops"] = (with_loops, "(if 3 in 10 traces of half of the settings run to max_new_tokens)")

    for name, (quantity, remark) in lines.items():
        print_text(f"{name:<23}{quantity:>14}  {remark}".rstrip())


def control_sentence(planned: Plan) -> str:
    """Return a sentence on the setting of a plan that is to show that its run can see a loss."""
    from kvatlas.policies import CompressingPolicy
    from kvatlas.stats.controls import should_lose
    from kvatlas.stats.orders import nominal_bytes

    model = planned.models[0]
    prompt = planned.longest_prompt(model)
    longest = planned.longest_trace(model)
    controls = []
    fault = "The plan has no control"
    for policy in planned.policies_on(model):
        is_control = planned.is_control(policy.setting)
        if is_control:
            fault = f"No setting of the control {policy.setting.policy_name} keeps so little that it should lose"
        if not isinstance(policy, CompressingPolicy) or not should_lose(policy.setting, is_control):
            continue
        # A control that compresses nothing loses nothing.
        if policy.budget.most(prompt) < longest:
            controls.append((nominal_bytes(policy.setting, model.kv_bytes(policy.storage)), policy.setting))
    if not controls:
        return (
            f"{fault}. Add one, as {{policy: random, ratio: 0.1}} with the budget of the others: a run that does not "
            "see its loss sees none."
        )
    _, least = min(controls, key=itemgetter(0))
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
) -> None:
    """Run one setting: Pass@1 with its interval, its cost, a few traces."""
    import tempfile

    from kvatlas.policies.audit import check_choice
    from kvatlas.sweeps import make_plan, parse_spec
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
        plan = make_plan(parse_spec(spec, "the options"))
        check_choice(plan.audit)
        warn(plan.warnings)
        how = {"workers": workers, "batch_size": batch_size, "replace": replace, "allow_code": allow_code}
        _decode_plan(plan, folder, quiet, verbose, **how)
        _warn_of_run(folder)
        print_run(folder, show, as_json, plan.policies[0][0].setting)


@app.command("sweep")
def sweep_command(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run: new, to be resumed or added to.")],
    problems: options.FirstProblems = None,
    samples: options.SpecSamples = None,
    set_: options.Changes = None,
    replace: options.Replace = False,
    allow_code: options.AllowCode = False,
    executor: Annotated[str, typer.Option(help="local, ray, or ray@HOST:PORT for a running cluster.")] = "local",
    workers: options.Workers = None,
    batch_size: options.BatchSize = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Run a sweep, resume it, or add it to a run of the same models and benchmarks: missing traces are decoded."""
    executor, _, address = executor.partition("@")
    _check_start(out, executor)
    from kvatlas.sweeps import make_plan, read_spec
    from kvatlas.sweeps.served import make_served_plan, sweep_servers

    changes = options.spec_changes(set_, problems, samples)
    changed_spec = read_spec(spec, changes)
    if changed_spec.is_served:
        local_options = {"--workers": workers, "--batch-size": batch_size, "--executor": executor != "local"}
        given = [name for name, value in local_options.items() if value]
        if given:
            raise KvatlasError(f"{', '.join(given)}: not for servers, which decode themselves.")
        served_plan = make_served_plan(changed_spec, spec.parent, str(spec))
        served_plan = dataclasses.replace(served_plan, changes=changes)
        with _traces_are_kept(out):
            sweep_servers(
                served_plan,
                out,
                replace_run=replace,
                on_trace=(lambda done, total: None) if quiet else count_display("sweep", "answers"),
                on_message=note,
                on_start=message_display(quiet),
            )
    else:
        plan = dataclasses.replace(make_plan(changed_spec), changes=changes)
        warn(plan.warnings)
        how = {"workers": workers, "batch_size": batch_size, "replace": replace, "allow_code": allow_code}
        _decode_plan(plan, out, quiet, verbose, executor=executor, address=address, **how)
    _warn_of_run(out)
    if not quiet:
        note(f"Finished. Next: kvatlas describe {out}, or kvatlas view {out}")


def _check_start(folder: Path, executor: str = "local") -> None:
    """Raise KvatlasError for an unknown executor and a folder that cannot hold a run, before heavy imports."""
    from kvatlas.results.store import check_new_folder
    from kvatlas.sweeps.executors import executors

    check_new_folder(folder)
    if executor.lower() == "slurm":
        raise KvatlasError("--executor 'slurm': expected local or ray; docs/scaling.md has a script for Slurm.")
    executors.get(executor)


def _decode_plan(plan: Plan, folder: Path, quiet: bool, verbose: bool = False, **how: Any) -> None:
    """Decode the missing traces of a plan, with its progress."""
    from kvatlas.sweeps import sweep

    with _traces_are_kept(folder):
        how |= {"on_message": note, "on_start": message_display(quiet)}
        sweep(plan, folder, on_trace=progress_display(quiet, verbose), **how)


@contextmanager
def _traces_are_kept(folder: Path) -> Iterator[None]:
    """Say at Ctrl-C that finished traces are kept, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"Stopped. Finished traces, if there are any, are in {folder}; the same command goes on from there.")
        raise typer.Exit(130) from None


def _warn_of_run(folder: Path) -> None:
    """Warn of what a finished run cannot show; a plan warns of cells without a choice."""
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.validity import Kind, findings

    cells = RunData.open(folder, metric=None).cells
    warn(finding.text for finding in findings(cells) if finding.kind is not Kind.NO_CHOICE)


# -- what `run` and `demo` print ---------------------------------------------------------------------------------------


#: Outcomes that are always counted; others (a grader's timeout) only where there are any.
OUTCOMES = (Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED, Outcome.NO_ANSWER)


def print_run(folder: Path, show: int, as_json: bool = False, setting: Setting | None = None) -> None:
    """Print Pass@1, interval and cost of each benchmark, and answer and end of a few traces; as JSON whole traces.

    `setting` selects one of several settings of the run.
    """
    from kvatlas.report.materials import RunMaterials
    from kvatlas.results.export import trace_record
    from kvatlas.stats.run_data import RunData

    run = RunData.open(folder)
    cells = [cell for cell in run.cells if setting in (None, cell.expected.setting)]

    # The first traces of these cells, with their run keys.
    names = {(cell.expected.run_key, cell.expected.setting, cell.expected.benchmark) for cell in cells}
    with run.store() as store:
        chosen = (pair for pair in store.traces() if (pair[0], pair[1].setting, pair[1].benchmark) in names)
        traces = list(islice(chosen, min(show, sys.maxsize)))

    if not as_json:
        _print_cell_table(cells, run.margin)
        _print_traces([trace for _, trace in traces], RunMaterials.from_manifest(run.manifest))
        return
    expected = cells[0].expected
    document = {
        "model": expected.model,
        "setting": {"policy": expected.setting.policy, **expected.setting.values},
        "benchmarks": [
            {"benchmark": cell.expected.benchmark, **cell_document(cell.cell), "verdicts": _outcome_counts(cell)}
            for cell in cells
        ],
        "traces": [trace_record(run_key, trace) for run_key, trace in traces],
    }
    print(json.dumps(document, indent=2, allow_nan=False))


def _outcome_counts(cell: CellTraces) -> dict[str, int]:
    """Return the number of traces with each outcome."""
    counts = cell.outcomes
    return {str(outcome): counts[outcome] for outcome in dict.fromkeys([*OUTCOMES, *counts])}


def _print_cell_table(cells: Sequence[CellTraces], margin: float) -> None:
    """Print a table of the cells, and what their number of problems can prove about a loss of at most the margin."""
    from kvatlas.report.description import say
    from kvatlas.stats.power import provable

    rows = []
    for cell in cells:
        estimate = cell.cell.estimate
        interval = "unknown"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{percent_text(estimate.low)} to {percent_text(estimate.high)}"
        outcomes = {outcome: count for outcome, count in _outcome_counts(cell).items() if count}
        rows.append(
            {
                "benchmark": cell.expected.benchmark,
                "Pass@1": percent_text(estimate.value),
                "95 %": interval,
                "problems": estimate.problems,
                "KV tokens": _whole_number(cell.cell.number("mean_kv_tokens")),
                "new tokens": _whole_number(cell.cell.number("output_tokens")),
                "traces": ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()),
            }
        )
    print_rows(rows)
    tested = [cell for cell in cells if not is_reference(cell.setting)]
    if tested:
        problems = [len(cell.problems) for cell in tested]
        sizes = [len(cell.problems) if cell.clusters is None else len(set(cell.clusters.tolist())) for cell in tested]
        samples = cells[0].expected.samples
        print_text("\n" + " ".join(say("provable", provable(sizes, margin, {}, samples, problems))))


def _whole_number(value: float | None) -> int | str:
    return "unknown" if value is None else round(value)


#: Characters of the end of a trace that are printed.
_END = 400


def _print_traces(traces: Sequence[Trace], materials: RunMaterials) -> None:
    """Print the outcome of each trace, its answer beside the reference, and its end, where the answer is."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for trace in traces:
        answer = "" if trace.grade.answer is None else f", answer {trace.grade.answer}"
        # Model output is data: printed as text, never as markup.
        title = f"\n{trace.problem}, sample {trace.sample}: {trace.grade.outcome}{answer}"
        console.print(Text(visible(title), style="bold"))
        problem = materials.problem(trace)
        if problem is not None:
            console.print(Text(visible(f"reference: {problem.answer}")))
        text = " ".join(trace.text.split())
        if len(text) > _END:
            text = "... " + text[-_END:].partition(" ")[2]
        console.print(Text(visible(text)))


def print_demo(folder: Path) -> None:
    """Draw the figures, write the report, print the mean maps, what was found and what to open."""
    from rich.console import Console
    from rich.text import Text

    from kvatlas.report.demo import write_demo
    from kvatlas.report.description import mean_tables, recommendation

    result, written = write_demo(folder)
    typer.echo(mean_tables(result))
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    lines = [
        *([("Found", result.headline)] if result.headline else []),
        *(("In words", recommendation(choice)) for choice in result.choices),
        ("Open", f"{folder / 'report.html'} (or: kvatlas view {folder})"),
        ("Figures", f"{pictures} (and svg, pdf) in {folder}, their numbers in maps.csv"),
    ]
    for name, text in lines:
        # Not wrapped: paths are copied.
        Console().print(Text(visible(f"{name:<9}{text}")), soft_wrap=True)
