"""The selection of tokens at a compression: from a policy's scores to the slots that stay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError
from kvatlas.policies.contract import CacheView, CompressingPolicy, allotted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def places(policy: CompressingPolicy, cached: CacheView) -> tuple[Tensor, int]:
    """Return a mask of the older tokens [..., older] that stay in any case, and how many of the others stay.

    Both are the same in every layer and head, because prompt and answer tokens are. If a strict budget has no room for
    all protected tokens, the older ones stay.
    """
    import torch

    older = cached.positions.shape[-1] - policy.local_window
    old = cached.positions[..., :older]
    protected = torch.zeros_like(old, dtype=torch.bool)
    if policy.keep_prompt:
        protected |= old < cached.prompt_length
    prompt = int(protected.reshape(-1, older)[0].sum())
    if cached.thinking_end is not None:
        protected |= old >= cached.thinking_end
    kept_protected, chosen = allotted(policy, older, int(protected.reshape(-1, older)[0].sum()), prompt)
    return protected & (protected.cumsum(-1) <= kept_protected), chosen


def select_tokens(policy: CompressingPolicy, cached: CacheView) -> Tensor:
    """Return the slots [..., kept] that stay, ascending: the local window, and older tokens with the highest scores."""
    import torch

    length = cached.positions.shape[-1]
    protected, chosen = places(policy, cached)
    filled = policy.filled(cached, protected, chosen)
    if type(filled) is not int or not 0 <= filled <= chosen:
        raise KvatlasError(
            f"The policy {policy.name!r} fills {filled!r} places; expected an integer from 0 to {chosen}."
        )
    older = protected.shape[-1]
    kept_protected = int(protected.reshape(-1, older)[0].sum())
    scores = _scores(policy.name, policy.score(cached), cached.positions, protected)
    # Tokens that stay in any case come before other tokens with an infinite score.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, (~protected.gather(-1, order)).byte().argsort(dim=-1, stable=True))
    order = order[..., : kept_protected + filled]
    window = torch.arange(older, length, device=order.device).expand(*order.shape[:-1], policy.local_window)
    return torch.cat([order.sort(dim=-1).values, window], dim=-1)


def _unusable(scores: object, device: torch.device) -> str:
    """Return a name for scores that are no tensor of real numbers on the device; "" for others."""
    import torch

    if not isinstance(scores, torch.Tensor):
        return f"a {type(scores).__name__}"
    if scores.is_complex() or scores.layout is not torch.strided:
        return f"a tensor of {scores.dtype} with the layout {scores.layout}"
    return "" if scores.device == device else f"a tensor on {scores.device}"


def _scores(policy: str, scores: object, positions: Tensor, protected: Tensor) -> Tensor:
    """Return scores [..., older] in float64 of the tokens older than the local window, infinite for protected ones.

    `scores` comes from the policy, `positions` [..., cached] are those of the cache, `protected` [..., older] marks the
    tokens that stay in any case, whatever their score. Raises KvatlasError unless the scores are a tensor of real
    numbers of the shape [cached] or [..., cached], infinite ones included, without NaN.
    """
    import torch

    expected = tuple(positions.shape)
    kind = _unusable(scores, positions.device)
    if not isinstance(scores, torch.Tensor) or kind:
        raise KvatlasError(
            f"The policy {policy!r} scored its tokens with {kind}; expected a tensor of real numbers of the shape "
            f"{expected} or {expected[-1:]}, strided and on {positions.device}."
        )
    shape = tuple(scores.shape)
    # One number for every choice, or the same for some of them.
    sizes = zip(reversed(shape), reversed(expected), strict=False)
    fits = len(shape) <= len(expected) and all(size in (1, whole) for size, whole in sizes)
    if shape[-1:] != expected[-1:] or not fits:
        raise KvatlasError(
            f"The policy {policy!r} gave scores of the shape {shape} for cached tokens of the shape {expected} "
            f"(layers, KV heads, tokens); expected {expected} and {expected[-1:]}."
        )
    older = protected.shape[-1]
    filled = scores[..., :older].double().expand(protected.shape).masked_fill(protected, math.inf)
    wrong = int(filled.isnan().sum())
    if wrong:
        raise KvatlasError(
            f"The policy {policy!r} gave {wrong} scores that are not a number (NaN) among {int((~protected).sum())} "
            f"that decide, of the shape {shape}; expected numbers, infinite ones included."
        )
    return filled
