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
from kvatlas.engine.cache import Slots, aligned
from kvatlas.engine.chunks import Chunks

if TYPE_CHECKING:
    from torch import Tensor

#: Rows whose attention is computed together; each block pays for its own longest row only.
BLOCK = 16
#: Queries whose attention weights are held at a time where a policy asked to see them during prefill.
CHUNK = 256
#: What transformers passes to layers of soft-capped and sink attention.
UNSUPPORTED = ("softcap", "s_aux")


@dataclass
class Pass:
    """One forward pass: the prefill of one row (`prefill` is its number) or one token for each of the first rows.

    `watched` are the rows, ascending, whose policies asked to see attention: `attention` [watched, layers, KV heads,
    slots] gathers the weights that their new tokens pay, summed over them and averaged over the query heads of each KV
    head. `remembered` are the rows whose policies asked for recent queries, which go into the rings of the slots, and
    `positions` the true positions of the rows' newest tokens. No other row pays for either. `places` [rows] are where
    they are in the slots; `ahead` are proposed tokens, lines of their own after those of the rows.
    """

    slots: Slots
    rows: int
    positions: Sequence[int] = ()
    prefill: int | None = None
    watched: tuple[int, ...] = ()
    remembered: tuple[int, ...] = ()
    ahead: Chunks | None = None
    places: Tensor = field(init=False)
    attention: Tensor = field(init=False)

    def __post_init__(self) -> None:
        slots, device = self.slots, self.slots.device
        if self.prefill is not None:
            self.places = torch.tensor([self.prefill], device=device)
            used = self.positions[0] + 1
        else:
            lengths = slots.lengths[: self.rows]
            self.places = torch.arange(self.rows, device=device)
            self.lengths = torch.tensor(lengths, device=device)
            self.used = [aligned(max(lengths[start : start + BLOCK]) + 1) for start in range(0, self.rows, BLOCK)]
            used = max(self.used)
            visible = torch.arange(used, device=device) <= self.lengths[:, None]
            self.mask = torch.zeros(visible.shape, device=device, dtype=slots.dtype)
            self.mask.masked_fill_(~visible, float("-inf"))
            self.now = torch.tensor(self.positions, device=device, dtype=torch.int32)
            self.runs = _runs(self.watched)
            self.remembering = torch.tensor(self.remembered, device=device)
            self.ring = torch.tensor([self.positions[row] % slots.ring for row in self.remembered], device=device)
        if self.watched:
            shape = slots.shape
            self.attention = torch.zeros(
                len(self.watched), shape.layers, shape.kv_heads, used, device=device, dtype=slots.dtype
            )

    def masks(self, layer: int, window: int | None) -> Tensor:
        """What new tokens see, 0 or -inf [rows, 1 or KV heads, 1, slots]: in a window only positions near enough."""
        mask = self.mask[:, None, None]
        if window is None:
            return mask
        cached = self.slots.positions_of(layer)[: self.rows, :, None, : mask.shape[-1]]
        near = cached > self.now[:, None, None, None] - window
        return mask.expand(near.shape).masked_fill(~near, float("-inf"))


def _runs(rows: tuple[int, ...]) -> list[range]:
    """Ascending rows as runs of neighbours that lie in one block."""
    runs: list[range] = []
    for row in rows:
        if runs and row == runs[-1].stop and row % BLOCK:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kvatlas: Pass,
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
    if kvatlas.prefill is not None:
        return _prefill(kvatlas, layer, query, key, value, scaling, sliding_window), None
    if kvatlas.ahead is None:
        return _decode(kvatlas, layer, query, key, value, scaling, sliding_window), None
    newest, later = slice(kvatlas.rows), slice(kvatlas.rows, None)
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
    slots.keys[layer][row, :, :length] = key[0]
    slots.values[layer][row, :, :length] = value[0]
    if step.watched:
        step.attention[:, layer] = _prompt_attention(query, key, scaling, window)
    if step.remembered:
        last = torch.arange(max(0, length - slots.ring), length, device=slots.device)
        slots.queries[layer][row, :, last % slots.ring] = query[0, :, last]
    grouped = query.shape[1] != key.shape[1]
    near = None
    if window is not None:
        positions = torch.arange(length, device=key.device)
        slots.positions_of(layer)[row, :, :length] = positions.int()
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
    rows, heads, _, size = query.shape
    keys, values = step.slots.keys[layer], step.slots.values[layer]
    keys[step.places, :, step.lengths] = key[:, :, 0]
    values[step.places, :, step.lengths] = value[:, :, 0]
    if step.remembered:
        step.slots.queries[layer][step.remembering, :, step.ring] = query[step.remembering, :, 0]
    if window is not None:
        step.slots.positions_of(layer)[step.places, :, step.lengths] = step.now[:, None]
    masks = step.masks(layer, window)
    # The query heads that share a KV head stand where queries of one head would: no copy of keys for each of them.
    query = query.view(rows, keys.shape[1], heads // keys.shape[1], size)
    parts = []
    for block, used in enumerate(step.used):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, rows))
        mask = masks[part, ..., :used]
        parts.append(
            F.scaled_dot_product_attention(
                query[part], keys[part, :, :used], values[part, :, :used], attn_mask=mask, scale=scaling
            )
        )
    done = 0
    for run in step.runs:
        part, used = slice(run.start, run.stop), step.used[run.start // BLOCK]
        weights = query[part] @ keys[part, :, :used].transpose(-1, -2) * scaling + masks[part, ..., :used]
        step.attention[done : done + len(run), layer, :, :used] = weights.softmax(-1).mean(2)
        done += len(run)
    return torch.cat(parts).view(rows, 1, heads, size)
