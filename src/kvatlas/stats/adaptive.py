"""Adaptive sweeps: what their traces so far decide, as verdicts and choices (`kvatlas.stats.numerics.sequential`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvatlas.core import Map, MapName, Note, NoteKind, grouped
from kvatlas.results.manifest import Manifest
from kvatlas.stats.choice import Choice, choice_of
from kvatlas.stats.losses import LossFamily, SettingLoss, is_full
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.numerics.sequential import Decision, Seen, block_of_problems, decisions, in_order
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.verdicts import Basis, Verdict

NO_PAIRS = Note(
    NoteKind.LEFT_OUT,
    "0 paired comparisons: in an adaptive sweep the problems that two settings share depend on their outcomes",
)


def known(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> tuple[tuple[str, ...], Seen]:
    """One model's grid settings by id, and the differences on problems with all samples of setting and full cache.

    `orders` are the problems of each benchmark as they come, `sizes` how many in all. A setting costs the tokens that
    it kept on the first block, so that a later look does not change an earlier decision.
    """
    problems = {name: (*order, *("",) * (sizes[name] - len(order))) for name, order in orders.items()}
    by_setting = grouped(select(cells, baseline=False), lambda cell: cell.setting.id)
    full = _means([cell for cell in cells if is_full(cell)], problems)
    own = np.reshape([_means(cells, problems) for cells in by_setting.values()], (-1, len(full)))
    first = {name: every[block_of_problems(len(every), blocks, 0)] for name, every in problems.items()}
    costs = np.array([_kept(cells, first) for cells in by_setting.values()])
    places = np.split(np.arange(len(full)), np.cumsum([sizes[name] for name in orders])[:-1])
    return tuple(by_setting), in_order(own - full, places, costs, blocks)[0]


def _means(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> Floats:
    """The mean grade of each benchmark's problems; NaN unless all of its samples are known."""
    known = {cell.benchmark: cell.in_order(cell.grades.mean(1), problems[cell.benchmark]) for cell in cells}
    return np.concatenate([known.get(name, np.full(len(own), math.nan)) for name, own in problems.items()])


def _kept(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> float:
    """The mean KV tokens of a setting on some problems; infinite where it has none of them."""
    tokens = [cell.in_order(cell.traces["mean_kv_tokens"], problems[cell.benchmark]).ravel() for cell in cells]
    kept = [number for own in tokens for number in own.tolist() if not math.isnan(number)]
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
    """The state of each model of an adaptive run."""
    sizes, blocks = manifest.allocation["problems"], manifest.allocation["blocks"]
    by_benchmark = grouped((cell.expected for cell in cells), lambda cell: cell.benchmark)
    orders = {name: max((cell.problems for cell in own), key=len) for name, own in by_benchmark.items()}
    found = {}
    for model, own in grouped(cells, lambda cell: cell.model).items():
        settings, seen = known(own, orders, sizes, blocks)
        *_, last = decisions(seen, margin)
        found[model] = settings, last
    return found


def adaptive_verdicts(by_model: Standings, maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """The verdict of each mean map, or only map, of an adaptive run: losses against the full cache and nothing else."""
    parts = {(map_.model, map_.policy): map_ for map_ in (*maps, *mean_maps(maps)) if map_.model in by_model}
    by_map: dict[MapName, Verdict] = {}
    for mean in parts.values():
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
    """The choice for each model of an adaptive run; the costs of the first block decide which setting keeps least."""
    made = []
    for model, (settings, decision) in by_model.items():
        among = [] if decision.recommended is None else [settings[decision.recommended]]
        grid = select(cells, model=model, baseline=False)
        family = LossFamily(margin, losses_of_decision(decision, settings))
        made.append(choice_of(model, grid, family, among=among))
    return made
