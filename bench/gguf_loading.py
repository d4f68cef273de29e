"""Measure memory and time of reading a GGUF into int8: row by row, and by way of float32.

    python bench/gguf_loading.py qwen2.5-coder-1.5b.gguf --rounds 1 --out bench/results/gguf_loading.json

Both ways take turns, each in a fresh process with a new folder of caches: `rows` is the model option weights=int8, by
which no more than some rows are in float32 at a time; `float32` converts the whole model to float32 and packs that, as
for an adapter. Ten times a second the proportional set size of the process is read: `peak_bytes` is the largest,
`converting` that until the model is found. `disk_bytes` are those of the folder of caches at the end. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas import models
from shared_weights import proportional

WAYS = ("rows", "float32")


def load(file: Path, way: str) -> None:
    """Load a model in this process; print a line when it is found, and one when it is loaded."""
    model = models.find(f"hf:{file}", weights="int8" if way == "rows" else "auto")
    if way == "float32":
        model = replace(model, options=replace(model.options, weights="int8"))
    print(json.dumps({"converting": time.process_time()}), flush=True)
    model.load()
    print(json.dumps({"all": time.process_time(), "weights": model.weights_digest[:16]}), flush=True)


def measure(file: Path, way: str) -> dict[str, Any]:
    """Load a model in a fresh process with a new folder of caches."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, str(file), "--way", way]
        environment = {**os.environ, "KVATLAS_CACHE": cache}
        began = time.monotonic()
        lines = Path(cache) / "lines.txt"
        peaks = {"converting": 0, "all": 0}
        seconds = {}
        with lines.open("wb") as output:
            run = subprocess.Popen(command, stdout=output, env=environment)
            while run.poll() is None:
                peaks["all"] = max(peaks["all"], proportional(run.pid))
                if not lines.stat().st_size:
                    peaks["converting"] = peaks["all"]
                    seconds["converting"] = round(time.monotonic() - began, 1)
                time.sleep(0.1)
        if run.returncode:
            raise SystemExit(f"the way {way} ended with {run.returncode}")
        seconds["all"] = round(time.monotonic() - began, 1)
        first, last = map(json.loads, lines.read_text().splitlines())
        weights = last.pop("weights")
        cpu_seconds = {name: round(value, 1) for name, value in {**first, **last}.items()}
        disk = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
    return {
        "peak_bytes": peaks,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "disk_bytes": disk,
        "weights": weights,
    }


def main() -> None:
    options = arguments(__doc__, "file", rounds=1, way={"choices": WAYS}, ways=list(WAYS))
    if options.way:
        load(options.file, options.way)
        return
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            rounds[way].append(measure(options.file, way))
    del options.way
    keep(options, bench="gguf_loading", ways=rounds)


if __name__ == "__main__":
    main()
