"""The state of an adaptive sweep, replayed from its traces: what is decided about each setting, and what that says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from kvatlas.core import Map, MapName, Note, NoteKind, mean_of
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.maps import mean_cell, mean_map
from kvatlas.stats.estimates.run_data import RunData, margin_of
from kvatlas.stats.estimates.validity import validity
from kvatlas.stats.inference.choice import Choice, cheapest, kv_tokens_of, unless_vacuous, with_ties
from kvatlas.stats.inference.group_sequential import Decision, Seen, cut, decide
from kvatlas.stats.inference.map_tests import Basis, Verdict, is_full
from kvatlas.stats.inference.noninferiority import Loss
from kvatlas.stats.inference.resampling import Need, Test, TestMethod

NO_PAIRS = Note(
    NoteKind.LEFT_OUT,
    "0 paired comparisons: in an adaptive sweep the problems that two settings share depend on their outcomes",
)


@dataclass(frozen=True)
class Standing:
    """One model's sweep so far: its grid settings by id, and what is decided."""

    settings: tuple[str, ...]
    decision: Decision

    @property
    def recommended(self) -> str | None:
        """The id of the cheapest setting that is shown to keep the margin."""
        index = self.decision.recommended
        return None if index is None else self.settings[index]

    @property
    def losses(self) -> dict[str, Loss]:
        """What each setting that was looked at loses, with limits that hold at any look."""
        made = self.decision
        columns = zip(self.settings, made.value, made.low, made.high, made.shown, made.broken, strict=True)
        return {
            setting: Loss(float(value), float(low), float(high), bool(shown), bool(broken))
            for setting, value, low, high, shown, broken in columns
            if not math.isnan(value)
        }


def known(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> tuple[tuple[str, ...], Seen]:
    """One model's grid settings by id, and what is known of them: of problems with all samples of setting and full.

    `orders` are the problems of each benchmark as they come, `sizes` how many in all. What a setting costs is what it
    kept on the first block, so that a later look does not change an earlier decision.
    """
    by_setting: dict[str, dict[str, CellTraces]] = {}
    full: dict[str, CellTraces] = {}
    for cell in cells:
        if is_full(cell):
            full[cell.expected.benchmark] = cell
        elif not cell.expected.baseline:
            by_setting.setdefault(cell.expected.setting.id, {})[cell.expected.benchmark] = cell
    places = [
        (number, stratum, name, orders[name][index] if index < len(orders[name]) else "")
        for number in range(blocks)
        for stratum, name in enumerate(orders)
        for index in range(sizes[name])[cut(sizes[name], blocks, number)]
    ]
    block, strata = (np.array([entry[k] for entry in places]) for k in (0, 1))
    theirs = np.array([_mean(full.get(name), problem) for *_, name, problem in places])
    means = np.array([[_mean(own.get(name), problem) for *_, name, problem in places] for own in by_setting.values()])
    first = {entry[2:] for entry in places if not entry[0]}
    costs = np.array([_kept(own, first) for own in by_setting.values()])
    seen = Seen(means.reshape(-1, len(places)) - theirs, strata, block, [sizes[name] for name in orders], blocks, costs)
    return tuple(by_setting), seen


def _mean(cell: CellTraces | None, problem: str) -> float:
    """The mean grade of a problem; NaN unless all of its samples are known."""
    if cell is None or problem not in cell.place:
        return math.nan
    grades = cell.grades[cell.place[problem]].tolist()
    return math.fsum(grades) / len(grades)


def _kept(cells: Mapping[str, CellTraces], places: Set[tuple[str, str]]) -> float:
    """The mean KV tokens of a setting on some problems; infinite where it has none of them."""
    kept = [
        tokens
        for name, cell in cells.items()
        for problem, row in zip(cell.problems, cell.traces["mean_kv_tokens"], strict=True)
        for tokens in row[~np.isnan(row)].tolist()
        if (name, problem) in places
    ]
    return math.fsum(kept) / len(kept) if kept else math.inf


def standings(manifest: Manifest, cells: Sequence[CellTraces], margin: float | None = None) -> dict[str, Standing]:
    """The standing of each model of an adaptive run, by its own margin where none is given."""
    allocation = manifest.allocation
    orders: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        expected = cell.expected
        orders[expected.benchmark] = max(orders.get(expected.benchmark, ()), expected.problems, key=len)
    margin = margin_of(manifest.spec) if margin is None else margin
    by_model: dict[str, list[CellTraces]] = {}
    for cell in cells:
        by_model.setdefault(cell.expected.model, []).append(cell)
    data = {model: known(own, orders, allocation["problems"], allocation["blocks"]) for model, own in by_model.items()}
    return {model: Standing(settings, decide(seen, margin)) for model, (settings, seen) in data.items()}


def adaptive_verdicts(by_model: Mapping[str, Standing], run: RunData, maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """The verdict of each mean map (of the only benchmark's map where there is one) of an adaptive run.

    It holds what each cell loses against the full cache, over all policies together; nothing else is tested.
    """
    groups: dict[tuple[str, str], list[Map]] = {}
    for map_ in maps:
        groups.setdefault((map_.model, map_.policy), []).append(map_)
    by_map: dict[MapName, Verdict] = {}
    for (model, policy), parts in groups.items():
        if model not in by_model:
            continue
        mean = mean_map(parts) if len(parts) > 1 else parts[0]
        losses = by_model[model].losses
        of_cells = {
            cell.coord(run.axes): losses[cell.expected.setting.id]
            for name, group in run.groups.items()
            for cell in group
            if (name.model, name.policy) == (model, policy) and cell.expected.setting.id in losses
        }
        by_map[mean.name] = _verdict(by_model[model], mean, of_cells)
    return by_map


def _verdict(standing: Standing, mean: Map, losses: Mapping[tuple[object, object], Loss]) -> Verdict:
    values = np.array([cell.estimate.value for cell in mean.cells.values()])
    coords = list(mean.cells)
    text = (
        f"adaptive: of {len(standing.settings)} settings of all policies {int(standing.decision.shown.sum())} are "
        f"shown to keep the margin and {int(standing.decision.broken.sum())} to break it"
    )
    return Verdict(
        peaks=tuple(coord for coord, value in zip(coords, values, strict=True) if value >= values.max() - 1e-9),
        lowest=coords[int(values.argmin())],
        omnibus=Test(0.0, 1.0, TestMethod.GROUP_SEQUENTIAL),
        plateau=(),
        p_best={},
        may_lose={},
        effects=(),
        peak_share=None,
        spread=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        noise=None,
        need=Need(None, None),
        basis=Basis.GROUP_SEQUENTIAL,
        notes=(Note(NoteKind.ADAPTIVE, text),),
        losses=losses,
    )


def adaptive_choices(by_model: Mapping[str, Standing], cells: Sequence[CellTraces], margin: float) -> list[Choice]:
    """What to choose in an adaptive run: the cheapest of each model's settings that are shown to keep the margin."""
    chosen = []
    for model, standing in by_model.items():
        own: dict[str, list[CellTraces]] = {}
        for cell in cells:
            if cell.expected.model == model and not cell.expected.baseline and cell.stored:
                own.setdefault(cell.expected.setting.id, []).append(cell)
        losses = standing.losses
        best = (
            mean_cell([cell.cell() for cell in own[standing.recommended]]) if standing.recommended is not None else None
        )
        shown = [own[name] for name, loss in losses.items() if loss.shown]
        fast = [mean_cell([cell.cell() for cell in group]) for group in shown]
        benchmarks = list(dict.fromkeys(cell.expected.benchmark for cell in cells))
        choice = Choice(
            model,
            benchmarks[0] if len(benchmarks) == 1 else mean_of(len(benchmarks)),
            len(standing.settings),
            0,
            best if best is None or kv_tokens_of(best) is not None else None,
            cheapest(fast, [cell.seconds_mean for cell in fast]),
            {},
            margin=margin,
            losses=losses,
            settings={name: group[0].expected.setting for name, group in own.items()},
        )
        grid = [cell for cell in cells if cell.expected.model == model and not cell.expected.baseline]
        choice = unless_vacuous(choice, validity(grid))
        chosen.append(with_ties(choice, [cell for group in shown for cell in group]))
    return chosen
