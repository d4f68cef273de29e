"""Measure an embedded model with the full cache: panels in their bands, and Pass@1 by kind of problem.

    python recipes/embedded/accuracy.py --model hf:build/embedded/tiny-llama-seed2 --name tiny-llama --seed 2
    python recipes/embedded/accuracy.py --cards

The first measures a model and writes `accuracy/tiny-llama-seed2.json`; the second writes all that was measured into the
model cards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import kvatlas
from kvatlas.results import Store
from kvatlas.stats.table import TraceTable
from kvatlas.sweeps import make_plan, parse_spec, sweep

RESULTS = Path(__file__).parent / "accuracy"
CARDS = Path(kvatlas.__file__).parent / "models" / "embedded"
#: Panels and the bands of their Pass@1 in points. Chains are of mixed sizes, because the size at which a model begins
#: to fail differs from seed to seed.
BANDS = {"SEQBENCH-6x6": (90, 99), "CHAIN6-14": (75, 90), "CHAIN7-16": (55, 75), "CHAIN10-17": (35, 55)}
MAZES = (
    *("4x4", "5x5", "4x4-N0", "5x5-N0.5", "6x6-N0", "6x6-N0.5", "6x6-N1.5", "4x6-N0.8"),
    *("6x6-L10-N0.5", "6x6-L10-N1.5", "6x6-L14", "6x6-L14-N0.5", "6x6-L16", "6x6-L18"),
    *("4x4-B1", "5x5-B1", "6x6-B1", "4x4-B1-N0", "5x5-B1-N0.5", "6x6-B1-N0.5", "5x5-B1-N1.5"),
)
KINDS = (*(f"CHAIN{size}" for size in range(3, 18)), *(f"SEQBENCH-{name}" for name in MAZES))
#: Problems of each panel, and of each kind.
PANEL, KIND = 300, 100


def measured(model: str, benchmarks: tuple[str, ...], problems: int) -> dict[str, dict[str, Any]]:
    """By benchmark Pass@1 in points with its 95 % interval, output tokens, truncated traces, the mean progress, and the
    traces in per cent that get further than a tenth of the way and not beyond nine."""
    spec = {
        "models": [model],
        "benchmarks": list(benchmarks),
        "problems": problems,
        "samples": 1,
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 700},
        "baseline": {"policy": "full"},
    }
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        sweep(make_plan(parse_spec(spec)), Path(folder))
        with Store.open(Path(folder)) as store:
            traces = list(store.traces(texts=False))
            for gathered in TraceTable(store.manifest(), store.columns()).cells():
                name = gathered.expected.benchmark
                progress = [trace.grade.progress for _, trace in traces if trace.benchmark == name]
                cell, estimate = gathered.cell, gathered.cell.estimate
                rows[name] = {
                    "pass_at_1": round(100 * estimate.value, 1),
                    "interval": [round(100 * (end or 0), 1) for end in (estimate.low, estimate.high)],
                    "output_tokens": round(cell.output_tokens_mean or 0),
                    "truncated": cell.truncated,
                    "progress": round(fmean(progress), 3),
                    "midway": round(100 * fmean(0.1 < value < 0.9 for value in progress), 1),
                }
    return rows


def outside(panel: str, value: float) -> float:
    """Points from a value to the panel's band; 0 within."""
    low, high = BANDS[panel]
    return round(max(low - value, value - high, 0.0), 1)


def tables(name: str) -> str:
    """Return the tables of a model, all its seeds side by side."""
    seeds = {
        data["seed"]: data
        for file in sorted(RESULTS.glob(f"{name}-seed*.json"))
        for data in [json.loads(file.read_text())]
    }

    def row(benchmark: str, label: str, part: str) -> str:
        values = [data[part][benchmark] for data in seeds.values()]
        shown = (
            f"{value['pass_at_1']:.1f} ({value['interval'][0]:.0f} to {value['interval'][1]:.0f})" for value in values
        )
        return f"| {label} | {' | '.join(shown)} |"

    def head(first: str) -> list[str]:
        return [f"| {first} | {' | '.join(f'seed {seed}' for seed in seeds)} |", "|---" * (len(seeds) + 1) + "|"]

    panels = [row(panel, f"{panel} | {low} to {high}", "panels") for panel, (low, high) in BANDS.items()]
    first, rule = head("panel | band")
    return "\n".join([first, f"{rule}---|", *panels, "", *head("kind"), *(row(kind, kind, "kinds") for kind in KINDS)])


def write_card(name: str) -> None:
    """Put the tables between the two comments in the model's card."""
    card = CARDS / name / "README.md"
    before, start, rest = card.read_text().partition("<!-- accuracy.py -->\n")
    _, end, after = rest.partition("<!-- end -->")
    card.write_text(f"{before}{start}{tables(name)}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as kvatlas names it")
    parser.add_argument("--name", choices=("tiny-llama", "tiny-qwen"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--cards", action="store_true", help="write what was measured into the model cards")
    options = parser.parse_args()
    if options.model:
        panels = measured(options.model, tuple(BANDS), PANEL)
        result = {
            "program": "recipes/embedded/accuracy.py",
            "name": options.name,
            "seed": options.seed,
            "panels": {name: row | {"outside": outside(name, row["pass_at_1"])} for name, row in panels.items()},
            "kinds": measured(options.model, KINDS, KIND),
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.name}-seed{options.seed}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    if options.cards:
        for name in ("tiny-llama", "tiny-qwen"):
            write_card(name)


if __name__ == "__main__":
    main()
