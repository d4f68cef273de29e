"""The result: what is known of runs and CSV maps, analysed once. Text, JSON, pages and the Python API read it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.core import Cell, CellCoord, KvatlasError, Map, MapName, Note, NoteKind, Setting, percent, rounded
from kvatlas.figures import style
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.adaptive import NO_PAIRS
from kvatlas.stats.choice import Choice, Saving, choices_of_maps, kv_tokens_of
from kvatlas.stats.csv_tests import PooledEffect, pooled_effects, verdicts_of_maps
from kvatlas.stats.estimates import common, with_binomial_bounds
from kvatlas.stats.losses import LossFamily, RequiredProblems, SettingLoss
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.arrays import Contrast
from kvatlas.stats.pairs import Comparison, adjusted
from kvatlas.stats.prices import Price, prices
from kvatlas.stats.run_analysis import RunAnalysis, grids, group_by_axes, with_regions
from kvatlas.stats.run_data import RunData, margin_from_points
from kvatlas.stats.validity import Limitation, findings
from kvatlas.stats.verdicts import Basis, Effect, Verdict

Json = dict[str, Any]
#: Values nearer than this are the same peak.
_TIE = 1e-9


@dataclass(frozen=True)
class MapResult:
    """A map and its tests."""

    map: Map
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def title(self) -> str:
        """Model, benchmark and policy."""
        return " | ".join(filter(None, (style.model(self.map.model), self.map.benchmark, self.map.policy)))

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
        """The map as data: its cells with intervals, costs and losses, and its tests."""
        map_, verdict, test = self.map, self.verdict, self.verdict.omnibus

        def places(coords: Sequence[CellCoord]) -> list[Json]:
            return [{**self._coord(coord), **map_.cells[coord].estimate.to_dict()} for coord in coords]

        return {
            "model": map_.model,
            "benchmark": map_.benchmark,
            "metric": map_.metric,
            "policy": map_.policy,
            "axes": {name: list(values) for name, values in map_.axes},
            "cells": len(map_.cells),
            "problems": self.problems,
            "samples": self.samples,
            "unmeasured": max((cell.unmeasured or 0 for cell in map_.cells.values()), default=0),
            "mean": percent(self.mean),
            "min": percent(min(self.values)),
            "max": percent(max(self.values)),
            "peaks": places(self.peaks),
            "lowest": places(self.lowest),
            "estimates": [self._cell(coord) for coord in map_.cells],
            "baselines": [{**cell.to_dict(), "setting": name} for name, cell in map_.baselines.items()],
            "omnibus": {
                "statistic": rounded(test.statistic, 4) if test else None,
                "p": _p(test.p) if test else None,
                "method": test.method.value if test else None,
            },
            "evidence_of_difference": verdict.evidence,
            "plateau": [self._coord(coord) for coord in verdict.plateau] if verdict.plateau else None,
            "may_lose": percent(verdict.most_lost),
            "effects": [self._effect(effect) for effect in verdict.effects],
            "stability": {
                "spread": percent(verdict.spread),
                "noise": percent(verdict.noise),
            },
            "method": verdict.basis.value if verdict.basis else None,
            "validity": map_.validity.to_dict() if map_.validity else None,
            "notes": [note.text for note in self.notes],
        }

    def _coord(self, coord: CellCoord) -> Json:
        return dict(zip(self.axes, coord, strict=True))

    def _cell(self, coord: CellCoord) -> Json:
        loss = self.losses.get(coord)
        return {
            **self._coord(coord),
            **self.map.cells[coord].to_dict(),
            "p_best": _p(self.verdict.p_best.get(coord)),
            "may_lose": percent(self.verdict.may_lose.get(coord)),
            **_loses(loss),
            "shown": loss.is_kept if loss else None,
        }

    def _effect(self, effect: Effect) -> Json:
        levels = [{"level": level, **_contrast(contrast)} for level, contrast in effect.levels]
        return {"axis": effect.axis, "levels": levels, "p": _p(effect.p), "missed": percent(effect.hidden)}


@dataclass(frozen=True)
class Result:
    """All that is known of some maps. Shares in [0, 1]; parts that need traces are empty for maps without.

    `choices` are the recommendations, one for each model. `effects` are the axes' over all benchmarks.
    """

    findings: tuple[Limitation, ...]
    maps: tuple[MapResult, ...]
    means: tuple[MapResult, ...]
    comparisons: tuple[Comparison, ...]
    choices: tuple[Choice, ...]
    notes: tuple[Note, ...]
    effects: tuple[PooledEffect, ...] = ()
    runs: tuple[RunData, ...] = field(default=(), repr=False)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The cost of a right answer of each setting of the runs."""
        return tuple(price for run in self.runs for price in prices(run))

    @property
    def single(self) -> list[MapResult]:
        """Maps of one benchmark."""
        return [one for one in self.maps if not one.map.is_mean]

    @property
    def every(self) -> list[MapResult]:
        """Maps, then the means that are not among them."""
        given = {one.map.name for one in self.maps}
        return [*self.maps, *(one for one in self.means if one.map.name not in given)]

    @property
    def grids(self) -> list[MapResult]:
        """One map for each model and policy: the mean over benchmarks, else the only one."""
        ordered = [*self.single, *(one for one in self.every if one.map.is_mean)]
        return list({(one.map.model, one.map.policy): one for one in ordered}.values())

    @property
    def map_notes(self) -> dict[str, list[MapResult]]:
        """The notes of maps and means, each once, with the maps that have it."""
        by_text: dict[str, list[MapResult]] = {}
        for one in self.every:
            for note in one.notes:
                by_text.setdefault(note.text, []).append(one)
        return by_text

    def to_dict(self) -> Json:
        """The document of `kvatlas describe --json`: percent scale, unknown values None.

        `maps`: one object per map with model, benchmark, metric, policy, axes, cells (how many), problems, samples,
        unmeasured (the most traces of a cell of which the metric is unknown), mean, min, max, peaks, lowest, estimates
        (every cell, see `Cell.to_dict`, with what it loses against the full cache), baselines, omnibus,
        evidence_of_difference, plateau, may_lose, effects, stability, method, notes. `means`: the same for the means
        over benchmarks. `comparisons`: first minus second, in points, p-values adjusted over all of them.
        `recommendation`: the first model's choice, with that of every model under `all`; `vacuous` says why there is
        none. `findings`: what limits what the runs can show, the gravest first. `effects`: one joint test for each axis
        over all benchmarks (and models, for CSV maps), each level against the mean of the others. `per_right_answer`:
        what a right answer of each setting costs, with the ratio to the full cache's.
        """
        choices = [_choice(choice) for choice in self.choices]
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "maps": [one.to_dict() for one in self.maps],
            "means": [one.to_dict() for one in self.means],
            "comparisons": [_comparison(comparison) for comparison in self.comparisons],
            "recommendation": {**(choices[0] if choices else _NO_SETTING), "all": choices},
            "effects": [_pooled(effect) for effect in self.effects],
            "per_right_answer": [{**vars(price), "setting": str(price.setting)} for price in self.prices],
            "notes": [note.text for note in self.notes],
        }


#: An opened run, or the maps of a file.
Source = RunAnalysis | list[Map]


def open_source(
    source: str | Path,
    metric: str | None = None,
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    lose_at_most: float | None = None,
    problems: int | None = None,
    samples: int | None = None,
) -> Source:
    """Open a run (as `RunData.open`), or a CSV map or `published:NAME`, with intervals of the binomial bound."""
    if Path(source).is_dir():
        return RunAnalysis(RunData.open(source, metric, partial, fix, lose_at_most))
    return with_binomial_bounds(read_maps(source, partial, problems, samples))


def bare_maps(source: Source) -> list[Map]:
    """The maps of a source, without regions."""
    return source.untested_maps if isinstance(source, RunAnalysis) else source


def analyse(
    sources: Sequence[str | Path | RunAnalysis | Map],
    *,
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    policy: str | None = None,
    problems: int | None = None,
    samples: int | None = None,
    lose_at_most: float | None = None,
) -> Result:
    """Analyse runs (or their folders), CSV maps, `published:NAME`, and single maps.

    Runs with the same axes are compared with each other as one. `policy` keeps the maps and comparisons of that policy;
    `problems` and `samples` are those of CSV maps without such columns. `lose_at_most` is the margin in points against
    the full cache. Raises KvatlasError for a source that cannot be read, no map, and a map that comes twice.
    """
    margin = margin_from_points(lose_at_most)
    maps: list[Map] = []
    runs: list[RunAnalysis] = []
    for source in sources:
        if isinstance(source, Map):
            maps.append(source)
            continue
        opened = (
            source
            if isinstance(source, RunAnalysis)
            else open_source(source, metric, partial, fix, lose_at_most, problems, samples)
        )
        runs += [opened] if isinstance(opened, RunAnalysis) else []
        maps += bare_maps(opened)
    maps = of_policy(maps, policy)
    _check_distinct(maps)
    compared: list[Comparison] = []
    choices: list[Choice] = []
    analysed: list[RunData] = []
    notes: dict[Note, None] = {}
    by_map: dict[MapName, Verdict] = verdicts_of_maps(maps)
    for run in group_by_axes(runs):
        part = run if policy is None or run.is_adaptive else run.of_policy(policy)
        by_map |= part.verdicts
        choices += part.choices
        notes |= dict.fromkeys([NO_PAIRS] * run.is_adaptive)
        analysed.append(part.run)
        compared += [one for one in run.comparisons if policy is None or policy in one.first or policy in one.second]
    means, remarks = _means(maps)
    margin = runs[0].run.margin if runs else margin
    maps, means = with_regions(maps, by_map, margin), with_regions(means, by_map, margin)
    effects = pooled_effects(maps, by_map)
    choices += choices_of_maps(grids(maps, means), by_map, choices, effects)
    tested = [MapResult(map_, by_map.get(map_.name, Verdict())) for map_ in (*maps, *means)]
    return Result(
        findings=tuple(findings([cell for run in runs for cell in run.cells_of(policy)])),
        maps=tuple(tested[: len(maps)]),
        means=tuple(tested[len(maps) :]),
        comparisons=adjusted(compared),
        choices=tuple(choices),
        notes=(*notes, *remarks),
        effects=tuple(effects),
        runs=tuple(analysed),
    )


def of_policy(maps: Sequence[Map], policy: str | None) -> list[Map]:
    """The maps of a policy, all of them without one; raises KvatlasError without one."""
    if not maps:
        raise KvatlasError("There is no map to describe.")
    kept = [map_ for map_ in maps if policy is None or map_.policy == policy]
    if not kept:
        there = ", ".join(dict.fromkeys(map_.policy or "none named" for map_ in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {there}.")
    return kept


def _check_distinct(maps: Sequence[Map]) -> None:
    for name, count in Counter(map_.name for map_ in maps).items():
        if count > 1:
            raise KvatlasError(
                f"The map {' | '.join(filter(None, name))} was given twice; compare two readings of one map with "
                "`kvatlas compare`."
            )


def _means(maps: Sequence[Map]) -> tuple[list[Map], list[Note]]:
    try:
        return mean_maps(maps), []
    except KvatlasError as error:
        return [], [Note(NoteKind.LEFT_OUT, f"No means over benchmarks: {error}")]


def _p(p: float | None) -> float | None:
    """Return a p-value with four digits: a small one is never 0."""
    return None if p is None or math.isnan(p) else float(f"{p:.4g}")


def _contrast(contrast: Contrast, name: str = "value") -> Json:
    limits = {name: contrast.value, "low": contrast.low, "high": contrast.high}
    known = {key: percent(share) if math.isfinite(share) else None for key, share in limits.items()}
    return {**known, "p": _p(contrast.p)}


def _loses(loss: SettingLoss | None) -> Json:
    names = {"loses": "value", "loses_low": "low", "loses_high": "high", "loses_limit": "limit"}
    return {key: percent(getattr(loss, name)) if loss else None for key, name in names.items()}


def _setting_loss(setting: Setting, loss: SettingLoss, family: LossFamily | None) -> Json:
    among = None if family is None else family.among_compressed(setting.id)
    return {
        "setting": str(setting),
        **_loses(loss),
        "p": _p(loss.p),
        "shown": loss.is_kept,
        "broken": loss.is_broken,
        "joint_limit": percent(loss.joint_limit),
        "traces": loss.traces,
        "compressed": loss.compressed,
        "loses_where_compressed": _contrast(among, "loses") if among else None,
    }


def _required(required: RequiredProblems) -> Json:
    return {
        "setting": str(required.setting),
        "problems": required.problems,
        "needed": required.count,
        "low_loss": percent(required.low_loss),
        "needed_range": [required.at_low, required.at_high],
    }


def _comparison(comparison: Comparison) -> Json:
    names = ("model", "benchmark", "metric", "first", "second", "cells")
    return {
        **{name: getattr(comparison, name) for name in names},
        **_contrast(comparison.difference, "difference"),
        "problems": comparison.difference.problems,
        "pairs": comparison.difference.pairs or None,
        "note": comparison.note or None,
        "p_holm": _p(comparison.p_holm),
        "p_bh": _p(comparison.p_bh),
    }


_NO_SETTING: Mapping[str, Any] = dict.fromkeys(("setting", "value", "low", "high", "kept_tokens_mean"))


def _choice(choice: Choice) -> Json:
    return {
        **_chosen(choice.by_memory, choice),
        "model": choice.model,
        "benchmark": choice.benchmark,
        "candidates": choice.candidates,
        "plateau": choice.members,
        "by_time": _chosen(choice.by_time, choice) if choice.by_time else None,
        "vacuous": choice.vacuous,
        "margin": percent(choice.margin),
        **_loses(choice.loss),
        "shown": choice.shown,
        "losses": [
            _setting_loss(choice.settings[id_], loss, choice.family) for id_, loss in (choice.losses or {}).items()
        ],
        "provable": choice.provable.to_dict() if choice.provable else None,
        "required": _required(choice.required) if choice.required and not choice.shown else None,
        "saving": _saving(choice.saving),
        "behind_highest": percent(choice.behind_highest),
    }


def _saving(saving: Saving | None) -> Json | None:
    """Return what a setting saves of the full cache's memory, and of memory times written tokens, in percent."""
    if saving is None:
        return None
    return {"memory": percent(1 - saving.memory), "work": None if saving.work is None else percent(1 - saving.work)}


def _chosen(cell: Cell | None, choice: Choice) -> Json:
    if cell is None:
        return dict(_NO_SETTING)
    return {
        **cell.to_dict(),
        "may_lose": percent(choice.may_lose.get(cell.setting.id)),
        "kept_tokens_mean": rounded(kv_tokens_of(cell), 3),
        "kept_tokens_measured": cell.mean_kv_tokens is not None,
    }


def _pooled(effect: PooledEffect) -> Json:
    return {
        "axis": effect.axis,
        "over": effect.over,
        "p": _p(effect.p),
        "adjusted_p": _p(effect.adjusted_p),
        "levels": [{"level": level, **_contrast(contrast, "difference")} for level, contrast in effect.levels],
        "maps": effect.maps or None,
        "below": list(effect.below) or None,
    }
