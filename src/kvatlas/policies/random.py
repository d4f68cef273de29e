"""`random`: a uniformly random subset of the older thinking tokens stays, drawn anew for every KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.noise import uniform
from kvatlas.policies.base import CacheView, CompressingPolicy, Scope, scope_param

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Random(CompressingPolicy):
    """Random Attention: score(t) is uniform on (0, 1), independent over layers, KV heads, tokens and compressions.

    The paper keeps the prompt, a short recency window and a uniformly random subset per KV head. As in the authors'
    code (mode `random_pp`) the numbers are drawn anew at each eviction, which favours younger tokens, since an old one
    has to survive every draw. The numbers depend on the sequence's random stream and length alone.

    scope: for what one draw is made: head (published), layer or global.
    """

    scope: Scope = scope_param(Scope.HEAD)

    name = "random"
    summary = "keeps a uniformly random subset, per KV head"
    drawn = True
    paper = "Random Attention, arXiv 2609.03430"

    def score(self, cached: CacheView) -> Tensor:
        import torch

        layers, heads, _ = cached.positions.shape
        choice = torch.arange(layers * heads, device=cached.positions.device).view(layers, heads, 1) + 1
        streams = torch.full_like(cached.positions, cached.stream)
        return uniform(streams, cached.length, cached.positions, choice)
