"""The result: what is known of runs and CSV maps, analysed once; figures, text, JSON, pages and the API read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from kvatlas.columns import cell_document
from kvatlas.core import (
    FULL,
    REFERENCE,
    CellCoord,
    Claim,
    KvatlasError,
    Map,
    MapName,
    Note,
    NoteKind,
    is_of_policy,
    percent,
    reference_words,
)
from kvatlas.report.as_data import (
    NO_SETTING,
    Json,
    choice_document,
    comparison_document,
    contrast_document,
    limits_document,
    loss_values,
    memory_document,
    omnibus_document,
    pooled_document,
    rounded_p,
    stays_document,
    table_document,
)
from kvatlas.report.headline import headline
from kvatlas.report.next_steps import NextStep, next_steps
from kvatlas.report.view_options import ReadOptions, Source, bare_maps
from kvatlas.stats.choice import Choice, choices, choices_of_maps, floor_reason
from kvatlas.stats.controls import drift_reason
from kvatlas.stats.csv_tests import bound_tests_of_maps, pooled_effects
from kvatlas.stats.estimates import common
from kvatlas.stats.losses import GridLosses, SettingLoss, losses_of
from kvatlas.stats.map_tests import Basis, Effect, MapTests, PooledEffect
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.arrays import LEVEL
from kvatlas.stats.pairs import CellDifference, Comparison, Differences, adjusted, comparisons, differences_of_run
from kvatlas.stats.prices import Price, prices
from kvatlas.stats.run_analysis import grids, join_runs, run_tests, with_regions
from kvatlas.stats.run_data import RunData, shown_policies
from kvatlas.stats.setting_tables import SettingTable, setting_tables
from kvatlas.stats.table import CellTraces
from kvatlas.stats.validity import Kind, Limitation, findings
from kvatlas.stats.windows_at_memory import level_stays
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
    def axes(self) -> tuple[str, str]:
        """The names of the vertical and the horizontal axis."""
        return self.map.axes[0][0], self.map.axes[1][0]

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
    def problems(self) -> int | None:
        """The number of problems of each cell; None where it differs or is unknown."""
        return common([cell.estimate.problems for cell in self.map.cells.values()])

    @property
    def samples(self) -> int | None:
        """The number of samples of each problem; None where it differs or is unknown."""
        return common([cell.estimate.samples for cell in self.map.cells.values()])

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on the map and on its tests."""
        return (*self.map.notes, *self.verdict.notes)

    @property
    def losses(self) -> Mapping[CellCoord, SettingLoss]:
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
            "problems": self.problems,
            "samples": self.samples,
            "unmeasured": max((cell.unmeasured or 0 for cell in map_.cells.values()), default=0),
            "mean": percent(self.mean),
            "min": percent(min(self.values)),
            "max": percent(max(self.values)),
            "peaks": [self._estimate(coord) for coord in self.peaks],
            "lowest": [self._estimate(coord) for coord in self.lowest],
            "estimates": [self._cell(coord) for coord in map_.cells],
            "baselines": [{**cell_document(cell), "setting": name} for name, cell in map_.baselines.items()],
            "omnibus": omnibus_document(verdict.omnibus),
            "evidence_of_difference": verdict.evidence,
            "plateau": [self._coord(coord) for coord in verdict.plateau] or None,
            "may_lose": percent(verdict.most_lost),
            "claim": map_.claim.value if map_.claim else None,
            "effects": [self._effect(effect) for effect in verdict.effects],
            "stability": {
                "spread": percent(verdict.spread),
                "noise": percent(verdict.noise),
            },
            "equal_memory": memory_document(verdict.memory) if verdict.memory else None,
            "method": verdict.basis.value if verdict.basis else None,
            "validity": map_.validity.to_dict() if map_.validity else None,
            "notes": [note.text for note in self.notes],
        }

    def _coord(self, coord: CellCoord) -> Json:
        return dict(zip(self.axes, coord, strict=True))

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


@dataclass(frozen=True)
class Result:
    """All that is known of runs and CSV maps, each part made on first use and kept. Shares in [0, 1].

    Runs with the same axes are compared with each other as one. Parts that need traces are empty for maps without.
    """

    sources: tuple[Source, ...] = field(repr=False)
    options: ReadOptions = field(default_factory=ReadOptions)

    # -- runs and maps before any test ---------------------------------------------------------------------------------

    @cached_property
    def opened_runs(self) -> list[RunData]:
        """The runs among the sources, each with all its policies."""
        return [source for source in self.sources if isinstance(source, RunData)]

    @property
    def only_run(self) -> RunData:
        """The one source, a run; KvatlasError for a CSV map, which has no traces, and for several sources."""
        if len(self.opened_runs) != 1 or len(self.sources) != 1:
            given = "several sources were given" if len(self.sources) > 1 else "the file is a map without traces"
            raise KvatlasError(
                f"A report needs the folder of one run, and {given}: `kvatlas map` and `kvatlas describe` read maps."
            )
        return self.opened_runs[0]

    @cached_property
    def _maps_of_sources(self) -> list[list[Map]]:
        """The maps of each source, of all policies; none of a run without maps."""
        has_maps = [not isinstance(source, RunData) or source.has_maps for source in self.sources]
        return [bare_maps(source) if one else [] for source, one in zip(self.sources, has_maps, strict=True)]

    @property
    def every_map(self) -> list[Map]:
        """The maps of all policies, without tests. Raises KvatlasError for a run with more than two axes."""
        return list(chain.from_iterable(self._maps_of_sources))

    @cached_property
    def untested(self) -> list[Map]:
        """The maps of the policy that the options name, without tests.

        Raises KvatlasError for runs and files without such maps, unless they have a table of settings.
        """
        if not self.every_map and self.tables:
            return []
        return of_policy(self.every_map, self.options.policy)

    @cached_property
    def untested_means(self) -> list[Map]:
        """Their means over benchmarks, without tests; raises KvatlasError for maps that cannot be averaged."""
        return mean_maps(self.untested)

    @cached_property
    def _means_and_notes(self) -> tuple[list[Map], list[Note]]:
        try:
            return self.untested_means, []
        except KvatlasError as error:
            return [], [Note(NoteKind.LEFT_OUT, f"No means over benchmarks: {str(error).removesuffix('.')}")]

    # -- tests ---------------------------------------------------------------------------------------------------------

    @cached_property
    def joined_runs(self) -> list[RunData]:
        """The runs, those with the same axes as one."""
        return join_runs(self.opened_runs)

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
                tables += setting_tables(run, {choice.model: choice.losses or {} for choice in choices_of_run})
        if self.options.policy is not None:
            _check_policy(self.opened_runs, self.options.policy)
        return tuple(tables)

    @property
    def claim(self) -> Claim:
        """The claim of the numbers: that of all runs, else problems like these."""
        claims = {run.claim for run in self.runs} or {self.options.claim or Claim.LIKE}
        return claims.pop() if len(claims) == 1 else Claim.LIKE

    @property
    def has_two_families(self) -> bool:
        """Return whether a setting is proven to lose more while its difference from the full cache is not proven."""
        broken = set()
        for table in self.tables:
            broken |= {row.name for row in table.rows if row.loss is not None and row.loss.breaks_any}
        open_pairs = [one for one in self.comparisons if one.p_holm > LEVEL]
        names = {str(FULL), str(REFERENCE)}
        return any(names & {one.first, one.second} and broken & {one.first, one.second} for one in open_pairs)

    @property
    def models_with_effects(self) -> set[str]:
        """The models of which an effect of an axis is proven."""
        models: set[str] = set()
        for effect in self.effects:
            if effect.is_proven:
                models.update(name.model for name in effect.names)
        return models

    @cached_property
    def reference(self) -> str:
        """The name that sentences give to the full cache, or to the reference of servers."""
        cells = chain.from_iterable(run.manifest.expected for run in self.opened_runs)
        return reference_words(cell.setting for cell in cells)

    @property
    def margin(self) -> float:
        """The loss against the full cache that a setting may have, in (0, 1)."""
        return self.opened_runs[0].margin if self.opened_runs else self.options.margin

    @cached_property
    def tests(self) -> Mapping[MapName, MapTests]:
        """The tests by map, means over benchmarks included."""
        by_map: dict[MapName, MapTests] = {}
        if len(self.opened_runs) < len(self.sources):
            by_map |= bound_tests_of_maps(self.untested)
        for run, losses in zip(self.runs, self.losses, strict=True):
            if run.has_maps:
                # A run that was joined with others has its maps among those of all sources.
                sources = zip(self.sources, self._maps_of_sources, strict=True)
                maps = next((maps for source, maps in sources if source is run), self.untested)
                by_map |= run_tests(run, losses, maps)
        return by_map

    @cached_property
    def maps(self) -> tuple[MapResult, ...]:
        """The maps with their regions and tests."""
        return self._tested(self.untested)

    @cached_property
    def means(self) -> tuple[MapResult, ...]:
        """The means over benchmarks with their regions and tests; empty for maps that cannot be averaged."""
        means, _ = self._means_and_notes
        return self._tested(means)

    def _tested(self, maps: Sequence[Map]) -> tuple[MapResult, ...]:
        regions = with_regions(maps, self.tests, self.margin)
        return tuple(MapResult(map_, self.tests.get(map_.name, MapTests())) for map_ in regions)

    @cached_property
    def findings(self) -> tuple[Limitation, ...]:
        """The limits of what the runs can show, the gravest first.

        First of all a full cache that solves too little for a loss to be seen.
        """
        floors = []
        for choice in self.choices:
            if choice.family is not None and choice.family.is_floor:
                text = f"{model_name(choice.model)} on {choice.benchmark}: {floor_reason(choice.family)}; take "
                text += "easier problems, or more new tokens where traces are truncated."
                floors.append(Limitation(Kind.FLOOR, choice.model, choice.benchmark, text))

        cells: list[CellTraces] = []
        policy = self.options.policy
        for run in self.opened_runs:
            cells += run.cells if policy is None else run.of_policy(policy).cells
        drifts = [
            Limitation(Kind.DRIFT, one.model, one.benchmark, f"{model_name(one.model)}: {drift_reason(one.changes)}.")
            for one in self.choices
            if drift_reason(one.changes)
        ]
        return (*drifts, *floors, *findings(cells))

    @cached_property
    def effects(self) -> tuple[PooledEffect, ...]:
        """The effects of the axes over all benchmarks."""
        return tuple(pooled_effects([one.map for one in self.maps], self.tests))

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The recommendation for each model, without a full cache for each model and policy."""
        by_loss = list(chain.from_iterable(self._choices_of_runs))
        means, _ = self._means_and_notes
        of_maps = choices_of_maps(grids(self.untested, means), self.tests, by_loss, self.effects)
        return (*by_loss, *of_maps)

    @cached_property
    def unadjusted_comparisons(self) -> list[Comparison]:
        """Policies and models of the runs in pairs, of all policies."""
        return list(chain.from_iterable(map(comparisons, self.joined_runs)))

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons of the policy that the options name, p-values adjusted over all of them."""
        policy = self.options.policy
        return adjusted(
            [
                pair
                for pair in self.unadjusted_comparisons
                if policy is None or is_of_policy(pair.first, policy) or is_of_policy(pair.second, policy)
            ]
        )

    @property
    def differences(self) -> Differences:
        """The cells of the runs minus the first baseline of their maps, in pairs."""
        differences: dict[MapName, Mapping[CellCoord, CellDifference]] = {}
        for source, maps in zip(self.sources, self._maps_of_sources, strict=True):
            baseline = next(chain.from_iterable(map_.baselines for map_ in maps), None)
            if isinstance(source, RunData) and baseline:
                differences |= differences_of_run(source, baseline)
        return differences

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on the whole result, and on its tables of settings."""
        _, notes = self._means_and_notes
        for table in self.tables:
            notes = [*notes, *(note for note in table.notes if note not in notes)]
        for run in self.runs:
            notes = [*notes, *(note for note in run.claim_notes if note not in notes)]
        return tuple(notes)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The cost of a right answer of each setting of the runs."""
        return tuple(chain.from_iterable(map(prices, self.runs)))

    @property
    def single(self) -> list[MapResult]:
        """Maps of one benchmark."""
        return [one for one in self.maps if not one.map.is_mean]

    @property
    def without_finding(self) -> list[MapResult]:
        """Maps of one benchmark of which nothing is found: no difference, no effect of an axis, no mark."""
        found = set().union(*(effect.names for effect in self.effects if effect.is_found))
        silent = [one for one in self.single if one.verdict.omnibus is not None and not one.verdict.evidence]
        maps = []
        for one in silent:
            has_mark = any(loss.keeps_any or loss.breaks_any for loss in one.losses.values())
            if not has_mark and one.map.name not in found:
                maps.append(one)
        return maps

    @property
    def every(self) -> list[MapResult]:
        """Maps, then the means that are not among them."""
        given = {one.map.name for one in self.maps}
        return [*self.maps, *(one for one in self.means if one.map.name not in given)]

    @property
    def grids(self) -> list[MapResult]:
        """For each model and policy the mean over benchmarks, else each of its maps (see `grids`)."""
        results = {one.map.name: one for one in self.every}
        maps = [one.map for one in results.values()]
        means = [map_ for map_ in maps if map_.is_mean]
        return [results[map_.name] for map_ in grids(maps, means)]

    @property
    def map_notes(self) -> dict[str, list[MapResult]]:
        """The notes of maps and means, each once, with the maps that have it."""
        by_text: dict[str, list[MapResult]] = {}
        for one in self.every:
            for note in one.notes:
                by_text.setdefault(note.text, []).append(one)
        return by_text

    @cached_property
    def headline(self) -> str:
        """The finding in one sentence; empty where nothing is proven of settings and policies."""
        return headline(self.choices, self.comparisons)

    @cached_property
    def next_steps(self) -> tuple[NextStep, ...]:
        """The next steps after a run; none for several sources."""
        if len(self.sources) != 1 or not self.opened_runs:
            return ()
        memories = [one.verdict.memory for one in self.grids if one.verdict.memory is not None] if self.maps else []
        return tuple(next_steps(self.opened_runs[0], self.choices, memories))

    def comparison_documents(self) -> list[Json]:
        """Return the comparisons as data: first minus second, in points."""
        return [comparison_document(comparison) for comparison in self.comparisons]

    def to_dict(self) -> Json:
        """Return the document of `kvatlas describe --json`: percent scale, unknown values None.

        `headline`: the finding in a sentence. `claim`: what the numbers speak of, `these_problems` or
        `problems_like_these`. `next_steps`: what to try next, with specs. `tables`: for runs without
        maps one object per model with model, benchmark, metric, settings (the highest first; each as an estimate of a
        map, with its values by benchmark) and notes.

        `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples,
        unmeasured (the most traces of a cell of which the metric is unknown), mean, min, max, peaks, lowest, estimates
        (every cell, see `columns.cell_document`, with what it loses against the full cache), baselines, omnibus,
        evidence_of_difference, plateau, may_lose, effects, stability, equal_memory (local windows that keep the same
        number of tokens), method, notes. `means`: the same for the means
        over benchmarks. `comparisons`: first minus second, in points, p-values adjusted over all of them.
        `recommendation`: the first model's choice, with that of every model under `all`; `vacuous` says why there is
        none, `proven_cheapest` is proven by the claim, `deployable` by both; `losses` have `limits` by each claim. With
        caps on thinking `ways` has the cheapest proven setting that keeps fewer tokens, writes fewer, or both.
        `findings`: what limits what the runs can show, the gravest first. `effects`: one joint test for each axis
        over all benchmarks (and models, for CSV maps), each level against the mean of the others.
        `per_right_answer`: what a right answer of each setting costs, with the ratio to the full cache's.
        """
        choices = [choice_document(choice) for choice in self.choices]
        first_choice = choices[0] if choices else NO_SETTING

        return {
            "headline": self.headline or None,
            "claim": self.claim.value,
            "findings": [asdict(finding) for finding in self.findings],
            "tables": [table_document(table) for table in self.tables],
            "maps": [one.to_dict() for one in self.maps],
            "means": [one.to_dict() for one in self.means],
            "comparisons": self.comparison_documents(),
            "recommendation": {**first_choice, "all": choices},
            "effects": [pooled_document(effect) for effect in self.effects],
            "per_right_answer": [
                {**vars(price), "setting": str(price.setting), "policy": price.setting.policy} for price in self.prices
            ],
            "next_steps": [step.to_dict() for step in self.next_steps],
            "notes": [note.text for note in self.notes],
        }


def open_result(sources: Sequence[str | Path | RunData | Map], options: ReadOptions | None = None) -> Result:
    """Return the result of runs (or their folders), CSV maps, `published:NAME`, and single maps.

    Raises KvatlasError for a source that cannot be read, and for options that apply to none of the sources.
    """
    options = options or ReadOptions()
    opened: list[Source] = []
    for source in sources:
        if isinstance(source, Map):
            opened.append([source])
        elif isinstance(source, RunData):
            opened.append(source)
        else:
            opened.append(options.open_source(source))
    _check_options(opened, options)
    return Result(tuple(opened), options)


def _check_options(opened: Sequence[Source], options: ReadOptions) -> None:
    """Raise KvatlasError for options that apply to none of the sources, and for CSV maps of another metric."""
    runs = [source for source in opened if isinstance(source, RunData)]
    if options.fix and opened and not runs:
        raise KvatlasError(f"fix is {dict(options.fix)}; expected a run whose axis it holds, only maps were given.")
    if options.problems is not None and len(runs) == len(opened):
        raise KvatlasError(
            f"problems is {options.problems}; expected a CSV map that lacks them, only runs were given, of which all "
            "problems count."
        )

    for source in opened:
        maps = [] if isinstance(source, RunData) else source
        for map_ in maps:
            # The default stands for the metric of the map.
            if options.metric not in (None, "pass@1", map_.metric):
                raise KvatlasError(
                    f"The map of {map_.model} on {map_.benchmark} shows {map_.metric} and no {options.metric!r}."
                )


def analyse(sources: Sequence[str | Path | RunData | Map], options: ReadOptions | None = None, **named: Any) -> Result:
    """Return the result of sources (see `open_result`) that have maps, no two of them of one name.

    `named` are fields of `ReadOptions` by their names, in place of those of `options`. Raises KvatlasError for a source
    that cannot be read, no map, and a map that comes twice.
    """
    result = open_result(sources, replace(options or ReadOptions(), **named))
    for name, count in Counter(map_.name for map_ in result.untested).items():
        if count > 1:
            raise KvatlasError(
                f"The map {' | '.join(filter(None, name))} was given twice; compare two readings of one map with "
                "`kvatlas compare`."
            )
    return result


def of_policy(maps: Sequence[Map], policy: str | None) -> list[Map]:
    """Return the maps of a policy, all of them without one; raises KvatlasError if there is no map."""
    if not maps:
        raise KvatlasError("There is no map to describe.")
    kept = [map_ for map_ in maps if policy is None or is_of_policy(map_.policy, policy)]
    if not kept:
        policies = ", ".join(dict.fromkeys(map_.policy or "none named" for map_ in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {policies}.")
    return kept


def _check_policy(runs: Sequence[RunData], policy: str) -> None:
    """Raise KvatlasError if no setting of the runs is of a policy."""
    settings = []
    for run in runs:
        settings += [cell.setting for cell in run.cells]
    if not any(setting.is_of(policy.partition("(")[0]) for setting in settings):
        policies = ", ".join(shown_policies(setting.policy for setting in settings).values())
        raise KvatlasError(f"There is no setting of the policy {policy!r}; there are: {policies}.")
