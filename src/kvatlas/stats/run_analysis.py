"""The analysis of a run: maps, tests, recommendations and comparisons, for fixed and adaptive sweeps alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from kvatlas.core import Map, MapName, grouped
from kvatlas.registry import features
from kvatlas.stats.choice import Choice, choices, choices_of_maps
from kvatlas.stats.csv_tests import verdicts_of_maps
from kvatlas.stats.losses import GridLosses, losses_of
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.pairs import Comparison, Differences, comparisons, differences_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.setting_tables import SettingTable, setting_tables
from kvatlas.stats.table import CellTraces
from kvatlas.stats.verdicts import Verdict, verdicts


@dataclass(frozen=True)
class RunAnalysis:
    """Maps, their tests, recommendations, and paired comparisons of one run, each computed on first use.

    An adaptive run has only parts that are valid at any stop. `run_losses` are the losses of the full run, if these
    cells are a subset of it. A run without maps has tables of settings instead. Raises KvatlasError as `maps_of_run`
    does.
    """

    run: RunData
    run_losses: GridLosses | None = None

    @cached_property
    def untested_maps(self) -> list[Map]:
        """The run's maps without tests."""
        return maps_of_run(self.run)

    @cached_property
    def maps(self) -> list[Map]:
        """The run's maps, each with its plateau and the cells that keep the margin."""
        return with_regions(self.untested_maps, self.verdicts, self.run.margin)

    @cached_property
    def means(self) -> list[Map]:
        """Their means over benchmarks, each with its plateau and the cells that keep the margin."""
        return with_regions(mean_maps(self.maps), self.verdicts, self.run.margin)

    @cached_property
    def verdicts(self) -> Mapping[MapName, Verdict]:
        """The tests by map, means over benchmarks included; without a full cache with the plateau of the bound."""
        if not self.run.has_maps:
            return {}
        if self.is_adaptive:
            found_so_far: Mapping[MapName, Verdict] = self._adaptive_decisions.verdicts(self.untested_maps)
            return found_so_far
        found = verdicts(self.run, self.losses)
        tested = [map_ for map_ in self.untested_maps if map_.name in found]
        without_full = [map_ for map_ in tested if found[map_.name].losses is None]
        for name, bound in verdicts_of_maps(without_full).items():
            # Where no difference is proven all cells are tied.
            plateau = bound.plateau if found[name].evidence else tuple(bound.may_lose)
            found[name] = replace(found[name], plateau=plateau, p_best=bound.p_best, may_lose=bound.may_lose)
        return found

    @cached_property
    def losses(self) -> GridLosses:
        """Losses against the full cache, in which maps, frames, tables and recommendations look up theirs."""
        return losses_of(self.run) if self.run_losses is None else self.run_losses

    @cached_property
    def tables(self) -> list[SettingTable]:
        """The tables of settings of a run without maps, one for each model; empty for others.

        Raises KvatlasError as `setting_tables` does.
        """
        if self.run.has_maps:
            return []
        losses = {choice.model: choice.losses or {} for choice in self.choices}
        return setting_tables(self.run, losses)

    @cached_property
    def choices(self) -> Sequence[Choice]:
        """The recommendation for each model; without a full cache for each model and policy."""
        if self.is_adaptive:
            decided: list[Choice] = self._adaptive_decisions.choices()
            return decided
        by_loss = choices(self.run, self.losses)
        if not self.run.has_maps:
            return by_loss
        return by_loss + choices_of_maps(grids(self.maps, self.means), self.verdicts, by_loss)

    @cached_property
    def comparisons(self) -> Sequence[Comparison]:
        """Policies and models in pairs; none of an adaptive sweep."""
        return comparisons(self.run)

    @cached_property
    def differences(self) -> Differences:
        """Cells minus the first baseline of the maps, in pairs; empty without one."""
        maps = self.maps if self.run.has_maps else []
        baseline = next(chain.from_iterable(map_.baselines for map_ in maps), None)
        return differences_of_run(self.run, baseline) if baseline else {}

    def cells_of(self, policy: str | None) -> list[CellTraces]:
        """Return the cells of a policy with the baselines; all cells for None."""
        if policy is None:
            return list(self.run.cells)
        name = policy.partition("(")[0]
        return [cell for cell in self.run.cells if cell.baseline or cell.setting.is_of(name)]

    def of_policy(self, policy: str) -> RunAnalysis:
        """Return the analysis of one policy alone, whose losses are still those of the whole run."""
        return RunAnalysis(self.run.with_cells(self.cells_of(policy)), self.losses)

    @property
    def is_adaptive(self) -> bool:
        """Return whether the sweep chose problems by the outcomes of earlier ones."""
        return bool(self.run.manifest.allocation)

    @cached_property
    def _adaptive_decisions(self) -> Any:
        """The decisions of an adaptive sweep. Raises KvatlasError without the feature adaptive."""
        return features.get("adaptive.decisions")(self.run.manifest, self.run.cells, self.run.margin)


def grids(maps: Sequence[Map], means: Sequence[Map]) -> list[Map]:
    """Return the maps that stand for all: for each model and policy its mean over benchmarks, else each of its maps."""
    averaged = {(map_.model, map_.policy) for map_ in means}
    return [*means, *(map_ for map_ in maps if not map_.is_mean and (map_.model, map_.policy) not in averaged)]


def group_by_axes(runs: Sequence[RunAnalysis]) -> list[RunAnalysis]:
    """Return adaptive runs as they are, and the others with those of the same axes as one."""
    groups = [run for run in runs if run.is_adaptive]
    fixed = [run for run in runs if not run.is_adaptive]
    for of_axes in grouped(fixed, _axes_of).values():
        first = of_axes[0]
        if len(of_axes) == 1:
            groups.append(first)
        else:
            cells = list(chain.from_iterable(run.run.cells for run in of_axes))
            groups.append(RunAnalysis(first.run.with_cells(cells)))
    return groups


def _axes_of(run: RunAnalysis) -> tuple[str, ...]:
    """Return the axes of the maps of a run; of a run without maps the parameters that it varies."""
    return run.run.axes if run.run.has_maps else ("", *run.run.varied)


def with_regions(maps: Iterable[Map], by_map: Mapping[MapName, Verdict], margin: float) -> list[Map]:
    """Return the maps with the regions of their verdicts: the plateau, and the cells shown to keep the margin."""
    return [_framed(map_, by_map[map_.name], margin) if map_.name in by_map else map_ for map_ in maps]


def _framed(map_: Map, verdict: Verdict, margin: float) -> Map:
    plateau = frozenset(verdict.plateau)
    if verdict.losses is None:
        return replace(map_, plateau=plateau, keeps=None, breaks=None, margin=margin)
    losses = verdict.losses.items()
    return replace(
        map_,
        plateau=plateau,
        keeps=frozenset(coord for coord, loss in losses if loss.keeps_any),
        breaks=frozenset(coord for coord, loss in losses if loss.breaks_any),
        keeps_like=frozenset(coord for coord, loss in losses if loss.keeps_like),
        breaks_like=frozenset(coord for coord, loss in losses if loss.breaks_like),
        margin=margin,
    )
