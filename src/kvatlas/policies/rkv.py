"""`rkv`: tokens stay that the last queries attend to and whose keys no later token repeats (R-KV)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvatlas.policies.base import Cached, Scope, Selection, Signal, number, scope, whole
from kvatlas.policies.recent import logits, observing, pooled

if TYPE_CHECKING:
    from torch import Tensor

#: Rows of the similarity matrix that are held at a time: its size is the square of the cache's length.
CHUNK = 512


@dataclass(frozen=True)
class RKV(Selection):
    """Importance less redundancy: score(t) = mix * I(t) - (1 - mix) * R(t).

    Source: arXiv 2505.24133, section 3, and the authors' code. I: the logits of the last `queries` queries, the
    greatest over the query heads of each KV head, softmax over the tokens before this observation window, mean over the
    queries, greatest of `kernel` neighbours. R: softmax over the tokens j of the mean over i of the cosine similarity
    of keys i and j, where a token's similarity to itself is 0 and so is, for each i, the one to the newest token j with
    a similarity above `threshold`, so that the last of several repetitions is not held redundant. The observation
    window stays. In the authors' code a token that is similar to no other spares the first token instead; here it
    spares none. Its buffer and budget are replaced by kv_budget, ratio and local_window.

    queries: length of the observation window.
    kernel: neighbours that importance is pooled over.
    mix: weight of importance (lambda).
    threshold: cosine similarity from which on keys repeat one another.
    scope: for what one choice is made: head (published), layer or global, then with the mean of the scores.
    """

    queries: int = whole(8, 1)
    kernel: int = whole(7, 1)
    mix: float = number(0.1, 0, 1)
    threshold: float = number(0.5, -1, 1)
    scope: Scope = scope(Scope.HEAD)

    name = "rkv"
    summary = "keeps tokens that recent queries attend to and that no later token repeats"
    paper = "R-KV, arXiv 2505.24133"
    published: ClassVar[Mapping[str, str]] = {
        "queries": "8",
        "kernel": "7",
        "mix": "0.1",
        "threshold": "0.5",
    }
    observes = frozenset({Signal.QUERIES})

    def score(self, cached: Cached) -> Tensor:
        return cached.each_layer(lambda layer: self._of_layer(cached, layer))

    def _of_layer(self, cached: Cached, layer: int) -> Tensor:
        inside = observing(cached, layer, self.queries)
        before = logits(cached, layer).amax(1).masked_fill(inside[:, None], float("-inf"))
        importance = pooled(before.softmax(-1).nan_to_num(0.0).mean(1), self.kernel, "max")
        mixed = self.mix * importance - (1 - self.mix) * redundancy(cached.key(layer), self.threshold)
        return mixed.masked_fill(inside, float("inf"))


def redundancy(key: Tensor, threshold: float) -> Tensor:
    """How much each token's key [KV heads, cached, head size] repeats the others'; sums to 1 over the cached."""
    import torch
    from torch.nn import functional as F

    unit = F.normalize(key, dim=-1, eps=1e-8)
    cached = key.shape[1]
    total = torch.zeros_like(unit[..., 0])
    number = torch.arange(cached, device=key.device)
    for start in range(0, cached, CHUNK):
        rows = number[start : start + CHUNK, None]
        similarity = (unit[:, start : start + CHUNK] @ unit.transpose(-1, -2)).masked_fill(rows == number, 0.0)
        newest = torch.where(similarity > threshold, number, -1).amax(-1, keepdim=True)
        total += similarity.masked_fill(newest == number, 0.0).sum(1)
    return (total / cached).softmax(-1)
