"""The settings of a run against one policy: each minus the policy's setting with the same values, in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from kvatlas.core import KvatlasError, Setting, differing, grouped
from kvatlas.stats.numerics.arrays import LEVEL, Contrast, normal_quantile
from kvatlas.stats.paired import CellPair, paired_values
from kvatlas.stats.run_data import RunData, short_names, shown_policies
from kvatlas.stats.table import CellTraces


@dataclass(frozen=True)
class AgainstPolicy:
    """A setting minus that of the policy with the same values, in [-1, 1].

    `name` is the policy, with the values that the other setting lacks; `group` has the values that both share and in
    which the settings of the run differ. The limits of all settings of a model hold at the same time in 95 % of runs
    (Bonferroni), so `is_proven` needs no further adjustment.
    """

    setting: Setting
    partner: Setting
    name: str
    group: tuple[tuple[str, object], ...]
    contrast: Contrast

    @property
    def is_proven(self) -> bool:
        """True if the limits exclude 0."""
        return self.contrast.low > 0 or self.contrast.high < 0


@dataclass(frozen=True)
class AgainstTable:
    """The settings of a model against a policy, in the order of the run.

    `problems` counts those that any of them has; a difference is of the problems of its own pair.
    """

    model: str
    benchmarks: tuple[str, ...]
    policy: str
    metric: str
    problems: int
    rows: tuple[AgainstPolicy, ...]

    @property
    def detectable(self) -> float:
        """The difference in [0, 1] that half of the settings would have shown: their median distance to the near limit.

        A difference is shown where its near limit excludes 0.
        """
        distances = [_reach(row.contrast) for row in self.rows]
        return sorted(distances)[len(distances) // 2]


def _reach(contrast: Contrast) -> float:
    return contrast.value - contrast.low if contrast.value > 0 else contrast.high - contrast.value


def against_policy(run: RunData, policy: str) -> list[AgainstTable]:
    """Return, for each model, every setting minus the setting of `policy` that has the same values.

    The partner's parameters are among those of the setting, with equal values; of several the one with the most. A
    setting without one is left out, as one that lacks a benchmark is. Raises KvatlasError if no setting has a partner,
    and if `policy` names classes of several files.
    """
    _check_one_policy((cell.setting for cell in run.cells), policy)
    measured = [cell for cell in run.cells if run.fits(cell) and cell.measured and not cell.adaptive]
    by_model = grouped(measured, lambda cell: cell.model)
    tables = [_table(run, model, policy, cells) for model, cells in by_model.items()]
    found = [table for table in tables if table is not None]
    if not found:
        policies = ", ".join(shown_policies(cell.setting.policy for cell in measured).values())
        raise KvatlasError(
            f"No setting has one of the policy {policy!r} with the same values to be compared with; there are: "
            f"{policies}."
        )
    return found


def _check_one_policy(settings: Iterable[Setting], name: str) -> None:
    """Raise KvatlasError if classes of several files have the name."""
    policies = list(dict.fromkeys(setting.policy for setting in settings if setting.is_of(name)))
    if len(policies) > 1 and name not in policies:
        raise KvatlasError(f"Several policies are named {name!r}; expected one of: {', '.join(policies)}.")


def rows_of_policy(tables: Sequence[AgainstTable], policy: str) -> list[AgainstTable]:
    """Return the tables with the settings of one policy alone, their limits as they are.

    Raises KvatlasError if no setting is of that policy.
    """
    kept = []
    for table in tables:
        rows_of_table = tuple(row for row in table.rows if row.setting.is_of(policy))
        if rows_of_table:
            kept.append(replace(table, rows=rows_of_table))
    if not kept:
        rows = chain.from_iterable(table.rows for table in tables)
        policies = ", ".join(shown_policies(row.setting.policy for row in rows).values())
        raise KvatlasError(f"No setting of the policy {policy!r} is compared; there are: {policies}.")
    return kept


def _table(run: RunData, model: str, policy: str, cells: Sequence[CellTraces]) -> AgainstTable | None:
    by_setting = grouped(cells, lambda cell: cell.setting)
    benchmarks = tuple(dict.fromkeys(cell.benchmark for cell in cells))
    whole = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(benchmarks)}
    partners = {setting: partner_of(setting, policy, list(whole)) for setting in whole}
    paired = {setting: partner for setting, partner in partners.items() if partner is not None}
    if not paired:
        return None
    sides = [_pairs(benchmark, paired, whole) for benchmark in benchmarks]
    look, samples = run.look
    values = paired_values(sides).first(samples)
    z = normal_quantile(LEVEL / 2 / len(paired))
    contrasts = values.contrasts(run.claim, z, look)
    names = row_names(paired)
    groups = shared_values(paired)
    rows = [
        AgainstPolicy(setting, partner, names[setting], groups[setting], contrast)
        for (setting, partner), contrast in zip(paired.items(), contrasts, strict=True)
        if contrast is not None
    ]
    return AgainstTable(model, benchmarks, policy, run.metric, len(values.problems), tuple(rows))


def _pairs(
    benchmark: str, paired: Mapping[Setting, Setting], cells: Mapping[Setting, Sequence[CellTraces]]
) -> list[CellPair]:
    """Return the cells of a benchmark with those of their partners."""
    every_cell = chain.from_iterable(cells.values())
    of_benchmark = {cell.setting: cell for cell in every_cell if cell.benchmark == benchmark}
    return [(of_benchmark[setting], of_benchmark[partner]) for setting, partner in paired.items()]


def partner_of(setting: Setting, policy: str, settings: Sequence[Setting]) -> Setting | None:
    """Return the setting of a policy whose values are all those of the `setting`, the closest one; None without one."""
    of_policy = [other for other in settings if other != setting and other.is_of(policy)]
    candidates = [other for other in of_policy if other.values.items() <= setting.values.items()]
    return max(candidates, key=lambda other: len(other.parameters), default=None)


def row_names(paired: Mapping[Setting, Setting]) -> dict[Setting, str]:
    """Return the settings by their policy, with those of its parameters in which its settings differ and no partner."""
    shared = set(chain.from_iterable(partner.values for partner in paired.values()))
    alone = {setting: _without(setting, shared) for setting in paired}
    # Beside its partner a setting of the same policy is named by its values.
    names = short_names([*alone.values(), *(_without(partner, shared) for partner in paired.values())])
    return {setting: names[of_policy.id] for setting, of_policy in alone.items()}


def _without(setting: Setting, names: set[str]) -> Setting:
    kept = {name: value for name, value in setting.parameters if name not in names}
    return Setting.from_parameters(setting.policy, **kept)


def shared_values(paired: Mapping[Setting, Setting]) -> dict[Setting, tuple[tuple[str, object], ...]]:
    """Return the values of each setting that its partner has and in which partners differ."""
    varied = differing(partner.values for partner in paired.values())
    groups = {}
    for setting, partner in paired.items():
        groups[setting] = tuple((name, value) for name, value in partner.parameters if name in varied)
    return groups
