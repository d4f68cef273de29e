"""A sweep under a real memory limit of the system, beside the same one without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN5"],
    "problems": 12,
    "samples": 2,
    "sampling": {"max_new_tokens": 200},
    "settings": {"policy": "window", "kv_budget": 90, "ratio_over": "thinking", "local_window": 8},
    "axes": {"ratio": [0.2, 0.5]},
}


#: Megabytes of the group, and options: what is chosen there, and more workers than there is room for.
TRIES: tuple[tuple[int, tuple[str, ...]], ...] = ((1024, ()), (800, ("--workers", "2", "--batch-size", "64")))
#: Directory, and the files of the limit and the peak, of version 2 and of version 1.
GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.peak"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
}


@contextmanager
def group(megabytes: int) -> Iterator[tuple[Path, str] | None]:
    """A control group with this limit below our own, and its file of the peak; None where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in GROUPS:
            continue
        top, limit, peak = GROUPS[controllers]
        made = Path(top) / path.strip("/") / f"kvatlas-attack-{os.getpid()}"
        try:
            made.mkdir()
            try:
                (made / limit).write_text(str(megabytes * 2**20))
                yield made, peak
                return
            finally:
                made.rmdir()
        except OSError:
            continue
    yield None


def sweep(scratch: Path) -> dict[str, Any]:
    """Sweeps in groups that are small; whether their traces are those of a sweep without a limit."""
    (scratch / "spec.yaml").write_text(json.dumps(SPEC))
    words = [sys.executable, "-m", "kvatlas", "sweep", str(scratch / "spec.yaml"), "--out"]
    subprocess.run([*words, str(scratch / "free"), "--quiet", "--workers", "1"], check=True)
    tried, faults, peaks = 0, {}, []
    for megabytes, options in TRIES:
        with group(megabytes) as result:
            if result is None:
                return {"tried": 0, "held": 0, "faults": {}, "why": "no control group can be made here"}
            here, peak = result
            run, tried = scratch / str(megabytes), tried + 1
            enter = partial(_enter, here)
            done = subprocess.run([*words, str(run), *options], preexec_fn=enter, capture_output=True, check=False)
            peaks.append(int((here / peak).read_text()))
            if done.returncode or _tokens(run) != _tokens(scratch / "free"):
                faults[f"{megabytes} MB"] = f"exit code {done.returncode}: {done.stderr[-200:]!r}"
    return {"tried": tried, "held": tried - len(faults), "faults": faults, "peak_bytes": peaks}


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _tokens(folder: Path) -> list[Any]:
    from kvatlas.results import Store

    with Store.open(folder) as store:
        return [(trace.setting, trace.problem, trace.sample, trace.tokens) for _, trace in store.traces()]
