"""The attention of the last few queries, computed when a compression fires, and its pooling, for several policies."""

from kvatlas.policies.cache_view import CacheView, Tensor


def logits(cached: CacheView, layer: int) -> Tensor:
    """Return the layer's scores of q and k [KV heads, query heads of each, queries, cached], scaled and soft-capped as
    in the layer; -inf for unseen tokens."""
    import torch

    query = cached.query(layer)
    key = cached.key(layer)
    count, size = query.shape[1:]
    grouped = query.view(key.shape[0], -1, count, size)
    products: Tensor = grouped @ key.unsqueeze(1).transpose(-1, -2) * cached.scaling(layer)
    if softcap := cached.softcap(layer):
        products = softcap * (products / softcap).tanh()
    query_at = torch.arange(cached.length - count, cached.length, device=key.device)
    back = query_at[:, None] - positions(cached, layer)[:, None, None, :]
    unseen = (back < 0) | (back >= (cached.window(layer) or cached.length))
    return products.masked_fill(unseen, float("-inf"))


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax of scores [..., cached]; 0 where all of them are -inf: a query may see no cached token."""
    is_empty = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(is_empty, 0.0)


def attention(cached: CacheView, layer: int) -> Tensor:
    """Return the layer's attention weights [KV heads, query heads of each, queries, cached]: the softmax of `logits`,
    beside the layer's sinks if it has any; 0 for a query that sees no cached token."""
    import torch

    scores = logits(cached, layer)
    sinks = cached.sinks(layer)
    if sinks is None:
        return softmax(scores)
    # The sink of a head takes a share of the softmax like one more token.
    sink_column = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink_column], -1).softmax(-1)[..., :-1]


def positions(cached: CacheView, layer: int) -> Tensor:
    """Return the true positions [KV heads or 1, cached] of a layer's tokens."""
    return cached.positions[min(layer, cached.positions.shape[0] - 1)]


def observing(cached: CacheView, layer: int, queries: int) -> Tensor:
    """Return a mask [KV heads or 1, cached] of the observation window: the tokens of the last `queries` queries."""
    return positions(cached, layer) >= cached.length - queries


def pooled(scores: Tensor, kernel: int, kind: str) -> Tensor:
    """Return the mean (`avg`) or greatest (`max`) of the scores [..., cached] around each token; 0 beyond the ends."""
    from torch.nn import functional as F

    pool = F.max_pool1d if kind == "max" else F.avg_pool1d
    flat = F.pad(scores.reshape(1, -1, scores.shape[-1]), (kernel // 2, (kernel - 1) // 2))
    result: Tensor = pool(flat, kernel, stride=1)
    return result.view(scores.shape)
