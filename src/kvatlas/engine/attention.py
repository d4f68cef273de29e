"""The attention function that every model runs under: new keys and values go into the slots, queries read them there.

It is registered with transformers as "kvatlas". Masks are ours alone: transformers builds none for an attention
function without a registered mask function, and each call gets its `Pass` through the model's keyword arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from kvatlas.core import KvatlasError
from kvatlas.engine.cache import SHELF, Slots, aligned
from kvatlas.engine.chunks import Chunks
from kvatlas.engine.graphs import Fixed

if TYPE_CHECKING:
    from torch import Tensor

#: Rows of one shelf are computed together while reading past their ends, in bytes of a layer's keys and values, costs
#: less than another call.
WASTE = 128 * 2**10
#: Queries whose attention weights are held at a time where a policy asked to see them during prefill.
CHUNK = 256
#: What transformers passes to layers of soft-capped and sink attention.
UNSUPPORTED = ("softcap", "s_aux")


@dataclass(frozen=True)
class Segment:
    """Neighbours on a shelf whose attention is computed together, over the first `used` slots.

    They are the places from `first` on, and the rows from `start` to `stop` of the line of all rows in the order of
    their places. `mask` [rows, used] is 0 or -inf. `watched` are those that show their attention, as their numbers
    in this segment and in `Pass.attention`.
    """

    shelf: int
    first: int
    start: int
    stop: int
    used: int
    mask: Tensor
    watched: tuple[Tensor, ...] | None

    @property
    def places(self) -> slice:
        """Where its rows are on the shelf."""
        return slice(self.first, self.first + self.stop - self.start)


@dataclass
class Pass:
    """One forward pass: the prefill of one row (`prefill` is its number) or one token for each of the first rows.

    The last `idle` of the model's batch are no rows: they are there to make up its size alone. `watched` are the rows,
    ascending, whose policies asked to see attention: `attention` [watched, layers, KV heads, slots] gathers the weights
    that their new tokens pay, summed over them and averaged over the query heads of each KV head. `remembered` are the
    rows whose policies asked for recent queries, which go into the rings of the slots, and `positions` the true
    positions of the rows' newest tokens. No other row pays for either. `places` [rows] are where the rows are. `ahead`
    are proposed tokens, lines of their own after the batch.
    """

    slots: Slots
    rows: int
    positions: Sequence[int] = ()
    prefill: int | None = None
    watched: tuple[int, ...] = ()
    remembered: tuple[int, ...] = ()
    idle: int = 0
    ahead: Chunks | None = None
    places: Tensor = field(init=False)
    attention: Tensor = field(init=False)

    def __post_init__(self) -> None:
        slots, device = self.slots, self.slots.device
        if self.prefill is not None:
            self.places = torch.tensor([slots.places[self.prefill]], device=device)
            used = self.positions[0] + 1
        else:
            self.places = torch.tensor(slots.places[: self.rows], device=device)
            self.lengths = torch.tensor(slots.lengths[: self.rows], device=device)
            self._line_up()
            used = max(segment.used for segment in self.segments)
            self.now = torch.tensor(self.positions, device=device, dtype=torch.int32)
            self.remembering = torch.tensor(self.remembered, device=device)
            self.ring = torch.tensor([self.positions[row] % slots.ring for row in self.remembered], device=device)
        if self.watched:
            shape = slots.shape
            self.attention = torch.zeros(
                len(self.watched), shape.layers, shape.kv_heads, used, device=device, dtype=slots.dtype
            )

    @property
    def batch(self) -> int:
        """Rows and idle ones: lines of the model's batch before those of proposed tokens."""
        return self.rows + self.idle

    def _line_up(self) -> None:
        """The line of all rows in the order of their places, and its segments."""
        slots, device = self.slots, self.slots.device
        line = sorted(range(self.rows), key=slots.places.__getitem__)
        #: Rows in the order of the line, and where in the line each row is; None where they are the same.
        self.line = self.back = None
        if self.idle or line != list(range(self.rows)):
            back = [0] * (self.rows + self.idle)
            for place, row in enumerate(line):
                back[row] = place
            self.line, self.back = (torch.tensor(order, device=device) for order in (line, back))
        lengths = self.lengths if self.line is None else self.lengths[self.line]
        seen = {row: number for number, row in enumerate(self.watched)}
        costs = 2 * slots.shape.kv_heads * slots.shape.head_dim * slots.keys[0][0].element_size()
        ruler = torch.arange(aligned(max(slots.lengths[row] for row in line) + 1), device=device)
        self.segments: list[Segment] = []
        for start, stop, used in _together(slots, line, WASTE // costs):
            hidden = ruler[:used] > lengths[start:stop, None]
            mask = torch.zeros(hidden.shape, device=device, dtype=slots.dtype).masked_fill_(hidden, float("-inf"))
            shown = [(place, seen[row]) for place, row in enumerate(line[start:stop]) if row in seen]
            watched = torch.tensor(shown, device=device).unbind(1) if shown else None
            shelf, first = divmod(slots.places[line[start]], SHELF)
            self.segments.append(Segment(shelf, first, start, stop, used, mask, watched))
        #: Of each shelf in use: its number, its part of the line, its places in use and their lengths.
        self.shelves = []
        shelf_of = [slots.places[row] // SHELF for row in line]
        for shelf in sorted(set(shelf_of)):
            part = slice(shelf_of.index(shelf), shelf_of.index(shelf) + shelf_of.count(shelf))
            places = torch.tensor([slots.places[row] % SHELF for row in line[part]], device=device)
            self.shelves.append((shelf, part, places, lengths[part]))

    def masks(self, segment: Segment, layer: int, window: int | None) -> Tensor:
        """What a segment's new tokens see, 0 or -inf [rows, 1 or KV heads, 1, slots]; near enough in a window."""
        mask = segment.mask[:, None, None]
        if window is None:
            return mask
        first = segment.shelf * SHELF + segment.first
        rows = slice(first, first + segment.stop - segment.start)
        now = (self.now if self.line is None else self.now[self.line])[segment.start : segment.stop]
        cached = self.slots.positions_of(layer)[rows, :, None, : segment.used]
        near = cached > now[:, None, None, None] - window
        return mask.expand(near.shape).masked_fill(~near, float("-inf"))


def _together(slots: Slots, line: Sequence[int], waste: int) -> list[tuple[int, int, int]]:
    """Parts of the line to compute together (start, stop, slots): neighbours whose idle slots are at most `waste`."""
    parts: list[tuple[int, int, int]] = []
    wasted = 0
    for number, row in enumerate(line):
        place, used = slots.places[row], aligned(slots.lengths[row] + 1)
        if parts:
            start, stop, widest = parts[-1]
            wider = max(used, widest)
            more = wasted + (wider - widest) * (stop - start) + wider - used
            if place % SHELF and slots.places[line[number - 1]] == place - 1 and more <= waste:
                parts[-1], wasted = (start, number + 1, wider), more
                continue
        parts.append((number, number + 1, used))
        wasted = 0
    return parts


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kvatlas: Pass | Fixed,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens. query [rows, heads, new, size], key and value [rows, KV heads, new, size].

    `sliding_window` is the number of positions that a layer sees, itself included; None for all. Returns [rows, new,
    heads, size] and None, as transformers' attention interface wants it. Raises KvatlasError for layers whose attention
    is more than a softmax over earlier tokens: they would be silently wrong.
    """
    refuse_unsupported(others)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(kvatlas, Fixed):
        return kvatlas.attend(layer, query, key, value, scaling), None
    if kvatlas.prefill is not None:
        return _prefill(kvatlas, layer, query, key, value, scaling, sliding_window), None
    if kvatlas.ahead is None:
        return _decode(kvatlas, layer, query, key, value, scaling, sliding_window), None
    newest, later = slice(kvatlas.batch), slice(kvatlas.batch, None)
    out = _decode(kvatlas, layer, query[newest], key[newest], value[newest], scaling, sliding_window)
    ahead = kvatlas.ahead.attend(layer, query[later], key[later], value[later], scaling, sliding_window)
    return torch.cat([out, ahead]), None


def refuse_unsupported(others: Mapping[str, Any]) -> None:
    """KvatlasError if a layer asks for attention that is more than a softmax over earlier tokens."""
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise KvatlasError(
                f"The model has layers with {name} = {others[name]}; valid are models whose layers attend to all "
                "earlier tokens or to a sliding window of them."
            )


def _prefill(
    step: Pass, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    assert step.prefill is not None
    slots, row, length = step.slots, step.prefill, key.shape[2]
    place = slots.places[row]
    slots.key(layer, row)[:, :length] = key[0]
    slots.value(layer, row)[:, :length] = value[0]
    slots.scalings[layer] = scaling
    if step.watched:
        step.attention[:, layer] = _prompt_attention(query, key, scaling, window)
    if step.remembered:
        last = torch.arange(max(0, length - slots.ring), length, device=slots.device)
        slots.queries[layer][place, :, last % slots.ring] = query[0, :, last]
    grouped = query.shape[1] != key.shape[1]
    near = None
    if window is not None:
        positions = torch.arange(length, device=key.device)
        slots.positions_of(layer)[place, :, :length] = positions.int()
        slots.windows[layer] = window
        if length > window:
            back = positions[:, None] - positions
            near = (back >= 0) & (back < window)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=near is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _prompt_attention(query: Tensor, key: Tensor, scaling: float, window: int | None) -> Tensor:
    _, heads, length, size = query.shape
    kv_heads = key.shape[1]
    total = key.new_zeros(1, kv_heads, length)
    positions = torch.arange(length, device=key.device)
    for start in range(0, length, CHUNK):
        part = query[:, :, start : start + CHUNK].reshape(1, kv_heads, heads // kv_heads, -1, size)
        weights = part @ key.unsqueeze(2).transpose(-1, -2) * scaling
        back = positions[start : start + CHUNK, None] - positions
        hidden = (back < 0) | (back >= (window or length))
        total += weights.masked_fill(hidden, float("-inf")).softmax(-1).mean(2).sum(2)
    return total


def _decode(
    step: Pass, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    slots = step.slots
    batch, heads, _, size = query.shape
    if step.remembered:
        remembered = query[step.remembering, :, 0]
        slots.queries[layer][step.places[step.remembering], :, step.ring] = remembered
    if window is not None:
        slots.positions_of(layer)[step.places, :, step.lengths] = step.now[:, None]
    if step.line is not None:
        query, key, value = query[step.line], key[step.line], value[step.line]
    for shelf, part, places, lengths in step.shelves:
        slots.keys[layer][shelf][places, :, lengths] = key[part, :, 0]
        slots.values[layer][shelf][places, :, lengths] = value[part, :, 0]
    # The query heads that share a KV head stand where queries of one head would: no copy of keys for each of them.
    query = query.view(len(query), slots.shape.kv_heads, -1, size)
    parts = []
    for segment in step.segments:
        asking = query[segment.start : segment.stop]
        keys = slots.keys[layer][segment.shelf][segment.places, :, : segment.used]
        values = slots.values[layer][segment.shelf][segment.places, :, : segment.used]
        mask = step.masks(segment, layer, window)
        parts.append(F.scaled_dot_product_attention(asking, keys, values, attn_mask=mask, scale=scaling))
        if segment.watched is not None:
            own, among = segment.watched
            weights = asking[own] @ keys[own].transpose(-1, -2) * scaling + mask[own]
            step.attention[among, layer, :, : segment.used] = weights.softmax(-1).mean(2)
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    if step.back is not None:
        out = out[step.back]
    return out.reshape(batch, 1, heads, size)
