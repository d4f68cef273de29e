"""The numbers of docs/findings/real-gpu.md: the map of Qwen2.5-Coder-1.5B on MATH500 that an H200 decoded.

`first` is the first sample of all problems, `second` the second sample of the problems that have it under all settings,
`second_first` the first sample of these.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.stats.numerics.bounded import mean_difference
from kvatlas.stats.table import CellTraces
from outcomes import Json, from_hex, to_hex, write_run

PAGES = ("docs/findings/real-gpu.md",)
MARGINS = (5, 3)
#: The limit of new tokens of the run: differences of tokens are at most this.
MAX_NEW_TOKENS = 1200


def numbers_of(outcomes: Json) -> Json:
    """Return the numbers of each part, in percent and points, from outcomes by problem."""
    second = set(outcomes["second"]["problems"])
    of_first = outcomes["first"]["problems"]
    indices = [index for index, problem in enumerate(of_first) if problem in second]
    parts = {**outcomes, "second_first": part_of(outcomes["first"], indices)}
    return {name: part_numbers(part) for name, part in parts.items()}


def part_of(outcomes: Json, indices: list[int]) -> Json:
    """Return the outcomes of the problems at these places."""

    def chosen(values: Any) -> Any:
        if isinstance(values, str):
            return to_hex([from_hex(values)[index] for index in indices])
        return [values[index] for index in indices]

    by_problem = ("missing", "right", "truncated", "compressed", "output_tokens", "mean_kv_tokens")
    settings = [entry | {name: chosen(entry[name]) for name in by_problem} for entry in outcomes["settings"]]
    shared = {name: chosen(outcomes[name]) for name in ("problems", "prompt_tokens")}
    return {**outcomes, **shared, "settings": settings}


def part_numbers(outcomes: Json) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(outcomes, run)
        results = {
            margin: analyse([run], ReadOptions(partial=True, lose_at_most=margin)).to_dict() for margin in MARGINS
        }
        cells = ReadOptions(partial=True).open_run(run).cells

    result = results[MARGINS[0]]
    choice = result["recommendation"]["all"][0]
    loss_of = {entry["setting"]: entry for entry in choice["losses"]}
    rows = []
    for map_ in result["maps"]:
        for cell in map_["estimates"]:
            loss = loss_of[cell["setting"]]
            row = {name: cell[name] for name in ("policy", "local_window", "ratio", "value", "low", "high")}
            row |= {
                name: cell[name] for name in ("kept_tokens_mean", "stays_tokens", "output_tokens_mean", "truncated")
            }
            rows.append(row | {name: loss[name] for name in ("loses", "loses_low", "loses_high", "p", "compressed")})
    full = result["maps"][0]["baselines"][0]
    return {
        "problems": len(outcomes["problems"]),
        "full": {name: full[name] for name in ("value", "low", "high", "output_tokens_mean", "truncated")},
        "proven": {
            margin: {
                "kept": [short(loss["setting"]) for loss in losses_at(results[margin]) if loss["shown"]],
                "broken": [short(loss["setting"]) for loss in losses_at(results[margin]) if loss["broken"]],
            }
            for margin in MARGINS
        },
        "recommended": short(choice["setting"]) if choice["setting"] else None,
        "saving": choice["saving"],
        "control": choice["control"] | {"setting": short(choice["control"]["setting"])},
        "settings": rows,
        "policies": {
            name: result["comparisons"][0][name] for name in ("first", "second", "difference", "low", "high", "p")
        },
        "effects": [
            {name: effect[name] for name in ("axis", "over", "p", "adjusted_p", "levels")}
            for effect in result["effects"]
        ],
        "equal_memory": {map_["policy"]: map_["equal_memory"] for map_ in result["maps"]},
        "tokens_minus_full": tokens_minus_full(cells),
        "recommended_minus_random": pair_difference(cells),
    }


def losses_at(result: Json) -> list[Json]:
    losses: list[Json] = result["recommendation"]["all"][0]["losses"]
    return losses


def short(setting: str) -> str:
    """Return the policy, window and ratio of a setting's text."""
    policy, _, rest = setting.partition("(")
    values = dict(item.split("=") for item in rest.rstrip(")").split(", "))
    return f"{policy} {values['local_window']} {values['ratio']}"


def tokens_minus_full(cells: list[CellTraces]) -> list[Json]:
    """Return new tokens minus the full cache's, in percent of these, for each policy and ratio, paired by problem."""
    by_group: dict[tuple[str, float], list[Any]] = {}
    full = next(cell for cell in cells if cell.baseline)
    of_full = full.traces["output_tokens"][:, 0]
    for cell in cells:
        if cell.baseline:
            continue
        tokens = cell.in_order(cell.traces["output_tokens"], full.place)[:, 0]
        by_group.setdefault((cell.setting.policy, cell.setting.values["ratio"]), []).append(tokens)
    found = []
    for (policy, ratio), windows in by_group.items():
        differences = np.mean(windows, axis=0) - of_full
        known = differences[~np.isnan(differences)]
        contrast = mean_difference(known / MAX_NEW_TOKENS)
        percent_of_full = 100 * MAX_NEW_TOKENS / of_full.mean()
        limits = {name: round(percent_of_full * getattr(contrast, name), 2) for name in ("value", "low", "high")}
        found.append({"policy": policy, "ratio": ratio, "problems": len(known), **limits})
    return found


def pair_difference(cells: list[CellTraces]) -> Json:
    """Return `rkv` minus `random` at window 128 and ratio 0.5, in points."""
    values = {}
    for cell in cells:
        if cell.setting.values.get("local_window") == 128 and cell.setting.values.get("ratio") == 0.5:
            values[cell.setting.policy] = cell.in_order(cell.grades, cells[0].place)[:, 0]
    contrast = mean_difference(values["rkv"] - values["random"])
    return {name: round(100 * getattr(contrast, name), 4) for name in ("value", "low", "high")}


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    first = numbers["first"]
    second = {(row["policy"], row["local_window"], row["ratio"]): row for row in numbers["second"]["settings"]}
    rows = []
    for row in first["settings"]:
        again = second[row["policy"], row["local_window"], row["ratio"]]
        cells = [
            f"{row['policy']}, {row['local_window']}, {row['ratio']}",
            f"{row['stays_tokens']:.0f}",
            f"{row['value']:.1f}",
            loss_text(row),
            f"{row['output_tokens_mean']:.0f}",
            str(row["truncated"]),
            loss_text(again),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    for policy, memory in first["equal_memory"].items():
        again = numbers["second"]["equal_memory"][policy]
        estimates = [
            f"{found['estimate']['difference']:.1f} ({found['estimate']['low']:.1f} to {found['estimate']['high']:.1f})"
            for found in (memory, again)
        ]
        rows.append(
            f"| {policy} | {len(memory['proven'])} of {memory['pairs']} | {estimates[0]} "
            f"| {len(again['proven'])} of {again['pairs']} | {estimates[1]} |"
        )
    for row in first["tokens_minus_full"]:
        limits = f"{row['value']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
        rows.append(f"| {row['policy']}, {row['ratio']} | {limits} |")
    return rows


def loss_text(row: Json) -> str:
    return f"{row['loses']:.1f} ({row['loses_low']:.1f} to {row['loses_high']:.1f})"
