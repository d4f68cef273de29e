"""`dropkv`: tokens whose removal would give the outputs of recent queries the largest error stay."""

from dataclasses import dataclass
from typing import Any

from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, int_param, scope_param
from kvatlas.policies.caote import MARGIN, identity_of_weights
from kvatlas.policies.recent import attention


@dataclass(frozen=True)
class DropKV(CompressingPolicy):
    """Squared error of removal: score(t) = sum over q of (p(q, t) / (1 - p(q, t)))^2 * |v(t) - o(q)|^2.

    p(q, t) is the attention of q to t, o(q) = sum over t of p(q, t) v(t) its output: without t the output moves by
    p / (1 - p) (o - v), so that this is the exact squared error for the last `queries` queries. `caote` averages the
    weights first, this sums the errors. The query heads of a KV head are averaged. The rule was known from
    descriptions of DropKV alone: its paper and code were not at hand, and values of its experiments are not known.
    Related: CAOTE, arXiv 2504.14051. p is held 1e-6 below 1.

    queries: number of recent queries whose errors are summed.
    scope: the unit of one choice: head, kv_head, layer or global, then with the mean of the scores.
    """

    queries: int = int_param(32, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "dropkv"
    summary = "keeps the tokens whose removal would give recent queries the largest error"
    paper = "DropKV, as described; the error of a removal is that of CAOTE, arXiv 2504.14051"
    observes = frozenset({Signal.QUERIES})

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        return {**super().identity(model), **identity_of_weights(model)}

    def score(self, cached: CacheView) -> Tensor:
        def error(layer: int) -> Tensor:
            # Short types hold nothing between 1 and 1 - MARGIN.
            weight = attention(cached, layer).float()
            value = cached.value(layer).to(weight.dtype).unsqueeze(1)
            output = weight @ value
            # |v - o|^2 by the three products, without a table of all differences.
            products = output @ value.transpose(-1, -2)
            squares = value.square().sum(-1).unsqueeze(-2) + output.square().sum(-1, keepdim=True)
            distances = (squares - 2 * products).clamp_min(0.0)
            factor = weight / (1 - weight.clamp(max=1 - MARGIN))
            return (factor.square() * distances).sum(2).mean(1)

        return cached.each_layer(error)
