"""The settings of a run against one policy: each minus the policy's setting with the same values, in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from kvatlas.core import KvatlasError, Setting, differing, grouped
from kvatlas.stats.numerics.arrays import LEVEL, Difference, normal_quantile
from kvatlas.stats.paired import CellPair, paired_values
from kvatlas.stats.run_data import RunData, short_names, shown_policies
from kvatlas.stats.table import CellTraces


@dataclass(frozen=True)
class AgainstPolicy:
    """A setting minus that of the policy with the same values, in [-1, 1].

    `name` is the policy, with the values that the other setting lacks; `group` has the values that both share and in
    which the settings of the run differ. The limits of all settings of a model hold at the same time in 95 % of runs
    (Bonferroni), so that one whose limits exclude 0 is proven without further adjustment.
    """

    setting: Setting
    partner: Setting
    name: str
    group: tuple[tuple[str, object], ...]
    contrast: Difference


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
        contrasts = [row.contrast for row in self.rows]
        distances = [one.value - one.low if one.value > 0 else one.high - one.value for one in contrasts]
        return sorted(distances)[len(distances) // 2]


def against_policy(run: RunData, policy: str) -> list[AgainstTable]:
    """Return, for each model, every setting minus the setting of `policy` that has the same values.

    The partner's parameters are among those of the setting, with equal values; of several the one with the most. A
    setting without one is left out, as one that lacks a benchmark is. Raises KvatlasError if no setting has a partner,
    and if `policy` names classes of several files.
    """
    named = list(dict.fromkeys(cell.setting.policy for cell in run.cells if cell.setting.is_of(policy)))
    if len(named) > 1 and policy not in named:
        raise KvatlasError(f"Several policies are named {policy!r}; expected one of: {', '.join(named)}.")

    measured = [cell for cell in run.cells if run.fits(cell) and cell.measured]
    by_model = grouped(measured, lambda cell: cell.model)
    tables = [_against_table(run, model, policy, cells) for model, cells in by_model.items()]
    found = [table for table in tables if table is not None]
    if not found:
        policies = ", ".join(shown_policies(cell.setting.policy for cell in measured).values())
        raise KvatlasError(
            f"No setting has one of the policy {policy!r} with the same values to be compared with; there are: "
            f"{policies}."
        )
    return found


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


def _against_table(run: RunData, model: str, policy: str, cells: Sequence[CellTraces]) -> AgainstTable | None:
    """Return the settings of a model that stand on all its benchmarks minus their partners; None without any."""
    by_setting = grouped(cells, lambda cell: cell.setting)
    benchmarks = tuple(dict.fromkeys(cell.benchmark for cell in cells))
    whole = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(benchmarks)}
    partners = {setting: partner_of(setting, policy, list(whole)) for setting in whole}
    paired = {setting: partner for setting, partner in partners.items() if partner is not None}
    if not paired:
        return None

    # The cells of each benchmark with those of their partners.
    sides: list[list[CellPair]] = []
    for benchmark in benchmarks:
        every_cell = chain.from_iterable(whole.values())
        of_benchmark = {cell.setting: cell for cell in every_cell if cell.benchmark == benchmark}
        sides.append([(of_benchmark[setting], of_benchmark[partner]) for setting, partner in paired.items()])
    values = paired_values(sides, run.look.samples)
    z = normal_quantile(LEVEL / 2 / len(paired))
    contrasts = values.contrasts(run.claim, z, run.look)

    # Rows with the same values of those parameters in which partners differ stand together.
    varied = differing(partner.values for partner in paired.values())
    names = row_names(paired)
    rows = []
    for (setting, partner), contrast in zip(paired.items(), contrasts, strict=True):
        if contrast is not None:
            group = tuple((name, value) for name, value in partner.parameters if name in varied)
            rows.append(AgainstPolicy(setting, partner, names[setting], group, contrast))
    return AgainstTable(model, benchmarks, policy, run.metric, len(values.problems), tuple(rows))


def partner_of(setting: Setting, policy: str, settings: Sequence[Setting]) -> Setting | None:
    """Return the setting of a policy whose values are all those of the `setting`, the closest one; None without one."""
    of_policy = [other for other in settings if other != setting and other.is_of(policy)]
    candidates = [other for other in of_policy if other.values.items() <= setting.values.items()]
    return max(candidates, key=lambda other: len(other.parameters), default=None)


def row_names(paired: Mapping[Setting, Setting]) -> dict[Setting, str]:
    """Return the settings by their policy, with those of its parameters in which its settings differ and no partner."""
    shared = set(chain.from_iterable(partner.values for partner in paired.values()))
    alone = {}
    for setting in chain.from_iterable(paired.items()):
        own_values = {name: value for name, value in setting.parameters if name not in shared}
        alone[setting] = Setting.from_parameters(setting.policy, **own_values)
    # Beside its partner a setting of the same policy is named by its values.
    names = short_names([*(alone[setting] for setting in paired), *(alone[partner] for partner in paired.values())])
    return {setting: names[alone[setting].id] for setting in paired}
