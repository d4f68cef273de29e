"""Losses of the settings of a run against its full cache."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from kvatlas.core import Setting
from kvatlas.former_names import former_names
from kvatlas.policies import budget_in_tokens, floor_ratio, window_in_tokens
from kvatlas.stats.maps import with_means
from kvatlas.stats.numerics.arrays import Contrast, Flags, normal_quantile
from kvatlas.stats.numerics.bounded import interval, mean_difference
from kvatlas.stats.numerics.losses import Loss, losses
from kvatlas.stats.numerics.planning import needed_problems
from kvatlas.stats.paired import CellPair, PairedValues, paired_values
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces
from kvatlas.stats.validity import count_compressed

if not TYPE_CHECKING:
    # Type checkers know the present names alone.
    __getattr__ = former_names(__name__, {"Difference": "kvatlas.stats.paired:Difference"})

#: The setting against which losses are counted.
FULL = Setting.from_parameters("full")


def is_full(cell: CellTraces) -> bool:
    """Return whether the cell is the full cache."""
    return cell.setting == FULL


@dataclass(frozen=True)
class SettingLoss(Loss):
    """The loss of a setting, and how much of it rests on traces that were compressed.

    Of its `traces` under a KV budget so many were `compressed`; the others equal the full cache's and cannot lose.
    """

    traces: int = 0
    compressed: int = 0


@dataclass(frozen=True)
class RequiredProblems:
    """The problems in all that prove a setting to keep the margin, with a power of 0.8 and the same mix of benchmarks.

    `count` is that for the observed loss, `at_low` and `at_high` for the ends of its 80 % interval, `low_loss` the
    lower end. None where that loss is not below the margin, or would take more than 20 times the present problems.
    """

    setting: Setting
    loss: SettingLoss
    problems: int
    count: int | None
    low_loss: float
    at_low: int | None
    at_high: int | None


@dataclass(frozen=True)
class LossFamily:
    """The losses of all grid settings of a model on the same benchmarks: the family for which 5 % holds.

    `by_setting` has those that share problems of each benchmark with the full cache. `sequences` are the orders, by
    setting id, in which they are tested (`kvatlas.stats.numerics.losses`), `sizes` the problems of each benchmark.
    `paired` has the differences to the full cache in the order of `settings`, and `has_compressed` [settings, problems]
    tells problems with a compressed trace. An adaptive sweep has its own limits, no sequences and no differences.
    """

    margin: float
    by_setting: Mapping[str, SettingLoss]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    sequences: Sequence[Sequence[str]] = ()
    sizes: Sequence[int] = ()
    paired: PairedValues | None = field(default=None, repr=False, compare=False)
    has_compressed: Flags = field(default_factory=lambda: np.zeros((0, 0), bool), repr=False, compare=False)

    def among_compressed(self, setting: str) -> Contrast | None:
        """Return the loss of a setting on the problems with a compressed trace, over the benchmarks that have any.

        None where there is no such problem, or no other.
        """
        if self.paired is None:
            return None
        row = list(self.settings).index(setting)
        values = self.paired.values[row]
        chosen = self.has_compressed[row] & ~np.isnan(values)
        if not chosen.any() or chosen.sum() == np.count_nonzero(~np.isnan(values)):
            return None
        # Benchmarks without a compressed trace are left out, so the others are numbered anew.
        strata = np.unique(self.paired.strata[chosen], return_inverse=True)[1]
        return mean_difference(-values[chosen], strata)

    def required_among(self, settings: Container[str]) -> RequiredProblems | None:
        """Return the one of these settings, at which a sequence stopped, that takes the fewest problems.

        None where all settings are proven, and where each setting at which a sequence stopped is proven to lose more
        than the margin, or has no loss.
        """
        found = [required for setting, required in self._required_at_stops.items() if setting in settings]
        return min(found, key=_problems_for_order, default=None)

    @cached_property
    def _required_at_stops(self) -> dict[str, RequiredProblems]:
        required = {setting: self._required(setting) for setting in self._stops()}
        return {setting: problems for setting, problems in required.items() if problems is not None}

    def _stops(self) -> Iterator[str]:
        """Yield the first setting of each sequence that is not proven to keep the margin."""
        for sequence in self.sequences:
            for setting in sequence:
                loss = self.by_setting.get(setting)
                if loss is None or not loss.is_kept:
                    yield setting
                    break

    def _required(self, setting: str) -> RequiredProblems | None:
        loss = self.by_setting.get(setting)
        if loss is None or loss.is_broken or self.paired is None:
            return None
        lost = -self.paired.values[list(self.settings).index(setting)]
        has_value = ~np.isnan(lost)
        pilot = lost[has_value]
        strata = self.paired.strata[has_value]
        low, high = interval(pilot[None], -1.0, 1.0, normal_quantile(0.1), strata)
        # Of the loss, then of the ends of its 80 % interval.
        count, at_low, at_high = [
            needed_problems(pilot, strata, value, self.margin, len(self.sequences))
            for value in (loss.value, float(low[0]), float(high[0]))
        ]
        return RequiredProblems(self.settings[setting], loss, len(pilot), count, float(low[0]), at_low, at_high)


def _problems_for_order(required: RequiredProblems) -> tuple[float, float, float]:
    """Return the order of required problems: the observed loss first, then its ends."""
    count = math.inf if required.count is None else required.count
    at_low = math.inf if required.at_low is None else required.at_low
    return count, at_low, required.loss.limit


#: The losses of a model on some benchmarks, of a map or of a mean.
GridLosses = Mapping[tuple[str, frozenset[str]], LossFamily]


def family_of(groups: Sequence[Sequence[CellTraces]]) -> tuple[str, frozenset[str]]:
    """Return the model and the benchmarks of the cells of a map or mean."""
    return groups[0][0].model, frozenset(group[0].benchmark for group in groups)


def grid_by_benchmark(run: RunData) -> dict[str, dict[str, list[CellTraces]]]:
    """Return the grid cells of all policies, by model and benchmark."""
    grid: dict[str, dict[str, list[CellTraces]]] = {}
    for name, group in run.groups.items():
        grid.setdefault(name.model, {}).setdefault(name.benchmark, []).extend(group)
    return grid


def losses_of(run: RunData) -> GridLosses:
    """Return the losses of the grid's settings, on the benchmarks of each map and of each mean.

    A family holds all settings of a model on these benchmarks, whatever their policies. Families without a full cache
    on each benchmark are missing.
    """
    full_caches = _full_caches(run)
    grid = grid_by_benchmark(run)
    families: dict[tuple[str, frozenset[str]], LossFamily] = {}
    for model, benchmarks in dict.fromkeys(map(family_of, with_means(run.groups).values())):
        names = [name for name in grid[model] if name in benchmarks]
        full = [full_caches.get((model, name)) for name in names]
        measured = [cell for cell in full if cell is not None]
        if len(measured) == len(names):
            families[model, benchmarks] = _family([grid[model][name] for name in names], measured, run.margin)
    return families


def _full_caches(run: RunData) -> dict[tuple[str, str], CellTraces]:
    """Return the measured full caches by model and benchmark."""
    return {(cell.model, cell.benchmark): cell for cell in run.cells if is_full(cell) and cell.measured}


def _family(benchmarks: Sequence[Sequence[CellTraces]], full: Sequence[CellTraces], margin: float) -> LossFamily:
    """Return the losses of the settings of the cells of each benchmark against its full cache."""
    cells = {cell.setting.id: cell for cell in chain.from_iterable(benchmarks)}
    ids = list(cells)
    pairs = [_pairs(group, reference, ids) for group, reference in zip(benchmarks, full, strict=True)]
    paired = paired_values(pairs)
    sequences = _sequences(list(cells.values()))
    by_setting = {}
    has_compressed = np.zeros(paired.values.shape, bool)
    for row, loss in enumerate(losses(paired.values, paired.strata, margin, sequences)):
        pairs_of_setting = [of_benchmark[row] for of_benchmark in pairs]
        of_setting = [pair[0] for pair in pairs_of_setting if pair is not None]
        has_compressed[row] = _problems_with_compressed(of_setting, paired)
        if loss is not None:
            traces, compressed = count_compressed(of_setting)
            by_setting[ids[row]] = SettingLoss(**vars(loss), traces=traces, compressed=compressed)
    return LossFamily(
        margin,
        by_setting,
        {setting: cell.setting for setting, cell in cells.items()},
        [list(map(ids.__getitem__, sequence)) for sequence in sequences],
        np.bincount(paired.strata).tolist(),
        paired,
        has_compressed,
    )


def _pairs(group: Iterable[CellTraces], full: CellTraces, ids: Iterable[str]) -> list[CellPair | None]:
    """Return the cells of a benchmark with its full cache, in the order of setting ids; None where there is no cell."""
    by_id = {cell.setting.id: cell for cell in group}
    return [(by_id[setting], full) if setting in by_id else None for setting in ids]


def _problems_with_compressed(cells: Sequence[CellTraces], paired: PairedValues) -> Flags:
    """Return for each problem whether a trace of one of the cells of a setting was compressed."""
    found = set()
    for cell in cells:
        is_compressed = np.asarray((cell.traces["compressions"] > 0).any(1))
        problems = list(cell.place)
        found |= {(cell.benchmark, problems[place]) for place in np.flatnonzero(is_compressed).tolist()}
    return np.array([key in found for key in paired.problems], bool)


def _sequences(cells: Sequence[CellTraces]) -> list[list[int]]:
    """Return the settings of each policy in the order in which they are tested.

    From the one that keeps most KV bytes by its own numbers down, then those whose numbers do not say, as in the spec.
    """
    by_policy: dict[str, list[tuple[float, int]]] = {}
    for row, cell in enumerate(cells):
        by_policy.setdefault(cell.setting.policy, []).append((-nominal_bytes(cell), row))
    return [list(map(itemgetter(1), sorted(ordered))) for ordered in by_policy.values()]


def nominal_bytes(cell: CellTraces) -> float:
    """Return the KV bytes that a setting keeps by its own numbers, before any data; -infinity where it does not say.

    Tokens where bytes are unknown. For a full cache of some bits, the bytes of one token.
    """
    token_bytes, tail_bytes = cell.expected.kv_bytes or (1, 0)
    if cell.setting.policy == FULL.policy:
        return float(token_bytes)
    kept = kept_by_rule(cell.setting, token_bytes, tail_bytes)
    return -math.inf if kept is None else kept * token_bytes + tail_bytes


def kept_by_rule(setting: Setting, token_bytes: int = 0, tail_bytes: int = 0) -> float | None:
    """Return the KV tokens that a compression leaves by the setting's own numbers; None where they do not say.

    That is local_window + floor(ratio * (kv_budget - local_window)) (arXiv 2601.18383), or the budget with `every`. A
    budget in bytes holds tokens of `token_bytes` each, and `tail_bytes` for each sequence.
    """
    values = setting.values
    budget = values.get("kv_budget")
    window = values.get("local_window")
    ratio = values.get("ratio")
    if isinstance(budget, str) and token_bytes > 1:
        budget = budget_in_tokens(budget, token_bytes, tail_bytes)
    if not isinstance(budget, int | float):
        return None
    if values.get("every") and values.get("budget_over") != "thinking":
        return float(budget)
    if window is None or ratio is None:
        return None
    window = window_in_tokens(window, int(budget))
    return float(window + floor_ratio(ratio, budget - window))
