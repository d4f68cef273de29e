"""Scores that outlive a compression: computed seldom (`refresh`), and carried on (`carry`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvatlas.policies.budget_rule import BudgetRule
from kvatlas.policies.cache_view import CacheView, ScoreMemory

if TYPE_CHECKING:
    from torch import Tensor

#: Greater scores stand for infinite ones: the memory holds numbers of 32 bits.
LARGEST = 3.4e38


def recall_scores(
    rule: BudgetRule, cached: CacheView, memory: ScoreMemory, quota: int, compute: Callable[[], Tensor]
) -> Tensor:
    """Return the scores [..., older] of the tokens older than the local window, and keep new ones in `memory`.

    `compute` gives new scores. They are computed if the last ones are `refresh` tokens old, or if the tokens that
    entered since would take more than the `quota` of places. Otherwise these tokens have an infinite score.
    Source: "What Matters for Aggressive Decoding Time KV Eviction" (InertiaKV), which ranks seldom and keeps the order.
    """
    older = cached.positions.shape[-1] - rule.window
    # The local window of the last computation had no scores.
    has_score = cached.positions[..., :older] < memory.length - rule.window
    old_scores = memory.values[..., :older].double()
    entered = cached.length - memory.length
    if memory.length and entered < rule.refresh and entered <= quota:
        return old_scores.masked_fill(~has_score, float("inf"))
    scores = compute()
    if rule.carry:
        carried = has_score & old_scores.isfinite()
        scores = carry_scores(scores, old_scores.masked_fill(~carried, 0.0), rule.carry)
    memory.values[..., :older] = scores.to(memory.values.dtype)
    memory.length = cached.length
    return scores


def carry_scores(new: Tensor, old: Tensor, share: float) -> Tensor:
    """Return max(share * old, new / max new) by token [..., older]; new scores that count as infinite stay.

    Source: G-KV, arXiv 2512.00504, and its code (`smooth_method` max, alpha .8). The greatest score is that of the
    tokens that compete; G-KV protects none. Scores below 0, which G-KV does not have, are first raised by the lowest.
    """
    is_finite = new.abs() < LARGEST
    lowest = new.masked_fill(~is_finite, 0.0).amin(-1, keepdim=True).clamp(max=0.0)
    greatest = new.masked_fill(~is_finite, float("-inf")).amax(-1, keepdim=True)
    scaled = (new - lowest) / (greatest - lowest).clamp_min(1e-30)
    result: Tensor = scaled.maximum(share * old).where(is_finite, new)
    return result
