"""Seconds until commands answer that load no model: `--help` and the lists.

    python bench/startup.py --rounds 5

Each command is a fresh process; one run of each warms the file cache. `python` is `python -c pass`, the floor. Prints
one JSON document.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from common import arguments, keep

COMMANDS = {"python": [sys.executable, "-c", "pass"]} | {
    name: [sys.executable, "-m", "kvatlas", *name.split()]
    for name in ("--help", "sweep --help", "policies", "benchmarks", "models")
}


def main() -> None:
    options = arguments(__doc__, rounds=5)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(-1, options.rounds):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    keep(
        options,
        bench="startup",
        seconds={name: round(statistics.median(result), 3) for name, result in seconds.items()},
        fastest={name: round(min(result), 3) for name, result in seconds.items()},
    )


if __name__ == "__main__":
    main()
