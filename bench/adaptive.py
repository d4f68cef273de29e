"""An adaptive sweep against the full grid on the same traces of real models: tokens spent, settings left, choice.

    kvatlas demo
    python bench/adaptive.py runs/demo --out bench/results/adaptive.json

Reads a finished run of a full grid and replays `allocate: adaptive` on its stored traces, once in the order of problems
that its seed draws and in `--orders` others; nothing is decoded. For each model: the share of the grid's new tokens
that were asked for, how many settings are left, whether the best on all problems is among them, whether the cheapest
of them (by kept tokens) is the full grid's, and by how many points it is below that one on all problems. Prints one
JSON document.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from keeping import keep
from kvatlas.core import Trace
from kvatlas.results import Manifest, Store
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.inference.adaptive import adaptive_choices, standings
from kvatlas.stats.inference.choice import Choice, choices
from kvatlas.sweeps import make_plan, parse_spec
from kvatlas.sweeps.allocation import Adaptive
from kvatlas.sweeps.plan import Plan

Traces = list[tuple[str, Trace]]


def tokens(cells: list[CellTraces], traces: Traces) -> dict[str, int]:
    """New tokens of the traces that grid cells ask for, by model."""
    asked = {(c.expected.run_key, c.expected.setting.id, c.expected.benchmark): c.expected for c in cells}
    found: dict[str, int] = {}
    for key, trace in traces:
        cell = asked.get((key, trace.setting.id, trace.benchmark))
        if cell is not None and not cell.baseline and trace.problem in cell.problems:
            found[trace.model] = found.get(trace.model, 0) + trace.usage.output_tokens
    return found


def replayed(plan: Plan, traces: Traces, seed: int | None) -> tuple[Manifest, list[CellTraces]]:
    """The end of an adaptive sweep over stored traces; with a `seed` in another order of the problems."""
    sweep = Adaptive.begin(plan, traces)
    if seed is not None:
        rng = random.Random(seed)
        sweep.orders = {name: tuple(rng.sample(held, len(held))) for name, held in sweep.orders.items()}
    for model in plan.models:
        for _ in sweep.stages(model):
            pass
    manifest = sweep.manifest()
    return manifest, gather(manifest, traces, "pass@1")


def setting_of(choice: Choice) -> str | None:
    """The cheapest setting on a plateau; None where the traces can show nothing."""
    return None if choice.by_memory is None else str(choice.by_memory.setting)


def spread(values: list[float]) -> list[float] | None:
    """Least, median and greatest; None of nothing."""
    return [pick(values) for pick in (min, statistics.median, max)] if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of a full grid")
    parser.add_argument("--orders", type=int, default=20, help="other orders of the problems")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    with Store.open(options.run) as store:
        manifest, traces = store.manifest(), list(store.traces(texts=False))
    whole = gather(manifest, traces, "pass@1")
    wanted = {choice.model: choice for choice in choices(RunData(manifest, chosen=whole))}
    if any(choice.by_memory is None for choice in wanted.values()):
        parser.error(f"the maps of {options.run} can show nothing, so nothing is chosen from them")
    spent = tokens(whole, traces)
    plan = make_plan(parse_spec({**manifest.spec, "allocate": "adaptive"}))
    values = {
        (model, str(setting)): statistics.mean(
            c.cell().estimate.value for c in whole if (c.expected.model, c.expected.setting) == (model, setting)
        )
        for model, setting in {(c.expected.model, c.expected.setting) for c in whole}
    }
    grid = {(c.expected.model, c.expected.setting) for c in whole if not c.expected.baseline}
    best = {
        model: max((one for owner, one in grid if owner == model), key=lambda one: values[model, str(one)]).id
        for model in wanted
    }
    found: dict[str, list[dict[str, Any]]] = {model: [] for model in wanted}
    for seed in [None, *range(options.orders)]:
        end, cells = replayed(plan, traces, seed)
        left = {model: one.active for model, one in standings(end, cells).items()}
        asked = tokens(cells, traces)
        for choice in adaptive_choices(standings(end, cells), cells):
            model, full, own = choice.model, wanted[choice.model], setting_of(choice)
            found[model].append(
                {
                    "tokens_of_full_grid": round(asked[model] / spent[model], 4),
                    "left": len(left[model]),
                    "choice": own,
                    "same_choice": own == setting_of(full),
                    "best_kept": best[model] in left[model],
                    "points_below": own and round(100 * (values[model, setting_of(full)] - values[model, own]), 1),
                }
            )
    keep(
        {
            "bench": "adaptive",
            "run": {"settings": len({c.expected.setting for c in whole}), "traces": len(traces)},
            "models": {
                model: {
                    "full_grid": {"on_plateau": wanted[model].members, "choice": setting_of(wanted[model])},
                    "own_order": rows[0],
                    "orders": options.orders,
                    "tokens_of_full_grid": [
                        round(pick(row["tokens_of_full_grid"] for row in rows), 4)
                        for pick in (min, statistics.median, max)
                    ],
                    "left": [pick(row["left"] for row in rows) for pick in (min, statistics.median, max)],
                    "same_choice": round(statistics.mean(row["same_choice"] for row in rows), 3),
                    "best_kept": round(statistics.mean(row["best_kept"] for row in rows), 3),
                    "nothing_chosen": sum(row["choice"] is None for row in rows),
                    "points_below": spread([row["points_below"] for row in rows if row["choice"] is not None]),
                }
                for model, rows in found.items()
            },
        },
        options.out,
    )


if __name__ == "__main__":
    main()
