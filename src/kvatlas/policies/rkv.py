"""`rkv`: tokens stay that the last queries attend to and whose keys no later token repeats (R-KV)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvatlas.policies.base import (
    CacheView,
    CompressingPolicy,
    Scope,
    Signal,
    choice_param,
    float_param,
    int_param,
    scope_param,
)
from kvatlas.policies.recent import logits, observing, pooled

if TYPE_CHECKING:
    from torch import Tensor


#: Keys that are gone through at a time.
BLOCK = 512
#: Similarities that are held at a time.
PAIRS = 2**19
#: What products of keys of norm 1 are off by at most in bfloat16: both keys and the product round by 2 ** -9.
MARGIN = 2**-7


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
    budget is what remains after a compression, which comes every 128 tokens; kv_budget is the length at which one
    fires. R-KV's budget B is kv_budget B + 128, local_window 8 and ratio (B - 8) / (B + 120). It protects no prompt.

    queries: length of the observation window.
    kernel: neighbours that importance is pooled over.
    mix: weight of importance (lambda).
    threshold: cosine similarity from which on keys repeat one another.
    unlike: what a token similar to no other spares: `none`, or the `first` token, as in the authors' code.
    scope: for what one choice is made: head (published), layer or global, then with the mean of the scores.
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
    published: ClassVar[Mapping[str, str]] = {
        "queries": "8",
        "kernel": "7",
        "mix": "0.1",
        "threshold": "0.5",
        "local_window": "8",
        "keep_prompt": "false",
    }
    observes = frozenset({Signal.QUERIES})

    def score(self, cached: CacheView) -> Tensor:
        return cached.each_layer(lambda layer: self._of_layer(cached, layer))

    def _of_layer(self, cached: CacheView, layer: int) -> Tensor:
        inside = observing(cached, layer, self.queries)
        before = logits(cached, layer).amax(1).masked_fill(inside[:, None], float("-inf"))
        importance = pooled(before.softmax(-1).nan_to_num(0.0).mean(1), self.kernel, "max")
        repeated = redundancy(cached.key(layer), self.threshold, self.unlike == "first")
        mixed = self.mix * importance - (1 - self.mix) * repeated
        return mixed.masked_fill(inside, float("inf"))


def redundancy(key: Tensor, threshold: float, spare_first: bool = False) -> Tensor:
    """How much each token's key [KV heads, cached, head size] repeats the others'; sums to 1 over the cached.

    The sum over i of the similarities of keys i and j is the product of key j and the sum of all keys, so that only
    which similarities are spared has to be searched. `spare_first`: of a key that is similar to no other the similarity
    to the first token is spared, as in the authors' code.
    """
    import torch
    from torch.nn import functional as F

    unit = F.normalize(key, dim=-1, eps=1e-8)
    exact = unit.double()
    total = exact @ exact.sum(1).unsqueeze(-1) - exact.square().sum(-1, keepdim=True)
    total = total.squeeze(-1)
    own = torch.arange(key.shape[1], device=key.device)
    for head in range(key.shape[0]):
        newest = newest_similar(unit[head], threshold)
        if spare_first:
            newest = newest.clamp(min=0)
        # A key's similarity to itself is not in the sum.
        spared = ((newest >= 0) & (newest != own)).nonzero().squeeze(1)
        similarity = (exact[head, spared] * exact[head, newest[spared]]).sum(-1)
        total[head].index_add_(0, newest[spared], -similarity)
    return (total / key.shape[1]).softmax(-1).to(key.dtype)


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
