"""Comparisons in pairs: policies, models, and each cell of a map with another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

import numpy as np

from kvatlas.core import CellCoord, Claim, MapName, grouped
from kvatlas.stats.maps import with_means
from kvatlas.stats.numerics.arrays import Contrast
from kvatlas.stats.numerics.looks import Look
from kvatlas.stats.numerics.multiple import benjamini_hochberg, holm
from kvatlas.stats.numerics.units import Units, joined_units
from kvatlas.stats.paired import CellPair, Difference, paired_values
from kvatlas.stats.run_data import RunData, short_names, shown_policies
from kvatlas.stats.table import CellTraces, select

#: A model under the settings of a policy.
ModelPolicy = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """A paired comparison with its names: `difference` is first minus second, over `cells` pairs of settings.

    `p_holm` and `p_bh` are adjusted over all comparisons that are made together (see `adjusted`); NaN before that.
    """

    model: str
    benchmark: str
    metric: str
    first: str
    second: str
    cells: int
    difference: Difference
    note: str = ""
    p_holm: float = math.nan
    p_bh: float = math.nan


def comparisons(run: RunData) -> list[Comparison]:
    """Return all paired comparisons that the cells of a run support, on the problems and samples of both sides.

    For each model and each pair of grid policies: all pairs of cells that agree on the axes and in the parameters that
    all policies share, averaged over cells for each unit of the claim, benchmarks of equal weight. The same for each
    policy and each pair of models. In a run without maps every setting is compared with every other one. None for the
    cells of adaptive sweeps. Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    fixed = _fixed(run)
    sides = _policies(fixed) if run.has_maps else _settings(fixed)
    found = []
    for first, second in combinations(sides, 2):
        same_model = first[0] == second[0]
        same_name = first[1] == second[1]
        if same_model != same_name:
            pairs = _pairs_of_cells(run, sides[first], sides[second])
            found.append(_over_cells(run, first, second, pairs))
    return [comparison for comparison in found if comparison is not None]


def _settings(run: RunData) -> dict[ModelPolicy, list[CellTraces]]:
    """Return the cells of each model and setting over benchmarks, under the short name of the setting."""
    names = short_names(cell.setting for cell in run.cells)
    shown = filter(run.fits, run.cells)
    return grouped(shown, lambda cell: (cell.model, names[cell.setting.id]))


def _pairs_of_cells(
    run: RunData, first: Sequence[CellTraces], second: Sequence[CellTraces]
) -> list[tuple[CellTraces, CellTraces]]:
    """Return the pairs of cells of one benchmark, in a run with maps those that agree."""
    pairs = [(cell, other) for cell, other in product(first, second) if cell.benchmark == other.benchmark]
    if not run.has_maps:
        return pairs
    axes = [name for name, _ in run.manifest.axes]
    return [pair for pair in pairs if _agree(*pair, axes)]


def _policies(run: RunData) -> dict[ModelPolicy, list[CellTraces]]:
    """Return the grid cells over benchmarks: whole maps, and policies with one of the two axes."""
    policies: dict[ModelPolicy, list[CellTraces]] = {}
    shown = shown_policies(cell.setting.policy for cell in run.cells)
    for name, group in run.groups.items():
        policies.setdefault((name.model, name.policy), []).extend(group)
    mapped = set(map(id, chain.from_iterable(policies.values())))
    for cell in run.cells:
        is_alone = not cell.baseline and id(cell) not in mapped
        if is_alone and run.fits(cell) and set(run.axes) & set(cell.all_values):
            policies.setdefault((cell.model, shown[cell.setting.policy]), []).append(cell)
    return policies


def _over_cells(run: RunData, first: ModelPolicy, second: ModelPolicy, pairs: Sequence[CellPair]) -> Comparison | None:
    """Compare two policies or settings of a model, or two models under one of them, over pairs of cells.

    The cells are averaged first, for each problem and sample: they share random numbers, so they are no units. None
    where they share no trace.
    """
    look, samples = run.look
    of_benchmarks = []
    for of_benchmark in grouped(pairs, lambda pair: pair[0].benchmark).values():
        paired = paired_values([of_benchmark]).first(samples)
        if not np.isnan(paired.traces).all():
            of_benchmarks.append(paired)
    if not of_benchmarks:
        return None
    claims = {}
    for claim in [Claim.LIKE] if run.refused else Claim:
        claims[claim] = _over_benchmarks([paired.averaged(claim) for paired in of_benchmarks], look)
    problems = sum(int((~np.isnan(paired.traces)).any((0, 2)).sum()) for paired in of_benchmarks)
    count = sum(int(np.count_nonzero(~np.isnan(paired.traces))) for paired in of_benchmarks)
    difference = Difference(**vars(claims[run.claim]), problems=problems, pairs=count, claims=claims)
    benchmarks = list(dict.fromkeys(cell.benchmark for cell, _ in pairs))
    on = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
    if first[0] == second[0]:
        return Comparison(first[0], on, run.metric, first[1], second[1], len(pairs), difference)
    models = f"{first[0]}, {second[0]}"
    return Comparison(models, on, run.metric, first[0], second[0], len(pairs), difference, first[1])


def _over_benchmarks(benchmarks: Sequence[Units], look: Look) -> Contrast:
    """Return the mean of a single row of units over benchmarks, each of which has some."""
    (contrast,) = joined_units(benchmarks).contrasts(stretch=look.widening)
    assert contrast is not None
    return contrast


def _agree(cell: CellTraces, other: CellTraces, axes: Iterable[str]) -> bool:
    """Return whether two cells have equal values on the axes, and of the shared parameters that both settings name.

    A parameter of a method itself, such as the number of queries that it observes, belongs to the policy compared.
    """
    named = set(cell.facts.shared).intersection(other.facts.shared)
    on_axes = cell.all_values.keys() & other.all_values.keys() & set(axes)
    return all(cell.all_values[name] == other.all_values[name] for name in named | on_axes)


def adjusted(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with p-values adjusted over all of them, by Holm and by Benjamini and Hochberg."""
    p = [comparison.difference.p for comparison in comparisons]
    rows = zip(comparisons, holm(p), benjamini_hochberg(p).tolist(), strict=True)
    return tuple(replace(comparison, p_holm=by_holm, p_bh=by_bh) for comparison, by_holm, by_bh in rows)


@dataclass(frozen=True)
class CellDifference(Contrast):
    """A cell minus what it is compared with, with its own interval and p-value.

    `p_holm` is adjusted over the cells of the map: where it is at most 0.05 the difference is proven.
    """

    p_holm: float = math.nan


#: Cell minus what it is compared with, in [-1, 1], by map and place on its axes.
Differences = Mapping[MapName, Mapping[CellCoord, CellDifference]]

#: The cells of a map by their places, each with what it is compared with.
_Sides = dict[CellCoord, CellPair]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Return cell minus `baseline` (its short name, such as `full`), on the problems and samples of both.

    Means over benchmarks are there too. None of maps that share no sample with the baseline, and of adaptive sweeps.
    Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    baselines = [cell for cell in select(run.cells, baseline=True) if cell.measured]
    names = short_names(cell.setting for cell in baselines)
    found = {(cell.model, cell.benchmark): cell for cell in baselines if names[cell.setting.id] == baseline}
    return _differences(run, lambda name, _: found.get((name.model, name.benchmark)))


def differences_of_runs(run: RunData, other: RunData, partner: Callable[[MapName], MapName]) -> Differences:
    """Return cell minus the same cell of a map of another run, the `partner` of the cell's map.

    Else as `differences_of_run`. Empty if the two runs have unlike axes.
    """
    if other.axes != run.axes:
        return {}
    cells: dict[tuple[MapName, CellCoord], CellTraces] = {}
    for name, group in _fixed(other).groups.items():
        cells |= {(name, cell.coord(run.axes)): cell for cell in group}

    def same_cell(name: MapName, coord: CellCoord) -> CellTraces | None:
        if other is run and partner(name) == name:
            return None
        return cells.get((partner(name), coord))

    return _differences(run, same_cell)


def _differences(run: RunData, partner: Callable[[MapName, CellCoord], CellTraces | None]) -> Differences:
    """Return each cell minus its `partner`, which is found by its map and place."""
    sides: dict[MapName, _Sides] = {}
    for name, group in _fixed(run).groups.items():
        of_map: _Sides = {}
        for cell in group:
            coord = cell.coord(run.axes)
            other = partner(name, coord)
            if other is not None:
                of_map[coord] = (cell, other)
        if of_map:
            sides[name] = of_map
    return {name: _contrasts(run, benchmarks) for name, benchmarks in with_means(sides).items()}


def _fixed(run: RunData) -> RunData:
    """Return the run without cells of adaptive sweeps: problems that two of them share depend on their outcomes."""
    return run.with_cells([cell for cell in run.cells if cell.measured and not cell.adaptive])


def _contrasts(run: RunData, benchmarks: Sequence[_Sides]) -> dict[CellCoord, CellDifference]:
    """Return the differences over one or more benchmarks, of the places that all of them have."""
    shared = set(benchmarks[0]).intersection(*benchmarks[1:])
    coords = [coord for coord in benchmarks[0] if coord in shared]
    if not coords:
        return {}
    look, samples = run.look
    paired = paired_values([list(map(sides.__getitem__, coords)) for sides in benchmarks]).first(samples)
    found = zip(coords, paired.contrasts(run.claim, look=look), strict=True)
    contrasts = {coord: contrast for coord, contrast in found if contrast is not None}
    adjusted_p = holm([contrast.p for contrast in contrasts.values()])
    rows = zip(contrasts.items(), adjusted_p, strict=True)
    return {coord: CellDifference(**vars(contrast), p_holm=p) for (coord, contrast), p in rows}
