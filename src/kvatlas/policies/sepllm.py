"""`sepllm`: separators between segments of text stay, with the first and the most recent tokens (SepLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from kvatlas.policies.base import Cached, Selection, whole

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import Model

SEPARATORS = frozenset(".,?!;: \t\n")


@dataclass(frozen=True)
class SepLLM(Selection):
    """Separators: the first `sinks` tokens come first, then separators, newest first, then the others, newest first.

    Source: arXiv 2412.12094, section 3 (initial, separator and neighbouring tokens; when the separators' cache is full
    its oldest leave). A separator is a token whose text consists of . , ? ! ; : space, tab and newline alone: the
    paper's nine separators, and tokens that join several. Its caches of fixed sizes are replaced by ratio and
    local_window; what separators leave of the ratio goes to the most recent tokens, as in the authors' past window and
    in the DynTS paper's baseline. Positions stay true.

    sinks: initial tokens that stay; with the prompt kept they are part of it.
    """

    sinks: int = whole(4, 0)

    name = "sepllm"
    summary = "keeps separators (punctuation, line ends), the first and the most recent tokens"
    paper = "SepLLM, arXiv 2412.12094"
    published: ClassVar[Mapping[str, str]] = {"sinks": "4", "keep_prompt": "false"}

    def score(self, cached: Cached) -> Tensor:
        import torch

        tokens = cached.tokens()
        found = [is_separator(cached.model, token) for token in tokens.tolist()]
        separating = torch.tensor(found, device=tokens.device)[cached.positions]
        score = cached.positions.double() + separating * cached.length
        return score.masked_fill(cached.positions < self.sinks, float("inf"))


@lru_cache(maxsize=2**18)
def is_separator(model: Model, token: int) -> bool:
    """Whether the text of a token is nothing but separators."""
    text = str(model.tokenizer.decode([token]))
    return bool(text) and SEPARATORS.issuperset(text)
