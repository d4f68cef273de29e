"""`random`: a uniformly random subset of the older thinking tokens stays, with a new draw for every KV head."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Tensor, scope_param


@dataclass(frozen=True)
class Random(CompressingPolicy):
    """Random Attention: score(t) is uniform on (0, 1), independent over layers, KV heads, tokens and compressions.

    The paper keeps the prompt, a short recency window and a uniformly random subset per KV head. As in the authors'
    code (mode `random_pp`) each eviction makes a new draw, which favours younger tokens, since an old one has to
    survive every draw. The numbers depend on the sequence's random stream and length alone.

    scope: the unit of one draw: head (published), layer or global.
    """

    scope: Scope = scope_param(Scope.HEAD)

    name = "random"
    summary = "keeps a uniformly random subset, per KV head"
    random = True
    paper = "Random Attention, arXiv 2609.03430"

    def score(self, cached: CacheView) -> Tensor:
        return cached.uniform()
