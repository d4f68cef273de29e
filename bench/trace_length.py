"""The numbers of docs/findings/length.md: loss by the length of the thinking, ledgers of 8 to 36 lines.

`outcomes` has for each model, length, policy and budget the outcomes by problem as bits, in the order of the problems,
the memory saved in percent, and the tokens of thinking; `numbers` the points lost against the full cache with the
limits of `kvatlas describe`.
"""

import tempfile
from pathlib import Path

from kvatlas.core import grouped
from kvatlas.report.result import analyse
from kvatlas.report.sources import ReadOptions
from outcomes import Json, to_hex, write_run

PAGES = ("docs/findings/length.md",)

MODELS = ("embedded:tiny-llama", "embedded:tiny-qwen")
FIXED = 120
TOKENS_PER_LINE = 10


def numbers_of(outcomes: list[Json]) -> list[Json]:
    """Return the points lost of each setting, with limits for all settings of a model and length at once."""
    numbers = []
    for (model, length), rows in grouped(outcomes, lambda row: (row["model"], row["lines"])).items():
        problems = len(rows[0]["right"])
        settings = [entry("full", {}, rows[0]["full_right"])]
        for row in rows:
            values = {"kv_budget": row["kv_budget"], "local_window": 16, "ratio": 0.5}
            settings.append(entry(row["policy"], values, row["right"]))

        # The costs are of no account for losses.
        run = {
            "model": model,
            "benchmark": f"LEDGER{length}",
            "kv_bytes": [0, 2],
            "axes": [],
            "problems": list(range(problems)),
            "prompt_tokens": [1] * problems,
            "settings": settings,
        }
        with tempfile.TemporaryDirectory() as folder:
            write_run(run, Path(folder) / "run")
            result = analyse([Path(folder) / "run"], ReadOptions(lose_at_most=5)).to_dict()
        losses = result["recommendation"]["all"][0]["losses"]
        for row, loss in zip(rows, losses, strict=True):
            of_row = {name: row[name] for name in ("model", "lines", "policy", "kv_budget")}
            of_row |= {"loses": loss["loses"], "low": loss["loses_low"], "high": loss["loses_high"]}
            numbers.append(of_row | {name: row[name] for name in ("memory_saved", "thinking_tokens")})
    return numbers


def entry(policy: str, values: Json, right: str) -> Json:
    """Return the outcomes of a setting as `write_run` takes them, without costs."""
    none = to_hex([False] * len(right))
    return {
        "policy": policy,
        "values": values,
        "baseline": policy == "full",
        "missing": none,
        "right": to_hex([digit == "1" for digit in right]),
        "truncated": none,
        "compressed": none,
        "output_tokens": [1] * len(right),
        "mean_kv_tokens": [1] * len(right),
    }


def lines(numbers: list[Json]) -> list[str]:
    """Return the lines of the page that hold the numbers: `dynts` at both budgets on both models."""
    rows = []
    for length, of_length in grouped(numbers, lambda row: row["lines"]).items():
        thinking = sum(row["thinking_tokens"] for row in of_length) / len(of_length)
        cells = [str(length), f"{thinking:.0f}"]
        for budget in (FIXED, TOKENS_PER_LINE * length):
            for model in MODELS:
                (row,) = (
                    row
                    for row in of_length
                    if (row["model"], row["policy"], row["kv_budget"]) == (model, "dynts", budget)
                )
                cells.append(f"{row['loses'] + 0.0:.1f} ({row['low']:.1f} to {row['high']:.1f})")
        if TOKENS_PER_LINE * length == FIXED:
            cells[-2:] = ["the same setting"] * 2
        rows.append(f"| {' | '.join(cells)} |")
    return rows
