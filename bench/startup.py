"""Seconds until commands answer that load no model: `--help` and the lists.

    python bench/startup.py --rounds 5

Each command is a fresh process; one run of each warms the file cache. `python` is `python -c pass`, the floor. Prints
one JSON document.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from keeping import keep

PYTHON = [sys.executable]
COMMANDS = {
    "python": [*PYTHON, "-c", "pass"],
    **{
        " ".join(words): [*PYTHON, "-m", "kvatlas", *words]
        for words in (["--help"], ["sweep", "--help"], ["policies"], ["benchmarks"], ["models"])
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(-1, options.rounds):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    keep(
        {
            "bench": "startup",
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "seconds": {name: round(statistics.median(result), 3) for name, result in seconds.items()},
            "fastest": {name: round(min(result), 3) for name, result in seconds.items()},
        },
        options.out,
    )


if __name__ == "__main__":
    main()
