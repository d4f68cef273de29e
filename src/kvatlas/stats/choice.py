"""What to choose: the cheapest setting that is shown to lose at most a margin against the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from kvatlas.core import Cell, Map, MapName, Setting, Validity, mean_of
from kvatlas.policies import share
from kvatlas.stats import inference
from kvatlas.stats.bare_maps import PooledEffect
from kvatlas.stats.inference import Contrast
from kvatlas.stats.losses import SettingLoss
from kvatlas.stats.maps import mean_cell
from kvatlas.stats.run_data import LOSE_AT_MOST, RunData
from kvatlas.stats.table import CellTraces, matrix, select
from kvatlas.stats.validity import validity
from kvatlas.stats.verdicts import GridLosses, Verdict, by_benchmark, id_of


@dataclass(frozen=True)
class Choice:
    """The cheapest settings that may be chosen.

    With a full cache those are the settings shown to lose at most the `margin`, and `losses` has what each loses,
    by setting id. Without (`losses` is None) they are the settings on the plateau of the best, without the levels
    of an axis that are shown to be worse. `candidates` settings of the grid were compared, `members` are on the
    plateau. `by_memory` is the one with the fewest KV tokens kept on average (by the rule's arithmetic on a CSV
    map), `by_time` the one with the least measured time a trace; None where the cost is unknown or none may be
    chosen. `tied` and `tied_by_time` count the other settings that are not shown to cost over 1 % more than these.
    `may_lose` is by how much each may be below the best of the grid with 95 % confidence, `against` by how much a
    chosen one is ahead of each baseline, by setting id and baseline. `vacuous` says, as a clause, why nothing is
    chosen: the traces of all candidates cannot tell them apart.
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
    margin: float = LOSE_AT_MOST / 100
    losses: Mapping[str, SettingLoss] | None = None
    problems: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tied: int = 0
    tied_by_time: int = 0

    @property
    def loss(self) -> SettingLoss | None:
        """What the chosen setting loses against the full cache."""
        chosen = self.by_memory or self.by_time
        return self.losses[chosen.setting.id] if self.losses and chosen is not None else None

    @property
    def shown(self) -> bool | None:
        """Whether a setting is shown to lose at most the margin; None where there is no full cache."""
        return None if self.losses is None else any(loss.shown for loss in self.losses.values())

    @property
    def least(self) -> tuple[Setting, SettingLoss] | None:
        """The setting with the smallest loss that was observed; None where there is no full cache."""
        if not self.losses:
            return None
        setting, loss = min(self.losses.items(), key=lambda item: item[1].value)
        return self.settings[setting], loss

    @property
    def nearest(self) -> tuple[Setting, int] | None:
        """The setting that the fewest problems more would show, and how many, were the values true."""
        needed = [
            (loss.needed, setting) for setting, loss in (self.losses or {}).items() if loss.needed and not loss.shown
        ]
        if not needed or self.problems is None:
            return None
        count, setting = min(needed)
        return self.settings[setting], max(count - self.problems, 1)


def choices(run: RunData, lost: GridLosses) -> list[Choice]:
    """One choice for each model of a run, among the grid cells of all its policies on the mean over benchmarks.

    `lost` has the losses of these settings, and may have those of others.
    """
    made = []
    for model, benchmarks in by_benchmark(run).items():
        rows = list(benchmarks.values())
        cells = matrix(rows, id_of)
        if cells is None:
            continue
        best = inference.plateau(cells.means, cells.strata)
        tied = [setting for setting, member in zip(cells.columns, best.member, strict=True) if member]
        every = lost.get((model, frozenset(benchmarks)))
        losses = every and {setting: loss for setting, loss in every.items() if setting in cells.columns}
        ids = tied if losses is None else [setting for setting, loss in losses.items() if loss.shown]
        choice = _choice(
            (model, next(iter(benchmarks)) if len(benchmarks) == 1 else mean_of(len(benchmarks))),
            (len(cells.columns), len(tied)),
            [mean_cell([cell.cell() for row in rows for cell in row if id_of(cell) == setting]) for setting in ids],
            {str(setting): float(lost) for setting, lost in zip(cells.columns, best.may_lose, strict=True)},
        )
        choice = replace(
            unless_vacuous(choice, validity(cell for row in rows for cell in row)),
            margin=run.margin,
            losses=losses,
            problems=len(cells.strata),
            settings={id_of(cell): cell.setting for row in rows for cell in row},
        )
        choice = with_ties(choice, [cell for row in rows for cell in row if id_of(cell) in ids])
        baselines = select(run.cells, model=model, baseline=True)
        made.append(replace(choice, against=_against(choice, benchmarks, baselines)))
    return made


def unless_vacuous(choice: Choice, checked: Validity | None) -> Choice:
    """The choice, or none and the reason where the traces of its candidates cannot tell them apart."""
    reason = checked.reason if checked is not None else None
    return choice if reason is None else replace(choice, by_memory=None, by_time=None, vacuous=reason)


def _against(
    choice: Choice, benchmarks: Mapping[str, Sequence[CellTraces]], baselines: Sequence[CellTraces]
) -> dict[str, dict[Setting, Contrast]]:
    """The chosen settings minus each baseline, paired by problem, on the mean over benchmarks."""
    chosen = {cell.setting.id for cell in (choice.by_memory, choice.by_time) if cell is not None}
    contrasts: dict[str, dict[Setting, Contrast]] = {setting: {} for setting in chosen}
    for baseline in dict.fromkeys(cell.setting for cell in baselines):
        rows = [
            [cell for cell in group if id_of(cell) in chosen] + select(baselines, benchmark=benchmark, setting=baseline)
            for benchmark, group in benchmarks.items()
        ]
        cells = matrix(rows, lambda cell: (cell.baseline, id_of(cell)))
        if cells is None or (True, baseline.id) not in cells.columns:
            continue
        other = cells.columns.index((True, baseline.id))
        for setting in chosen:
            if (False, setting) in cells.columns:
                coefficients = np.zeros(len(cells.columns))
                coefficients[[cells.columns.index((False, setting)), other]] = 1.0, -1.0
                [contrasts[setting][baseline]] = inference.joint_contrasts(
                    cells.means, cells.strata, coefficients[None]
                )
    return contrasts


def choices_of_maps(
    maps: Sequence[Map], verdicts: Mapping[MapName, Verdict], effects: Sequence[PooledEffect] = ()
) -> list[Choice]:
    """One choice for each map of a model's mean, or of its only benchmark, that has a verdict (a CSV map's).

    Levels of an axis that an effect shows to be worse than the others are not chosen.
    """
    made = []
    for map_ in maps:
        verdict = verdicts.get(map_.name)
        if verdict is None:
            continue
        worse = {(effect.axis, level) for effect in effects if effect.maps for level in effect.worse}
        names = [name for name, _ in map_.axes]
        good = [coord for coord in verdict.plateau if not worse & set(zip(names, coord, strict=True))]
        may_lose = {map_.cells[coord].setting.id: lost for coord, lost in verdict.may_lose.items()}
        counts = len(map_.cells), len(verdict.plateau)
        members = [map_.cells[coord] for coord in good]
        choice = _choice((map_.model, map_.benchmark), counts, members, may_lose)
        kept = [cost for cost in map(kv_tokens_of, members) if cost is not None]
        if choice.by_memory is not None:
            choice = replace(choice, tied=sum(cost <= 1.01 * min(kept) for cost in kept) - 1)
        made.append(unless_vacuous(choice, map_.validity))
    return made


def kv_tokens_of(cell: Cell) -> float | None:
    """KV tokens that a cell keeps: measured, else what the published rule leaves after a compression.

    That is local_window + floor(ratio * (kv_budget - local_window)) (arXiv 2601.18383), the budget itself where `every`
    is set; None where neither is known.
    """
    if cell.mean_kv_tokens is not None:
        return cell.mean_kv_tokens
    values = cell.setting.values
    if values.get("every") and values.get("budget_over") != "thinking":
        return float(values["kv_budget"])
    if not all(isinstance(values.get(name), int | float) for name in ("kv_budget", "local_window", "ratio")):
        return None
    return float(values["local_window"] + share(values["ratio"], values["kv_budget"] - values["local_window"]))


def _choice(
    where: tuple[str, str], counts: tuple[int, int], members: Sequence[Cell], may_lose: Mapping[str, float]
) -> Choice:
    memory = [kv_tokens_of(cell) for cell in members]
    return Choice(
        *where, *counts, cheapest(members, memory), cheapest(members, [cell.seconds_mean for cell in members]), may_lose
    )


def with_ties(choice: Choice, members: Sequence[CellTraces]) -> Choice:
    """The choice with its ties among the settings that may be chosen, whose cells are given."""
    return replace(
        choice,
        tied=_ties(choice.by_memory, members, "mean_kv_tokens"),
        tied_by_time=_ties(choice.by_time, members, "seconds"),
    )


def _ties(chosen: Cell | None, members: Sequence[CellTraces], cost: str) -> int:
    """How many other settings are not shown to cost over 1 % more: Student's 95 % limit, paired by problem.

    Benchmarks weigh equally and their problems vary about their own mean.
    """
    by_setting: dict[str, dict[tuple[str, str], float]] = {}
    for cell in members:
        own = by_setting.setdefault(id_of(cell), {})
        own.update(((cell.benchmark, problem), mean) for problem, mean in cell.cost_means(cost).items())
    if chosen is None:
        return 0
    least = by_setting.pop(chosen.setting.id, {})
    tied = 0
    for theirs in by_setting.values():
        shared = [key for key in least if key in theirs]
        if not shared:  # costs that nobody knows tie with none
            continue
        more = np.array([theirs[key] - 1.01 * least[key] for key in shared])
        names = np.array([benchmark for benchmark, _ in shared])
        parts = [more[names == name] for name in dict.fromkeys(names)]
        mean = float(np.mean([part.mean() for part in parts]))
        free = len(more) - len(parts)
        error = np.sqrt(sum(part.var(ddof=1) / len(part) for part in parts if len(part) > 1)) / len(parts)
        tied += bool(mean - (stats.t.ppf(0.975, free) if free else 0.0) * error <= 0)
    return tied


def cheapest(members: Sequence[Cell], costs: Sequence[float | None]) -> Cell | None:
    """The member of least cost, of equal ones the best; None where a cost is unknown or there is no member."""
    known = [(cost, -cell.estimate.value, n) for n, (cell, cost) in enumerate(zip(members, costs, strict=True)) if cost]
    return members[min(known)[2]] if len(known) == len(members) > 0 else None
