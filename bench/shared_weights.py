"""Measure the memory of workers that share the weights of a model, by proportional set size.

    python bench/shared_weights.py --model smollm2-135m-think --benchmark WORDS4-5 --workers 2 --problems 8

Runs the full cache on so many problems and adds up the proportional set sizes of all processes of the run but the
driver, four times a second: a page that several processes share counts once. `peak_bytes` is the largest sum, beside
the bytes of the weights. The first run makes the file of packed weights, so run it twice. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    began = time.monotonic()
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "kvatlas", "run", args.model, args.benchmark, "--workers", str(args.workers)]
        words += ["--problems", str(args.problems), "--max-new-tokens", str(args.max_new_tokens)]
        words += ["--batch-size", str(args.batch), "--out", f"{folder}/run"]
        run = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        while run.poll() is None:
            try:
                workers = children(run.pid)
            except OSError:
                continue
            peak = max(peak, sum(map(proportional, workers)))
            time.sleep(0.25)
    weight_bytes = models.find(args.model).weight_bytes
    seconds = round(time.monotonic() - began, 1)
    keep(
        args,
        bench="shared_weights",
        exit_code=run.returncode,
        peak_bytes=peak,
        weight_bytes=weight_bytes,
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
