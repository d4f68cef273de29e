"""`keydiff`: tokens whose keys point away from the mean key stay (KeyDiff); no attention is needed."""

from dataclasses import dataclass

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Tensor, scope_param

#: Slots without a token have keys of 0, which float16 divides by no smaller number.
LEAST_NORM = 1e-6


@dataclass(frozen=True)
class KeyDiff(CompressingPolicy):
    """Distinctive keys: score(t) = - cosine similarity of k(t) and the mean of all normalised keys of its head.

    Source: arXiv 2504.15364, section 3 (its efficient form with an anchor vector). Keys are as they are cached, with
    their rotation; the anchor is the mean over all cached tokens. The paper compresses blocks of a prompt; here the
    contract says when. Its budget is replaced by ratio and local_window.

    scope: the unit of one choice: head (published), layer or global, then with the mean of the scores.
    """

    scope: Scope = scope_param(Scope.HEAD)

    name = "keydiff"
    summary = "keeps the tokens whose keys differ most from the mean key"
    paper = "KeyDiff, arXiv 2504.15364"

    def score(self, cached: CacheView) -> Tensor:
        from torch.nn import functional as F

        def difference(layer: int) -> Tensor:
            unit = F.normalize(cached.key(layer), dim=-1, eps=LEAST_NORM)
            anchor = F.normalize(unit.mean(1, keepdim=True), dim=-1, eps=LEAST_NORM)
            return -(unit * anchor).sum(-1)

        return cached.each_layer(difference)
