"""The demo's claims, judged on problems on which nothing was chosen.

    python bench/fresh_problems.py runs/demo --out bench/results/fresh_problems.json

The demo's benchmarks and axes were chosen on other problems (900 to 939 of ledgers), its budget after a look at its own
problems, which flatters it; the heads were trained on problems 300 to 474 of such sizes. This decodes the settings of
`dynts`, `random` where `dynts` is recommended, and the full cache on the problems from `--first` on, and keeps them
beside the demo, in a folder that ends in `-fresh`. Prints one JSON document: `outcomes` of both runs by problem, and
the `numbers` that docs/findings/embedded.md quotes, which `bench/audit.py` computes again. By model: what the demo
recommends and what that setting loses here, with its 95 % interval and the one-sided upper limit, and the Pass@1 of
`random` there; how many of the settings proven in the demo are proven here, and which lose more than the margin; the
same for the settings that the demo proves to lose more. Points.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import kvatlas
from common import arguments, keep
from kvatlas.core import Setting
from kvatlas.report.result import Result, analyse, open_result
from kvatlas.results import Store
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import SettingLoss
from kvatlas.sweeps import make_plan, read_spec, sweep
from kvatlas.sweeps.spec import SettingSpec
from outcomes import Json, outcomes_of, write_run

PAGES = ("docs/findings/embedded.md",)
#: The policy whose settings the demo is about, and the one that it is compared with.
POLICY, RIVAL = "dynts", "random"
MARGIN = 5


def main() -> None:
    options = arguments(__doc__, "demo", first=500, problems=100)
    folder = options.demo.with_name(f"{options.demo.name}-fresh")
    choices = open_result([options.demo]).choices
    decode(folder, choices, options.first, options.problems)
    chosen = {choice.model: choice.by_memory.setting.values for choice in choices if choice.by_memory is not None}
    outcomes = {"chosen": chosen, "demo": parts_of(options.demo), "fresh": parts_of(folder)}
    # Through JSON, as an audit reads them.
    numbers = numbers_of(json.loads(json.dumps(outcomes)))
    keep(options, numbers=numbers, outcomes=outcomes)
    print("\n".join(lines(numbers)))


def decode(folder: Path, choices: Sequence[Choice], first: int, problems: int) -> None:
    """Decode the demo's spec on problems from the `first` on; of the rival the settings that are chosen."""
    spec = read_spec(Path("demo"))
    settings = [entry for entry in spec.settings if entry.policy == POLICY]
    for choice in choices:
        if choice.by_memory is not None:
            entry = SettingSpec(policy=RIVAL, **values_of(choice.by_memory.setting))
            settings += [entry] if entry not in settings else []
    baseline = [entry for entry in spec.baseline if entry.policy == "full"]
    plan = make_plan(spec.model_copy(update={"problems": first + problems, "settings": settings, "baseline": baseline}))
    sweep(replace(plan, problems={name: found[first:] for name, found in plan.problems.items()}), folder)


def parts_of(folder: Path) -> list[Json]:
    """Return the outcomes of a run by model and benchmark."""
    with Store.open(folder) as store:
        expected = store.manifest().expected
    problems = {(cell.model, cell.benchmark): cell.problems for cell in expected}
    return [outcomes_of(folder, names, 0, model) for (model, _), names in problems.items()]


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


def losses_of(result: Result, model: str) -> dict[str, SettingLoss]:
    choice = next(one for one in result.choices if one.model == model)
    return {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}


def judged(choice: Choice, chosen: Setting, fresh: dict[str, SettingLoss]) -> dict[str, Any]:
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


def document(setting: str, losses: dict[str, SettingLoss]) -> dict[str, Any]:
    loss = losses[setting]
    points = {"loses": loss.value, "low": loss.low, "high": loss.high, "limit": loss.limit}
    return {"setting": setting, **{name: round(100 * share, 1) for name, share in points.items()}}


if __name__ == "__main__":
    main()
