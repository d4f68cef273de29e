"""An engine whose steps and compressions are timed, for plans and measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvatlas.engine.engine import Engine
from kvatlas.engine.rows import Request, Row, compress
from kvatlas.policies.contract import Policy


class TimedEngine(Engine):
    """An engine that can also decode sequences of any length at once, with zeros in the cache."""

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

        The first `prompt` tokens are its prompt. The engine has decoded before. What a first compression prepares is
        left out.
        """
        if policy.storage != self.storage:
            # The request gives the engine a cache of the policy's storage, in which it has decoded.
            request = Request(0, (0,) * prompt, 0, (policy,), sampling=replace(self.sampling, max_new_tokens=2))
            for _ in self.run([request]):
                pass

        with torch.inference_mode():
            for _ in range(2):
                self.scheduler.begin(())
                row = self._filled_row(0, policy, prompt, cached, cached)
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

    def _synchronize(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
