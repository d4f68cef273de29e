"""The one decode loop, for every policy and every caller.

Each turn: (1) fill free rows with requests and branches; (2) put the next tokens of every row into one batch; (3) pass
it through the model; (4) let policies observe; (5) sample the next tokens; (6) hand out finished rows; (7) fork and
compress the rows whose cache reached a KV budget. Where memory runs out, the unfinished requests start again with half
the rows.

The results equal those of separate runs of every setting: on CPUs in fp32 bit for bit.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.core import KvatlasError, Sampling, Storage, reason, refusal
from kvatlas.engine.attention import AttentionBackend, PassAttention, backend_for
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import KVCache
from kvatlas.engine.probe import measure_shape, rehearse
from kvatlas.engine.rows import Generation, K, Request, Row
from kvatlas.engine.sampling import UNSAMPLED, sample_rows
from kvatlas.engine.scheduler import Scheduler, requests_of_storage
from kvatlas.engine.signals import SignalCollector
from kvatlas.forward import RowStates, attention_function, own_attention, reading_batch, split_rows
from kvatlas.machine import out_of_memory
from kvatlas.policies.cache_view import Signal
from kvatlas.policies.contract import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.engine.memory_plan import Peak
    from kvatlas.models import ModelHandle


class Engine:
    """The decode loop for one model. `policies` are those of all requests (they decide the signals to collect).

    `backend` computes attention: cpu, flex or reference; None for the fastest available.
    """

    def __init__(
        self,
        handle: ModelHandle,
        model: PreTrainedModel,
        policies: Iterable[Policy],
        sampling: Sampling,
        batch_size: int = 64,
        backend: str | None = None,
    ) -> None:
        self.handle = handle
        self.model = model
        self.sampling = sampling
        self.batch_size = batch_size
        policies = list(policies)
        self.collector = SignalCollector(handle, policies)
        self.decoded_tokens = self.passes = 0
        self._finished: list[Generation[Any]] = []
        self._hidden: Tensor | None = None

        weight = next(model.parameters())
        self._device = weight.device
        self._dtype = weight.dtype
        self.backend: AttentionBackend = backend_for(weight.device, weight.dtype, backend)

        # The form of the cache is at first that of the first policy.
        self.storage = policies[0].storage if policies else Storage()

        #: True if layers keep a state beside the KV cache.
        self.stateful = split_rows(model)
        # A backend moves weights before the cache takes its memory.
        with self.backend.decoding(model):
            pass
        # The config.json may tell another shape than the layers have.
        shape, self._key_biases = measure_shape(handle, model)
        handle.keep_shape(shape)
        self._allocate()

    @property
    def cached_tokens(self) -> int:
        return sum(row.cached.length for row in list(self.scheduler.rows))

    def run(self, requests: Iterable[Request[K] | None]) -> Iterator[Generation[K]]:
        """Decode all requests, taken as rows become free; yield generations as they finish, in no fixed order.

        A source without a request now but perhaps later gives None: active rows continue, and it is polled again.
        Settings of one storage share the cache and trunks; those of another one are decoded after the last request.
        """
        rehearse(self.handle, self.model, self.new_cache, self.attending, self.forward)
        later: dict[Storage, list[Request[K]]] = {}
        yield from self._decode(requests_of_storage(requests, self.storage, later))
        while later:
            self.storage, waiting = later.popitem()
            self._renew(self.batch_size)
            yield from self._decode(iter(waiting))

    def _decode(self, source: Iterator[Request[K] | None]) -> Iterator[Generation[K]]:
        """Decode requests of one storage, with half the rows where memory runs out."""
        self._finished = []
        again: Iterator[Request[K]] = iter(())
        with self.attending():
            while True:
                try:
                    self.scheduler.begin(itertools.chain(again, source))
                    while self.scheduler.admit() or self._finished:
                        if self.scheduler.rows:
                            self._step()
                        while self._finished:
                            yield self._finished.pop(0)
                    return
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    unfinished = [*self.scheduler.unfinished(), *again]
                    if self.batch_size < 2:
                        raise KvatlasError(
                            f"The memory of this machine does not suffice for one sequence of {self.handle.name!r} "
                            f"({reason(error)})."
                        ) from None
                # The error held the tensors of the pass.
                again = iter(unfinished)
                self._renew(self.batch_size // 2)

    @torch.inference_mode()
    def _step(self) -> None:
        began = time.perf_counter() - self._capturing_seconds

        # The next tokens of every row, in one batch.
        rows, new_tokens = self.scheduler.next_step()
        signals = [row.signals for row in rows]
        for row, tokens in zip(rows, new_tokens, strict=True):
            self.cache.reserve(row.cached, row.cached.length + len(tokens))
        batch = ForwardBatch(
            self.cache,
            [row.cached for row in rows],
            new_tokens,
            [row.position for row in rows],
            watched=self.collector.asking(Signal.ATTENTION, signals),
            remembered=self.collector.asking(Signal.QUERIES, signals),
        )

        # Policies observe the pass before the lengths of the rows grow.
        prompts = [len(row.request.prompt) if row.prompt_left else None for row in rows]
        logits, hidden, ready = self._pass(rows, batch)
        self.collector.notify(batch, signals, prompts, hidden)

        sampled = self._sample(rows, batch, logits, ready)
        branches = self._cut(rows, sampled)

        # Every row takes its token, and ends, forks or goes on.
        self.passes += 1
        share = (time.perf_counter() - self._capturing_seconds - began) / batch.starts[-1]
        for index, (row, count, prompt) in enumerate(zip(rows, batch.counts, prompts, strict=True)):
            ended = self._advance(row, count, sampled.get(index), share)
            if index in branches:
                branch, cut_token = branches[index]
                if self._advance(branch, count, cut_token, share):
                    self._finished += branch.generations(self.handle)
                    self.scheduler.close(branch)
                else:
                    self.scheduler.end_cut(row, branch, branch.due() if prompt is None else ())
            if ended:
                self._finished += row.generations(self.handle)
                self.scheduler.finish(row)
            elif prompt is None and (due := row.due()):
                self.scheduler.fork(row, due)

    def _advance(self, row: Row[Any], count: int, token: int | None, share: float) -> bool:
        """Add the new token of a pass to a row, None within a prompt; return True at its last one."""
        row.seconds += share * count
        self.decoded_tokens += token is not None
        return row.advance(self.handle, count, token)

    def _cut(self, rows: Sequence[Row[Any]], sampled: dict[int, int]) -> dict[int, tuple[Row[Any], int]]:
        """Write the end of thinking where a cap is reached, in place of the `sampled` tokens.

        Where it is reached by some policies of a row alone, and the model writes another token, these become a branch:
        returns each branch with the token that it writes, by the index of its row.
        """
        branches = {}
        for index, sampled_token in list(sampled.items()):
            row = rows[index]
            cut = row.cut(self.handle)
            if cut is None:
                continue
            capped, token = cut
            if len(capped) == len(row.policies):
                sampled[index] = token
            elif sampled_token != token:
                branches[index] = (self.scheduler.begin_cut(row, capped), token)
        return branches

    def _pass(self, rows: Sequence[Row[Any]], batch: ForwardBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logits and hidden states; from a captured step also the sampled tokens, if all rows sample alike."""
        step = None
        if self.graphs is not None:
            step = self.graphs.run(batch, [row.request.stream for row in rows], self.forward)
        if step is not None:
            # A captured step has idle sequences behind the rows.
            count = len(rows)
            hidden = None if step.hidden is None else step.hidden[:count]
            alike = {row.sampling for row in rows} == {step.sampling}
            plain = alike and not any(row.request.logits_processor for row in rows)
            return step.logits[:count], hidden, step.sampled[:count] if plain else None

        # Of prompts only the last token has logits that are needed.
        needed: list[int] | None = None
        if not batch.decoding:
            ends = zip(rows, batch.counts, batch.starts[1:], strict=True)
            needed = [end - 1 for row, count, end in ends if row.prompt_left <= count]
        logits, hidden = self.forward(batch, needed)
        return logits, hidden, None

    def forward(self, batch: ForwardBatch, needed: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits [needed tokens or all, vocabulary] and last hidden states [tokens, hidden size]."""
        every = needed is None or len(needed) == batch.starts[-1]
        with attention_function(PassAttention(self.backend, batch)), reading_batch(batch), self.backend.passing():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=0 if every else torch.tensor(needed, dtype=torch.long).to(batch.positions.device),
            )
        logits = output.logits[0]
        # Some models ignore `logits_to_keep`.
        if needed is not None and not every and len(logits) == batch.starts[-1]:
            logits = logits[needed]
        return logits, self._hidden

    def _sample(
        self, rows: Sequence[Row[Any]], batch: ForwardBatch, logits: Tensor, ready: Tensor | None
    ) -> dict[int, int]:
        """Return new tokens by the index of their row, none within a prompt; `ready` has those of a captured step."""
        if ready is not None and UNSAMPLED not in (tokens := ready.tolist()):
            return dict(enumerate(tokens))
        if logits.shape[0] and not math.isfinite(logits.amax(-1).abs().amax()):
            raise KvatlasError(
                f"The model {self.handle.name!r} computed logits that are no finite numbers in {self.handle.dtype}; "
                "run it in a type with more range (bfloat16, float32), or get its files anew."
            )

        # Only rows at the end of their prompt or in decoding have logits.
        sampling = [index for index, row in enumerate(rows) if row.prompt_left <= batch.counts[index]]
        positions = [rows[index].position + batch.counts[index] for index in sampling]
        sampled = sample_rows(logits, [rows[index] for index in sampling], positions)
        return dict(zip(sampling, sampled, strict=True))

    @property
    def _capturing_seconds(self) -> float:
        """Seconds of compiling and capturing so far, which are no part of a row's."""
        return self.graphs.seconds if self.graphs is not None else 0.0

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Run the model under our attention function, and keep its last hidden states if a policy declares them."""

        def keep_hidden(_module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
            self._hidden = output[0][0]

        decoder = self.model.get_decoder()
        hook = decoder.register_forward_hook(keep_hidden) if self.collector.hidden else None
        try:
            with own_attention(self.model), self.backend.decoding(self.model):
                # The model may have been changed.
                if self.graphs is not None:
                    self.graphs.forget()
                yield
        finally:
            if hook is not None:
                hook.remove()

    # The cache.

    def _allocate(self) -> None:
        state = self.collector.token_state()
        window = self.collector.query_window
        queries = f" with {window:,} queries each" if window else ""
        sentence = f"A cache for {self.batch_size:,} sequences{queries} cannot be allocated"
        with refusal(sentence, MemoryError, RuntimeError):
            self.cache = self.new_cache(self.batch_size, state, window, self.storage)

        captures = not self.stateful and not self.storage.packed
        self.graphs = self.backend.graph_runner(self.cache, self.sampling) if captures else None
        prompts_alone = self.graphs is not None
        self.scheduler = Scheduler(self.cache, self.collector, self.sampling, prompts_alone)

    def new_cache(
        self, rows: int, token_state: dict[str, tuple[int, int]], query_window: int, storage: Storage
    ) -> KVCache:
        """Return an empty cache for the model, with the notes and recent queries of policies."""
        return KVCache(
            self.handle.shape,
            rows,
            token_state,
            query_window,
            self._device,
            self._dtype,
            self.backend.page_size,
            RowStates(self.model) if self.stateful else None,
            storage,
            self._key_biases,
            self.model,
            getattr(torch, self.handle.kv_dtype),
        )

    def reserve(self, planned: Peak) -> None:
        """Take the cache's memory of a plan at once on a GPU, where growth costs the captured steps.

        Where it is not there, the cache grows as it needs.
        """
        if self.cache.device.type != "cuda":
            return
        try:
            self.cache.make_room(planned.tokens, planned.longest)
            return
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        # The error held the tensors of the cache.
        self._renew(self.batch_size)

    def _renew(self, batch_size: int) -> None:
        """Replace the cache by an empty one for so many rows, and give all other memory back."""
        evicted = self.scheduler.evicted_tokens
        self.batch_size = batch_size
        self._allocate()
        self.scheduler.evicted_tokens = evicted
        gc.collect()
        if self.cache.device.type == "cuda":
            torch.cuda.empty_cache()
