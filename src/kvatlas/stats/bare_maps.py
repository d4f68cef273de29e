"""Maps of bare Pass@1: binomial bounds, printed values that cannot be, and effects of the axes over several maps."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from kvatlas.core import CellCoord, KvatlasError, Map, MapName, Note, NoteKind, grouped
from kvatlas.stats.inference import Contrast, Test, TestMethod, contrasts, holm
from kvatlas.stats.intervals import LEVEL, Floats, common
from kvatlas.stats.maps import mean_map
from kvatlas.stats.verdicts import Basis, Effect, Verdict, effects, spread_and_noise, with_means

DRAWS = 10_000
#: For a CSV map that does not tell its samples.
ONE_SAMPLE = Note(NoteKind.INTERVAL, "the number of samples is not known, so 1 is taken; give it with --samples")


def variance(map_: Map) -> float | None:
    """The largest variance that sampling can give a cell, on the same problems; None where problems are unknown.

    p (1 - p) / (problems * samples) with p the mean over cells: samples of a problem of any difficulty vary less.
    """
    cells = list(map_.cells.values())
    problems = common([cell.estimate.problems for cell in cells])
    if problems is None or not cells:
        return None
    samples = common([cell.estimate.samples for cell in cells]) or 1
    centre = math.fsum(cell.estimate.value for cell in cells) / len(cells)
    return centre * (1 - centre) / (problems * samples)


def verdicts_of_maps(maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """The verdict by the bound of each map whose problems are known, and of each model's mean over benchmarks."""
    by_map: dict[MapName, Verdict] = {}
    for name, parts in with_means({map_.name: map_ for map_ in maps if not map_.is_mean}).items():
        variances = [largest for largest in map(variance, parts) if largest is not None]
        if len(variances) == len(parts) and len({part.axes for part in parts}) == 1:
            map_ = parts[0] if len(parts) == 1 else mean_map(parts)
            samples = common([cell.estimate.samples for part in parts for cell in part.cells.values()])
            by_map[name] = bound_verdict(map_, math.fsum(variances) / len(parts) ** 2, samples)
    return by_map


def bound_verdict(map_: Map, variance: float, samples: int | None) -> Verdict:
    """The verdict on a map whose cells have at most the `variance` on the same problems.

    Omnibus: the chi-square test of equal values with that variance. Plateau: the largest standardised difference to the
    others against that of as many independent normal values. Both err on the side of "no difference".
    """
    places: list[CellCoord] = list(map_.cells)
    values = np.array([cell.estimate.value for cell in map_.cells.values()])
    known = variance > 1e-18
    scale = math.sqrt(variance) if known else 1.0
    square = float(((values - values.mean()) ** 2).sum()) / scale**2
    freedom = max(len(values) - 1, 1)
    test = Test(square / freedom, float(special.chdtrc(freedom, square)), TestMethod.CHI_SQUARE)
    p, may_lose = _best(values, scale)
    tied = p >= (LEVEL if test.p < LEVEL else 0)
    return Verdict(
        Basis.BOUND,
        test,
        effects(places, (map_.axes[0][0], map_.axes[1][0]), lambda rows: _contrasts(values, scale, rows)),
        *spread_and_noise(values, test),
        plateau=tuple(coord for coord, member in zip(places, tied, strict=True) if member),
        p_best=dict(zip(places, p.tolist(), strict=True)),
        may_lose=dict(zip(places, may_lose.tolist(), strict=True)),
        notes=() if samples else (ONE_SAMPLE,),
    )


def _best(values: Floats, scale: float) -> tuple[Floats, Floats]:
    """[cells] each: the p-value of "this cell is the best", and how far it may be below the best (Hsu 1981)."""
    count = len(values)
    if count < 2:
        return np.ones(count), np.zeros(count)
    # The largest of the other values minus this one, in units of the error of one difference.
    noise = np.random.default_rng(0).standard_normal((DRAWS, count))
    chance = np.sort((noise[:, 1:].max(1) - noise[:, 0]) / math.sqrt(2))
    behind = np.array([np.delete(values, cell).max() - values[cell] for cell in range(count)])
    p = 1 - np.searchsorted(chance, behind / (math.sqrt(2) * scale)) / DRAWS
    reach = float(np.quantile(chance, 1 - LEVEL)) * math.sqrt(2) * scale
    return np.maximum(p, 1 / (1 + DRAWS)), np.clip(behind + reach, 0.0, 1.0)


def _contrasts(values: Floats, scale: float, rows: Floats) -> list[Contrast]:
    """Contrasts with limits that hold together, by Bonferroni."""
    quantile = float(-special.ndtri(LEVEL / 2 / len(rows)))
    # One by one, so that equal sums of rounded values stay equal.
    value, error = np.array([values @ row for row in rows]), scale * np.sqrt((rows**2).sum(1))
    p = np.minimum(1.0, len(rows) * 2 * special.ndtr(-np.abs(value) / error))
    return contrasts(value, value - quantile * error, value + quantile * error, p)


# -- effects of the axes, pooled over benchmarks and models, by permutation --------------------------------------------
#
# `values` is [maps, across, levels]: Pass@1 of each map, with the axis in question last. If the axis does nothing, its
# levels could stand in any order. Cells of one level may share much of their traces, and models share a benchmark's
# problems: so all rows of a map, and all maps of one benchmark, are put into the same order. The numbers of problems
# and samples are not used.


ORDERS = 40_000


def axis_effect(
    values: Floats, groups: Sequence[Hashable] | None = None, *, draws: int = ORDERS, seed: int = 0
) -> tuple[list[Contrast], tuple[int, ...]]:
    """The effect of the last axis of `values` [maps, across, levels]: each level against the mean of the others.

    Returns the contrasts, with p-values and limits that hold together, and in how many maps each level is below.
    Maps of one of the `groups` [maps] rest on the same problems: they are averaged, and the groups are the independent
    units; without groups every map is. The statistic is the largest of the levels' mean distances from the others, each
    in units of its error over groups, against that of random orders of the levels of every group; the limits are
    Student's over groups, for all levels together, and infinite for one group. Raises KvatlasError for one level.

    Source: Pesarin and Salmaso (2010), Permutation Tests for Complex Data, chapter 5 (restricted permutation).
    """
    maps, _, levels = values.shape
    if levels < 2:
        raise KvatlasError("The effect of an axis needs at least two of its levels.")
    factor = levels / (levels - 1)
    by_map = (values - values.mean(2, keepdims=True)).mean(1) * factor
    names = np.unique([str(n) for n in groups or range(maps)], return_inverse=True)[1]
    units = np.array([by_map[names == name].mean(0) for name in np.unique(names)])
    effect, count = units.mean(0), len(units)
    generator = np.random.default_rng(seed)
    orders = generator.permuted(np.broadcast_to(units, (draws, count, levels)), axis=2)
    largest = _studentised(orders).max(1)
    beyond = np.array([(1 + np.count_nonzero(largest >= t - 1e-9)) / (1 + draws) for t in _studentised(units[None])[0]])
    freedom = (count - 1) * (levels - 1)
    reach = math.inf
    if freedom:
        error = float(((units - effect) ** 2).sum()) / factor / freedom / count
        reach = float(-special.stdtrit(freedom, LEVEL / 2 / levels)) * math.sqrt(error)
    return contrasts(effect, effect - reach, effect + reach, beyond), tuple((by_map < -1e-12).sum(0).tolist())


def _studentised(units: Floats) -> Floats:
    """[draws, levels]: |means| over groups of `units` [draws, groups, levels] in units of their errors.

    A level's variance over few groups says little, so half the mean square of all, which no order changes, is added.
    """
    spread = units.var(1) + (units[:1] ** 2).mean() / 2
    return np.asarray(np.abs(units.mean(1)) / np.sqrt(spread / units.shape[1] + 1e-18), float)


@dataclass(frozen=True)
class PooledEffect(Effect):
    """One joint test of an axis: each level against the mean of the others, with limits that hold together.

    `over` says what was pooled, `adjusted_p` allows for all effects that are tested. `below` counts, by level, the bare
    `maps` in which it lies below the others.
    """

    over: str = ""
    maps: int = 0
    below: tuple[int, ...] = ()
    adjusted_p: float = 1.0

    @property
    def p(self) -> float:
        """The p-value of "no level differs"."""
        return min(contrast.p for _, contrast in self.levels)

    @property
    def supported(self) -> bool:
        """True if some level differs after the adjustment."""
        return self.adjusted_p < LEVEL

    @property
    def largest(self) -> tuple[int, Any, Contrast]:
        """The level that differs most from the others, after its number."""
        return max(((n, *level) for n, level in enumerate(self.levels)), key=lambda item: abs(item[2].value))

    @property
    def reach(self) -> float:
        """The largest difference that the limits allow."""
        return max(max(abs(contrast.low), abs(contrast.high)) for _, contrast in self.levels)

    @property
    def worse(self) -> tuple[Any, ...]:
        """The levels that lie below the others, of a supported effect."""
        return tuple(
            level for level, contrast in self.levels if self.supported and contrast.p < LEVEL and contrast.value < 0
        )


def pooled_effects(maps: Sequence[Map], verdicts: Mapping[MapName, Verdict]) -> list[PooledEffect]:
    """The effects of all axes, adjusted together (Holm): of each model and policy with traces, over its benchmarks,
    and of bare maps with the same axes, over benchmarks and models."""
    # The mean over benchmarks stands for those of a model and policy.
    families = with_means({map_.name: map_ for map_ in maps if not map_.is_mean})
    made = []
    for name in {(name.model, name.policy): name for name in families}.values():
        verdict = verdicts.get(name)
        if verdict is not None and verdict.basis is Basis.TRACES:
            over = f"{name.model} | {name.benchmark} | {name.policy}"
            made += [PooledEffect(effect.axis, effect.levels, over) for effect in verdict.effects]
    for group in grouped(filter(_is_bare, maps), lambda map_: map_.axes).values():
        made += [_permuted(group, side) for side in (0, 1)]
    adjusted = holm([effect.p for effect in made])
    return [replace(effect, adjusted_p=p) for effect, p in zip(made, adjusted, strict=True)]


def _is_bare(map_: Map) -> bool:
    """True for single maps without traces and without holes."""
    down, across = (len(values) for _, values in map_.axes)
    return not map_.is_mean and map_.validity is None and len(map_.cells) == down * across and min(down, across) > 1


def _permuted(group: Sequence[Map], side: int) -> PooledEffect:
    (_, rows), (_, columns) = group[0].axes
    values = np.array([[[map_.cells[r, c].estimate.value for c in columns] for r in rows] for map_ in group])
    benchmarks = [map_.benchmark for map_ in group]
    levels, below = axis_effect(values if side == 1 else values.transpose(0, 2, 1), benchmarks)
    axis, names = group[0].axes[side]
    over = f"{len(group)} map{'s' * (len(group) > 1)}"
    return PooledEffect(axis, tuple(zip(names, levels, strict=True)), over, len(group), below)
