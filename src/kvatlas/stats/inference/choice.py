"""What to choose: the cheapest setting that is statistically tied with the best, by KV memory and by measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvatlas.core import Cell, Map, MapName, Setting, Validity, mean_of
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.maps import mean_cell
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.estimates.validity import validity
from kvatlas.stats.inference import resampling
from kvatlas.stats.inference.map_tests import Verdict, table
from kvatlas.stats.inference.resampling import Contrast


@dataclass(frozen=True)
class Choice:
    """The cheapest settings on a plateau.

    `candidates` settings of the grid were compared, `members` of them are on the plateau. `by_memory` is the one with
    the fewest KV tokens kept on average (by the rule's arithmetic on a CSV map), `by_time` the one with the least
    measured time a trace; None where the cost is unknown. `may_lose` is by how much each may be below the best of the
    grid with 95 % confidence, `against` by how much a chosen one is ahead of each baseline, by setting id and baseline.
    `vacuous` says, as a clause, why nothing is chosen: the traces of all candidates cannot tell them apart.
    """

    model: str
    benchmark: str
    candidates: int
    members: int
    by_memory: Cell | None
    by_time: Cell | None
    may_lose: Mapping[str, float]
    against: Mapping[str, Mapping[Setting, Contrast]] = field(default_factory=dict)
    vacuous: str | None = None


def choices(run: RunData) -> list[Choice]:
    """One choice for each model of a run, among the grid cells of all its policies on the mean over benchmarks."""
    grid: dict[str, dict[str, list[CellTraces]]] = {}
    for name, group in run.groups.items():
        grid.setdefault(name.model, {}).setdefault(name.benchmark, []).extend(group)
    made = []
    for model, benchmarks in grid.items():
        rows = list(benchmarks.values())
        cells = table(rows, _id)
        if cells is None:
            continue
        best = resampling.plateau(cells.means, cells.strata)
        ids = [setting for setting, member in zip(cells.columns, best.member, strict=True) if member]
        members = [mean_cell([cell.cell() for row in rows for cell in row if _id(cell) == setting]) for setting in ids]
        may_lose = {str(setting): float(lost) for setting, lost in zip(cells.columns, best.may_lose, strict=True)}
        benchmark = next(iter(benchmarks)) if len(benchmarks) == 1 else mean_of(len(benchmarks))
        checked = validity(cell for row in rows for cell in row)
        choice = unless_vacuous(_choice(model, benchmark, len(cells.columns), members, may_lose), checked)
        baselines = [cell for cell in run.cells if cell.expected.baseline and cell.expected.model == model]
        made.append(replace(choice, against=_against(choice, benchmarks, baselines)))
    return made


def unless_vacuous(choice: Choice, checked: Validity | None) -> Choice:
    """The choice, or none and the reason where the traces of its candidates cannot tell them apart."""
    reason = checked.reason if checked is not None else None
    return choice if reason is None else replace(choice, by_memory=None, by_time=None, vacuous=reason)


def _id(cell: CellTraces) -> str:
    return cell.expected.setting.id


def _against(
    choice: Choice, benchmarks: Mapping[str, Sequence[CellTraces]], baselines: Sequence[CellTraces]
) -> dict[str, dict[Setting, Contrast]]:
    """The chosen settings minus each baseline, paired by problem, on the mean over benchmarks."""
    chosen = {cell.setting.id for cell in (choice.by_memory, choice.by_time) if cell is not None}
    contrasts: dict[str, dict[Setting, Contrast]] = {setting: {} for setting in chosen}
    for baseline in dict.fromkeys(cell.expected.setting for cell in baselines):
        rows = [
            [cell for cell in group if _id(cell) in chosen]
            + [b for b in baselines if (b.expected.benchmark, b.expected.setting) == (benchmark, baseline)]
            for benchmark, group in benchmarks.items()
        ]
        cells = table(rows, lambda cell: (cell.expected.baseline, _id(cell)))
        if cells is None or (True, baseline.id) not in cells.columns:
            continue
        other = cells.columns.index((True, baseline.id))
        for setting in chosen:
            if (False, setting) in cells.columns:
                coefficients = np.zeros(len(cells.columns))
                coefficients[[cells.columns.index((False, setting)), other]] = 1.0, -1.0
                contrasts[setting][baseline] = resampling.contrast(cells.means, cells.strata, coefficients)
    return contrasts


def choices_of_maps(maps: Sequence[Map], verdicts: Mapping[MapName, Verdict]) -> list[Choice]:
    """One choice for each map of a model's mean, or of its only benchmark, that has a verdict (a CSV map's)."""
    made = []
    for one in maps:
        verdict = verdicts.get(one.name)
        if verdict is None:
            continue
        members = [one.cells[coord] for coord in verdict.plateau]
        may_lose = {one.cells[coord].setting.id: lost for coord, lost in verdict.may_lose.items()}
        choice = _choice(one.model, one.benchmark, len(one.cells), members, may_lose)
        made.append(unless_vacuous(choice, one.validity))
    return made


def kv_tokens_of(cell: Cell) -> float | None:
    """KV tokens that a cell keeps: measured, else what the published rule leaves after a compression.

    That is local_window + floor(ratio * (kv_budget - local_window)) (arXiv 2601.18383); None where neither is known.
    """
    if cell.mean_kv_tokens is not None:
        return cell.mean_kv_tokens
    values = cell.setting.values
    if not all(isinstance(values.get(name), int | float) for name in ("kv_budget", "local_window", "ratio")):
        return None
    older = values["kv_budget"] - values["local_window"]
    # A share is exact for the decimal that was written: 0.29 of 100 is 29.
    return float(values["local_window"] + int(round(values["ratio"] * older, 6)))


def _choice(
    model: str, benchmark: str, candidates: int, members: Sequence[Cell], may_lose: Mapping[str, float]
) -> Choice:
    return Choice(
        model,
        benchmark,
        candidates,
        len(members),
        cheapest(members, [kv_tokens_of(cell) for cell in members]),
        cheapest(members, [cell.seconds_mean for cell in members]),
        may_lose,
    )


def cheapest(members: Sequence[Cell], costs: Sequence[float | None]) -> Cell | None:
    """The member of least cost, of equal ones the best; None where a cost is unknown or there is no member."""
    known = [(cost, -cell.estimate.value, n) for n, (cell, cost) in enumerate(zip(members, costs, strict=True)) if cost]
    return members[min(known)[2]] if len(known) == len(members) > 0 else None
