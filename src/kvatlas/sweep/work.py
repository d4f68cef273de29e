"""The worker's side of a sweep: units in, graded traces out; the same code in one process, in many, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvatlas import policies
from kvatlas.benchmarks import Benchmark
from kvatlas.core import Grade, Problem, Sampling, Status, Trace
from kvatlas.models import Model
from kvatlas.noise import stream_key
from kvatlas.sweep.plan import Unit


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know: one model's units and how to decode them.

    `weights` is the digest of the model's weights, computed once by the driver: it names the random streams.
    """

    model: Model
    weights: str
    benchmarks: tuple[Benchmark, ...]
    units: tuple[Unit, ...]
    sampling: Sampling
    seed: int
    batch_size: int


def decode(job: Job, claims: Iterable[int]) -> Iterator[tuple[Trace, int]]:
    """Decode and grade the units whose numbers `claims` gives, each pulled when there is room for it.

    Yields every trace as it finishes, with the number of tokens that were decoded for it alone.
    """
    import torch

    from kvatlas.engine import Engine, Request

    # One thread per worker: two busy workers with two threads each are far slower than with one.
    torch.set_num_threads(1)
    model = job.model
    found = {benchmark.name: benchmark for benchmark in job.benchmarks}
    settings = {setting: policies.of(setting) for unit in job.units for setting in unit.settings}
    engine = Engine(model, model.network(), settings.values(), job.sampling, job.batch_size)

    def requests() -> Iterator[Request[int]]:
        for number in claims:
            unit = job.units[number]
            yield Request(
                key=number,
                prompt=model.encode(found[unit.benchmark].prompt(unit.problem)),
                stream=stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample),
                policies=tuple(settings[setting] for setting in unit.settings),
            )

    for generation in engine.run(requests()):
        unit = job.units[generation.key]
        trace = Trace(
            model=model.name,
            benchmark=unit.benchmark,
            problem=unit.problem.id,
            sample=unit.sample,
            setting=generation.policy.setting,
            tokens=generation.tokens,
            text=model.text(generation.tokens),
            grade=grade(model, found[unit.benchmark], unit.problem, generation.tokens, generation.finished),
            usage=generation.usage,
            fate=generation.fate,
        )
        yield trace, generation.decoded


def grade(model: Model, benchmark: Benchmark, problem: Problem, tokens: tuple[int, ...], finished: bool) -> Grade:
    """The verdict on new tokens: what comes after the end of thinking is the answer, an unfinished trace is wrong."""
    if not finished:
        return Grade(False, 0.0, None, Status.TRUNCATED)
    answer = model.answer(tokens)
    return Grade(False, 0.0, None, Status.NO_ANSWER) if answer is None else benchmark.grade(problem, answer)
