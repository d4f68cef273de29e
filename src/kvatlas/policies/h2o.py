"""`h2o`: tokens that were attended to most so far stay (Heavy-Hitter Oracle)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvatlas.policies import CacheView, CompressingPolicy, Scope, Signal, Step, Tensor, flag_param, scope_param


@dataclass(frozen=True)
class H2O(CompressingPolicy):
    """Accumulated attention: score(t) = sum over all queries q so far, the prompt's included, of A(q, t).

    Source: arXiv 2306.14048, section 4.2, Algorithm 1: A is the softmax over the tokens that are cached when q comes,
    and an evicted token's sum is forgotten. The paper scores each attention head; where query heads share a KV head
    their mean is taken. Its budget, half heavy hitters and half recent tokens, is replaced by ratio and local_window;
    it evicts one token at every step, here the contract says when. What the DynTS paper calls H2O is another method:
    its code overwrites the sum by the newest step's attention, the preset `h2o@dynts-paper`.

    scope: the unit of one choice: head (published), layer or global, then with the mean of the sums.
    per_query: divides the sum by the number of queries that saw t, as kvpress' ObservedAttentionPress does: the first
        tokens are seen by most.
    """

    scope: Scope = scope_param(Scope.HEAD)
    per_query: bool = flag_param(False)

    name = "h2o"
    summary = "keeps the tokens that were attended to most so far"
    paper = "H2O: Heavy-Hitter Oracle, arXiv 2306.14048"
    published = {"ratio": "heavy hitters and recent tokens 1:1, together 20 % of the sequence"}
    observes = frozenset({Signal.ATTENTION})
    columns = ("mass",)
    unnamed: ClassVar[Mapping[str, Any]] = {"per_query": False}

    def observe(self, step: Step) -> None:
        assert step.attention is not None
        step.add("mass", step.attention)

    def score(self, cached: CacheView) -> Tensor:
        mass = cached.columns["mass"]
        return mass / (cached.length - cached.positions) if self.per_query else mass
