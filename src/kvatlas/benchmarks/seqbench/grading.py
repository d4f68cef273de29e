"""How mazes are asked and graded, whether generated or read from the published data set."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib.resources import files

from kvatlas.benchmarks.seqbench.facts import read_maze
from kvatlas.benchmarks.seqbench.plans import format_plan, judge, parse_plan
from kvatlas.core import Grade, Problem, Status


def prompt(prompt_format: str, problem: Problem) -> str:
    """The user message in a named format."""
    return problem.question if prompt_format == "facts/v1" else f"{template()}{problem.question}\n\nPlan:"


@cache
def template() -> str:
    """What comes before the facts in `seqbench/v1`: task, guidance and worked examples."""
    return (files("kvatlas.benchmarks.seqbench") / "seqbench-v1.txt").read_text(encoding="utf-8")


def grade(problem: Problem, answer: str) -> Grade:
    """All metrics of the last plan in the answer; without one, 0 throughout and status `no_answer`."""
    plan = parse_plan(answer)
    if plan is None:
        shares: dict[str, float | str] = dict.fromkeys(("valid", "progress_valid", "precision", "recall"), 0.0)
        return Grade(False, 0.0, None, Status.NO_ANSWER, {**shares, "first_error": "no_answer", "first_error_index": 0})
    reference = parse_plan(problem.answer)
    assert reference is not None, "a reference answer is a plan"
    verdict = asdict(judge(read_maze(problem.question.splitlines()), reference, plan))
    verdict["valid"] = float(verdict["valid"])
    return Grade(verdict.pop("solved"), verdict.pop("progress"), format_plan(plan), Status.OK, verdict)
