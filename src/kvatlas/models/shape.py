"""The sizes of a model that decide the memory of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvatlas.core import POSITION_BYTES, Storage


class CachedLayer(NamedTuple):
    """A layer with a KV cache: its place among all layers of the model, and the sizes of a head's key and value."""

    layer_number: int
    key: int
    value: int


@dataclass(frozen=True)
class Shape:
    """The sizes that decide the memory of a cached token.

    `layers` counts the layers with a KV cache, `head_dim` is the size of their keys: those of config.json until the
    model is loaded, then the true ones. `by_layer` are the cached layers if they are not all alike, `state_bytes` is
    the size of the states of one row. With `key_biases`, packed keys have their position beside them.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    by_layer: tuple[CachedLayer, ...] = ()
    state_bytes: int = 0
    key_biases: bool = False

    @cached_property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """The layers with a KV cache, in order."""
        return self.by_layer or tuple(CachedLayer(n, self.head_dim, self.head_dim) for n in range(self.layers))

    @cached_property
    def place(self) -> dict[int, int]:
        """The place of each cached layer in the cache, by its number in the model."""
        return {layer.layer_number: place for place, layer in enumerate(self.cached_layers)}

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        """Return the bytes of keys and values of one token over all layers and heads."""
        return self.kv_bytes(Storage(), bytes_per_value)[0]

    def kv_bytes(self, storage: Storage, bytes_per_value: int = 4) -> tuple[int, int]:
        """Return the bytes of keys and values over all layers and heads: of each token, and of each sequence besides.

        The latter are the unpacked copies of its newest tokens.
        """
        token_bytes = 0
        sequence_bytes = 0
        for layer in self.cached_layers:
            for size, bits in ((layer.key, storage.key_bits), (layer.value, storage.value_bits)):
                if bits < 16:
                    token_bytes += storage.row_bytes(bits, size)
                    sequence_bytes += storage.residual * size * bytes_per_value
                else:
                    token_bytes += size * bytes_per_value
            if self.key_biases and storage.key_bits < 16:
                token_bytes += POSITION_BYTES
        return self.kv_heads * token_bytes, self.kv_heads * sequence_bytes
