"""The signals that policies declare, and their columns of notes; other rows have no extra cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvatlas.engine.batch import ForwardBatch
from kvatlas.engine.cache import KVCache
from kvatlas.policies.cache_view import Signal, Step, undeclared_column
from kvatlas.policies.contract import Policy

if TYPE_CHECKING:
    from kvatlas.models import ModelHandle

#: The observers of a sequence's policies; settings with the same observations share one.
Signals = frozenset[tuple[Any, ...]]


def state_name(policy: Policy, name: str) -> str:
    """Return the key of a policy's column in the token states: settings with equal observers share it."""
    return "/".join(map(str, (*policy.observer, name)))


class SignalCollector:
    """The policies of an engine that declare signals, one for all settings with the same observations."""

    def __init__(self, model: ModelHandle, policies: Iterable[Policy]) -> None:
        self.model = model
        self.by_key = {policy.observer: policy for policy in policies if policy.observes}
        #: The longest memory of recent queries that any policy declares.
        self.query_window = max((policy.queries for policy in self.by_key.values()), default=0)
        self.hidden = any(Signal.HIDDEN in policy.observes for policy in self.by_key.values())

    def token_state(self) -> dict[str, tuple[int, int]]:
        """Return all columns with their widths (layers, KV heads), by the policies' scopes."""
        widths = {}
        for policy in self.by_key.values():
            for name in policy.columns:
                widths[state_name(policy, name)] = policy.scope.width(self.model.shape)
        return widths

    def signals(self, policies: Iterable[Policy]) -> Signals:
        return frozenset(policy.observer for policy in policies if policy.observes)

    def asking(self, signal: Signal, signals: Sequence[Signals]) -> tuple[int, ...]:
        """Return the indices of the sequences whose policies declare a signal."""
        keys = {key for key, policy in self.by_key.items() if signal in policy.observes}
        if not keys:
            return ()
        return tuple(index for index, observers in enumerate(signals) if not keys.isdisjoint(observers))

    def notify(
        self, batch: ForwardBatch, signals: Sequence[Signals], prompts: Sequence[int | None], hidden: Tensor | None
    ) -> None:
        """Call `observe` of every policy with its signals of a pass, before the lengths of its sequences grow.

        `prompts` has the length of the prompt for sequences in their prompt, None for the others. `hidden` [tokens,
        hidden size] are the last hidden states.
        """
        # All sequences in decoding are one step. Prompts have unlike numbers of tokens: a step for each.
        groups: list[list[int]] = [[]]
        for index, (count, prompt) in enumerate(zip(batch.counts, prompts, strict=True)):
            if count > 1 or prompt is not None:
                groups.append([index])
            else:
                groups[0].append(index)

        for key, policy in self.by_key.items():
            if not policy.observes & {Signal.HIDDEN, Signal.ATTENTION}:
                continue
            for group in groups:
                asking = [index for index in group if key in signals[index]]
                if asking:
                    policy.observe(self._step(batch, policy, asking, prompts[asking[0]], hidden))

    def _step(
        self, batch: ForwardBatch, policy: Policy, members: list[int], prompt: int | None, hidden: Tensor | None
    ) -> Step:
        starts = [batch.starts[member] for member in members]
        lengths = [batch.lengths[member] for member in members]
        cache_rows = [batch.rows[member] for member in members]
        # One tensor: to make three takes three times as long.
        indices = torch.tensor([starts, lengths, cache_rows], device=batch.positions.device)
        first, length, rows = indices[..., None]
        tokens = first
        entered = length
        count = batch.counts[members[0]]
        if count > 1:
            new = torch.arange(count, device=batch.positions.device)
            tokens = first + new
            entered = length + new

        attention = None
        if Signal.ATTENTION in policy.observes:
            # Averaged to the width of the policy's scope [members, layers or 1, KV heads or 1, slots].
            layers, heads = policy.scope.width(batch.cache.shape)
            attention = batch.attention
            if len(members) < attention.shape[1]:
                places = {member: place for place, member in enumerate(batch.watched)}
                attention = attention[:, [places[member] for member in members]]
            attention = attention.transpose(0, 1)
            if layers == 1:
                attention = attention.mean(1, keepdim=True)
            if heads == 1:
                attention = attention.mean(2, keepdim=True)

        states = hidden[tokens] if hidden is not None and Signal.HIDDEN in policy.observes else None
        columns = CachedNotes(batch.cache, policy, rows[:, 0], entered, attention)
        return Step(self.model, batch.positions[tokens], states, attention, columns, prompt)


@dataclass(frozen=True)
class CachedNotes:
    """A policy's columns of some sequences, over as many tokens as its attention.

    `rows` are their rows in the cache, `entered` [rows, new] the places of their new tokens.
    """

    cache: KVCache
    policy: Policy
    rows: Tensor
    entered: Tensor
    attention: Tensor | None

    def _column(self, name: str) -> Tensor:
        if name not in self.policy.columns:
            raise undeclared_column(name, self.policy.columns)
        column = self.cache.token_state[state_name(self.policy, name)]
        return column if self.attention is None else column[..., : self.attention.shape[-1]]

    def enter(self, name: str, values: Tensor) -> None:
        column = self._column(name)
        column[self.rows[:, None], :, :, self.entered] = values[:, :, None, None].to(column.dtype)

    def read(self, name: str) -> Tensor:
        return self._column(name)[self.rows]

    def write(self, name: str, values: Tensor) -> None:
        column = self._column(name)
        column[self.rows] = values.to(column.dtype)
