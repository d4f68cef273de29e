"""The demo's claims, judged on problems on which nothing was chosen.

    python bench/fresh_problems.py runs/demo

The demo's benchmarks and axes were chosen on other problems (900 to 939 of ledgers), its budget after a look at its own
problems, which flatters it; the heads were trained on problems 300 to 474 of such sizes. This decodes the settings of
`dynts`, `random` where `dynts` is recommended, and the full cache on the problems from `--first` on, and keeps them
beside the demo, in a folder that ends in `-fresh`. Prints one JSON document; by model: what the demo recommends and
what that setting loses here, with its 95 % interval and the one-sided upper limit, and the Pass@1 of `random` there;
how many of the settings proven in the demo are proven here, and which lose more than the margin; the same for the
settings that the demo proves to lose more. Points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import kvatlas
from common import arguments, keep
from kvatlas.core import Setting
from kvatlas.report.result import Result, open_result
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import SettingLoss
from kvatlas.sweeps import make_plan, read_spec, sweep
from kvatlas.sweeps.spec import SettingSpec

#: The policy whose settings the demo is about, and the one that it is compared with.
POLICY, RIVAL = "dynts", "random"


def main() -> None:
    options = arguments(__doc__, "demo", first=500, problems=100)
    demo = open_result([options.demo])
    folder = options.demo.with_name(f"{options.demo.name}-fresh")
    decode(folder, demo.choices, options.first, options.problems)
    fresh = open_result([folder])
    cells = kvatlas.open_run(folder).cells()
    models = {}
    for choice in demo.choices:
        models[choice.model] = judged(choice, losses_of(fresh, choice.model))
        if choice.by_memory is not None:
            values = {"model": choice.model, "policy": RIVAL, **values_of(choice.by_memory.setting)}
            there = cells[(cells[list(values)] == pd.Series(values)).all(axis=1)]
            models[choice.model]["pass_at_1_of_random_there"] = round(100 * there["value"].mean(), 1)
    keep(options, bench="fresh_problems", margin=demo.margin, models=models)


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


def values_of(setting: Setting) -> dict[str, Any]:
    """Return what a setting of one policy gives to the other."""
    return {name: setting.values[name] for name in ("kv_budget", "local_window", "ratio")}


def losses_of(result: Result, model: str) -> dict[str, SettingLoss]:
    choice = next(one for one in result.choices if one.model == model)
    return {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}


def judged(choice: Choice, fresh: dict[str, SettingLoss]) -> dict[str, Any]:
    """The demo's choice and its marks beside the losses on fresh problems."""
    losses = {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}
    of_policy = {name: loss for name, loss in losses.items() if name in fresh and name.startswith(POLICY)}
    kept = [name for name, loss in of_policy.items() if loss.is_kept]
    broken = [name for name, loss in of_policy.items() if loss.is_broken]
    chosen = None if choice.by_memory is None else choice.by_memory.setting
    return {
        "chosen": None if chosen is None else document(str(chosen), fresh),
        "proven_within": len(kept),
        "of_these_here_above_the_margin": [name for name in kept if fresh[name].value > choice.margin],
        "of_these_here_proven": sum(fresh[name].is_kept for name in kept),
        "proven_to_lose_more": len(broken),
        "of_these_here_below_the_margin": [name for name in broken if fresh[name].value < choice.margin],
        "losses": {name: round(100 * loss.value, 1) for name, loss in fresh.items()},
    }


def document(setting: str, losses: dict[str, SettingLoss]) -> dict[str, Any]:
    loss = losses[setting]
    points = {"loses": loss.value, "low": loss.low, "high": loss.high, "limit": loss.limit}
    return {"setting": setting, **{name: round(100 * share, 1) for name, share in points.items()}}


if __name__ == "__main__":
    main()
