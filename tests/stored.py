"""Runs in stores: of synthetic traces, over mazes by solvers that lose their way, and decoded ones."""

import json
import math
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import format_plan, parse_plan
from kvatlas.core import Costs, Grade, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest, Store
from kvatlas.stats.orders import kept_by_rule
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.stats.synthetic import traces

#: Policies of a run over commands of servers; the first two are outside its grid.
SERVERS = ("reference", "again", "served")


def traces_of(folder: Path) -> list[Trace]:
    """Return all traces of a run."""
    with Store.open(folder) as store:
        return [trace for _, trace in store.traces_of_all_sweeps()]


def change_store(folder: Path, statement: str) -> int:
    """Run a statement on a run's file, as no store does; return the number of rows that it changed."""
    with closing(sqlite3.connect(folder / "run.sqlite")) as connection, connection:
        return connection.execute(statement).rowcount


def decode_run(spec: dict[str, Any], folder: Path) -> Path:
    """Decode the run of a spec in this process."""
    sweep(make_plan(parse_spec(spec)), folder, workers=1)
    return folder


def store_run(
    folder: Path,
    plan: Manifest,
    chance: Callable[[Setting], float] = lambda _: 0.5,
    change: Callable[[Trace], Trace] = lambda trace: trace,
) -> Path:
    """Store the run of a plan; a trace is correct with the chance of its setting, and changed before it is stored."""
    with Store.create(folder) as store:
        store.put_manifest(plan)
        store.add_all((key, change(trace)) for key, trace in traces(plan, chance))
    return folder


def maze_run(
    folder: Path,
    solvers: Mapping[tuple[str, Setting], float],
    *,
    benchmark: str = "SEQBENCH-6x6-B1",
    problems: int,
    samples: int = 2,
) -> Path:
    """A finished run: `solvers` says for each model and setting the chance that an action goes wrong."""
    mazes = find(benchmark)
    asked = mazes.problems(problems)
    about = {problem.id: dict(problem.about) for problem in asked}
    cells = tuple(
        Expected(model, mazes.name, setting, f"key {model}", tuple(about), samples, setting.policy == "full")
        for model, setting in solvers
    )
    usage = Usage(100, 50, 20, 150, 120.0, 0, 0.1)
    with Store.create(folder) as store:
        store.put_manifest(Manifest((), cells, {}, {"kvatlas": "test"}, {mazes.name: about}))
        for cell, problem, sample in product(cells, asked, range(samples)):
            rng = random.Random(f"0 {cell.model} {cell.setting} {problem.id} {sample}")
            text = wander(problem.answer, solvers[cell.model, cell.setting], rng)
            grade = mazes.grade(problem, text) if text else Grade(False, 0.0, None, Status.TRUNCATED)
            trace = Trace(cell.model, mazes.name, problem.id, sample, cell.setting, (1, 2), text, grade, usage)
            store.add(cell.run_key, trace)
    return folder


def wander(answer: str, chance: float, rng: random.Random) -> str:
    """The plan up to its first slip, and something else instead; now and then nothing at all."""
    plan = list(parse_plan(answer) or ())
    for position in range(1, len(plan)):
        if rng.random() < chance:
            kind = rng.randrange(4)
            if kind == 0:
                return format_plan([*plan[:position], *plan[position + 1 :]])
            if kind == 1:
                return format_plan([*plan[:position], ("move_to", "Z9"), *plan[position:]])
            return format_plan(plan[:position]) if kind == 2 else ""
    return format_plan(plan)


def store_outcomes(
    folder: Path,
    outcomes: Mapping[Setting, Mapping[str, Any]],
    *,
    compressions: Mapping[Setting, Any] | None = None,
    copies: float = 0.0,
    extensions: int = 0,
    axis_names: Sequence[str] | None = None,
    kv_bytes: Mapping[Setting, int] | None = None,
    controls: Sequence[Setting] | None = None,
    sessions: Sequence[Mapping[str, Any]] = (),
    **spec: Any,
) -> Path:
    """Store a finished run of one model from arrays of outcomes.

    `outcomes[setting][benchmark]` are grades [problems, samples] of 0 and 1, NaN where a trace is missing; all arrays
    of a benchmark have one shape. `compressions[setting]` is a number for all traces, by default 2. On a share `copies`
    of the problems all samples write the same tokens. `kv_bytes` are those of a token by setting, `sessions` the
    servers of a run. `spec` are keys of the stored spec, such as `claim` and `looks`.
    """
    settings = list(outcomes)
    axes = {}
    for name in ("local_window", "ratio") if axis_names is None else axis_names:
        axes[name] = tuple(dict.fromkeys(one.values[name] for one in settings if name in one.values))
    expected = tuple(
        Expected(
            "tiny",
            benchmark,
            setting,
            f"key {benchmark}",
            tuple(f"p{number:04d}" for number in range(len(grades))),
            grades.shape[1],
            setting.policy in ("full", *SERVERS[:2]),
            (kv_bytes[setting], 0) if kv_bytes else None,
            control=None if controls is None else setting in controls,
        )
        for setting in settings
        for benchmark, grades in outcomes[setting].items()
    )
    stored_spec = {"seed": 0, "models": ["tiny"], "sampling": {"temperature": 0.6}, **spec}
    provenance = {"kvatlas": "test", "extensions": extensions, "sessions": list(sessions)}
    with Store.create(folder) as store:
        store.put_manifest(Manifest(tuple(axes.items()), expected, stored_spec, provenance))
        store.add_all(
            (cell.run_key, trace)
            for cell in expected
            for trace in _traces_of_outcomes(
                cell, outcomes[cell.setting][cell.benchmark], (compressions or {}).get(cell.setting, 2), copies
            )
        )
    return folder


def _traces_of_outcomes(cell: Expected, grades: Any, compressions: int, copies: float) -> Iterator[Trace]:
    kept = kept_by_rule(cell.setting) or 400.0
    for number, (problem, row) in enumerate(zip(cell.problems, grades, strict=True)):
        is_copied = number < copies * len(cell.problems)
        for sample, grade in enumerate(row):
            if not math.isnan(grade):
                usage: Costs = Usage(50, 100, 80, 400, kept, 0 if cell.setting.policy == "full" else compressions, 0.1)
                written = f"{cell.setting.id} {problem} {0 if is_copied else sample}"
                if cell.setting.policy in SERVERS:
                    # Servers tell no costs of the cache, and write the same where they are right or wrong alike.
                    usage = Costs(None, 100, None, None, None, None, 0.1)
                    written = f"{problem} {sample} {grade}"
                yield Trace(
                    model=cell.model,
                    benchmark=cell.benchmark,
                    problem=problem,
                    sample=sample,
                    setting=cell.setting,
                    tokens=tuple(written.encode()),
                    text="so\n</think>7",
                    grade=Grade(bool(grade), float(grade), "7" if grade else "8", Status.OK),
                    usage=usage,
                )


def provenance_of(head: Path) -> dict[str, Any]:
    """Return the provenance in the file of a head."""

    def plain(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with safe_open(head, "pt") as file:
        return {name: plain(text) for name, text in (file.metadata() or {}).items()}
