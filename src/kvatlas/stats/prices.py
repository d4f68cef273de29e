"""The cost of a right answer: what the traces of a setting cost, divided by the right ones, against the full cache.

Traces that grow under compression, and answers that are lost, both raise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from kvatlas.core import Setting, grouped
from kvatlas.stats.intervals import LEVEL, Floats
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces
from kvatlas.stats.verdicts import FULL

COSTS = ("output_tokens", "byte_steps", "seconds")


@dataclass(frozen=True)
class Price:
    """A cost for each right answer of a setting, the mean over benchmarks on the problems of the full cache too.

    `cost` is `output_tokens`, `byte_steps` (the mean bytes of the cache times the tokens written) or `seconds`. `ratio`
    is that to the full cache, paired by problem, with its 95 % interval.
    """

    model: str
    setting: Setting
    cost: str
    value: float
    ratio: float
    low: float
    high: float
    problems: int


def prices(run: RunData) -> list[Price]:
    """Return the prices of the settings that have Pass@1 on every benchmark of a model with a full cache.

    None of an adaptive sweep.
    """
    cells = [cell for cell in run.cells if cell.metric == "pass@1" and not cell.adaptive]
    found = []
    for model, of_model in grouped(cells, lambda cell: cell.model).items():
        by_setting = grouped(of_model, lambda cell: cell.setting)
        full = {cell.benchmark: cell for cell in by_setting.get(FULL, [])}
        for setting, own in by_setting.items():
            if {cell.benchmark for cell in own} != full.keys():
                continue
            for cost in COSTS:
                pairs = [_paired(cell, full[cell.benchmark], cost) for cell in own]
                if any(pair.size == 0 or np.isnan(pair).any() for pair in pairs):
                    continue
                mine, theirs = (math.fsum(pair[row].mean() for pair in pairs) / len(pairs) for row in (0, 1))
                ratio = price_ratio(pairs)
                if ratio is not None:
                    problems = sum(pair.shape[1] for pair in pairs)
                    found.append(Price(model, setting, cost, mine / theirs, *ratio, problems))
    return found


def price_ratio(pairs: Sequence[Floats]) -> tuple[float, float, float] | None:
    """Return the ratio of two costs of a right answer with its interval; None without a right answer of both.

    Each stratum is an array [4, problems]: cost and share of right answers of one setting, then of the other; strata
    weigh alike. The interval is that of the logarithm, by the delta method (Casella and Berger 2002, section 5.5.4).
    """
    means = np.mean([pair.mean(1) for pair in pairs], axis=0)
    if not means.all():
        return None
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    errors = [(signs / means) @ pair for pair in pairs]
    problems = sum(map(len, errors))
    variance = sum(error.var(ddof=1) / len(error) for error in errors if len(error) > 1) / len(pairs) ** 2
    half = special.stdtrit(max(1, problems - len(pairs)), 1 - LEVEL / 2) * math.sqrt(variance)
    log = float(signs @ np.log(means))
    return math.exp(log), math.exp(log - half), math.exp(log + half)


def _paired(cell: CellTraces, full: CellTraces, cost: str) -> Floats:
    """Return cost and share of right answers by problem of a cell, then of the full cache, where both have traces."""
    own, other = _by_problem(cell, cost), full.in_order(_by_problem(full, cost), cell.place)
    shared = ~np.isnan(own[:, 1] + other[:, 1])
    return np.hstack([own[shared], other[shared]]).T


def _by_problem(cell: CellTraces, cost: str) -> Floats:
    """[problems, 2]: cost and share of right answers, over the samples that have a grade; NaN without any."""
    values = cell.traces["output_tokens" if cost == "byte_steps" else cost].astype(float)
    if cost == "byte_steps":
        token, beside = cell.expected.kv_bytes or (math.nan, math.nan)
        values = values * (cell.traces["mean_kv_tokens"] * token + beside)
    known = ~np.isnan(cell.grades)
    count = np.where(known.any(1), known.sum(1), math.nan)
    return np.stack([np.where(known, table, 0.0).sum(1) / count for table in (values, cell.grades)], axis=1)
