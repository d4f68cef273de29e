"""The numbers of docs/findings/engines.md: maps of llama.cpp's and vLLM's cache types, from outcomes by problem.

    python bench/engine_maps.py runs/llama-cpp --out bench/results/engine_maps.json
    python bench/engine_maps.py runs/key-biases --out bench/results/key_biases.json
    python bench/engine_maps.py runs/vllm --out bench/results/vllm_types.json

The texts of a run written from outcomes stand for equal and changed ones, so that `kvatlas` counts both again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from common import arguments, keep
from kvatlas.core import Setting, Status, Trace
from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from kvatlas.results import Store
from kvatlas.stats.numerics.bounded import mean_difference
from outcomes import Json, from_hex, to_hex, write_run

PAGES = ("docs/findings/engines.md",)


def outcomes_of(folder: Path) -> Json:
    """Return right answers, changed texts and new tokens of each setting of a run, by problem."""
    with Store.open(folder) as store:
        manifest = store.manifest()
        traces: dict[str, dict[str, Trace]] = {}
        for _, trace in store.traces():
            traces.setdefault(trace.setting.id, {})[trace.problem] = trace
    cells = [cell for cell in manifest.expected if cell.setting.id in traces]
    problems = list(cells[0].problems)
    reference = traces[next(cell for cell in cells if cell.baseline).setting.id]
    settings = []
    for cell in cells:
        found = traces[cell.setting.id]
        if len(found) < len(problems):
            # A setting that the clock cut is not read.
            continue
        entry = {
            "policy": cell.setting.policy,
            "values": cell.setting.values,
            "baseline": cell.baseline,
            "kv_bytes": cell.kv_bytes and list(cell.kv_bytes),
            "right": to_hex([found[problem].grade.correct for problem in problems]),
            "changed": to_hex([found[problem].text != reference[problem].text for problem in problems]),
            "truncated": to_hex([found[problem].grade.status is Status.TRUNCATED for problem in problems]),
            "output_tokens": [found[problem].usage.output_tokens for problem in problems],
        }
        settings.append(entry)
    return {
        "model": cells[0].model,
        "benchmark": cells[0].benchmark,
        "problems": problems,
        "axes": manifest.axes,
        "spec": manifest.spec,
        "settings": settings,
    }


def numbers_of(outcomes: Json) -> Json:
    """Return Pass@1, loss and changed texts of each setting, and differences of settings, in points."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(outcomes, run)
        result = analyse([run], ReadOptions()).to_dict()
    choice = result["recommendation"]["all"][0]
    loss_of = {entry["setting"]: entry for entry in choice["losses"]}

    rows: list[Json] = []
    right_of: dict[tuple[str, ...], list[bool]] = {}
    for entry in outcomes["settings"]:
        right = from_hex(entry["right"])
        row = {
            "setting": str(Setting.from_parameters(entry["policy"], **entry["values"])),
            "right": sum(right),
            "changed": sum(from_hex(entry["changed"])),
            "truncated": sum(from_hex(entry["truncated"])),
            "tokens": sum(entry["output_tokens"]) / len(right),
        }
        loss = loss_of.get(row["setting"])
        if loss is not None:
            row |= {name: loss[name] for name in ("loses", "loses_low", "loses_high", "shown", "broken")}
        if not entry["baseline"]:
            right_of[tuple(map(str, entry["values"].values()))] = right
        rows.append(row)
    return {
        "problems": len(outcomes["problems"]),
        "settings": rows,
        "effects": [
            {name: effect[name] for name in ("axis", "p", "adjusted_p", "levels")} for effect in result["effects"]
        ],
        "keys_minus_values": keys_minus_values(right_of),
        "unturned_minus_turned": points(right_of.get(("q4_0", "1", "q8_0")), right_of.get(("q4_0", "q8_0"))),
    }


def keys_minus_values(right_of: dict[tuple[str, ...], list[bool]]) -> Json | None:
    """Return the mean of settings with q4_0 keys minus that of settings with q4_0 values; None if one is missing."""
    types = list(dict.fromkeys(setting[0] for setting in right_of))
    keys = [right_of.get(("q4_0", other)) for other in types]
    values = [right_of.get((other, "q4_0")) for other in types]
    if None in keys or None in values:
        return None
    return points(np.mean(np.array(keys, float), axis=0), np.mean(np.array(values, float), axis=0))


def points(first: ArrayLike | None, second: ArrayLike | None) -> Json | None:
    """Return the difference of the means of two settings with its limits, in points; None if one is missing."""
    if first is None or second is None:
        return None
    contrast = mean_difference(np.array(first, float) - np.array(second, float))
    return {name: round(100 * getattr(contrast, name), 4) for name in ("value", "low", "high")}


def lines(numbers: Json) -> list[str]:
    """Return the lines of the page that hold the numbers."""
    rows = []
    for row in numbers["settings"]:
        cells = [
            row["setting"],
            f"{row['right']} of {numbers['problems']}",
            str(row["changed"]),
            f"{row['tokens']:.0f}",
        ]
        if "loses" in row:
            # Without the sign of a zero.
            cells.append(f"{round(row['loses'], 1) + 0.0:.1f} ({row['loses_low']:.1f} to {row['loses_high']:.1f})")
        else:
            cells.append("–")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    options = arguments(__doc__, "run")
    outcomes = outcomes_of(options.run)
    keep(options, outcomes=outcomes, numbers=numbers_of(outcomes))


if __name__ == "__main__":
    main()
