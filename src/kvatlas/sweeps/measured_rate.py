"""The rate at which this machine decodes the traces of a plan, from a few timed steps and compressions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvatlas import models
from kvatlas.core import grouped
from kvatlas.engine.cache import CachedSequence
from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Request, Row, compress
from kvatlas.policies import CompressingPolicy, Policy
from kvatlas.sweeps.executors import cores, devices
from kvatlas.sweeps.plan import Plan
from kvatlas.sweeps.worker import Job, fitting_batch

#: Steps that are timed.
TIMED_STEPS = 32
#: Rows of the timed batch on a CPU.
TIMED_ROWS = 32


def decoding_rate(plan: Plan) -> float | None:
    """Return the tokens per second that all workers of this machine decode, from timed steps and compressions.

    The rows are a worker's batch under the policies of the plan, with as many cached tokens as rows have on average.
    Returns None for models of the hub, which may need a download.
    """
    torch.set_num_threads(1)

    seconds_per_token = 0.0
    for model in plan.models:
        if model.repository is not None:
            return None
        sampling = plan.spec.sampling.sampling()
        job = Job(model, "", plan.benchmarks, (), sampling, plan.spec.seed, prompt=plan.longest_prompt(model))
        workers = cores() if model.device == "cpu" else len(devices(job))
        seconds_per_token += _seconds_for_a_token(plan, job) / workers / len(plan.models)
    return 1 / seconds_per_token


def _seconds_for_a_token(plan: Plan, job: Job) -> float:
    """Return the seconds for one token of a worker, without those for prompts and compilers."""
    # A batch stays full, since no trace ends.
    model = replace(job.model, overrides=models.ENDLESS)
    loaded = model.load()
    chosen = plan.policies_on(model)
    rows = min(fitting_batch(job, chosen, plan.trees), plan.trees * len(chosen))
    if model.device == "cpu":
        rows = min(rows, TIMED_ROWS)

    total = 0.0
    # Settings of unlike storages are decoded one after the other.
    for together in grouped(chosen, lambda policy: policy.storage).values():
        engine = TimedEngine(model, loaded, together, job.sampling, rows)
        seconds, tokens = engine.time_steps(together, plan.mean_cached(model), TIMED_STEPS)
        total += len(together) * (seconds / tokens + _compression_seconds(plan, engine, together))
        # The next one needs its memory.
        del engine
    return total / len(chosen)


def _compression_seconds(plan: Plan, engine: TimedEngine, chosen: Sequence[Policy]) -> float:
    """Return the seconds that compressions add to a token on average, from one compression of each kind of policy.

    A row decodes as many tokens between two compressions as one of them evicts.
    """
    prompt = plan.longest_prompt(engine.handle)
    longest = plan.longest_trace(engine.handle)

    compressing = [policy for policy in chosen if isinstance(policy, CompressingPolicy)]
    fitting = [policy for policy in compressing if policy.budget.most(prompt) < longest]
    total = 0.0
    for of_kind in grouped(fitting, lambda policy: policy.setting_name).values():
        seconds, evicted = engine.time_compression(of_kind[0], prompt, of_kind[0].budget.most(prompt))
        total += len(of_kind) * seconds / max(1, evicted)
    return total / len(chosen)


class TimedEngine(Engine):
    """An engine that can also decode sequences of any length at once, whatever the cache holds."""

    def time_steps(self, policies: Sequence[Policy], cached: int, steps: int) -> tuple[float, int]:
        """Return the seconds and the tokens of so many decoding steps of a full batch with `cached` tokens each.

        The steps were captured before. No policy compresses, and what is decoded is dropped. The model must never end
        a trace.
        """
        self.scheduler.begin(())
        for index in range(self.batch_size):
            policy = policies[index % len(policies)]
            self.scheduler.rows.append(self._filled_row(index, policy, 1, cached, cached + 2 * steps))

        with self.attending():
            for _ in range(steps):
                self._step()
            self._synchronize()
            began = time.perf_counter()
            before = self.decoded_tokens
            for _ in range(steps):
                self._step()
            self._synchronize()
            seconds = time.perf_counter() - began

        self._finished = []
        self.scheduler.begin(())
        return seconds, self.decoded_tokens - before

    def time_compression(self, policy: Policy, prompt: int, cached: int) -> tuple[float, int]:
        """Return the seconds of a compression of one sequence with `cached` tokens, and the number of evicted tokens.

        The first `prompt` tokens are its prompt. The engine has decoded before, in the storage of the policy. What a
        first compression prepares is left out.
        """
        with torch.inference_mode():
            for _ in range(2):
                self.scheduler.begin(())
                row = self._filled_row(0, policy, prompt, cached, cached)
                self._write_random_numbers(row.cached)
                self._synchronize()
                began = time.perf_counter()
                evicted = compress(self.handle, self.cache, row)
                self._synchronize()
                seconds = time.perf_counter() - began
        self.scheduler.begin(())
        return seconds, evicted

    def _filled_row(self, index: int, policy: Policy, prompt: int, cached: int, room: int) -> Row[int]:
        """Return a sequence with `cached` tokens, of which `prompt` are its prompt, and room for more."""
        sequence = self.cache.begin()
        self.cache.reserve(sequence, room)
        sequence.length = cached
        return Row(
            Request(index, (0,) * prompt, index, (policy,)),
            (policy,),
            self.collector.signals((policy,)),
            replace(self.sampling, max_new_tokens=0),
            room + 1,
            sequence,
            tokens=[0] * (cached - prompt + 1),
            position=cached,
        )

    def _write_random_numbers(self, sequence: CachedSequence) -> None:
        """Fill keys, values, queries and notes of a sequence: scores of zeros may be no numbers."""
        slots = self.cache.slots(sequence)
        positions = torch.arange(len(slots), device=slots.device)
        for index, layer in enumerate(self.cache.shape.cached_layers):
            heads = (len(slots), self.cache.shape.kv_heads)
            key, value = (torch.randn(*heads, size, device=slots.device) for size in (layer.key, layer.value))
            self.cache.write(index, slots, key, value, positions)
        for ring in self.cache.rings:
            ring[sequence.row].normal_()
        for notes in self.cache.token_state.values():
            notes[sequence.row, ..., : len(slots)].uniform_()

    def _synchronize(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
