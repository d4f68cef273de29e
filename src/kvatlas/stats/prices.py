"""The cost of a right answer: what the traces of a setting cost, divided by the right ones, against the full cache.

Traces that grow under compression, and answers that are lost, both raise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.core import Setting, grouped
from kvatlas.stats.losses import FULL
from kvatlas.stats.numerics.arrays import Contrast, Floats
from kvatlas.stats.numerics.ratios import cost_ratio, share_ratio
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces

COSTS = ("output_tokens", "byte_steps", "seconds")


@dataclass(frozen=True)
class Price:
    """A cost for each right answer of a setting, the mean over benchmarks on the problems of the full cache too.

    `cost` is `output_tokens`, `byte_steps` (the mean bytes of the cache times the tokens written) or `seconds`. `ratio`
    is that to the full cache, paired by problem, with its 95 % interval; the ends are None where there are too few
    right answers to say.
    """

    model: str
    setting: Setting
    cost: str
    value: float
    ratio: float
    low: float | None
    high: float | None
    problems: int

    @property
    def is_equal(self) -> bool:
        """True if the ratio is 100 % as it is printed."""
        return round(100 * self.ratio) == 100


def prices(run: RunData) -> list[Price]:
    """Return the prices of the settings that have Pass@1 on every benchmark of a model with a full cache.

    None of an adaptive sweep.
    """
    cells = [cell for cell in run.cells if cell.metric == "pass@1" and not cell.adaptive]
    found: list[Price] = []
    for of_model in grouped(cells, lambda cell: cell.model).values():
        found += _prices_of_model(of_model)
    return found


def _prices_of_model(cells: Sequence[CellTraces]) -> list[Price]:
    """Return the prices of the settings that a model has on every benchmark of its full cache."""
    by_setting = grouped(cells, lambda cell: cell.setting)
    full = {cell.benchmark: cell for cell in by_setting.get(FULL, [])}
    found: list[Price] = []
    for of_setting in by_setting.values():
        if {cell.benchmark for cell in of_setting} == full.keys():
            found += _prices(of_setting, [full[cell.benchmark] for cell in of_setting])
    return found


def prices_of_setting(cells: Sequence[CellTraces], full: Sequence[CellTraces]) -> list[Price]:
    """Return the prices of the cells of a setting, each beside the full cache's cell of its benchmark.

    None where the full cache lacks a benchmark, of other metrics, and of an adaptive sweep.
    """
    by_benchmark = {cell.benchmark: cell for cell in full}
    if any(cell.metric != "pass@1" or cell.adaptive or cell.benchmark not in by_benchmark for cell in cells):
        return []
    return _prices(cells, [by_benchmark[cell.benchmark] for cell in cells])


def _prices(cells: Sequence[CellTraces], full: Sequence[CellTraces]) -> list[Price]:
    """Return the prices of the cells of a setting, each beside the full cache's cell of its benchmark."""
    pairs = list(map(_SharedProblems, cells, full))
    if not all(pair.count for pair in pairs):
        return []
    right = [pair.right(pair.cell) for pair in pairs]
    shares = share_ratio(right, [pair.right(pair.full) for pair in pairs])
    if shares is None:
        return []
    problems = sum(pair.count for pair in pairs)
    found = []
    for cost in COSTS:
        costs = [pair.mean_costs(cost) for pair in pairs]
        if not np.isnan(np.concatenate(costs, axis=1)).any():
            value = _mean_over_benchmarks([cost_of_cell for cost_of_cell, _ in costs]) / _mean_over_benchmarks(right)
            # The full cache's ratio to itself is 1, without uncertainty.
            ratio = Contrast(1.0, 1.0, 1.0) if cells[0].setting == FULL else cost_ratio(costs, shares)
            found.append(_price(cells[0], cost, value, ratio, problems))
    return found


def _price(cell: CellTraces, cost: str, value: float, ratio: Contrast, problems: int) -> Price:
    """Return a price; the ends of the ratio's interval are given only where both of them are known."""
    has_ends = ratio.low > 0 and ratio.high < math.inf
    return Price(
        cell.model,
        cell.setting,
        cost,
        value,
        ratio.value,
        ratio.low if has_ends else None,
        ratio.high if has_ends else None,
        problems,
    )


def _mean_over_benchmarks(values: Sequence[Floats]) -> float:
    """Return the mean over benchmarks of the means over their problems."""
    return math.fsum(float(of_benchmark.mean()) for of_benchmark in values) / len(values)


class _SharedProblems:
    """The problems of which a cell and the full cache both have graded samples."""

    def __init__(self, cell: CellTraces, full: CellTraces) -> None:
        self.cell = cell
        self.full = full
        is_graded = ~np.isnan(self._in_order(cell, _mean_of_graded(cell, cell.grades)))
        is_graded &= ~np.isnan(self._in_order(full, _mean_of_graded(full, full.grades)))
        self._chosen = np.flatnonzero(is_graded)
        self.count = len(self._chosen)

    def right(self, cell: CellTraces) -> Floats:
        """Return the share of right answers of one of the two cells, by problem."""
        return self._in_order(cell, _mean_of_graded(cell, cell.grades))[self._chosen]

    def mean_costs(self, cost: str) -> tuple[Floats, Floats]:
        """Return the mean cost of a sample of the cell and of the full cache, by problem; NaN where it is unknown."""
        return self._mean_cost(self.cell, cost), self._mean_cost(self.full, cost)

    def _mean_cost(self, cell: CellTraces, cost: str) -> Floats:
        values = cell.traces["output_tokens" if cost == "byte_steps" else cost].astype(float)
        if cost == "byte_steps":
            token_bytes, tail_bytes = cell.expected.kv_bytes or (math.nan, math.nan)
            values = values * (cell.traces["mean_kv_tokens"] * token_bytes + tail_bytes)
        return self._in_order(cell, _mean_of_graded(cell, values))[self._chosen]

    def _in_order(self, cell: CellTraces, by_problem: Floats) -> Floats:
        return cell.in_order(by_problem, self.cell.place)


def _mean_of_graded(cell: CellTraces, values: Floats) -> Floats:
    """Return the mean of values [problem, sample] over the samples that have a grade; NaN without any."""
    is_graded = ~np.isnan(cell.grades)
    count = np.where(is_graded.any(1), is_graded.sum(1), math.nan)
    return np.asarray(np.where(is_graded, values, 0.0).sum(1) / count, float)
