"""`cam`: H2O's tokens stay, and the values of evicted ones go into those after them (Cache Merging)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvatlas.policies.cache_view import CacheView, Merging, Signal, Step
from kvatlas.policies.contract import CompressingPolicy
from kvatlas.policies.parameter_types import Scope, int_param, scope_param

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CaM(CompressingPolicy):
    """Merging beside accumulated attention: an evicted token i gives v(i) / |W(i)| to the value of each token in W(i).

    W(i) are the next `neighbours` tokens that stay after i. This happens with the probability A(i) / (mean over W(i) of
    A), at most 1, drawn for each unit of choice. A, which is also the score, is the sum over all queries so far of
    their attention, the mean over the query heads of a KV head. Keys stay as they are.

    Source: "CaM: Cache Merging for Memory-efficient LLMs Inference" (ICML 2024), as its authors' code (zyxxmu/cam at
    df5e076) and kvpress' CAMPress read it. The authors' code evicts the oldest token behind a recent window at every
    step; its code for Llama takes the newest query's attention as A and a mean over the whole window, that for
    streaming the accumulated attention. kvpress merges beside any score, by accumulated attention, at most as many
    tokens as came since the last compression. Here all evicted tokens merge, and the choice is that of `h2o` at the
    times of the contract, so that the difference of the two is the merging.

    neighbours: tokens among which an evicted value is divided; fewer where fewer stay after it.
    scope: the unit of one choice: head (published), kv_head, layer or global, then with the mean of the sums.
    """

    neighbours: int = int_param(32, 1)
    scope: Scope = scope_param(Scope.HEAD)

    name = "cam"
    summary = "keeps the tokens of h2o and merges evicted values into the tokens after them"
    paper = "CaM: Cache Merging, ICML 2024, openreview.net/forum?id=LCTmppB165"
    published = {"neighbours": "32, 16 in the code for streaming"}
    observes = frozenset({Signal.ATTENTION})
    columns = ("mass",)
    random = True
    merges = True

    def observe(self, step: Step) -> None:
        assert step.attention is not None
        step.add("mass", step.attention)

    def score(self, cached: CacheView) -> Merging:
        mass = cached.columns["mass"]
        draws = cached.uniform()

        def merged(layer: int, kept: Tensor) -> Tensor:
            value = cached.value(layer)
            heads = len(value)
            place = min(layer, len(mass) - 1)
            return merge_values(
                value, mass[place].expand(heads, -1), draws[place].expand(heads, -1), kept, self.neighbours
            )

        return Merging(mass, merged)


def merge_values(value: Tensor, mass: Tensor, draws: Tensor, kept: Tensor, neighbours: int) -> Tensor:
    """Return the values [KV heads, kept, head size] of the tokens in the slots `kept` [KV heads, kept], ascending.

    `value` [KV heads, cached, head size] are those of all tokens, `mass` and `draws` [KV heads, cached] their
    accumulated attention and their random numbers in (0, 1).
    """
    import torch
    from torch.nn import functional as F

    # W(i) are the kept tokens from the place `first` on, before the place `end`.
    stays = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, kept, True)
    first = stays.cumsum(1)
    end = (first + neighbours).clamp(max=kept.shape[1])
    count = end - first
    mass_before = F.pad(mass.gather(1, kept).double().cumsum(1), (1, 0))
    mean = (mass_before.gather(1, end) - mass_before.gather(1, first)) / count
    # A mean of 0 gives an infinite probability, or none (NaN) where the token's own mass is 0, too.
    merges = ~stays & (count > 0) & (draws < mass.double() / mean)

    # Sums of shares in double precision, so that their differences are exact enough and depend on no order.
    share = value.double() * (merges / count.clamp(min=1))[..., None]
    share_before = F.pad(share.cumsum(1), (0, 0, 1, 0))
    # A kept token gets the shares of the evicted tokens between itself and the kept one `neighbours` places before.
    oldest = F.pad(kept, (neighbours, 0))[:, : kept.shape[1]]

    def rows(table: Tensor, slots: Tensor) -> Tensor:
        return table.gather(1, slots[..., None].expand(-1, -1, value.shape[2]))

    gained = rows(share_before, kept) - rows(share_before, oldest)
    return (rows(value, kept).double() + gained).to(value.dtype)
