"""The sequences and new tokens of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvatlas.core import grouped
from kvatlas.cpu.native import PagedBatch
from kvatlas.engine.cache import CachedSequence, KVCache


class SequenceGroup(NamedTuple):
    """Sequences with equally many new tokens: their indices in the batch, their tokens [sequences, new], the slots of
    their cached tokens [sequences, longest], and a mask of the tokens that each new one sees [sequences, new, longest].
    """

    members: list[int]
    tokens: Tensor
    slots: Tensor
    visible: Tensor


@dataclass
class ForwardBatch:
    """A ragged batch: decoding (one new token) and chunks of prompts (several) are the same thing.

    Sequence i gets `tokens[i]` at the true positions from `first_positions[i]` on, behind its cached tokens. The cache
    must have room for them. `watched` are the sequences whose policies observe attention: `attention` [layers, watched,
    KV heads, slots] gets the weights of their new tokens, summed over these and averaged over the query heads of each
    KV head; it has as many slots as the longest sequence, or as `room`, of which it takes the first sequences.
    `remembered` are those whose recent queries are stored. Other sequences have no extra cost.
    """

    cache: KVCache
    sequences: Sequence[CachedSequence]
    tokens: Sequence[Sequence[int]]
    first_positions: Sequence[int]
    watched: tuple[int, ...] = ()
    remembered: tuple[int, ...] = ()
    room: Tensor | None = None

    def __post_init__(self) -> None:
        #: The number of new tokens of each sequence, and the first of them among those of the batch.
        self.counts = [len(new) for new in self.tokens]
        self.starts = [0, *accumulate(self.counts)]
        #: The number of cached tokens of each sequence before the pass, and its row in the cache.
        self.lengths = [sequence.length for sequence in self.sequences]
        self.rows = [sequence.row for sequence in self.sequences]
        self.longest = max(map(add, self.lengths, self.counts))
        if self.cache.key_biases is not None:
            self.cache.key_biases.angles(max(map(add, self.first_positions, self.counts)))

    # Tensors on the device come when they are used: a captured step has its own.

    @cached_property
    def _by_token(self) -> Tensor:
        token_ids = list(chain.from_iterable(self.tokens))
        positions: list[int] = []
        for first, count in zip(self.first_positions, self.counts, strict=True):
            positions.extend(range(first, first + count))
        return torch.tensor([token_ids, positions]).to(self.cache.device)

    @cached_property
    def _by_sequence(self) -> Tensor:
        return torch.tensor([self.lengths, self.rows]).to(self.cache.device)

    @cached_property
    def input_ids(self) -> Tensor:
        """The new tokens of all sequences [tokens]."""
        return self._by_token[0]

    @cached_property
    def positions(self) -> Tensor:
        """The true positions of the new tokens [tokens]."""
        return self._by_token[1]

    @cached_property
    def length(self) -> Tensor:
        """The numbers of cached tokens before the pass [sequences]."""
        return self._by_sequence[0]

    @cached_property
    def row(self) -> Tensor:
        """The rows of the sequences in the cache [sequences]."""
        return self._by_sequence[1]

    @cached_property
    def attention(self) -> Tensor:
        """Weights of watched sequences [layers, watched, KV heads, slots], 0 until layers add theirs."""
        if self.room is not None:
            return self.room[:, : len(self.watched)].zero_()
        shape = self.cache.shape
        size = (shape.layers, len(self.watched), shape.kv_heads, self.longest if self.watched else 0)
        return torch.zeros(size, device=self.cache.device)

    def take_attention(self, padded: ForwardBatch) -> None:
        """Take the weights of the watched sequences from a batch that watches all of these and has padding."""
        attention = padded.attention[:, : len(self.rows), :, : self.longest]
        if len(self.watched) < len(self.rows):
            attention = attention[:, torch.tensor(self.watched, device=attention.device)]
        vars(self)["attention"] = attention

    @property
    def decoding(self) -> bool:
        """True if every sequence has one new token."""
        return self.starts[-1] == len(self.counts)

    @cached_property
    def layer_shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Shapes of query [1, heads, tokens, key size], key and value, by a layer's number in the model."""
        shape = self.cache.shape
        tokens = self.starts[-1]
        return {
            layer.layer_number: (
                (1, shape.heads, tokens, layer.key),
                (1, shape.kv_heads, tokens, layer.key),
                (1, shape.kv_heads, tokens, layer.value),
            )
            for layer in shape.cached_layers
        }

    def keep(self, inputs: Tensor) -> None:
        """Read token ids, positions, lengths and rows from `inputs` [4 or more, sequences], one new token each."""
        vars(self).update(zip(("input_ids", "positions", "length", "row"), inputs, strict=False))

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values that a backend derives from the batch once for all layers."""
        return {}

    @cached_property
    def paged(self) -> PagedBatch:
        watched = None
        if self.watched:
            watched = torch.full(self.row.shape, -1, dtype=torch.int32)
            watched[list(self.watched)] = torch.arange(len(self.watched), dtype=torch.int32)

        packed = self.cache.packed
        return PagedBatch(
            self.cache.table[self.row],
            torch.tensor(self.starts, dtype=torch.int32),
            self.length.int(),
            page_size=self.cache.page_size,
            longest=self.longest,
            watched=watched,
            watched_width=self.attention.shape[-1] if self.watched else 0,
            rows=self.row.int() if packed else None,
            first=torch.tensor(self.first_positions, dtype=torch.int32) if packed else None,
        )

    @cached_property
    def positions32(self) -> Tensor:
        positions: Tensor = self.positions.int()
        return positions

    @property
    def entered_slots(self) -> Tensor:
        if self.decoding:
            return self.slots(self.row, self.length)
        counts = torch.tensor(self.counts, device=self.length.device)
        shift = self.length - torch.tensor(self.starts[:-1], device=counts.device)
        logical = torch.arange(self.starts[-1], device=counts.device) + shift.repeat_interleave(counts)
        return self.slots(self.row.repeat_interleave(counts), logical)

    @cached_property
    def groups(self) -> list[SequenceGroup]:
        """The sequences by their numbers of new tokens, for attention in plain torch."""
        device = self.positions.device
        groups = []
        starts = torch.tensor(self.starts, device=device)
        for count, members in grouped(range(len(self.counts)), self.counts.__getitem__).items():
            # Indices as a column, to be broadcast against new or against cached tokens.
            column = torch.tensor(members, device=device)[:, None]
            new = torch.arange(count, device=device)
            longest = max(self.lengths[index] for index in members) + count
            logical = torch.arange(longest, device=device)
            # A new token sees all earlier ones and itself.
            visible = logical <= (self.length[column] + new)[..., None]
            slots = self.slots(self.row[column], logical)
            groups.append(SequenceGroup(members, starts[column] + new, slots, visible))
        return groups

    def slots(self, rows: Tensor, logical: Tensor) -> Tensor:
        """Return the slots of tokens by their place in their sequence's pages, `logical`."""
        size = self.cache.page_size
        slots: Tensor = self.cache.table[rows, logical // size].long() * size + logical % size
        return slots

    def remember(self, layer: int, query: Tensor) -> None:
        """Store the newest queries [tokens, heads, head size] of the sequences in `remembered`."""
        if self.remembered:
            tokens, rows, places = self.newest_queries
            self.cache.queries[layer][rows, :, places] = query[tokens]

    def keep_recent(self, layer: int, *new: Tensor) -> None:
        """Store the newest keys and values [tokens, KV heads, size] unpacked, behind the attention of their layer."""
        for ring, numbers in zip(self.cache.recent[layer], new, strict=True):
            if ring is not None:
                tokens, rows, places = self.newest_tokens
                ring[rows, :, places] = numbers[tokens]

    @cached_property
    def newest_queries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._newest(self.cache.query_window, self.remembered)

    @cached_property
    def newest_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._newest(self.cache.storage.residual, range(len(self.rows)))

    def _newest(self, window: int, members: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the newest tokens of sequences in the batch, and their rows and places in rings of this length."""
        if self.decoding and len(members) == len(self.rows):
            return torch.arange(len(self.rows), device=self.row.device), self.row, self.positions % window
        newest = []
        for index in members:
            count = self.counts[index]
            for token in range(max(0, count - window), count):
                place = (self.first_positions[index] + token) % window
                newest.append((self.starts[index] + token, self.rows[index], place))
        tokens, rows, places = torch.tensor(newest).to(self.cache.device).unbind(1)
        return tokens, rows, places
