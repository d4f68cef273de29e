"""Tokens that a compression keeps although the policy would not: its choice is overruled within the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class CompressionChoice:
    """The choice of a policy at one compression: `slots` for tokens that compete for them.

    `ranks` [tokens so far] is the number of competing tokens with higher scores, the mean over the layers and heads
    that choose and have the token; NaN for tokens that do not compete. A token with a rank below `slots` is kept.
    """

    slots: int
    ranks: Tensor


class PutBack:
    """The tokens that a request puts back, and the choices of the policy before it was overruled.

    Tokens at `positions` stay at every compression that has them, in place of the kept tokens with the lowest scores;
    from `released_at` tokens on, prompt included, they compete again. No compression takes place before there are
    `until` new tokens. `choices` are those of the policy by the number of tokens so far, prompt included.
    """

    def __init__(self, positions: Iterable[int] = (), until: int = 0, released_at: int | None = None) -> None:
        self.positions = frozenset(positions)
        self.until = until
        self.released_at = released_at
        self.choices: dict[int, CompressionChoice] = {}

    def overrule(self, order: Tensor, positions: Tensor, protected: int, slots: int, length: int) -> Tensor:
        """Return the order of tokens with those put back before all others that are not protected.

        `order` [..., older] are places in `positions` [..., cached] by their rank, of which the first `protected` ones
        stay in any case and the next `slots` ones by their scores; `length` is the number of tokens so far.
        """
        import torch

        ordered = positions.gather(-1, order)
        competing = ordered[..., protected:]

        # The mean rank of each position over layers and heads; 0 / 0 is NaN, for positions that do not compete.
        flat = competing.reshape(-1)
        ranks = torch.arange(competing.shape[-1], dtype=torch.float64, device=flat.device).expand(competing.shape)
        sums = torch.zeros(length, dtype=torch.float64, device=flat.device)
        counts = torch.zeros_like(sums)
        sums.scatter_add_(0, flat, ranks.reshape(-1))
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
        self.choices[length] = CompressionChoice(slots, (sums / counts).cpu())

        is_released = self.released_at is not None and length >= self.released_at
        pinned = () if is_released else sorted(self.positions)
        wanted = torch.tensor(pinned, dtype=ordered.dtype, device=ordered.device)
        by_choice = (~torch.isin(competing, wanted)).byte().argsort(dim=-1, stable=True)
        return torch.cat([order[..., :protected], order[..., protected:].gather(-1, by_choice)], dim=-1)
