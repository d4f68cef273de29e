"""Attention on CUDA: FlexAttention over the pages of the cache, one new token for every sequence.

Its decode kernel splits a sequence's keys and values over the GPU's processors and reads only the pages in use (Dong et
al., "Flex Attention", arXiv 2412.05496; splitting: Dao et al., "Flash-Decoding for long-context inference", 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from kvatlas import machine
from kvatlas.core import Sampling
from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import GPU_PAGE, KVCache, Layer
from kvatlas.engine.gpu.compiled import compiled_layers
from kvatlas.engine.gpu.graphs import CudaGraphRunner
from kvatlas.engine.reference import ReferenceBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Of torch's compiler: FlexAttention is compiled for each number of sequences of each model, up to so many times, and
#: numbers of layers are constants.
COMPILING = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096, "specialize_float": True}

#: Parts of all sequences and KV heads together that keep the processors of a GPU busy: eight for each of an H100's.
PARTS = 1056
#: The most parts of one sequence.
MOST_PARTS = 64


class FlexBackend(ReferenceBackend):
    """FlexAttention if every sequence has one new token, fused attention for prompts.

    Plain torch for windows, soft caps, sinks, packed storage and watched attention of prompts.
    """

    name = "flex"
    page_size = GPU_PAGE

    def __init__(self, compiled: bool) -> None:
        self.kernel: Any = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
        self.weights: Callable[..., Tensor] = machine.compiled(_watched_weights) if compiled else _watched_weights

    def attend(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        fits = layer.plain and not batch.cache.packed
        if fits and batch.decoding:
            return self._decode(batch, layer, query, key, value)
        if fits and not batch.watched:
            return _read_prompts(batch, layer, query, key, value)
        return super().attend(batch, layer, query, key, value)

    def decoding(self, model: PreTrainedModel) -> AbstractContextManager[Any]:
        return compiled_layers(model)

    def passing(self) -> AbstractContextManager[Any]:
        # Of one pass alone: other engines may decode in turns with this one, or in another thread.
        context: AbstractContextManager[Any] = torch._dynamo.config.patch(COMPILING)
        return context

    def graph_runner(self, cache: KVCache, sampling: Sampling) -> CudaGraphRunner:
        return CudaGraphRunner(cache, sampling)

    def _decode(self, batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of one new token for each sequence."""
        if not batch.derived:
            batch.derived.update(_paged(batch))
        entered = batch.derived["entered"]
        keys = batch.cache.keys[layer.place]
        values = batch.cache.values[layer.place]

        keys[:, entered] = key.transpose(0, 1)
        values[:, entered] = value.transpose(0, 1)

        # The query heads of a KV head take the place of queries of one head, so that any number of them is split.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        parts = 1
        while parts < MOST_PARTS and parts * len(grouped) * grouped.shape[1] < PARTS:
            parts *= 2
        options = {"SPLIT_KV": parts}
        is_short = grouped.is_cuda and grouped.element_size() == 2
        if is_short and torch.cuda.get_device_properties(grouped.device).major == 9:
            # Loads ahead of their use, as Hopper needs them: torch's own choice for it has a single stage.
            options |= {"num_stages": 3, "num_warps": 4}

        # The kernel that splits sequences supports one number of them; for a dynamic number torch takes another kernel.
        torch._dynamo.mark_static(grouped, 0)
        out: Tensor
        out, extra = self.kernel(
            grouped,
            keys[None],
            values[None],
            block_mask=batch.derived["mask"],
            scale=layer.scaling,
            kernel_options=options,
            return_aux=flex.AuxRequest(lse=bool(batch.watched)),
        )

        if batch.watched:
            watched = batch.derived["watched"]
            batch.attention[layer.place] = self.weights(
                grouped[watched], keys, extra.lse[watched], *batch.derived["readable"], layer.scaling
            )
        return out.reshape(*query.shape[:2], -1)


def _read_prompts(batch: ForwardBatch, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of several new tokens for each sequence, one sequence after the other.

    The kernels of torch that keep no table of all weights take no mask and heads in groups, or a mask and no groups.
    """
    cache = batch.cache
    cache.write(layer.place, batch.entered_slots, key, value, batch.positions)
    out = query.new_empty(*query.shape[:2], value.shape[2])
    for index, row in enumerate(batch.rows):
        cached = batch.lengths[index]
        count = batch.counts[index]
        new = slice(batch.starts[index], batch.starts[index] + count)
        keys = key[new].transpose(0, 1)
        values = value[new].transpose(0, 1)
        visible = None
        if cached:
            logical = torch.arange(cached + count, device=query.device)
            slots = batch.slots(torch.full_like(logical, row), logical)
            heads_per_kv_head = query.shape[1] // key.shape[1]
            keys = cache.keys[layer.place][:, slots].repeat_interleave(heads_per_kv_head, 0)
            values = cache.values[layer.place][:, slots].repeat_interleave(heads_per_kv_head, 0)
            visible = logical <= logical[cached:, None]

        output = F.scaled_dot_product_attention(
            query[new].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible,
            is_causal=visible is None,
            scale=layer.scaling,
            enable_gqa=len(keys) != query.shape[1],
        )
        out[new] = output[0].transpose(0, 1)
    return out


def _watched_weights(
    query: Tensor, keys: Tensor, log_sums: Tensor, slots: Tensor, readable: Tensor, scaling: float
) -> Tensor:
    """Return the attention weights [watched, KV heads, tokens], the mean over the query heads of each KV head.

    query [watched, KV heads, query heads of each, size]; keys [KV heads, slots, size]; `log_sums` [watched, KV heads,
    query heads of each] are logarithms of the sums of exponentials; `slots` [watched, tokens] the slot of each token,
    `readable` which of them are a sequence's.
    """
    cached = keys[:, slots].transpose(0, 1)
    scores = (query[:, :, :, None].float() * cached[:, :, None].float()).sum(-1) * scaling
    weights = (scores - log_sums[..., None].float()).exp().mean(2)
    return weights.masked_fill(~readable[:, None], 0.0)


def _paged(batch: ForwardBatch) -> dict[str, Any]:
    """Return what all layers need to read the pages of a batch, without transfers to the host.

    `entered` are the slots of the new tokens, `mask` is the mask of each sequence page by page; for watched attention
    `watched` are the indices of these sequences, `readable` the slots of their tokens and which of them are filled.
    """
    cache = batch.cache
    device = batch.length.device
    slots = cache.keys[0].shape[1]
    heads_per_kv_head = cache.shape.heads // cache.shape.kv_heads
    pages = slots // GPU_PAGE
    table = cache.table[batch.row][:, :pages]
    page_index = torch.arange(table.shape[1], dtype=torch.int32, device=device)
    used = page_index * GPU_PAGE <= batch.length[:, None]
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
        page = slot // GPU_PAGE
        visible: Tensor = (owner[page] == row) & (order[page] * GPU_PAGE + slot % GPU_PAGE <= length[row])
        return visible

    blocks = used.sum(1, dtype=torch.int32)[:, None, None]
    indices = F.pad(table, (0, pages - table.shape[1]))[:, None, None].contiguous()
    mask = flex.BlockMask.from_kv_blocks(
        blocks,
        indices,
        BLOCK_SIZE=GPU_PAGE,
        mask_mod=seen,
        seq_lengths=(heads_per_kv_head, slots),
        compute_q_blocks=False,
    )

    derived = {"entered": batch.entered_slots, "mask": mask}
    if batch.watched:
        # A step for all sequences is captured, one for some of them is not.
        whole = batch.watched == tuple(range(len(batch.rows)))
        watched = slice(None) if whole else torch.tensor(batch.watched, device=device)
        logical = torch.arange(batch.attention.shape[-1], device=device)
        # A table may be wider than all pages that there are.
        page = (logical // GPU_PAGE).clamp(max=used_pages.shape[1] - 1)
        token_slots = used_pages[watched][:, page] * GPU_PAGE + logical % GPU_PAGE
        derived |= {"watched": watched, "readable": (token_slots, logical <= length[watched, None])}
    return derived
