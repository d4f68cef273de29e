"""Measure the memory of workers that share the weights of a model, by proportional set size.

    python bench/shared_weights.py --model smollm2-135m-think --benchmark WORDS4-5 --workers 2 --problems 8

Runs the full cache on so many problems twice with a new folder of caches: the first run converts the model, if it is a
GGUF, and packs its weights, the second finds both. Four times a second the proportional set sizes of the run's
processes are added up, in which a page that several processes share counts once. `workers` is the largest sum without
the driver, `all` the largest with it, `driver` the largest of the driver alone, all in bytes. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, keep
from kvatlas import models


def children(process: int) -> list[int]:
    """Return the processes below one."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def proportional(process: int) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(words: list[str], cache: Path) -> dict[str, Any]:
    """Run a command with a folder of caches; return the largest memory of its processes and its seconds."""
    began = time.monotonic()
    peaks = {"workers": 0, "all": 0, "driver": 0}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "KVATLAS_CACHE": str(cache)}
    run = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment)
    while run.poll() is None:
        try:
            workers = sum(map(proportional, children(run.pid)))
        except OSError:
            continue
        driver = proportional(run.pid)
        for name, size in (("workers", workers), ("all", workers + driver), ("driver", driver)):
            peaks[name] = max(peaks[name], size)
        time.sleep(0.25)
    return {**peaks, "seconds": round(time.monotonic() - began, 1), "exit_code": run.returncode}


def main() -> None:
    args = arguments(
        __doc__,
        workers=2,
        problems=8,
        max_new_tokens=200,
        batch=64,
        model="smollm2-135m-think",
        benchmark="WORDS4-5",
    )
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        words = [sys.executable, "-m", "kvatlas", "run", args.model, args.benchmark, "--workers", str(args.workers)]
        words += ["--problems", str(args.problems), "--max-new-tokens", str(args.max_new_tokens)]
        words += ["--batch-size", str(args.batch)]
        for name in ("first", "second"):
            runs[name] = measure([*words, "--out", f"{folder}/{name}"], cache)
        os.environ["KVATLAS_CACHE"] = str(cache)
        weight_bytes = models.find(args.model).weight_bytes
    keep(args, bench="shared_weights", weight_bytes=weight_bytes, runs=runs)


if __name__ == "__main__":
    main()
