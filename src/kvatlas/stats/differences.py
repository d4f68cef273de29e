"""Every cell of a run's maps against a baseline, in pairs: the numbers of difference maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvatlas.core import Trace
from kvatlas.results.manifest import Manifest
from kvatlas.stats.cells import Gathered, gather
from kvatlas.stats.grid import grid_groups, map_axes
from kvatlas.stats.maps import MEAN_OF
from kvatlas.stats.paired import Difference, paired_difference

#: Differences to the baseline by map (model, benchmark or `mean of N`, policy) and place on its axes.
Differences = Mapping[tuple[str, str, str], Mapping[tuple[Any, Any], Difference]]


def differences_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    baseline: str,
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> Differences:
    """Cell minus `baseline` (its text, such as `full`), on the problems and samples that both have.

    Means over benchmarks are there too. Cells without a pair are left out. Raises KvatlasError as `maps_of_run` does
    for axes and metric.
    """
    axes = map_axes(manifest, fix)
    cells = [cell for cell in gather(manifest, traces, metric) if cell.found]
    base = {
        (cell.expected.model, cell.expected.benchmark): cell
        for cell in cells
        if cell.expected.baseline and str(cell.expected.setting) == baseline
    }
    found: dict[tuple[str, str, str], dict[tuple[Any, Any], Difference]] = {}
    for (model, benchmark, policy), group in grid_groups(cells, axes, fix).items():
        other = base.get((model, benchmark))
        if other is None:
            continue
        values = [(tuple(cell.expected.setting.values[axis] for axis in axes), cell) for cell in group]
        found[model, benchmark, policy] = {
            (place[0], place[1]): difference for place, cell in values if (difference := _pair(cell, other)) is not None
        }
    return {**found, **_means(found)}


def _pair(cell: Gathered, other: Gathered) -> Difference | None:
    if not any(other.outcomes.get(problem, {}).keys() & held.keys() for problem, held in cell.outcomes.items()):
        return None
    return paired_difference(cell.outcomes, other.outcomes, flips=2_000)


def _means(found: Differences) -> dict[tuple[str, str, str], dict[tuple[Any, Any], Difference]]:
    together: dict[tuple[str, str], list[Mapping[tuple[Any, Any], Difference]]] = {}
    for (model, _, policy), places in found.items():
        together.setdefault((model, policy), []).append(places)
    return {
        (model, f"{MEAN_OF}{len(groups)}", policy): {
            place: _mean([group[place] for group in groups])
            for place in groups[0]
            if all(place in group for group in groups)
        }
        for (model, policy), groups in together.items()
        if len(groups) > 1
    }


def _mean(differences: Sequence[Difference]) -> Difference:
    """The mean over benchmarks; their problems are independent, so half widths add in squares (Zou and Donner 2008)."""
    count = len(differences)
    value = math.fsum(one.value for one in differences) / count
    below = math.hypot(*(one.value - one.low for one in differences)) / count
    above = math.hypot(*(one.high - one.value for one in differences)) / count
    return Difference(
        value,
        max(-1.0, value - below),
        min(1.0, value + above),
        math.nan,
        sum(one.problems for one in differences),
        sum(one.pairs for one in differences),
    )
