"""Sequences whose layers and KV heads hold unlike numbers of tokens: the parts of their pages.

A page has one part for each layer and KV head. Such a sequence shares out the parts of its pages among its heads as
they need them, so that a head with few tokens leaves its parts to another one, of any layer. Its tokens are counted in
the longest head: a head with `missing` fewer has its first token at the index `missing`. New tokens enter all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvatlas.core import Shape

#: Heads get their parts for so many further tokens, because all heads of a sequence are looked at for them.
AHEAD = 16


@dataclass(eq=False)
class CachedSequence:
    """A sequence in the cache: `length` tokens in `pages`; `row` is its index in the tensors per sequence.

    If its heads have unlike numbers of tokens, `length` is that of the longest one, whose mean is `shortfall` less;
    `spare` [layers] are the parts of its pages that no head has, and there is `room` for so many tokens.
    """

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    shortfall: int = 0
    spare: list[list[int]] | None = None
    room: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that a head has in the mean."""
        return self.length - self.shortfall


class PartTables:
    """The parts of all sequences that have some, by their rows.

    `table` [rows, layers, KV heads, width] int32 lists the parts of each head: part (page * layers + layer) * KV heads
    + head is what the page has for that head in the pool of that layer. `missing` [rows, layers, KV heads] int32 is -1
    for sequences with whole pages.
    """

    def __init__(self, shape: Shape, rows: int, page_size: int, device: torch.device) -> None:
        self.layers = shape.layers
        self.kv_heads = shape.kv_heads
        self.page_size = page_size
        size = (rows, shape.layers, shape.kv_heads)
        self.table = torch.zeros(*size, 0, dtype=torch.int32, device=device)
        self.missing = torch.full(size, -1, dtype=torch.int32, device=device)
        #: The number of parts of each head.
        self.counts = torch.zeros(size, dtype=torch.long)

    def forget(self, row: int) -> None:
        self.missing[row] = -1
        self.counts[row] = 0

    def begin(self, sequence: CachedSequence, missing: Tensor, tokens: int, take: Callable[[int], list[int]]) -> None:
        """Give a sequence without pages parts for so many tokens; `missing` [layers, KV heads]."""
        self.counts[sequence.row] = 0
        self.missing[sequence.row] = missing
        sequence.shortfall = int(missing.sum()) // missing.numel()
        sequence.spare = [[] for _ in range(self.layers)]
        sequence.room = 0
        self.reserve(sequence, tokens, take)

    def reserve(self, sequence: CachedSequence, tokens: int, take: Callable[[int], list[int]]) -> None:
        """Give every head parts for so many tokens of the longest one; `take` gives new pages."""
        if tokens <= sequence.room:
            return
        sequence.room = tokens + AHEAD
        counts = self.counts[sequence.row]
        needed = -(-(sequence.room - self.missing[sequence.row].cpu().long()) // self.page_size)
        new = (needed - counts).clamp(min=0)

        # New pages, if the spare parts are too few.
        assert sequence.spare is not None
        missing = int(new.sum()) - sum(map(len, sequence.spare))
        pages = take(max(0, -(-missing // (self.layers * self.kv_heads))))
        sequence.pages += pages
        for page in pages:
            for layer, spare in enumerate(sequence.spare):
                first = (page * self.layers + layer) * self.kv_heads
                spare += range(first, first + self.kv_heads)

        more = int(needed.max()) - self.table.shape[3]
        if more > 0:
            self.table = torch.nn.functional.pad(self.table, (0, more))

        # Each head takes its parts, of the pool of its layer while there are any.
        for layer, head in new.nonzero().tolist():
            start = int(counts[layer, head])
            stop = start + int(new[layer, head])
            parts = [(sequence.spare[layer] or max(sequence.spare, key=len)).pop() for _ in range(start, stop)]
            self.table[sequence.row, layer, head, start:stop] = torch.tensor(parts, dtype=torch.int32)
        self.counts[sequence.row] += new

    def read(self, pools: Sequence[Tensor], sequence: CachedSequence, layer: int, tokens: Tensor) -> Tensor:
        """Return `tokens` [KV heads, tokens] of a layer of a sequence from the `pools` of all layers.

        Tokens that a head does not have are 0.
        """
        slots, masks = self._places(pools, sequence, layer, tokens)
        numbers = pools[layer].new_zeros(*slots.shape, pools[layer].shape[2])
        for pool_layer, mask in masks.items():
            numbers[mask] = pools[pool_layer].flatten(0, 1)[slots[mask]]
        return numbers

    def write(self, pools: Sequence[Tensor], sequence: CachedSequence, layer: int, first: int, numbers: Tensor) -> None:
        """Write `numbers` [KV heads, tokens, size] of a layer from the token `first` on, where heads have it."""
        tokens = torch.arange(first, first + numbers.shape[1], device=numbers.device).expand(numbers.shape[:2])
        slots, masks = self._places(pools, sequence, layer, tokens)
        for pool_layer, mask in masks.items():
            pools[pool_layer].flatten(0, 1)[slots[mask]] = numbers[mask]

    def _places(
        self, pools: Sequence[Tensor], sequence: CachedSequence, layer: int, tokens: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return where `tokens` [KV heads, tokens] of a layer are: their slots, counted over all heads of a pool, and
        by the layers of the pools a mask of those that their head has.
        """
        token = tokens - self.missing[sequence.row, layer].long()[:, None]
        is_present = token >= 0
        token = token.clamp(min=0)
        index = self.table[sequence.row, layer].long().gather(1, token // self.page_size)
        page = index // (self.kv_heads * self.layers)
        slots = index % self.kv_heads * pools[0].shape[1] + page * self.page_size + token % self.page_size
        pool_layers = index // self.kv_heads % self.layers

        # The layers of the pools that have parts of this layer.
        is_used = torch.arange(self.table.shape[3]) < self.counts[sequence.row, layer][:, None]
        parts = self.table[sequence.row, layer].cpu()[is_used]
        masks = {}
        for pool_layer in {place // self.kv_heads % self.layers for place in parts.tolist()}:
            masks[pool_layer] = is_present & (pool_layers == pool_layer)
        return slots, masks
