"""`oracle`: tokens with attention from the answer of the full-cache trace stay; a reference, no upper bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.cache_view import CacheView, Signal
from kvatlas.policies.contract import CompressingPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Oracle(CompressingPolicy):
    """True answer attention: score(t) = mean over layers, heads and answer tokens of the answer's attention to t.

    Source: arXiv 2601.18383, section 3: the label that `dynts` learns to predict, here taken from a second pass over
    the full-cache trace of the same problem and sample, which is decoded first. It applies to the compressed text only
    until that departs from the full-cache trace: after `departs_at` new tokens, a metric of each trace (absent if the
    two are the same). Later tokens score 0; among equals the newest come first. If the full-cache trace has no answer,
    all tokens score 0, and the policy keeps the same as `window`. So it is a reference, not an upper bound.
    """

    name = "oracle"
    summary = "keeps the tokens that the full cache's own answer attends to (a reference, no upper bound)"
    paper = "labels of Dynamic Thinking-Token Selection, arXiv 2601.18383"
    observes = frozenset({Signal.ANSWER})

    def score(self, cached: CacheView) -> Tensor:
        import torch

        tokens = cached.tokens()
        # Among equal scores the newest token comes first; the term is far below any attention.
        scores = torch.arange(cached.length, device=tokens.device).double() * 1e-18
        if cached.reference is not None:
            length = min(cached.length, len(cached.reference.tokens))
            reference_tokens = torch.tensor(cached.reference.tokens[:length], device=tokens.device)
            is_equal = tokens[:length] == reference_tokens
            # The product is 1 up to the first token that differs.
            common_length = int(is_equal.long().cumprod(0).sum())
            scored_length = min(common_length, len(cached.reference.attention))
            scores[:scored_length] += cached.reference.attention[:scored_length].to(scores)
        return scores[cached.positions]
