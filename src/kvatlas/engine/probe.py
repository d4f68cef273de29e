"""Probes of a model before it is decoded: the true shape of its layers, and a comparison with transformers.

What a probe finds is kept by model, so that further engines of the model need none.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from kvatlas.bits.key_biases import KeyBiases, find_key_biases
from kvatlas.core import CachedLayer, KvatlasError, Shape, Storage, reason
from kvatlas.engine.batch import ForwardBatch
from kvatlas.forward import attention_function, own_attention
from kvatlas.machine import out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvatlas.engine.cache import KVCache
    from kvatlas.models import ModelHandle

#: The largest mean difference of logits, in standard deviations, that may be rounding in fp32.
ROUNDING_FP32 = 1e-2
#: The same in shorter types.
ROUNDING_SHORT = 0.15
#: Models that passed the comparison with transformers.
_rehearsed: WeakSet[PreTrainedModel] = WeakSet()
#: The true shapes of models, by their layers, and the key biases; None for models without any.
_measured: WeakKeyDictionary[PreTrainedModel, tuple[Shape, KeyBiases | None]] = WeakKeyDictionary()


def measure_shape(handle: ModelHandle, model: PreTrainedModel) -> tuple[Shape, KeyBiases | None]:
    """Return the shape of a model by the calls of attention of its layers, and the biases of their keys.

    Raises KvatlasError for a model that cannot be decoded.
    """
    if model in _measured:
        return _measured[model]
    planned = handle.shape
    found: dict[int, tuple[int, int, int, int]] = {}

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        layer_number = getattr(module, "layer_idx", len(found))
        found[layer_number] = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    device = next(model.parameters()).device
    with (
        torch.inference_mode(),
        _refusing(handle),
        _without_hooks(model),
        own_attention(model),
        attention_function(record),
    ):
        model(input_ids=torch.tensor([[0, 1]], device=device), use_cache=False)

    heads = {(query, key) for query, key, _, _ in found.values()}
    if not heads:
        raise _undecodable(handle, "has no layers that attend by transformers' attention interface")
    if len(heads) > 1:
        raise _undecodable(handle, "has layers with unlike numbers of heads")

    # Rows of keys are as long as they were planned.
    biases = find_key_biases(model, sorted(found)) if planned.key_biases else None
    ((query_heads, kv_heads),) = heads
    layers = tuple(CachedLayer(layer_number, *sizes) for layer_number, (_, _, *sizes) in sorted(found.items()))
    shape = replace(
        planned,
        layers=len(layers),
        heads=query_heads,
        kv_heads=kv_heads,
        head_dim=layers[0].key,
        by_layer=layers,
        key_biases=biases is not None,
    )
    _measured[model] = (shape, biases)
    return shape, biases


@torch.inference_mode()
def rehearse(
    handle: ModelHandle,
    model: PreTrainedModel,
    new_cache: Callable[..., KVCache],
    attending: Callable[[], AbstractContextManager[None]],
    forward: Callable[[ForwardBatch], tuple[Tensor, Tensor | None]],
) -> None:
    """Raise KvatlasError if an engine computes other logits than the model on its own.

    Two short texts are read side by side in one batch, each in two chunks and a last token, by the kernels of prompts
    and of decoding. `new_cache`, `attending` and `forward` are those of the engine.
    """
    if model in _rehearsed:
        return
    tokens = (torch.arange(21) * 7 % handle.vocabulary).tolist()
    texts = [tokens[:12], tokens[12:]]
    cache = new_cache(len(texts), {}, 0, Storage())
    rows = [cache.begin() for _ in texts]

    def read(chunks: list[list[int]]) -> Tensor:
        """Read the next tokens of each row into the cache, and return their logits."""
        for row, chunk in zip(rows, chunks, strict=True):
            cache.reserve(row, row.length + len(chunk))
        logits, _ = forward(ForwardBatch(cache, rows, chunks, [row.length for row in rows]))
        for row, chunk in zip(rows, chunks, strict=True):
            row.length += len(chunk)
        return logits

    with _refusing(handle), _without_hooks(model):
        ids = [torch.tensor([text], device=cache.device) for text in texts]
        expected = torch.cat([model(input_ids=row, use_cache=False).logits[0, 4:].float() for row in ids])
        with attending():
            read([text[:4] for text in texts])
            chunk = read([text[4:-1] for text in texts])
            last = read([text[-1:] for text in texts])

    # Layers with a state have one now.
    if cache.states is not None:
        shape, biases = _measured[model]
        shape = replace(shape, state_bytes=cache.states.bytes(rows[0].row))
        _measured[model] = (shape, biases)
        handle.keep_shape(shape)

    # A sliding window has to be passed to attention.
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if getattr(config, "sliding_window", None) and "sliding_attention" in kinds and not cache.positions:
        raise _undecodable(handle, "does not tell its layers' sliding window")

    # The logits in the order of the texts, in standard deviations; they may all be equal.
    by_text = torch.split(chunk, [len(text) - 5 for text in texts])
    logits = torch.cat([*itertools.chain(*zip(by_text, torch.split(last, 1), strict=True))])
    spread = expected.std(-1).clamp(min=1e-30)
    off = float(((logits.float() - expected).abs().mean(-1) / spread).mean())
    rounding = ROUNDING_FP32 if handle.precision == "float32" else ROUNDING_SHORT
    if expected.isfinite().all() and not off <= rounding:
        raise _undecodable(
            handle, f"would compute other logits than in transformers (by {off:.2g} standard deviations)"
        )
    _rehearsed.add(model)


@contextmanager
def _refusing(handle: ModelHandle) -> Iterator[None]:
    """Turn exceptions into a KvatlasError that the model cannot be decoded."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KvatlasError) or out_of_memory(error):
            raise
        name = type(error).__name__
        raise _undecodable(handle, f"does not run under the engine ({name}: {reason(error)})") from error


def _undecodable(handle: ModelHandle, fault: str) -> KvatlasError:
    return KvatlasError(f"The model {handle.name!r} cannot be decoded: it {fault}.")


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
