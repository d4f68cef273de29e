"""All that the traces of a run support, whichever way its sweep gave out problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import Map, Trace
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import Axes, map_axes
from kvatlas.stats.estimates.maps import maps_of_cells
from kvatlas.stats.inference.adaptive import NO_PAIRS, adaptive_choices, adaptive_verdicts, standings
from kvatlas.stats.inference.choice import Choice, choices
from kvatlas.stats.inference.map_tests import Name, Verdict, verdicts
from kvatlas.stats.pairs.comparisons import Comparison, comparisons


@dataclass(frozen=True)
class Judgement:
    """Verdicts by map name, what to choose, paired comparisons, and notes on what is left out."""

    verdicts: Mapping[Name, Verdict]
    choices: Sequence[Choice]
    comparisons: Sequence[Comparison] = ()
    notes: Sequence[str] = ()


def judge(
    manifest: Manifest,
    cells: Sequence[CellTraces],
    maps: Sequence[Map],
    axes: Axes,
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> Judgement:
    """The judgement on a run's gathered cells; `maps` are theirs. For adaptive runs only what is valid at any stop."""
    if manifest.allocation:
        held = standings(manifest, cells)
        found = adaptive_verdicts(held, cells, maps, axes, fix)
        return Judgement(found, adaptive_choices(held, cells), (), (NO_PAIRS,))
    return Judgement(verdicts(cells, axes, fix), choices(cells, axes, fix), comparisons(cells, axes, metric, fix))


def verdicts_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    metric: str = "pass@1",
    fix: Mapping[str, Any] | None = None,
) -> dict[Name, Verdict]:
    """The verdict of each map of a run and of the mean over benchmarks, by (model, benchmark or `mean of N`, policy).

    Of an adaptive run only the means have one. Raises KvatlasError as `maps_of_run` does.
    """
    cells, axes = gather(manifest, traces, metric), map_axes(manifest, fix)
    if not manifest.allocation:
        return verdicts(cells, axes, fix)
    maps = maps_of_cells(cells, axes, metric, partial=True, fix=fix)
    return adaptive_verdicts(standings(manifest, cells), cells, maps, axes, fix)
