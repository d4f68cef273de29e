"""Adaptive sweeps: what their traces so far decide, as verdicts and choices (`kvatlas.stats.numerics.sequential`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import numpy as np

from kvatlas.core import Map, MapName, Note, NoteKind, grouped
from kvatlas.results.manifest import Manifest
from kvatlas.stats.choice import Choice, choice_of
from kvatlas.stats.losses import LossFamily, SettingLoss, is_full
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.numerics.sequential import Decision, TracesSoFar, block_slice, decisions, in_order
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.verdicts import Basis, Verdict

NO_PAIRS = Note(
    NoteKind.LEFT_OUT,
    "0 paired comparisons: in an adaptive sweep the problems that two settings share depend on their outcomes",
)


def observed_differences(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> tuple[tuple[str, ...], TracesSoFar]:
    """Return one model's grid settings by id, and their differences to the full cache so far.

    A problem counts if setting and full cache have all of its samples. `orders` are the problems of each benchmark as
    they come, `sizes` how many in all.
    """
    problems = {}
    for benchmark, order in orders.items():
        # Problems that no cell is promised yet have no name.
        problems[benchmark] = [*order, *repeat("", sizes[benchmark] - len(order))]
    by_setting = grouped(select(cells, baseline=False), lambda cell: cell.setting.id)
    full = _means([cell for cell in cells if is_full(cell)], problems)
    of_settings = np.reshape([_means(of_setting, problems) for of_setting in by_setting.values()], (-1, len(full)))
    # Costs are those of the first block, so that a later look does not change an earlier decision.
    first_block = {name: names[block_slice(len(names), blocks, 0)] for name, names in problems.items()}
    costs = np.array([_kept_tokens(of_setting, first_block) for of_setting in by_setting.values()])
    ends = np.cumsum([sizes[benchmark] for benchmark in orders])
    places = np.split(np.arange(len(full)), ends[:-1])
    traces, _ = in_order(of_settings - full, places, costs, blocks)
    return tuple(by_setting), traces


def _means(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> Floats:
    """Return the mean grade of each benchmark's problems; NaN unless all of its samples are known."""
    by_benchmark = {}
    for cell in cells:
        by_benchmark[cell.benchmark] = cell.in_order(cell.grades.mean(1), problems[cell.benchmark])
    unknown = {benchmark: np.full(len(names), math.nan) for benchmark, names in problems.items()}
    return np.concatenate([by_benchmark.get(benchmark, unknown[benchmark]) for benchmark in problems])


def _kept_tokens(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> float:
    """Return the mean KV tokens of a setting on some problems; infinite if it has none of them."""
    kept: list[float] = []
    for cell in cells:
        tokens = cell.in_order(cell.traces["mean_kv_tokens"], problems[cell.benchmark])
        kept += tokens[~np.isnan(tokens)].tolist()
    return math.fsum(kept) / len(kept) if kept else math.inf


def losses_of_decision(decision: Decision, settings: Sequence[str]) -> dict[str, SettingLoss]:
    """Return the loss of each of the settings, as named, that was looked at, with limits that hold at any look."""
    found = {}
    for row, setting in enumerate(settings):
        if not math.isnan(decision.value[row]):
            found[setting] = SettingLoss(
                float(decision.value[row]),
                float(decision.low[row]),
                float(decision.high[row]),
                limit=float(decision.high[row]),
                joint_limit=float(decision.high[row]),
                is_kept=bool(decision.kept[row]),
                is_broken=bool(decision.broken[row]),
            )
    return found


#: By model the ids of an adaptive sweep's grid settings, and the last decision on them.
Standings = Mapping[str, tuple[Sequence[str], Decision]]


def standings(manifest: Manifest, cells: Sequence[CellTraces], margin: float) -> Standings:
    """Return the state of each model of an adaptive run."""
    sizes = manifest.allocation["problems"]
    blocks = manifest.allocation["blocks"]
    orders: dict[str, Sequence[str]] = {}
    for cell in cells:
        # The cells of a benchmark have the first problems of one order; the longest one has them all.
        orders[cell.benchmark] = max(orders.get(cell.benchmark, ()), cell.expected.problems, key=len)
    found = {}
    for model, of_model in grouped(cells, lambda cell: cell.model).items():
        settings, traces = observed_differences(of_model, orders, sizes, blocks)
        *_, last = decisions(traces, margin)
        found[model] = settings, last
    return found


def adaptive_verdicts(by_model: Standings, maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """Return the verdict of each mean map, or only map, of an adaptive run.

    It holds losses against the full cache and nothing else.
    """
    # A mean replaces the maps of its benchmarks.
    by_policy = {(map_.model, map_.policy): map_ for map_ in (*maps, *mean_maps(maps)) if map_.model in by_model}
    by_map: dict[MapName, Verdict] = {}
    for mean in by_policy.values():
        settings, decision = by_model[mean.model]
        coords = {cell.setting.id: coord for coord, cell in mean.cells.items()}
        values = [cell.estimate.value for cell in mean.cells.values()]
        text = (
            f"adaptive: of {len(settings)} settings of all policies, {int(decision.kept.sum())} are proven to lose at "
            f"most the margin and {int(decision.broken.sum())} to lose more"
        )
        losses = losses_of_decision(decision, settings)
        by_map[mean.name] = Verdict(
            Basis.GROUP_SEQUENTIAL,
            spread=float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            notes=(Note(NoteKind.ADAPTIVE, text),),
            losses={coords[setting]: loss for setting, loss in losses.items() if setting in coords},
        )
    return by_map


def adaptive_choices(by_model: Standings, cells: Sequence[CellTraces], margin: float) -> list[Choice]:
    """Return the choice for each model of an adaptive run.

    The costs of the first block decide which setting keeps least.
    """
    found = []
    for model, (settings, decision) in by_model.items():
        among = [] if decision.recommended is None else [settings[decision.recommended]]
        grid = select(cells, model=model, baseline=False)
        family = LossFamily(margin, losses_of_decision(decision, settings))
        found.append(choice_of(model, grid, family, among=among))
    return found
