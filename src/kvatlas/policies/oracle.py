"""`oracle`: tokens stay that the answer of the finished full-cache trace did attend to; a reference, no upper bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.base import CacheView, CompressingPolicy, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Oracle(CompressingPolicy):
    """True answer attention: score(t) = mean over layers, heads and answer tokens of what the answer pays to t.

    Source: arXiv 2601.18383, section 3: the label that `dynts` learns to predict, here taken from a second pass over
    the full-cache trace of the same problem and sample, which is decoded first. It speaks of this text only until the
    compressed one departs from that trace: each trace says where, in the metric `departs_at` (new tokens that the two
    share; absent where they are the same). Tokens from there on score 0; among equals the newest come first. Where the
    full-cache trace has no answer, all do, and the policy keeps what `window` keeps. So it is a reference, not an upper
    bound.
    """

    name = "oracle"
    summary = "keeps the tokens that the full cache's own answer attends to (a reference, no upper bound)"
    paper = "labels of Dynamic Thinking-Token Selection, arXiv 2601.18383"
    observes = frozenset({Signal.ANSWER})

    def score(self, cached: CacheView) -> Tensor:
        import torch

        tokens = cached.tokens()
        scores = torch.arange(cached.length, device=tokens.device).double() * 1e-18
        if cached.reference is not None:
            length = min(cached.length, len(cached.reference.tokens))
            theirs = torch.tensor(cached.reference.tokens[:length], device=tokens.device)
            shared = int((tokens[:length] == theirs).long().cumprod(0).sum())
            known = min(shared, len(cached.reference.attention))
            scores[:known] += cached.reference.attention[:known].to(scores)
        return scores[cached.positions]
