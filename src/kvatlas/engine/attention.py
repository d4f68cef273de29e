"""The attention function that every model runs under, and the interface of what computes it.

Masks are ours alone: transformers builds none for an attention function without a registered mask function. The engine
gives it the backend and the batch of a pass as `kvatlas` (`models.attention.attention_function`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional as F

from kvatlas.core import KvatlasError
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import PAGE

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.native import Native

#: What transformers passes to layers whose attention is more than a softmax over earlier tokens.
UNSUPPORTED = {"softcap": "soft-capped attention", "s_aux": "attention sinks"}
#: Queries whose attention weights are held at a time where a policy asked to see them.
CHUNK = 256


class AttentionBackend(Protocol):
    """Writes the new keys and values of a batch into the cache and attends to all that is there."""

    name: str
    #: Tokens of a page of the cache that it reads.
    page_size: int

    def attend(
        self,
        batch: ForwardBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Attention [tokens, heads, head size] of new tokens; query [tokens, heads, head size], key and value [tokens,
        KV heads, head size]. A token sees what its sequence has cached and itself, of a `window` of positions if there
        is one. Adds the weights of watched sequences to `batch.attention`."""
        ...


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kvatlas: tuple[AttentionBackend, ForwardBatch],
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention interface wants it: query [1, heads, tokens, size], key and value [1, KV heads,
    tokens, size]; returns [1, tokens, heads, size] and None.

    Raises KvatlasError for layers whose attention is more than a softmax over earlier tokens, or whose tensors are not
    what the cache was made for.
    """
    refuse_unsupported(others)
    backend, batch = kvatlas
    layer: Any = getattr(module, "layer_idx", None)
    shapes = query.shape, key.shape, value.shape
    if attention_mask is not None or shapes != batch.layer_shapes or layer not in range(batch.cache.shape.layers):
        raise KvatlasError(_mismatch(batch, layer, shapes, attention_mask))
    batch.cache.scalings[layer] = scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    batch.remember(layer, query)
    return backend.attend(batch, layer, query, key, value, scaling, sliding_window)[None], None


def _mismatch(batch: ForwardBatch, layer: object, shapes: tuple[torch.Size, ...], mask: Tensor | None) -> str:
    if mask is not None:
        return f"The model masks tokens by a rule of its own (layer {layer})."
    expected, given = (", ".join(str(tuple(shape)) for shape in of) for of in (batch.layer_shapes, shapes))
    return (
        f"The model has layers of other shapes than its config.json says (layer {layer} of {batch.cache.shape.layers}: "
        f"query, key and value are {given}, expected {expected})."
    )


def refuse_unsupported(others: Mapping[str, Any]) -> None:
    """KvatlasError if a layer asks for attention that is more than a softmax over earlier tokens."""
    for name, what in UNSUPPORTED.items():
        if others.get(name) is not None:
            raise KvatlasError(
                f"The model has layers with {what}; expected attention to all earlier tokens or to a sliding window."
            )


class CpuBackend:
    """Native kernels: numbers of a token depend on its sequence alone, whatever else is in the batch."""

    name = "cpu"
    page_size = PAGE

    def __init__(self, native: Native) -> None:
        self.native = native

    def attend(
        self,
        batch: ForwardBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        cache = batch.cache
        places = None if window is None else cache.watch_window(layer, window)
        return self.native.attention(
            batch.paged,
            _dense(query),
            _dense(key),
            _dense(value),
            cache.keys[layer],
            cache.values[layer],
            scaling,
            window=window or 0,
            positions=batch.positions32 if window else None,
            places=places,
            mass=batch.attention[layer] if batch.watched else None,
        )


def _dense(heads: Tensor) -> Tensor:
    """[tokens, heads, size] with the heads of a token side by side."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


class ReferenceBackend:
    """Plain torch on any device: the oracle of the tests, and what is left where nothing faster can be had."""

    name = "reference"
    page_size = PAGE

    def attend(
        self,
        batch: ForwardBatch,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        cache, entered = batch.cache, batch.entered_slots
        cache.keys[layer][:, entered] = key.transpose(0, 1)
        cache.values[layer][:, entered] = value.transpose(0, 1)
        if window is not None:
            cache.watch_window(layer, window)[:, entered] = batch.positions32
        out = torch.empty_like(query)
        for group in batch.groups:
            keys, values = (pool[layer][:, group.slots].transpose(0, 1) for pool in (cache.keys, cache.values))
            visible = group.visible[:, None]
            if window is not None:
                near = cache.positions[layer][:, group.slots].transpose(0, 1)[:, :, None]
                visible = visible & (near > batch.positions[group.tokens][:, None, :, None] - window)
                visible = visible.repeat_interleave(query.shape[1] // key.shape[1], 1)
            asking = query[group.tokens].transpose(1, 2)
            grouped = query.shape[1] != key.shape[1]
            output = F.scaled_dot_product_attention(
                asking, keys, values, attn_mask=visible, scale=scaling, enable_gqa=grouped
            )
            out[group.tokens] = output.transpose(1, 2)
            for number, index in enumerate(batch.watched):
                if index in group.members:
                    at = group.members.index(index)
                    _add_attention(batch.attention[layer, number], asking[at], keys[at], visible[at], scaling)
        return out


def _add_attention(total: Tensor, query: Tensor, keys: Tensor, visible: Tensor, scaling: float) -> None:
    """Add what queries [heads, new, size] pay to keys [KV heads, cached, size] to `total` [KV heads, slots]."""
    heads, new, size = query.shape
    kv_heads, cached, _ = keys.shape
    for start in range(0, new, CHUNK):
        part = query[:, start : start + CHUNK].reshape(kv_heads, heads // kv_heads, -1, size)
        weights = part.float() @ keys.float().unsqueeze(1).transpose(-1, -2) * scaling
        seen = visible[:, start : start + CHUNK].expand(heads, -1, -1).reshape(weights.shape)
        total[:, :cached] += weights.masked_fill(~seen, float("-inf")).softmax(-1).mean(1).sum(1)
