"""The control of a run: a setting so poor that a run which can see a loss sees that of this one.

Controls are declared in a spec, by policy or at a setting of a server. Nothing is claimed of them but that they lose
more than the margin, so they take no share of the level at which the others are proven.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.core import Setting, grouped, is_reference
from kvatlas.core.settings import CONTROLS, window_in_tokens
from kvatlas.stats.losses import LossFamily
from kvatlas.stats.numerics.arrays import Contrast
from kvatlas.stats.orders import nominal_bytes
from kvatlas.stats.paired import paired_values
from kvatlas.stats.run_data import RunData

#: The largest share of the older tokens that a setting keeps which should lose.
MOST_RATIO = 0.3


def should_lose(setting: Setting, is_declared: bool = False) -> bool:
    """Return whether a control keeps so little that it should lose: a small share of the older tokens, if it has one.

    `window` and `random` are controls, too, where they are not declared, as outside the grid.
    """
    share = older_share(setting)
    if share is None:
        return is_declared
    return share <= MOST_RATIO and (is_declared or setting.policy in CONTROLS)


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
    controls = [cell for cell in cells if should_lose(cell.setting, cell.is_control)]
    by_setting = grouped(controls, lambda cell: cell.setting)
    complete = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(names)}
    if not complete:
        return None

    setting = min(complete, key=lambda setting: nominal_bytes(setting, complete[setting][0].expected.kv_bytes))
    loss: Contrast | None = family.by_setting.get(setting.id)
    if loss is None:
        # A setting outside the grid is in no family.
        full = {cell.benchmark: cell for cell in cells if is_reference(cell.setting)}
        look, samples = run.look
        paired = paired_values([[(cell, full[cell.benchmark])] for cell in complete[setting]]).first(samples)
        loss = paired.units(run.claim).negated().contrasts(stretch=look.widening)[0]
    return None if loss is None else Control(setting, loss)
