"""The recommendation: the cheapest setting that is proven to lose at most a margin against the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.core import Cell, Map, MapName, Setting, grouped, mean_of
from kvatlas.stats.bare_maps import PooledEffect
from kvatlas.stats.losses import SettingLoss
from kvatlas.stats.maps import mean_cell
from kvatlas.stats.run_data import LOSE_AT_MOST, RunData
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.validity import validity
from kvatlas.stats.verdicts import FULL, GridLosses, Verdict, by_benchmark, kept_by_rule


@dataclass(frozen=True)
class Choice:
    """The cheapest settings that may be chosen, by mean KV bytes (or tokens kept) and by seconds a trace.

    With a full cache those are the settings proven to lose at most the `margin`; `losses` has the loss of each by
    setting id. Without (`losses` is None) they are the `members` of the plateau, without the levels of an axis that are
    shown to be worse. `by_memory` and `by_time` are None where the cost is unknown or none may be chosen. `may_lose`,
    by setting id, is the most that one of the plateau lies below the best. `vacuous` is the reason, as a clause, why
    nothing is chosen. `saved` is the share of the full cache's KV memory that `by_memory`, or else `least`, saves.
    """

    model: str
    benchmark: str
    candidates: int
    members: int | None = None
    by_memory: Cell | None = None
    by_time: Cell | None = None
    may_lose: Mapping[str, float] = field(default_factory=dict)
    vacuous: str | None = None
    margin: float = LOSE_AT_MOST / 100
    losses: Mapping[str, SettingLoss] | None = None
    problems: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    saved: float | None = None

    @property
    def loss(self) -> SettingLoss | None:
        """The loss of the chosen setting against the full cache."""
        chosen = self.by_memory or self.by_time
        return self.losses[chosen.setting.id] if self.losses and chosen is not None else None

    @property
    def shown(self) -> bool | None:
        """True if a setting is proven to keep the margin; None without a full cache."""
        return None if self.losses is None else any(loss.shown for loss in self.losses.values())

    @property
    def least(self) -> tuple[Setting, SettingLoss] | None:
        """The setting whose loss is proven to be the smallest, and the loss; None where there is no full cache."""
        losses = self.losses or {}
        setting = _safest(losses)
        return None if setting is None else (self.settings[setting], losses[setting])

    @property
    def nearest(self) -> tuple[Setting, int] | None:
        """The setting that the fewest problems more would prove, and how many, if its true loss is the observed one."""
        losses = self.losses or {}
        needed = [(loss.needed, setting) for setting, loss in losses.items() if loss.needed and not loss.shown]
        if not needed or self.problems is None:
            return None
        count, setting = min(needed)
        return self.settings[setting], max(count - self.problems, 1)

    @property
    def nearest_range(self) -> tuple[int, int | None] | None:
        """The problems more that `nearest` would take at either end of the 80 % interval of its loss; None: none do."""
        if self.nearest is None or self.losses is None or self.problems is None:
            return None
        low, high = self.losses[self.nearest[0].id].needed_range
        return max((low or 0) - self.problems, 0), None if high is None else max(high - self.problems, 1)


def choices(run: RunData, lost: GridLosses) -> list[Choice]:
    """One choice for each model of a run with a full cache, among its grid cells, on the mean over benchmarks."""
    made = []
    for model, benchmarks in by_benchmark(run).items():
        cells = [cell for own in benchmarks.values() for cell in own]
        ids, found = {cell.setting.id for cell in cells}, lost.get((model, frozenset(benchmarks)), {})
        losses = {setting: loss for setting, loss in found.items() if setting in ids}
        if losses:
            problems = sum(len(own[0].place) for own in benchmarks.values())
            baselines = select(run.cells, model=model, baseline=True)
            made.append(choice_of(model, cells, losses, run.margin, problems=problems, baselines=baselines))
    return made


def choice_of(
    model: str,
    cells: Sequence[CellTraces],
    losses: Mapping[str, SettingLoss],
    margin: float,
    *,
    problems: int | None = None,
    baselines: Sequence[CellTraces] = (),
    among: Sequence[str] | None = None,
) -> Choice:
    """The choice from the grid `cells` of a model by their losses.

    `among` are the ids from which the setting that keeps the fewest tokens is chosen, all proven ones where None.
    """
    own = grouped((cell for cell in cells if cell.stored), lambda cell: cell.setting.id)
    means = {id_: mean_cell([cell.cell for cell in own[id_]]) for id_, loss in losses.items() if loss.shown}
    small = [means[setting] for setting in (means if among is None else among)]
    checked = validity(cells)
    reason = None if checked is None else checked.reason
    fewest = fastest = None
    if reason is None:
        fewest = cheapest(small, kv_costs(small))
        fastest = cheapest(list(means.values()), [cell.seconds_mean for cell in means.values()])
    full = [cell for cell in baselines if cell.setting == FULL and cell.stored]
    safest = _safest(losses) if fewest is None else fewest.setting.id
    offered = [] if safest is None else own[safest]
    pair = kv_costs([mean_cell([cell.cell for cell in part]) for part in (offered, full) if part])
    names = list(dict.fromkeys(cell.benchmark for cell in cells))
    return Choice(
        model,
        names[0] if len(names) == 1 else mean_of(len(names)),
        len({cell.setting.id for cell in cells}),
        by_memory=fewest,
        by_time=fastest,
        vacuous=reason,
        margin=margin,
        losses=losses,
        problems=problems,
        settings={cell.setting.id: cell.setting for cell in cells},
        saved=1 - pair[0] / pair[1] if len(pair) == 2 and pair[0] is not None and pair[1] else None,
    )


def _safest(losses: Mapping[str, SettingLoss]) -> str | None:
    """Return the setting with the smallest upper limit of its loss; of equal ones that with the smallest loss."""
    return min(losses, key=lambda setting: (losses[setting].high, losses[setting].value), default=None)


def choices_of_maps(
    maps: Sequence[Map],
    verdicts: Mapping[MapName, Verdict],
    earlier: Sequence[Choice],
    effects: Sequence[PooledEffect] = (),
) -> list[Choice]:
    """One choice for each map with a verdict, on a model's mean or only benchmark, unless the model has `earlier` ones.

    Levels of an axis that an effect shows to be worse than the others are not chosen.
    """
    made = []
    worse = {(effect.axis, level) for effect in effects if effect.maps for level in effect.worse}
    chosen = {choice.model for choice in earlier}
    for map_ in maps:
        verdict = verdicts.get(map_.name)
        if verdict is None or map_.model in chosen:
            continue
        names = [name for name, _ in map_.axes]
        good = [coord for coord in verdict.plateau if not worse & set(zip(names, coord, strict=True))]
        reason = None if map_.validity is None else map_.validity.reason
        members = [map_.cells[coord] for coord in good] if reason is None else []
        made.append(
            Choice(
                map_.model,
                map_.benchmark,
                len(map_.cells),
                len(verdict.plateau),
                by_memory=cheapest(members, kv_costs(members)),
                by_time=cheapest(members, [cell.seconds_mean for cell in members]),
                may_lose={map_.cells[coord].setting.id: lost for coord, lost in verdict.may_lose.items()},
                vacuous=reason,
            )
        )
    return made


def kv_tokens_of(cell: Cell) -> float | None:
    """KV tokens that a cell keeps: measured, else what the published rule leaves (`kept_by_rule`); None if unknown."""
    return kept_by_rule(cell.setting) if cell.mean_kv_tokens is None else cell.mean_kv_tokens


def kv_costs(cells: Sequence[Cell]) -> list[float | None]:
    """Mean KV bytes of the cells if all are known, else the tokens that they keep."""
    sizes = [cell.mean_kv_bytes for cell in cells]
    return list(map(kv_tokens_of, cells)) if None in sizes else sizes


def cheapest(members: Sequence[Cell], costs: Sequence[float | None]) -> Cell | None:
    """The member of least cost, of equal ones the best; None where a cost is unknown or there is no member."""
    known = [(cost, -cell.estimate.value, n) for n, (cell, cost) in enumerate(zip(members, costs, strict=True)) if cost]
    return members[min(known)[2]] if len(known) == len(members) > 0 else None
