"""Executors by name: they decode units in this process, in several local processes, or on a cluster."""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from kvatlas.core import KvatlasError, described, refusal
from kvatlas.machine import collect_seldom, free_memory
from kvatlas.registry import Registry
from kvatlas.sweeps.worker import Finished, Job, decode, load_job, worker_needs
from kvatlas.text import bytes_text

#: Seconds of work that justify one more process.
WORKER_SECONDS = 5.0
#: An estimate of the least seconds for a token.
TOKEN_SECONDS = 2e-4
#: An estimate of the bytes of weights that one thread reads in a second.
READ_BYTES = 1e10
#: The message of a worker at the end of a job; None asks for a unit, a text is an error.
_DONE = True
#: Bytes of a process with its libraries, before weights and cache.
PROCESS = 450 * 2**20


@dataclass
class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """The number of `workers` (None: as many as fit), and the `address` of a cluster, if any.

    `idle` are local workers that wait for the next job, by their connections: a worker takes seconds to start. The
    context ends them and everything in `kept`.
    """

    workers: int | None = None
    address: str = ""
    idle: dict[Connection, BaseProcess] = field(default_factory=dict)
    kept: ExitStack = field(default_factory=ExitStack)

    def __exit__(self, *_: object) -> None:
        _kill(self.idle)
        self.kept.close()


#: Runs one model's job and yields finished traces with the numbers of their own decoded tokens. The units of a worker
#: that dies are lost; the sweep requests missing traces again with half the batch and half the workers
#: (`job.halvings`).
Executor = Callable[[Job, WorkerPool], Iterator[Finished]]
executors: Registry[Executor] = Registry(
    "executor", "", {"local": "kvatlas.sweeps.executors:local", "ray": "kvatlas.ray.cluster:on_ray"}
)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def useful_workers(job: Job) -> int:
    """Return the number of processes that shorten a job, from a rough estimate of its seconds on one core."""
    if job.model.weight_bytes is None:
        return len(job.units)
    most = job.sampling.max_new_tokens
    lengths = {benchmark.name: min(benchmark.typical_output_tokens, most) for benchmark in job.benchmarks}
    tokens = sum(len(unit.settings) * lengths[unit.benchmark] for unit in job.units)
    seconds = tokens * max(TOKEN_SECONDS, job.model.weight_bytes / READ_BYTES)
    return max(1, int(seconds / WORKER_SECONDS))


def usual_workers(job: Job) -> int:
    """Return the number of useful processes that fit into the memory of this machine; one for each GPU."""
    if job.model.device != "cpu":
        return len(devices(job))
    workers = min(cores(), useful_workers(job))
    free = free_memory()
    if free is not None:
        weight_bytes = job.model.weight_bytes or 0
        shared = weight_bytes if job.model.shares_weights else 0
        workers = min(workers, (free - shared) // (PROCESS + weight_bytes - shared))
    return max(1, workers)


def devices(job: Job) -> list[str]:
    """Return the devices that workers take in turn: all GPUs, unless the model option `device` names one."""
    if job.model.device == "cpu" or job.model.options.device not in ("auto", "cuda"):
        return [job.model.device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def shares(job: Job, workers: int) -> list[Job]:
    """Return the job of each worker, on a device of its own if there are several."""
    names = devices(job)
    if len(names) < 2:
        return [job.shared_by(workers, workers)] * workers

    jobs = []
    for index in range(workers):
        device = index % len(names)
        on_device = len(range(device, workers, len(names)))
        options = replace(job.model.options, device=names[device])
        jobs.append(replace(job.shared_by(workers, on_device), model=replace(job.model, options=options)))
    return jobs


def local_workers(job: Job, pool: WorkerPool) -> int:
    """Return the number of processes of a job on this machine."""
    return max(1, min(pool.workers or usual_workers(job), len(job.units)) >> job.halvings)


def needs_text(job: Job, pool: WorkerPool) -> str:
    """Return a sentence on the workers of a job on this machine, their batches and their memory."""
    workers = local_workers(job, pool)
    share = shares(job, workers)[0]
    rows, size = worker_needs(share)

    device = job.model.device
    memory = f"at most {bytes_text(share.workers * size)} of each GPU's memory"
    if device == "cpu":
        memory = f"at most {bytes_text(workers * (PROCESS + size))} of memory in all"
    free = free_memory(device)
    free_text = "" if free is None else f" ({bytes_text(free)} are free)"
    count = f"{workers} worker{'s' if workers > 1 else ''}"
    return f"{job.model.name}: {count} of up to {rows} sequences at a time, {memory}{free_text}."


def local(job: Job, pool: WorkerPool) -> Iterator[Finished]:
    """Decode in this process for one worker, else in several processes of one thread each."""
    if pool.address:
        raise KvatlasError(f"The executor 'local' has no cluster {pool.address!r}; use the executor 'ray' for it.")
    workers = local_workers(job, pool)
    # After the death of a worker the job stays in another process, so that this one survives.
    if workers <= 1 and not job.halvings:
        yield from decode(job, range(len(job.units)))
        return

    processes: dict[Connection, BaseProcess] = {}
    unit_indices = iter(range(len(job.units)))
    try:
        processes.update(take_worker(pool) for _ in range(workers))
        for line, share in zip(processes, shares(job, workers), strict=True):
            # A dead worker is handled below.
            with refusal("The job cannot be sent to workers; give workers=1"), contextlib.suppress(OSError):
                line.send(share)

        # The units are given out one by one, until all workers are done or dead.
        busy = set(processes)
        while busy:
            for line in busy.intersection(multiprocessing.connection.wait(busy)):
                try:
                    message = line.recv()
                    if message is None:
                        line.send(next(unit_indices, None))
                except (EOFError, OSError):  # the worker has died
                    busy.remove(line)
                    continue
                if message == _DONE:
                    busy.remove(line)
                    pool.idle[line] = processes.pop(line)
                elif isinstance(message, str):
                    raise KvatlasError(message)
                elif message is not None:
                    yield message
    finally:
        _kill(processes)


def take_worker(pool: WorkerPool) -> tuple[Connection, BaseProcess]:
    """Return an idle worker with its connection, or start a new one.

    Each worker has a pipe of its own, so that a worker killed within a message does not block others. The job is sent
    after the start, because Python would wait forever for a process that dies while it starts. The main module is left
    to jobs that need it: a new process would run a script without `if __name__ == "__main__"` again.
    """
    while pool.idle:
        line, process = pool.idle.popitem()
        if process.is_alive():
            return line, process

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    start = multiprocessing.spawn.get_preparation_data("")
    how = {name: value for name, value in start.items() if name.startswith("init_main")}
    process = context.Process(target=_run_worker, args=(theirs, how), daemon=True)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    theirs.close()
    return ours, process


def _kill(processes: dict[Connection, BaseProcess]) -> None:
    while processes:
        _, process = processes.popitem()
        # A library that a policy imports may catch other signals.
        process.kill()
        process.join()


def _run_worker(driver: Connection, main: dict[str, Any]) -> None:
    """Decode the jobs that the driver sends, unit by unit, until it ends; `main` says how to import its main module."""
    import signal
    import threading

    collect_seldom()

    def end_with_the_driver() -> None:
        # A killed driver cannot end its workers.
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_the_driver, daemon=True).start()
    # Ctrl-C reaches the whole process group; only the driver reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If memory runs out the system should kill a worker and not the driver, which goes on with fewer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")

    def claim() -> int | None:
        driver.send(None)
        unit_index: int | None = driver.recv()
        return unit_index

    # The end of the driver is not an error of the worker.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        while True:
            pickled = driver.recv_bytes()
            try:
                outgoing = messages(load_job(pickled, main), iter(claim, None))
            except KvatlasError as error:
                outgoing = iter([str(error)])
            for message in outgoing:
                driver.send(message)
            driver.send(_DONE)


def messages(job: Job, claims: Iterable[int]) -> Iterator[Finished | str]:
    """Yield the messages of a worker to its driver: finished traces, and a sentence at the end if it fails."""
    try:
        yield from decode(job, claims)
    except KvatlasError as error:
        yield str(error)
    except (Exception, SystemExit) as error:
        yield f"A worker failed ({described(error)}); finished traces are kept."
