"""Verdicts on a map: evidence of any difference, the plateau of the best, effects of the axes, what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from kvatlas.core import CellCoord, MapName, Note, NoteKind, Setting, grouped, mean_of
from kvatlas.policies import share, tokens_of
from kvatlas.stats import inference
from kvatlas.stats.inference import Contrast, Test
from kvatlas.stats.intervals import LEVEL, Floats
from kvatlas.stats.losses import SettingLoss, losses
from kvatlas.stats.run_data import Axes, RunData
from kvatlas.stats.table import CellTraces, GradeMatrix, aligned, matrix

T = TypeVar("T")
#: The setting against which losses are counted.
FULL = Setting.of("full")
#: Losses by setting id: of a model on these benchmarks.
GridLosses = Mapping[tuple[str, frozenset[str]], Mapping[str, SettingLoss]]


class Basis(StrEnum):
    """The data behind a verdict."""

    TRACES = "paired by problem on all traces"
    BOUND = "binomial bound: as if all samples of the same problems were independent draws of equal difficulty"
    GROUP_SEQUENTIAL = (
        "losses of an adaptive sweep against the full cache, on the mean over benchmarks; valid at any look"
    )


@dataclass(frozen=True)
class Effect:
    """The main effect of one axis: each level against the mean of the others, with limits that hold together."""

    axis: str
    levels: tuple[tuple[Any, Contrast], ...]


@dataclass(frozen=True)
class Verdict:
    """The tests of one map. Shares in [0, 1]; parts that were not tested are None or empty, `basis` if nothing was.

    `omnibus` tests "all cells equal". Without a full cache `plateau` holds the cells that are statistically tied with
    the best, `may_lose` by how much a cell may be below the best with 95 % confidence. `spread` is the standard
    deviation over cells, `noise` that by chance alone. `losses` are those against the full cache.
    """

    basis: Basis | None = None
    omnibus: Test | None = None
    effects: tuple[Effect, ...] = ()
    spread: float | None = None
    noise: float | None = None
    plateau: tuple[CellCoord, ...] = ()
    p_best: Mapping[CellCoord, float] = field(default_factory=dict)
    may_lose: Mapping[CellCoord, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    losses: Mapping[CellCoord, SettingLoss] | None = None

    @property
    def evidence(self) -> bool | None:
        """True if there is evidence of any difference between the cells, at 5 %; None where that was not tested."""
        return None if self.omnibus is None else self.omnibus.p < LEVEL

    @property
    def most_lost(self) -> float | None:
        """By how much a cell of the plateau may at most be below the best."""
        return max((self.may_lose.get(coord, 0.0) for coord in self.plateau), default=None)


def by_benchmark(run: RunData) -> dict[str, dict[str, list[CellTraces]]]:
    """The grid cells of all policies, by model and benchmark."""
    grid: dict[str, dict[str, list[CellTraces]]] = {}
    for name, group in run.groups.items():
        grid.setdefault(name.model, {}).setdefault(name.benchmark, []).extend(group)
    return grid


def losses_of(run: RunData) -> GridLosses:
    """The losses of the grid's settings against the full cache, on the benchmarks of each map and of each mean.

    The limits hold over all settings of a model on these benchmarks together, whatever their policies.
    """
    full = {(cell.model, cell.benchmark): cell for cell in run.cells if is_full(cell)}
    grid, made = by_benchmark(run), dict[tuple[str, frozenset[str]], dict[str, SettingLoss]]()
    for model, on in dict.fromkeys(map(_family, with_means(run.groups).values())):
        named = [name for name in grid[model] if name in on and (model, name) in full and full[model, name].measured]
        settings = {cell.setting.id: cell for name in named for cell in grid[model][name]}
        if len(named) < len(on):
            continue
        parts, levels, samples = [], [], []
        for name in named:
            own = {cell.setting.id: cell for cell in grid[model][name]}
            _, values = aligned([full[model, name], *(own[setting] for setting in settings if setting in own)])
            both = values[:, 1:] - values[:, :1]
            count = (~np.isnan(both)).sum(2)
            means = np.where(count > 0, np.nansum(both, axis=2) / np.maximum(count, 1), math.nan)
            part = np.full((len(settings), len(values)), math.nan)
            part[[setting in own for setting in settings]] = means.T
            parts.append(part)
            levels.append(np.nanmean(values[:, 0]))
            samples.append(int(count[count > 0].min(initial=values.shape[2])))
        strata = np.repeat(np.arange(len(parts)), [part.shape[1] for part in parts])
        found = losses(
            np.concatenate(parts, axis=1),
            strata,
            run.margin,
            reference=float(np.mean(levels)),
            samples=min(samples),
            chains=_by_cost(list(settings.values())),
        )
        made[model, on] = {setting: loss for setting, loss in zip(settings, found, strict=True) if loss is not None}
    return made


def _by_cost(cells: Sequence[CellTraces]) -> list[list[int]]:
    """The settings of each policy, from the one that keeps most KV bytes down; of those whose cost no data decide."""
    chains: dict[str, list[tuple[float, int]]] = {}
    for number, cell in enumerate(cells):
        token, beside = cell.expected.kv_bytes or (1, 0)
        kept = kept_by_rule(cell.setting, token, beside)
        if kept is not None:
            chains.setdefault(cell.setting.policy, []).append((-kept * token - beside, number))
    return [[number for _, number in sorted(chain)] for chain in chains.values()]


def kept_by_rule(setting: Setting, token: int = 0, beside: int = 0) -> float | None:
    """Return the KV tokens that a compression leaves by the setting's own numbers; None where they do not say.

    That is local_window + floor(ratio * (kv_budget - local_window)) (arXiv 2601.18383), or the budget with `every`. A
    budget in bytes holds tokens of `token` bytes, with `beside` bytes for each sequence.
    """
    values = setting.values
    budget, window, ratio = (values.get(name) for name in ("kv_budget", "local_window", "ratio"))
    if isinstance(budget, str) and token > 1:
        budget = tokens_of(budget, token, beside)
    if not isinstance(budget, int | float):
        return None
    if values.get("every") and values.get("budget_over") != "thinking":
        return float(budget)
    if window is None or ratio is None:
        return None
    return float(window + share(ratio, budget - window))


def is_full(cell: CellTraces) -> bool:
    """True for the full cache next to the grid."""
    return cell.baseline and cell.setting == FULL


def with_means(maps: Mapping[MapName, T]) -> dict[MapName, list[T]]:
    """Each map with its own value alone, then each mean over benchmarks with the values of its maps."""
    several = [own for own in grouped(maps, lambda name: (name.model, name.policy)).values() if len(own) > 1]
    means = {MapName(own[0].model, mean_of(len(own)), own[0].policy): [maps[name] for name in own] for own in several}
    return {name: [value] for name, value in maps.items()} | means


def _family(groups: Sequence[Sequence[CellTraces]]) -> tuple[str, frozenset[str]]:
    """The model and the benchmarks of a map or mean."""
    return groups[0][0].model, frozenset(group[0].benchmark for group in groups)


def verdicts(run: RunData, losses: GridLosses) -> dict[MapName, Verdict]:
    """The verdict of each map, and of the mean over benchmarks, with their part of the `losses`; for fixed sweeps.

    Maps without a problem that all their cells have are missing.
    """
    by_map: dict[MapName, Verdict] = {}
    for name, groups in with_means(run.groups).items():
        cells = matrix([{cell.coord(run.axes): cell for cell in group} for group in groups])
        if cells is not None:
            lost = losses.get(_family(groups))
            at = {cell.setting.id: cell.coord(run.axes) for cell in groups[0]}
            own = None if lost is None else {at[id_]: loss for id_, loss in lost.items() if id_ in at}
            by_map[name] = replace(verdict(cells, run.axes), losses=own)
    return by_map


def verdict(cells: GradeMatrix, axes: Axes) -> Verdict:
    """The verdict on a table whose columns are pairs of values of the two `axes`."""
    places: list[CellCoord] = list(cells.columns)
    values = inference.weights(cells.strata) @ cells.means
    rows = [row for _, _, own in levels_of(places, axes) for row in own]
    test = inference.omnibus(cells.means, cells.strata, np.array(rows) if rows else None)

    def measure(rows: Floats) -> list[Contrast]:
        return inference.joint_contrasts(cells.means, cells.strata, rows, samples=cells.samples, flip=True)

    text = f"{cells.left_out} problems that not every cell has are left out of the tests"
    left = (Note(NoteKind.LEFT_OUT, text),) if cells.left_out else ()
    return Verdict(Basis.TRACES, test, effects(places, axes, measure), *spread_and_noise(values, test), notes=left)


def spread_and_noise(values: Floats, test: Test) -> tuple[float, float]:
    """The standard deviation over cells, and what chance alone would give by a test."""
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return spread, spread / math.sqrt(test.statistic) if test.statistic > 0 else 0.0


def levels_of(places: Sequence[CellCoord], axes: Axes) -> list[tuple[str, list[Any], list[Floats]]]:
    """Each axis with two or more levels: its name, the levels, and for each the coefficients of its effect over cells.

    None unless every level of one axis meets every level of the other, so that effects are not mixed.
    """
    levels = [list(dict.fromkeys(coord[side] for coord in places)) for side in (0, 1)]
    if len(places) < len(levels[0]) * len(levels[1]):
        return []
    found = []
    for side, axis in enumerate(axes):
        ordered = all(isinstance(level, int | float) for level in levels[side])
        ranks = sorted(levels[side]) if ordered else levels[side]
        if len(ranks) > 1:
            of_cell = [ranks.index(coord[side]) for coord in places]
            found.append((axis, ranks, [inference.level_effect(of_cell, rank) for rank in range(len(ranks))]))
    return found


def effects(places: Sequence[CellCoord], axes: Axes, measure: Callable[[Floats], list[Contrast]]) -> tuple[Effect, ...]:
    """The main effects of both axes; `measure` gives the contrasts of rows of coefficients over cells."""
    return tuple(
        Effect(axis, tuple(zip(levels, measure(np.array(rows)), strict=True)))
        for axis, levels, rows in levels_of(places, axes)
    )
