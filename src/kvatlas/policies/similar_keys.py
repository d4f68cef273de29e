"""Which keys repeat one another: of each key, the newest that is similar to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: Keys that are gone through at a time.
BLOCK = 512
#: Similarities that are held at a time.
PAIRS = 2**19
#: What products of keys of norm 1 are off by at most in bfloat16: both keys and the product round by 2 ** -9.
MARGIN = 2**-7


def newest_similar(unit: Tensor, threshold: float) -> Tensor:
    """The number of the newest key with a similarity above the threshold for each of the keys [cached, head size], of
    norm 1; -1 where there is none. A key's similarity to itself counts as 0.

    Blocks of keys are compared from the newest on, each with the older keys that have found none yet: most find theirs
    in the first few blocks. Such a comparison counts for both sides, so that a key is compared with older ones beyond
    its block where they have settled alone, and hardly any pair twice.
    """
    import torch

    search = _Search(unit, threshold)
    number = torch.arange(len(unit), device=unit.device)
    if len(unit) <= BLOCK:
        # All pairs at once: for few keys a search takes longer.
        similar = (unit @ unit.T).fill_diagonal_(0.0) > threshold
        return torch.where(similar, number, -1).amax(-1) if len(unit) else number
    newest = torch.full_like(number, -1)
    pending = settled = number[:0]
    for stop in range(len(unit), 0, -BLOCK):
        start = max(0, stop - BLOCK)
        block, waiting = number[start:stop], newest[:stop] < 0
        own, older = block[waiting[start:]], number[:start][waiting[:start]]
        settled = torch.cat([block[~waiting[start:]], settled])
        for rows, similar in search.pairs(own, block):
            newest[rows] = block[_last(similar)]
        own = own[newest[own] < 0]
        for rows, similar in search.pairs(older, block):
            newest[rows] = block[_last(similar)]
            latest = torch.where(similar[:, own - start], rows[:, None], -1).amax(0)
            newest[own] = torch.maximum(newest[own], latest)
        # A few columns take as long as many.
        if len(settled) > BLOCK // 4 or start == 0:
            for rows, similar in search.pairs(pending, settled):
                newest[rows] = torch.maximum(newest[rows], settled[_last(similar)])
            settled = settled[:0]
            pending = pending[newest[pending] < start]
        pending = torch.cat([pending, own])
    return newest


class _Search:
    """Similar pairs among keys [cached, head size] of norm 1.

    Where the processor multiplies in bfloat16, it sorts out pairs that are below the threshold by more than its error;
    what is left is compared as it is.
    """

    def __init__(self, unit: Tensor, threshold: float) -> None:
        self.unit, self.threshold = unit, threshold
        self.rough = unit.bfloat16() if threshold > MARGIN and _has_bfloat16(unit) else None

    def pairs(self, rows: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows that are similar to a column, a part of them at a time, and to which [rows, columns]; both ascend."""
        import torch

        count = PAIRS // max(1, len(columns))
        if self.rough is not None and len(rows) and len(columns):
            rows = self._possible(rows, columns, self.rough, count)
        for part in torch.split(rows, count) if len(rows) and len(columns) else ():
            similarity = _similarity(self.unit, part, columns)
            some = (similarity.amax(-1) > self.threshold).nonzero().squeeze(1)
            if len(some):
                yield part[some], similarity.index_select(0, some) > self.threshold

    def _possible(self, rows: Tensor, columns: Tensor, rough: Tensor, count: int) -> Tensor:
        """Rows that may be similar to a column, of which `count` are looked at at a time."""
        import torch

        # Numbers that are not negative are ordered as their bits are, and these are compared faster.
        parts = [_similarity(rough, part, columns).view(torch.int16).amax(-1) for part in torch.split(rows, count)]
        return rows[torch.cat(parts).view(torch.bfloat16) > self.threshold - MARGIN]


def _similarity(keys: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Products of some keys with others, both in ascending order; a key's with itself is 0."""
    import torch

    similarity = keys.index_select(0, rows) @ keys.index_select(0, columns).T
    if rows[0] <= columns[-1] and columns[0] <= rows[-1]:
        index = torch.searchsorted(columns, rows).clamp(max=len(columns) - 1)
        itself = (columns[index] == rows).nonzero().squeeze(1)
        similarity[itself, index[itself]] = 0.0
    return similarity


def _last(similar: Tensor) -> Tensor:
    """The last column that is similar to each of the rows."""
    return similar.shape[-1] - 1 - similar.flip(-1).byte().argmax(-1)


def _has_bfloat16(tensor: Tensor) -> bool:
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return tensor.device.type == "cpu" and bool(capabilities.get("avx512_bf16"))
