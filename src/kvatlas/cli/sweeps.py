"""Commands that decode: plan, run, sweep, screen, demo."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvatlas.cli.benchmarks import AnswerField, QuestionField, fields
from kvatlas.cli.quantities import positive
from kvatlas.text import visible

if TYPE_CHECKING:
    from kvatlas.sweeps.plan import Plan

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The sweep spec.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes of one thread each; default: what pays.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Sequences that one worker decodes together; default: what fits, 64 on CPUs.")
]
Executor = Annotated[str, typer.Option(help="Where problems are decoded: local or ray.")]
Address = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Ray cluster; without it one is started on this machine.")
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-option", metavar="NAME=VALUE", help="dtype, device, revision, cache, think_close, think_open."
    ),
]
StrictBudget = Annotated[
    bool,
    typer.Option("--strict-budget", help="Drop what does not fit of a prompt into the ratio, as the published rule."),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Show this alone in a run of something else, whose traces stay in its store.")
]
#: Problems of each benchmark that the demo draws its first maps from, at every second step of its axes.
_COARSE = 12
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def plan(
    spec: SpecFile,
    tokens_per_second: Annotated[
        float | None, typer.Option(callback=positive, help="Decoding rate to estimate the time with.")
    ] = None,
    rate_of: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Or the rate measured in this run, of one worker.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(callback=positive, help="Memory in GiB to estimate the batch size with.")
    ] = None,
    strict_budget: StrictBudget = False,
    detect: Annotated[
        float | None, typer.Option(metavar="POINTS", help="How many problems show a difference of so many points.")
    ] = None,
    discordance: Annotated[
        list[float] | None, typer.Option(help="Share of problems on which two settings differ; default: 0.05 and 0.2.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Check a spec and estimate its cost: cells, traces, decoded tokens, memory and time; audit its budgets."""
    from kvatlas.results import Store
    from kvatlas.sweeps import make_plan

    if rate_of is not None:
        with Store.open(rate_of) as store:
            tokens_per_second = store.tokens_per_second()
    planned = make_plan(_read(spec, strict_budget))
    for sentence in planned.notes:
        _note(sentence)
    estimate = planned.estimate(tokens_per_second, int(memory * 2**30) if memory else None)
    designs = _designs(planned, detect, discordance)
    if as_json:
        typer.echo(json.dumps({**estimate, **({"detect": designs} if detect is not None else {})}))
        return
    tokens = estimate["decoded_tokens"]
    typer.echo(f"settings                {estimate['settings']:>14,}")
    typer.echo(f"traces                  {estimate['traces']:>14,}")
    typer.echo(
        f"decoded tokens          {tokens['shared']:>14,}  (expected; {tokens['separate']:,} without shared trunks)"
    )
    typer.echo(f"KV bytes per sequence   {estimate['kv_bytes_per_sequence']:>14,}  (at the largest budget)")
    peak = estimate["peak_bytes"]
    typer.echo(
        f"peak bytes of a worker  {peak['total']:>14,}  (weights {peak['weights']:,}, cache {peak['slots']:,}, "
        f"snapshots {peak['snapshots']:,})"
    )
    if estimate["batch_size"] is not None:
        typer.echo(f"batch size              {estimate['batch_size']:>14,}  (fits into the memory)")
    if estimate["seconds"] is not None:
        typer.echo(f"seconds                 {estimate['seconds']:>14,}  ({estimate['seconds'] / 3600:,.1f} hours)")
    if planned.audit:
        from kvatlas.cli.audit import print_audit

        print_audit(planned.audit)
    for design in designs:
        typer.echo(
            f"\nTwo settings that differ on {100 * design['discordance']:g} % of problems: {design['problems']:,} "
            f"problems show {design['points']:g} points with a power of 0.8; the {design['own_problems']:,} here "
            f"show {design['own_points']:.1f}."
        )
    for sentence in planned.warnings:
        typer.echo(f"\nWarning: {sentence}")


def _designs(planned: Plan, points: float | None, discordance: list[float] | None) -> list[dict[str, Any]]:
    """For each discordance what shows `points`, and what the spec's own problems show."""
    from kvatlas.stats.inference import DISCORDANCE, detectable, problems_for

    if points is None:
        return []
    sizes = [len(problems) for problems in planned.problems.values()]
    # Benchmarks weigh equally, so small ones decide.
    own = round(len(sizes) ** 2 / sum(1 / size for size in sizes))
    return [
        {
            "points": points,
            "discordance": share,
            "problems": problems_for(points / 100, share).problems,
            "own_problems": own,
            "own_points": round(100 * detectable(own, share), 4),
        }
        for share in discordance or DISCORDANCE
    ]


def _read(spec: Path, strict_budget: bool) -> Any:
    """The spec of a file, its budgets strict if asked for on the command line or in the file."""
    from kvatlas.sweeps import read_spec

    asked = read_spec(spec)
    return asked.model_copy(update={"strict_budget": True}) if strict_budget else asked


def sweep(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run: new, to be resumed or added to.")],
    replace: Replace = False,
    executor: Executor = "local",
    ray_address: Address = "",
    workers: Workers = None,
    batch_size: BatchSize = None,
    strict_budget: StrictBudget = False,
    quiet: Quiet = False,
) -> None:
    """Run a sweep, resume it, or add it to a run of the same models and benchmarks: what is missing is decoded."""
    check_start(out, executor)
    from kvatlas.sweeps import make_plan

    drive(
        make_plan(_read(spec, strict_budget)),
        out,
        replace=replace,
        executor=executor,
        workers=workers,
        address=ray_address,
        batch_size=batch_size,
        quiet=quiet,
    )


def screen(
    spec: SpecFile,
    out: Annotated[Path, typer.Option(metavar="SCREEN", help="Folder of the screen: new, to be resumed or added to.")],
    traces: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run of the same spec, for its full-cache traces.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Fewer than the spec's: the first of each.")] = None,
    replace: Replace = False,
    executor: Executor = "local",
    workers: Workers = None,
    batch_size: BatchSize = 64,
    strict_budget: StrictBudget = False,
    quiet: Quiet = False,
) -> None:
    """Where would each setting depart from the full cache? Its traces are read, nothing is decoded; no Pass@1."""
    from functools import partial

    check_start(out, executor)
    from kvatlas.stats.metrics import SCREENED
    from kvatlas.sweeps import make_plan, screening
    from kvatlas.sweeps import screen as read_all
    from kvatlas.sweeps.screen import unanswered

    asked = _read(spec, strict_budget)
    if problems is not None:
        asked = asked.model_copy(update={"problems": min(problems, asked.problems or problems)})
    plan = screening(make_plan(asked))
    drive(
        plan,
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
            _note(sentence)
        _note(
            f"{out} is a screen: it says where settings depart from the full cache, not how often they are right. "
            f"Draw it with kvatlas map {out} --metric {SCREENED[0]} (or {', '.join(SCREENED[1:])})."
        )


def run(
    model: Annotated[
        str,
        typer.Argument(help="embedded:NAME, hf:FOLDER, hf:FILE.gguf or hf:OWNER/NAME."),
    ],
    benchmarks: Annotated[
        list[str],
        typer.Argument(
            metavar="BENCHMARK|FILE...", help="Names, or files of problems: JSON lines, JSON, CSV, Parquet."
        ),
    ],
    policy: Annotated[str, typer.Option(help="KV-cache token selection.")] = "full",
    kv_budget: Annotated[int | None, typer.Option(help="Cache length at which a compression fires.")] = None,
    local_window: Annotated[int | None, typer.Option(help="Newest tokens that always stay.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of the older tokens that stays.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the policy.")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Generations for each problem.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    temperature: Annotated[float, typer.Option(min=0)] = 0.6,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: 16384, or what the model can.")] = None,
    model_option: ModelOption = None,
    strict_budget: StrictBudget = False,
    question_field: QuestionField = "",
    answer_field: AnswerField = "",
    show: Annotated[int, typer.Option(min=0, help="Traces to print.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, with those traces whole.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Keep the run in this folder, or add to it.")] = None,
    replace: Replace = False,
    workers: Workers = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
) -> None:
    """Run one setting: Pass@1 with its interval, its cost, a few traces."""
    import tempfile

    from kvatlas.cli.show import print_run
    from kvatlas.core import Setting
    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps.spec import setting_spec

    if out is not None:
        check_start(out)
    common = {"kv_budget": kv_budget, "local_window": local_window, "ratio": ratio}
    parameters = {name: value for name, value in common.items() if value is not None}
    spec = setting_spec(
        model,
        [{"name": name, **fields(question_field, answer_field)} for name in benchmarks],
        Setting.of(policy, **parameters, **policy_parameters(policy, set_)),
        problems=problems,
        samples=samples,
        seed=seed,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        model_options=assignments("--model-option", model_option),
        strict_budget=strict_budget,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        plan = make_plan(parse_spec(spec, "the options"))
        drive(plan, folder, replace=replace, workers=workers, batch_size=batch_size, quiet=quiet)
        print_run(folder, show, as_json, plan.policies[0][0].setting)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller grid on fewer problems.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Default: runs/demo or runs/demo-quick.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed gives other traces.")] = None,
    replace: Replace = False,
    workers: Workers = None,
    batch_size: BatchSize = None,
    quiet: Quiet = False,
) -> None:
    """The main job on an embedded model: sweep, maps, report."""
    import yaml

    from kvatlas.cli.show import finish_demo
    from kvatlas.report.demo import first_look
    from kvatlas.results.store import FILE
    from kvatlas.sweeps import make_plan, parse_spec
    from kvatlas.sweeps.executors import WorkerPool

    name = "demo-quick" if quick else "demo"
    data = yaml.safe_load((files("kvatlas.sweeps") / f"{name}.yaml").read_text())
    if seed is not None:
        data["seed"] = seed
    folder = out or Path("runs") / name
    check_start(folder)
    plan = make_plan(parse_spec(data, f"{name}.yaml"))
    _warn([] if quiet else plan.warnings)
    with WorkerPool(workers) as pool:
        if data["problems"] > _COARSE and (replace or not (folder / FILE).exists()):
            # A coarse grid first, on the first of the same problems: maps within the first minute.
            axes = {axis: values[::2] for axis, values in data["axes"].items()}
            coarse = make_plan(parse_spec(data | {"problems": _COARSE, "axes": axes}, f"{name}.yaml"))
            _decode(coarse, folder, replace=replace, pool=pool, batch_size=batch_size, quiet=quiet)
            pictures = ", ".join(map(str, first_look(folder)))
            if not quiet:
                _note(f"First maps, of every second step and {_COARSE} of {data['problems']} problems: {pictures}")
        _decode(plan, folder, replace=replace, pool=pool, batch_size=batch_size, quiet=quiet)
    _warn([] if quiet else _findings(folder))
    if not quiet:
        _note("Drawing the figures and the report.")
    finish_demo(folder)


def check_start(folder: Path, executor: str = "local") -> None:
    """Raise KvatlasError where no run can be written or nothing is called that, before anything is imported for it."""
    from kvatlas.results.store import check_folder
    from kvatlas.sweeps.executors import executors

    check_folder(folder)
    executors.get(executor)


def drive(plan: Any, folder: Path, work: Callable[..., None] | None = None, *, quiet: bool, **options: Any) -> None:
    """Sweep (or other `work`) with progress on standard error, after the plan's warnings and before the run's own."""
    _warn([] if quiet else plan.warnings)
    _decode(plan, folder, work, quiet=quiet, **options)
    _warn([] if quiet else _findings(folder))


def _decode(plan: Any, folder: Path, work: Callable[..., None] | None = None, *, quiet: bool, **options: Any) -> None:
    """Ctrl-C keeps what is finished and says how to go on."""
    from kvatlas.cli.progress import showing
    from kvatlas.sweeps import sweep as decode_all

    try:
        with showing(quiet) as on_trace:
            on_message = (lambda _: None) if quiet else _note
            (work or decode_all)(plan, folder, on_trace=on_trace, on_message=on_message, **options)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. Everything finished is kept in {folder}; the same command goes on from there.", err=True)
        raise typer.Exit(130) from None


def _findings(folder: Path) -> list[str]:
    """What limits what a finished run can show, beyond what its plan has said."""
    from kvatlas.stats.run_data import RunData
    from kvatlas.stats.validity import Kind, findings

    cells = RunData.open(folder, metric=None).cells
    return [finding.text for finding in findings(cells) if finding.kind is not Kind.NO_CHOICE]


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        _note(f"Warning: {sentence}")


def _note(sentence: str) -> None:
    typer.echo(visible(sentence), err=True)


def policy_parameters(policy: str, given: list[str] | None) -> dict[str, Any]:
    """The parameters of a policy from its `--set` options, each read by its declared type."""
    from kvatlas.policies import policies
    from kvatlas.text import read_value

    pairs = assignments("--set", given)
    return {name: read_value(policies.get(policy), name, value) for name, value in pairs.items()}


def assignments(option: str, given: list[str] | None) -> dict[str, str]:
    """Names and values, just as they were written, of options `NAME=VALUE`."""
    from kvatlas.core import KvatlasError

    pairs = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise KvatlasError(f"{option} {text!r} is not NAME=VALUE.")
        pairs[name.strip()] = value
    return pairs


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (demo, plan, run, sweep, screen):
        app.command()(command)
