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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from kvatlas.bits.key_biases import KeyBiases, find_key_biases
from kvatlas.core import CachedLayer, KvatlasError, Sampling, Shape, Storage, grouped, reason
from kvatlas.cpu.native import load
from kvatlas.engine.attention import AttentionBackend, PassAttention
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import KVCache
from kvatlas.engine.gpu.compiled import compiled_layers
from kvatlas.engine.gpu.flex import FlexBackend
from kvatlas.engine.gpu.graphs import CudaGraphRunner
from kvatlas.engine.native_backend import CpuBackend
from kvatlas.engine.parts import CachedSequence
from kvatlas.engine.reference import ReferenceBackend
from kvatlas.engine.rows import Generation, K, Request, Row
from kvatlas.engine.sampling import UNSAMPLED, follow_script, sample_rows
from kvatlas.engine.scheduler import CacheForm, Peak, Scheduler, cache_form
from kvatlas.engine.signals import SignalCollector
from kvatlas.forward import RowStates, attention_function, own_attention, reading, split_rows
from kvatlas.machine import compiles, out_of_memory
from kvatlas.policies import Policy, Signal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.models import ModelHandle

#: The largest mean difference of logits, in standard deviations, that may be rounding in fp32.
ROUNDING_FP32 = 1e-2
#: The same in shorter types.
ROUNDING_SHORT = 0.15
#: Of torch's compiler: FlexAttention is compiled for each number of sequences of each model, up to so many times, and
#: numbers of layers are constants.
COMPILING = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096, "specialize_float": True}
#: Models that passed the comparison with transformers.
_rehearsed: WeakSet[PreTrainedModel] = WeakSet()
#: The true shapes of models, by their layers.
_shapes: WeakKeyDictionary[PreTrainedModel, Shape] = WeakKeyDictionary()
#: The key biases of models; None for models without any.
_key_biases: WeakKeyDictionary[PreTrainedModel, KeyBiases | None] = WeakKeyDictionary()


def backend_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> AttentionBackend:
    """Return the backend `name` (cpu, flex, reference), or the fastest one for this device and type."""
    native = load() if device.type == "cpu" and dtype is torch.float32 else None
    if name is None and device.type == "cuda" and compiles(device):
        name = "flex"
    if name is None:
        name = "reference" if native is None else "cpu"
    if name == "cpu" and native is not None:
        return CpuBackend(native)
    if name == "flex":
        return FlexBackend(compiled=device.type == "cuda")
    if name == "reference":
        return ReferenceBackend()
    raise KvatlasError(f"The attention backend is {name!r}; expected 'reference' or 'flex' here.")


@contextmanager
def _without_hooks(model: PreTrainedModel) -> Iterator[None]:
    saved = []
    for module, kind in itertools.product(model.modules(), ("_forward_hooks", "_forward_pre_hooks")):
        saved.append((module, kind, getattr(module, kind)))
        setattr(module, kind, OrderedDict())
    try:
        yield
    finally:
        for module, kind, hooks in saved:
            setattr(module, kind, hooks)


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
        weight = next(model.parameters())
        policies = list(policies)
        self.collector = SignalCollector(policies)
        self.decoded_tokens = self.passes = 0
        self._device = weight.device
        self._dtype = weight.dtype
        whole_pages = backend_for(weight.device, weight.dtype, backend)
        #: The backends of sequences with whole pages, and of those in parts.
        self._backends = {False: whole_pages, True: whole_pages}
        if weight.device.type != "cpu":
            self._backends[True] = backend_for(weight.device, weight.dtype, "reference")
        #: The form of the cache, at first that of the first policy, if possible of one with whole pages.
        forms = sorted(map(self.form_of, policies), key=lambda form: form.in_parts)
        self.form = forms[0] if forms else CacheForm(Storage())
        self._finished: list[Generation[Any]] = []
        self._hidden: Tensor | None = None
        #: True if layers keep a state beside the KV cache.
        self.stateful = split_rows(model)
        if self.backend.name == "flex":
            # Weights are moved before the cache takes its memory.
            with compiled_layers(model):
                pass
        if model not in _shapes:
            _shapes[model], _key_biases[model] = self._measure_shape()
        # The config.json may differ.
        handle.keep_shape(_shapes[model])
        self._allocate()

    def form_of(self, policy: Policy) -> CacheForm:
        """Return the form of the cache in which a policy is decoded here."""
        return cache_form(policy, self._device.type)

    @property
    def storage(self) -> Storage:
        """The form of keys and values in the cache."""
        return self.form.storage

    @property
    def backend(self) -> AttentionBackend:
        """The backend that computes attention in the present form of the cache."""
        return self._backends[self.form.in_parts]

    def _allocate(self) -> None:
        state = self.collector.token_state(self.handle.shape)
        window = self.collector.query_window
        try:
            self.cache = self._new_cache(self.batch_size, state, window, self.storage)
        except (MemoryError, RuntimeError) as error:
            queries = f" with {window:,} queries each" if window else ""
            raise KvatlasError(
                f"A cache for {self.batch_size:,} sequences{queries} cannot be allocated ({reason(error)})."
            ) from error
        captured = self.backend.name == "flex" and not self.stateful and not self.storage.packed
        self.graphs = CudaGraphRunner(self.cache, self.sampling) if captured else None
        self.scheduler = Scheduler(
            self.handle, self.cache, self.collector, self.sampling, self.batch_size, prompts_alone=captured
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

    def _new_cache(
        self, rows: int, token_state: dict[str, tuple[int, int]], query_window: int, storage: Storage
    ) -> KVCache:
        states = RowStates(self.model) if self.stateful else None
        biases = _key_biases[self.model]
        place = self._device, self._dtype, self.backend.page_size
        return KVCache(self.handle.shape, rows, token_state, query_window, *place, states, storage, biases)

    @torch.inference_mode()
    def _measure_shape(self) -> tuple[Shape, KeyBiases | None]:
        """Return the shape of the model by the calls of attention of its layers, and the biases of their keys."""
        found: dict[int, tuple[int, int, CachedLayer]] = {}

        def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            layer_number = getattr(module, "layer_idx", len(found))
            layer = CachedLayer(layer_number, key.shape[3], value.shape[3])
            found[layer_number] = (query.shape[1], key.shape[1], layer)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

        with self._refusing(), _without_hooks(self.model), own_attention(self.model), attention_function(record):
            self.model(input_ids=torch.tensor([[0, 1]], device=self._device), use_cache=False)
        heads = {(query, key) for query, key, _ in found.values()}
        if not heads:
            raise self._refusal("has no layers that attend by transformers' attention interface")
        if len(heads) > 1:
            raise self._refusal("has layers with unlike numbers of heads")
        ((query, key),) = heads
        layers = tuple(layer for _, (_, _, layer) in sorted(found.items()))
        planned = self.handle.shape
        # Rows of keys are as long as they were planned.
        biases = find_key_biases(self.model, sorted(found)) if planned.key_biases else None
        measured = replace(
            planned,
            layers=len(layers),
            heads=query,
            kv_heads=key,
            head_dim=layers[0].key,
            by_layer=layers,
            key_biases=biases is not None,
        )
        return measured, biases

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn exceptions into a KvatlasError that the model cannot be decoded."""
        try:
            yield
        except Exception as error:
            if isinstance(error, KvatlasError) or out_of_memory(error):
                raise
            name = type(error).__name__
            raise self._refusal(f"does not run under the engine ({name}: {reason(error)})") from error

    @property
    def active_rows(self) -> int:
        return len(self.scheduler.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.cached.tokens for row in list(self.scheduler.rows))

    @property
    def evicted_tokens(self) -> int:
        return self.scheduler.evicted_tokens

    def run(self, requests: Iterable[Request[K] | None]) -> Iterator[Generation[K]]:
        """Decode all requests, taken as rows become free; yield generations as they finish, in no fixed order.

        A source without a request now but perhaps later gives None: active rows continue, and it is polled again.
        Settings of one form share the cache and trunks; those of another one are decoded after the last request.
        """
        if self.model not in _rehearsed:
            with _without_hooks(self.model):
                self._rehearse()
            _rehearsed.add(self.model)
        later: dict[CacheForm, list[Request[K]]] = {}
        yield from self._decode(self._defer_other_forms(requests, later))
        while later:
            self.form, waiting = later.popitem()
            self._renew(self.batch_size)
            yield from self._decode(iter(waiting))

    def _defer_other_forms(
        self, requests: Iterable[Request[K] | None], later: dict[CacheForm, list[Request[K]]]
    ) -> Iterator[Request[K] | None]:
        """Yield the requests with their settings of the present form; put the other settings into `later`."""
        for request in requests:
            by_form = self._by_form(request) if request is not None else {}
            current = by_form.pop(self.form, None)
            for form, others in by_form.items():
                assert request is not None
                later.setdefault(form, []).append(replace(request, policies=tuple(others)))
            if by_form and request is not None and current:
                request = replace(request, policies=tuple(current))
            yield request if current else None

    def _by_form(self, request: Request[K]) -> dict[CacheForm, list[Policy]]:
        """Return the policies of a request by the form of their caches."""
        by_form = grouped(request.policies, self.form_of)
        if request.script and len(by_form) > 1:
            # All settings of a script are read side by side, if need be in parts.
            return {max(by_form, key=lambda form: form.in_parts): list(request.policies)}
        return by_form

    def _decode(self, source: Iterator[Request[K] | None]) -> Iterator[Generation[K]]:
        self._finished = []
        again: Iterator[Request[K]] = iter(())
        with self._attention():
            while True:
                try:
                    yield from self._run(itertools.chain(again, source))
                    return
                except (MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    unfinished = [*self.scheduler.unfinished(), *again]
                    self._check_half_batch(unfinished, error)
                again = iter(unfinished)
                self._renew(self.batch_size // 2)

    def _check_half_batch(self, unfinished: Sequence[Request[K]], error: BaseException) -> None:
        """Raise KvatlasError if these requests cannot start again with half the rows after an out-of-memory error."""
        # All settings of a script are read side by side.
        least = max((len(request.policies) for request in unfinished if request.script), default=1)
        if self.batch_size // 2 < least:
            sequences = "one sequence" if least == 1 else f"{least} sequences"
            raise KvatlasError(
                f"The memory of this machine does not suffice for {sequences} of {self.handle.name!r} "
                f"({reason(error)})."
            ) from None

    def _run(self, requests: Iterable[Request[K] | None]) -> Iterator[Generation[K]]:
        self.scheduler.begin(requests)
        while self.scheduler.admit() or self._finished:
            if self.scheduler.rows:
                self._step()
            while self._finished:
                yield self._finished.pop(0)

    def _renew(self, batch_size: int) -> None:
        # All other memory is given back.
        evicted = self.scheduler.evicted_tokens
        self.batch_size = batch_size
        self._allocate()
        self.scheduler.evicted_tokens = evicted
        gc.collect()
        if self.cache.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Raise KvatlasError if the engine computes other logits than the model on its own.

        Two short texts are read side by side in one batch, each in two chunks and a last token, by the kernels of
        prompts and of decoding.
        """
        tokens = (torch.arange(21) * 7 % self.handle.vocabulary).tolist()
        texts = [tokens[:12], tokens[12:]]
        lengths = [len(text) - 5 for text in texts]
        cache = self._new_cache(len(texts), {}, 0, Storage())
        rows = [cache.begin() for _ in texts]
        with self._refusing():
            ids = [torch.tensor([text], device=cache.device) for text in texts]
            expected = torch.cat([self.model(input_ids=row, use_cache=False).logits[0, 4:].float() for row in ids])
            with self._attention():
                self._read_chunk(cache, rows, [text[:4] for text in texts])
                chunk = self._read_chunk(cache, rows, [text[4:-1] for text in texts])
                last = self._read_chunk(cache, rows, [text[-1:] for text in texts])
        # In the order of the texts.
        logits = torch.cat([*itertools.chain(*zip(torch.split(chunk, lengths), torch.split(last, 1), strict=True))])
        if cache.states is not None:
            _shapes[self.model] = replace(self.handle.shape, state_bytes=cache.states.bytes(rows[0].row))
            self.handle.keep_shape(_shapes[self.model])
        self._check_window(cache)
        # Logits may all be equal.
        spread = expected.std(-1).clamp(min=1e-30)
        off = float(((logits.float() - expected).abs().mean(-1) / spread).mean())
        rounding = ROUNDING_FP32 if self.handle.precision == "float32" else ROUNDING_SHORT
        if expected.isfinite().all() and not off <= rounding:
            raise self._refusal(f"would compute other logits than in transformers (by {off:.2g} standard deviations)")

    def _read_chunk(self, cache: KVCache, rows: list[CachedSequence], chunks: list[list[int]]) -> Tensor:
        """Read the next tokens of each row into the cache, and return their logits."""
        for row, tokens in zip(rows, chunks, strict=True):
            cache.reserve(row, row.length + len(tokens))
        logits, _ = self._forward(ForwardBatch(cache, rows, chunks, [row.length for row in rows]))
        for row, tokens in zip(rows, chunks, strict=True):
            row.length += len(tokens)
        return logits

    def _check_window(self, cache: KVCache) -> None:
        """Raise KvatlasError if the model has a sliding window that its layers did not pass to attention."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        if getattr(config, "sliding_window", None) and "sliding_attention" in kinds and not cache.positions:
            raise self._refusal("does not tell its layers' sliding window")

    def _refusal(self, fault: str) -> KvatlasError:
        return KvatlasError(f"The model {self.handle.name!r} cannot be decoded: it {fault}.")

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Run the model under our attention function, and keep its last hidden states if a policy declares them."""
        decoder = self.model.get_decoder()
        hook = decoder.register_forward_hook(self._keep_hidden) if self.collector.hidden else None
        layers = compiled_layers(self.model) if self.backend.name == "flex" else nullcontext()
        try:
            with own_attention(self.model), layers:
                # The model may have been changed.
                if self.graphs is not None:
                    self.graphs.forget()
                yield
        finally:
            if hook is not None:
                hook.remove()

    def _keep_hidden(self, _module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
        self._hidden = output[0][0]

    @torch.inference_mode()
    def _step(self) -> None:
        began = time.perf_counter() - self._capturing_seconds
        rows, new_tokens = self.scheduler.next_step()
        batch = self._batch(rows, new_tokens)
        prompts = [len(row.request.prompt) if row.prompt_left else None for row in rows]
        logits, hidden, ready = self._pass(rows, batch)
        self.collector.notify(self.handle, batch, [row.signals for row in rows], prompts, hidden)
        sampled = self._sample(rows, batch, logits, ready)
        self.passes += 1
        share = (time.perf_counter() - self._capturing_seconds - began) / batch.starts[-1]
        for row, count, prompt, tokens in zip(rows, batch.counts, prompts, sampled, strict=True):
            row.seconds += share * count
            ended = self._take(row, count, tokens, prompt is not None)
            if ended:
                self._finished += row.generations(self.handle)
                self.scheduler.finish(row)
            elif prompt is None and (due := row.due()):
                self.scheduler.fork(row, due)

    @property
    def _capturing_seconds(self) -> float:
        """Seconds of compiling and capturing so far, which are no part of a row's."""
        return self.graphs.seconds if self.graphs is not None else 0.0

    def _batch(self, rows: Sequence[Row[Any]], new_tokens: Sequence[Sequence[int]]) -> ForwardBatch:
        for row, tokens in zip(rows, new_tokens, strict=True):
            self.cache.reserve(row.cached, row.cached.length + len(tokens))
        signals = [row.signals for row in rows]
        return ForwardBatch(
            self.cache,
            [row.cached for row in rows],
            new_tokens,
            [row.position for row in rows],
            watched=self.collector.asking(Signal.ATTENTION, signals),
            remembered=self.collector.asking(Signal.QUERIES, signals),
        )

    def _pass(self, rows: Sequence[Row[Any]], batch: ForwardBatch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logits and hidden states; from a captured step also the sampled tokens, if all rows sample alike."""
        step = None
        if self.graphs is not None:
            step = self.graphs.run(batch, [row.request.stream for row in rows], self._forward)
        if step is None:
            needed = None if batch.decoding else _tokens_with_logits(rows, batch)
            logits, hidden = self._forward(batch, needed)
            return logits, hidden, None
        # A captured batch has idle sequences behind the rows.
        count = len(rows)
        hidden = None if step.hidden is None else step.hidden[:count]
        alike = {row.sampling for row in rows} == {step.sampling}
        plain = alike and not any(row.request.logits_processor or row.request.script for row in rows)
        return step.logits[:count], hidden, step.sampled[:count] if plain else None

    def _forward(self, batch: ForwardBatch, needed: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return logits [needed tokens or all, vocabulary] and last hidden states [tokens, hidden size]."""
        every = needed is None or len(needed) == batch.starts[-1]
        # Of this pass alone: other engines may decode in turns with this one, or in another thread.
        compiling = torch._dynamo.config.patch(COMPILING) if self.backend.name == "flex" else nullcontext()
        with attention_function(PassAttention(self.backend, batch)), reading(batch), compiling:
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
    ) -> list[list[int]]:
        """Return the new tokens of each row, empty for rows within their prompt; `ready` are tokens of a graph."""
        if ready is not None and UNSAMPLED not in (tokens := ready.tolist()):
            return [[token] for token in tokens]
        if logits.shape[0] and not math.isfinite(logits.amax(-1).abs().amax()):
            raise KvatlasError(
                f"The model {self.handle.name!r} computed logits that are no finite numbers in {self.handle.dtype}; "
                "run it in a type with more range (bfloat16, float32), or get its files anew."
            )
        if rows[0].request.script:
            return follow_script(logits, rows, batch.counts[0])
        # Only rows at the end of their prompt or in decoding have logits.
        sampling_rows = []
        positions = []
        for row, count in zip(rows, batch.counts, strict=True):
            if row.prompt_left <= count:
                sampling_rows.append(row)
                positions.append(row.position + count)
        sampled = iter(sample_rows(logits, sampling_rows, positions))
        return [
            [next(sampled)] if row.prompt_left <= count else [] for row, count in zip(rows, batch.counts, strict=True)
        ]

    def _take(self, row: Row[Any], count: int, tokens: Sequence[int], prompt: bool) -> bool:
        """Note that `count` tokens went into a row's cache, and its new `tokens`; return True if it has finished."""
        length = row.cached.tokens
        row.cached.length += count
        row.position += count
        if prompt:
            row.prompt_left -= count
            row.kv_peak = row.cached.tokens
        for cached, token in enumerate(tokens, length + 1):
            self.decoded_tokens += 1
            if not prompt:
                row.kv_peak = max(row.kv_peak, cached)
                row.kv_sum += cached
            if row.append(self.handle, token):
                return True
        return False


def _tokens_with_logits(rows: Sequence[Row[Any]], batch: ForwardBatch) -> list[int]:
    """Return the new tokens of a batch whose logits are needed: of prompts the last token alone."""
    needed: list[int] = []
    for row, start, end in zip(rows, batch.starts, batch.starts[1:], strict=False):
        if not row.prompt_left:
            needed += range(start, end)
        elif row.prompt_left <= end - start:
            needed.append(end - 1)
    return needed
