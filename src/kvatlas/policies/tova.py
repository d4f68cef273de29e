"""`tova`: tokens that the newest token attends to stay (Token Omission Via Attention)."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, scope_param
from kvatlas.policies.recent import attention


@dataclass(frozen=True)
class TOVA(CompressingPolicy):
    """Attention of the newest query q: score(t) = mean over the heads of a layer of A(q, t).

    Source: arXiv 2401.06104, section 3.2: A is the softmax over all cached tokens, one choice is made for each layer.
    The paper drops one token at every step once its cache is full; here the contract sets the time, and the local
    window stays.

    scope: the unit of one choice: layer (published), head or global.
    """

    scope: Scope = scope_param(Scope.LAYER)

    name = "tova"
    version = 2
    summary = "keeps the tokens that the newest token attends to"
    paper = "TOVA, arXiv 2401.06104"
    observes = frozenset({Signal.QUERIES})
    queries = 1

    def score(self, cached: CacheView) -> Tensor:
        return cached.each_layer(lambda layer: attention(cached, layer).mean(1)[:, 0])
