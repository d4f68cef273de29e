"""The cost of a right answer: what the traces of a setting cost, divided by the right ones, against the full cache.

Traces that grow under compression, and answers that are lost, both raise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.core import AGAIN, Setting, grouped, is_reference
from kvatlas.stats.numerics.arrays import Contrast, Floats, means_of_clusters
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
    """Return the prices of the settings that have Pass@1 on every benchmark of a model with a full cache."""
    cells = [cell for cell in run.cells if cell.metric == "pass@1" and cell.setting != AGAIN]
    found: list[Price] = []
    for of_model in grouped(cells, lambda cell: cell.model).values():
        by_setting = grouped(of_model, lambda cell: cell.setting)
        full = {cell.benchmark: cell for cell in of_model if is_reference(cell.setting)}
        for of_setting in by_setting.values():
            if {cell.benchmark for cell in of_setting} == full.keys():
                found += _prices_beside(of_setting, [full[cell.benchmark] for cell in of_setting])
    return found


def prices_of_setting(cells: Sequence[CellTraces], full: Sequence[CellTraces]) -> list[Price]:
    """Return the prices of the cells of a setting, each beside the full cache's cell of its benchmark.

    None where the full cache lacks a benchmark and of other metrics.
    """
    by_benchmark = {cell.benchmark: cell for cell in full}
    if any(cell.metric != "pass@1" or cell.benchmark not in by_benchmark for cell in cells):
        return []
    return _prices_beside(cells, [by_benchmark[cell.benchmark] for cell in cells])


def _prices_beside(cells: Sequence[CellTraces], full: Sequence[CellTraces]) -> list[Price]:
    """Return the prices of the cells of a setting, each beside the full cache's cell of its benchmark."""
    pairs = list(map(_SharedProblems, cells, full))
    if not all(pair.count for pair in pairs):
        return []
    right = [pair.right(pair.cell) for pair in pairs]
    shares = share_ratio(right, [pair.right(pair.full) for pair in pairs])
    if shares is None:
        return []

    found = []
    setting = cells[0].setting
    problems = sum(pair.count for pair in pairs)
    for cost in COSTS:
        # By benchmark the costs of the cell and of the full cache, by problem.
        costs = [(pair.mean_cost(pair.cell, cost), pair.mean_cost(pair.full, cost)) for pair in pairs]
        if np.isnan(np.concatenate(costs, axis=1)).any():
            continue
        value = _mean_of_means([cost_of_cell for cost_of_cell, _ in costs]) / _mean_of_means(right)
        # The full cache's ratio to itself is 1, without uncertainty.
        ratio = Contrast(1.0, 1.0, 1.0) if is_reference(setting) else cost_ratio(costs, shares)
        # The ends of the interval are given only where both of them are known.
        low: float | None = None
        high: float | None = None
        if ratio.low > 0 and ratio.high < math.inf:
            low = ratio.low
            high = ratio.high
        found.append(Price(cells[0].model, setting, cost, value, ratio.value, low, high, problems))
    return found


def _mean_of_means(values: Sequence[Floats]) -> float:
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
        """Return the share of right answers of one of the two cells, by problem or cluster."""
        return self._by_unit(self._in_order(cell, _mean_of_graded(cell, cell.grades)))

    def mean_cost(self, cell: CellTraces, cost: str) -> Floats:
        """Return the mean cost of a sample of one of the two cells, by problem or cluster; NaN where it is unknown."""
        values = cell.traces["output_tokens" if cost == "byte_steps" else cost].astype(float)
        if cost == "byte_steps":
            token_bytes, tail_bytes = cell.expected.kv_bytes or (math.nan, math.nan)
            values = values * (cell.traces["mean_kv_tokens"] * token_bytes + tail_bytes)
        return self._by_unit(self._in_order(cell, _mean_of_graded(cell, values)))

    def _by_unit(self, of_problems: Floats) -> Floats:
        """Return the values of the shared problems, or their means over clusters of problems."""
        clusters = self.cell.clusters
        chosen = None if clusters is None else np.unique(clusters[self._chosen], return_inverse=True)[1]
        return means_of_clusters(of_problems[self._chosen], chosen)

    def _in_order(self, cell: CellTraces, by_problem: Floats) -> Floats:
        return cell.in_order(by_problem, self.cell.place)


def _mean_of_graded(cell: CellTraces, values: Floats) -> Floats:
    """Return the mean of values [problem, sample] over the samples that have a grade; NaN without any."""
    is_graded = ~np.isnan(cell.grades)
    count = np.where(is_graded.any(1), is_graded.sum(1), math.nan)
    return np.asarray(np.where(is_graded, values, 0.0).sum(1) / count, float)
