"""What kvatlas makes of all that is wrong, damaged or meant to harm: how much was tried, and how much of it held.

    python bench/attack.py --out bench/results/attack.json
    python bench/attack.py --kinds input models --out bench/results/attack.json   # the other kinds stay in the document
    python bench/attack.py --kinds clients --before ../other/src                  # the same with another source tree

Kinds: `kills` (bench/faults.py: kill -9 and a full disk), `stores` (damaged ones), `models` (folders), `logs` (of
Inspect), `input` (command lines and files), `requests` (malformed ones), `half-open` (connections), `clients` (chaotic
ones, with latencies), `memory` (sweeps in control groups of 1 GB and less, where they can be made). Held is what ends
in a sentence or a 4xx, within 3 seconds (of the processor, after libraries are loaded), with nothing executed, nothing
without an end, and no other traces than were written. Prints one JSON document; exit code 1 where something did not
hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from attacks import commands, files, inputs, memory, server
from keeping import keep

HERE = Path(__file__).parent


def counted(result: Iterator[tuple[str, str]]) -> dict[str, Any]:
    """How many of (name, fault) were tried and held, and the faults."""
    tried, faults = 0, {}
    for name, fault in result:
        tried += 1
        if fault:
            faults[name] = fault
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
    return {"tried": tried, "held": tried - len(faults), "faults": faults}


def kills(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """bench/faults.py, whose blows are tried and whose losses are faults."""
    words = ["--kinds", *options.faults, "--moments", str(options.moments)]
    done = subprocess.run(
        [sys.executable, str(HERE / "faults.py"), *words], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout.splitlines()[-1])["kinds"]
    tried = sum(entry["blows"] for entry in document.values())
    wrong = ("runs_unlike_the_undisturbed_one", "reported_traces_lost", "traces_reported_twice")
    faults = {
        kind: {name: item[name] for name in wrong} for kind, item in document.items() if any(map(item.get, wrong))
    }
    return {"tried": tried, "held": tried - sum(document[kind]["blows"] for kind in faults), "faults": faults}


def stores(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    run = scratch / "run"
    words = ("run", inputs.MODEL, "CHAIN3", "--problems", "8", "--samples", "2", "--quiet", "--workers", "1")
    made = commands.call((*words, "--max-new-tokens", "60", "--out", str(run)))
    assert made.code == 0, made.said
    return counted(files.stores(run, scratch, options.stores))


def typed(_: argparse.Namespace, __: Path) -> dict[str, Any]:
    return counted((case.name, commands.call(case.words, case.files).fault(2)) for case in inputs.cases())


def clients(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Idle one tree after the other, crowded side by side, so that a machine that is busy slows both."""
    trees = {"now": None, **({"before": options.before} if options.before else {})}
    by_name = {name: {"idle": server.idle(source, tuple(options.idle))} for name, source in trees.items()}
    with ProcessPoolExecutor(len(trees)) as pool:
        rest = options.clients, options.seconds
        asked = {name: pool.submit(server.crowded, source, *rest) for name, source in trees.items()}
        for name, item in asked.items():
            by_name[name] |= item.result()
    now = by_name["now"]
    stored = not (now["left_behind"] or now["tracebacks"] or now["chaos"]["errors"])
    return {"tried": 1, "held": int(stored), "clients": options.clients, "seconds": options.seconds, **by_name}


KINDS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "input": typed,
    "models": lambda _, scratch: counted(files.folders(scratch)),
    "logs": lambda _, scratch: counted(files.logs(scratch)),
    "stores": stores,
    "requests": lambda options, _: counted(server.requests(options.requests)),
    "half-open": lambda options, _: counted(server.half_open(options.connections)),
    "memory": lambda _, scratch: memory.sweep(scratch),
    "clients": clients,
    "kills": kills,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--faults", nargs="+", default=["driver", "disk", "worker"], help="kinds of bench/faults.py")
    parser.add_argument("--moments", type=int, default=20, help="blows of each of them")
    parser.add_argument("--stores", type=int, default=33)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=1200)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--idle", nargs="+", type=int, default=[1, 32, 64, 128])
    parser.add_argument("--before", type=Path, metavar="SRC", help="another source tree, for `clients`")
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text())["kinds"] if options.out and options.out.is_file() else {}
    by_name: dict[str, Any] = {name: item for name, item in kept.items() if name not in options.kinds}
    commands.preload()
    for kind in options.kinds:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            by_name[kind] = KINDS[kind](options, Path(scratch))
        by_name[kind]["wall_seconds"] = round(time.perf_counter() - began, 1)
        keep({"bench": "attack", "held": whole(by_name), "kinds": by_name}, options.out)
    sys.exit(not whole(by_name))


def whole(kinds: dict[str, Any]) -> bool:
    """Whether everything that was tried held."""
    return all(entry["held"] == entry["tried"] for entry in kinds.values())


if __name__ == "__main__":
    main()
