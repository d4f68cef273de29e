"""The sequences of the loop: requests, rows while they run, their compressions, and generations."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvatlas.core import EvictionTrace, KvatlasError, Sampling, Usage
from kvatlas.engine.cache import CachedSequence, KVCache, Snapshot
from kvatlas.engine.signals import Signals, state_name
from kvatlas.policies.cache_view import CacheView, Columns
from kvatlas.policies.contract import CompressingPolicy, Policy
from kvatlas.policies.selection import PutBack, select_tokens

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle

K = TypeVar("K")
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Request(Generic[K]):
    """One (problem, sample) under all its settings: token ids of the prompt, the random stream, the policies.

    `sampling` is the engine's if None. `stopping_criterion` gets the new tokens after each one, and ends the generation
    by True; `logits_processor` gets prompt and new tokens, and changes logits [vocabulary] before sampling. A request
    that starts again, because memory ran out, calls both from the first token on. `put_back` overrules the choices of
    its one policy. `checkpoints` get a checkpoint before each compression, by the number of tokens so far, prompt
    included; the request `start`s at one of another request with the same prompt and policy, with its own random stream
    from there on.
    """

    key: K
    prompt: tuple[int, ...]
    stream: int
    policies: tuple[Policy, ...]
    sampling: Sampling | None = None
    stopping_criterion: Callable[[Sequence[int]], bool] | None = None
    logits_processor: Callable[[Sequence[int], Tensor], Tensor] | None = None
    put_back: PutBack | None = None
    checkpoints: MutableMapping[int, Checkpoint] | None = None
    start: Checkpoint | None = None


@dataclass(frozen=True)
class Generation(Generic[K]):
    """The output of one policy of a request.

    `tokens` are new tokens, the end token included; `finished` is false for a trace cut at `max_new_tokens` or by
    the request's `stopping_criterion`; `thinking_end` counts the new tokens before the end-of-thinking token, None
    without one; `decoded` is the number of tokens decoded for this trace alone, without the shared trunk.
    """

    key: K
    policy: Policy
    tokens: tuple[int, ...]
    finished: bool
    thinking_end: int | None
    decoded: int
    usage: Usage
    eviction_trace: EvictionTrace


def _no_integers() -> Integers:
    return np.zeros(0, dtype=np.int64)


@dataclass
class Row(Generic[K]):
    """One sequence in decoding: a trunk with all its policies, or a branch with one, with any of its caps on thinking.

    `tokens` are the new ones so far, `cached` its part of the cache, `position` counts the tokens, prompt included,
    that went through the model: the true position of the next one.
    """

    request: Request[K]
    policies: tuple[Policy, ...]
    #: The observers of these policies.
    signals: Signals
    #: Its sampling without `max_new_tokens`, which is `limit`.
    sampling: Sampling
    limit: int
    cached: CachedSequence
    #: Cache length at which the first of the policies compresses; None for never.
    trigger: int | None = None
    #: Unread tokens of the prompt.
    prompt_left: int = 0
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    #: The least cap on thinking of its policies, None without one; the new tokens up to the beginning of thinking,
    #: counted for a cap alone, and those before its end.
    cap: int | None = None
    thinking_start: int | None = None
    thinking_end: int | None = None
    #: True positions [layers or 1, KV heads or 1, kept] after the last compression; from `since` on the cache has all.
    kept: Tensor | None = None
    since: int = 0
    #: The tokens older than the local window that the last compression kept: of the prompt, of the answer.
    kept_prompt: int = 0
    kept_answer: int = 0
    #: A token has up to `most_holders`, one for each pair of layer and KV head that selects for itself. `holders`
    #: [positions] counts those of each token after the last compression, `evicted_at` [positions] the new tokens when
    #: the last of them dropped it (0: not yet). Forks share these tables, so none is changed.
    most_holders: int = 1
    holders: Integers = field(default_factory=_no_integers)
    evicted_at: Integers = field(default_factory=_no_integers)
    forked_at: int = 0
    compressions: int = 0
    kv_peak: int = 0
    kv_sum: int = 0
    seconds: float = 0.0

    def branch(self) -> Row[K]:
        """Return an independent copy that continues from here."""
        return replace(self, tokens=list(self.tokens), forked_at=len(self.tokens))

    def cut(self, model: ModelHandle) -> tuple[tuple[Policy, ...], int] | None:
        """Return the policies that end the thinking here, and the token that they write next; None if none does.

        A cap counts the tokens after the beginning of thinking. From it on the tokens that end thinking are written one
        after another; if the newest tokens are the first ones of these, the others follow. The rule of vLLM:
        thinking_budget.py of its pull request 46727.
        """
        if self.cap is None or self.thinking_end is not None:
            return None
        if self.thinking_start is None:
            self.thinking_start = model.thinking_start(self.tokens)
            if self.thinking_start is None:
                return None
        written = len(self.tokens) - self.thinking_start
        if written < self.cap:
            return None

        closing = model.closing_tokens
        begun = 0
        for size in range(1, len(closing)):
            if tuple(self.tokens[-size:]) == closing[:size]:
                begun = size
        capped = [policy for policy in self.policies if policy.cap is not None and policy.cap <= written]
        return tuple(capped), closing[begun]

    def due(self) -> tuple[Policy, ...]:
        """Return the policies that compress now: a compression that can drop nothing does not take place."""
        length = self.cached.length
        if self.trigger is None or length < self.trigger:
            return ()

        due = []
        prompt_length = len(self.request.prompt)
        for policy in self.policies:
            if not isinstance(policy, CompressingPolicy):
                continue
            rule = policy.budget
            if not self.compressions and length < rule.first(prompt_length):
                continue

            # Protected tokens before the local window; all tokens since that of the last compression are in the cache.
            start = 0 if self.kept is None else self.since - rule.window
            stop = self.position - rule.window
            prompt = self.kept_prompt + max(0, min(stop, prompt_length) - start) if rule.keep_prompt else 0
            answer = self.kept_answer
            if self.thinking_end is not None:
                answer += max(0, stop - max(start, prompt_length + self.thinking_end))
            if policy.can_drop(length - rule.window, prompt + answer, prompt):
                due.append(policy)
        return tuple(due)

    def cached_positions(self, width: tuple[int, int], device: torch.device) -> Tensor:
        """Return the true positions [layers, KV heads, cached] of the cached tokens, for choices of this width."""
        fresh = torch.arange(self.since, self.position, device=device).expand(*width, -1)
        return fresh if self.kept is None else torch.cat([self.kept, fresh], dim=-1)

    def next_trigger(self) -> int | None:
        """Return the cache length at the next compression of any policy."""
        prompt = len(self.request.prompt)
        budgets = [policy.budget for policy in self.policies if policy.budget is not None]
        if self.compressions:
            return min((budget.next(prompt, self.cached.length, self.position) for budget in budgets), default=None)
        return min((budget.first(prompt) for budget in budgets), default=None)

    def note_compression(self, kept: Tensor, local_window: int) -> None:
        """Note that a compression left the positions `kept` [layers or 1, KV heads or 1, kept]."""
        self.kept = kept
        self.since = self.position
        # Short arrays take numpy less time than torch.
        positions = kept.cpu().numpy()
        older = positions[0, 0, :-local_window]
        prompt_length = len(self.request.prompt)
        self.kept_prompt = int(older.searchsorted(prompt_length))
        if self.thinking_end is not None:
            self.kept_answer = len(older) - int(older.searchsorted(prompt_length + self.thinking_end))

        self.most_holders = positions.shape[0] * positions.shape[1]
        self.holders = np.bincount(positions.ravel(), minlength=self.position)
        evicted_at = np.zeros(self.position, dtype=np.int64)
        evicted_at[: len(self.evicted_at)] = self.evicted_at
        evicted_at[(self.holders == 0) & (evicted_at == 0)] = len(self.tokens)
        self.evicted_at = evicted_at
        self.compressions += 1
        self.trigger = self.next_trigger()

    def advance(self, model: ModelHandle, count: int, token: int | None) -> bool:
        """Note that `count` tokens went into the cache, and add the new token; return True at the last one."""
        in_prompt = self.prompt_left > 0
        self.cached.length += count
        self.position += count
        if in_prompt:
            self.prompt_left -= count
            self.kv_peak = self.cached.length

        if token is None:
            return False
        if not in_prompt:
            self.kv_peak = max(self.kv_peak, self.cached.length)
            self.kv_sum += self.cached.length
        self.tokens.append(token)
        if self.thinking_end is None:
            self.thinking_end = model.thinking_end(self.tokens)
        stopping_criterion = self.request.stopping_criterion
        stopped = stopping_criterion is not None and stopping_criterion(self.tokens)
        return stopped or token in model.stops or len(self.tokens) >= self.limit

    def eviction_trace(self) -> EvictionTrace:
        """Return the eviction and the holders of all tokens so far."""
        # All layers and heads hold the tokens since the last compression.
        newer = self.position - len(self.evicted_at)
        evicted_at = self.evicted_at.tolist() + [0] * newer
        holders = self.holders.tolist() + [self.most_holders] * newer
        return EvictionTrace(self.most_holders, tuple(evicted_at), tuple(holders))

    def generations(self, model: ModelHandle) -> list[Generation[K]]:
        """Return the generation of each of its policies."""
        usage = Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.tokens),
            thinking_tokens=model.thinking_tokens(self.tokens, self.thinking_end),
            peak_kv_tokens=self.kv_peak,
            mean_kv_tokens=(self.kv_sum or self.kv_peak) / max(1, len(self.tokens) - 1),
            compressions=self.compressions,
            seconds=self.seconds,
        )

        first = Generation(
            key=self.request.key,
            policy=self.policies[0],
            tokens=tuple(self.tokens),
            finished=self.tokens[-1] in model.stops,
            thinking_end=self.thinking_end,
            decoded=len(self.tokens) - self.forked_at,
            usage=usage,
            eviction_trace=self.eviction_trace(),
        )

        # A trace that ended before any compression is one generation for all its settings: decoded once.
        others = [replace(first, policy=policy, decoded=0) for policy in self.policies[1:]]
        return [first, *others]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A row before a compression, from which other requests start. It holds pages of `cache` until it is dropped."""

    cache: KVCache
    snapshot: Snapshot
    row: Row[Any]

    def drop(self) -> None:
        """Give back the pages; no request may start here any more."""
        self.cache.release(self.snapshot.pages)


class RowView(CacheView):
    """The cache of a row as its policy sees it at a compression."""

    def __init__(self, model: ModelHandle, cache: KVCache, row: Row[Any], policy: Policy) -> None:
        self.model = model
        self.loaded = cache.loaded
        self.cached_positions = row.cached_positions(policy.scope.width(model.shape), cache.device)
        # Copies, because a score may work in place.
        self.positions = self.cached_positions.clone()
        self.columns = Columns()
        for name in policy.columns:
            state = cache.token_state[state_name(policy, name)]
            self.columns[name] = state[row.cached.row, ..., : row.cached.length].clone()
        self.prompt_length = len(row.request.prompt)
        self.thinking_end = None if row.thinking_end is None else self.prompt_length + row.thinking_end
        self.length = row.position
        self.stream = row.request.stream

        self._cache = cache
        self._row = row
        self._queries = policy.queries

    @cached_property
    def _slots(self) -> Tensor:
        """The slots of the cached tokens, which are the same for all layers."""
        return self._cache.slots(self._row.cached)

    def key(self, layer: int) -> Tensor:
        return self._cache.read(0, layer, self._slots)

    def value(self, layer: int) -> Tensor:
        return self._cache.read(1, layer, self._slots)

    def query(self, layer: int) -> Tensor:
        if not self._queries:
            raise AttributeError("queries are kept for a policy with observes = {Signal.QUERIES} and queries above 0")
        recent = torch.arange(max(0, self.length - self._queries), self.length, device=self._cache.device)
        return self._cache.queries[layer][self._row.cached.row][:, recent % self._cache.query_window]

    def tokens(self) -> Tensor:
        return torch.tensor([*self._row.request.prompt, *self._row.tokens[:-1]], device=self._cache.device)

    def scaling(self, layer: int) -> float:
        return self._cache.layers[layer].scaling

    def window(self, layer: int) -> int | None:
        return self._cache.layers[layer].window

    def softcap(self, layer: int) -> float | None:
        return self._cache.layers[layer].softcap

    def sinks(self, layer: int) -> Tensor | None:
        return self._cache.layers[layer].sinks


def compress(model: ModelHandle, cache: KVCache, row: Row[K]) -> int:
    """Keep the tokens that the row's policy selects, note the evictions, and return their number.

    Positions stay true, so nothing is rotated again. A selection of all tokens is no compression. Several policies of a
    row differ in their caps on thinking alone.
    """
    policy = row.policies[0]
    assert isinstance(policy, CompressingPolicy)
    rule = policy.budget
    put_back = row.request.put_back
    if put_back is not None and len(row.tokens) < put_back.until:
        return 0

    # Other requests may start at this point.
    checkpoints = row.request.checkpoints
    if checkpoints is not None:
        checkpoints[row.position] = Checkpoint(cache, cache.fork(row.cached, 1), row.branch())

    # The policy selects.
    view = RowView(model, cache, row, policy)
    kept = select_tokens(policy, view, put_back)
    if not row.compressions and cache.device.type == "cpu" and not type(policy).__module__.startswith("kvatlas."):
        # A user's policy; on GPUs, whose last bits may differ, this is not checked.
        again = select_tokens(policy, RowView(model, cache, row, policy), put_back)
        if not torch.equal(kept, again):
            raise KvatlasError(
                f"The policy {policy.setting_name!r} kept other tokens when it was asked again about the same cache; "
                "expected the same ones, so that traces can be repeated: draw random numbers with cached.uniform(), as "
                "the policy 'random' does, or from a generator seeded with cached.stream and cached.length."
            )

    evicted = row.cached.length - kept.shape[-1]
    if not evicted:
        if checkpoints is not None:
            checkpoints.pop(row.position).drop()
        return 0

    # The cache keeps these tokens, with the notes of this policy.
    cache.compact(row.cached, kept, [state_name(policy, name) for name in policy.columns])
    kept_positions = view.cached_positions.gather(-1, kept)
    row.note_compression(kept_positions, rule.window)
    return evicted
