"""Seconds and memory of `sweep` on a complete run, `map` and `describe`, on made runs of many traces.

    python bench/large_run.py --out bench/results/large_run.json     # 1,952,000 traces of 50 tokens, 99,552 of 8,000
    python bench/large_run.py --problems 10 --samples 4 --long-problems 0      # in small

61 settings on chains by embedded:tiny-llama. Each command is a process of its own: `seconds` of the clock,
`cpu_seconds` of it, `peak_mb` at most. `sweep` finds that nothing is left to decode. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keeping import keep
from kvatlas.core import EvictionTrace, Grade, Status, Trace, Usage
from kvatlas.models import find
from kvatlas.results import Expected, Store
from kvatlas.results.rows import COLUMNS, row_of
from kvatlas.sweeps import make_plan, parse_spec

MODEL = "embedded:tiny-llama"
SPEC = {
    "models": [MODEL],
    "benchmarks": ["CHAIN8"],
    "sampling": {"max_new_tokens": 400},
    "settings": [{"policy": policy, "kv_budget": 400, "ratio_over": "thinking"} for policy in ("dynts", "random")],
    "axes": {"local_window": [8, 16, 32, 48, 64, 96], "ratio": [0.1, 0.2, 0.3, 0.4, 0.5]},
}


def write_traces(store: Store, cells: Sequence[Expected], tokens: int, prompt: int, budget: int) -> int:
    """Write traces that all say the same and differ in their grades and costs; how many there are.

    They are written at once: one by one they would take an hour.
    """
    rng, count = random.Random(0), 0
    words = find(MODEL).tokenizer.encode("a = 1 ; b = 2 ; c = a + b ? c .\n", add_special_tokens=False)
    new = tuple((words * (tokens // len(words) + 1))[:tokens])
    left = (0,) * prompt + tuple(budget + 1 if i < tokens // 2 and i % 3 else 0 for i in range(tokens - 1))
    places = [COLUMNS.index(name) for name in ("problem", "sample", "correct", "status", "usage")]
    with store._transaction():
        for cell in cells:
            usage = Usage(prompt, tokens, max(0, tokens - 20), min(budget, prompt + tokens), 0.0, 1, 0.0)
            evictions = None if cell.baseline else EvictionTrace(1, left, (1,) * len(left))
            grade = Grade(True, 1.0, "7", Status.OK)
            item = Trace(
                cell.model, cell.benchmark, "", 0, cell.setting, new, "text " * tokens, grade, usage, evictions
            )
            row, costs = list(row_of(cell.run_key, item)), vars(usage)
            for number, problem in enumerate(cell.problems):
                hard = 0.35 + 0.6 * number / len(cell.problems)
                for sample in range(cell.samples):
                    correct = int(rng.random() < hard)
                    status = "ok" if correct or rng.random() < 0.5 else "truncated"
                    own = costs | {"mean_kv_tokens": prompt + tokens / 2 + rng.random(), "seconds": 5 + rng.random()}
                    for place, value in zip(places, (problem, sample, correct, status, json.dumps(own)), strict=True):
                        row[place] = value
                    store._put(row, "{}")
                    count += 1
    return count


def measured(*words: str) -> dict[str, Any]:
    """What a command takes."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "kvatlas", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, words
    seconds = time.perf_counter() - began
    cpu = used.ru_utime + used.ru_stime
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_mb": used.ru_maxrss // 1024}


def of_a_run(scratch: Path, problems: int, samples: int, tokens: int) -> dict[str, Any]:
    """A run of so many problems and samples, made, read and deleted."""
    spec = {**SPEC, "problems": problems, "samples": samples}
    path = scratch / "spec.yaml"
    path.write_text(json.dumps(spec))
    plan = make_plan(parse_spec(spec))
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        with Store.create(Path(folder)) as store:
            manifest = plan.manifest()
            store.put_manifest(manifest)
            traces = write_traces(store, manifest.expected, tokens, max(plan.prompts[MODEL, "CHAIN8"]), 400)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        return {
            "traces": traces,
            "tokens": tokens,
            "store_gb": round(size / 1e9, 2),
            "sweep": measured("sweep", str(path), "--out", folder, "--quiet"),
            "map": measured("map", folder, "--out", str(scratch / "map.png")),
            "describe": measured("describe", folder, "--json"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--long-problems", type=int, default=102, help="of the run of long traces; 0 for none")
    parser.add_argument("--long-samples", type=int, default=16)
    parser.add_argument("--long-tokens", type=int, default=8_000)
    parser.add_argument("--scratch", type=Path, help="folder for the runs (default: the system's)")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    args = parser.parse_args()
    sizes = [(args.problems, args.samples, args.tokens), (args.long_problems, args.long_samples, args.long_tokens)]
    # As many short traces as there are long ones, to see what their length costs.
    sizes.append((args.long_problems, args.long_samples, args.tokens))
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        runs = [of_a_run(Path(scratch), *size) for size in sizes if size[0]]
    keep({"bench": "large_run", "settings": 61, "processors": os.cpu_count(), "runs": runs}, args.out)


if __name__ == "__main__":
    main()
