"""The evidence: what runs and CSV maps prove, analysed once: tested maps, losses, recommendations and comparisons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from kvatlas.columns import cell_document
from kvatlas.core import CellCoord, Claim, KvatlasError, Map, MapName, Note, NoteKind, grouped, is_of_policy, percent
from kvatlas.report.as_data import Json, contrast_document, limits_document, loss_values, rounded_p, stays_document
from kvatlas.report.sources import Sources
from kvatlas.stats.choice import Choice, choices, floor_reason
from kvatlas.stats.controls import drift_reason
from kvatlas.stats.csv_tests import bound_tests_of_maps, pooled_effects
from kvatlas.stats.estimates import problem_count, sample_count
from kvatlas.stats.losses import GridLosses, losses_of
from kvatlas.stats.map_tests import Basis, Effect, EqualMemory, MapTests, fixed_run_tests, level_stays
from kvatlas.stats.maps import SettingTable, setting_tables
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.numerics.equal_memory import Pair
from kvatlas.stats.pairs import Comparison, adjusted, comparisons
from kvatlas.stats.run_data import RunData, shown_policies
from kvatlas.stats.validity import Kind, Limitation, findings
from kvatlas.text import model_name

#: Values nearer than this are the same peak.
_TIE = 1e-9


@dataclass(frozen=True)
class MapResult:
    """A map and its tests."""

    map: Map
    verdict: MapTests = field(default_factory=MapTests)

    @property
    def title(self) -> str:
        """Model, benchmark and policy."""
        return " | ".join(filter(None, (model_name(self.map.model), self.map.benchmark, self.map.policy)))

    @property
    def is_bare(self) -> bool:
        """Return whether only averages are known, so that the tests are those of the binomial bound."""
        return self.verdict.basis is Basis.BOUND

    @property
    def values(self) -> list[float]:
        """The value of every cell."""
        return [cell.estimate.value for cell in self.map.cells.values()]

    @property
    def mean(self) -> float:
        """The mean over cells."""
        return sum(self.values) / len(self.values)

    @property
    def peaks(self) -> list[CellCoord]:
        """The highest cells."""
        return self._at(max(self.values))

    @property
    def lowest(self) -> list[CellCoord]:
        """The lowest cells."""
        return self._at(min(self.values))

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on the map and on its tests."""
        return (*self.map.notes, *self.verdict.notes)

    @property
    def losses(self) -> Mapping[CellCoord, Difference]:
        """Losses against the full cache, empty without one."""
        return self.verdict.losses or {}

    def _at(self, value: float) -> list[CellCoord]:
        return [coord for coord, cell in self.map.cells.items() if abs(cell.estimate.value - value) <= _TIE]

    def to_dict(self) -> Json:
        """Return the map as data: its cells with intervals, costs and losses, and its tests."""
        map_ = self.map
        verdict = self.verdict
        return {
            "model": map_.model,
            "benchmark": map_.benchmark,
            "metric": map_.metric,
            "policy": map_.policy,
            "control": map_.is_control,
            "axes": {name: list(values) for name, values in map_.axes},
            "cells": len(map_.cells),
            "problems": problem_count(map_),
            "samples": sample_count(map_),
            "mean": percent(self.mean),
            "min": percent(min(self.values)),
            "max": percent(max(self.values)),
            "peaks": [self._estimate(coord) for coord in self.peaks],
            "lowest": [self._estimate(coord) for coord in self.lowest],
            "estimates": [self._cell(coord) for coord in map_.cells],
            "baselines": [{**cell_document(cell), "setting": name} for name, cell in map_.baselines.items()],
            "omnibus": self._omnibus(),
            "evidence_of_difference": verdict.evidence,
            "plateau": [self._coord(coord) for coord in verdict.plateau] or None,
            "may_lose": percent(verdict.most_lost),
            "claim": map_.claim.value if map_.claim else None,
            "effects": [self._effect(effect) for effect in verdict.effects],
            "stability": {"spread": percent(verdict.spread), "noise": percent(verdict.noise)},
            "equal_memory": _memory_document(verdict.memory) if verdict.memory else None,
            "method": verdict.basis.value if verdict.basis else None,
            "validity": map_.validity.to_dict() if map_.validity else None,
            "notes": [note.text for note in self.notes],
        }

    def _omnibus(self) -> Json:
        """Return the test of "all settings behave alike"; unknown values where it was not made."""
        test = self.verdict.omnibus
        if test is None or self.verdict.basis is None:
            return {"statistic": None, "p": None, "method": None}
        return {"statistic": round(test.statistic, 4), "p": rounded_p(test.p), "method": self.verdict.basis.method}

    def _coord(self, coord: CellCoord) -> Json:
        return dict(zip(self.map.axis_names, coord, strict=True))

    def _estimate(self, coord: CellCoord) -> Json:
        return {**self._coord(coord), **self.map.cells[coord].estimate.to_dict()}

    def _cell(self, coord: CellCoord) -> Json:
        loss = self.losses.get(coord)
        return {
            **self._coord(coord),
            **cell_document(self.map.cells[coord]),
            "p_best": rounded_p(self.verdict.p_best.get(coord)),
            "may_lose": percent(self.verdict.may_lose.get(coord)),
            **loss_values(loss),
            "shown": loss.is_kept if loss else None,
            "limits": limits_document(loss) if loss else None,
        }

    def _effect(self, effect: Effect) -> Json:
        stays = level_stays([self.map], effect.axis)
        levels = [
            {"level": level, **contrast_document(contrast), **stays_document(stays.get(level))}
            for level, contrast in effect.levels
        ]
        return {"axis": effect.axis, "levels": levels, "p": rounded_p(effect.p), "missed": percent(effect.hidden)}


def _memory_document(memory: EqualMemory) -> Json:
    """Return local windows at equal memory as data."""

    def pair_document(pair: Pair) -> Json:
        sides = {}
        for name, index in zip(("better", "other"), pair, strict=True):
            place = dict(zip(memory.axes, memory.coords[index], strict=True))
            sides[name] = {**place, "stays_tokens": round(float(memory.tokens[index]), 3)}
        return {
            **sides,
            "better_keeps_more_on": {name: round(tokens, 3) for name, tokens in memory.keeps_more(pair).items()},
            **contrast_document(memory.tests[pair], "difference"),
            "adjusted_p": rounded_p(memory.tests[pair].p_holm),
        }

    estimate = None
    if memory.estimate is not None:
        estimate = {
            "wide": memory.windows[memory.estimate.wide],
            "narrow": memory.windows[memory.estimate.narrow],
            "low_tokens": round(memory.estimate.low, 3),
            "high_tokens": round(memory.estimate.high, 3),
            **contrast_document(memory.estimate.difference, "difference"),
        }
    return {
        "pairs": len(memory.tests),
        "proven": list(map(pair_document, memory.proven)),
        "strongest": pair_document(memory.best) if memory.best else None,
        "estimate": estimate,
        "nothing_in_common": [list(pair) for pair in memory.apart],
    }


class Evidence(Sources):
    """The evidence of runs and CSV maps, each part made on first use and kept. Shares in [0, 1].

    Runs with the same axes are compared with each other as one. Parts that need traces are empty for maps without.
    """

    # -- runs ----------------------------------------------------------------------------------------------------------

    @cached_property
    def joined_runs(self) -> list[RunData]:
        """The runs, those with the same axes as one."""
        joined = []
        # A run without maps has the parameters that it varies in place of axes.
        by_axes = grouped(self.opened_runs, lambda run: run.axes if run.has_maps else ("", *run.varied))
        for alike in by_axes.values():
            first = alike[0]
            if len(alike) > 1:
                first = first.with_cells(list(chain.from_iterable(run.cells for run in alike)))
            joined.append(first)
        return joined

    @cached_property
    def runs(self) -> list[RunData]:
        """The joined runs, of the policy that the options name."""
        policy = self.options.policy
        return [run if policy is None else run.of_policy(policy) for run in self.joined_runs]

    @cached_property
    def losses(self) -> list[GridLosses]:
        """The losses of each joined run against its full cache, of all its policies."""
        return list(map(losses_of, self.joined_runs))

    @cached_property
    def _choices_of_runs(self) -> list[list[Choice]]:
        """The recommendations of each run by the losses against its full cache."""
        return [choices(run, losses) for run, losses in zip(self.runs, self.losses, strict=True)]

    @cached_property
    def tables(self) -> tuple[SettingTable, ...]:
        """The settings of the runs without maps, a table for each model.

        Raises KvatlasError as `setting_tables` does, and for a policy of which no run has a setting.
        """
        if all(run.has_maps for run in self.runs):
            return ()
        tables: list[SettingTable] = []
        for run, choices_of_run in zip(self.runs, self._choices_of_runs, strict=True):
            if not run.has_maps:
                tables += setting_tables(run, {choice.model: choice.losses for choice in choices_of_run})
        if self.options.policy is not None:
            _check_policy(self.opened_runs, self.options.policy)
        return tuple(tables)

    @property
    def claim(self) -> Claim:
        """The claim of the numbers: that of all runs, else problems like these."""
        claims = {run.claim for run in self.runs} or {self.options.claim or Claim.LIKE}
        return claims.pop() if len(claims) == 1 else Claim.LIKE

    @cached_property
    def tests(self) -> Mapping[MapName, MapTests]:
        """The tests by map, means over benchmarks included."""
        by_map: dict[MapName, MapTests] = {}
        if len(self.opened_runs) < len(self.sources):
            by_map |= bound_tests_of_maps(self.untested)
        for run, losses in zip(self.runs, self.losses, strict=True):
            if run.has_maps:
                by_map |= run_tests(run, losses, self.untested)
        return by_map

    @cached_property
    def maps(self) -> tuple[MapResult, ...]:
        """The maps with their regions and tests."""
        return self._tested(self.untested)

    @cached_property
    def means(self) -> tuple[MapResult, ...]:
        """The means over the benchmarks of the maps, with regions and tests; empty for maps that cannot be averaged.

        A mean that a source gave is among the maps.
        """
        means, _ = self._means_and_notes
        given = {map_.name for map_ in self.untested}
        return self._tested([mean for mean in means if mean.name not in given])

    def _tested(self, maps: Sequence[Map]) -> tuple[MapResult, ...]:
        regions = with_regions(maps, self.tests, self.margin)
        return tuple(MapResult(map_, self.tests.get(map_.name, MapTests())) for map_ in regions)

    @cached_property
    def _means_and_notes(self) -> tuple[list[Map], list[Note]]:
        try:
            return self.untested_means, []
        except KvatlasError as error:
            return [], [Note(NoteKind.LEFT_OUT, f"No means over benchmarks: {str(error).removesuffix('.')}")]

    @property
    def grids(self) -> list[MapResult]:
        """The maps that stand for all: for each model and policy its means over benchmarks, else each of its maps."""
        found = [*self.maps, *self.means]
        means = [one for one in found if one.map.is_mean]
        averaged = {(one.map.model, one.map.policy) for one in means}
        return [*means, *(one for one in found if (one.map.model, one.map.policy) not in averaged)]

    @cached_property
    def findings(self) -> tuple[Limitation, ...]:
        """The limits of what the runs can show, the gravest first.

        First of all a full cache that solves too little for a loss to be seen.
        """
        drifts = []
        floors = []
        for choice in self.choices:
            drift = drift_reason(choice.changes)
            if drift:
                text = f"{model_name(choice.model)}: {drift}."
                drifts.append(Limitation(Kind.DRIFT, choice.model, choice.benchmark, text))
            if choice.family.is_floor:
                text = f"{model_name(choice.model)} on {choice.benchmark}: {floor_reason(choice.family)}; take "
                text += "easier problems, or more new tokens where traces are truncated."
                floors.append(Limitation(Kind.FLOOR, choice.model, choice.benchmark, text))

        policy = self.options.policy
        runs = self.opened_runs if policy is None else [run.of_policy(policy) for run in self.opened_runs]
        return (*drifts, *floors, *findings(list(chain.from_iterable(run.cells for run in runs))))

    @cached_property
    def effects(self) -> tuple[Effect, ...]:
        """The effects of the axes over all benchmarks."""
        return tuple(pooled_effects([one.map for one in self.maps], self.tests))

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The recommendation for each model with a full cache."""
        return tuple(chain.from_iterable(self._choices_of_runs))

    @cached_property
    def unadjusted_comparisons(self) -> list[Comparison]:
        """Policies and models of the runs in pairs, of all policies."""
        return list(chain.from_iterable(map(comparisons, self.joined_runs)))

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons of the policy that the options name, p-values adjusted over all of them."""
        policy = self.shown_policy
        pairs = self.unadjusted_comparisons
        if policy is not None:
            pairs = [pair for pair in pairs if is_of_policy(pair.first, policy) or is_of_policy(pair.second, policy)]
        return adjusted(pairs)


def run_tests(run: RunData, losses: GridLosses, maps: Sequence[Map]) -> Mapping[MapName, MapTests]:
    """Return the tests of each of the run's maps and means; of maps without a full cache with the bound's plateau."""
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
                fits=tests.untested & frozenset(coord for coord, loss in losses if loss.limit <= margin),
            )
        framed.append(map_)
    return framed


def _check_policy(runs: Sequence[RunData], policy: str) -> None:
    """Raise KvatlasError if no setting of the runs is of a policy."""
    cells = chain.from_iterable(run.cells for run in runs)
    settings = [cell.setting for cell in cells]
    if not any(setting.is_of(policy.partition("(")[0]) for setting in settings):
        policies = ", ".join(shown_policies(setting.policy for setting in settings).values())
        raise KvatlasError(f"There is no setting of the policy {policy!r}; there are: {policies}.")
