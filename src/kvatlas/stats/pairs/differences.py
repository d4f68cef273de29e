"""Every cell of a run's maps against a baseline, in pairs: the numbers of difference maps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvatlas.core import Trace
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import grid_groups, map_axes, short_names
from kvatlas.stats.estimates.maps import MEAN_OF
from kvatlas.stats.pairs.paired import difference_interval


@dataclass(frozen=True)
class Contrast:
    """A cell minus its baseline, in [-1, 1], with its 95 % interval."""

    value: float
    low: float
    high: float


#: Contrasts to the baseline by map (model, benchmark or `mean of N`, policy) and place on its axes.
Differences = Mapping[tuple[str, str, str], Mapping[tuple[Any, Any], Contrast]]


def differences_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    baseline: str,
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> Differences:
    """Cell minus `baseline` (its short name, such as `full`), on the problems and samples that both have.

    Means over benchmarks are there too. Cells without a pair are left out. Raises KvatlasError as `maps_of_run` does
    for axes and metric.
    """
    axes = map_axes(manifest, fix)
    cells = [cell for cell in gather(manifest, traces, metric) if cell.measured]
    names = short_names(cell.expected.setting for cell in cells if cell.expected.baseline)
    base = {
        (cell.expected.model, cell.expected.benchmark): cell
        for cell in cells
        if cell.expected.baseline and names[cell.expected.setting.id] == baseline
    }
    found: dict[tuple[str, str, str], dict[tuple[Any, Any], Contrast]] = {}
    for (model, benchmark, policy), group in grid_groups(cells, axes, fix).items():
        other = base.get((model, benchmark))
        if other is None:
            continue
        values = [(tuple(cell.expected.setting.values[axis] for axis in axes), cell) for cell in group]
        found[model, benchmark, policy] = {
            (place[0], place[1]): difference for place, cell in values if (difference := _pair(cell, other)) is not None
        }
    return {**found, **_means(found)}


def _pair(cell: CellTraces, other: CellTraces) -> Contrast | None:
    """The mean over problems of the differences of the samples that both have; None where there are none."""
    mine, theirs = cell.compared(), other.compared()
    means = []
    for problem, samples in mine.items():
        shared = samples.keys() & theirs.get(problem, {}).keys()
        if shared:
            means.append(math.fsum(samples[sample] - theirs[problem][sample] for sample in shared) / len(shared))
    if not means:
        return None
    low, high = difference_interval(np.array(means))
    return Contrast(math.fsum(means) / len(means), low, high)


def _means(found: Differences) -> dict[tuple[str, str, str], dict[tuple[Any, Any], Contrast]]:
    together: dict[tuple[str, str], list[Mapping[tuple[Any, Any], Contrast]]] = {}
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


def _mean(differences: Sequence[Contrast]) -> Contrast:
    """The mean over benchmarks; their problems are independent, so half widths add in squares (Zou and Donner 2008)."""
    count = len(differences)
    value = math.fsum(one.value for one in differences) / count
    below = math.hypot(*(one.value - one.low for one in differences)) / count
    above = math.hypot(*(one.high - one.value for one in differences)) / count
    return Contrast(value, max(-1.0, value - below), min(1.0, value + above))
