"""A sweep under a real memory limit of the system, beside the same one without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

GIB = 2**30
SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN5"],
    "problems": 12,
    "samples": 2,
    "sampling": {"max_new_tokens": 200},
    "settings": {"policy": "window", "kv_budget": 90, "ratio_over": "thinking", "local_window": 8},
    "axes": {"ratio": [0.2, 0.5]},
}


def group() -> Path | None:
    """A control group of 1 GB below this process' own; None where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        top, limit = {
            "": ("/sys/fs/cgroup", "memory.max"),
            "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        }.get(controllers, ("", ""))
        if not top:
            continue
        made = Path(top) / path.strip("/") / f"kvatlas-attack-{os.getpid()}"
        try:
            made.mkdir()
            (made / limit).write_text(str(GIB))
        except OSError:
            if made.is_dir():
                made.rmdir()
            continue
        return made
    return None


def sweep(scratch: Path) -> dict[str, Any]:
    """Two workers and a batch that would be too large; whether the traces are those of a sweep without a limit."""
    (scratch / "spec.yaml").write_text(json.dumps(SPEC))
    limited = group()
    if limited is None:
        return {"tried": 0, "held": 0, "why": "no control group can be made here"}
    words = [sys.executable, "-m", "kvatlas", "sweep", str(scratch / "spec.yaml"), "--quiet"]

    def enter() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))

    try:
        inside = subprocess.run(
            [*words, "--out", str(scratch / "inside")], preexec_fn=enter, capture_output=True, text=True, check=False
        )
    finally:
        peak = next((int((limited / name).read_text()) for name in PEAKS if (limited / name).exists()), None)
        limited.rmdir()
    subprocess.run([*words, "--workers", "1", "--out", str(scratch / "outside")], check=True)
    same = inside.returncode == 0 and _tokens(scratch / "inside") == _tokens(scratch / "outside")
    return {"tried": 1, "held": int(same), "peak_bytes": peak, "said": inside.stderr[-300:]}


PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


def _tokens(folder: Path) -> list[Any]:
    from kvatlas.results import Store

    with Store.open(folder) as store:
        return [(trace.setting, trace.problem, trace.sample, trace.tokens) for _, trace in store.traces()]
