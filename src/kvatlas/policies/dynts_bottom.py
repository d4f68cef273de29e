"""`dynts-bottom`: the DynTS paper's ablation that keeps the least important tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.base import CacheView
from kvatlas.policies.dynts import DynTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DynTSBottom(DynTS):
    """Ablation of arXiv 2601.18383: score(t) = - head(last hidden state of t).

    In the authors' code the prompt has an infinite importance and so is the first to go: `keep_prompt: false` does
    that, by default it stays as under every policy. Parameters are those of `dynts`.
    """

    name = "dynts-bottom"
    summary = "keeps the tokens that the learned head finds least important (ablation of dynts)"
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383, ablation"

    def score(self, cached: CacheView) -> Tensor:
        return -super().score(cached).masked_fill(cached.positions < cached.prompt_length, float("inf"))
