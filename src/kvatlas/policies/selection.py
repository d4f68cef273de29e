"""The selection of tokens at a compression: from a policy's scores to the slots that stay."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvatlas.core import KvatlasError
from kvatlas.policies.cache_view import CacheView, Merging
from kvatlas.policies.contract import CompressingPolicy
from kvatlas.policies.guard import author_errors

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.policies.put_back import PutBack


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


class Selection(NamedTuple):
    """The slots [..., kept] that stay, and the function of their values for a policy that merges (`Merging`)."""

    kept: Tensor
    values: Callable[[int, Tensor], Tensor] | None = None

    def merged_values(self, policy: CompressingPolicy, cached: CacheView) -> list[Tensor]:
        """Return the new values [KV heads, kept, head size] of the tokens that stay in each layer; [] without any.

        Raises KvatlasError for values of another shape, and for those that are no finite numbers.
        """
        import torch

        if self.values is None:
            return []
        layer_values = []
        for layer in range(cached.model.shape.layers):
            old = cached.value(layer)
            kept = self.kept[min(layer, len(self.kept) - 1)].expand(len(old), -1).contiguous()
            with author_errors(policy.name, "score"):
                new = self.values(layer, kept)
            expected = (len(old), kept.shape[1], old.shape[2])
            if not isinstance(new, torch.Tensor) or tuple(new.shape) != expected or new.device != old.device:
                found = f"shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else type(new).__name__
                raise KvatlasError(
                    f"The policy {policy.name!r} merged values into a {found}; expected a tensor of the shape "
                    f"{expected} (KV heads, tokens that stay, head size) on {old.device}."
                )
            layer_values.append(new)
        if not bool(torch.stack([new.isfinite().all() for new in layer_values]).all()):
            raise KvatlasError(f"The policy {policy.name!r} merged values into infinite ones; expected finite numbers.")
        return layer_values


def select_tokens(policy: CompressingPolicy, cached: CacheView, put_back: PutBack | None = None) -> Tensor:
    """Return the slots [..., kept] that stay, ascending (`make_selection`)."""
    return make_selection(policy, cached, put_back).kept


def make_selection(policy: CompressingPolicy, cached: CacheView, put_back: PutBack | None = None) -> Selection:
    """Return the slots [..., kept] that stay, ascending: the local window, and older tokens with the highest scores.

    Tokens that are `put_back` take the place of the kept ones with the lowest scores.
    """

    length = cached.positions.shape[-1]
    protected, quota = protected_and_quota(policy, cached)
    slots_used = policy.slots_used(cached, protected, quota)
    if type(slots_used) is not int or not 0 <= slots_used <= quota:
        raise KvatlasError(
            f"The policy {policy.name!r} uses {slots_used!r} slots; expected an integer from 0 to {quota}."
        )
    older = protected.shape[-1]
    values: Callable[[int, Tensor], Tensor] | None = None

    result: object = policy.score(cached)
    if policy.merges:
        if not isinstance(result, Merging):
            raise KvatlasError(f"The policy {policy.name!r} merges and returned no values; expected a Merging.")
        result, values = result
    scores = _checked_scores(policy.name, result, cached.positions, protected)
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
    return Selection(_with_window(chosen, older, length), values)


def _with_window(kept: Tensor, older: int, length: int) -> Tensor:
    """Return the slots that stay with those of the local window, from `older` to `length`."""
    import torch

    window = torch.arange(older, length, device=kept.device).expand(*kept.shape[:-1], -1)
    return torch.cat([kept, window], dim=-1)


def _protect(scores: Tensor, protected: Tensor) -> Tensor:
    """Return scores that are infinite for `protected` tokens alone, which come before others with an infinite score."""
    return scores.clamp(max=sys.float_info.max).masked_fill(protected, math.inf)


def _checked_scores(policy: str, scores: object, positions: Tensor, protected: Tensor) -> Tensor:
    """Return scores [..., older] in float64 of the tokens older than the local window, infinite for protected ones.

    `scores` comes from the policy, `positions` [..., cached] are those of the cache, `protected` [..., older] marks the
    tokens that stay in any case, whatever their score. Raises KvatlasError unless the scores are a tensor of real
    numbers of the shape [cached] or [..., cached], infinite ones included, without NaN.
    """
    import torch

    expected = tuple(positions.shape)
    wrong_kind = ""
    if not isinstance(scores, torch.Tensor):
        wrong_kind = f"a {type(scores).__name__}"
    elif scores.is_complex() or scores.layout is not torch.strided:
        wrong_kind = f"a tensor of {scores.dtype} with the layout {scores.layout}"
    elif scores.device != positions.device:
        wrong_kind = f"a tensor on {scores.device}"
    if not isinstance(scores, torch.Tensor) or wrong_kind:
        raise KvatlasError(
            f"The policy {policy!r} scored its tokens with {wrong_kind}; expected a tensor of real numbers of the "
            f"shape {expected} or {expected[-1:]}, strided and on {positions.device}."
        )

    shape = tuple(scores.shape)
    # Layers and heads may be left out, or have size 1, where all of them share their scores.
    sizes = zip(reversed(shape), reversed(expected), strict=False)
    can_expand = len(shape) <= len(expected) and all(size in (1, whole) for size, whole in sizes)
    if shape[-1:] != expected[-1:] or not can_expand:
        raise KvatlasError(
            f"The policy {policy!r} gave scores of the shape {shape} for cached tokens of the shape {expected} "
            f"(layers, KV heads, tokens); expected {expected} and {expected[-1:]}."
        )

    older = protected.shape[-1]
    older_scores = _protect(scores[..., :older].double().expand(protected.shape), protected)
    nans = int(older_scores.isnan().sum())
    if nans:
        raise KvatlasError(
            f"The policy {policy!r} gave {nans} scores that are not a number (NaN) among {int((~protected).sum())} "
            f"that decide, of the shape {shape}; expected numbers, infinite ones included."
        )
    return older_scores
