"""Adaptive sweeps, which choose the settings for the next problems from the stored traces alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvatlas.adaptive.decisions import observed_differences
from kvatlas.core import KvatlasError
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.results import Expected, Manifest, Store
from kvatlas.stats.numerics.sequential import Decision, begin, block_slice, is_complete, take_look
from kvatlas.stats.run_data import margin_from_points
from kvatlas.stats.table import TraceTable, select
from kvatlas.sweeps.plan import Plan


@dataclass
class AdaptiveSweep:
    """An adaptive sweep in progress.

    `given[model][setting id]` counts blocks of problems; baselines get every block of any setting. `stopped[model]` is
    the reason of the end as a clause.
    """

    plan: Plan
    store: Store
    decode: Callable[[ModelHandle, Sequence[Expected]], None]
    on_message: Callable[[str], None]
    given: dict[str, dict[str, int]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    @cached_property
    def orders(self) -> dict[str, tuple[str, ...]]:
        """The problems of each benchmark in a random order of the seed."""
        orders = {}
        for name, problems in self.plan.problems.items():
            shuffled = sorted(problem.id for problem in problems)
            # The same on every machine.
            random.Random(stream_key(self.plan.spec.seed, "order", name)).shuffle(shuffled)
            orders[name] = tuple(shuffled)
        return orders

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of problems of each benchmark."""
        return {name: len(problems) for name, problems in self.orders.items()}

    @cached_property
    def blocks(self) -> int:
        """The number of blocks."""
        return min(self.plan.spec.allocate.blocks, *self.sizes.values())

    def run(self) -> None:
        """Decode blocks of problems until the decision for each model is made.

        Raises KvatlasError if a benchmark has too few problems for blocks.
        """
        if self.blocks < 2:
            raise KvatlasError("allocate: adaptive needs at least two problems of every benchmark.")

        settings = [policy.setting.id for policy, _ in self.plan.policies]
        self.given = {model.name: dict.fromkeys(settings, 1) for model in self.plan.models}
        for model in self.plan.models:
            self._decode(model)
        self.store.put_manifest(self.manifest())

    def _decode(self, model: ModelHandle) -> None:
        """Decode the blocks of one model."""
        given = self.given[model.name]
        margin = margin_from_points(self.plan.spec.lose_at_most)
        baselines = [policy.setting.id for policy, baseline in self.plan.policies if baseline]
        state = begin(len(given) - len(baselines))
        count = len(given)
        while True:
            self.on_message(
                f"{model.name}: block {max(given.values())} of {self.blocks}, {count} of {len(given)} settings"
            )
            promise = self.manifest()
            self.store.put_manifest(promise)
            self.decode(model, promise.expected)

            table = TraceTable(self.plan.manifest(), self.store.columns())
            cells = select(table.cells(), model=model.name)
            settings, seen = observed_differences(cells, self.orders, self.sizes, self.blocks)
            if not is_complete(state, seen):
                raise KvatlasError(f"A block of the sweep of {model.name} lacks traces; the same command tries again.")
            state = take_look(state, seen, margin)

            reason = self._reason(state)
            if reason is not None:
                self.stopped[model.name] = reason
                self.on_message(f"{model.name}: {reason}.")
                return

            # Baselines get the most blocks of any setting, so that each setting is compared on all its problems.
            given.update(zip(settings, state.goal.tolist(), strict=True))
            given.update(dict.fromkeys(baselines, max(given[setting] for setting in settings)))
            count = int(state.next.sum()) + len(baselines)

    def _reason(self, state: Decision) -> str | None:
        """Return the reason to stop as a clause, or None."""
        if state.open.any():
            return None
        where = f"after block {state.blocks.max()} of {self.blocks}, with 0 of {len(state.open)} settings open"
        if state.recommended is None:
            return f"no setting can be shown to keep the margin, {where}"
        return f"a cheapest setting that keeps the margin is shown, {where}"

    def manifest(self) -> Manifest:
        """Return the manifest so far: each cell has the problems of its blocks."""
        promise = self.plan.manifest()
        expected = []
        for cell in promise.expected:
            last = block_slice(self.sizes[cell.benchmark], self.blocks, self.given[cell.model][cell.setting.id] - 1)
            expected.append(replace(cell, problems=self.orders[cell.benchmark][: last.stop]))
        allocation = {"kind": "adaptive", "blocks": self.blocks, "problems": self.sizes, "stopped": dict(self.stopped)}
        return replace(promise, expected=tuple(expected), allocation=allocation)
