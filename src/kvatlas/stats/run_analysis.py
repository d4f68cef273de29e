"""The analysis of a run: maps, tests, recommendations and comparisons, for fixed and adaptive sweeps alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvatlas.core import Map, MapName, grouped
from kvatlas.stats.adaptive import Standings, adaptive_choices, adaptive_verdicts, standings
from kvatlas.stats.bare_maps import verdicts_of_maps
from kvatlas.stats.choice import Choice, choices, choices_of_maps
from kvatlas.stats.losses import GridLosses, losses_of
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.pairs import Comparison, Differences, comparisons, differences_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces
from kvatlas.stats.verdicts import Verdict, verdicts


@dataclass(frozen=True)
class RunAnalysis:
    """Maps, their tests, recommendations, and paired comparisons of one run, each computed on first use.

    An adaptive run has only parts that are valid at any stop. `whole` has the losses of the run that these cells are a
    part of. Raises KvatlasError as `maps_of_run` does.
    """

    run: RunData
    whole: GridLosses | None = None

    @cached_property
    def bare(self) -> list[Map]:
        """The run's maps without tests."""
        return maps_of_run(self.run)

    @cached_property
    def maps(self) -> list[Map]:
        """The run's maps, each with its plateau and the cells that keep the margin."""
        return with_regions(self.bare, self.verdicts, self.run.margin)

    @cached_property
    def means(self) -> list[Map]:
        """Their means over benchmarks, each with its plateau and the cells that keep the margin."""
        return with_regions(mean_maps(self.maps), self.verdicts, self.run.margin)

    @cached_property
    def verdicts(self) -> Mapping[MapName, Verdict]:
        """The tests by map, means over benchmarks included; without a full cache with the plateau of the bound."""
        if self.is_adaptive:
            return adaptive_verdicts(self._standings, self.bare)
        found = verdicts(self.run, self.losses)
        bare = verdicts_of_maps([map_ for map_ in self.bare if map_.name in found and found[map_.name].losses is None])
        for name, bound in bare.items():
            plateau = bound.plateau if found[name].evidence else tuple(bound.may_lose)
            found[name] = replace(found[name], plateau=plateau, p_best=bound.p_best, may_lose=bound.may_lose)
        return found

    @cached_property
    def losses(self) -> GridLosses:
        """Losses against the full cache, in which maps, frames, tables and recommendations look up theirs."""
        return losses_of(self.run) if self.whole is None else self.whole

    @cached_property
    def choices(self) -> Sequence[Choice]:
        """The recommendation for each model; without a full cache for each model and policy."""
        if self.is_adaptive:
            return adaptive_choices(self._standings, self.run.cells, self.run.margin)
        made = choices(self.run, self.losses)
        return made + choices_of_maps(grids(self.maps, self.means), self.verdicts, made)

    @cached_property
    def comparisons(self) -> Sequence[Comparison]:
        """Policies, models and best cells in pairs; none of an adaptive sweep."""
        return comparisons(self.run)

    @cached_property
    def differences(self) -> Differences:
        """Cells minus the first baseline of the maps, in pairs; empty without one."""
        baseline = next((name for map_ in self.maps for name in map_.baselines), None)
        return differences_of_run(self.run, baseline) if baseline else {}

    def cells_of(self, policy: str | None) -> list[CellTraces]:
        """The cells of a policy with the baselines; all cells without one."""
        name = (policy or "").partition("(")[0]
        return [cell for cell in self.run.cells if policy is None or cell.baseline or cell.setting.policy == name]

    def of_policy(self, policy: str) -> RunAnalysis:
        """The same of one policy alone, whose losses are still those of the whole run."""
        return RunAnalysis(self.run.with_cells(self.cells_of(policy)), self.losses)

    @property
    def is_adaptive(self) -> bool:
        """Return whether the sweep chose problems by the outcomes of earlier ones."""
        return bool(self.run.manifest.allocation)

    @cached_property
    def _standings(self) -> Standings:
        return standings(self.run.manifest, self.run.cells, self.run.margin)


def grids(maps: Sequence[Map], means: Sequence[Map]) -> list[Map]:
    """One map for each model and policy: the mean over benchmarks, else the only one."""
    single = [map_ for map_ in maps if not map_.is_mean]
    alone = Counter((map_.model, map_.policy) for map_ in single)
    return [*means, *(map_ for map_ in single if alone[map_.model, map_.policy] == 1)]


def joined(runs: Sequence[RunAnalysis]) -> list[RunAnalysis]:
    """Adaptive runs as they are, others with the same axes as one."""
    by_axes = grouped((run for run in runs if not run.is_adaptive), lambda run: run.run.axes)
    whole = [run for run in runs if run.is_adaptive]
    for first, *others in by_axes.values():
        cells = [cell for run in (first, *others) for cell in run.run.cells]
        whole.append(RunAnalysis(first.run.with_cells(cells)) if others else first)
    return whole


def with_regions(maps: Iterable[Map], by_map: Mapping[MapName, Verdict], margin: float) -> list[Map]:
    """The maps with the regions of their verdicts: the plateau, and the cells shown to keep the margin."""
    framed = []
    for map_ in maps:
        verdict = by_map.get(map_.name)
        if verdict is not None:
            losses = verdict.losses
            keeps = None if losses is None else frozenset(coord for coord, loss in losses.items() if loss.is_kept)
            map_ = replace(map_, plateau=frozenset(verdict.plateau), keeps=keeps, margin=margin)
        framed.append(map_)
    return framed
