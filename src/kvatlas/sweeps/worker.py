"""The worker of a sweep, which decodes and grades units in this process, in another one, or on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvatlas import policies
from kvatlas.benchmarks import Benchmark
from kvatlas.benchmarks.reading import grade, read_tokens
from kvatlas.core import Grade, KvatlasError, Sampling, Setting, Status, Trace, digest
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import Policy, ReferenceTrace, Signal
from kvatlas.sweeps.plan import FULL, WorkItem, provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.engine import Generation, Likeness, Request

#: The share of the free memory that a batch may fill.
MARGIN = 0.8
#: The largest default batches of a CPU, where larger ones are not faster, and of a GPU.
CPU_BATCH, GPU_BATCH = 64, 256
#: A trace with the number of tokens decoded for it alone.
Finished = tuple[Trace, int]


@dataclass(frozen=True)
class Job:
    """The units of one model, with everything that a worker needs to decode them.

    `weights` is the digest of the model's weights, which names the random streams. If `batch_size` is None each worker
    takes as many sequences as fit into its memory, at most `most`; the longest prompt has `prompt` tokens. Batches are
    halved `halvings` times, once for each pass in which a worker died. `identities` are digests of the policies at the
    time of the run keys.
    """

    model: ModelHandle
    weights: str
    benchmarks: tuple[Benchmark, ...]
    units: tuple[WorkItem, ...]
    sampling: Sampling
    seed: int
    batch_size: int | None = None
    prompt: int = 0
    most: int = 2**31
    workers: int = 1
    made_with: Mapping[str, str] = field(default_factory=provenance)
    screened: bool = False
    halvings: int = 0
    identities: Mapping[Setting, str] = field(default_factory=dict)
    #: Policies that `kvatlas.register` added in the driver.
    registered: tuple[type[Policy], ...] = ()

    def shared_by(self, workers: int) -> Job:
        """Return the job for one of so many workers, with a batch that leaves work for the others."""
        rows = sum(len(unit.settings) for unit in self.units)
        share = max(1, -(-rows // workers))
        size = None if self.batch_size is None else min(self.batch_size, share)
        return replace(self, batch_size=size, most=share, workers=workers)

    def policies(self) -> dict[Setting, Policy]:
        """Return the policies of the settings; KvatlasError if a file of one changed since the run keys were made."""
        for kind in self.registered:
            policies.policies.added.setdefault(kind.name, kind)
        settings = dict.fromkeys(itertools.chain.from_iterable(unit.settings for unit in self.units))
        by_setting = {setting: policies.of(setting).on(self.model) for setting in settings}
        for setting, policy in by_setting.items():
            if setting in self.identities and self.identities[setting] != digest(policy.identity(self.model)):
                raise KvatlasError(f"A file of {setting} was replaced after the sweep began; start the sweep again.")
        return by_setting


def fitting(job: Job, policies: Sequence[Policy]) -> int:
    """Return the batch size, a power of two, that fits into the free memory; workers on a CPU share it."""
    from kvatlas.engine.scheduler import peak

    free, cpu = free_memory(job.model.device), job.model.device == "cpu"
    size = min(CPU_BATCH if cpu else GPU_BATCH, job.most)
    while free is not None and size > 1:
        taken = peak(job.model, policies, size, len(job.units), job.prompt, job.sampling.max_new_tokens)
        # The weights are loaded already.
        if taken.total - taken.weights <= MARGIN * free / (job.workers if cpu else 1):
            break
        size //= 2
    return size


def decode(job: Job, claims: Iterable[int]) -> Iterator[Finished]:
    """Decode and grade, or screen, the units with the numbers `claims`, which are pulled as rows become free.

    Yields every trace as it finishes. Settings that need the answer of the full-cache trace come last. A screened
    setting gives a record: a trace without tokens whose metrics are the `measures`, and whose status is that of the
    full-cache trace.
    """
    import torch

    from kvatlas.engine import Engine, Request

    # Workers with one thread each are much faster than workers that share cores.
    torch.set_num_threads(1)
    handle, model, settings = job.model, job.model.load(), job.policies()
    by_name = {benchmark.name: benchmark for benchmark in job.benchmarks}
    chosen = tuple(dict.fromkeys([*settings.values(), FULL]))
    # A larger batch than all rows that there are would be allocated for nothing.
    rows = sum(len(unit.settings) + 1 for unit in job.units)
    size = max(1, min(job.batch_size or fitting(job, chosen), rows) >> job.halvings)
    size = max(2, size) if job.screened else size
    engine = Engine(handle, model, chosen, job.sampling, size)
    late: dict[int, Request[int]] = {}
    full: dict[int, tuple[int, ...]] = {}

    def requests() -> Iterator[Request[int]]:
        for number in claims:
            unit = job.units[number]
            own = [settings[setting] for setting in unit.settings]
            answering = tuple(policy for policy in own if Signal.ANSWER in policy.observes)
            request = Request(
                key=number,
                prompt=handle.encode(by_name[unit.benchmark].prompt(unit.problem)),
                stream=stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample),
                policies=tuple(own),
                script=unit.script,
            )
            if job.screened:
                trace = reference(handle, model, request.prompt, unit.script) if answering else None
                for start in range(0, len(own), size - 1):
                    yield replace(request, policies=(*own[start : start + size - 1], FULL), reference=trace)
                continue
            if answering:
                late[number] = replace(request, policies=answering)
                early = dict.fromkeys(policy for policy in own if policy not in answering)
                request = replace(request, policies=tuple({**early, FULL: None}))
            yield request

    for generation in engine.run(requests()):
        if generation.policy == FULL and generation.key in late:
            full[generation.key] = generation.tokens
        if generation.policy.setting in job.units[generation.key].settings:
            yield _finished(job, by_name, generation)
    answered = [
        replace(request, reference=reference(handle, model, request.prompt, full[number]))
        for number, request in late.items()
    ]
    for generation in engine.run(answered):
        trace, own = _finished(job, by_name, generation)
        metrics = {**trace.grade.metrics, **departure(generation.tokens, full[generation.key])}
        yield replace(trace, grade=replace(trace.grade, metrics=metrics)), own


def reference(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> ReferenceTrace | None:
    """Return the attention of a full-cache trace's answer from a second pass over it; None without an answer."""
    from kvatlas.predictor import answer_attention

    span = read_tokens(handle, tokens).span
    if span is None or span[1] >= len(tokens):
        return None
    whole = prompt + tokens
    attention, _ = answer_attention(model, list(whole), len(prompt) + span[1])
    return ReferenceTrace(whole, attention)


def _finished(job: Job, by_name: Mapping[str, Benchmark], generation: Generation[int]) -> Finished:
    """Return the trace of a generation, or a screening record, with the number of tokens decoded for it alone."""
    unit, model, tokens = job.units[generation.key], job.model, generation.tokens
    if job.screened:
        assert generation.likeness is not None
        full = read_tokens(model, unit.script, unit.script[-1] in model.stops)
        answered = full.status is Status.OK and full.span is not None
        measured = measures(generation.likeness, len(unit.script), answered)
        verdict = Grade(bool(measured["unchanged"]), measured["agreed"], None, full.status, measured)
    else:
        verdict = grade(by_name[unit.benchmark], unit.problem, read_tokens(model, tokens, generation.finished))
    trace = Trace(
        model=model.name,
        benchmark=unit.benchmark,
        problem=unit.problem.id,
        sample=unit.sample,
        setting=generation.policy.setting,
        tokens=() if job.screened else tokens,
        text="" if job.screened else model.text(tokens),
        grade=verdict,
        usage=generation.usage,
        eviction_trace=None if job.screened else generation.eviction_trace,
    )
    return trace, 0 if job.screened else generation.decoded


def departure(tokens: tuple[int, ...], full: tuple[int, ...]) -> dict[str, float]:
    """Return the metric `departs_at`, the number of leading tokens shared with the full-cache trace, unless equal."""
    if tokens == full:
        return {}
    differ = (n for n, (own, other) in enumerate(zip(tokens, full, strict=False)) if own != other)
    return {"departs_at": next(differ, min(len(tokens), len(full)))}


def measures(likeness: Likeness, tokens: int, answered: bool = True) -> dict[str, float]:
    """Return the metrics of a screen.

    In [0, 1], for maps: `unchanged` is 1 if the setting draws every token of the trace; `agreed` is the share of
    tokens before the first different one; `top1` is the share of thinking tokens after the first compression with the
    same likeliest token; `likeness` is exp(-`kl`); `answer_kept` is the ratio of the answer's likelihoods, at most 1.
    Others: `kl` (mean over those thinking tokens, nats), `answer_change` (log-likelihood, nats), `departs_at`. A
    setting that never compresses loses nothing. `answer_kept` and `answer_change` are missing unless `answered`.
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
