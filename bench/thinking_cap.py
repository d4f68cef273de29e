"""The numbers of docs/findings/thinking-cap.md: what settings lose and cost, by tokens kept and tokens written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.core import Claim
from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.stats.numerics.arrays import holm
from kvatlas.stats.paired import difference_of_cells
from kvatlas.stats.table import CellTraces
from outcomes import Json, write_run

PAGES = ("docs/findings/thinking-cap.md",)
MARGIN = 5
#: The number of tokens beside the prompt that stands for all of them.
ALL = 1024
UNLIMITED = "unlimited"
#: Pairs of about equal cost that were fixed before decoding: tokens that stay, and the cap, of each model.
EMBEDDED_PAIRS = ((24, 160), (56, 200), (104, 240))
PAIRS = {
    "embedded:tiny-llama": EMBEDDED_PAIRS,
    "embedded:tiny-qwen": EMBEDDED_PAIRS,
    "smollm2-135m-think": ((24, 156), (80, 192)),
}
#: Models whose pairs are one family of tests.
FAMILIES = (("embedded:tiny-llama", "embedded:tiny-qwen"), ("smollm2-135m-think",))


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers_of(outcomes: Json) -> Json:
    """Return for each model its losses, costs, ways to save and pairs, in points and percent."""
    by_model: dict[str, list[Json]] = {}
    for part in outcomes["parts"]:
        by_model.setdefault(part["model"], []).append(part)
    numbers = {model: model_numbers(parts) for model, parts in by_model.items()}
    for family in FAMILIES:
        pairs = [pair for model in family if model in numbers for pair in numbers[model]["pairs"]]
        for pair, p in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
            pair["p_holm"] = round(p, 6)
    return numbers


def model_numbers(parts: Sequence[Json]) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(parts[0], run, *parts[1:])
        options = ReadOptions(lose_at_most=MARGIN)
        choice = analyse([run], options).to_dict()["recommendation"]["all"][0]
        cells = options.open_run(run).cells

    full = [cell for cell in cells if not cell.setting.values]
    rows = []
    for loss in choice["losses"]:
        of_setting = [cell for cell in cells if str(cell.setting) == loss["setting"]]
        values = of_setting[0].setting.values
        rows.append(
            {
                "kept": values["kv_budget"],
                "cap": values.get("thinking_tokens", UNLIMITED),
                "loses": loss["loses"],
                "low": loss["loses_low"],
                "high": loss["loses_high"],
                "proven": loss["shown"],
                "broken": loss["broken"],
                "work": share(of_setting, full, work),
                "memory": share(of_setting, full, lambda cell: cell.traces["mean_kv_tokens"]),
                "written": share(of_setting, full, lambda cell: cell.traces["output_tokens"]),
            }
        )
    return {
        "problems": {cell.benchmark: len(cell.problems) for cell in full},
        "full": {cell.benchmark: round(100 * cell.cell.estimate.value, 4) for cell in full},
        "settings": rows,
        "control": choice["control"],
        "proven_cheapest": choice["proven_cheapest"],
        "ways": choice.get("ways"),
        "pairs": pair_numbers(cells, rows, PAIRS[parts[0]["model"]]),
        "cut": [cut_numbers(cell, one) for one in full for cell in cells if is_cut_alone(cell, one.benchmark)],
    }


def work(cell: CellTraces) -> Any:
    return cell.traces["mean_kv_tokens"] * cell.traces["output_tokens"]


def share(cells: Sequence[CellTraces], full: Sequence[CellTraces], cost: Any) -> float:
    """Return a cost in percent of the full cache's, both means over benchmarks."""
    of_cells = np.mean([cost(cell).mean() for cell in cells])
    return round(100 * float(of_cells / np.mean([cost(cell).mean() for cell in full])), 4)


def at(cells: Sequence[CellTraces], kept: int, cap: Any) -> list[CellTraces]:
    """Return the cells of a setting of the grid, one for each benchmark."""
    found = []
    for cell in cells:
        values = cell.setting.values
        if not cell.baseline and (values["kv_budget"], values.get("thinking_tokens", UNLIMITED)) == (kept, cap):
            found.append(cell)
    return found


def pair_numbers(cells: Sequence[CellTraces], rows: Sequence[Json], pairs: Sequence[tuple[int, int]]) -> list[Json]:
    """Return forgetting minus stopping at about equal cost, paired by problem, in points."""
    costs = {(row["kept"], row["cap"]): row["work"] for row in rows}
    found = []
    for kept, cap in pairs:
        sides = list(zip(at(cells, kept, UNLIMITED), at(cells, ALL, cap), strict=True))
        difference = difference_of_cells(sides, Claim.LIKE, [Claim.LIKE])
        works = {"work_kept": costs[kept, UNLIMITED], "work_cap": costs[ALL, cap]}
        found.append({"kept": kept, "cap": cap, **works, **difference.in_percent(), "p": round(difference.p, 8)})
    return found


def is_cut_alone(cell: CellTraces, benchmark: str) -> bool:
    """Return whether the traces of a cell are cut and never compressed."""
    values = cell.setting.values
    return cell.benchmark == benchmark and values.get("kv_budget") == ALL and "thinking_tokens" in values


def cut_numbers(cell: CellTraces, full: CellTraces) -> Json:
    """Return how many right answers of the full cache a cap cuts, and how many of these stay right."""
    cap = cell.setting.values["thinking_tokens"]
    was_right = cell.in_order(full.grades, cell.place)[:, 0] == 1
    is_cut = (cell.traces["thinking_tokens"][:, 0] >= cap) & was_right
    right = int((cell.grades[:, 0][is_cut] == 1).sum())
    return {"benchmark": cell.benchmark, "cap": cap, "cut": int(is_cut.sum()), "right": right}


# -- the page ----------------------------------------------------------------------------------------------------------


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    found = []
    for model, of_model in numbers.items():
        name = model.removeprefix("embedded:")
        caps = list(dict.fromkeys(row["cap"] for row in of_model["settings"]))
        by_place = {(row["kept"], row["cap"]): row for row in of_model["settings"]}
        for kept in dict.fromkeys(row["kept"] for row in of_model["settings"]):
            label = "all" if kept == ALL else str(kept)
            cells = [f"{name}, {label}", *(cell_text(by_place[kept, cap]) for cap in caps)]
            found.append(f"| {' | '.join(cells)} |")
    for model, of_model in numbers.items():
        for pair in of_model["pairs"]:
            limits = f"{pair['value']:+.1f} ({pair['low']:+.1f} to {pair['high']:+.1f})"
            p = "< 0.001" if pair["p_holm"] < 0.001 else f"{min(pair['p_holm'], 1):.3f}"
            found.append(
                f"| {model.removeprefix('embedded:')} | {pair['kept']} tokens, {pair['work_kept']:.0f} % | "
                f"cap {pair['cap']}, {pair['work_cap']:.0f} % | {limits} | {p} |"
            )
    for model, of_model in numbers.items():
        for row in of_model["cut"]:
            name = model.removeprefix("embedded:")
            found.append(f"| {name} | {row['benchmark']} | {row['cap']} | {row['cut']} | {row['right']} |")
    return found


def cell_text(row: Json) -> str:
    """Return the points lost with a mark, and the work: `*` proven to lose at most the margin, `!` to lose more."""
    mark = "*" if row["proven"] else "!" if row["broken"] else ""
    # No loss has a sign.
    return f"{round(row['loses'], 1) + 0.0:.1f}{mark} ({row['work']:.0f} %)"


# -- the figure --------------------------------------------------------------------------------------------------------


# -- runs --------------------------------------------------------------------------------------------------------------
