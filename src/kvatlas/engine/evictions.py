"""When each token left the cache, noted at compressions alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvatlas.core import EvictionTrace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EvictionLog:
    """What one sequence's compressions did so far; never changed in place, so that forks may share it.

    `held` [positions] counts the holders of each token after the last compression, `left` [positions] the new tokens
    written when the last of them dropped it (0: not yet); None before the first.
    """

    holders: int = 1
    held: Tensor | None = None
    left: Tensor | None = None

    def after(self, kept: Tensor, position: int, written: int) -> EvictionLog:
        """The log after a compression that kept the positions `kept` [layers or 1, KV heads or 1, kept].

        `position` counts the tokens cached so far, evicted ones included; `written` the new tokens so far.
        """
        counts = torch.bincount(kept.flatten(), minlength=position).to("cpu")
        left = torch.zeros(position, dtype=torch.long)
        if self.left is not None:
            left[: len(self.left)] = self.left
        left[(counts == 0) & (left == 0)] = written
        return EvictionLog(kept.shape[0] * kept.shape[1], counts, left)

    def eviction_trace(self, position: int) -> EvictionTrace:
        """When each of all `position` tokens that were ever cached was evicted, and who holds it now."""
        if self.held is None or self.left is None:
            return EvictionTrace(self.holders, (0,) * position, (self.holders,) * position)
        newer = position - len(self.left)
        return EvictionTrace(
            self.holders,
            (*self.left.tolist(), *(0,) * newer),
            (*self.held.tolist(), *(self.holders,) * newer),
        )
