"""The control of a run: a setting so poor that a run which can see a loss sees that of this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.core import Setting, grouped
from kvatlas.core.settings import window_in_tokens
from kvatlas.stats.losses import FULL, LossFamily, nominal_bytes
from kvatlas.stats.numerics.arrays import Contrast
from kvatlas.stats.paired import paired_values
from kvatlas.stats.run_data import RunData

#: Policies without any judgement of tokens, and the largest share of the older tokens that they keep as a control.
CONTROLS = ("random", "window")
MOST_RATIO = 0.3


def is_control(setting: Setting) -> bool:
    """Return whether a setting is a control: `window` or `random` that keeps a small share of the older tokens."""
    if setting.policy not in CONTROLS:
        return False
    share = older_share(setting)
    return share is not None and share <= MOST_RATIO


def older_share(setting: Setting) -> float | None:
    """Return the share of the older tokens that stays at a compression, None of a setting without a number for it.

    With `every` so many tokens have come to those of the budget when a compression is due.
    """
    values = setting.values
    budget = values.get("kv_budget")
    window = values.get("local_window")
    every = values.get("every")
    if every and window and isinstance(budget, int):
        stays = max(0, budget - window_in_tokens(window, budget))
        return float(stays / (stays + every))
    ratio = values.get("ratio")
    return float(ratio) if isinstance(ratio, int | float) else None


@dataclass(frozen=True)
class Control:
    """The control that keeps least, and what it loses by the claim of the run."""

    setting: Setting
    loss: Contrast

    @property
    def is_seen(self) -> bool:
        """Return whether the control is proven to lose."""
        return self.loss.low > 0


def control_of(run: RunData, model: str, benchmarks: Iterable[str], family: LossFamily) -> Control | None:
    """Return the control of a model on these benchmarks; None in a run without one."""
    names = list(benchmarks)
    cells = [cell for cell in run.cells if cell.model == model and cell.benchmark in names and cell.measured]
    by_setting = grouped(filter(lambda cell: is_control(cell.setting), cells), lambda cell: cell.setting)
    complete = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(names)}
    if not complete:
        return None

    setting = min(complete, key=lambda setting: nominal_bytes(setting, complete[setting][0].expected.kv_bytes))
    loss: Contrast | None = family.by_setting.get(setting.id)
    if loss is None:
        # A setting outside the grid is in no family.
        full = {cell.benchmark: cell for cell in cells if cell.setting == FULL}
        look, samples = run.look
        paired = paired_values([[(cell, full[cell.benchmark])] for cell in complete[setting]]).first(samples)
        loss = paired.units(run.claim).negated().contrasts(stretch=look.widening)[0]
    return None if loss is None else Control(setting, loss)
