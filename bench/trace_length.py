"""Loss by the length of the thinking: ledgers of 8 to 36 lines, embedded models.

    python bench/trace_length.py --out bench/results/trace_length.json --figure docs/images/trace-length.png

Decodes (or resumes) a run for each length: `dynts` and `random` at a KV budget of 120 for every length, and of 10
tokens for each line. The predictions are in recipes/embedded/predictions.md. `rows` has for each model, length, policy
and budget the points lost against the full cache with the limits of `kvatlas describe`, the tokens of thinking, and the
outcomes by problem as bits, in the order of the problems.
"""

from pathlib import Path
from typing import Any

import kvatlas
from common import arguments, keep

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


def rows_of(run: kvatlas.Run, lines: int) -> list[dict[str, Any]]:
    outcomes: dict[tuple[str, str], dict[str, bool]] = {}
    thinking: dict[tuple[str, str], list[int]] = {}
    memory: dict[tuple[str, str], list[float]] = {}
    for trace in run.traces(texts=False):
        key = trace.model, str(trace.setting)
        outcomes.setdefault(key, {})[trace.problem] = trace.grade.correct
        thinking.setdefault(key, []).append(trace.usage.thinking_tokens or 0)
        memory.setdefault(key, []).append(trace.usage.mean_kv_tokens or 0.0)

    rows = []
    for choice in run.describe().to_dict()["recommendation"]["all"]:
        model = choice["model"]
        full = memory[model, "full"]
        for loss in choice["losses"]:
            key = model, loss["setting"]
            (setting,) = {trace.setting for trace in run.traces(texts=False) if str(trace.setting) == loss["setting"]}
            bits = "".join("01"[outcomes[key][problem]] for problem in sorted(outcomes[key]))
            full_bits = "".join("01"[outcomes[model, "full"][problem]] for problem in sorted(outcomes[key]))
            rows.append(
                {
                    "model": model,
                    "lines": lines,
                    "policy": setting.policy,
                    "kv_budget": setting.values["kv_budget"],
                    "loses": loss["loses"],
                    "low": loss["loses_low"],
                    "high": loss["loses_high"],
                    "memory_saved": round(100 * (1 - sum(memory[key]) / sum(full)), 1),
                    "thinking_tokens": round(sum(thinking[model, "full"]) / len(thinking[model, "full"]), 1),
                    "outcomes": bits,
                    "full_outcomes": full_bits,
                }
            )
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
    axes[0].legend(fontsize=6.5, frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    options = arguments(__doc__, runs=Path("runs/length"), figure=Path)
    rows = []
    for lines in LINES:
        run = kvatlas.sweep(spec(lines), options.runs / str(lines), on_message=print)
        rows += rows_of(run, lines)
    if options.figure:
        draw(rows, options.figure)
    keep(options, bench="trace_length", rows=rows)


if __name__ == "__main__":
    main()
