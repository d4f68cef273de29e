"""What the loop decodes: requests, the rows that they are while they run, and generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvatlas.core import EvictionTrace, Sampling, Usage
from kvatlas.engine.cache import CachedSequence
from kvatlas.engine.evictions import EvictionLog
from kvatlas.engine.signals import Signals
from kvatlas.policies import Policy, ReferenceTrace

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import ModelHandle

K = TypeVar("K")
#: Prompts are read in parts that begin at multiples of this, so that sums over a part depend on nothing else.
PROMPT_CHUNK = 512


@dataclass(frozen=True)
class Request(Generic[K]):
    """One (problem, sample) under all its settings: token ids of the prompt, the random stream, the policies.

    `reference` is the full-cache trace of the same sample, for policies that ask for it (ANSWER); `script` are the new
    tokens that a forced reading follows. `sampling` is the engine's if None. `watch` is told the new tokens so far
    after each draw, and ends the generation there by True; `adjust` changes logits [vocabulary] before the next token
    is drawn, given prompt and new tokens.
    """

    key: K
    prompt: tuple[int, ...]
    stream: int
    policies: tuple[Policy, ...]
    reference: ReferenceTrace | None = None
    script: tuple[int, ...] = ()
    sampling: Sampling | None = None
    stopping_criterion: Callable[[Sequence[int]], bool] | None = None
    logits_processor: Callable[[Sequence[int], Tensor], Tensor] | None = None


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
    eviction_trace: EvictionTrace


@dataclass
class Row(Generic[K]):
    """One sequence that is being decoded: a trunk with all its policies, or a branch with one.

    `tokens` are the new ones so far, `cached` its part of the cache, `position` counts the tokens, prompt included,
    that went through the model: it is the true position of the next one.
    """

    request: Request[K]
    policies: tuple[Policy, ...]
    #: What these policies want to see.
    signals: Signals
    #: How it draws; `limit` is its `max_new_tokens`, which draws alike do not differ by.
    sampling: Sampling
    limit: int
    cached: CachedSequence
    #: Cache length at which the first of the policies compresses; None for never.
    trigger: int | None = None
    #: Tokens of the prompt that are still to be read.
    prompt_left: int = 0
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    thinking_end: int | None = None
    #: True positions [layers or 1, KV heads or 1, kept] after the last compression; from `since` on all are cached.
    kept: Tensor | None = None
    since: int = 0
    evictions: EvictionLog = field(default_factory=EvictionLog)
    forked_at: int = 0
    compressions: int = 0
    kv_peak: int = 0
    kv_sum: int = 0
    seconds: float = 0.0

    def next_tokens(self) -> Sequence[int]:
        """What the model is fed next: a part of the prompt, or the newest token."""
        if self.prompt_left:
            stop = (self.position // PROMPT_CHUNK + 1) * PROMPT_CHUNK
            return self.request.prompt[self.position : stop]
        return self.tokens[-1:]

    def room(self) -> int | None:
        """Tokens that may enter before a policy is due; None if there is no end."""
        return None if self.trigger is None else self.trigger - self.cached.length

    def due(self) -> tuple[Policy, ...]:
        """The policies that compress now."""
        length = self.cached.length
        if self.trigger is None or length < self.trigger:
            return ()
        if self.compressions:
            return self.policies
        prompt = len(self.request.prompt)
        return tuple(
            policy
            for policy in self.policies
            if policy.budget is not None and length >= policy.budget.due(prompt, prompt, prompt)
        )

    def next_trigger(self) -> int | None:
        """The cache length at which the first of the policies compresses next."""
        prompt = len(self.request.prompt)
        now = (self.cached.length, self.position) if self.compressions else (prompt, prompt)
        return min(
            (policy.budget.due(prompt, *now) for policy in self.policies if policy.budget is not None), default=None
        )

    def append(self, model: ModelHandle, token: int) -> bool:
        """Add a new token; whether it is the last."""
        self.tokens.append(token)
        if self.thinking_end is None:
            self.thinking_end = model.thinking_end(self.tokens)
        stopping_criterion = self.request.stopping_criterion
        told = stopping_criterion is not None and stopping_criterion(self.tokens)
        return told or token in model.stops or len(self.tokens) >= self.limit

    def generations(self, model: ModelHandle) -> list[Generation[K]]:
        """What each of its policies wrote."""
        usage = Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.tokens),
            thinking_tokens=model.thinking_tokens(self.tokens, self.thinking_end),
            peak_kv_tokens=self.kv_peak,
            mean_kv_tokens=(self.kv_sum or self.kv_peak) / max(1, len(self.tokens) - 1),
            compressions=self.compressions,
            seconds=self.seconds,
        )
        finished = self.tokens[-1] in model.stops
        eviction_trace, tokens = self.evictions.eviction_trace(self.position), tuple(self.tokens)
        # A trace that ended before any compression is one generation for all its settings: decoded once.
        decoded = [len(tokens) - self.forked_at] + [0] * (len(self.policies) - 1)
        return [
            Generation(self.request.key, policy, tokens, finished, self.thinking_end, own, usage, eviction_trace)
            for policy, own in zip(self.policies, decoded, strict=True)
        ]
