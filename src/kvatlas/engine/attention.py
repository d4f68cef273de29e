"""One forward pass: the sequences and their new tokens, the attention function of every model, and its backends.

All masks are ours: transformers builds none for an attention function without a registered mask function. The engine
passes the backend and the batch as `kvatlas` (`models.attention.attention_function`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import add
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.core import KvatlasError
from kvatlas.engine.cache import PAGE, KVCache, Layer
from kvatlas.engine.parts import CachedSequence
from kvatlas.models.fused import FusedLayer
from kvatlas.native import Native, PagedBatch, PagedLayer
from kvatlas.native.decoder import DecoderLayer, DecoderPass

#: Queries whose observed attention weights are in memory at a time.
CHUNK = 256


class Group(NamedTuple):
    """Sequences with equally many new tokens: their indices in the batch, their tokens [sequences, new], the slots of
    their cached tokens [sequences, longest], and a mask of the tokens that each new one sees [sequences, new, longest].

    A sequence in parts is a group of its own, whose slots are those of no token.
    """

    members: list[int]
    tokens: Tensor
    slots: Tensor
    visible: Tensor
    in_parts: CachedSequence | None = None


@dataclass
class ForwardBatch:
    """A ragged batch: decoding (one new token), chunks of prompts and forced reading (several) are the same thing.

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

    @cached_property
    def has_parts(self) -> bool:
        """True if the heads of some sequence have unlike numbers of tokens."""
        return any(sequence.spare is not None for sequence in self.sequences)

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

    def forget(self) -> None:
        """Drop all that was derived from the tensors, before another pass."""
        for name in ("attention", "paged", "positions32", "groups", "newest_queries", "newest_tokens", "derived"):
            vars(self).pop(name, None)

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
        parts = self.cache.parts
        if not self.has_parts:
            parts = None
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
            parts=None if parts is None else parts.table[self.row],
            missing=None if parts is None else parts.missing[self.row],
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
    def groups(self) -> list[Group]:
        """The sequences by their numbers of new tokens, for attention in plain torch."""
        device = self.positions.device
        groups = []
        starts = torch.tensor(self.starts, device=device)
        in_parts = {index: sequence for index, sequence in enumerate(self.sequences) if sequence.spare is not None}
        by_count: dict[int, list[int]] = {}
        for index, count in enumerate(self.counts):
            if index not in in_parts:
                by_count.setdefault(count, []).append(index)
        for members in [*by_count.values(), *([index] for index in in_parts)]:
            count = self.counts[members[0]]
            # Indices as a column, to be broadcast against new or against cached tokens.
            column = torch.tensor(members, device=device)[:, None]
            new = torch.arange(count, device=device)
            longest = max(self.lengths[index] for index in members) + count
            logical = torch.arange(longest, device=device)
            # A new token sees all earlier ones and itself.
            visible = logical <= (self.length[column] + new)[..., None]
            sequence = in_parts.get(members[0])
            slots = logical[None] if sequence is not None else self.slots(self.row[column], logical)
            groups.append(Group(members, starts[column] + new, slots, visible, sequence))
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


def attend(  # noqa: PLR0913
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
    layer_number: Any = getattr(module, "layer_idx", None)
    if attention_mask is not None:
        raise KvatlasError(f"The model masks tokens by a rule of its own (layer {layer_number}).")
    shapes = (query.shape, key.shape, value.shape)
    expected = batch.layer_shapes.get(layer_number, ())
    if shapes != expected:
        raise KvatlasError(
            f"The model changes the shapes of its layers (layer {layer_number}: query, key and value are "
            f"{_shapes_text(shapes)}, expected {_shapes_text(expected)})."
        )
    layer = Layer(batch.cache.shape.place[layer_number], scaling, sliding_window, softcap, s_aux)
    batch.cache.layers[layer.place] = layer
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    batch.remember(layer.place, query)
    return backend.attend(batch, layer, query, key, value)[None], None


class PassAttention:
    """The attention of a model in one pass, for `models.attention.attention_function`."""

    def __init__(self, backend: AttentionBackend, batch: ForwardBatch) -> None:
        self.backend = backend
        self.batch = batch
        #: True if `compute_layers` may be called.
        self.computes_layers = isinstance(backend, CpuBackend)

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, None]:
        return attend(module, query, key, value, mask, kvatlas=(self.backend, self.batch), **others)

    def compute_layers(self, layers: Sequence[FusedLayer], tokens: DecoderPass) -> None:
        """Compute decoder layers of Llama's form, attention included."""
        assert isinstance(self.backend, CpuBackend)
        cache = self.batch.cache
        cached_layers = [Layer(cache.shape.place[layer.number], layer.scaling, layer.window) for layer in layers]
        cache.layers.update((layer.place, layer) for layer in cached_layers)
        self.backend.compute_layers(self.batch, cached_layers, [layer.native_layer for layer in layers], tokens)


def _shapes_text(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes) or "no cache"


class CpuBackend:
    """Native kernels: the numbers of a token depend on its sequence alone, not on the rest of the batch."""

    name = "cpu"
    page_size = PAGE

    def __init__(self, native: Native) -> None:
        self.native = native

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        paged_layer = self._paged_layer(batch, layer)
        out = self.native.attention(batch.paged, paged_layer, _dense(query), _dense(key), _dense(value))
        if batch.cache.packed:
            batch.keep_recent(layer.place, key, value)
        return out

    def compute_layers(
        self,
        batch: ForwardBatch,
        layers: Sequence[Layer],
        decoder_layers: Sequence[DecoderLayer],
        tokens: DecoderPass,
    ) -> None:
        """Compute whole decoder layers of Llama's form for the new tokens of a batch."""
        paged_layers = self._paged_layers(batch, layers)
        if not batch.remembered and not batch.cache.packed:
            DecoderLayer.compute(decoder_layers, tokens, batch.paged, paged_layers)
            return
        # The heads of a layer are stored before the next one replaces them.
        for layer, decoder_layer, paged_layer in zip(layers, decoder_layers, paged_layers, strict=True):
            DecoderLayer.compute([decoder_layer], tokens, batch.paged, [paged_layer])
            self._store_heads(batch, layer, tokens.heads)

    def _paged_layers(self, batch: ForwardBatch, layers: Sequence[Layer]) -> Sequence[PagedLayer]:
        """Return the layers for native code, the same in each pass while nothing but the pools belongs to them."""
        cache = batch.cache
        if batch.watched or cache.packed or any(layer.window for layer in layers):
            return [self._paged_layer(batch, layer) for layer in layers]
        if cache.paged_layers is None:
            cache.paged_layers = [self._paged_layer(batch, layer) for layer in layers]
        largest = max(max(layer.key, layer.value) for layer in cache.shape.cached_layers)
        self.native.make_scratch(batch.paged, largest)
        return cache.paged_layers

    def _store_heads(self, batch: ForwardBatch, layer: Layer, table: Tensor) -> None:
        """Store the newest of the queries, keys and values side by side in `table` [tokens, heads * size]."""
        shape = batch.cache.shape
        heads = table.view(len(table), -1, shape.cached_layers[layer.place].key)
        first_value = shape.heads + shape.kv_heads
        batch.remember(layer.place, heads[:, : shape.heads])
        if batch.cache.packed:
            batch.keep_recent(layer.place, heads[:, shape.heads : first_value], heads[:, first_value:])

    def _paged_layer(self, batch: ForwardBatch, layer: Layer) -> PagedLayer:
        cache = batch.cache
        place = layer.place
        window = layer.window
        biases = cache.key_biases
        cached_layer = cache.shape.cached_layers[place]
        return self.native.paged_layer(
            batch.paged,
            cache.shape.heads,
            (cached_layer.key, cached_layer.value),
            cache.keys[place],
            cache.values[place],
            layer.scaling,
            window=window or 0,
            positions=batch.positions32 if window else None,
            places=None if window is None else cache.watch_window(place),
            mass=batch.attention[place] if batch.watched else None,
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
            bits=cache.bits,
            group=cache.storage.group,
            recent=cache.recent[place],
            bias=None if biases is None else biases.layers[place],
            angles=None if biases is None else biases.angles(0),
            place=place,
            pools=cache.pool_addresses,
        )


def _dense(heads: Tensor) -> Tensor:
    # The heads of a token must lie side by side.
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


class ReferenceBackend:
    """Plain torch on any device: the oracle of the tests, and the fallback."""

    name = "reference"
    page_size = PAGE

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = batch.cache
        if batch.has_parts:
            _write_by_group(batch, layer, key, value)
        else:
            entered = batch.entered_slots
            cache.write(layer.place, entered, key, value, batch.positions)
            if layer.window is not None:
                cache.watch_window(layer.place)[:, entered] = batch.positions32
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for group in batch.groups:
            inputs = _group_inputs(batch, layer, group, query, key, value)
            if layer.is_softmax:
                output = F.scaled_dot_product_attention(
                    inputs.query,
                    inputs.keys,
                    inputs.values,
                    attn_mask=inputs.visible,
                    scale=layer.scaling,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
                out[group.tokens] = output.transpose(1, 2)
            _add_explicit_weights(batch, layer, group, inputs, out)
        batch.keep_recent(layer.place, key, value)
        return out


def _write_by_group(batch: ForwardBatch, layer: Layer, key: Tensor, value: Tensor) -> None:
    """Write new keys and values of a batch in which some sequences are in parts; no layer has a window then."""
    for group in batch.groups:
        if group.in_parts is not None:
            tokens = group.tokens[0]
            new = (key[tokens].transpose(0, 1), value[tokens].transpose(0, 1))
            batch.cache.write_into_parts(layer.place, group.in_parts, group.in_parts.length, *new)
            continue
        tokens = group.tokens.flatten()
        first = batch.length[group.members, None]
        entered = group.slots.gather(1, first + torch.arange(group.tokens.shape[1], device=first.device)).flatten()
        batch.cache.write(layer.place, entered, key[tokens], value[tokens], batch.positions[tokens])


class GroupInputs(NamedTuple):
    """The inputs of attention for one group: `query` [sequences, heads, new, size], `keys` and `values` [sequences, KV
    heads, readable, size], and the mask `visible` [sequences, heads or 1, new, readable].

    Every cached token is readable once. If the newest ones are kept unpacked, it is readable twice: all tokens as they
    are stored, and behind them all tokens with the newest unpacked. A new token sees one of the two.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor


def _group_inputs(
    batch: ForwardBatch, layer: Layer, group: Group, query: Tensor, key: Tensor, value: Tensor
) -> GroupInputs:
    cache = batch.cache
    if group.in_parts is not None:
        return _inputs_in_parts(batch, layer, group, query)
    keys = cache.read(0, layer.place, group.slots).transpose(0, 1)
    values = cache.read(1, layer.place, group.slots).transpose(0, 1)
    visible = group.visible[:, None]
    if layer.window is not None:
        slot_positions = cache.positions[layer.place][:, group.slots].transpose(0, 1)[:, :, None]
        oldest_seen = batch.positions[group.tokens][:, None, :, None] - layer.window
        visible = visible & (slot_positions > oldest_seen)
        # From a mask for each KV head to one for each query head.
        visible = visible.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if cache.packed and cache.storage.residual:
        longest = keys.shape[2]
        recent_keys, recent_values = cache.recent[layer.place]
        keys = torch.cat([keys, _unpacked(batch, group, recent_keys, keys, key)], 2)
        values = torch.cat([values, _unpacked(batch, group, recent_values, values, value)], 2)
        lengths = batch.length[group.members, None] + torch.arange(group.tokens.shape[1], device=query.device)
        first_unpacked = lengths[..., None] - cache.storage.residual
        is_unpacked = (torch.arange(longest, device=query.device) > first_unpacked)[:, None]
        visible = torch.cat([visible & ~is_unpacked, visible & is_unpacked], -1)
    return GroupInputs(query[group.tokens].transpose(1, 2), keys, values, visible)


def _inputs_in_parts(batch: ForwardBatch, layer: Layer, group: Group, query: Tensor) -> GroupInputs:
    sequence = group.in_parts
    parts = batch.cache.parts
    assert sequence is not None
    assert parts is not None
    tokens = sequence.length + group.tokens.shape[1]
    read = replace(sequence, length=tokens)
    keys = batch.cache.read_sequence(0, layer.place, read)[None]
    values = batch.cache.read_sequence(1, layer.place, read)[None]
    missing = parts.missing[sequence.row, layer.place].repeat_interleave(query.shape[1] // keys.shape[1])
    is_present = torch.arange(tokens, device=query.device) >= missing[:, None]
    visible = group.visible[:, None] & is_present[:, None]
    return GroupInputs(query[group.tokens].transpose(1, 2), keys, values, visible)


def _add_explicit_weights(batch: ForwardBatch, layer: Layer, group: Group, inputs: GroupInputs, out: Tensor) -> None:
    """Add the weights of the watched sequences of a group to `batch.attention`.

    Writes the outputs of layers that the fused softmax cannot compute (soft cap, sinks) into `out` [tokens, heads,
    size] as well.
    """
    longest = group.slots.shape[1]
    for member, index in enumerate(group.members):
        watched = batch.watched.index(index) if index in batch.watched else None
        if layer.is_softmax and watched is None:
            continue
        keys = inputs.keys[member]
        values = inputs.values[member]
        for start, weights in _weights(layer, inputs.query[member], keys, inputs.visible[member]):
            if not layer.is_softmax:
                chunk_tokens = group.tokens[member, start : start + CHUNK]
                chunk_output = (weights.to(values.dtype) @ values.unsqueeze(1)).flatten(0, 1)
                out[chunk_tokens] = chunk_output.transpose(0, 1)
            if watched is not None:
                # The mean over query heads and the sum over new tokens; tokens that are readable twice count once.
                mass = weights.mean(1).sum(1).view(weights.shape[0], -1, longest).sum(1)
                batch.attention[layer.place, watched, :, :longest] += mass


def _unpacked(batch: ForwardBatch, group: Group, ring: Tensor | None, stored: Tensor, new: Tensor) -> Tensor:
    """Return keys or values [sequences, KV heads, longest, size] with the newest ones before and in the batch unpacked.

    `ring` are those before the batch by row, None if all are unpacked; `new` [tokens, KV heads, size] those in it.
    """
    if ring is None:
        return stored
    numbers = stored.clone()
    length = batch.length[group.members]
    residual = ring.shape[2]
    # The place of each slot's token relative to the first new token of its sequence.
    behind = torch.arange(stored.shape[2], device=stored.device) - length[:, None]
    member, token = ((behind >= -residual) & (behind < 0)).nonzero(as_tuple=True)
    place = (batch.positions[group.tokens[member, 0]] + behind[member, token]) % residual
    numbers[member, :, token] = ring[batch.row[group.members][member], :, place]
    member, token = ((behind >= 0) & (behind < group.tokens.shape[1])).nonzero(as_tuple=True)
    numbers[member, :, token] = new[group.tokens[member, behind[member, token]]]
    return numbers


def _weights(layer: Layer, query: Tensor, keys: Tensor, visible: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of the new tokens: the first one, and their weights [KV heads, query heads of each, new, cached].

    Query [heads, new, size], keys [KV heads, cached, size], visible [heads or 1, new, cached].
    """
    heads, new, size = query.shape
    kv_heads = keys.shape[0]
    for start in range(0, new, CHUNK):
        chunk = query[:, start : start + CHUNK].reshape(kv_heads, heads // kv_heads, -1, size)
        scores = chunk.float() @ keys.float().unsqueeze(1).transpose(-1, -2) * layer.scaling
        mask = visible[:, start : start + CHUNK].expand(heads, -1, -1).reshape(scores.shape)
        yield start, layer.weights(scores, mask)
