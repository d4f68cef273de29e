"""`caote`: tokens without which the attention output would change most stay (CAOTE)."""

from dataclasses import dataclass
from typing import Any

from kvatlas.models import ModelHandle
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, int_param, scope_param
from kvatlas.policies.recent import attention

#: Weights are this far from 0 and 1, so that the factor p / (1 - p) is finite.
MARGIN = 1e-6


def identity_of_weights(model: ModelHandle) -> dict[str, Any]:
    """Return the type of the weights for the run key, where the model runs in a short type."""
    return {} if model.dtype == "float32" else {"attention_weights": "float32"}


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
        return {**super().identity(model), **identity_of_weights(model)}

    def score(self, cached: CacheView) -> Tensor:
        def change(layer: int) -> Tensor:
            # Short types hold nothing between 1 and 1 - MARGIN.
            weight = attention(cached, layer).float().mean((1, 2)).clamp(MARGIN, 1 - MARGIN)
            value = cached.value(layer).to(weight.dtype)
            output = weight.unsqueeze(1) @ value
            scores: Tensor = weight / (1 - weight) * (output - value).norm(dim=-1)
            return scores

        return cached.each_layer(change)
