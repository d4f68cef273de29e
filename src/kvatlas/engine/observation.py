"""Observation: which rows have to show what, and where policies note what they see; nobody pays who did not ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvatlas.engine.attention import Pass
from kvatlas.engine.cache import Slots
from kvatlas.engine.chunks import Chunks, Look
from kvatlas.engine.graphs import Fixed
from kvatlas.policies import Policy, Signal, Step

if TYPE_CHECKING:
    from torch import Tensor

    from kvatlas.models import Model, Shape

#: What a row's policies ask for: their observers, of settings that see and note the same only one.
Asked = frozenset[tuple[Any, ...]]


def column_name(policy: Policy, name: str) -> str:
    """A policy's column among those of all policies: settings with equal observers share it."""
    return "/".join(map(str, (*policy.observer, name)))


class Observers:
    """The policies of an engine that want to see something, one for all settings that see and note the same."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        self.by_key = {policy.observer: policy for policy in policies if policy.observes}
        #: The longest memory that any policy wants of recent queries.
        self.ring = max((policy.queries for policy in self.by_key.values()), default=0)
        self.hidden = any(Signal.HIDDEN in policy.observes for policy in self.by_key.values())

    def columns(self, shape: Shape) -> dict[str, tuple[int, int]]:
        """Names of all columns with the widths (layers, KV heads) that their policies' scopes give them."""
        return {
            column_name(policy, name): policy.scope.width(shape)
            for policy in self.by_key.values()
            for name in policy.columns
        }

    def asked(self, policies: Iterable[Policy]) -> Asked:
        """What a row with these policies has to show."""
        return frozenset(policy.observer for policy in policies if policy.observes)

    def rows(self, signal: Signal, asked: Sequence[Asked]) -> tuple[int, ...]:
        """Numbers of the rows that have to show a signal."""
        keys = {key for key, policy in self.by_key.items() if signal in policy.observes}
        return tuple(row for row, wanted in enumerate(asked) if keys and not keys.isdisjoint(wanted))

    def show(
        self,
        model: Model,
        step: Pass | Look | Fixed,
        asked: Sequence[Asked],
        entered: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
    ) -> None:
        """Show every observer what it asked for.

        `entered` [rows, new] are the slots of the new tokens of all rows of the pass, `positions` [batch, new] and
        `hidden` [batch, new, hidden size] the true positions and the last hidden states of its whole batch, which may
        have idle rows behind; `asked` belongs to its rows.
        """
        first = step.prefill or 0
        for key, policy in self.by_key.items():
            attention: Tensor | None = None
            index: Tensor | slice = slice(None)
            if Signal.ATTENTION in policy.observes:
                rows = [row for row, wanted in enumerate(asked) if key in wanted]
                if not rows:
                    continue
                assert not isinstance(step, Fixed), "attention is watched in a Pass"
                attention = self._attention(policy, step, [first + row for row in rows])
                index = torch.tensor(rows, device=entered.device)
            elif Signal.HIDDEN not in policy.observes:
                continue
            # Hidden states alone are shown of the whole batch: on CPUs fewer than eight rows would round differently.
            seen = None if hidden is None or Signal.HIDDEN not in policy.observes else hidden[index]
            columns = _Columns(step.slots, policy, step.places[index], entered[index], attention)
            policy.observe(Step(model, positions[index], seen, attention, columns))

    def show_ahead(
        self, model: Model, ahead: Chunks, asked: Sequence[Asked], accepted: Sequence[int], hidden: Tensor | None
    ) -> None:
        """Show the proposed tokens that were accepted, `accepted` [rows] of each row, in the order of decoding."""
        for look in ahead.looks(accepted, [bool(wanted) for wanted in asked]):
            seen = None if hidden is None else hidden[look.lines]
            self.show(model, look, [asked[row] for row in look.rows], look.entered, look.positions, seen)

    def _attention(self, policy: Policy, step: Pass | Look, rows: list[int]) -> Tensor:
        places = {row: place for place, row in enumerate(step.watched)}
        attention = step.attention[[places[row] for row in rows]] if len(rows) < len(places) else step.attention
        layers, heads = policy.scope.width(step.slots.shape)
        attention = attention.mean(1, keepdim=True) if layers == 1 else attention
        return attention.mean(2, keepdim=True) if heads == 1 else attention


@dataclass(frozen=True)
class _Columns:
    """A policy's columns of the rows at hand, over as many slots as the attention that it is shown.

    `rows` are their places in the slots; values of idle rows, which come behind, are left out.
    """

    slots: Slots
    policy: Policy
    rows: Tensor
    entered: Tensor
    attention: Tensor | None

    def _column(self, name: str) -> Tensor:
        return self.slots.columns[column_name(self.policy, name)]

    def _width(self) -> int:
        return self.slots.capacity if self.attention is None else self.attention.shape[-1]

    def enter(self, name: str, values: Tensor) -> None:
        column = self._column(name)
        shown = values[: len(self.rows), :, None, None]
        column[self.rows[:, None], :, :, self.entered] = shown.to(column.dtype)

    def read(self, name: str) -> Tensor:
        return self._column(name)[self.rows, ..., : self._width()]

    def write(self, name: str, values: Tensor) -> None:
        column = self._column(name)
        column[self.rows, ..., : self._width()] = values.to(column.dtype)
