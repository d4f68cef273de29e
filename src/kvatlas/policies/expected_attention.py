"""`expected_attention`: tokens that future queries are expected to attend to stay (Expected Attention)."""

from dataclasses import dataclass

from kvatlas.models import ModelHandle
from kvatlas.models.rotation import frequencies
from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Tensor, int_param, scope_param
from kvatlas.policies.recent import positions, softmax


@dataclass(frozen=True)
class ExpectedAttention(CompressingPolicy):
    """Expected weight times norm of the value: score(t) = softmax over t of (mu k + k' Sigma k / 2) * |v(t)|.

    Source: arXiv 2510.00636, and kvpress' ExpectedAttentionPress. A normal future query q with mean mu and covariance
    Sigma has the expected exp(q k) of that exponent, with k scaled as in the layer. mu and Sigma are those of queries
    without their rotation, turned by the mean rotation of the next `future` positions. Here the queries are the last
    `queries` ones; the paper takes all of the prompt, kvpress' DecodingPress those of up to 256 buffered steps. Each of
    them is turned, so that mu k and k' Sigma k are mean and variance of their products with k. The first `sinks` tokens
    stay and are left out of the softmax, as in kvpress; the mean over the query heads of a KV head counts. Windows,
    soft caps and sinks of layers are left out. kvpress can add an epsilon to the weight, 0 by default.

    queries: number of recent queries whose mean and covariance count.
    future: positions after the newest token over which the rotation is averaged.
    sinks: initial tokens that stay.
    scope: the unit of one choice: head (published), kv_head, layer or global, then with the mean of the scores.
    """

    queries: int = int_param(128, 2)
    future: int = int_param(512, 1)
    sinks: int = int_param(4, 0)
    scope: Scope = scope_param(Scope.HEAD)

    name = "expected_attention"
    summary = "keeps the tokens that future queries are expected to attend to, by the recent ones' distribution"
    paper = "Expected Attention, arXiv 2510.00636"
    published = {"future": "512", "sinks": "4"}
    observes = frozenset({Signal.QUERIES})

    def check(self, model: ModelHandle) -> None:
        frequencies(model)

    def score(self, cached: CacheView) -> Tensor:
        import torch

        # Factors [queries, planes] turn the last queries to their mean future rotation.
        device = cached.positions.device
        frequency = frequencies(cached.model, str(device))
        count = min(self.queries, cached.length)
        steps = torch.arange(max(self.future, count + 1), device=device)[:, None] * frequency
        turns = torch.polar(torch.ones_like(steps), steps)
        # The oldest of the queries is `count` positions before the next token.
        turning = turns[1 : count + 1].flip(0) * turns[: self.future].mean(0)

        def expected(layer: int) -> Tensor:
            query = cached.query(layer).float()
            key = cached.key(layer).float()
            size = query.shape[-1]
            planes = torch.complex(query[..., : size // 2], query[..., size // 2 :]) * turning.to(torch.complex64)
            turned = torch.cat([planes.real, planes.imag], -1).view(len(key), -1, count, size)
            products = turned @ key.unsqueeze(1).transpose(-1, -2) * cached.scaling(layer)
            exponent = products.mean(2) + products.var(2, correction=0) / 2
            is_sink = positions(cached, layer) < self.sinks
            weight = softmax(exponent.masked_fill(is_sink[:, None], float("-inf"))).mean(1)
            scores: Tensor = weight * cached.value(layer).float().norm(dim=-1)
            return scores.masked_fill(is_sink, float("inf"))

        return cached.each_layer(expected)
