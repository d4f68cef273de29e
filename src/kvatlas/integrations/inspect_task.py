"""Our benchmarks as tasks of Inspect, which asks models of any provider.

    inspect eval kvatlas/benchmark --model openai/gpt-5-mini -T name=SEQBENCH-40x40-L100-B2 --epochs 5
    inspect eval kvatlas/benchmark --model google/gemini-2.5-flash -T name=CHAIN12 --limit 50

`kvatlas import LOG.eval RUN` imports a log into a run. API keys stay in the environment, where Inspect reads them.
"""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate

from kvatlas import benchmarks
from kvatlas.answers import reading
from kvatlas.benchmarks.base import grade_reading
from kvatlas.integrations.inspect_logs import CUT


@task
def benchmark(name: str, problems: int | None = None) -> Task:
    """Any benchmark by its name, and the number of its problems (its standard number by default)."""
    # The metadata is compared when a log is imported.
    definition = benchmarks.find(name)
    samples = [
        Sample(
            id=problem.id,
            input=benchmarks.prompt_of(definition, problem),
            target=problem.answer,
            metadata={"about": {**problem.about}},
        )
        for problem in benchmarks.problems_of(definition, problems)
    ]

    return Task(
        dataset=MemoryDataset(samples, name=definition.name),
        solver=generate(),
        scorer=benchmark_grade(definition.name, problems),
        version=definition.version,
        metadata={"kvatlas_benchmark": definition.name, "kvatlas_version": definition.version},
    )


@scorer(metrics={"*": [mean(), stderr()]}, name="graded")
def benchmark_grade(name: str, problems: int | None) -> Scorer:
    """Our grader: correct, progress and the benchmark's further numbers; its words are in the score's metadata."""
    graded_by = benchmarks.find(name)
    by_id = {problem.id: problem for problem in benchmarks.problems_of(graded_by, problems)}

    async def score(state: TaskState, target: Target) -> Score:
        output = state.output
        read = reading.read_text(output.completion, cut=output.stop_reason in CUT)
        grade = grade_reading(graded_by, by_id[str(state.sample_id)], read, all_metrics=True)
        numbers = {key: value for key, value in grade.metrics.items() if not isinstance(value, str)}
        words: dict[str, Any] = {key: value for key, value in grade.metrics.items() if isinstance(value, str)}
        return Score(
            value={"correct": float(grade.correct), "progress": grade.progress, **numbers},
            answer=grade.answer,
            metadata={"status": grade.status.value, **words},
        )

    return score
