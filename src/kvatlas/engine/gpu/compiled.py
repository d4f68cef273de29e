"""Decoder layers of Llama's form on GPUs: compiled parts before and after attention instead of some forty kernels.

The kernels of one decoding step are so short that starting them takes a quarter of its time. Weights that read the same
input (queries, keys and values; gate and up) lie side by side in one table, of which the model's own are views.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.cpu.fused import FusedDecoder, window_of
from kvatlas.cpu.packing import JOINED, is_plain_llama
from kvatlas.forward import attend
from kvatlas.machine import compiled, compiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The short `forward` of decoders, with the addresses of the weights that it was made for.
_short_forms: WeakKeyDictionary[Any, tuple[tuple[int, ...], FusedDecoder]] = WeakKeyDictionary()


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Give a shorter `forward` to a decoder on a GPU that consists of layers of Llama's form alone, under
    `own_attention`. Modules and weights may be replaced, and hooks be added, between two calls."""
    decoder = model.get_decoder()
    short = _short_form(decoder) if model.device.type == "cuda" and compiles(model.device) else None
    if short is None:
        yield
        return
    decoder.forward = short
    try:
        yield
    finally:
        del decoder.forward


def _short_form(decoder: Any) -> FusedDecoder | None:
    """Return the short `forward` of a decoder, made once for the same weights; None for one of another form."""
    if not is_plain_llama(decoder):
        return None
    addresses = tuple(parameter.data_ptr() for parameter in decoder.parameters())
    known_addresses, short = _short_forms.get(decoder, ((), None))
    if short is None or addresses != known_addresses:
        # Joining the weights moves them.
        short = FusedDecoder(decoder, [CompiledLayer(layer) for layer in decoder.layers])
        addresses = tuple(parameter.data_ptr() for parameter in decoder.parameters())
        _short_forms[decoder] = (addresses, short)
    return short


class CompiledLayer:
    """A decoder layer of Llama's form whose parts before and after attention are compiled."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self.attention = attention
        self.size = attention.head_dim
        self.scaling = attention.scaling
        self.window = window_of(attention)
        projections = [getattr(attention, name) for name in JOINED[0]]
        self.heads = [projection.out_features // self.size for projection in projections]
        turned = sum(self.heads[:2]) if getattr(attention, "use_rope", True) else 0

        first_norm = layer.input_layernorm
        second_norm = layer.post_attention_layernorm
        down = layer.mlp.down_proj
        self.before = (first_norm.weight, first_norm.variance_epsilon, *_join_weights(projections), self.size, turned)
        self.after = (
            *(attention.o_proj.weight, attention.o_proj.bias, second_norm.weight, second_norm.variance_epsilon),
            *(*_join_weights([getattr(layer.mlp, name) for name in JOINED[1]]), down.weight, down.bias),
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for x [tokens, hidden size]; cos and sin [1, tokens, head size]."""
        # Compiled once for all numbers of tokens but one.
        for tensor, dimension in ((x, 0), (cos, 1), (sin, 1)):
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        table = _compiled(_before)(x, cos, sin, *self.before)
        query, key, value = torch.split(table.transpose(0, 1)[None], self.heads, 1)
        seen, _ = attend(self.attention, query, key, value, None, scaling=self.scaling, sliding_window=self.window)
        seen = seen.reshape(len(x), -1)
        torch._dynamo.maybe_mark_dynamic(seen, 0)
        out: Tensor = _compiled(_after)(x, seen, *self.after)
        return out


_compiled = cache(compiled)


def _join_weights(layers: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases of layers side by side, and make those of the layers views of them."""
    sizes = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight.data for layer in layers])
    for layer, rows in zip(layers, torch.split(weight, sizes), strict=True):
        layer.weight.data = rows

    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers]
    bias = torch.cat(biases)
    for layer, entries in zip(layers, torch.split(bias, sizes), strict=True):
        if layer.bias is not None:
            layer.bias.data = entries
    return weight, bias


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""
    exact = x.float()
    scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(x.dtype)


def _before(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    epsilon: float,
    weight: Tensor,
    bias: Tensor | None,
    size: int,
    turned: int,
) -> Tensor:
    """Return queries, keys and values [tokens, heads, size]; the first `turned` heads are rotated."""
    heads = F.linear(_norm(x, norm, epsilon), weight, bias).view(len(x), -1, size)
    rotary = heads[:, :turned]
    half = size // 2
    crossed = torch.cat((-rotary[..., half:], rotary[..., :half]), -1)
    rotated = rotary * cos[0, :, None] + crossed * sin[0, :, None]
    return torch.cat((rotated, heads[:, turned:]), 1)


def _after(
    x: Tensor,
    seen: Tensor,
    output: Tensor,
    output_bias: Tensor | None,
    norm: Tensor,
    epsilon: float,
    inner: Tensor,
    inner_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
) -> Tensor:
    """Return the output of a layer for its input x and what its heads have seen, both [tokens, hidden size]."""
    x = x + F.linear(seen, output, output_bias)
    gate, up = F.linear(_norm(x, norm, epsilon), inner, inner_bias).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down, down_bias)
