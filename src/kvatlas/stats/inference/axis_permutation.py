"""Effects of an axis on maps of bare Pass@1, pooled over benchmarks and models, by permutation; on arrays.

`values` is [maps, across, levels]: Pass@1 of each map, with the axis in question last. If the axis does nothing, its
levels could stand in any order. All rows of a map are put into the same order, since cells of one level may share much
of their traces: orders of their own for every row reject in 35 to 50 % of maps without an effect whose neighbours are
as alike as settings that share the beginning of a trace. What is known of problems and samples is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.bounded_mean import LEVEL, Floats

DRAWS = 40_000


@dataclass(frozen=True)
class AxisEffect:
    """What each level is above (+) or below (-) the mean of the others, [levels], with limits that hold together.

    `p` is of "no level differs", `level_p` [levels] that of each level, adjusted over all. `below` [levels] counts the
    maps in which a level lies below the mean of the others.
    """

    value: Floats
    low: Floats
    high: Floats
    p: float
    level_p: Floats
    below: tuple[int, ...]
    maps: int


def axis_effect(values: Floats, *, draws: int = DRAWS, seed: int = 0) -> AxisEffect:
    """The effect of the last axis of `values` [maps, across, levels], in the units of the values.

    The statistic is the largest of the levels' mean distances from the others, against that of random orders of the
    levels of every map; the limits are Student's over maps, for all levels together, and infinite for one map. A single
    map shows nothing: its orders are too few. Raises KvatlasError for one level.

    Source: Pesarin and Salmaso (2010), Permutation Tests for Complex Data, chapter 5 (restricted permutation).
    """
    maps, _, levels = values.shape
    if levels < 2:
        raise KvatlasError("The effect of an axis needs at least two of its levels.")
    factor = levels / (levels - 1)
    by_map = (values - values.mean(2, keepdims=True)).mean(1) * factor
    effect = by_map.mean(0)
    generator = np.random.default_rng(seed)
    chance = np.abs(generator.permuted(np.broadcast_to(by_map, (draws, maps, levels)), axis=2).mean(1)).max(1)
    beyond = np.array([(1 + np.count_nonzero(chance >= abs(value) - 1e-12)) / (1 + draws) for value in effect])
    freedom = (maps - 1) * (levels - 1)
    reach = math.inf
    if freedom:
        error = float(((by_map - effect) ** 2).sum()) / factor / freedom / maps
        reach = float(stats.t.isf(LEVEL / 2 / levels, freedom)) * math.sqrt(error)
    below = tuple(int(count) for count in (by_map < -1e-12).sum(0))
    return AxisEffect(effect, effect - reach, effect + reach, float(beyond.min()), beyond, below, maps)


def peak_p(values: Floats, *, draws: int = 4_000, seed: int = 0) -> float:
    """The p-value of "no cell stands out above the axes' own effects", over all cells of all maps.

    `values` are [maps, rows, columns]. What the two axes add up to is taken out; the largest residual of any map,
    against that of cells in random order.
    """
    left = values - values.mean(1, keepdims=True) - values.mean(2, keepdims=True) + values.mean((1, 2), keepdims=True)
    flat = left.reshape(len(values), -1)
    scale = np.maximum(flat.std(1, keepdims=True), 1e-12)
    observed = float((flat / scale).max())
    # The largest of as many residuals of normal values on a grid of this size.
    drawn = np.random.default_rng(seed).standard_normal((draws, *values.shape))
    noise = drawn - drawn.mean(2, keepdims=True) - drawn.mean(3, keepdims=True) + drawn.mean((2, 3), keepdims=True)
    flat = noise.reshape(draws, len(values), -1)
    largest = (flat / flat.std(2, keepdims=True)).max((1, 2))
    return float((1 + np.count_nonzero(largest >= observed - 1e-12)) / (1 + draws))
