"""The numbers of docs/findings/embedded.md: the demo's claims, judged on problems on which nothing was chosen.

By model: what the demo recommends and what that setting loses on fresh problems, with its 95 % interval and the
one-sided upper limit, and the Pass@1 of `random` there; how many of the settings proven in the demo are proven there,
and which lose more than the margin; the same for the settings that the demo proves to lose more. Points.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import kvatlas
from kvatlas.core import Setting
from kvatlas.report.result import Result, analyse
from kvatlas.stats.choice import Choice
from kvatlas.stats.numerics.arrays import Difference
from outcomes import Json, write_run

PAGES = ("docs/findings/embedded.md",)
#: The policy whose settings the demo is about, and the one that it is compared with.
POLICY, RIVAL = "dynts", "random"
MARGIN = 5


def numbers_of(outcomes: Json) -> Json:
    """Return, by model, the demo's choice and its marks beside the losses on fresh problems."""
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for name in ("demo", "fresh"):
            parts = outcomes[name]
            write_run(parts[0], Path(folder) / name, *parts[1:])
            results[name] = analyse([Path(folder) / name], lose_at_most=MARGIN)
        cells = kvatlas.open_run(Path(folder) / "fresh").cells()
        numbers = {}
        for choice in results["demo"].choices:
            chosen = Setting.from_parameters(POLICY, **outcomes["chosen"][choice.model])
            of_model = judged(choice, chosen, losses_of(results["fresh"], choice.model))
            values = {"model": choice.model, "policy": RIVAL, **values_of(chosen)}
            there = cells[(cells[list(values)] == pd.Series(values)).all(axis=1)]
            of_model["pass_at_1_of_random_there"] = round(100 * there["value"].mean(), 1)
            numbers[choice.model] = of_model
    return numbers


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    kept = [loss for of_model in numbers.values() for loss in of_model["losses_of_proven"]]
    broken = [loss for of_model in numbers.values() for loss in of_model["losses_of_broken"]]
    found = [
        f"  The {len(kept)} settings that it proves to stay within {MARGIN} points lose {min(kept)} to {max(kept)} "
        f"there, the {len(broken)} that it proves to lose more {min(broken)} or more."
    ]
    for model, of_model in numbers.items():
        chosen = of_model["chosen"]
        found.append(
            f"  The cheapest of {model.removeprefix('embedded:')} loses {chosen['loses']} ({chosen['low']} to "
            f"{chosen['high']}), where `random` solves {of_model['pass_at_1_of_random_there']:.0f} %; of "
            f"{of_model['proven_within']} that the demo proves {of_model['of_these_here_proven']} are proven again."
        )
    return found


def values_of(setting: Setting) -> dict[str, Any]:
    """Return what a setting of one policy gives to the other."""
    return {name: setting.values[name] for name in ("kv_budget", "local_window", "ratio")}


def losses_of(result: Result, model: str) -> dict[str, Difference]:
    choice = next(one for one in result.choices if one.model == model)
    return {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}


def judged(choice: Choice, chosen: Setting, fresh: dict[str, Difference]) -> dict[str, Any]:
    """The demo's choice and its marks beside the losses on fresh problems."""
    losses = {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}
    of_policy = {name: loss for name, loss in losses.items() if name in fresh and name.startswith(POLICY)}
    kept = [name for name, loss in of_policy.items() if loss.is_kept]
    broken = [name for name, loss in of_policy.items() if loss.is_broken]
    return {
        "chosen": document(str(chosen), fresh),
        "proven_within": len(kept),
        "of_these_here_above_the_margin": [name for name in kept if fresh[name].value > choice.margin],
        "of_these_here_proven": sum(fresh[name].is_kept for name in kept),
        "proven_to_lose_more": len(broken),
        "of_these_here_below_the_margin": [name for name in broken if fresh[name].value < choice.margin],
        "losses_of_proven": [round(100 * fresh[name].value, 1) for name in kept],
        "losses_of_broken": [round(100 * fresh[name].value, 1) for name in broken],
        "losses": {name: round(100 * loss.value, 1) for name, loss in fresh.items()},
    }


def document(setting: str, losses: dict[str, Difference]) -> dict[str, Any]:
    loss = losses[setting]
    points = {"loses": loss.value, "low": loss.low, "high": loss.high, "limit": loss.limit}
    return {"setting": setting, **{name: round(100 * share, 1) for name, share in points.items()}}
