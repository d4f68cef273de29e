"""Attention on CUDA: FlexAttention over the pages of the cache, one new token for every sequence.

Its decode kernel splits a sequence's keys and values over the GPU's processors and reads only the pages in use (Dong et
al., "Flex Attention", arXiv 2412.05496; splitting: Dao et al., "Flash-Decoding for long-context inference", 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from kvatlas.engine.attention import ForwardBatch, ReferenceBackend
from kvatlas.engine.cache import Layer

#: Tokens of a page: the block that the kernel reads at a time.
BLOCK = 128


class FlexBackend(ReferenceBackend):
    """FlexAttention if every sequence has one new token.

    Plain torch for chunks, windows, soft caps, sinks and watched attention.
    """

    name = "flex"
    page_size = BLOCK

    def __init__(self, compiled: bool) -> None:
        self.kernel = torch.compile(flex.flex_attention) if compiled else flex.flex_attention

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not layer.plain or batch.watched or not batch.decoding or batch.cache.packed:
            return super().attend(batch, layer, query, key, value)
        if not batch.derived:
            batch.derived.update(_paged(batch))
        entered = batch.derived["entered"]
        keys = batch.cache.keys[layer.place]
        values = batch.cache.values[layer.place]
        keys[:, entered] = key.transpose(0, 1)
        values[:, entered] = value.transpose(0, 1)
        # The query heads of a KV head take the place of queries of one head, so that any number of them is split.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        # The kernel that splits sequences supports one number of them; for a dynamic number torch takes another kernel.
        torch._dynamo.mark_static(grouped, 0)
        out: Tensor = self.kernel(
            grouped, keys[None], values[None], block_mask=batch.derived["mask"], scale=layer.scaling
        )
        return out.reshape(*query.shape[:2], -1)


def _paged(batch: ForwardBatch) -> dict[str, Any]:
    """Return the slots of the new tokens, and the mask of each sequence page by page, without transfers to the host."""
    cache = batch.cache
    device = batch.length.device
    slots = cache.keys[0].shape[1]
    heads_per_kv_head = cache.shape.heads // cache.shape.kv_heads
    pages = slots // BLOCK
    table = cache.table[batch.row][:, :pages]
    page_index = torch.arange(table.shape[1], dtype=torch.int32, device=device)
    used = page_index * BLOCK <= batch.length[:, None]
    used_pages = torch.where(used, table, 0).long()
    # The sequence that reads each page, and the page's index in it.
    owner = torch.full((pages,), -1, dtype=torch.int32, device=device)
    members = torch.arange(len(table), dtype=torch.int32, device=device)
    owner.scatter_(0, used_pages.flatten(), members[:, None].expand_as(used_pages).flatten())
    order = torch.zeros(pages, dtype=torch.int32, device=device)
    order.scatter_(0, used_pages.flatten(), page_index.expand_as(used_pages).flatten())
    # Page 0, which belongs to no sequence, fills the rest of the table.
    owner[:1].fill_(-1)
    length = batch.length

    def seen(row: Tensor, _head: Tensor, _query: Tensor, slot: Tensor) -> Tensor:
        page = slot // BLOCK
        visible: Tensor = (owner[page] == row) & (order[page] * BLOCK + slot % BLOCK <= length[row])
        return visible

    blocks = used.sum(1, dtype=torch.int32)[:, None, None]
    indices = torch.nn.functional.pad(table, (0, pages - table.shape[1]))[:, None, None].contiguous()
    mask = flex.BlockMask.from_kv_blocks(
        blocks, indices, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(heads_per_kv_head, slots), compute_q_blocks=False
    )
    return {"entered": batch.entered_slots, "mask": mask}
