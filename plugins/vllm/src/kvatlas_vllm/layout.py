"""Keys and values in the blocks of an attention backend, whatever their order inside a block.

vLLM has a function that writes keys and values into blocks, and none that reads them. The order is found by writing
numbers into an empty block.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class LayerCache:
    """The blocks of one layer, `layer` of vLLM's `static_forward_context`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.blocks: Tensor = layer.kv_cache
        self.scaling: float = layer.impl.scale
        self.size = (layer.num_kv_heads, layer.head_size)

    def write(self, blocks: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [tokens, KV heads, head size] into slots of blocks."""
        self.layer.impl.do_kv_cache_update(self.layer, key.contiguous(), value.contiguous(), blocks, slots)

    def read(self, block_ids: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first keys and values [tokens, KV heads, head size] of blocks."""
        content = self.blocks[block_ids].flatten(1)[:, self._places]
        keys, values = content.view(len(block_ids), 2, -1, *self.size).unbind(1)
        return keys.flatten(0, 1)[:tokens], values.flatten(0, 1)[:tokens]

    @cached_property
    def _places(self) -> Tensor:
        """The places in a block of all numbers of its keys, then of its values, by token, KV head and channel.

        The numbers of a block are counted, and each bit of these counts is written and read back: types of few bits
        hold 0 and 1.
        """
        empty = torch.zeros_like(self.blocks[:1])
        heads, channels = self.size
        slots = torch.arange(empty.numel() // (2 * heads * channels), device=empty.device)
        counts = torch.arange(empty.numel(), device=empty.device).view(2, len(slots), heads, channels)
        found = torch.zeros(empty.numel(), dtype=torch.long, device=empty.device)
        for bit in range(empty.numel().bit_length()):
            bits = (counts >> bit & 1).to(empty.dtype)
            self.write(empty, slots, bits[0], bits[1])
            found |= empty.flatten().long() << bit
        places = found.argsort()
        if not torch.equal(found[places], counts.flatten()):
            raise ValueError("kvatlas: this attention backend stores more or less than keys and values in its blocks.")
        return places
