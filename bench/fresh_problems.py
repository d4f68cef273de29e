"""Settings that were chosen on the demo's problems, judged on problems that no setting was tried on before.

    python bench/fresh_problems.py

The demo's budget and best cells were read off its first problems, which flatters them. This runs one cell for each
policy (window 32, ratio 0.3) and the demo's best mean cell of `dynts` on both models (window 32, ratio 0.5) on the
problems from `--first` on, with the full cache beside them. Prints one JSON document, by model; points, 95 % intervals,
sign-flip p.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas.results import Store
from kvatlas.stats.paired import paired_difference
from kvatlas.sweeps import make_plan, parse_spec, sweep

MODELS = ["embedded:tiny-llama", "embedded:tiny-qwen"]
BENCHMARKS = ["SEQBENCH-6x6", "CHAIN6-14", "CHAIN7-16", "CHAIN10-17"]
CELL = {"kv_budget": 288, "ratio_over": "thinking", "local_window": 32}
SETTINGS: list[dict[str, Any]] = [
    {"policy": "full"},
    *({"policy": name, **CELL, "ratio": 0.3} for name in ("dynts", "random", "window")),
    {"policy": "dynts", **CELL, "ratio": 0.5},
]
#: Grades by (benchmark, problem) and sample.
Outcomes = dict[tuple[str, str], dict[int, float]]


def difference(outcomes: Outcomes, other: Outcomes) -> dict[str, Any]:
    result = paired_difference(outcomes, other)
    points = {"value": result.value, "low": result.low, "high": result.high}
    return {name: round(100 * x, 1) for name, x in points.items()} | {"p": result.p, "problems": result.problems}


def main() -> None:
    options = arguments(__doc__, first=100, problems=60)
    spec = {
        "models": MODELS,
        "benchmarks": BENCHMARKS,
        "problems": options.first + options.problems,
        "samples": 1,
        "sampling": {"max_new_tokens": 700},
        "baseline": SETTINGS,
    }
    grades: dict[tuple[str, str, float | None], Outcomes] = {}
    with tempfile.TemporaryDirectory() as folder:
        sweep(make_plan(parse_spec(spec)), Path(folder))
        with Store.open(Path(folder)) as store:
            for _, trace in store.traces(texts=False):
                if int(trace.problem.rpartition("-")[2]) >= options.first:
                    name = (trace.model, trace.setting.policy, trace.setting.values.get("ratio"))
                    stored = grades.setdefault(name, {}).setdefault((trace.benchmark, trace.problem), {})
                    stored[trace.sample] = float(trace.grade.correct)
    by_name = {
        model: summary({name[1:]: stored for name, stored in grades.items() if name[0] == model}) for model in MODELS
    }
    keep(options, bench="fresh_problems", models=by_name)


def summary(grades: dict[tuple[str, float | None], Outcomes]) -> dict[str, Any]:
    """One model's differences, from the grades by (policy, ratio)."""
    learned, best, full = grades["dynts", 0.3], grades["dynts", 0.5], grades["full", None]
    return {
        "dynts_minus": {name: difference(learned, grades[name, 0.3]) for name in ("random", "window")},
        "best_minus_full": {name: difference(on(name, best), on(name, full)) for name in BENCHMARKS},
    }


def on(benchmark: str, outcomes: Outcomes) -> Outcomes:
    return {key: samples for key, samples in outcomes.items() if key[0] == benchmark}


if __name__ == "__main__":
    main()
