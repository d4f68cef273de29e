"""What Inspect's entry point loads: our models, and our benchmarks as tasks, which ask models behind any API.

    inspect eval kvatlas/seqbench --model openai/gpt-5-mini -T name=SEQBENCH-40x40-L100-B2 --epochs 5
    inspect eval kvatlas/benchmark --model google/gemini-2.5-flash -T name=CHAIN12 --limit 50

`kvatlas import LOG.eval RUN` then brings the log into a run. Keys stay in the environment, where Inspect reads them.
"""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from kvatlas.benchmarks import find, grade_text
from kvatlas.integrations.inspect_logs import CUT
from kvatlas.integrations.inspect_provider import kvatlas

__all__ = ["benchmark", "kvatlas", "seqbench"]


@task
def seqbench(name: str = "SEQBENCH-40x40-L100-B2", problems: int = 100) -> Task:
    """Mazes: a benchmark of the family SEQBENCH, and how many of its problems."""
    return of(name, problems)


@task
def benchmark(name: str, problems: int | None = None) -> Task:
    """Any benchmark by its name, and how many of its problems (its standard number by default)."""
    return of(name, problems)


def of(name: str, problems: int | None) -> Task:
    """The task of a benchmark. What an imported log is checked against is in its metadata."""
    benchmark = find(name)
    samples = [
        Sample(
            id=problem.id,
            input=benchmark.prompt(problem),
            target=problem.answer,
            metadata={"about": dict(problem.about)},
        )
        for problem in benchmark.problems(problems)
    ]
    return Task(
        dataset=MemoryDataset(samples, name=benchmark.name),
        solver=generate(),
        scorer=graded(benchmark.name, problems),
        version=benchmark.version,
        metadata={"kvatlas_benchmark": benchmark.name, "kvatlas_version": benchmark.version},
    )


@scorer(metrics={"*": [mean(), stderr()]})
def graded(name: str, problems: int | None) -> Scorer:
    """Our grader: correct, progress and the benchmark's further numbers; its words are in the score's metadata."""
    benchmark = find(name)
    asked = {problem.id: problem for problem in benchmark.problems(problems)}

    async def score(state: TaskState, target: Target) -> Score:
        output = state.output
        grade = grade_text(benchmark, asked[str(state.sample_id)], output.completion, cut=output.stop_reason in CUT)
        numbers = {key: value for key, value in grade.metrics.items() if not isinstance(value, str)}
        words: dict[str, Any] = {key: value for key, value in grade.metrics.items() if isinstance(value, str)}
        return Score(
            value={"correct": float(grade.correct), "progress": grade.progress, **numbers},
            answer=grade.answer,
            metadata={"status": grade.status.value, **words},
        )

    return score
