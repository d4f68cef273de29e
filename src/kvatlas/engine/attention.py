"""One forward pass: the sequences and their new tokens, the attention function of every model, and its backends.

All masks are ours: transformers builds none for an attention function without a registered mask function. The engine
passes the backend and the batch as `kvatlas` (`models.attention.attention_function`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.core import KvatlasError
from kvatlas.engine.cache import PAGE, CachedSequence, KVCache, Layer
from kvatlas.native import Native, PagedBatch

#: Queries whose observed attention weights are in memory at a time.
CHUNK = 256


class Group(NamedTuple):
    """Sequences with equally many new tokens: their indices in the batch, their tokens [sequences, new], the slots of
    their cached tokens [sequences, longest], and a mask of the tokens that each new one sees [sequences, new, longest].
    """

    members: list[int]
    tokens: Tensor
    slots: Tensor
    visible: Tensor


@dataclass
class ForwardBatch:
    """A ragged batch: decoding (one new token), chunks of prompts and forced reading (several) are the same thing.

    Sequence i gets `tokens[i]` at the true positions from `first_positions[i]` on, behind its cached tokens. The cache
    must have room for them. `watched` are the sequences whose policies observe attention: `attention` [layers, watched,
    KV heads, slots] gets the weights of their new tokens, summed over these and averaged over the query heads of each
    KV head. `remembered` are those whose recent queries are stored. Other sequences have no extra cost.
    """

    cache: KVCache
    sequences: Sequence[CachedSequence]
    tokens: Sequence[Sequence[int]]
    first_positions: Sequence[int]
    watched: tuple[int, ...] = ()
    remembered: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        #: New tokens of each sequence, their start among all; its cached tokens before, its row in the cache.
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
        """True if every sequence has one new token."""
        return self.starts[-1] == len(self.counts)

    @cached_property
    def layer_shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Shapes of query [1, heads, tokens, key size], key and value, by a layer's number in the model."""
        shape, tokens = self.cache.shape, self.starts[-1]
        return {
            layer.model_layer: (
                (1, shape.heads, tokens, layer.key),
                (1, shape.kv_heads, tokens, layer.key),
                (1, shape.kv_heads, tokens, layer.value),
            )
            for layer in shape.cached_layers
        }

    def load(self, other: ForwardBatch) -> None:
        """Copy the numbers of another batch of as many sequences and tokens into these tensors."""
        for name in ("input_ids", "positions", "length", "row"):
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)

    def forget(self) -> None:
        """Drop all that was derived from the tensors, before another pass."""
        for name in ("paged", "positions32", "groups", "newest_queries", "newest_tokens", "derived"):
            vars(self).pop(name, None)

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values that a backend derives from the batch once for all layers."""
        return {}

    @cached_property
    def paged(self) -> PagedBatch:
        watched, packed = None, self.cache.packed
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
            return self._slots(self.row, self.length)
        counts = torch.tensor(self.counts, device=self.length.device)
        shift = self.length - torch.tensor(self.starts[:-1], device=counts.device)
        logical = torch.arange(self.starts[-1], device=counts.device) + shift.repeat_interleave(counts)
        return self._slots(self.row.repeat_interleave(counts), logical)

    @cached_property
    def groups(self) -> list[Group]:
        """The sequences by their numbers of new tokens, for attention in plain torch."""
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


class AttentionBackend(Protocol):
    """An implementation that writes the new keys and values of a batch into the cache and attends to the cache."""

    name: str
    #: Tokens of a page of its cache.
    page_size: int

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention [tokens, heads, value size] of new tokens, and add the weights of watched sequences to
        `batch.attention`; query [tokens, heads, key size], key [tokens, KV heads, key size], value [tokens, KV heads,
        value size]. A token sees the cached tokens of its sequence and itself, within the layer's window."""
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by transformers' interface: query [1, heads, tokens, key size], key [1, KV heads, tokens, key size], value
    [1, KV heads, tokens, value size]; `s_aux` are sinks.

    Returns [1, tokens, heads, value size] and None. Raises KvatlasError for layers with masks of their own, or whose
    tensors do not fit the cache.
    """
    backend, batch = kvatlas
    number: Any = getattr(module, "layer_idx", None)
    shapes, expected = (query.shape, key.shape, value.shape), batch.layer_shapes.get(number, ())
    if attention_mask is not None:
        raise KvatlasError(f"The model masks tokens by a rule of its own (layer {number}).")
    if shapes != expected:
        own, cached = (", ".join(str(tuple(shape)) for shape in of) or "no cache" for of in (shapes, expected))
        raise KvatlasError(
            f"The model changes the shapes of its layers (layer {number}: query, key and value are {own}, expected "
            f"{cached})."
        )
    layer = Layer(batch.cache.shape.place[number], scaling, sliding_window, softcap, s_aux)
    batch.cache.layers[layer.number] = layer
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    batch.remember(layer.number, query)
    return backend.attend(batch, layer, query, key, value)[None], None


class CpuBackend:
    """Native kernels: the numbers of a token depend on its sequence alone, not on the rest of the batch."""

    name = "cpu"
    page_size = PAGE

    def __init__(self, native: Native) -> None:
        self.native = native

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, (number, scaling, window, softcap, sinks) = batch.cache, layer
        out = self.native.attention(
            batch.paged,
            _dense(query),
            _dense(key),
            _dense(value),
            cache.keys[number],
            cache.values[number],
            scaling,
            window=window or 0,
            positions=batch.positions32 if window else None,
            places=None if window is None else cache.watch_window(number),
            mass=batch.attention[number] if batch.watched else None,
            softcap=softcap or 0.0,
            sinks=sinks,
            bits=cache.bits,
            group=cache.storage.group,
            recent=cache.recent[number],
        )
        if cache.packed:
            batch.keep_recent(number, key, value)
        return out


def _dense(heads: Tensor) -> Tensor:
    # The heads of a token must lie side by side.
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


class ReferenceBackend:
    """Plain torch on any device: the oracle of the tests, and the fallback."""

    name = "reference"
    page_size = PAGE

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, entered, number, window = batch.cache, batch.entered_slots, layer.number, layer.window
        plain = layer.softcap is None and layer.sinks is None
        cache.write(number, entered, key, value)
        if window is not None:
            cache.watch_window(number)[:, entered] = batch.positions32
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for group in batch.groups:
            keys, values = (cache.read(side, number, group.slots).transpose(0, 1) for side in (0, 1))
            visible = group.visible[:, None]
            if window is not None:
                near = cache.positions[number][:, group.slots].transpose(0, 1)[:, :, None]
                visible = visible & (near > batch.positions[group.tokens][:, None, :, None] - window)
                visible = visible.repeat_interleave(query.shape[1] // key.shape[1], 1)
            longest = keys.shape[2]
            if cache.packed and cache.storage.residual:
                # Every token is there twice, as it is stored and unpacked; a new one sees one of them.
                keys, values = (
                    torch.cat([stored, _unpacked(batch, group, cache.recent[number][side], stored, new)], 2)
                    for side, (stored, new) in enumerate(((keys, key), (values, value)))
                )
                own = batch.length[group.members, None] + torch.arange(group.tokens.shape[1], device=query.device)
                newest = torch.arange(longest, device=query.device) > own[..., None] - cache.storage.residual
                visible = torch.cat([visible & ~newest[:, None], visible & newest[:, None]], -1)
            asking = query[group.tokens].transpose(1, 2)
            if plain:
                output = F.scaled_dot_product_attention(
                    asking,
                    keys,
                    values,
                    attn_mask=visible,
                    scale=layer.scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
                out[group.tokens] = output.transpose(1, 2)
            for at, index in enumerate(group.members):
                watched = batch.watched.index(index) if index in batch.watched else None
                if plain and watched is None:
                    continue
                for start, weights in _weights(layer, asking[at], keys[at], visible[at]):
                    if not plain:
                        part = (weights.to(values.dtype) @ values[at].unsqueeze(1)).flatten(0, 1).transpose(0, 1)
                        out[group.tokens[at, start : start + CHUNK]] = part
                    if watched is not None:
                        mass = weights.mean(1).sum(1).view(weights.shape[0], -1, longest).sum(1)
                        batch.attention[number, watched, :, :longest] += mass
        batch.keep_recent(number, key, value)
        return out


def _unpacked(batch: ForwardBatch, group: Group, ring: Tensor | None, stored: Tensor, new: Tensor) -> Tensor:
    """Return keys or values [sequences, KV heads, longest, size] with the newest ones before and in the batch unpacked.

    `ring` are those before the batch by row, None if all are unpacked; `new` [tokens, KV heads, size] those in it.
    """
    if ring is None:
        return stored
    numbers, length = stored.clone(), batch.length[group.members]
    behind = torch.arange(stored.shape[2], device=stored.device) - length[:, None]
    at, token = ((behind >= -ring.shape[2]) & (behind < 0)).nonzero(as_tuple=True)
    place = (batch.positions[group.tokens[at, 0]] + behind[at, token]) % ring.shape[2]
    numbers[at, :, token] = ring[batch.row[group.members][at], :, place]
    at, token = ((behind >= 0) & (behind < group.tokens.shape[1])).nonzero(as_tuple=True)
    numbers[at, :, token] = new[group.tokens[at, behind[at, token]]]
    return numbers


def _weights(layer: Layer, query: Tensor, keys: Tensor, visible: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of the new tokens: the first one, and their weights [KV heads, query heads of each, new, cached].

    Query [heads, new, size], keys [KV heads, cached, size], visible [heads or 1, new, cached].
    """
    heads, new, size = query.shape
    kv_heads = keys.shape[0]
    for start in range(0, new, CHUNK):
        part = query[:, start : start + CHUNK].reshape(kv_heads, heads // kv_heads, -1, size)
        scores = part.float() @ keys.float().unsqueeze(1).transpose(-1, -2) * layer.scaling
        mask = visible[:, start : start + CHUNK].expand(heads, -1, -1).reshape(scores.shape)
        yield start, layer.weights(scores, mask)
