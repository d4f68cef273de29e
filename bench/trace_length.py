"""Loss by the length of the thinking: ledgers of 8 to 36 lines, embedded models.

    python bench/trace_length.py --out bench/results/trace_length.json --figure docs/images/trace-length.png

Decodes (or resumes) a run for each length: `dynts` and `random` at a KV budget of 120 for every length, and of 10
tokens for each line. The predictions are in recipes/embedded/predictions.md. `outcomes` has for each model, length,
policy and budget the outcomes by problem as bits, in the order of the problems, the memory saved in percent, and the
tokens of thinking; `numbers` the points lost against the full cache with the limits of `kvatlas describe`, which
`bench/audit.py` computes again from the outcomes.
"""

import tempfile
from pathlib import Path
from typing import Any

import kvatlas
from common import arguments, keep
from kvatlas.core import grouped
from kvatlas.report.result import analyse
from kvatlas.report.view_options import ReadOptions
from outcomes import Json, to_hex, write_run

PAGES = ("docs/findings/length.md",)

LINES = (8, 12, 18, 24, 30, 36)
MODELS = ("embedded:tiny-llama", "embedded:tiny-qwen")
FIXED = 120
TOKENS_PER_LINE = 10


def spec(lines: int) -> dict[str, Any]:
    settings = []
    for budget in sorted({FIXED, TOKENS_PER_LINE * lines}):
        rule = {"kv_budget": budget, "local_window": 16, "ratio": 0.5}
        settings += [{"policy": "dynts", **rule}, {"policy": "random", **rule}]
    return {
        "models": list(MODELS),
        "benchmarks": [f"LEDGER{lines}"],
        "problems": 60,
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 1200},
        "lose_at_most": 5,
        "baseline": [{"policy": "full"}],
        "settings": settings,
    }


def outcomes_of_length(run: kvatlas.Run, lines: int) -> list[Json]:
    """Return the outcomes of each setting of a run, with the full cache's."""
    outcomes: dict[tuple[str, str], dict[str, bool]] = {}
    settings: dict[tuple[str, str], Any] = {}
    thinking: dict[tuple[str, str], list[int]] = {}
    memory: dict[tuple[str, str], list[float]] = {}
    for trace in run.traces(texts=False):
        key = trace.model, str(trace.setting)
        settings[key] = trace.setting
        outcomes.setdefault(key, {})[trace.problem] = trace.grade.correct
        thinking.setdefault(key, []).append(trace.usage.thinking_tokens or 0)
        memory.setdefault(key, []).append(trace.usage.mean_kv_tokens or 0.0)

    rows = []
    for (model, name), setting in settings.items():
        if name == "full":
            continue
        full = outcomes[model, "full"]
        of_full = thinking[model, "full"]
        rows.append(
            {
                "model": model,
                "lines": lines,
                "policy": setting.policy,
                "kv_budget": setting.values["kv_budget"],
                "memory_saved": round(100 * (1 - sum(memory[model, name]) / sum(memory[model, "full"])), 1),
                "thinking_tokens": round(sum(of_full) / len(of_full), 1),
                "right": "".join("01"[outcomes[model, name][problem]] for problem in sorted(full)),
                "full_right": "".join("01"[full[problem]] for problem in sorted(full)),
            }
        )
    return rows


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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS), figsize=(7, 2.9), sharey=True, layout="constrained")
    colours = {"dynts": "#1f5fa8", "random": "#8a8a8a"}
    for panel, model in zip(axes, MODELS, strict=True):
        panel.axhline(5, color="#b03030", linewidth=0.8)
        for policy, colour in colours.items():
            for is_fixed, style in ((True, "-"), (False, "--")):
                chosen = []
                for row in rows:
                    is_here = (row["model"], row["policy"]) == (model, policy)
                    if is_here and row["kv_budget"] == (FIXED if is_fixed else TOKENS_PER_LINE * row["lines"]):
                        chosen.append(row)
                lengths = [row["thinking_tokens"] for row in chosen]
                losses = [row["loses"] for row in chosen]
                below = [row["loses"] - row["low"] for row in chosen]
                above = [row["high"] - row["loses"] for row in chosen]
                label = f"{policy}, {f'{FIXED} tokens' if is_fixed else f'{TOKENS_PER_LINE} tokens a line'}"
                panel.errorbar(
                    lengths, losses, yerr=(below, above), color=colour, linestyle=style, marker="o", markersize=3,
                    linewidth=1.2, elinewidth=0.6, label=label,
                )  # fmt: skip
        panel.set_title(model.removeprefix("embedded:"), fontsize=9)
        panel.set_xlabel("thinking tokens of the full cache", fontsize=8)
        panel.tick_params(labelsize=7)
    axes[0].set_ylabel("points lost against the full cache", fontsize=8)
    axes[0].legend(fontsize=6.5, frameon=False, loc=(0.03, 0.27))
    figure.savefig(path, dpi=160)


def main() -> None:
    options = arguments(__doc__, runs=Path("runs/length"), figure=Path)
    outcomes = []
    for length in LINES:
        run = kvatlas.sweep(spec(length), options.runs / str(length), on_message=print)
        outcomes += outcomes_of_length(run, length)
    numbers = numbers_of(outcomes)
    if options.figure:
        draw(numbers, options.figure)
    keep(options, bench="trace_length", numbers=numbers, outcomes=outcomes)
    print("\n".join(lines(numbers)))


if __name__ == "__main__":
    main()
