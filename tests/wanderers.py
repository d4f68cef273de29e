"""Runs over mazes by solvers that lose their way: each action of the plan fails with a chance of its own."""

import random
from collections.abc import Mapping
from pathlib import Path

from kvatlas.benchmarks import find
from kvatlas.benchmarks.seqbench import format_plan, parse_plan
from kvatlas.core import Grade, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest, Store

Solver = tuple[str, Setting]


def maze_run(
    folder: Path,
    solvers: Mapping[Solver, float],
    *,
    benchmark: str = "SEQBENCH-6x6-B1",
    problems: int = 150,
    samples: int = 2,
    seed: int = 0,
) -> Path:
    """A finished run: `solvers` says for each model and setting the chance that an action goes wrong."""
    benchmark_ = find(benchmark)
    asked = benchmark_.problems(problems)
    cells = [
        Expected(
            model,
            benchmark_.name,
            setting,
            f"key {model}",
            tuple(p.id for p in asked),
            samples,
            setting.policy == "full",
        )
        for model, setting in solvers
    ]
    about = {benchmark_.name: {problem.id: dict(problem.about) for problem in asked}}
    with Store.create(folder) as store:
        store.put_manifest(Manifest((), tuple(cells), {}, {"kvatlas": "test"}, about))
        for cell in cells:
            for problem in asked:
                for sample in range(samples):
                    rng = random.Random(f"{seed} {cell.model} {cell.setting} {problem.id} {sample}")
                    text = wander(problem.answer, solvers[cell.model, cell.setting], rng)
                    grade = benchmark_.grade(problem, text) if text else Grade(False, 0.0, None, Status.TRUNCATED)
                    usage = Usage(100, 50, 20, 150, 120.0, 0, 0.1)
                    store.add(
                        cell.run_key,
                        Trace(
                            cell.model, benchmark_.name, problem.id, sample, cell.setting, (1, 2), text, grade, usage
                        ),
                    )
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
