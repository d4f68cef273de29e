"""Comparisons in pairs: policies, models, and each cell of a map with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

import numpy as np

from kvatlas.core import AGAIN, CellCoord, Claim, MapName, grouped, with_means
from kvatlas.stats.numerics.arrays import Difference, holm
from kvatlas.stats.numerics.units import joined_units
from kvatlas.stats.paired import CellPair, paired_values
from kvatlas.stats.run_data import RunData, short_names, shown_policies
from kvatlas.stats.table import CellTraces, select

#: A model under the settings of a policy.
ModelPolicy = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """A paired comparison with its names: `difference` is first minus second, over `cells` pairs of settings."""

    model: str
    benchmark: str
    metric: str
    first: str
    second: str
    cells: int
    difference: Difference
    note: str = ""


def comparisons(run: RunData) -> list[Comparison]:
    """Return all paired comparisons that the cells of a run support, on the problems and samples of both sides.

    For each model and each pair of grid policies: all pairs of cells that agree on the axes and in the parameters that
    all policies share, averaged over cells for each unit of the claim, benchmarks of equal weight. The same for each
    policy and each pair of models. In a run without maps every setting is compared with every other one. Raises
    KvatlasError as `maps_of_run` does for axes and metric.
    """
    measured = _measured(run)
    if run.has_maps:
        sides = _cells_by_policy(measured)
    else:
        names = short_names(cell.setting for cell in measured.cells)
        sides = grouped(filter(measured.fits, measured.cells), lambda cell: (cell.model, names[cell.setting.id]))
    axes = [name for name, _ in run.manifest.axes]

    found = []
    for first, second in combinations(sides, 2):
        same_model = first[0] == second[0]
        same_name = first[1] == second[1]
        if same_model == same_name:
            continue
        # Cells of one benchmark, in a run with maps those that agree.
        pairs = [
            (cell, other) for cell, other in product(sides[first], sides[second]) if _agree(cell, other, axes, run)
        ]
        comparison = _compared_over_cells(run, first, second, pairs)
        if comparison is not None:
            found.append(comparison)
    return found


def _cells_by_policy(run: RunData) -> dict[ModelPolicy, list[CellTraces]]:
    """Return the grid cells over benchmarks: whole maps, and policies with one of the two axes."""
    by_policy: dict[ModelPolicy, list[CellTraces]] = {}
    shown = shown_policies(cell.setting.policy for cell in run.cells)
    for name, group in run.groups.items():
        by_policy.setdefault((name.model, name.policy), []).extend(group)

    mapped = set(map(id, chain.from_iterable(by_policy.values())))
    for cell in run.cells:
        is_alone = not cell.baseline and id(cell) not in mapped
        if is_alone and run.fits(cell) and set(run.axes) & set(cell.all_values):
            by_policy.setdefault((cell.model, shown[cell.setting.policy]), []).append(cell)
    return by_policy


def _agree(cell: CellTraces, other: CellTraces, axes: Iterable[str], run: RunData) -> bool:
    """Return whether two cells of a benchmark have equal values on the axes, and of shared parameters that both name.

    A parameter of a method itself, such as the number of queries that it observes, belongs to the policy compared. In a
    run without maps all cells of a benchmark agree.
    """
    if cell.benchmark != other.benchmark or not run.has_maps:
        return cell.benchmark == other.benchmark
    named = set(cell.facts.shared).intersection(other.facts.shared)
    on_axes = cell.all_values.keys() & other.all_values.keys() & set(axes)
    return all(cell.all_values[name] == other.all_values[name] for name in named | on_axes)


def _compared_over_cells(
    run: RunData, first: ModelPolicy, second: ModelPolicy, pairs: Sequence[CellPair]
) -> Comparison | None:
    """Compare two policies or settings of a model, or two models under one of them, over pairs of cells.

    The cells are averaged first, for each problem and sample: they share random numbers, so they are no units. None
    where they share no trace.
    """
    of_benchmarks = []
    for of_benchmark in grouped(pairs, lambda pair: pair[0].benchmark).values():
        paired = paired_values([of_benchmark], run.look.samples)
        if not np.isnan(paired.traces).all():
            of_benchmarks.append(paired)
    if not of_benchmarks:
        return None

    # A single row of units, of which every benchmark has some.
    claims: dict[str, Difference] = {}
    for claim in [Claim.LIKE] if run.refused else Claim:
        units = joined_units([paired.averaged(claim) for paired in of_benchmarks])
        (contrast,) = units.contrasts(stretch=run.look.widening)
        assert contrast is not None
        claims[claim] = contrast
    problems = sum(int((~np.isnan(paired.traces)).any((0, 2)).sum()) for paired in of_benchmarks)
    count = sum(int(np.count_nonzero(~np.isnan(paired.traces))) for paired in of_benchmarks)
    difference = replace(claims[run.claim], problems=problems, pairs=count, claims=claims)

    benchmarks = list(dict.fromkeys(cell.benchmark for cell, _ in pairs))
    on = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
    if first[0] == second[0]:
        return Comparison(first[0], on, run.metric, first[1], second[1], len(pairs), difference)
    models = f"{first[0]}, {second[0]}"
    return Comparison(models, on, run.metric, first[0], second[0], len(pairs), difference, first[1])


def adjusted(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with p-values adjusted over all of them (Holm)."""
    adjusted_p = holm([comparison.difference.p for comparison in comparisons])
    found = []
    for comparison, p in zip(comparisons, adjusted_p, strict=True):
        found.append(replace(comparison, difference=replace(comparison.difference, p_holm=p)))
    return tuple(found)


#: Cell minus what it is compared with, in [-1, 1], by map and place on its axes.
Differences = Mapping[MapName, Mapping[CellCoord, Difference]]

#: The cells of a map by their places, each with what it is compared with.
_Sides = dict[CellCoord, CellPair]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Return cell minus `baseline` (its short name, such as `full`), on the problems and samples of both.

    Means over benchmarks are there too. None of maps that share no sample with the baseline.
    Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    baselines = [cell for cell in select(run.cells, baseline=True) if cell.measured]
    names = short_names(cell.setting for cell in baselines)
    found = {(cell.model, cell.benchmark): cell for cell in baselines if names[cell.setting.id] == baseline}
    return _differences_of_cells(run, lambda name, _: found.get((name.model, name.benchmark)))


def differences_of_runs(run: RunData, other: RunData, partner: Callable[[MapName], MapName]) -> Differences:
    """Return cell minus the same cell of a map of another run, the `partner` of the cell's map.

    Else as `differences_of_run`. Empty if the two runs have unlike axes.
    """
    if other.axes != run.axes:
        return {}
    cells: dict[tuple[MapName, CellCoord], CellTraces] = {}
    for name, group in _measured(other).groups.items():
        cells |= {(name, cell.coord(run.axes)): cell for cell in group}

    def same_cell(name: MapName, coord: CellCoord) -> CellTraces | None:
        if other is run and partner(name) == name:
            return None
        return cells.get((partner(name), coord))

    return _differences_of_cells(run, same_cell)


def _differences_of_cells(run: RunData, partner: Callable[[MapName, CellCoord], CellTraces | None]) -> Differences:
    """Return each cell minus its `partner`, which is found by its map and place."""
    sides: dict[MapName, _Sides] = {}
    for name, group in _measured(run).groups.items():
        of_map: _Sides = {}
        for cell in group:
            coord = cell.coord(run.axes)
            other = partner(name, coord)
            if other is not None:
                of_map[coord] = (cell, other)
        if of_map:
            sides[name] = of_map

    # Of a mean over benchmarks the places that all of them have.
    differences: dict[MapName, dict[CellCoord, Difference]] = {}
    for name, benchmarks in with_means(sides).items():
        shared = set(benchmarks[0]).intersection(*benchmarks[1:])
        coords = [coord for coord in benchmarks[0] if coord in shared]
        differences[name] = {}
        if not coords:
            continue
        sides_of_coords = [list(map(of_map.__getitem__, coords)) for of_map in benchmarks]
        paired = paired_values(sides_of_coords, run.look.samples)
        found = zip(coords, paired.contrasts(run.claim, look=run.look), strict=True)
        contrasts = {coord: contrast for coord, contrast in found if contrast is not None}
        adjusted_p = holm([contrast.p for contrast in contrasts.values()])
        for (coord, contrast), p in zip(contrasts.items(), adjusted_p, strict=True):
            differences[name][coord] = replace(contrast, p_holm=p)
    return differences


def _measured(run: RunData) -> RunData:
    """Return the run without cells that have no trace, and without the reference asked again, which is no setting."""
    return run.with_cells([cell for cell in run.cells if cell.measured and cell.setting != AGAIN])
