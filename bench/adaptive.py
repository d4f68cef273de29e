"""An adaptive sweep against the full grid on the same traces of real models: tokens spent, choice, broken margins.

    kvatlas demo
    python bench/adaptive.py runs/demo --out bench/results/adaptive.json

Reads a finished run of a full grid and replays the rule of `allocate: adaptive` on its stored traces, in `--orders`
random orders of the problems and for each `--margins` points; nothing is decoded. For each model and margin: what the
full grid recommends, in how many orders the sweep recommends something, the same, or a setting that loses more than the
margin on all problems, and the share of the grid's tokens that it asks for: of its traces, and of what is `decoded`,
the full cache included, where settings that get a problem together share its trunk and later ones decode it again.
Prints one JSON document.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import numpy as np

from common import arguments, keep
from kvatlas.core import KvatlasError
from kvatlas.stats.losses import FULL, is_full
from kvatlas.stats.numerics.against_reference import losses
from kvatlas.stats.numerics.sequential import decisions, in_order
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces, matrix

BLOCKS = 20


def name_of(cell: CellTraces) -> str:
    return FULL if is_full(cell) else str(cell.setting)


def arrays(run: RunData, model: str) -> dict[str, Any]:
    """The settings of a model, their differences to the full cache and costs; by problem the new tokens of all their
    traces and of those before the first compression, the full cache's last."""
    cells = [cell for cell in run.cells if cell.model == model and (is_full(cell) or not cell.baseline)]
    names = list(dict.fromkeys(cell.benchmark for cell in cells))
    groups = [[cell for cell in cells if cell.benchmark == name] for name in names]
    joined = matrix([{name_of(cell): cell for cell in group} for group in groups])
    if joined is None or FULL not in joined.columns:
        raise KvatlasError(f"{model} has no full cache on the problems of its grid.")
    own = joined.columns.index(FULL)
    grid = [number for number in range(len(joined.columns)) if number != own]
    settings = [str(joined.columns[number]) for number in grid]
    by_name: dict[str, list[CellTraces]] = {}
    for cell in cells:
        by_name.setdefault(name_of(cell), []).append(cell)
    # The order of the rows of a table.
    rows = [
        (group[0].benchmark, item)
        for group in groups
        for item in dict.fromkeys(problem for cell in group for problem in cell.problems)
    ]
    both = np.array([[_tokens(by_name[name]).get(row, (0, 0)) for row in rows] for name in (*settings, FULL)])
    tokens, trunks = both[..., 0], both[..., 1]
    trunks[-1] = np.minimum(tokens[-1], trunks[:-1].max(0))
    return {
        "settings": settings,
        "differences": (joined.means[:, grid] - joined.means[:, [own]]).T,
        "strata": joined.strata,
        "costs": np.array(
            [
                np.concatenate([cell.traces["mean_kv_tokens"][cell.is_stored] for cell in by_name[setting]]).mean()
                for setting in settings
            ]
        ),
        "tokens": tokens,
        "trunks": trunks,
    }


def _tokens(cells: list[CellTraces]) -> dict[tuple[str, str], tuple[int, int]]:
    """By benchmark and problem the new tokens of all samples, and those before a compression."""
    by_name: dict[tuple[str, str], tuple[int, int]] = {}
    for cell in cells:
        budget = cell.setting.values.get("kv_budget", 0)
        for problem, row in zip(cell.problems, cell.traces["output_tokens"].astype(int).tolist(), strict=True):
            room = max(budget - cell.prompts[problem], 0)
            by_name[cell.benchmark, problem] = sum(row), sum(min(written, room) for written in row)
    return by_name


def decoded(grid: dict[str, Any], given: np.ndarray[Any, Any]) -> float:
    """Tokens of the trees of traces that are `given` [settings and full, problems]: longest trunks, and branches."""
    tokens, trunks = grid["tokens"] * given, grid["trunks"] * given
    return float(trunks.max(0).sum() + (tokens - trunks).sum())


def replayed(grid: dict[str, Any], margin: float, rng: np.random.Generator) -> tuple[int | None, float, float]:
    """Return the recommendation of a sweep in a random order and its shares of the grid's tokens."""
    strata, tokens = grid["strata"], grid["tokens"]
    drawn = [rng.permutation(np.flatnonzero(strata == number)) for number in range(int(strata.max()) + 1)]
    seen, places = in_order(grid["differences"], drawn, grid["costs"], min(BLOCKS, *map(len, drawn)))
    asked, spent = np.zeros(tokens.shape, bool), 0.0
    for before, after in pairwise(decisions(seen, margin)):
        end, given = after, np.zeros(tokens.shape, bool)
        given[:-1, places] = (before.blocks[:, None] <= seen.block) & (seen.block < before.goal[:, None])
        given[-1] = given[:-1].any(0) & ~asked[-1]
        spent += decoded(grid, given)
        asked |= given
    traces = float((tokens * asked)[:-1].sum() / tokens[:-1].sum())
    return end.recommended, traces, spent / decoded(grid, np.ones(tokens.shape, bool))


def measured(grid: dict[str, Any], margin: float, orders: int) -> dict[str, Any]:
    costs = grid["costs"]
    whole = losses(grid["differences"], grid["strata"], margin, [np.argsort(-costs).tolist()])
    shown = np.array([loss is not None and loss.is_kept for loss in whole])
    wanted = int(np.where(shown, costs, np.inf).argmin()) if shown.any() else None
    rng = np.random.default_rng(0)
    ends, spent, decoded_ = zip(*(replayed(grid, margin, rng) for _ in range(orders)), strict=True)
    chosen = [end is not None for end in ends]
    broken = [end is not None and whole[end].value > margin for end in ends]
    return {
        "margin": round(100 * margin, 4),
        "full_grid": None if wanted is None else grid["settings"][wanted],
        "orders": orders,
        "recommended": round(statistics.mean(chosen), 3),
        "same_as_full_grid": round(statistics.mean(int(end == wanted) for end in ends), 3),
        "breaks_the_margin": round(statistics.mean(map(int, broken)), 3),
        "tokens_of_full_grid": [round(pick(spent), 4) for pick in (min, statistics.median, max)],
        "tokens_where_decided": _median(spent, chosen),
        "decoded_where_decided": _median(decoded_, chosen),
        "costs_more": round(statistics.median(costs[end] / costs[wanted] for end in ends if end is not None), 4)
        if any(chosen) and wanted is not None
        else None,
    }


def _median(shares: tuple[float, ...], chosen: list[bool]) -> float | None:
    kept = [share for share, item in zip(shares, chosen, strict=True) if item]
    return round(statistics.median(kept), 4) if kept else None


def main() -> None:
    options = arguments(__doc__, "run", orders=20, margins=[7.0, 10.0, 15.0, 20.0])
    run = RunData.open(options.run)
    models = {model: arrays(run, model) for model in dict.fromkeys(cell.model for cell in run.cells)}
    document = {
        "bench": "adaptive",
        "run": {
            "settings": len(next(iter(models.values()))["settings"]),
            "blocks": BLOCKS,
            "traces": sum(cell.stored for cell in run.cells),
        },
        "models": {
            model: [measured(grid, points / 100, options.orders) for points in options.margins]
            for model, grid in models.items()
        },
    }
    keep(options, **document)


if __name__ == "__main__":
    main()
