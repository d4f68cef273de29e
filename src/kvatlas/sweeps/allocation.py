"""Adaptive sweeps: which settings get which problems next, decided from the stored traces alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvatlas.core import KvatlasError, Trace
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.results import Manifest, TraceColumns
from kvatlas.stats.adaptive import Decision, begin, complete, cut, known, look
from kvatlas.stats.metrics import Measure
from kvatlas.stats.run_data import margin_of
from kvatlas.stats.table import CellTraces, add_traces, cells_of
from kvatlas.sweeps.plan import Plan, WorkItem


@dataclass
class Adaptive:
    """An adaptive sweep in progress: the grades so far, and which blocks each setting was given.

    `cells` has several of a key where models have the same weights. `given[model][setting id]` counts
    blocks; baselines get every block that any setting gets. `stopped[model]` says in words why no more was asked for.
    """

    plan: Plan
    orders: Mapping[str, tuple[str, ...]]
    blocks: int
    cells: Sequence[CellTraces]
    measure: Measure
    given: dict[str, dict[str, int]] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, plan: Plan, traces: TraceColumns) -> Adaptive:
        """From a plan and what is stored already; KvatlasError where a benchmark has too few problems for blocks."""
        orders = {
            name: order(plan.spec.seed, name, [p.id for p in problems]) for name, problems in plan.problems.items()
        }
        blocks = min(plan.spec.allocate.blocks, *(len(problems) for problems in orders.values()))
        if blocks < 2:
            raise KvatlasError("allocate: adaptive needs at least two problems of every benchmark.")
        manifest = plan.manifest()
        measure = Measure(manifest, "pass@1")
        allocation = cls(plan, orders, blocks, cells_of(manifest, measure), measure)
        for model in plan.models:
            allocation.given[model.name] = {policy.setting.id: 1 for policy, _ in plan.policies}
        add_traces(allocation.cells, traces, measure)
        return allocation

    def add(self, run_key: str, trace: Trace) -> None:
        """Count a trace that is in the store."""
        add_traces(self.cells, TraceColumns.of([(run_key, trace)]), self.measure)

    def stages(self, model: ModelHandle) -> Iterator[str]:
        """Block after block until the question is answered; yields a sentence when blocks have been given out.

        The traces of a block must be added before the next is asked for. Ends with `stopped[model]` set.
        """
        given, margin = self.given[model.name], margin_of({"lose_at_most": self.plan.spec.lose_at_most})
        sizes = {name: len(problems) for name, problems in self.orders.items()}
        own = [cell for cell in self.cells if cell.expected.model == model.name]
        baselines = [policy.setting.id for policy, baseline in self.plan.policies if baseline]
        yield self._said(model.name, len(given))
        settings, seen = known(own, self.orders, sizes, self.blocks)
        state = begin(len(settings))
        while True:
            if not complete(state, seen):
                raise KvatlasError(f"A block of the sweep of {model.name} lacks traces; the same command tries again.")
            state = look(state, seen, margin)
            spent = sum(int(np.nansum(cell.traces["output_tokens"])) for cell in own)
            reason = self._reason(state, spent)
            if reason is not None:
                self.stopped[model.name] = reason
                return
            given.update(zip(settings, state.goal.tolist(), strict=True))
            given.update(dict.fromkeys(baselines, max(given[setting] for setting in settings)))
            yield self._said(model.name, int(state.next.sum()) + len(baselines))
            _, seen = known(own, self.orders, sizes, self.blocks)

    def _reason(self, state: Decision, spent: int) -> str | None:
        left = int(state.open.sum())
        where = f"after block {state.blocks.max()} of {self.blocks}, with {left} of {len(state.open)} settings open"
        budget = self.plan.spec.allocate.token_budget
        if not left:
            shown = "shown" if state.recommended is not None else "not to be shown"
            return f"a cheapest setting that keeps the margin is {shown}, {where}"
        if budget is not None and spent >= budget:
            return f"the token budget of {budget:,} is spent ({spent:,}), {where}"
        return None

    def _said(self, model: str, settings: int) -> str:
        block = max(self.given[model].values())
        return f"{model}: block {block} of {self.blocks}, {settings} of {len(self.given[model])} settings"

    def manifest(self) -> Manifest:
        """The promise so far: each cell's problems are those of the blocks that it was given."""
        whole = self.plan.manifest()
        expected = tuple(
            replace(cell, problems=self._problems(cell.benchmark, self.given[cell.model][cell.setting.id]))
            for cell in whole.expected
        )
        allocation = {
            "kind": "adaptive",
            "blocks": self.blocks,
            "problems": {name: len(problems) for name, problems in self.orders.items()},
            "stopped": dict(self.stopped),
        }
        return replace(whole, expected=expected, allocation=allocation)

    def units(self, units: Sequence[WorkItem], model: str) -> list[WorkItem]:
        """Of the units that lack traces, those that were given out, each with the settings that they were given to."""
        block_of = {
            (name, problem): number
            for name, order_ in self.orders.items()
            for number in range(self.blocks)
            for problem in order_[cut(len(order_), self.blocks, number)]
        }
        given = self.given[model]
        chosen = []
        for unit in units:
            block = block_of[unit.benchmark, unit.problem.id]
            settings = tuple(setting for setting in unit.settings if given[setting.id] > block)
            if settings:
                chosen.append(replace(unit, settings=settings))
        return chosen

    def _problems(self, benchmark: str, blocks: int) -> tuple[str, ...]:
        own = self.orders[benchmark]
        return own[: cut(len(own), self.blocks, blocks - 1).stop]


def order(seed: int, benchmark: str, problems: Sequence[str]) -> tuple[str, ...]:
    """The order in which the problems of a benchmark come: drawn from the seed, the same on every machine."""
    shuffled = sorted(problems)
    random.Random(stream_key(seed, "order", benchmark)).shuffle(shuffled)
    return tuple(shuffled)
