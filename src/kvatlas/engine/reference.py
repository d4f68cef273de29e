"""Attention in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvatlas.engine.attention import AttentionBackend
from kvatlas.engine.batch import ForwardBatch, SequenceGroup
from kvatlas.engine.cache import Layer

#: Queries whose observed attention weights are in memory at a time.
CHUNK = 256


class ReferenceBackend(AttentionBackend):
    """Plain torch on any device: the oracle of the tests, and the fallback."""

    name = "reference"

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = batch.cache
        entered = batch.entered_slots
        cache.write(layer.place, entered, key, value, batch.positions)
        if layer.window is not None:
            cache.watch_window(layer.place)[:, entered] = batch.positions32

        out = query.new_empty(*query.shape[:2], value.shape[2])
        for group in batch.groups:
            inputs = _group_inputs(batch, layer, group, query, key, value)
            if layer.is_softmax:
                is_grouped = query.shape[1] != key.shape[1]
                output = F.scaled_dot_product_attention(*inputs, scale=layer.scaling, enable_gqa=is_grouped)
                out[group.tokens] = output.transpose(1, 2)
            _add_explicit_weights(batch, layer, group, inputs, out)
        batch.keep_recent(layer.place, key, value)
        return out


#: The inputs of attention for one group: queries [sequences, heads, new, size], keys and values [sequences, KV heads,
#: readable, size], and a mask [sequences, heads or 1, new, readable].
GroupInputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _group_inputs(
    batch: ForwardBatch, layer: Layer, group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor
) -> GroupInputs:
    """Return the inputs of attention for one group.

    Every cached token is readable once. If the newest ones are kept unpacked, it is readable twice: all tokens as they
    are stored, and behind them all tokens with the newest unpacked. A new token sees one of the two.
    """
    cache = batch.cache
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
        keys = torch.cat([keys, _newest_unpacked(batch, group, recent_keys, keys, key)], 2)
        values = torch.cat([values, _newest_unpacked(batch, group, recent_values, values, value)], 2)
        lengths = batch.length[group.members, None] + torch.arange(group.tokens.shape[1], device=query.device)
        first_unpacked = lengths[..., None] - cache.storage.residual
        is_unpacked = (torch.arange(longest, device=query.device) > first_unpacked)[:, None]
        visible = torch.cat([visible & ~is_unpacked, visible & is_unpacked], -1)
    return query[group.tokens].transpose(1, 2), keys, values, visible


def _add_explicit_weights(
    batch: ForwardBatch, layer: Layer, group: SequenceGroup, inputs: GroupInputs, out: Tensor
) -> None:
    """Add the weights of the watched sequences of a group to `batch.attention`.

    Writes the outputs of layers that the fused softmax cannot compute (soft cap, sinks) into `out` [tokens, heads,
    size] as well.
    """
    longest = group.slots.shape[1]
    for member, index in enumerate(group.members):
        watched = batch.watched.index(index) if index in batch.watched else None
        if layer.is_softmax and watched is None:
            continue
        query, keys, values, visible = (tensor[member] for tensor in inputs)
        heads, new, size = query.shape
        kv_heads = keys.shape[0]

        # The weights [KV heads, query heads of each, new, readable] of some of the new tokens at a time.
        for start in range(0, new, CHUNK):
            chunk = query[:, start : start + CHUNK].reshape(kv_heads, heads // kv_heads, -1, size)
            scores = chunk.float() @ keys.float().unsqueeze(1).transpose(-1, -2) * layer.scaling
            mask = visible[:, start : start + CHUNK].expand(heads, -1, -1).reshape(scores.shape)
            weights = layer.weights(scores, mask)
            if not layer.is_softmax:
                chunk_output = (weights.to(values.dtype) @ values.unsqueeze(1)).flatten(0, 1)
                out[group.tokens[member, start : start + CHUNK]] = chunk_output.transpose(0, 1)
            if watched is not None:
                # The mean over query heads and the sum over new tokens; tokens that are readable twice count once.
                mass = weights.mean(1).sum(1).view(kv_heads, -1, longest).sum(1)
                batch.attention[layer.place, watched, :, :longest] += mass


def _newest_unpacked(
    batch: ForwardBatch, group: SequenceGroup, ring: Tensor | None, stored: Tensor, new: Tensor
) -> Tensor:
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
