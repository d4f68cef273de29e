"""Do maps agree: cell by cell between two readings, and with a published mean over benchmarks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from kvatlas.core import CellCoord, KvatlasError, Map
from kvatlas.stats.inference.binomial_tests import variance

#: Half a unit of the last digit of maps in percent with one decimal, as a share.
ROUNDING = 0.0005
_SLACK = 1e-9


@dataclass(frozen=True)
class Conflict:
    """A cell on which two maps differ by more than rounding; values in [0, 1]."""

    model: str
    benchmark: str
    coord: CellCoord
    first: float
    second: float


@dataclass(frozen=True)
class Agreement:
    """How two sets of maps compare: common cells, conflicts, and the chance of such differences between two samples.

    `p` tests "both measure the same" by the binomial bound, over all common cells whose problems are known; None where
    there are none. A conflict is a contradiction of two readings of one figure, but no surprise between two runs.
    """

    common: int
    conflicts: tuple[Conflict, ...]
    largest: float
    p: float | None


@dataclass(frozen=True)
class MeanCheck:
    """How a set of maps fits a mean map: cells that could be averaged, those within rounding, the largest distance."""

    checked: int
    fitting: int
    largest: float


def agreement(first: Sequence[Map], second: Sequence[Map], tolerance: float = ROUNDING) -> Agreement:
    """Compare two sets of maps cell by cell; maps meet by model, benchmark and metric, and by policy where both tell.

    Raises KvatlasError where they have no cell in common.
    """
    conflicts: list[Conflict] = []
    distances: list[float] = []
    square, freedom = 0.0, 0
    for map_, other in _pairs(first, second):
        mine, theirs = variance(map_), variance(other)
        noise = mine + theirs if mine is not None and theirs is not None else 0.0
        for coord, cell in map_.cells.items():
            if coord not in other.cells:
                continue
            values = cell.estimate.value, other.cells[coord].estimate.value
            distances.append(abs(values[0] - values[1]))
            if distances[-1] > tolerance + _SLACK:
                conflicts.append(Conflict(map_.model, map_.benchmark, coord, *values))
            if noise > 0:
                square += distances[-1] ** 2 / noise
                freedom += 1
    if not distances:
        raise KvatlasError(
            "The maps have no cell in common; they need a model, a benchmark, and values of both axes that both have."
        )
    p = float(stats.chi2.sf(square, freedom)) if freedom else None
    return Agreement(len(distances), tuple(conflicts), max(distances), p)


def fit_to_mean(maps: Sequence[Map], means: Sequence[Map], tolerance: float = ROUNDING) -> MeanCheck:
    """Compare the means over benchmarks of `maps` with given mean maps, cell by cell, models apart.

    A cell counts where all the benchmarks that the mean is over have it. A mean that says `mean of N` is only compared
    with the mean of N benchmarks. Raises KvatlasError where no cell can be compared.
    """
    distances: list[float] = []
    for mean in means:
        parts = [map_ for map_ in maps if map_.model == mean.model and _same_policy(map_, mean)]
        if not parts or (mean.is_mean and mean.averaged != len(parts)):
            continue
        for coord, cell in mean.cells.items():
            values = [map_.cells[coord].estimate.value for map_ in parts if coord in map_.cells]
            if len(values) == len(parts):
                distances.append(abs(math.fsum(values) / len(values) - cell.estimate.value))
    if not distances:
        raise KvatlasError(
            "The maps and the mean map have no cell to compare; the mean must be of the same model, over as many "
            "benchmarks as the maps have, and at values of both axes that all of them have."
        )
    fitting = sum(distance <= tolerance + _SLACK for distance in distances)
    return MeanCheck(len(distances), fitting, max(distances))


def _pairs(first: Sequence[Map], second: Sequence[Map]) -> list[tuple[Map, Map]]:
    return [
        (map_, other)
        for map_ in first
        for other in second
        if (map_.model, map_.benchmark, map_.metric) == (other.model, other.benchmark, other.metric)
        and [name for name, _ in map_.axes] == [name for name, _ in other.axes]
        and _same_policy(map_, other)
    ]


def _same_policy(map_: Map, other: Map) -> bool:
    return not map_.policy or not other.policy or map_.policy == other.policy


def which_fits(fits: Mapping[str, MeanCheck]) -> str | None:
    """The name of the one set of maps that fits the mean in every cell while no other does; None if there is none."""
    whole = [name for name, fit in fits.items() if fit.fitting == fit.checked]
    return whole[0] if len(whole) == 1 < len(fits) else None
