"""`sinks`: the first thinking tokens stay, then the most recent ones (after StreamingLLM, arXiv 2309.17453)."""

from dataclasses import dataclass

from torch import Tensor

from kvatlas.policies import Cached, Selection, whole


@dataclass(frozen=True)
class Sinks(Selection):
    """score(t) is infinite for the first `sinks` thinking tokens, else the position of t.

    sinks: thinking tokens that stay before all others.
    """

    sinks: int = whole(4, least=0)

    name = "sinks"
    summary = "keeps the first thinking tokens and the most recent ones"
    paper = "arXiv 2309.17453"

    def score(self, cached: Cached) -> Tensor:
        thought = cached.positions - cached.prompt_length
        first = (thought >= 0) & (thought < self.sinks)
        return cached.positions.double().masked_fill(first, float("inf"))
