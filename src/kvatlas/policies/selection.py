"""The selection of tokens at a compression: from a policy's scores to the slots that stay.

A request may overrule it for tokens that it puts back, within the budget.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.core import KvatlasError
from kvatlas.policies.cache_view import CacheView, Tensor
from kvatlas.policies.contract import CompressingPolicy
from kvatlas.policies.parameter_types import Scope


def protected_and_quota(policy: CompressingPolicy, cached: CacheView) -> tuple[Tensor, int]:
    """Return a mask of the older tokens [..., older] that stay in any case, and how many of the others may stay.

    Older tokens are those before the local window. Those of the prompt stay if the policy keeps it, and so do those of
    the answer. If a strict budget has no room for all of them, the first ones stay.
    """
    import torch

    rule = policy.budget
    older = cached.positions.shape[-1] - rule.window
    positions = cached.positions[..., :older]
    protected = torch.zeros_like(positions, dtype=torch.bool)
    if rule.keep_prompt:
        protected |= positions < cached.prompt_length
    prompt = _count_in_a_head(protected)
    protected_count = prompt
    if cached.thinking_end is not None:
        protected |= positions >= cached.thinking_end
        protected_count = _count_in_a_head(protected)
    kept_protected, quota = rule.allotted(older, protected_count, prompt)
    if kept_protected < protected_count:
        protected &= protected.cumsum(-1) <= kept_protected
    return protected, quota


def _count_in_a_head(protected: Tensor) -> int:
    """Return the number of protected tokens, which is the same in every layer and head."""
    return int(protected[0, 0].sum())


def select_tokens(policy: CompressingPolicy, cached: CacheView, put_back: PutBack | None = None) -> Tensor:
    """Return the slots [..., kept] that stay, ascending: the local window, and older tokens with the highest scores.

    Tokens that are `put_back` take the place of the kept ones with the lowest scores.
    """
    import torch

    length = cached.positions.shape[-1]
    protected, quota = protected_and_quota(policy, cached)
    slots_used = policy.slots_used(cached, protected, quota)
    if type(slots_used) is not int or not 0 <= slots_used <= quota:
        raise KvatlasError(
            f"The policy {policy.setting_name!r} uses {slots_used!r} slots; expected an integer from 0 to {quota}."
        )
    older = protected.shape[-1]
    scores = _checked_scores(policy, policy.score(cached), cached.positions, protected)
    if policy.budget.plan_prefix:
        thought = cached.positions[..., :older] - cached.prompt_length
        in_plan = (thought >= 0) & (thought < policy.budget.plan_prefix)
        # Above all other scores but those of protected tokens.
        scores = _protect(scores.clamp(max=sys.float_info.max / 2).masked_fill(in_plan, math.inf), protected)
    kept_protected = _count_in_a_head(protected)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if put_back is not None:
        order = put_back.overrule(order, cached.positions, kept_protected, slots_used, cached.length)
    chosen = order[..., : kept_protected + slots_used].sort(dim=-1).values
    window = torch.arange(older, length, device=chosen.device).expand(*chosen.shape[:-1], -1)
    return torch.cat([chosen, window], dim=-1)


def _protect(scores: Tensor, protected: Tensor) -> Tensor:
    """Return scores that are infinite for `protected` tokens alone, which come before others with an infinite score."""
    return scores.clamp(max=sys.float_info.max).masked_fill(protected, math.inf)


def _checked_scores(policy: CompressingPolicy, scores: object, positions: Tensor, protected: Tensor) -> Tensor:
    """Return scores [..., older] in float64 of the tokens older than the local window, infinite for protected ones.

    `scores` comes from the policy, `positions` [..., cached] are those of the cache, `protected` [..., older] marks the
    tokens that stay in any case, whatever their score. Raises KvatlasError unless the scores are a tensor of real
    numbers of the shape [cached] or [..., cached], infinite ones included, without NaN.
    """
    import torch

    name = policy.setting_name
    expected = tuple(positions.shape)
    wrong_kind = ""
    if not isinstance(scores, torch.Tensor):
        wrong_kind = f"a {type(scores).__name__}"
    elif scores.is_complex() or scores.dtype is torch.bool or scores.layout is not torch.strided:
        wrong_kind = f"a tensor of {scores.dtype} with the layout {scores.layout}"
    elif scores.device != positions.device:
        wrong_kind = f"a tensor on {scores.device}"
    if not isinstance(scores, torch.Tensor) or wrong_kind:
        raise KvatlasError(
            f"The policy {name!r} scored its tokens with {wrong_kind}; expected a tensor of real numbers of the "
            f"shape {expected} or {expected[-1:]}, strided and on {positions.device}."
        )

    shape = tuple(scores.shape)
    if shape not in (expected, expected[-1:]):
        way_out = ""
        # One score for each layer and head, where the policy's scope shares a choice.
        if shape[-1:] == expected[-1:] and len(shape) < 4 and 0 not in shape:
            averages = "averages over layers and heads that share a choice, or declare scope = Scope.HEAD"
            does = "scores every layer" if policy.scope is Scope.HEAD else averages
            way_out = f", since its scope is {policy.scope}: return cached.each_layer(lambda layer: ...), which {does}"
        raise KvatlasError(
            f"The policy {name!r} gave scores of the shape {shape} for cached tokens of the shape {expected} (layers, "
            f"KV heads, tokens); expected {expected} or {expected[-1:]}{way_out}."
        )

    older = protected.shape[-1]
    older_scores = _protect(scores[..., :older].double().expand(protected.shape), protected)
    nans = int(older_scores.isnan().sum())
    if nans:
        raise KvatlasError(
            f"The policy {name!r} gave {nans} scores that are not a number (NaN) among {int((~protected).sum())} "
            f"that decide, of the shape {shape}; expected numbers, infinite ones included."
        )
    return older_scores


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
        sums = torch.bincount(flat, ranks.reshape(-1), minlength=length)
        counts = torch.bincount(flat, minlength=length)
        self.choices[length] = CompressionChoice(slots, (sums / counts).cpu())

        is_released = self.released_at is not None and length >= self.released_at
        pinned = () if is_released else sorted(self.positions)
        wanted = torch.tensor(pinned, dtype=ordered.dtype, device=ordered.device)
        by_choice = (~torch.isin(competing, wanted)).byte().argsort(dim=-1, stable=True)
        return torch.cat([order[..., :protected], order[..., protected:].gather(-1, by_choice)], dim=-1)
