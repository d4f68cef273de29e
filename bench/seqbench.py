"""Mazes per second: draws and checks instances of 40x40 rooms over the published depths, on several processes.

    python bench/seqbench.py [--count 10000] [--processes 2]

The mazes go through the 60 settings of L in {40, 80, ..., 400} and B in {0, ..., 5}, with random N and S from 0 to 1.
Prints one JSON document as its last line. A second pass over a tenth of them must give the same mazes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import random
import time

from kvatlas.benchmarks.seqbench import Shape, draw, facts, format_plan

SETTINGS = [(length, doors) for doors in range(6) for length in range(40, 401, 40)]


def make(index: int) -> tuple[float, str]:
    """CPU seconds for one maze, and its digest."""
    length, doors = SETTINGS[index % len(SETTINGS)]
    rng = random.Random(f"bench seqbench {index}")
    shape = Shape(40, 40, length, doors, noise=rng.randrange(11) / 10, shuffle=rng.randrange(11) / 10)
    start = time.process_time()
    instance = draw(shape, rng)
    text = f"{facts(instance)}\n{format_plan(instance.plan)}"
    assert len(instance.plan) == length
    return time.process_time() - start, hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    make(0)
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        made = pool.map(make, range(options.count), chunksize=50)
    wall = time.perf_counter() - start
    again = range(0, options.count, 10)
    assert [make(i)[1] for i in again] == [made[i][1] for i in again]
    cpu = sorted(seconds for seconds, _ in made)
    print(
        json.dumps(
            {
                "bench": "seqbench",
                "instances": options.count,
                "grid": "40x40",
                "settings": len(SETTINGS),
                "processes": options.processes,
                "wall_seconds": round(wall, 1),
                "cpu_milliseconds": {
                    "mean": round(1e3 * sum(cpu) / len(cpu), 2),
                    "median": round(1e3 * cpu[len(cpu) // 2], 2),
                    "max": round(1e3 * cpu[-1], 2),
                },
                "digest": hashlib.sha256("".join(digest for _, digest in made).encode()).hexdigest()[:16],
                "python": platform.python_version(),
                "machine": platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
