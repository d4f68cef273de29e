"""`dynts-random`: the DynTS paper's ablation that keeps random tokens instead of important ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.base import CacheView, CompressingPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DynTSRandom(CompressingPolicy):
    """Ablation of arXiv 2601.18383: score(t) is uniform on (0, 1), one draw for all layers and heads.

    Each compression makes a new draw, as in the authors' code, where the prompt competes as well (`keep_prompt:
    false`). `random` draws for each KV head instead.
    """

    name = "dynts-random"
    summary = "keeps a random subset, the same for all layers and heads (ablation of dynts)"
    random = True
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383, ablation"
    published = {"keep_prompt": "false"}

    def score(self, cached: CacheView) -> Tensor:
        return cached.uniform()
