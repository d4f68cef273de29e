"""`dynts-random`: the DynTS paper's ablation that keeps random tokens instead of important ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvatlas.noise import uniform
from kvatlas.policies.base import CacheView, CompressingPolicy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DynTSRandom(CompressingPolicy):
    """Ablation of arXiv 2601.18383: score(t) is uniform on (0, 1), one draw for all layers and heads.

    Drawn anew at each compression, as in the authors' code, where the prompt competes as well (`keep_prompt: false`).
    `random` draws for each KV head instead.
    """

    name = "dynts-random"
    summary = "keeps a random subset, the same for all layers and heads (ablation of dynts)"
    drawn = True
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383, ablation"
    published: ClassVar[Mapping[str, str]] = {"keep_prompt": "false"}

    def score(self, cached: CacheView) -> Tensor:
        import torch

        streams = torch.full_like(cached.positions, cached.stream)
        return uniform(streams, cached.length, cached.positions, torch.ones_like(cached.positions))
