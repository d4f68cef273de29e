"""What a map of bare Pass@1 can say when only the numbers of problems and samples are known: binomial bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import stats

from kvatlas.core import Cell, CellCoord, Map, MapName, Note, NoteKind
from kvatlas.stats.estimates.maps import mean_map
from kvatlas.stats.estimates.pass_at_1 import LEVEL, Floats, Z
from kvatlas.stats.inference.map_tests import Basis, Verdict, assembled, effects
from kvatlas.stats.inference.resampling import POWER, Contrast, Need, Plateau, Test, TestMethod, shares_of_best

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
    """The verdict by the bound of each map whose problems are known, and of each model's mean over benchmarks.

    A mean that is given as a map (`mean of N`) gets a verdict only where its benchmarks are given, too.
    """
    by_map: dict[MapName, Verdict] = {}
    by_policy: dict[tuple[str, str], list[Map]] = {}
    for map_ in maps:
        if map_.is_mean:
            continue
        by_policy.setdefault((map_.model, map_.policy), []).append(map_)
        largest = variance(map_)
        if largest is not None:
            by_map[map_.name] = bound_verdict(map_, largest, _samples([map_]))
    for parts in by_policy.values():
        variances = [largest for largest in map(variance, parts) if largest is not None]
        alike = len({part.axes for part in parts}) == 1 and len({part.benchmark for part in parts}) == len(parts)
        if alike and len(variances) == len(parts) > 1:
            mean = mean_map(parts)
            by_map[mean.name] = bound_verdict(mean, math.fsum(variances) / len(parts) ** 2, _samples(parts))
    return by_map


def bound_verdict(map_: Map, variance: float, samples: int | None) -> Verdict:
    """The verdict on a map whose cells have at most the `variance` on the same problems.

    Omnibus: the chi-square test of equal values with that variance. Plateau: the largest standardised difference to the
    others against that of as many independent normal values. Both err on the side of "no difference" unless the
    samples of different cells vary against each other.
    """
    places: list[CellCoord] = list(map_.cells)
    values = np.array([cell.estimate.value for cell in map_.cells.values()])
    known = variance > 1e-18
    scale = math.sqrt(variance) if known else 1.0
    square = float(((values - values.mean()) ** 2).sum()) / scale**2
    freedom = max(len(values) - 1, 1)
    test = Test(square / freedom, float(stats.chi2.sf(square, freedom)), TestMethod.CHI_SQUARE)
    noise = _noise(len(values))
    gap = float(values.max() - values.min())
    wanted = (gap / (Z + POWER)) ** 2
    enough = math.ceil((samples or 1) * 2 * variance / wanted) if gap > 1e-12 else None
    return assembled(
        places,
        values,
        test,
        _plateau(values, scale, noise, test.p),
        effects(places, (map_.axes[0][0], map_.axes[1][0]), lambda rows: _contrasts(values, scale, rows)),
        shares_of_best(values + scale * noise),
        Need(None if enough is None else max(enough, 1), None),
        Basis.BOUND,
        () if samples else (ONE_SAMPLE,),
    )


@lru_cache(maxsize=8)
def _noise(cells: int) -> Floats:
    return np.random.default_rng(0).standard_normal((DRAWS, cells))


def _plateau(values: Floats, scale: float, noise: Floats, p_equal: float) -> Plateau:
    count = len(values)
    p, may_lose = np.ones(count), np.zeros(count)
    if count > 1:
        # The largest of the other values minus this one, in units of the error of one difference.
        chance = np.sort((noise[:, 1:].max(1) - noise[:, 0]) / math.sqrt(2))
        reach = float(np.quantile(chance, 1 - LEVEL)) * math.sqrt(2) * scale
        for cell in range(count):
            best = float(np.delete(values, cell).max() - values[cell])
            p[cell] = 1 - np.searchsorted(chance, best / (math.sqrt(2) * scale)) / len(chance)
            may_lose[cell] = min(1.0, max(0.0, best + reach))
    member = p >= LEVEL if p_equal < LEVEL else np.ones(count, bool)
    return Plateau(member, np.maximum(p, 1 / (1 + DRAWS)), may_lose)


def _contrasts(values: Floats, scale: float, rows: Floats) -> tuple[float, list[Contrast]]:
    """Contrasts with limits that hold together, by Bonferroni."""
    quantile = float(stats.norm.isf(LEVEL / 2 / len(rows)))
    contrasts = []
    for coefficients in rows:
        value = float(values @ coefficients)
        error = scale * math.sqrt(float((coefficients**2).sum()))
        p = min(1.0, len(rows) * float(2 * stats.norm.sf(abs(value) / error)))
        contrasts.append(Contrast(value, value - quantile * error, value + quantile * error, p))
    return min(contrast.p for contrast in contrasts), contrasts


def model_difference(first: Sequence[Map], second: Sequence[Map]) -> Contrast | None:
    """Mean over cells and benchmarks of one model's maps minus another's, by the bound, on the same problems.

    Cells of one map may rest on nearly the same traces, so their mean is taken to vary like one cell. None where
    problems are unknown. Both sides have the same benchmarks.
    """
    total, value = 0.0, 0.0
    for map_, other in zip(first, second, strict=True):
        places = [coord for coord in map_.cells if coord in other.cells]
        mine, theirs = variance(map_), variance(other)
        if not places or mine is None or theirs is None:
            return None
        value += math.fsum(_value(map_.cells[coord]) - _value(other.cells[coord]) for coord in places) / len(places)
        total += mine + theirs
    error = math.sqrt(max(total, 1e-18)) / len(first)
    value /= len(first)
    return Contrast(value, value - Z * error, value + Z * error, float(2 * stats.norm.sf(abs(value) / error)))


def _value(cell: Cell) -> float:
    return cell.estimate.value


def _samples(maps: Sequence[Map]) -> int | None:
    return common([cell.estimate.samples for map_ in maps for cell in map_.cells.values()])


def common(values: Sequence[int | None]) -> int | None:
    """The number that all of them are; None where they differ."""
    return values[0] if len(set(values)) == 1 else None
