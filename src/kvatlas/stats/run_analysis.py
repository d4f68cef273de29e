"""The tests of a run, the runs that are read as one, and maps with the regions of their tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from kvatlas.core import Map, MapName, grouped
from kvatlas.stats.csv_tests import bound_tests_of_maps
from kvatlas.stats.losses import GridLosses
from kvatlas.stats.map_tests import MapTests, fixed_run_tests
from kvatlas.stats.run_data import RunData


def join_runs(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs, those with the same axes as one."""
    joined = []
    # A run without maps has the parameters that it varies in place of axes.
    for alike in grouped(runs, lambda run: run.axes if run.has_maps else ("", *run.varied)).values():
        first = alike[0]
        if len(alike) > 1:
            first = first.with_cells(list(chain.from_iterable(run.cells for run in alike)))
        joined.append(first)
    return joined


def run_tests(run: RunData, losses: GridLosses, maps: Sequence[Map]) -> Mapping[MapName, MapTests]:
    """Return the tests of each of the run's maps and means; of maps without a full cache with the bound's plateau."""
    if not run.has_maps:
        return {}
    found = fixed_run_tests(run, losses)
    without_full = [map_ for map_ in maps if map_.name in found and found[map_.name].losses is None]
    for name, bound in bound_tests_of_maps(without_full).items():
        if name in found:
            # Where no difference is proven all cells are tied.
            plateau = bound.plateau if found[name].evidence else tuple(bound.may_lose)
            found[name] = replace(found[name], plateau=plateau, p_best=bound.p_best, may_lose=bound.may_lose)
    return found


def with_regions(maps: Iterable[Map], by_map: Mapping[MapName, MapTests], margin: float) -> list[Map]:
    """Return the maps with the regions of their tests: the plateau, and the cells shown to keep the margin."""
    framed = []
    for map_ in maps:
        tests = by_map.get(map_.name)
        if tests is not None:
            map_ = replace(map_, plateau=frozenset(tests.plateau), keeps=None, breaks=None, margin=margin)

        if tests is not None and tests.losses is not None:
            losses = tests.losses.items()
            map_ = replace(
                map_,
                keeps=frozenset(coord for coord, loss in losses if loss.keeps_any),
                breaks=frozenset(coord for coord, loss in losses if loss.breaks_any),
                keeps_like=frozenset(coord for coord, loss in losses if loss.keeps_like),
                breaks_like=frozenset(coord for coord, loss in losses if loss.breaks_like),
            )
        framed.append(map_)
    return framed
