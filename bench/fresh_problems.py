"""The demo's claims, judged on problems on which nothing was chosen.

    python bench/fresh_problems.py runs/demo

The demo's benchmarks, budget and axes were chosen after looking at its first problems, which flatters them. This
decodes the settings of `dynts` and the full cache of the same spec on the problems from `--first` on. Prints one JSON
document; by model: what the demo recommends and what that setting loses here, with its 95 % interval and the one-sided
upper limit; how many of the settings proven in the demo are proven here, and which lose more than the margin; the same
for the settings that the demo proves to lose more. Points.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas.core import Setting
from kvatlas.report.result import Result, open_result
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import SettingLoss
from kvatlas.sweeps import make_plan, read_spec, sweep

#: The policy whose settings the demo is about.
POLICY = "dynts"


def main() -> None:
    options = arguments(__doc__, "demo", first=300, problems=200)
    demo = open_result([options.demo])
    with tempfile.TemporaryDirectory() as folder:
        decode(Path(folder) / "run", options.first, options.problems)
        fresh = open_result([Path(folder) / "run"])
        models = {choice.model: judged(choice, losses_of(fresh, choice.model)) for choice in demo.choices}
    keep(options, bench="fresh_problems", margin=demo.margin, models=models)


def decode(folder: Path, first: int, problems: int) -> None:
    """Decode the demo's spec for one policy on problems from the `first` on."""
    spec = read_spec(Path("demo"))
    settings = [entry for entry in spec.settings if entry.policy == POLICY]
    baseline = [entry for entry in spec.baseline if entry.policy == "full"]
    plan = make_plan(spec.model_copy(update={"problems": first + problems, "settings": settings, "baseline": baseline}))
    sweep(replace(plan, problems={name: found[first:] for name, found in plan.problems.items()}), folder)


def losses_of(result: Result, model: str) -> dict[str, SettingLoss]:
    choice = next(one for one in result.choices if one.model == model)
    return {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}


def judged(choice: Choice, fresh: dict[str, SettingLoss]) -> dict[str, Any]:
    """The demo's choice and its marks beside the losses on fresh problems."""
    losses = {str(choice.settings[id_]): loss for id_, loss in (choice.losses or {}).items()}
    of_policy = {name: loss for name, loss in losses.items() if name in fresh}
    kept = [name for name, loss in of_policy.items() if loss.is_kept]
    broken = [name for name, loss in of_policy.items() if loss.is_broken]
    return {
        "chosen": None if choice.by_memory is None else document(choice.by_memory.setting, fresh),
        "proven_within": len(kept),
        "of_these_here_above_the_margin": [name for name in kept if fresh[name].value > choice.margin],
        "of_these_here_proven": sum(fresh[name].is_kept for name in kept),
        "proven_to_lose_more": len(broken),
        "of_these_here_below_the_margin": [name for name in broken if fresh[name].value < choice.margin],
        "losses": {name: round(100 * loss.value, 1) for name, loss in fresh.items()},
    }


def document(setting: Setting, losses: dict[str, SettingLoss]) -> dict[str, Any]:
    loss = losses[str(setting)]
    points = {"loses": loss.value, "low": loss.low, "high": loss.high, "limit": loss.limit}
    return {"setting": str(setting), **{name: round(100 * share, 1) for name, share in points.items()}}


if __name__ == "__main__":
    main()
