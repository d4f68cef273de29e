"""The checks of a run itself: that it can see a loss, and that its reference stays as it is.

A control is a setting so poor that a run which can see a loss sees that of this one.

Controls are declared in a spec, by policy or at a setting of a server. Nothing is claimed of them but that they lose
more than the margin, so they take no share of the level at which the others are proven.

A reference that is asked again after a new start, last of all, tells what the hours did. Flips without a direction are
noise, which widens limits by itself; with a direction the reference drifted, and a loss may be the drift's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from scipy import special

from kvatlas.core import AGAIN, Setting, grouped, is_reference
from kvatlas.core.settings import CONTROLS, window_in_tokens
from kvatlas.results.manifest import Manifest
from kvatlas.stats.losses import LossFamily
from kvatlas.stats.numerics.arrays import Difference, Flags
from kvatlas.stats.orders import nominal_bytes
from kvatlas.stats.pairs import paired_values
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces
from kvatlas.text import p_text

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


def control_of(
    run: RunData, model: str, benchmarks: Sequence[str], family: LossFamily
) -> tuple[Setting, Difference] | None:
    """Return the control of a model that keeps least, and what it loses on these benchmarks by the claim of the run.

    None in a run without one.
    """
    cells = [cell for cell in run.cells if cell.model == model and cell.benchmark in benchmarks and cell.measured]
    controls = [cell for cell in cells if should_lose(cell.setting, cell.is_control)]
    by_setting = grouped(controls, lambda cell: cell.setting)
    complete = {setting: of_setting for setting, of_setting in by_setting.items() if len(of_setting) == len(benchmarks)}
    if not complete:
        return None

    setting = min(complete, key=lambda setting: nominal_bytes(setting, complete[setting][0].expected.kv_bytes))
    loss = family.by_setting.get(setting.id)
    if loss is None:
        # A setting outside the grid is in no family.
        full = {cell.benchmark: cell for cell in cells if is_reference(cell.setting)}
        pairs = [[(cell, full[cell.benchmark])] for cell in complete[setting]]
        paired = paired_values(pairs, run.look.samples)
        loss = paired.units(run.claim).negated().contrasts(stretch=run.look.widening)[0]
    return None if loss is None else (setting, loss)


#: The level at which the flips of a reference that is asked again have a direction.
DRIFT_LEVEL = 0.01
#: What may not change between the servers of a model, in words.
_OF_SESSIONS = {
    "version": "version",
    "node": "node",
    "gpu": "GPU",
    "concurrency": "number of open questions",
    "left_out": "set of refused sampling fields",
}


@dataclass(frozen=True)
class Changes:
    """The answers of a setting to the first sample of `pairs` problems, beside those of the reference.

    So many were `lost` and `gained`; so many texts changed, None where texts are unknown.
    """

    setting: Setting
    pairs: int
    lost: int
    gained: int
    texts: int | None

    @property
    def p(self) -> float:
        """The two-sided p-value of "as many are lost as are gained" (sign test)."""
        flips = self.lost + self.gained
        return min(1.0, 2 * float(special.bdtr(min(self.lost, self.gained), flips, 0.5)))


def changes_of(run: RunData, model: str) -> list[Changes]:
    """Return the changed answers of a model's settings, the reference asked again first; none if it was not."""
    cells = [cell for cell in run.cells if cell.model == model and cell.measured]
    references = {cell.benchmark: cell for cell in cells if is_reference(cell.setting)}
    compared = [cell for cell in cells if not is_reference(cell.setting) and cell.benchmark in references]
    by_setting = grouped(compared, lambda cell: cell.setting)
    if AGAIN not in by_setting:
        return []
    ordered = [AGAIN, *(setting for setting in by_setting if setting != AGAIN)]
    return [_changes(setting, by_setting[setting], references) for setting in ordered]


def _changes(setting: Setting, cells: Sequence[CellTraces], references: Mapping[str, CellTraces]) -> Changes:
    differences = []
    changed: list[Flags] = []
    is_known = True
    for cell in cells:
        reference = references[cell.benchmark]
        lost = reference.in_order(reference.values()[:, 0], cell.place) - cell.values()[:, 0]
        has_both = ~np.isnan(lost)
        differences.append(lost[has_both])
        digests = cell.token_digest[:, 0]
        unknown = np.zeros((), digests.dtype)
        others = reference.in_order(reference.token_digest[:, 0], cell.place, unknown)
        is_known &= not bool(((digests == unknown) | (others == unknown))[has_both].any())
        changed.append((digests != others)[has_both])

    values = np.concatenate(differences)
    texts = int(np.concatenate(changed).sum()) if is_known else None
    return Changes(setting, len(values), int((values > 0).sum()), int((values < 0).sum()), texts)


def drift_reason(changes: Sequence[Changes]) -> str:
    """Return as a clause that the reference drifted, or ""."""
    if not changes or changes[0].p > DRIFT_LEVEL:
        return ""
    again = changes[0]
    return (
        f"the reference drifted: asked again it lost {again.lost:,} and gained {again.gained:,} of {again.pairs:,} "
        f"answers (p {p_text(again.p)})"
    )


def sessions_reason(manifests: Iterable[Manifest], model: str) -> str:
    """Return as a clause that the servers of a model were not alike in what may change answers, or ""."""
    sessions = chain.from_iterable(manifest.provenance.get("sessions") or [] for manifest in manifests)
    of_model = [session for session in sessions if session["served"] == model]
    clauses = []
    for name, words in _OF_SESSIONS.items():
        values = list(dict.fromkeys(str(session[name]) for session in of_model if session.get(name)))
        if len(values) > 1:
            clauses.append(f"more than one {words} ({'; '.join(values)})")
    return f"its servers had {' and '.join(clauses)}, so a loss may be theirs" if clauses else ""
