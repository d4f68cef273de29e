"""`caote` and `dropkv`: tokens without which the attention output would change most stay.

`caote` looks at the output of the mean weights, `dropkv` sums the errors of each recent query.
"""

from dataclasses import dataclass
from typing import Any

from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, int_param, scope_param
from kvatlas.policies.recent import attention

#: Weights are this far from 0 and 1, so that the factor p / (1 - p) is finite.
MARGIN = 1e-6


@dataclass(frozen=True)
class CAOTE(CompressingPolicy):
    """Change of the attention output: score(t) = p(t) / (1 - p(t)) * |o - v(t)|, with o = sum over t of p(t) v(t).

    Source: arXiv 2504.14051: without t the other weights grow by 1 / (1 - p), which moves the output by that vector. It
    wraps the score of another method, which it scales to a sum of 1. Here p is the attention of the last `queries`
    queries, mean over them and the query heads of a KV head: with one query it wraps TOVA's score, with more those of
    SnapKV before pooling. p is held 1e-6 away from 0 and 1, as in the code of VaSE. The paper evicts a token at a time
    from a fixed budget; here the contract says when. It does not protect the prompt.

    queries: number of recent queries whose attention is averaged.
    scope: the unit of one choice: head (published), kv_head, layer or global, then with the mean of the scores.
    """

    queries: int = int_param(32, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "caote"
    summary = "keeps the tokens without which the attention output would change most"
    paper = "CAOTE, arXiv 2504.14051"
    published = {"queries": "1 on TOVA, 32 on SnapKV", "keep_prompt": "false"}
    observes = frozenset({Signal.QUERIES})

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        # In a short type the weights of attention are in another one than the model.
        weights = {} if model.dtype == "float32" else {"attention_weights": "float32"}
        return {**super().identity(model), **weights}

    def score(self, cached: CacheView) -> Tensor:
        def change(layer: int) -> Tensor:
            # Short types hold nothing between 1 and 1 - MARGIN.
            weight = attention(cached, layer).float().mean((1, 2)).clamp(MARGIN, 1 - MARGIN)
            value = cached.value(layer).to(weight.dtype)
            output = weight.unsqueeze(1) @ value
            scores: Tensor = weight / (1 - weight) * (output - value).norm(dim=-1)
            return scores

        return cached.each_layer(change)


class DropKV(CAOTE):
    """Squared error of removal: score(t) = sum over q of (p(q, t) / (1 - p(q, t)))^2 * |v(t) - o(q)|^2.

    p(q, t) is the attention of q to t, o(q) = sum over t of p(q, t) v(t) its output: without t the output moves by
    p / (1 - p) (o - v), so that this is the exact squared error for the last `queries` queries. `caote` averages the
    weights first, this sums the errors. The query heads of a KV head are averaged. The rule was known from
    descriptions of DropKV alone: its paper and code were not at hand, and values of its experiments are not known.
    Related: CAOTE, arXiv 2504.14051. p is held 1e-6 below 1.

    queries: number of recent queries whose errors are summed.
    scope: the unit of one choice: head, kv_head, layer or global, then with the mean of the scores.
    """

    name = "dropkv"
    summary = "keeps the tokens whose removal would give recent queries the largest error"
    paper = "DropKV, as described; the error of a removal is that of CAOTE, arXiv 2504.14051"
    published = {}

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
