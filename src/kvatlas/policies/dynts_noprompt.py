"""`dynts-noprompt`: the DynTS paper's ablation that does not protect the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError
from kvatlas.policies.base import CacheView
from kvatlas.policies.dynts import DynTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DynTSNoPrompt(DynTS):
    """Ablation of arXiv 2601.18383: as `dynts`, but a prompt token has importance 0, as in the authors' code.

    The importance of thinking tokens is positive, so the prompt goes first. Parameters are those of `dynts`, without a
    choice of `keep_prompt`.
    """

    keep_prompt: bool = False

    name = "dynts-noprompt"
    summary = "dynts without protection of the prompt (ablation)"
    paper = "Dynamic Thinking-Token Selection, arXiv 2601.18383, ablation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_prompt:
            raise KvatlasError("keep_prompt is True; expected false for dynts-noprompt.")

    def score(self, cached: CacheView) -> Tensor:
        return super().score(cached).masked_fill(cached.positions < cached.prompt_length, 0.0)
