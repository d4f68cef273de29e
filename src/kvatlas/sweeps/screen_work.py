"""The worker's side of a screen: units with full-cache tokens in, what every setting would have chosen out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvatlas import policies
from kvatlas.core import Grade, Setting, Status, Trace
from kvatlas.noise import stream_key
from kvatlas.policies import Signal
from kvatlas.sweeps.job import Job, batch_of, policies_of, reference

if TYPE_CHECKING:
    from kvatlas.engine import Likeness
    from kvatlas.models import ModelHandle


def read(job: Job, claims: Iterable[int]) -> Iterator[tuple[Trace, int]]:
    """The worker's side: screen the units whose numbers `claims` gives, each with its full-cache tokens.

    Yields a record for every setting: a trace without tokens, whose grade's metrics are the `measures` and whose status
    is the `outcome` of the trace that was read.
    """
    import torch

    from kvatlas.engine import Engine, Request

    torch.set_num_threads(1)
    handle = job.model
    by_name = {benchmark.name: benchmark for benchmark in job.benchmarks}
    settings = policies_of(job)
    model, full = handle.load(), policies.of(Setting.of("full"))
    size = max(2, batch_of(job, tuple(settings.values())))
    engine = Engine(handle, model, settings.values(), job.sampling, size)

    def requests() -> Iterator[Request[int]]:
        for number in claims:
            unit = job.units[number]
            prompt = handle.encode(by_name[unit.benchmark].prompt(unit.problem))
            stream = stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample)
            chosen = [settings[setting] for setting in unit.settings]
            answers = any(Signal.ANSWER in policy.observes for policy in chosen)
            seen = reference(handle, model, prompt, unit.script) if answers else None
            # All settings of a request are read side by side, the full cache with them.
            for start in range(0, len(chosen), size - 1):
                yield Request(number, prompt, stream, (*chosen[start : start + size - 1], full), seen, unit.script)

    for generation in engine.run(requests()):
        unit, likeness = job.units[generation.key], generation.likeness
        if generation.policy == full or likeness is None:
            continue
        status = outcome(handle, unit.script)
        measured = measures(likeness, len(unit.script), answered=status is Status.OK)
        grade = Grade(bool(measured["unchanged"]), measured["agreed"], None, status, measured)
        yield (
            Trace(
                model=handle.name,
                benchmark=unit.benchmark,
                problem=unit.problem.id,
                sample=unit.sample,
                setting=generation.policy.setting,
                tokens=(),
                text="",
                grade=grade,
                usage=generation.usage,
            ),
            0,
        )


def outcome(model: ModelHandle, tokens: tuple[int, ...]) -> Status:
    """Whether a full-cache trace has an answer to keep (`ok`), or was cut before it ended, or never answered."""
    if tokens[-1] not in model.stops:
        return Status.TRUNCATED
    split = model.split(tokens)
    answer = "" if split is None else model.text(tokens[split[1] :])
    return Status.OK if answer.strip() else Status.NO_ANSWER


def measures(likeness: Likeness, tokens: int, answered: bool = True) -> dict[str, float]:
    """What a screen's maps show, all in [0, 1], and the numbers behind it.

    `unchanged` is 1 where the setting would have drawn every token of the trace, `agreed` the share before the first
    other one, `top1` the share of thinking tokens after the first compression with the same likeliest token,
    `likeness` exp(-`kl`), `answer_kept` the part of the answer's likelihood that is left, at most 1. Beside: `kl`
    (mean over those thinking tokens, nats), `answer_change` (log-likelihood, nats), `departs_at`. What never came to a
    compression has lost nothing. Where the trace has no finished answer (`answered` is false) nothing is known of what
    is kept of it: `answer_kept` and `answer_change` are missing.
    """
    kl = max(0.0, likeness.kl / likeness.thinking) if likeness.thinking else 0.0
    at = likeness.departs_at
    measured = {
        "unchanged": float(at is None),
        "agreed": 1.0 if at is None else at / tokens,
        "top1": likeness.top1 / likeness.thinking if likeness.thinking else 1.0,
        "likeness": math.exp(-kl),
        "kl": kl,
    }
    if answered:
        measured |= {"answer_kept": math.exp(min(0.0, likeness.answer_change)), "answer_change": likeness.answer_change}
    return measured if at is None else {**measured, "departs_at": float(at)}
