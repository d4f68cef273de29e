"""What one forward pass computes: some sequences, each with one or more new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvatlas.engine.cache import CachedSequence, KVCache
from kvatlas.native import PagedBatch

if TYPE_CHECKING:
    from torch import Tensor


class Group(NamedTuple):
    """Sequences with equally many new tokens: their numbers in the batch, their tokens [sequences, new], the slots of
    what they have cached [sequences, longest], and which of it each new token sees [sequences, new, longest]."""

    members: list[int]
    tokens: Tensor
    slots: Tensor
    visible: Tensor


@dataclass
class ForwardBatch:
    """A ragged batch: decoding (one new token), chunks of prompts and forced reading (several) are the same thing.

    Sequence i gets `tokens[i]` at the true positions from `first_positions[i]` on, behind what it has cached. Room for
    them must be reserved. `watched` are the sequences whose policies want attention: `attention` [layers, watched, KV
    heads, slots] takes up the weights that their new tokens pay, summed over these and averaged over the query heads of
    each KV head. `remembered` are those whose recent queries are kept. No other sequence pays for either.
    """

    cache: KVCache
    sequences: Sequence[CachedSequence]
    tokens: Sequence[Sequence[int]]
    first_positions: Sequence[int]
    watched: tuple[int, ...] = ()
    remembered: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        #: New tokens of each sequence, and where they start among all; what it has cached before, its row in the cache.
        self.counts = [len(new) for new in self.tokens]
        self.starts = [0, *accumulate(self.counts)]
        self.lengths = [sequence.length for sequence in self.sequences]
        self.rows = [sequence.row for sequence in self.sequences]
        flat = [token for new in self.tokens for token in new]
        spans = zip(self.first_positions, self.counts, strict=True)
        at = [position for first, count in spans for position in range(first, first + count)]
        device, shape = self.cache.device, self.cache.shape
        self.input_ids, self.positions = torch.tensor([flat, at]).to(device)
        self.length, self.row = torch.tensor([self.lengths, self.rows]).to(device)
        self.longest = max(map(sum, zip(self.lengths, self.counts, strict=True)))
        watched = len(self.watched), shape.kv_heads, self.longest if self.watched else 0
        self.attention = torch.zeros(shape.layers, *watched, device=device)

    @property
    def decoding(self) -> bool:
        """Whether every sequence has one new token."""
        return self.starts[-1] == len(self.counts)

    @cached_property
    def layer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what every layer attends with: query [1, heads, tokens, head size], key and value."""
        shape, tokens = self.cache.shape, self.starts[-1]
        kept = 1, shape.kv_heads, tokens, shape.head_dim
        return (1, shape.heads, tokens, shape.head_dim), kept, kept

    def load(self, other: ForwardBatch) -> None:
        """Take over the numbers of another batch of as many sequences and tokens, in the same tensors."""
        for name in ("input_ids", "positions", "length", "row"):
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)

    def forget(self) -> None:
        """Before another pass: what was derived from the tensors is derived again."""
        for name in ("paged", "positions32", "groups", "newest_queries", "derived"):
            vars(self).pop(name, None)

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What a backend derives from the batch once for all layers."""
        return {}

    @cached_property
    def paged(self) -> PagedBatch:
        """The batch as native kernels know it."""
        watched = None
        if self.watched:
            watched = torch.full(self.row.shape, -1, dtype=torch.int32)
            watched[list(self.watched)] = torch.arange(len(self.watched), dtype=torch.int32)
        return PagedBatch(
            self.cache.table[self.row],
            torch.tensor(self.starts, dtype=torch.int32),
            self.length.int(),
            page_size=self.cache.page_size,
            longest=self.longest,
            watched=watched,
            watched_width=self.attention.shape[-1],
        )

    @cached_property
    def positions32(self) -> Tensor:
        """True positions [tokens] of the new tokens, int32."""
        positions: Tensor = self.positions.int()
        return positions

    @property
    def entered_slots(self) -> Tensor:
        """Slots [tokens] that the new tokens go into."""
        if self.decoding:
            return self._slots(self.row, self.length)
        counts = torch.tensor(self.counts, device=self.length.device)
        shift = self.length - torch.tensor(self.starts[:-1], device=counts.device)
        logical = torch.arange(self.starts[-1], device=counts.device) + shift.repeat_interleave(counts)
        return self._slots(self.row.repeat_interleave(counts), logical)

    @cached_property
    def groups(self) -> list[Group]:
        """For attention in plain torch: the sequences by their numbers of new tokens."""
        device, grouped = self.positions.device, []
        starts = torch.tensor(self.starts, device=device)
        for count in dict.fromkeys(self.counts):
            members = [index for index, own in enumerate(self.counts) if own == count]
            own = torch.tensor(members, device=device)
            new = torch.arange(count, device=device)
            logical = torch.arange(max(self.lengths[index] for index in members) + count, device=device)
            visible = logical <= (self.length[own, None] + new)[..., None]
            slots = self._slots(self.row[own, None], logical)
            grouped.append(Group(members, starts[own, None] + new, slots, visible))
        return grouped

    def _slots(self, rows: Tensor, logical: Tensor) -> Tensor:
        size = self.cache.page_size
        slots: Tensor = self.cache.table[rows, logical // size].long() * size + logical % size
        return slots

    def remember(self, layer: int, query: Tensor) -> None:
        """Keep the newest queries of the sequences that asked for them; query [tokens, heads, head size]."""
        if self.remembered:
            tokens, rows, places = self.newest_queries
            self.cache.queries[layer][rows, :, places] = query[tokens]

    @cached_property
    def newest_queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Their tokens in the batch, and their rows and places in the rings."""
        window, queries = self.cache.query_window, []
        if self.decoding and len(self.remembered) == len(self.rows):
            return torch.arange(len(self.rows), device=self.row.device), self.row, self.positions % window
        for index in self.remembered:
            count = self.counts[index]
            for token in range(max(0, count - window), count):
                slot = (self.first_positions[index] + token) % window
                queries.append((self.starts[index] + token, self.rows[index], slot))
        tokens, rows, places = torch.tensor(queries).to(self.cache.device).unbind(1)
        return tokens, rows, places
