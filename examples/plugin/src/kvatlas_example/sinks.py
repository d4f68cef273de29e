"""`sinks`: the first thinking tokens stay, then the most recent ones (after StreamingLLM, arXiv 2309.17453)."""

from dataclasses import dataclass

from torch import Tensor

from kvatlas.policies import CacheView, CompressingPolicy, int_param


@dataclass(frozen=True)
class Sinks(CompressingPolicy):
    """score(t) is infinite for the first `sinks` thinking tokens, else the position of t.

    sinks: thinking tokens that stay before all others.
    """

    sinks: int = int_param(4, least=0)

    name = "sinks"
    summary = "keeps the first thinking tokens and the most recent ones"
    paper = "arXiv 2309.17453"

    def score(self, cached: CacheView) -> Tensor:
        thought = cached.positions - cached.prompt_length
        first = (thought >= 0) & (thought < self.sinks)
        return cached.positions.double().masked_fill(first, float("inf"))
