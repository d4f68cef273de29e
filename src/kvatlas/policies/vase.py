"""`vase`: tokens with the largest values stay, and a random rest by attention (VaSE)."""

from dataclasses import dataclass

from kvatlas.core import floor_ratio
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, float_param, int_param, scope_param
from kvatlas.policies.recent import logits, observing, pooled, softmax
from kvatlas.policies.selection import protected_and_quota


@dataclass(frozen=True)
class VaSE(CompressingPolicy):
    """Value-aware stochastic eviction: a share `large` of the slots goes to the tokens whose values have the largest
    range (greatest less smallest channel), the first `sinks` tokens before all; the others are a random draw without
    replacement with probabilities proportional to attention.

    Source: arXiv 2606.03928, and the authors' code (mode `range_sink_sample_attn`). Attention: of the last `queries`
    queries over the tokens before them, softmax, mean over the queries, mean of `kernel` neighbours, mean over the
    query heads of a KV head; the queries' own tokens stay. Drawing without replacement is taking the highest of
    log(attention) + Gumbel noise (Kool et al. 2019, arXiv 1903.06059), so that the draw depends on the sequence's
    stream and length alone. The published numbers of large tokens and of all tokens become shares: VaSE's budget is
    what remains after a compression, kv_budget the length at which one fires. The paper does not protect the prompt.

    large: share of the chosen tokens that stay for their values.
    sinks: initial tokens that count as the largest; with the prompt kept they are part of it.
    queries: length of the observation window.
    kernel: neighbours that attention is averaged over.
    scope: the unit of one choice: head (published), layer or global, then with mean ranges and attention.
    """

    large: float = float_param(0.25, 0, 1)
    sinks: int = int_param(4, 0)
    queries: int = int_param(64, 1)
    kernel: int = int_param(5, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "vase"
    version = 2
    summary = "keeps the tokens with the largest values and draws the rest at random by attention"
    random = True
    paper = "VaSE, arXiv 2606.03928"
    published = {
        "large": "1024 of a budget of 4096",
        "sinks": "4",
        "queries": "64",
        "kernel": "5",
        "keep_prompt": "false",
    }
    observes = frozenset({Signal.QUERIES})

    def score(self, cached: CacheView) -> Tensor:
        attention = cached.each_layer(lambda layer: self._attention(cached, layer))
        # The highest log(attention) + Gumbel noise: a draw without replacement.
        gumbel_noise = -(-cached.uniform().log()).log()
        scores = attention.double().log() + gumbel_noise
        protected, quota = protected_and_quota(self, cached)
        ranges = cached.each_layer(lambda layer: cached.value(layer).amax(-1) - cached.value(layer).amin(-1))
        ranges = ranges.masked_fill(cached.positions < self.sinks, float("inf"))
        older_ranges = ranges[..., : protected.shape[-1]].masked_fill(protected, float("-inf"))
        # Not topk, which breaks ties arbitrarily: as everywhere, the older token stays.
        largest = older_ranges.argsort(dim=-1, descending=True, stable=True)[..., : floor_ratio(self.large, quota)]
        return scores.scatter(-1, largest, float("inf"))

    def _attention(self, cached: CacheView, layer: int) -> Tensor:
        in_window = observing(cached, layer, self.queries)
        # [KV heads, query heads of each, queries, cached]
        earlier_logits = logits(cached, layer).masked_fill(in_window[:, None, None], float("-inf"))
        attention = pooled(softmax(earlier_logits).mean(2), self.kernel, "avg").mean(1)
        return attention.masked_fill(in_window, float("inf"))
