"""An adaptive sweep against the full grid on the same traces of real models: tokens spent, choice, broken margins.

    kvatlas demo
    python bench/adaptive.py runs/demo --out bench/results/adaptive.json

Reads a finished run of a full grid and replays the rule of `allocate: adaptive` on its stored traces, in `--orders`
random orders of the problems and for each `--margins` points; nothing is decoded. For each model and margin: what the
full grid recommends, in how many orders the sweep recommends something, the same, or a setting that loses more than the
margin on all problems, and the share of the grid's new tokens that it asks for. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from keeping import keep
from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.inference.group_sequential import replay
from kvatlas.stats.inference.map_tests import FULL, is_full, table
from kvatlas.stats.inference.noninferiority import losses

BLOCKS = 20


def name_of(cell: CellTraces) -> str:
    return FULL if is_full(cell) else str(cell.expected.setting)


def arrays(run: RunData, model: str) -> dict[str, Any]:
    """The settings of a model, their differences to the full cache, costs, and new tokens by problem."""
    cells = [
        cell for cell in run.cells if cell.expected.model == model and (is_full(cell) or not cell.expected.baseline)
    ]
    names = list(dict.fromkeys(cell.expected.benchmark for cell in cells))
    joined = table([[cell for cell in cells if cell.expected.benchmark == name] for name in names], name_of)
    if joined is None or FULL not in joined.columns:
        raise KvatlasError(f"{model} has no full cache on the problems of its grid.")
    own = joined.columns.index(FULL)
    grid = [number for number in range(len(joined.columns)) if number != own]
    settings = [str(joined.columns[number]) for number in grid]
    by_name: dict[str, list[CellTraces]] = {}
    for cell in cells:
        by_name.setdefault(name_of(cell), []).append(cell)
    return {
        "settings": settings,
        "differences": (joined.means[:, grid] - joined.means[:, [own]]).T,
        "strata": joined.strata,
        "costs": np.array(
            [statistics.mean(v for cell in by_name[one] for v in cell.kv_tokens.values()) for one in settings]
        ),
        "tokens": np.array(
            [statistics.mean(v for cell in by_name[one] for v in cell.output_tokens) for one in settings]
        ),
    }


def measured(one: dict[str, Any], margin: float, orders: int) -> dict[str, Any]:
    differences, strata, costs = one["differences"], one["strata"], one["costs"]
    whole = losses(differences, strata, margin)
    wanted = int(np.where(whole.shown, costs, np.inf).argmin()) if whole.shown.any() else None
    rng = np.random.default_rng(0)
    blocks = min(BLOCKS, int(np.bincount(strata).min()))
    ends, spent = [], []
    for _ in range(orders):
        drawn = [rng.permutation(np.flatnonzero(strata == number)) for number in range(int(strata.max()) + 1)]
        end, took = replay(differences, drawn, costs, margin, blocks)
        ends.append(end.recommended)
        spent.append(float((took * one["tokens"]).sum() / (one["tokens"].sum() * len(strata))))
    decided = [share for share, end in zip(spent, ends, strict=True) if end is not None]
    return {
        "margin": round(100 * margin, 4),
        "full_grid": None if wanted is None else one["settings"][wanted],
        "orders": orders,
        "recommended": round(len(decided) / orders, 3),
        "same_as_full_grid": round(statistics.mean(int(end == wanted) for end in ends), 3),
        "breaks_the_margin": round(
            statistics.mean(int(end is not None and whole.value[end] > margin) for end in ends), 3
        ),
        "tokens_of_full_grid": [round(pick(spent), 4) for pick in (min, statistics.median, max)],
        "tokens_where_decided": round(statistics.median(decided), 4) if decided else None,
        "costs_more": round(statistics.median(costs[end] / costs[wanted] for end in ends if end is not None), 4)
        if decided and wanted is not None
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run of a full grid")
    parser.add_argument("--orders", type=int, default=100, help="orders of the problems")
    parser.add_argument("--margins", type=float, nargs="+", default=[3, 7, 10, 15, 20], help="points")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    run = RunData.open(options.run)
    models = {model: arrays(run, model) for model in dict.fromkeys(cell.expected.model for cell in run.cells)}
    document = {
        "bench": "adaptive",
        "run": {"settings": len(next(iter(models.values()))["settings"]), "blocks": BLOCKS, "traces": len(run.traces)},
        "models": {
            model: [measured(one, points / 100, options.orders) for points in options.margins]
            for model, one in models.items()
        },
    }
    keep(document, options.out)


if __name__ == "__main__":
    main()
