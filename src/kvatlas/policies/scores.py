"""What a policy's `score` gave, as numbers for each choice; refused in a sentence where it is anything else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError

if TYPE_CHECKING:
    from torch import Tensor


def fitted(policy: str, scores: object, positions: Tensor, protected: Tensor) -> Tensor:
    """Scores [..., older] in float64 of the tokens older than the local window, infinite for protected ones.

    `scores` is what the policy gave, `positions` [..., cached] are those of the cache, `protected` [..., older] marks
    the tokens that stay in any case: what they score has no meaning. Infinite scores are valid. KvatlasError for scores
    that are no tensor of real numbers, have another shape than [cached] or [..., cached], or are NaN.
    """
    import torch

    wanted = tuple(positions.shape)
    if not isinstance(scores, torch.Tensor) or scores.is_complex():
        kind = f"a tensor of {scores.dtype}" if isinstance(scores, torch.Tensor) else f"a {type(scores).__name__}"
        raise KvatlasError(
            f"The policy {policy!r} scored its tokens with {kind}; valid is a tensor of real numbers of the shape "
            f"{wanted} or {wanted[-1:]}."
        )
    shape = tuple(scores.shape)
    if shape[-1:] != wanted[-1:] or not _broadcasts(shape, wanted):
        raise KvatlasError(
            f"The policy {policy!r} gave scores of the shape {shape} for cached tokens of the shape {wanted} (layers, "
            f"KV heads, tokens); valid are {wanted} and {wanted[-1:]}."
        )
    older = protected.shape[-1]
    filled = scores[..., :older].double().expand(protected.shape).masked_fill(protected, math.inf)
    wrong = int(filled.isnan().sum())
    if wrong:
        raise KvatlasError(
            f"The policy {policy!r} gave {wrong} scores that are not a number (NaN) among {int((~protected).sum())} "
            f"that decide, of the shape {shape}; valid are numbers, infinite ones included."
        )
    return filled


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape holds one number for every choice, or the same for some of them."""
    return len(shape) <= len(wanted) and all(
        size in (1, there) for size, there in zip(reversed(shape), reversed(wanted), strict=False)
    )
