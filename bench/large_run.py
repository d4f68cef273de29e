"""Seconds and memory of `sweep` on a complete run, `map`, `describe` and the trace table, on made runs of many traces.

    python bench/large_run.py --out bench/results/large_run.json     # 1,952,000 traces of 50 tokens, 99,552 of 8,000
    python bench/large_run.py --problems 10 --samples 4 --long-problems 0      # in small
    python bench/large_run.py --run runs/demo --out bench/results/demo_commands.json     # `describe`, `map` and `view`

61 settings on chains by embedded:tiny-llama. Each command is a process of its own: `seconds` of the clock,
`cpu_seconds` of it, `peak_mb` at most. `sweep` finds that nothing is left to decode, `table` loads the trace table and
does no more. Prints one JSON document.

With --run the commands on that run take turns, `--rounds` times after one turn that does not count: medians and least
CPU seconds, of `view` until it says its address.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import arguments, keep, processor_seconds
from kvatlas.core import EvictionTrace, Grade, Status, Trace, Usage
from kvatlas.models import find
from kvatlas.results import Expected, Store
from kvatlas.sweeps import make_plan, parse_spec

MODEL = "embedded:tiny-llama"
LOAD = "import sys; from kvatlas.stats.run_data import RunData; RunData.open(sys.argv[1]).cells"
SPEC = {
    "models": [MODEL],
    "benchmarks": ["CHAIN8"],
    "sampling": {"max_new_tokens": 400},
    "settings": [{"policy": policy, "kv_budget": 400, "ratio_over": "thinking"} for policy in ("dynts", "random")],
    "axes": {"local_window": [8, 16, 32, 48, 64, 96], "ratio": [0.1, 0.2, 0.3, 0.4, 0.5]},
}


def write_traces(store: Store, cells: Sequence[Expected], tokens: int, prompt: int, budget: int) -> int:
    """Write traces that all say the same and differ in their grades and costs; how many there are.

    A cell is written at once: trace by trace they would take hours.
    """
    rng = random.Random(0)
    words = find(MODEL).tokenizer.encode("a = 1 ; b = 2 ; c = a + b ? c .\n", add_special_tokens=False)
    new = tuple((words * (tokens // len(words) + 1))[:tokens])
    left = (0,) * prompt + tuple(
        budget + i // 1000 * 1000 if i < tokens // 2 and i % 3 else 0 for i in range(tokens - 1)
    )
    evictions = EvictionTrace(1, left, tuple(int(not step) for step in left))

    def traces(cell: Expected) -> Iterator[tuple[str, Trace]]:
        kept = None if cell.setting.policy == "full" else evictions
        for number, problem in enumerate(cell.problems):
            for sample in range(cell.samples):
                right = rng.random() < 0.35 + 0.6 * number / len(cell.problems)
                status = Status.OK if right or rng.random() < 0.5 else Status.TRUNCATED
                peak = min(budget, prompt + tokens)
                usage = Usage(prompt, tokens, tokens // 2, peak, 0.8 * peak + rng.random(), 1, 5 + rng.random())
                grade = Grade(right, float(right), "7" if right else None, status)
                where = cell.model, cell.benchmark, problem, sample, cell.setting
                yield cell.run_key, Trace(*where, new, "text " * tokens, grade, usage, kept)

    for cell in cells:
        store.add_all(traces(cell))
    return sum(len(cell.problems) * cell.samples for cell in cells)


#: Runs a command and prints its use of the machine. A process begins with the peak memory of the one that starts it:
#: this one is small.
MEASURE = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
json.dump({"cpu_seconds": used.ru_utime + used.ru_stime, "peak_kb": used.ru_maxrss}, sys.stdout)
"""


def measured(*words: str) -> dict[str, Any]:
    """Measure time and memory of a command of the interpreter."""
    began = time.perf_counter()
    command = [sys.executable, "-S", "-c", MEASURE, sys.executable, *words]
    used = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used["cpu_seconds"], 2),
        "peak_mb": used["peak_kb"] // 1024,
    }


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
            "table": measured("-c", LOAD, folder),
            "sweep": measured("-m", "kvatlas", "sweep", str(path), "--out", folder, "--quiet"),
            "map": measured("-m", "kvatlas", "map", folder, "--out", str(scratch / "map.png")),
            "describe": measured("-m", "kvatlas", "describe", folder, "--json"),
        }


def start_of_view(folder: Path) -> float:
    """CPU seconds of `view` until it says its address."""
    command = [sys.executable, "-m", "kvatlas", "view", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        return processor_seconds(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def on_run(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds of the commands on a run, in turns."""
    taken: dict[str, list[float]] = {"describe": [], "map": [], "view": []}
    with tempfile.TemporaryDirectory() as scratch:
        picture = str(Path(scratch) / "map.png")
        for _ in range(rounds + 1):
            taken["describe"].append(measured("-m", "kvatlas", "describe", str(folder))["cpu_seconds"])
            taken["map"].append(measured("-m", "kvatlas", "map", str(folder), "--out", picture)["cpu_seconds"])
            taken["view"].append(start_of_view(folder))
    return {
        name: {"median_cpu_seconds": round(median(own[1:]), 2), "least_cpu_seconds": round(min(own[1:]), 2)}
        for name, own in taken.items()
    }


def main() -> None:
    long: dict[str, Any] = {"long_problems": 102, "long_samples": 16, "long_tokens": 8_000}
    args = arguments(__doc__, problems=500, samples=64, tokens=50, **long, scratch=Path, run=Path, rounds=7)
    if args.run:
        keep(args, bench="large_run", commands=on_run(args.run, args.rounds))
        return
    sizes = [(args.problems, args.samples, args.tokens), (args.long_problems, args.long_samples, args.long_tokens)]
    # As many short traces as there are long ones, to see what their length costs.
    sizes.append((args.long_problems, args.long_samples, args.tokens))
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        runs = [of_a_run(Path(scratch), *size) for size in sizes if size[0]]
    keep(args, bench="large_run", settings=61, processors=os.cpu_count(), runs=runs)


if __name__ == "__main__":
    main()
