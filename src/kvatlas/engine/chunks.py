"""Proposed tokens in one pass: attention of several tokens of a row at once, over that row's cache.

A chunk's first token is the newest of its row, which every pass feeds. The proposed ones after it are lines of their
own behind the batch: for all that is computed token by token they are rows like any other, so that on CPUs the same
kernels round them the same way. Only attention knows that the lines of a chunk share one cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from kvatlas.engine.cache import SMALLEST_BATCH, Slots, aligned

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.engine.attention import Pass


@dataclass(frozen=True)
class Chunk:
    """The proposed tokens of one row: lines `start` to `stop` of all proposed ones, from slot `at` on.

    `mask` [lines, slots] is 0 or -inf. `shown` are the lines that show their attention, as their numbers in this chunk
    and in `Chunks.attention`.
    """

    row: int
    start: int
    stop: int
    at: int
    mask: Tensor
    shown: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The slot after its last one."""
        return self.at + self.stop - self.start


@dataclass(frozen=True)
class Look:
    """What observers are shown of proposed tokens that were accepted: at most one of each row.

    `lines` are their numbers among all lines of the pass, `rows` theirs and `places` [lines] where these are in the
    slots, `entered` and `positions`
    [lines, 1] their slots and true positions, `attention` [watched, layers, KV heads, slots] what the lines `watched`
    pay.
    """

    slots: Slots
    rows: tuple[int, ...]
    lines: Tensor
    places: Tensor
    entered: Tensor
    positions: Tensor
    watched: tuple[int, ...]
    attention: Tensor
    prefill: None = None


@dataclass
class Chunks:
    """All proposed tokens of a pass: `proposed` [rows] says how many each row has behind its newest
    token, whose `newest` pass knows which rows show attention and remember queries.

    `exact` reads the cache line by line, as in decoding: bit for bit the same on
    CPUs; otherwise all queries of a chunk read it together, which is faster.
    """

    slots: Slots
    proposed: Sequence[int]
    newest: Pass
    exact: bool
    chunks: list[Chunk] = field(init=False, default_factory=list)
    rows: list[int] = field(init=False, default_factory=list)
    attention: Tensor = field(init=False)

    def __post_init__(self) -> None:
        slots, device = self.slots, self.slots.device
        lines = [(row, step) for row, count in enumerate(self.proposed) for step in range(1, count + 1)]
        self.rows = [row for row, _ in lines]
        self.places = self.newest.places[self.rows]
        self.now = torch.tensor(
            [self.newest.positions[row] + step for row, step in lines], device=device, dtype=torch.int32
        )
        self.entered = torch.tensor([slots.lengths[row] + step for row, step in lines], device=device)
        #: Numbers of the lines that show attention, with their places in `attention`.
        self.shows = {
            line: place for place, line in enumerate(n for n, row in enumerate(self.rows) if row in self.newest.watched)
        }
        remembering = [line for line, row in enumerate(self.rows) if row in self.newest.remembered]
        self.remembering = torch.tensor(remembering, device=device)
        start = widest = 0
        for row, count in enumerate(self.proposed):
            if count:
                chunk = self._chunk(row, start, start + count)
                self.chunks.append(chunk)
                start, widest = chunk.stop, max(widest, chunk.mask.shape[-1])
        shape = slots.shape
        self.attention = torch.zeros(
            len(self.shows), shape.layers, shape.kv_heads, widest, device=device, dtype=slots.dtype
        )

    def _chunk(self, row: int, start: int, stop: int) -> Chunk:
        at = self.slots.lengths[row] + 1
        ruler = torch.arange(aligned(at + stop - start), device=self.slots.device)
        hidden = ruler > self.entered[start:stop, None]
        mask = torch.zeros(hidden.shape, device=ruler.device, dtype=self.slots.dtype).masked_fill_(
            hidden, float("-inf")
        )
        shown = tuple((line - start, self.shows[line]) for line in range(start, stop) if line in self.shows)
        return Chunk(row, start, stop, at, mask, shown)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attention of the proposed tokens, after the newest ones entered their slots.

        query [lines, heads, 1, size], key and value [lines, KV heads, 1, size]; returns [lines, 1, heads, size].
        """
        slots = self.slots
        lines, heads, _, size = query.shape
        if len(self.remembering):
            places, ring = self.places[self.remembering], self.now[self.remembering].long() % slots.ring
            slots.queries[layer][places, :, ring] = query[self.remembering, :, 0]
        if window is not None:
            slots.positions_of(layer)[self.places, :, self.entered] = self.now[:, None]
        asking = query.view(lines, key.shape[1], -1, size)
        parts = []
        for chunk in self.chunks:
            part, used = slice(chunk.start, chunk.stop), chunk.mask.shape[-1]
            keys, values = slots.key(layer, chunk.row), slots.value(layer, chunk.row)
            keys[:, chunk.at : chunk.end] = key[part, :, 0].transpose(0, 1)
            values[:, chunk.at : chunk.end] = value[part, :, 0].transpose(0, 1)
            keys, values, mask = keys[None, :, :used], values[None, :, :used], self._mask(chunk, layer, window)
            read = _line_by_line if self.exact else _together
            parts.append(read(asking[part], keys, values, mask, scaling))
            for own, among in chunk.shown:
                weights = asking[chunk.start + own, None] @ keys.transpose(-1, -2) * scaling + mask[own]
                self.attention[among, layer, :, :used] = weights.softmax(-1).mean(2)[0]
        return torch.cat(parts).reshape(lines, 1, heads, size)

    def _mask(self, chunk: Chunk, layer: int, window: int | None) -> Tensor:
        """What a chunk's tokens see, 0 or -inf [lines, 1 or KV heads, 1, slots]."""
        mask = chunk.mask[:, None, None]
        if window is None:
            return mask
        cached = self.slots.positions_of(layer)[self.slots.places[chunk.row], None, :, None, : mask.shape[-1]]
        near = cached > self.now[chunk.start : chunk.stop, None, None, None] - window
        return mask.expand(near.shape).masked_fill(~near, float("-inf"))

    def looks(self, accepted: Sequence[int], asking: Sequence[bool]) -> Iterator[Look]:
        """What is shown after the draw, in the order of decoding: the first accepted tokens of all rows, the second...

        `accepted` [rows] counts those of each row, `asking` says whose policies want to see something. Short looks
        repeat their last line, because with few of them CPU kernels round differently.
        """
        for step in range(max(accepted, default=0)):
            chosen = [c.start + step for c in self.chunks if accepted[c.row] > step and asking[c.row]]
            if not chosen:
                return
            chosen += chosen[-1:] * (SMALLEST_BATCH - len(chosen))
            lines = torch.tensor(chosen, device=self.slots.device)
            watched = tuple(number for number, line in enumerate(chosen) if line in self.shows)
            yield Look(
                slots=self.slots,
                rows=tuple(self.rows[line] for line in chosen),
                lines=lines + self.newest.batch,
                places=self.places[lines],
                entered=self.entered[lines, None],
                positions=self.now[lines, None].long(),
                watched=watched,
                attention=self.attention[[self.shows[chosen[number]] for number in watched]],
            )


def _line_by_line(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    shape = (len(query), -1, -1, -1)
    return F.scaled_dot_product_attention(
        query, keys.expand(shape), values.expand(shape), attn_mask=mask, scale=scaling
    )


def _together(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    lines, kv_heads, group, size = query.shape
    asking = query.transpose(0, 1).reshape(1, kv_heads, lines * group, size)
    seen = mask.expand(-1, -1, group, -1).transpose(0, 1).reshape(1, mask.shape[1], lines * group, -1)
    out = F.scaled_dot_product_attention(asking, keys, values, attn_mask=seen, scale=scaling)
    return out.view(kv_heads, lines, group, size).transpose(0, 1)
