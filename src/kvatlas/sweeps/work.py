"""The worker's side of a sweep: units in, graded traces out; the same code in one process, in many, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvatlas import policies
from kvatlas.benchmarks import Benchmark, judge
from kvatlas.core import Grade, Problem, Setting, Status, Trace
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import Signal
from kvatlas.sweeps.job import Job, batch_of, policies_of, reference
from kvatlas.sweeps.screen_work import read

if TYPE_CHECKING:
    from kvatlas.engine import Generation


def decode(job: Job, claims: Iterable[int]) -> Iterator[tuple[Trace, int]]:
    """Decode and grade the units whose numbers `claims` gives, each pulled when there is room for it; or screen them.

    Yields every trace as it finishes, with the number of tokens that were decoded for it alone. Settings that need the
    answer of the full-cache trace come last, when that is there.
    """
    import torch

    if job.screened:
        yield from read(job, claims)
        return

    from kvatlas.engine import Engine, Request

    # One thread per worker: two busy workers with two threads each are far slower than with one.
    torch.set_num_threads(1)
    handle = job.model
    by_name = {benchmark.name: benchmark for benchmark in job.benchmarks}
    settings = policies_of(job)
    full = policies.of(Setting.of("full"))
    model = handle.load()
    chosen = tuple(dict.fromkeys([*settings.values(), full]))
    engine = Engine(handle, model, chosen, job.sampling, batch_of(job, chosen))
    waiting: dict[int, Request[int]] = {}

    def requests() -> Iterator[Request[int]]:
        for number in claims:
            unit = job.units[number]
            request = Request(
                key=number,
                prompt=handle.encode(by_name[unit.benchmark].prompt(unit.problem)),
                stream=stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample),
                policies=tuple(settings[setting] for setting in unit.settings),
            )
            late = tuple(policy for policy in request.policies if Signal.ANSWER in policy.observes)
            if late:
                waiting[number] = replace(request, policies=late)
                early = dict.fromkeys(policy for policy in request.policies if policy not in late)
                request = replace(request, policies=tuple({**early, full: None}))
            yield request

    finished: dict[int, tuple[int, ...]] = {}
    for generation in engine.run(requests()):
        if generation.policy == full and generation.key in waiting:
            finished[generation.key] = generation.tokens
        if generation.policy.setting in job.units[generation.key].settings:
            yield _trace(job, by_name, generation), generation.decoded
    late_requests = [
        replace(request, reference=reference(handle, model, request.prompt, finished[number]))
        for number, request in waiting.items()
    ]
    for generation in engine.run(late_requests):
        trace = _trace(job, by_name, generation)
        metrics = {**trace.grade.metrics, **departure(generation.tokens, finished[generation.key])}
        yield replace(trace, grade=replace(trace.grade, metrics=metrics)), generation.decoded


def _trace(job: Job, by_name: Mapping[str, Benchmark], generation: Generation[int]) -> Trace:
    unit, model = job.units[generation.key], job.model
    return Trace(
        model=model.name,
        benchmark=unit.benchmark,
        problem=unit.problem.id,
        sample=unit.sample,
        setting=generation.policy.setting,
        tokens=generation.tokens,
        text=model.text(generation.tokens),
        grade=grade(model, by_name[unit.benchmark], unit.problem, generation.tokens, generation.finished),
        usage=generation.usage,
        eviction_trace=generation.eviction_trace,
    )


def departure(tokens: tuple[int, ...], full: tuple[int, ...]) -> dict[str, float]:
    """The metric `departs_at`: new tokens that a trace shares with the full-cache one; none if it is the same."""
    shared = 0
    for own, theirs in zip(tokens, full, strict=False):
        if own != theirs:
            break
        shared += 1
    return {} if tokens == full else {"departs_at": shared}


def grade(model: ModelHandle, benchmark: Benchmark, problem: Problem, tokens: tuple[int, ...], finished: bool) -> Grade:
    """The verdict on new tokens: what comes after the end of thinking is the answer, an unfinished trace is wrong."""
    if not finished:
        return Grade(False, 0.0, None, Status.TRUNCATED)
    answer = model.answer(tokens)
    return Grade(False, 0.0, None, Status.NO_ANSWER) if answer is None else judge(benchmark, problem, answer)
