"""Maps of bare Pass@1: binomial bounds, printed values that cannot be, and effects of the axes over several maps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from statistics import fmean

import numpy as np

from kvatlas.core import CellCoord, Claim, Map, MapName, Note, NoteKind, grouped, with_means
from kvatlas.stats.estimates import common, problem_count, sample_count
from kvatlas.stats.map_tests import Basis, Effect, MapTests, Test, level_stays, levels_of
from kvatlas.stats.maps import mean_map
from kvatlas.stats.numerics import averages
from kvatlas.stats.numerics.arrays import LEVEL, Difference, holm
from kvatlas.stats.numerics.bounded import yes_no_interval

#: For a CSV map that does not tell its samples.
ONE_SAMPLE = Note(NoteKind.INTERVAL, "the number of samples is not known, so 1 is taken; give it in a column samples")


def variance(map_: Map) -> float | None:
    """Return the largest variance that sampling can give a cell, on the same problems; None where they are unknown.

    p (1 - p) / (problems * samples) with p the mean over cells: samples of a problem of any difficulty vary less.
    """
    cells = list(map_.cells.values())
    problems = problem_count(map_)
    if problems is None or not cells:
        return None
    samples = sample_count(map_) or 1
    centre = math.fsum(cell.estimate.value for cell in cells) / len(cells)
    return centre * (1 - centre) / (problems * samples)


def bound_tests_of_maps(maps: Sequence[Map]) -> dict[MapName, MapTests]:
    """Return the tests by the bound of each map whose problems are known, and of each model's mean."""
    by_map: dict[MapName, MapTests] = {}
    for name, averaged in with_means({map_.name: map_ for map_ in maps if not map_.is_mean}).items():
        variances = [largest for largest in map(variance, averaged) if largest is not None]
        # Nothing is known of means with unknown problems and unlike axes.
        if len(variances) < len(averaged) or len({map_.axes for map_ in averaged}) > 1:
            continue
        map_ = averaged[0] if len(averaged) == 1 else mean_map(averaged)
        cells = chain.from_iterable(each.cells.values() for each in averaged)
        samples = common([cell.estimate.samples for cell in cells])
        by_map[name] = bound_tests(map_, math.fsum(variances) / len(averaged) ** 2, samples)
    return by_map


def bound_tests(map_: Map, variance: float, samples: int | None) -> MapTests:
    """Return the tests of a map whose cells have at most the `variance` on the same problems.

    Omnibus: the chi-square test of equal values with that variance. Plateau: the largest standardised difference to the
    others against that of as many independent normal values. Both err on the side of "no difference".
    """
    places: list[CellCoord] = list(map_.cells)
    values = np.array([cell.estimate.value for cell in map_.cells.values()])

    deviation = math.sqrt(variance) if variance > 1e-18 else 1.0
    statistic, p_equal = averages.chi_square(values, variance)
    p_best, may_lose = averages.behind_best(values, deviation)
    # Where no difference is proven all cells are tied.
    tied = p_best >= (LEVEL if p_equal <= LEVEL else 0)
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0

    effects = []
    for axis, levels, level_of_cell in levels_of(places, map_.axis_names):
        contrasts = averages.level_contrasts(values, level_of_cell, deviation)
        effects.append(Effect(axis, tuple(zip(levels, contrasts, strict=True))))

    return MapTests(
        Basis.BOUND,
        Test(statistic, p_equal),
        tuple(effects),
        spread,
        spread / math.sqrt(statistic) if statistic > 0 else 0.0,
        plateau=tuple(coord for coord, member in zip(places, tied, strict=True) if member),
        p_best=dict(zip(places, p_best.tolist(), strict=True)),
        may_lose=dict(zip(places, may_lose.tolist(), strict=True)),
        notes=() if samples else (ONE_SAMPLE,),
    )


def unpaired_losses(maps: Sequence[Map], margin: float) -> dict[MapName, dict[CellCoord, Difference]]:
    """Return what the cells of bare maps with a full cache lose, and those of their means over benchmarks.

    Averages cannot be paired by problem, so a limit is that of the full cache minus that of the cell, each by the
    binomial bound; shared among the benchmarks of a mean (Bonferroni). The interval of a cell holds for it alone. What
    is proven holds at once with 95 % confidence, since the full cache and all cells share the level.
    """
    found = {}
    for name, averaged in with_means({map_.name: map_ for map_ in maps if not map_.is_mean}).items():
        places = set.intersection(*(set(map_.cells) for map_ in averaged))
        alone = LEVEL / (2 * len(averaged))
        family = LEVEL / (len(averaged) * (len(places) + 1))
        losses = {}
        for coord in averaged[0].cells:
            span = _unpaired_limits(averaged, coord, alone)
            together = _unpaired_limits(averaged, coord, family)
            if span is None or together is None:
                break
            _, least, most = together
            losses[coord] = Difference(
                *span, limit=most, joint_limit=most, is_kept=most <= margin, is_broken=least > margin
            )
        if len(losses) == len(averaged[0].cells):
            found[name] = losses
    return found


def _unpaired_limits(maps: Sequence[Map], coord: CellCoord, level: float) -> tuple[float, float, float] | None:
    """Return the loss of a cell with its limits, those of either side at a level, in the mean over maps.

    None where a map lacks the cell or a full cache, or does not know their problems.
    """
    losses = []
    for map_ in maps:
        ends = []
        for cell in (map_.full, map_.cells.get(coord)):
            estimate = None if cell is None else cell.estimate
            if estimate is None or estimate.problems is None:
                return None
            samples = (estimate.samples or 1) if map_.claim is Claim.THESE else 1
            ends.append((estimate.value, *yes_no_interval(estimate.value, samples * estimate.problems, level)))
        (full, full_low, full_high), (value, low, high) = ends
        losses.append((full - value, full_low - high, full_high - low))
    value, low, high = map(fmean, zip(*losses, strict=True))
    return value, low, high


# -- effects of the axes, pooled over benchmarks and models ------------------------------------------------------------


def pooled_effects(maps: Sequence[Map], by_map: Mapping[MapName, MapTests]) -> list[Effect]:
    """Return the effects of all axes, adjusted together (Holm).

    Those of each model and policy with traces, over its benchmarks; and of bare maps with the same axes, over
    benchmarks and models.
    """
    effects = []
    averaged = with_means({map_.name: map_ for map_ in maps if not map_.is_mean})
    # The last name of a model and policy is that of the mean, which stands for its benchmarks.
    by_policy = {(name.model, name.policy): name for name in averaged}
    for name in by_policy.values():
        tests = by_map.get(name)
        if tests is not None and tests.basis is Basis.TRACES:
            over = f"{name.model} | {name.benchmark} | {name.policy}"
            for effect in tests.effects:
                stays = level_stays(averaged[name], effect.axis)
                names = frozenset(map_.name for map_ in averaged[name])
                effects.append(replace(effect, over=over, names=names, stays=stays))

    for group in grouped(filter(_is_bare, maps), lambda map_: map_.axes).values():
        effects += _effects_of_bare_maps(group)

    adjusted_p = holm([effect.p for effect in effects])
    return [replace(effect, adjusted_p=p) for effect, p in zip(effects, adjusted_p, strict=True)]


def _is_bare(map_: Map) -> bool:
    """Return whether this is a single map without traces and without holes."""
    down, across = (len(values) for _, values in map_.axes)
    return not map_.is_mean and map_.validity is None and len(map_.cells) == down * across and min(down, across) > 1


def _counted_problems(map_: Map) -> int | None:
    """Return the independent units of a bare map: its problems, or the samples of them that were declared as such."""
    problems = problem_count(map_)
    samples = sample_count(map_) or 1
    if problems is None or map_.claim is not Claim.THESE:
        return problems
    return problems * samples


def _effects_of_bare_maps(group: Sequence[Map]) -> list[Effect]:
    """Return the effects of both axes over bare maps with the same axes, by permutation within benchmarks.

    Where there are too few benchmarks to find anything so, and the problems are known, by the intervals of the levels.
    """
    (_, rows), (_, columns) = group[0].axes
    over = " | ".join(filter(None, group[0].name)) if len(group) == 1 else f"{len(group)} maps"
    values: list[float] = []
    for map_ in group:
        values += [map_.cells[coord].estimate.value for coord in product(rows, columns)]
    by_column = np.reshape(values, (len(group), len(rows), len(columns)))

    effects = []
    names = frozenset(map_.name for map_ in group)
    problems = [_counted_problems(map_) for map_ in group]
    benchmarks = [map_.benchmark for map_ in group]
    for (axis, levels), by_level in zip(group[0].axes, (by_column.transpose(0, 2, 1), by_column), strict=True):
        known_problems = [count for count in problems if count is not None]
        # Both axes are tested.
        is_too_few = 2 * averages.least_p(len(set(benchmarks)), len(levels)) > LEVEL
        count = 0
        below: Sequence[int] = ()
        if is_too_few and len(known_problems) == len(problems):
            contrasts = averages.level_intervals(by_level, known_problems)
        else:
            count = len(group)
            contrasts, below = averages.permute_benchmarks(by_level, benchmarks)
        of_levels = tuple(zip(levels, contrasts, strict=True))
        effects.append(Effect(axis, of_levels, over, names, count, tuple(below), stays=level_stays(group, axis)))
    return effects
