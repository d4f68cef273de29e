"""Runs over mazes by solvers that lose their way: each action of the plan fails with a chance of its own."""

import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import format_plan, parse_plan
from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest, Store


def maze_run(
    folder: Path,
    solvers: Mapping[tuple[str, Setting], float],
    *,
    benchmark: str = "SEQBENCH-6x6-B1",
    problems: int = 150,
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
