"""What several policies share: the attention of the last few queries, computed once, when a compression fires."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.policies.base import CacheView


def logits(cached: CacheView, layer: int) -> Tensor:
    """Return the layer's scores of q and k [KV heads, query heads of each, queries, cached], scaled and soft-capped as
    in the layer; -inf where q does not see the token."""
    import torch

    query, key = cached.query(layer), cached.key(layer)
    count, size = query.shape[1:]
    grouped = query.view(key.shape[0], -1, count, size)
    products: Tensor = grouped @ key.unsqueeze(1).transpose(-1, -2) * cached.scaling(layer)
    if softcap := cached.softcap(layer):
        products = softcap * (products / softcap).tanh()
    asked_at = torch.arange(cached.length - count, cached.length, device=key.device)
    back = asked_at[:, None] - positions(cached, layer)[:, None, None, :]
    unseen = (back < 0) | (back >= (cached.window(layer) or cached.length))
    return products.masked_fill(unseen, float("-inf"))


def attention(cached: CacheView, layer: int) -> Tensor:
    """Return the layer's attention weights [KV heads, query heads of each, queries, cached]: the softmax of `logits`,
    beside the layer's sinks if it has any."""
    import torch

    scores, sinks = logits(cached, layer), cached.sinks(layer)
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def positions(cached: CacheView, layer: int) -> Tensor:
    """True positions [KV heads or 1, cached] of a layer's tokens."""
    return cached.positions[min(layer, cached.positions.shape[0] - 1)]


def observing(cached: CacheView, layer: int, queries: int) -> Tensor:
    """Which tokens [KV heads or 1, cached] the last `queries` queries belong to: the observation window."""
    return positions(cached, layer) >= cached.length - queries


def pooled(scores: Tensor, kernel: int, kind: str) -> Tensor:
    """Mean (`avg`) or greatest (`max`) of the scores [..., cached] around each token; 0 beyond the ends."""
    from torch.nn import functional as F

    pool = F.max_pool1d if kind == "max" else F.avg_pool1d
    flat = F.pad(scores.reshape(1, -1, scores.shape[-1]), (kernel // 2, (kernel - 1) // 2))
    result: Tensor = pool(flat, kernel, stride=1)
    return result.view(scores.shape)
