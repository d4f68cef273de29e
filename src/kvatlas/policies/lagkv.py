"""`lagkv`: tokens that vary most by the range of the tokens after them stay (LagKV); no attention is needed."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Tensor, int_param, scope_param

#: The least range of a channel, so that a channel that is constant in a partition divides nothing by 0.
LEAST_RANGE = 1e-6


@dataclass(frozen=True)
class LagKV(CompressingPolicy):
    """Lag-relative information: the rank of t in its partition p by info(t) = softmax(std(K(p))) + softmax(std(V(p))).

    K(p) = (k(t) - min) / (max - min), with the least and the greatest key of the next partition p + 1 in each channel;
    V(p) likewise of values. std is that over channels, the softmax that over the tokens of p. score(t) = 1 -
    (place - 1/2) / size(p), with the place 1 for the greatest information. Keys are as they are cached, with their
    rotation.

    Source: arXiv 2504.04704, section 3. The paper counts partitions of L tokens after the sinks, and compresses each
    once, by top-k, as soon as the next one is full; the last full one and the rest are the sliding window. Here a
    compression fires by the budget, and the local window is that last partition: partitions of local_window tokens (at
    least 2) are counted from the newest token back, the oldest one may be shorter. Tokens that stayed are counted and
    scored again at the next compression, beside others. As in kvpress' LagKVPress, tokens of all partitions compete by
    their ranks, so that each partition keeps about the same share.

    sinks: first tokens of the sequence that stay first, and belong to no partition.
    scope: the unit of one choice: head (published), kv_head, layer or global, then with the mean of the ranks.
    """

    sinks: int = int_param(16)
    scope: Scope = scope_param(Scope.HEAD)

    name = "lagkv"
    summary = "keeps the tokens that vary most by the range of the tokens after them"
    paper = "LagKV, arXiv 2504.04704"
    published = {"sinks": "16", "local_window": "the lag, by default 1024 in the authors' code"}

    def score(self, cached: CacheView) -> Tensor:
        import torch
        from torch.nn import functional as F

        count = cached.positions.shape[-1]
        lag = max(2, self.budget.window)
        partitions = -(-count // lag)
        # The oldest partition is filled up in front.
        padding = partitions * lag - count

        def information(states: Tensor, is_scored: Tensor) -> Tensor:
            """Return the share of each token [KV heads, partitions - 1, lag] in the information of its partition."""
            padded = F.pad(states.float(), (0, 0, padding, 0))
            parts = padded.reshape(len(padded), partitions, lag, -1)
            older = parts[:, :-1]
            reference = parts[:, 1:]
            low = reference.amin(2, keepdim=True)
            high = reference.amax(2, keepdim=True)
            spread = ((older - low) / (high - low).clamp(min=LEAST_RANGE)).std(-1)
            shares: Tensor = spread.masked_fill(~is_scored, -torch.inf).softmax(-1)
            return shares

        def rank(layer: int) -> Tensor:
            positions = cached.positions[min(layer, len(cached.positions) - 1)]
            # Sinks are in no partition.
            is_scored = F.pad(positions >= self.sinks, (padding, 0)).reshape(-1, partitions, lag)[:, :-1]
            total = information(cached.key(layer), is_scored) + information(cached.value(layer), is_scored)

            # Of equal tokens the older one has the better place.
            order = (-total).masked_fill(~is_scored, torch.inf).argsort(dim=-1, stable=True)
            place = order.argsort(-1) + 0.5
            score = 1 - place / is_scored.sum(-1, keepdim=True)
            score = score.masked_fill(~is_scored, torch.inf)

            # The newest partition has no reference.
            return F.pad(score.flatten(1), (0, lag), value=torch.inf)[:, padding:]

        return cached.each_layer(rank)
