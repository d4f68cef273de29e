"""Comparisons in pairs: policies, models, best cells, and each cell of a map with another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from kvatlas.core import CellCoord, MapName
from kvatlas.stats.inference import Contrast, holm, joint_contrasts, mean_contrast
from kvatlas.stats.intervals import Floats
from kvatlas.stats.losses import Difference, strata_of
from kvatlas.stats.run_data import RunData, short_names
from kvatlas.stats.table import CellTraces, ProblemKey, aligned, matrix, select
from kvatlas.stats.verdicts import with_means


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
    """All paired comparisons that the cells of a run support, on the problems and samples of both sides.

    For each model and each pair of grid policies: all pairs of cells that agree in every parameter that both policies
    have, pooled by problem over cells, benchmarks of equal weight. The same for each policy and each pair of models.
    None for the cells of adaptive sweeps. Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    policies = _policies(_fixed(run))
    made = [
        _over_cells(run.metric, first, second, policies)
        for first, second in combinations(policies, 2)
        if (first[0] == second[0]) != (first[1] == second[1])
    ]
    return [comparison for comparison in made if comparison is not None]


def _policies(run: RunData) -> dict[tuple[str, str], list[CellTraces]]:
    """The grid cells by (model, policy), over benchmarks: whole maps, and policies with one of the two axes."""
    policies: dict[tuple[str, str], list[CellTraces]] = {}
    for name, group in run.groups.items():
        policies.setdefault((name.model, name.policy), []).extend(group)
    mapped = {id(cell) for group in policies.values() for cell in group}
    for cell in run.cells:
        alone = not cell.baseline and id(cell) not in mapped
        if alone and run.fits(cell) and set(run.axes) & set(cell.setting.values):
            policies.setdefault((cell.model, cell.setting.policy), []).append(cell)
    return policies


def _over_cells(
    metric: str, first: tuple[str, str], second: tuple[str, str], policies: Mapping[tuple[str, str], list[CellTraces]]
) -> Comparison | None:
    """Two policies of a model, or two models under a policy, over all pairs of cells that agree.

    None where they share no trace.
    """
    pairs = [
        (cell, other)
        for cell in policies[first]
        for other in policies[second]
        if cell.benchmark == other.benchmark
        and all(other.setting.values.get(name, value) == value for name, value in cell.setting.values.items())
    ]
    by_problem: dict[ProblemKey, list[Floats]] = {}
    for cell, other in pairs:
        problems, values = aligned([cell, other])
        for problem, row in zip(problems, values[:, 0] - values[:, 1], strict=True):
            by_problem.setdefault((cell.benchmark, problem), []).append(row[~np.isnan(row)])
    joined = {key: own for key, rows in by_problem.items() if len(own := np.concatenate(rows))}
    if not joined:
        return None
    contrast = mean_contrast(np.array([own.mean() for own in joined.values()]), strata_of(joined))
    difference = Difference(**vars(contrast), problems=len(joined), pairs=sum(map(len, joined.values())))
    benchmarks = list(dict.fromkeys(cell.benchmark for cell, _ in pairs))
    on = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
    if first[0] == second[0]:
        return Comparison(first[0], on, metric, first[1], second[1], len(pairs), difference)
    return Comparison(f"{first[0]}, {second[0]}", on, metric, first[0], second[0], len(pairs), difference, first[1])


def adjusted(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """The comparisons with p-values adjusted over all of them, by Holm and by Benjamini and Hochberg."""
    p = [round(comparison.difference.p, 6) for comparison in comparisons]
    # scipy has this too, in a module whose import takes a second.
    order = np.argsort(p)[::-1]
    raised = np.array(p)[order] * len(p) / np.arange(len(p), 0, -1)
    by_bh = np.minimum.accumulate(np.minimum(raised, 1.0))[np.argsort(order)]
    return tuple(
        replace(comparison, p_holm=by_holm, p_bh=float(by_bh[number]))
        for number, (comparison, by_holm) in enumerate(zip(comparisons, holm(p), strict=True))
    )


#: Cell minus what it is compared with, in [-1, 1], by map and place on its axes. Intervals and p-values hold over all
#: cells of a map together.
Differences = Mapping[MapName, Mapping[CellCoord, Contrast]]

#: The cells of a map with their places, each beside what it is compared with.
_Sides = Sequence[tuple[CellCoord, CellTraces, CellTraces]]


def differences_of_run(run: RunData, baseline: str) -> Differences:
    """Cell minus `baseline` (its short name, such as `full`), on the problems and samples that all cells have.

    Means over benchmarks are there too. None of maps that share no sample with the baseline, and of adaptive sweeps.
    Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    baselines = [cell for cell in select(run.cells, baseline=True) if cell.measured]
    names = short_names(cell.setting for cell in baselines)
    on = {(cell.model, cell.benchmark): cell for cell in baselines if names[cell.setting.id] == baseline}
    return _differences(run, lambda name, _: on.get((name.model, name.benchmark)))


def differences_of_runs(run: RunData, other: RunData, partner: Callable[[MapName], MapName]) -> Differences:
    """Cell minus the same cell of a map of `other`, the `partner` of the cell's map; else as `differences_of_run`.

    Nothing where the two runs have unlike axes.
    """
    if other.axes != run.axes:
        return {}
    at = {(name, cell.coord(run.axes)): cell for name, group in _fixed(other).groups.items() for cell in group}

    def beside(name: MapName, coord: CellCoord) -> CellTraces | None:
        return None if other is run and partner(name) == name else at.get((partner(name), coord))

    return _differences(run, beside)


def _differences(run: RunData, beside: Callable[[MapName, CellCoord], CellTraces | None]) -> Differences:
    """Each cell minus the one `beside` its map and place."""
    sides: dict[MapName, _Sides] = {}
    for name, group in _fixed(run).groups.items():
        places = [(cell.coord(run.axes), cell) for cell in group]
        own = [(coord, cell, other) for coord, cell in places if (other := beside(name, coord)) is not None]
        if own:
            sides[name] = own
    return {name: _contrasts(parts) for name, parts in with_means(sides).items()}


def _fixed(run: RunData) -> RunData:
    """The run without cells of adaptive sweeps: the problems that two of them share depend on their outcomes."""
    return run.with_cells([cell for cell in run.cells if cell.measured and not cell.adaptive])


def _contrasts(parts: Sequence[_Sides]) -> dict[CellCoord, Contrast]:
    """The differences over one or more benchmarks; empty where no problem has a sample that all cells have."""
    cells = matrix([{(n, cell.setting.id): cell for _, *pair in part for n, cell in enumerate(pair)} for part in parts])
    if cells is None:
        return {}
    at = {name: number for number, name in enumerate(cells.columns)}
    pairs = {coord: ((0, cell.setting.id), (1, other.setting.id)) for coord, cell, other in parts[0]}
    pairs = {coord: pair for coord, pair in pairs.items() if all(name in at for name in pair)}
    if not pairs:
        return {}
    rows = np.zeros((len(pairs), len(at)))
    for row, (plus, minus) in zip(rows, pairs.values(), strict=True):
        row[at[plus]], row[at[minus]] = 1, -1
    return dict(zip(pairs, joint_contrasts(cells.means, cells.strata, rows, samples=cells.samples), strict=True))
