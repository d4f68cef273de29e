"""Which settings of a run are compared in pairs: policy against policy, and each policy's best cell against full."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvatlas.core import Setting, Trace
from kvatlas.results.manifest import Manifest
from kvatlas.stats.cells import Gathered, gather
from kvatlas.stats.grid import grid_groups, map_axes
from kvatlas.stats.paired import Difference, paired_difference

SELECTED = "the best cell was chosen on these same traces, which flatters it"

#: problem -> (cell pair, sample) -> grade: the cells of one policy side by side under one name each.
_Outcomes = dict[Hashable, dict[Hashable, float]]


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


def comparisons_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> list[Comparison]:
    """All paired comparisons that a run supports, on the problems and samples that both sides have.

    For each model and each pair of grid policies: all pairs of cells that agree in every parameter that both policies
    have (so `dynts` and `random` meet at equal window, ratio and budget), pooled by problem over cells and benchmarks.
    For each map: its best cell against each baseline. Raises KvatlasError as `maps_of_run` does for axes and metric.
    """
    axes = map_axes(manifest, fix)
    cells = gather(manifest, traces, metric)
    found = [cell for cell in cells if cell.found]
    policies = _policies(found, axes, fix)
    models = list(dict.fromkeys(model for model, _ in policies))
    comparisons = [
        comparison
        for model in models
        for first, second in combinations([name for name in policies if name[0] == model], 2)
        if (comparison := _over_cells(metric, first, policies[first], second, policies[second])) is not None
    ]
    for (model, benchmark, policy), group in grid_groups(found, axes, fix).items():
        best = max(group, key=lambda cell: cell.cell().estimate.value)
        for baseline in found:
            expected = baseline.expected
            if expected.baseline and (expected.model, expected.benchmark) == (model, benchmark):
                place = ", ".join(f"{axis}={best.expected.setting.values[axis]}" for axis in axes)
                first = f"best {policy} cell ({place})"
                comparison = _pair(metric, (model, benchmark), first, [(best, baseline)])
                if comparison is not None:
                    comparisons.append(comparison)
    return comparisons


def _policies(
    cells: Iterable[Gathered], axes: tuple[str, str], fix: Mapping[str, Any] | None
) -> dict[tuple[str, str], list[Gathered]]:
    """The grid cells by (model, policy), over benchmarks: whole maps, and policies with one of the two axes."""
    cells = list(cells)
    policies: dict[tuple[str, str], list[Gathered]] = {}
    for (model, _, policy), group in grid_groups(cells, axes, fix).items():
        policies.setdefault((model, policy), []).extend(group)
    mapped = {id(cell) for group in policies.values() for cell in group}
    for cell in cells:
        setting = cell.expected.setting
        fits = all(setting.values.get(name, value) == value for name, value in (fix or {}).items())
        if not cell.expected.baseline and id(cell) not in mapped and fits and set(axes) & set(setting.values):
            policies.setdefault((cell.expected.model, setting.policy), []).append(cell)
    return policies


def _over_cells(
    metric: str,
    first: tuple[str, str],
    first_cells: list[Gathered],
    second: tuple[str, str],
    second_cells: list[Gathered],
) -> Comparison | None:
    pairs = [
        (one, other)
        for one in first_cells
        for other in second_cells
        if one.expected.benchmark == other.expected.benchmark and _agree(one.expected.setting, other.expected.setting)
    ]
    benchmarks = list(dict.fromkeys(one.expected.benchmark for one, _ in pairs))
    name = benchmarks[0] if len(benchmarks) == 1 else f"{len(benchmarks)} benchmarks"
    return _pair(metric, (first[0], name), first[1], pairs, second[1])


def _agree(one: Setting, other: Setting) -> bool:
    mine, theirs = one.values, other.values
    return all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


def _pair(
    metric: str,
    name: tuple[str, str],
    first: str,
    pairs: list[tuple[Gathered, Gathered]],
    second: str | None = None,
) -> Comparison | None:
    """The comparison over pairs of cells; None where they share no trace. Without `second`: best cell and baseline."""
    mine: _Outcomes = {}
    theirs: _Outcomes = {}
    for number, (one, other) in enumerate(pairs):
        _add(mine, one, number)
        _add(theirs, other, number)
    if not any(theirs.get(problem, {}).keys() & samples.keys() for problem, samples in mine.items()):
        return None
    difference = paired_difference(mine, theirs)
    if second is not None:
        return Comparison(*name, metric, first, second, len(pairs), difference)
    return Comparison(*name, metric, first, str(pairs[0][1].expected.setting), 1, difference, SELECTED)


def _add(outcomes: _Outcomes, cell: Gathered, number: int) -> None:
    for problem, samples in cell.compared().items():
        held = outcomes.setdefault((cell.expected.benchmark, problem), {})
        held.update(((number, sample), grade) for sample, grade in samples.items())


def _lists(cell: Gathered) -> dict[str, list[float]]:
    return {problem: list(samples.values()) for problem, samples in cell.outcomes.items()}
