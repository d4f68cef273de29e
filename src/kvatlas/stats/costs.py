"""Costs of settings beside those of the full cache, with intervals."""

import math
from collections.abc import Container, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import special

from kvatlas.core import KvatlasError, grouped, is_reference
from kvatlas.stats.numerics.arrays import LEVEL, Floats, mean_of_known, means_of_clusters, standard_error
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces

MEMORY = "memory"
SECONDS = "seconds"
RATE = "tokens_per_second"
COSTS = (MEMORY, RATE, SECONDS)


class CostRatio(NamedTuple):
    """A cost as a share of the full cache's, with its 95 % interval; declared bytes of a token have none."""

    value: float
    low: float | None = None
    high: float | None = None


def _terms(cell: CellTraces, cost: str) -> list[Floats]:
    """Return the numbers of traces whose mean a cost is; of a rate that above the line and that below it."""
    if cost == MEMORY:
        token_bytes, sequence_bytes = cell.expected.kv_bytes or (1, 0)
        return [cell.numbers("mean_kv_tokens") * token_bytes + sequence_bytes]
    return [cell.numbers(name) for name in (("output_tokens", "seconds") if cost == RATE else ("seconds",))]


def cost_ratios(run: RunData, model: str, cost: str, settings: Container[str]) -> dict[str, CostRatio]:
    """Return a cost of settings of a model by id, as shares of the full cache's, on the mean over benchmarks.

    Raises KvatlasError for an unknown cost, and where it is not known of a setting or of the full cache.
    """
    if cost not in COSTS:
        raise KvatlasError(f"--cost: expected {', '.join(COSTS)}, got {cost!r}.")
    by_setting = grouped((one for one in run.cells if one.model == model and one.stored), lambda one: one.setting.id)
    full = next((cells for cells in by_setting.values() if is_reference(cells[0].setting)), None)
    if full is None:
        raise KvatlasError(f"--cost {cost}: {model} has no full cache in this run whose cost settings could save.")
    found = {}
    for id_, cells in by_setting.items():
        if id_ not in settings:
            continue
        ratio = _declared(cells, full) if cost == MEMORY else None
        ratio = ratio or _ratio(cells, full, cost)
        if ratio is None:
            raise KvatlasError(f"--cost {cost} is not known of {cells[0].setting} and of the full cache of {model}.")
        found[id_] = ratio
    return found


def _declared(cells: Sequence[CellTraces], full: Sequence[CellTraces]) -> CostRatio | None:
    """Return the bytes of a token as the spec of a server declares them, where no trace has counted its tokens."""
    if any((cell.numbers("mean_kv_tokens") > 0).any() for cell in (*cells, *full)):
        return None
    sizes = [cell.expected.kv_bytes[0] for cell in cells if cell.expected.kv_bytes]
    of_full = [cell.expected.kv_bytes[0] for cell in full if cell.expected.kv_bytes]
    if not (sizes and of_full):
        return None
    return CostRatio(fmean(sizes) / fmean(of_full))


def _ratio(cells: Sequence[CellTraces], full: Sequence[CellTraces], cost: str) -> CostRatio | None:
    """Return the ratio of the means over benchmarks of problems that both sides have; None without a number of them.

    The interval is that of the logarithm by the delta method: with the means m of the terms, the logarithm of the
    ratio is to first order a mean over independent problems of the sum of the terms x / m, so its variance is theirs.
    Terms are paired by problem; benchmarks weigh equally. It covers the choice of problems on the machine and in the
    hours of the run, and nothing of other machines.
    """
    partners = {cell.benchmark: cell for cell in full}
    means_by_benchmark = []
    units = []
    strata: list[int] = []
    for stratum, cell in enumerate(cells):
        other = partners.get(cell.benchmark)
        if other is None:
            return None
        sides = []
        for side in (cell, other):
            sides += [side.in_order(mean_of_known(numbers), cell.problems) for numbers in _terms(side, cost)]
        values = np.array(sides)
        is_known = ~np.isnan(values).any(0)
        if not is_known.any():
            return None
        means_by_benchmark.append(values[:, is_known].mean(1))
        values[:, ~is_known] = math.nan
        of_units = means_of_clusters(values, cell.clusters)
        units.append(of_units[:, ~np.isnan(of_units[0])])
        strata += [stratum] * units[-1].shape[1]

    # The cell's terms, then the full cache's: those above a line against those below it.
    signs = np.array([1.0, -1.0, -1.0, 1.0] if cost == RATE else [1.0, -1.0])
    means = np.mean(means_by_benchmark, axis=0)
    if not (means > 0).all():
        return None
    value = float(np.exp(signs @ np.log(means)))
    parts = (signs / means) @ np.concatenate(units, axis=1)
    error = float(standard_error(parts, np.array(strata)))
    if not math.isfinite(error):
        return CostRatio(value)
    half = float(special.stdtrit(len(strata) - len(cells), 1 - LEVEL / 2)) * error
    return CostRatio(value, value * math.exp(-half), value * math.exp(half))
