"""`window`: the most recent tokens stay, at the same number of tokens as any other policy of that setting."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Tensor


@dataclass(frozen=True)
class Window(CompressingPolicy):
    """Recency alone: score(t) = position of t.

    With local window W and ratio r it keeps the newest W + floor(r * older) tokens (and the prompt), so that it spends
    exactly the budget of its rivals in the same cell; ratio 0 is the plain sliding window. `keep_prompt: false` drops
    the prompt as well, as the DynTS paper's baseline does (`window@dynts-paper`).
    """

    name = "window"
    summary = "keeps the most recent tokens"
    paper = "Longformer's sliding window, arXiv 2004.05150, section 3.1, as a cache rule"

    def score(self, cached: CacheView) -> Tensor:
        return cached.positions.float()
