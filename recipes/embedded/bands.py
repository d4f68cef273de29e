"""Do the embedded models lie in their bands? Full-cache Pass@1 on held-out problems, four panels of rising difficulty.

    python recipes/embedded/bands.py --models embedded:tiny-llama embedded:tiny-qwen

Prints one JSON object: for each model and panel Pass@1 in points with its 95 % interval, its band, and how far outside
it lies (0: inside).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from kvatlas.results import Store
from kvatlas.stats.estimates.cells import gather
from kvatlas.sweeps import make_plan, parse_spec, sweep

PROBLEMS = 300
#: Panels and the bands of their Pass@1 in points. Chains are of mixed sizes, because the size at which a model begins
#: to fail differs from seed to seed.
BANDS = {"SEQBENCH-6x6": (90, 99), "CHAIN6-14": (75, 90), "CHAIN7-16": (55, 75), "CHAIN10-17": (35, 55)}


def outside(value: float, band: tuple[int, int]) -> float:
    """Points from a value to its band."""
    low, high = band
    return round(max(low - value, value - high, 0.0), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["embedded:tiny-llama", "embedded:tiny-qwen"])
    parser.add_argument("--benchmarks", nargs="+", default=list(BANDS))
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--out", type=Path, help="folder of the run; default: kept nowhere")
    options = parser.parse_args()
    spec = {
        "models": options.models,
        "benchmarks": options.benchmarks,
        "problems": options.problems,
        "samples": 1,
        "sampling": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 700},
        "baseline": {"policy": "full"},
    }
    by_name: dict[str, dict[str, object]] = {model: {} for model in options.models}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        sweep(make_plan(parse_spec(spec)), folder)
        with Store.open(folder) as store:
            for gathered in gather(store.manifest(), store.traces(texts=False)):
                cell, expected = gathered.cell(), gathered.expected
                estimate = cell.estimate
                row: dict[str, object] = {
                    "pass_at_1": round(100 * estimate.value, 1),
                    "interval": [round(100 * (x or 0), 1) for x in (estimate.low, estimate.high)],
                    "output_tokens": round(cell.output_tokens_mean or 0),
                    "truncated": cell.truncated,
                }
                band = BANDS.get(expected.benchmark)
                if band is not None:
                    row |= {"band": band, "outside": outside(100 * estimate.value, band)}
                by_name[expected.model][expected.benchmark] = row
    print(json.dumps({"program": "recipes/embedded/bands.py", "problems": options.problems, "models": by_name}))


if __name__ == "__main__":
    main()
