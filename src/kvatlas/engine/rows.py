"""What the loop decodes: requests, the rows that they are while they run, and generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvatlas.core import Fate, Sampling, Usage
from kvatlas.engine.fates import Record
from kvatlas.engine.replay import LONGEST, Reader, Tree
from kvatlas.policies import Policy, Reference

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.engine.observation import Asked

K = TypeVar("K")


@dataclass(frozen=True)
class Request(Generic[K]):
    """One (problem, sample) under all its settings: token ids of the prompt, the random stream, the policies.

    `reference` is the full-cache trace of the same sample, for policies that ask for it (ANSWER); `script` are its new
    tokens where they are known already, for replay. `sampling` is the engine's if None. `watch` is told the new tokens
    so far after each draw, and ends the generation there by True; `adjust` changes logits [vocabulary] before the next
    token is drawn, given prompt and new tokens.
    """

    key: K
    prompt: tuple[int, ...]
    stream: int
    policies: tuple[Policy, ...]
    reference: Reference | None = None
    script: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    watch: Callable[[Sequence[int]], bool] | None = None
    adjust: Callable[[Sequence[int], Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Generation(Generic[K]):
    """What one policy of a request wrote.

    `tokens` are new tokens, the end token included; `finished` is false for a trace cut at `max_new_tokens` or by
    the request's `watch`;
    `thinking_end` counts the new tokens before the end-of-thinking token, None if it never came; `decoded` is the
    number of tokens that were decoded for this trace alone, without the trunk that it shares.
    """

    key: K
    policy: Policy
    tokens: tuple[int, ...]
    finished: bool
    thinking_end: int | None
    decoded: int
    usage: Usage
    fate: Fate


@dataclass
class Row(Generic[K]):
    """One sequence that is being decoded: a trunk with all its policies, or a branch with one."""

    request: Request[K]
    policies: tuple[Policy, ...]
    #: What these policies want to see.
    asked: Asked
    #: How it draws; `limit` is its `max_new_tokens`, which draws alike do not differ by.
    sampling: Sampling
    limit: int
    tree: Tree = field(default_factory=Tree)
    reader: Reader = field(default_factory=Reader)
    tokens: list[int] = field(default_factory=list)
    thinking_end: int | None = None
    #: True positions [layers or 1, KV heads or 1, kept] after the last compression; from `since` on all are cached.
    kept: Tensor | None = None
    since: int = 0
    record: Record = field(default_factory=Record)
    forked_at: int = 0
    compressions: int = 0
    kv_peak: int = 0
    kv_sum: int = 0
    seconds: float = 0.0

    @property
    def position(self) -> int:
        """True position of the newest token, which is not yet cached."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def room(self, length: int) -> int:
        """Tokens that may enter after the next one before a policy is due."""
        return min(policy.budget - length - 1 if policy.budget else LONGEST for policy in self.policies)

    @property
    def bound(self) -> int | None:
        """Tokens beyond which its cache does not grow while it thinks; None if nothing bounds it."""
        budgets = [policy.budget for policy in self.policies]
        return None if None in budgets else max(budget for budget in budgets if budget is not None)

    def due(self, length: int) -> tuple[Policy, ...]:
        return tuple(policy for policy in self.policies if policy.budget is not None and length >= policy.budget)
