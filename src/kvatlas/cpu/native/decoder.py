"""Decoder layers of Llama's form on the CPU kernels: one call for all, or two for each around another attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import TYPE_CHECKING, NamedTuple

from kvatlas.cpu.native import PagedLayer

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.cpu.native import Linear, PagedBatch


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "kind")),
    ]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Product) for name in ("projections", "output", "inner", "down")),
        *((name, c_void_p) for name in ("input_norm", "inner_norm")),
        *((name, c_double) for name in ("input_eps", "inner_eps")),
        *((name, c_int64) for name in ("rotary_heads", "head_size")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int64),
        *((name, c_void_p) for name in ("cos", "sin", "states", "normed", "heads", "seen", "inner", "gated", "bytes")),
    ]


class Products(NamedTuple):
    """The linear layers of a decoder layer: queries, keys and values are one product, gate and up another."""

    projections: Linear
    output: Linear
    inner: Linear
    down: Linear

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Numbers of a token between the products: hidden, heads, seen, inner and gated."""
        return (
            self.projections.inputs,
            self.projections.outputs,
            self.output.inputs,
            self.inner.outputs,
            self.down.inputs,
        )

    @property
    def fits(self) -> bool:
        """True if each product takes what the one before it gives."""
        hidden, _, _, inner, gated = self.widths
        return hidden == self.output.outputs == self.inner.inputs == self.down.outputs and inner == 2 * gated


class DecoderPass:
    """The new tokens of a pass: their hidden `states` [tokens, hidden], which each layer replaces, and working memory.

    `cos` and `sin` [1, tokens, head size] rotate queries and keys. `heads` [tokens, heads * size] are the queries, keys
    and values of the last layer, `seen` [tokens, heads * size] is the output of its attention.
    """

    def __init__(self, states: Tensor, cos: Tensor, sin: Tensor, products: Products) -> None:
        tokens = len(states)
        hidden, heads, seen, inner, gated = products.widths
        # A copy, because the layers write into it.
        self.states = states.clone().contiguous()
        self.heads = states.new_empty(tokens, heads)
        self.seen = states.new_empty(tokens, seen)
        normed = states.new_empty(tokens, hidden)
        widest = max([product.inputs for product in products if product.in_bytes], default=0)
        byte_words = products.projections.library.kvatlas_byte_words(tokens, widest)
        work = (
            *(normed, self.heads, self.seen, states.new_empty(tokens, inner), states.new_empty(tokens, gated)),
            states.new_empty(byte_words),
        )
        #: Held as long as their addresses are.
        self.tensors = (cos.contiguous(), sin.contiguous(), self.states, *work)
        self.struct = _Pass(tokens, *(tensor.data_ptr() for tensor in self.tensors))
        self.address = ctypes.addressof(self.struct)


class DecoderLayer:
    """A layer of Llama's form over packed products; `norms` are the weights and epsilons of its two normalisations.

    The first `rotary_heads` of its queries and keys are rotated; all heads have `head_size` numbers.
    """

    def __init__(
        self, norms: Sequence[tuple[Tensor, float]], products: Products, rotary_heads: int, head_size: int
    ) -> None:
        self.norms = norms
        self.products = products
        self.library = products.projections.library
        (_, input_eps), (_, inner_eps) = norms
        linear = [_Product(*product.addresses, product.inputs, product.outputs, product.kind) for product in products]
        self.struct = _DecoderLayer(*linear, None, None, input_eps, inner_eps, rotary_heads, head_size)
        self.address = ctypes.addressof(self.struct)

    def _find_norms(self) -> None:
        # The owner of these weights may have replaced them.
        self.struct.input_norm = self.norms[0][0].data_ptr()
        self.struct.inner_norm = self.norms[1][0].data_ptr()

    def project(self, tokens: DecoderPass) -> None:
        """Compute queries, keys and values, rotated, from the states: the part before attention."""
        self._find_norms()
        self.library.kvatlas_project(self.address, tokens.address)

    def feed_forward(self, tokens: DecoderPass) -> None:
        """Add the output of attention in `tokens.seen` and of the feed-forward layer to the states."""
        self._find_norms()
        self.library.kvatlas_feed_forward(self.address, tokens.address)

    @staticmethod
    def compute(
        layers: Sequence[DecoderLayer], tokens: DecoderPass, batch: PagedBatch, paged_layers: Sequence[PagedLayer]
    ) -> None:
        """Compute whole layers, one after the other in one call, with attention over a paged cache."""
        for layer in layers:
            layer._find_norms()
        count = len(layers)
        addresses = (c_void_p * count)(*(layer.address for layer in layers))
        paged = (PagedLayer * count)(*paged_layers)
        layers[0].library.kvatlas_decoder_layers(addresses, paged, count, tokens.address, batch.address)
