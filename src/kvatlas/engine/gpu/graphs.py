"""Decoding steps of fixed shapes, which a GPU replays as CUDA graphs: forward pass and sampling without the host.

A captured step has its own batch, whose tensors never move; the numbers of each step are copied into them.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvatlas.core import Sampling
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import KVCache
from kvatlas.engine.sampling import UNSAMPLED, sample
from kvatlas.machine import out_of_memory

#: Captured batches have so many sequences, or a multiple of the last number, with idle ones as padding.
BUCKETS = (1, 2, 4, 8, 16)
Forward = Callable[[ForwardBatch], "tuple[Tensor, Tensor | None]"]


def bucket(rows: int) -> int:
    """Return the number of sequences of the captured batch for so many rows."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if rows <= size), -(-rows // largest) * largest)


class CapturedStep:
    """One decoding step for `batch`, one new token each, with its results.

    `logits` [sequences, vocabulary] and `sampled` [sequences], by the engine's sampling, `UNSAMPLED` if logits are not
    finite or too many tie; the last `hidden` states [sequences, hidden size] are None unless a policy observes them. A
    `graph` is replayed; without one the step is computed anew.
    """

    logits: Tensor
    sampled: Tensor
    hidden: Tensor | None

    def __init__(self, batch: ForwardBatch, sampling: Sampling) -> None:
        self.batch = batch
        self.sampling = sampling
        #: Token ids, positions, lengths, rows and streams of the sequences.
        self.inputs = torch.zeros(5, len(batch.rows), dtype=torch.long, device=batch.cache.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def work(self, forward: Forward) -> None:
        """Compute the step. A repetition changes nothing: the same values go into the same slots."""
        # Without what was derived from the numbers of another step.
        self.batch = replace(self.batch)
        self.batch.keep(self.inputs)
        self.logits, self.hidden = forward(self.batch)
        sampled = sample(self.logits, self.sampling, self.inputs[4], self.batch.positions + 1, fixed_shapes=True)
        self.sampled = sampled.masked_fill(~self.logits.amax(-1).isfinite(), UNSAMPLED)


class CudaGraphRunner:
    """The captured steps of one engine, one for each number of sequences; without CUDA the same steps uncaptured."""

    def __init__(self, cache: KVCache, sampling: Sampling) -> None:
        self.cache = cache
        self.sampling = replace(sampling, max_new_tokens=0)
        self.cuda = cache.device.type == "cuda"
        #: The reason of a failed capture.
        self.broken = ""
        #: The number of steps in the shapes of a captured one.
        self.steps = 0
        #: Seconds of compiling and capturing.
        self.seconds = 0.0
        #: By the number of sequences, and whether their attention is watched.
        self._captured: dict[tuple[int, bool], CapturedStep] = {}
        self._moves = -1
        self._room: Tensor | None = None

    def run(self, batch: ForwardBatch, streams: Sequence[int], forward: Forward) -> CapturedStep | None:
        """Return the step of a batch of one new token each, padded behind its sequences; None for other batches.

        The cache must have room. `forward` returns logits and last hidden states of a batch. A step that cannot be
        captured is computed in the same sizes: FlexAttention is compiled for each number of sequences.
        """
        if not batch.decoding:
            return None
        self._drop_moved()

        # The inputs of the step, zeros for idle sequences.
        size = bucket(len(streams))
        watching = bool(batch.watched)
        step = self._captured.get((size, watching)) or self._new_step(batch, size)
        idle = [0] * (size - len(streams))
        numbers = [
            [*[new[0] for new in batch.tokens], *idle],
            [*batch.first_positions, *idle],
            [*batch.lengths, *idle],
            [*batch.rows, *[self.cache.idle.row] * len(idle)],
            [*streams, *idle],
        ]
        step.inputs.copy_(torch.tensor(numbers), non_blocking=True)

        # Other layers attend in plain torch, in shapes that depend on the lengths. The first pass shows which they are.
        layers = self.cache.layers.values()
        plain = bool(layers) and all(layer.plain for layer in layers)
        if (size, watching) not in self._captured and plain and self._capture(step, forward):
            self._captured[size, watching] = step
        if (size, watching) in self._captured:
            self.steps += 1
        if step.graph is None:
            step.work(forward)
        else:
            with torch.cuda.device(self.cache.device):
                step.graph.replay()
        if watching:
            batch.take_attention(step.batch)
        return step

    def _new_step(self, batch: ForwardBatch, size: int) -> CapturedStep:
        """Return a step for a batch with idle sequences behind its own."""
        if batch.watched and self._room is None:
            # The same memory for all steps: one step follows the other. It has all slots of a table, since sizes of a
            # captured step never change.
            shape = self.cache.shape
            slots = self.cache.table.shape[1] * self.cache.page_size
            room = (shape.layers, bucket(self.cache.rows), shape.kv_heads, slots)
            self._room = torch.zeros(room, device=self.cache.device)

        missing = size - len(batch.rows)
        every = tuple(range(size))
        padded = ForwardBatch(
            self.cache,
            [*batch.sequences, *[self.cache.idle] * missing],
            [*batch.tokens, *[[0]] * missing],
            [*batch.first_positions, *[0] * missing],
            watched=every if batch.watched else (),
            remembered=every if self.cache.query_window else (),
            room=self._room if batch.watched else None,
        )
        return CapturedStep(padded, self.sampling)

    def forget(self) -> None:
        """Capture all steps anew."""
        self._moves = -1

    def _drop_moved(self) -> None:
        """Forget the steps if their tensors have moved because the cache grew."""
        if self._moves == self.cache.moves:
            return
        self._moves = self.cache.moves
        self._captured.clear()
        self._room = None
        if self.cuda:
            # A pool of old graphs must not be used for capturing while the workspaces of cuBLAS live in it.
            torch._C._cuda_clearCublasWorkspaces()
            self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, step: CapturedStep, forward: Forward) -> bool:
        """Capture a step; return True unless capturing has failed."""
        began = time.perf_counter()
        try:
            if self.cuda and not self.broken:
                self._record(step, forward)
        except RuntimeError as error:
            # A smaller batch may be captured: torch names its own error, CUDA's within a capture says so in words.
            if out_of_memory(error):
                raise
            self._captured.clear()
            self.broken = str(error).strip().splitlines()[0]
            warnings.warn(f"CUDA graphs are off, decoding goes on step by step: {self.broken}", stacklevel=2)
        self.seconds += time.perf_counter() - began
        return not self.broken

    def _record(self, step: CapturedStep, forward: Forward) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.cache.device):
            # Before capturing: compile and allocate, on a separate stream as CUDA requires.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                step.work(forward)
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph, pool=self._pool):
                step.work(forward)
        step.graph = graph
