"""`rkv`: tokens with attention from the last queries and keys that no later token repeats stay (R-KV)."""

from dataclasses import dataclass

from kvatlas.machine import compiles
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, scope_param
from kvatlas.policies.parameter_types import choice_param, float_param, int_param
from kvatlas.policies.recent import logits, observing, pooled, softmax

#: Keys in a block of the search.
BLOCK = 512
#: Similarities in memory at a time.
PAIRS = 2**19
#: Keys in a block where all keys of all heads are compared with it.
BLOCK_OF_ALL = 1024


@dataclass(frozen=True)
class RKV(CompressingPolicy):
    """Importance less redundancy: score(t) = mix * I(t) - (1 - mix) * R(t).

    Source: arXiv 2505.24133, section 3, and the authors' code. I: the logits of the last `queries` queries, the
    greatest over the query heads of each KV head, softmax over the tokens before this observation window, mean over the
    queries, greatest of `kernel` neighbours. R: softmax over the tokens j of the mean over i of the cosine similarity
    of keys i and j, where a token's similarity to itself is 0 and so is, for each i, the one to the newest token j with
    a similarity above `threshold`, so that the last of several repetitions is not held redundant. The observation
    window stays. In the authors' code a token that is similar to no other spares the first token instead; here it
    spares none unless `unlike` says so. Its buffer and budget are replaced by kv_budget, ratio and local_window: R-KV's
    budget is the length after a compression, which comes every 128 tokens; kv_budget is the length at which one
    fires. R-KV's budget B is kv_budget B + 128, local_window 8 and ratio (B - 8) / (B + 120). It protects no prompt.

    queries: length of the observation window.
    kernel: neighbours in the pooling of importance.
    mix: weight of importance (lambda).
    threshold: cosine similarity above which keys repeat one another.
    unlike: the token spared by a token similar to no other: `none`, or the `first`, as in the authors' code.
    scope: the unit of one choice: head (published), layer or global, then with the mean of the scores.
    """

    queries: int = int_param(8, 1)
    kernel: int = int_param(7, 1)
    mix: float = float_param(0.1, 0, 1)
    threshold: float = float_param(0.5, -1, 1)
    unlike: str = choice_param("none", "first")
    scope: Scope = scope_param(Scope.HEAD)

    name = "rkv"
    version = 2
    summary = "keeps tokens that recent queries attend to and that no later token repeats"
    paper = "R-KV, arXiv 2505.24133"
    published = {
        "queries": "8",
        "kernel": "7",
        "mix": "0.1",
        "threshold": "0.5",
        "local_window": "8",
        "keep_prompt": "false",
    }
    observes = frozenset({Signal.QUERIES})

    def score(self, cached: CacheView) -> Tensor:
        def mixed(layer: int) -> Tensor:
            inside = observing(cached, layer, self.queries)
            before = logits(cached, layer).amax(1).masked_fill(inside[:, None], float("-inf"))
            importance = pooled(softmax(before).mean(1), self.kernel, "max")
            repeated = redundancy(cached.key(layer), self.threshold, self.unlike == "first")
            return (self.mix * importance - (1 - self.mix) * repeated).masked_fill(inside, float("inf"))

        return cached.each_layer(mixed)


def redundancy(key: Tensor, threshold: float, spare_first: bool = False) -> Tensor:
    """Return the share of each token's key [KV heads, cached, head size] in the repetition of keys; the sum is 1.

    The sum over i of the similarities of keys i and j is the product of key j and the sum of all keys, so that only the
    spared similarities need a search. With `spare_first` a key that is similar to no other spares the similarity to the
    first token, as in the authors' code.
    """
    import torch
    from torch.nn import functional as F

    unit = F.normalize(key, dim=-1, eps=1e-8)
    exact = unit.double()
    total = exact @ exact.sum(1).unsqueeze(-1) - exact.square().sum(-1, keepdim=True)
    newest = newest_similar(unit, threshold)
    if spare_first:
        newest = newest.clamp(min=0)
    # A key's similarity to itself is not in the sum.
    index = torch.arange(key.shape[1], device=key.device)
    spared = (newest >= 0) & (newest != index)
    newest = newest.clamp(min=0)
    similarity = (exact * exact.gather(1, newest[..., None].expand_as(exact))).sum(-1)
    total = total.squeeze(-1).scatter_add(1, newest, -similarity * spared)
    return (total / key.shape[1]).softmax(-1).to(key.dtype)


def newest_similar(unit: Tensor, threshold: float) -> Tensor:
    """Return for each of the keys [KV heads, cached, head size] of norm 1 the index of the newest key of its head with
    a similarity above the threshold; -1 without one. A key's similarity to itself counts as 0."""
    import torch

    if unit.is_cpu:
        return torch.stack([_newest_similar_of_head(head, threshold) for head in unit])
    if unit.is_cuda and unit.element_size() == 2 and compiles(unit.device):
        from kvatlas.policies import newest_similar_gpu

        return newest_similar_gpu.newest_similar_in_one_kernel(unit, threshold)
    return _newest_similar_of_all(unit, threshold)


def _newest_similar_of_head(unit: Tensor, threshold: float) -> Tensor:
    """Compute `newest_similar` for one head with the fewest products.

    Keys without a result are compared with blocks of keys from the newest on: most have one after the first blocks.
    """
    import torch

    # Numbers of 32 bits: half the memory of the table that is searched.
    newest = torch.full((len(unit),), -1, dtype=torch.int32)
    pending = torch.arange(len(unit))
    for stop in range(len(unit), 0, -BLOCK):
        start = max(0, stop - BLOCK)
        columns = torch.arange(start, stop, dtype=torch.int32)
        for rows in torch.split(pending, PAIRS // BLOCK):
            similarity = unit[rows] @ unit[start:stop].T
            inside = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            similarity[inside, rows[inside] - start] = 0.0
            newest[rows] = torch.where(similarity > threshold, columns, -1).amax(-1)
        pending = pending[newest[pending] < 0]
    return newest.long()


def _newest_similar_of_all(unit: Tensor, threshold: float) -> Tensor:
    """Compute `newest_similar` for all heads at once with the fewest operations, none of which the host waits for.

    A GPU computes all products sooner than it starts the operations that would leave some out.
    """
    import torch

    newest = unit.new_full(unit.shape[:2], -1, dtype=torch.long)
    for start in range(0, unit.shape[1], BLOCK_OF_ALL):
        similarity = unit @ unit[:, start : start + BLOCK_OF_ALL].transpose(1, 2)
        similarity.diagonal(-start, 1, 2).fill_(0.0)
        columns = torch.arange(start, start + similarity.shape[2], device=unit.device)
        newest = newest.maximum(torch.where(similarity > threshold, columns, -1).amax(-1))
    return newest
