"""Measure what a sweep loses after kill -9 of its driver, a worker, a Ray worker or a Ray node, and after a full disk.

    python bench/faults.py --out bench/results/faults.json                # 20 random moments of each kind
    python bench/faults.py --kinds driver disk --moments 3

The same small sweep is run undisturbed once. Then, for each kind, it is started, hit at a random moment while it is at
work, and started again, until it was hit `--moments` times; whenever it comes to its end it begins anew. Every
finished run must equal the undisturbed one in all but wall time; every trace that was reported as finished must be in
the store right after the blow, and none may be reported twice. Prints one JSON document; exit code 1 where that fails.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from common import arguments, keep
from kvatlas import models
from kvatlas.benchmarks import find
from kvatlas.core import KvatlasError, Trace
from kvatlas.results import Store
from kvatlas.sweeps import Plan, Progress, make_plan, parse_spec, sweep


def spec() -> dict[str, Any]:
    """Eight settings and the full cache on short chains, at a budget a little above the longest prompt."""
    model, names = models.find("embedded:tiny-llama"), ["CHAIN4", "CHAIN5"]
    asked = [(benchmark, problem) for benchmark in map(find, names) for problem in benchmark.problems(4)]
    budget = 24 + max(len(model.encode(benchmark.prompt(problem))) for benchmark, problem in asked)
    return {
        "models": [model.name],
        "benchmarks": names,
        "problems": 4,
        "samples": 2,
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 90},
        "baseline": {"policy": "full"},
        "settings": [{"policy": name, "kv_budget": budget, "ratio_over": "thinking"} for name in ("window", "random")],
        "axes": {"local_window": [4, 8], "ratio": [0.2, 0.5]},
    }


BATCH = 6


def contents(folder: Path) -> dict[Any, Trace]:
    """All of a store but wall times."""
    with Store.open(folder) as store:
        return {
            (key, trace.setting.id, trace.benchmark, trace.problem, trace.sample): replace(
                trace, usage=replace(trace.usage, seconds=0.0)
            )
            for key, trace in store.traces()
        }


def name_of(trace: Trace) -> str:
    """Return the name of a trace among those of one sweep."""
    return json.dumps([trace.setting.id, trace.benchmark, trace.problem, trace.sample])


@dataclass
class Ledger:
    """Results of one kind of fault: traces stored at each blow, and what went wrong."""

    plan: Plan
    wanted: dict[Any, Trace]
    moments: int
    at: list[int] = field(default_factory=list)
    runs: int = 0
    lost: int = 0
    twice: int = 0
    unequal: int = 0
    reported: list[str] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return len(self.at) < self.moments

    def blow(self, folder: Path) -> None:
        """Note a blow: what was reported so far has to be stored."""
        there = {json.dumps(list(key[1:])) for key in _stored(folder)}
        self.lost += len(set(self.reported) - there)
        self.at.append(len(there))

    def end(self, folder: Path) -> None:
        """Note a finished run."""
        self.runs += 1
        self.unequal += contents(folder) != self.wanted
        self.twice += len(self.reported) - len(set(self.reported))
        self.reported = []

    def to_json(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "blows": len(self.at),
            "traces_stored_at_blow": self.at,
            "finished_runs": self.runs,
            "runs_unlike_the_undisturbed_one": self.unequal,
            "reported_traces_lost": self.lost,
            "traces_reported_twice": self.twice,
        }


def _stored(folder: Path) -> dict[Any, Trace]:
    try:
        return contents(folder)
    except KvatlasError:
        return {}


def driver(ledger: Ledger, rng: random.Random, folders: Iterator[Path], typical: float) -> None:
    """kill -9 of a process that sweeps alone."""
    while ledger.open:
        folder = next(folders)
        ended = False
        while not ended:
            ended = _forked(ledger, folder, rng.uniform(0.02, 0.6) * typical if ledger.open else None)
        ledger.end(folder)


def _forked(ledger: Ledger, folder: Path, after: float | None) -> bool:
    """Sweep in a child, killed `after` seconds; whether it came to its end."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(mine)
        pipe = {"on_trace": lambda done: os.write(theirs, f"{name_of(done.trace)}\n".encode())}
        sweep(ledger.plan, folder, workers=1, batch_size=BATCH, **pipe)
        os._exit(0)
    os.close(theirs)
    killer = threading.Timer(after, os.kill, (child, signal.SIGKILL)) if after is not None else None
    if killer:
        killer.start()
    with os.fdopen(mine) as lines:
        # A last line without its end was not reported.
        ledger.reported += [line.strip() for line in lines.readlines() if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    if killer:
        killer.cancel()
    if os.WIFSIGNALED(status):
        ledger.blow(folder)
    return os.WIFEXITED(status)


def disk(ledger: Ledger, rng: random.Random, folders: Iterator[Path], typical: float) -> None:
    """No file may grow beyond a random size: what a full disk says, said by the system itself."""
    while ledger.open:
        folder = next(folders)
        ended = False
        while not ended:
            largest = max((path.stat().st_size for path in folder.glob("*")), default=0)
            room = rng.randrange(4096, 200_000)
            with limited(resource.RLIMIT_FSIZE, largest + room if ledger.open else resource.RLIM_INFINITY):
                try:
                    sweep(ledger.plan, folder, workers=1, batch_size=BATCH, on_trace=_noting(ledger))
                    ended = True
                except KvatlasError as error:
                    if "what was finished before is kept" not in str(error):
                        raise
            if not ended:
                ledger.blow(folder)
        ledger.end(folder)


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """A limit of the system for as long as this lasts."""
    before, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, hard))


def _noting(ledger: Ledger, then: Callable[[int], None] = lambda _: None) -> Callable[[Progress], None]:
    def on_trace(done: Progress) -> None:
        ledger.reported.append(name_of(done.trace))
        then(done.done)

    return on_trace


def worker(ledger: Ledger, rng: random.Random, folders: Iterator[Path], typical: float) -> None:
    """kill -9 of one of two local workers, after a random trace."""
    _hit_while_sweeping(ledger, rng, folders, _kill_one(b"--multiprocessing-fork"), {"workers": 2})


def ray_worker(ledger: Ledger, rng: random.Random, folders: Iterator[Path], typical: float) -> None:
    """kill -9 of one of two Ray workers, after a random trace."""
    with cluster() as result:
        crew = {"executor": "ray", "workers": 2, "address": result.address}
        _hit_while_sweeping(ledger, rng, folders, _kill_one(b"ray::Worker"), crew)


def ray_node(ledger: Ledger, rng: random.Random, folders: Iterator[Path], typical: float) -> None:
    """A Ray node with its worker is killed after a random trace; another joins."""
    with cluster() as result:

        def hit() -> bool:
            result.remove_node(result.worker_nodes.copy().pop(), allow_graceful=False)
            result.add_node(**NODE)
            return True

        _hit_while_sweeping(ledger, rng, folders, hit, {"executor": "ray", "workers": 2, "address": result.address})


NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextmanager
def cluster() -> Iterator[Any]:
    """A Ray cluster on loopback: a head without cores and two nodes of one core."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    result = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    for _ in range(2):
        result.add_node(**NODE)
    try:
        yield result
    finally:
        ray.shutdown()
        result.shutdown()


def _hit_while_sweeping(
    ledger: Ledger, rng: random.Random, folders: Iterator[Path], hit: Callable[[], bool], crew: dict[str, Any]
) -> None:
    while ledger.open:
        folder = next(folders)
        due = sorted(rng.sample(range(1, ledger.plan.traces - 4 * BATCH), min(5, ledger.moments - len(ledger.at))))

        def then(done: int, folder: Path = folder, due: list[int] = due) -> None:
            if due and done >= due[0] and hit():
                due.pop(0)
                ledger.blow(folder)

        sweep(ledger.plan, folder, batch_size=BATCH, on_trace=_noting(ledger, then), **crew)
        ledger.end(folder)


def _kill_one(name: bytes) -> Callable[[], bool]:
    """Kills a process of this program by its command line; says whether there was one."""

    def hit() -> bool:
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and name in (folder / "cmdline").read_bytes() and _ours(int(folder.name)):
                    os.kill(int(folder.name), signal.SIGKILL)
                    return True
            except OSError:
                continue
        return False

    return hit


def _ours(process: int) -> bool:
    while process > 1 and process != os.getpid():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process == os.getpid()


KINDS = {"driver": driver, "disk": disk, "worker": worker, "ray-worker": ray_worker, "ray-node": ray_node}


def main() -> None:
    options = arguments(__doc__, kinds={"nargs": "+", "choices": KINDS, "default": list(KINDS)}, moments=20, seed=0)
    torch.set_num_threads(1)
    plan = make_plan(parse_spec(spec()))
    assert plan.compute_keys()
    rng = random.Random(options.seed)
    # Kinds that the document holds already and that are not asked for again stay in it.
    kept = json.loads(options.out.read_text())["kinds"] if options.out and options.out.is_file() else {}
    by_name: dict[str, Any] = {name: item for name, item in kept.items() if name not in options.kinds}
    with tempfile.TemporaryDirectory() as scratch:
        folders = (Path(scratch) / str(number) for number in range(10**6))
        undisturbed = next(folders)
        began = time.perf_counter()
        sweep(plan, undisturbed, workers=1, batch_size=BATCH)
        typical = time.perf_counter() - began
        wanted = contents(undisturbed)
        for kind in options.kinds:
            ledger = Ledger(plan, wanted, options.moments)
            KINDS[kind](ledger, rng, folders, typical)
            by_name[kind] = {"seed": options.seed, **ledger.to_json()}
            keep(options, bench="faults", traces=plan.traces, whole=whole(by_name), kinds=by_name)
    sys.exit(not whole(by_name))


def whole(kinds: dict[str, Any]) -> bool:
    """Return whether nothing was lost, nothing came twice, and every finished run equals the undisturbed one."""
    wrong = ("runs_unlike_the_undisturbed_one", "reported_traces_lost", "traces_reported_twice")
    return not any(item[name] for item in kinds.values() for name in wrong)


if __name__ == "__main__":
    main()
