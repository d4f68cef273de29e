"""The loss of attention by packed keys, layer by layer: large channels make those beside them coarse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.bits.key_biases import find_key_biases
from kvatlas.bits.storage import pack_bits, turn, unpack_bits
from kvatlas.core import Shape, Storage
from kvatlas.forward import attention_function, own_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: The last queries of a text, which see the most keys.
QUERIES = 64


@torch.inference_mode()
def key_divergences(model: PreTrainedModel, shape: Shape, tokens: Sequence[int], storage: Storage) -> list[float]:
    """Return the divergence of attention to packed keys from that to exact ones, in nats, for each cached layer.

    It is the mean over heads and the last queries of a text, without windows, soft caps and sinks.
    """
    device = next(model.parameters()).device
    positions = torch.arange(len(tokens), device=device)
    biases = find_key_biases(model, list(shape.place)) if shape.key_biases else None
    if biases is not None:
        biases.angles(len(tokens))
    divergences = [0.0] * shape.layers

    def read_back(place: int, keys: Tensor) -> Tensor:
        """Return keys [KV heads, tokens, size] as a packed cache gives them back."""
        bias = None if biases is None else biases.rotated(place, positions).transpose(0, 1)
        stored = keys if bias is None else turn(keys - bias)
        back = unpack_bits(
            pack_bits(stored, storage.key_bits, storage.group), keys.shape[-1], storage.key_bits, storage.group
        )
        return back if bias is None else turn(back) + bias

    def seen(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any) -> Any:
        place = shape.place[module.layer_idx]
        keys = key[0].float()
        newest = query[0, :, -QUERIES:].float() * scaling
        visible = positions <= positions[-QUERIES:, None]
        exact = _log_weights(newest, keys, visible)
        packed = _log_weights(newest, read_back(place, keys), visible)
        lost = torch.where(visible, exact.exp() * (exact - packed), 0.0)
        divergences[place] = float(lost.sum(-1).mean())
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2), None

    with own_attention(model), attention_function(seen):
        model(input_ids=torch.tensor([list(tokens)], device=device), position_ids=positions[None], use_cache=False)
    return divergences


def _log_weights(queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Return log softmax of the products of queries [heads, queries, size] and keys [KV heads, tokens, size]."""
    keys = keys.repeat_interleave(len(queries) // len(keys), 0)
    return (queries @ keys.mT).masked_fill(~visible, float("-inf")).log_softmax(-1)
