"""`knorm`: tokens whose keys are short stay (key norms); no attention is needed."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Tensor, scope_param


@dataclass(frozen=True)
class KNorm(CompressingPolicy):
    """Short keys: score(t) = - |k(t)|, the L2 norm.

    Source: arXiv 2406.11430: tokens whose keys have a low norm get much attention. A rotation keeps the norm, so the
    cached keys give it. The authors' examples leave the first two layers uncompressed; here all are compressed, as by
    kvpress' KnormPress, and the contract says when. The budget is replaced by ratio and local_window.

    scope: the unit of one choice: head (published), kv_head, layer or global, then with the mean of the scores.
    """

    scope: Scope = scope_param(Scope.HEAD)

    name = "knorm"
    summary = "keeps the tokens whose keys have the smallest norm"
    paper = "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430"

    def score(self, cached: CacheView) -> Tensor:
        # In float32, because norms of a short type are often equal.
        return cached.each_layer(lambda layer: -cached.key(layer).float().norm(dim=-1))
