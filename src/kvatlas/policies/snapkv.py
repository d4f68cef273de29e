"""`snapkv`: tokens that the last few queries attend to stay, together with their neighbours."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, choice_param, int_param, scope_param
from kvatlas.policies.recent import attention, observing, pooled


@dataclass(frozen=True)
class SnapKV(CompressingPolicy):
    """Pooled votes of an observation window: score(t) = pool over t's neighbours of sum over q of A(q, t).

    Source: arXiv 2404.14469, sections 4.1 and 4.2, Listing 1: q runs over the last `queries` tokens, A is the softmax
    over all tokens that q sees, pooling is along the tokens before the observation window, which itself stays. The
    paper compresses the prompt once; here, as in the decoding baselines of R-KV and DynTS, the window is the newest
    tokens at each compression. Where query heads share a KV head the mean of their pooled votes is taken. Its fixed
    capacity is replaced by ratio and local_window. The DynTS paper's baseline pools nothing: `snapkv@dynts-paper`.

    queries: length of the observation window.
    kernel: tokens to pool together.
    pooling: max or avg.
    scope: the unit of one choice: head (published), layer or global, then with the mean of the scores.
    """

    queries: int = int_param(32, 1)
    kernel: int = int_param(7, 1)
    pooling: str = choice_param("max", "avg")
    scope: Scope = scope_param(Scope.HEAD)

    name = "snapkv"
    version = 2
    summary = "keeps the tokens that the last few queries attend to, and their neighbours"
    paper = "SnapKV, arXiv 2404.14469"
    published = {
        "queries": "32 on LongBench, 16 on others",
        "kernel": "7 on LongBench, 5 on others",
        "pooling": "max",
    }
    observes = frozenset({Signal.QUERIES})

    def score(self, cached: CacheView) -> Tensor:
        def votes(layer: int) -> Tensor:
            inside = observing(cached, layer, self.queries)
            before = attention(cached, layer).sum(2).masked_fill(inside[:, None], 0.0)
            return pooled(before, self.kernel, self.pooling).mean(1).masked_fill(inside, float("inf"))

        return cached.each_layer(votes)
