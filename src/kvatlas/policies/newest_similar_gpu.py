"""The search of `rkv` on a GPU in one kernel: it writes no table of similarities, and ends where all keys have one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Keys whose newest similar keys one program finds.
ROWS = tl.constexpr(64)
#: Keys that are compared with them at a time.
COLUMNS = tl.constexpr(128)


def newest_similar_in_one_kernel(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return what `rkv.newest_similar` returns, for keys [KV heads, cached, head size] of 16 bits on a GPU.

    In 32 bits, which the units for products of matrices do not take, it is many times slower than a table.
    """
    heads, length, head_size = unit.shape
    newest = torch.empty(heads, length, dtype=torch.int32, device=unit.device)
    programs = (triton.cdiv(length, ROWS.value), heads)
    channels = max(16, triton.next_power_of_2(head_size))
    _search_kernel[programs](unit.contiguous(), newest, length, head_size, threshold, channels)
    return newest.long()


@triton.jit
def _search_kernel(unit, newest, length, head_size, threshold, channel_count: tl.constexpr):
    keys_of_head = unit + tl.program_id(1).to(tl.int64) * length * head_size
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, channel_count)
    is_channel = channels < head_size
    key = tl.load(
        keys_of_head + rows[:, None] * head_size + channels[None, :],
        mask=(rows[:, None] < length) & is_channel[None, :],
        other=0.0,
    )
    # Rows past the end wait for nothing.
    found = tl.where(rows < length, -1, 0)
    start = ((length - 1) // COLUMNS) * COLUMNS
    while (start >= 0) & (tl.min(found, 0) < 0):
        columns = start + tl.arange(0, COLUMNS)
        other = tl.load(
            keys_of_head + columns[None, :] * head_size + channels[:, None],
            mask=(columns[None, :] < length) & is_channel[:, None],
            other=0.0,
        )
        similarity = tl.dot(key, other, input_precision="ieee")
        similarity = tl.where(columns[None, :] == rows[:, None], 0.0, similarity)
        is_similar = (similarity > threshold) & (columns[None, :] < length)
        found = tl.maximum(found, tl.max(tl.where(is_similar, columns[None, :], -1), 1))
        start -= COLUMNS
    tl.store(newest + tl.program_id(1) * length + rows, found, mask=rows < length)
