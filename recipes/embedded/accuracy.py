"""Measure an embedded model with the full cache: Pass@1 of panels, and by kind of problem.

    python recipes/embedded/accuracy.py --model embedded:tiny-llama --name tiny-llama --seed 1
    python recipes/embedded/accuracy.py --cards

The first measures a model and writes `accuracy/tiny-llama-seed1.json`; with --first the model is one before its
further training, and the file ends in `-first`. The second writes all that was measured into the model cards.
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
#: Chains and ledgers of mixed sizes, because the size at which a model begins to fail differs from seed to seed.
PANELS = ("SEQBENCH-6x6", "CHAIN6-14", "CHAIN7-16", "CHAIN10-17", "LEDGER8-36", "LEDGER24-36")
MAZES = (
    *("4x4", "5x5", "4x4-N0", "5x5-N0.5", "6x6-N0", "6x6-N0.5", "6x6-N1.5", "4x6-N0.8"),
    *("6x6-L10-N0.5", "6x6-L10-N1.5", "6x6-L14", "6x6-L14-N0.5", "6x6-L16", "6x6-L18"),
    *("4x4-B1", "5x5-B1", "6x6-B1", "4x4-B1-N0", "5x5-B1-N0.5", "6x6-B1-N0.5", "5x5-B1-N1.5"),
)
KINDS = (
    *(f"CHAIN{size}" for size in range(3, 18)),
    *(f"SEQBENCH-{name}" for name in MAZES),
    *(f"LEDGER{size}" for size in (8, 16, 24, 30, 36)),
)
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
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 1100},
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


def tables(name: str) -> str:
    """Return the tables of a model, all its seeds side by side."""
    columns = {}
    for file in sorted(RESULTS.glob(f"{name}-seed*.json")):
        data = json.loads(file.read_text())
        columns[f"seed {data['seed']}{', before ledgers' if data['first'] else ''}"] = data

    def table(part: str, benchmarks: tuple[str, ...]) -> list[str]:
        rows = [f"| {part} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for benchmark in benchmarks:
            cells = [cell(data[f"{part}s"].get(benchmark)) for data in columns.values()]
            rows.append(f"| {benchmark} | {' | '.join(cells)} |")
        return rows

    return "\n".join([*table("panel", PANELS), "", *table("kind", KINDS)])


def cell(measurement: dict[str, Any] | None) -> str:
    """Return Pass@1 with its interval; a dash for what was not measured."""
    if measurement is None:
        return "-"
    low, high = measurement["interval"]
    return f"{measurement['pass_at_1']:.1f} ({low:.0f} to {high:.0f})"


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
    parser.add_argument("--first", action="store_true", help="a model before its further training")
    parser.add_argument("--cards", action="store_true", help="write what was measured into the model cards")
    options = parser.parse_args()
    if options.model:
        result = {
            "program": "recipes/embedded/accuracy.py",
            "name": options.name,
            "seed": options.seed,
            "first": options.first,
            "panels": measured(options.model, PANELS, PANEL),
            "kinds": measured(options.model, KINDS, KIND),
        }
        RESULTS.mkdir(exist_ok=True)
        file = f"{options.name}-seed{options.seed}{'-first' if options.first else ''}.json"
        (RESULTS / file).write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
    if options.cards:
        for name in ("tiny-llama", "tiny-qwen"):
            write_card(name)


if __name__ == "__main__":
    main()
