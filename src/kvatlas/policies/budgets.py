"""Unequal budgets: layers or KV heads keep unlike numbers of tokens, at the same mean (`budgets`)."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from kvatlas.core import floor_ratio

if TYPE_CHECKING:
    from torch import Tensor

#: The tokens of the last layer of a pyramid are this part of the mean, as published.
PYRAMID_BETA = 20
#: The share of a head's equal budget that AdaKV leaves it in any case, as published.
ADA_FLOOR = 0.2


def unequal_choice(budgets: str, scores: Tensor, positions: Tensor, protected: int, slots: int) -> Tensor:
    """Return the slots [layers, KV heads or 1, most] that stay, ascending, behind -1 in heads with fewer.

    `scores` [layers, KV heads or 1, older] are infinite for the `protected` tokens of each head, of the others `slots`
    stay in the mean. `positions` [..., cached] are -1 in slots without a token.
    """
    import torch

    has_token = positions[..., : scores.shape[-1]] >= 0
    # A token comes before every empty slot.
    scores = scores.clamp(min=-sys.float_info.max).masked_fill(~has_token, -math.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    index = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    # The rank of each slot in its head.
    rank = torch.empty_like(order).scatter_(-1, order, index)

    if budgets == "pyramid":
        candidates = has_token[:, 0].sum(-1) - protected
        layer_slots = torch.tensor(pyramid(slots, candidates.tolist()), device=order.device)
        stays = rank < protected + layer_slots[:, None, None]
    else:
        # One choice over the heads of a layer, in which the best tokens of each head come first, up to a share of its
        # equal budget. Source: AdaKV, arXiv 2407.11550, and kvpress' AdaKVPress.
        safe = rank < protected + max(1, floor_ratio(ADA_FLOOR, slots)) if slots else rank < protected
        flat = scores.masked_fill(safe & (scores > -math.inf), math.inf).flatten(1)
        chosen = flat.argsort(dim=-1, descending=True, stable=True)[:, : scores.shape[1] * (protected + slots)]
        stays = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, chosen, True).view(scores.shape)

    kept = index.where(stays, -1).sort(dim=-1).values
    return kept[..., kept.shape[-1] - int(stays.sum(-1).max()) :]


def pyramid(slots: int, candidates: list[int]) -> list[int]:
    """Return the slots of each layer, `slots` in the mean and at most its `candidates`.

    Source: PyramidKV, arXiv 2406.02069, and kvpress' PyramidKVPress: an arithmetic series from the first layer down to
    slots / beta in the last one; where the first one has fewer candidates, from these down to what is left. Fractions
    are dropped, and the slots that remain go to the first layers with candidates for them.
    """
    layers = len(candidates)
    if layers == 1:
        return [slots]
    last = slots / PYRAMID_BETA
    if 2 * slots - last > candidates[0]:
        last = 2 * slots - candidates[0]
    first = 2 * slots - last
    step = (first - last) / (layers - 1)
    by_layer = [min(int(first - layer * step), candidates[layer]) for layer in range(layers)]

    missing = slots * layers - sum(by_layer)
    while missing > 0:
        for layer in range(layers):
            if missing and by_layer[layer] < candidates[layer]:
                by_layer[layer] += 1
                missing -= 1
    return by_layer
