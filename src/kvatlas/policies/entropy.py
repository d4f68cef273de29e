"""`entropy`: tokens that the model was least sure of when it wrote them stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.cache_view import CacheView, Signal, Step
from kvatlas.policies.contract import CompressingPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Entropy(CompressingPolicy):
    """Uncertainty: score(t) = the entropy of the model's distribution that t was drawn from; 0 in the prompt.

    An example, no published cache policy: arXiv 2506.01939 finds that the few tokens of high entropy are those at which
    reasoning forks, and trains on them alone. The distribution is the model's own, before temperature, top-k and top-p.
    """

    name = "entropy"
    summary = "keeps the tokens that the model was least sure of when it wrote them"
    paper = "after the high-entropy tokens of arXiv 2506.01939"
    observes = frozenset({Signal.LOGITS})
    columns = ("entropy",)

    def observe(self, step: Step) -> None:
        assert step.entropy is not None
        step.enter("entropy", step.entropy)

    def score(self, cached: CacheView) -> Tensor:
        return cached.columns["entropy"]
