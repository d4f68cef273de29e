"""Executors, found by name: they decode units in this process, in several local ones, or on a cluster."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.core import KvatlasError
from kvatlas.machine import free_memory
from kvatlas.registry import Registry
from kvatlas.sweeps.worker import Finished, Job, decode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

#: Seconds of work that are worth the start of one more process, the least seconds of a token and the bytes of weights
#: that one thread reads in a second, both guesses.
WORTH, TOKEN_SECONDS, READ = 5.0, 2e-4, 1e10
#: The message of a worker that has nothing left of a job.
_DONE = True
#: Bytes that a process takes with its libraries, before weights and cache.
PROCESS = 450 * 2**20


@dataclass
class WorkerPool:
    """The number of `workers` (None: as many as there is room for), and the `address` of a cluster if any.

    As a context it ends what an executor has `kept` for further jobs. `idle` are local workers that wait for one, by
    the lines to them: a worker takes seconds to start.
    """

    workers: int | None = None
    address: str = ""
    idle: dict[Connection, BaseProcess] = field(default_factory=dict)
    kept: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self.idle)
        self.kept.close()


class Executor(Protocol):
    """Runs one model's job and yields traces with their own decoded tokens as they finish.

    A worker that dies takes its unfinished units with it; the sweep asks again for the missing traces, with half the
    batch and half the workers (`job.halvings`).
    """

    def __call__(self, job: Job, pool: WorkerPool) -> Iterator[Finished]: ...


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worth(job: Job) -> int:
    """The number of processes that a job is worth, by a rough guess at its seconds on one core."""
    if job.model.weight_bytes is None:
        return len(job.units)
    most = job.sampling.max_new_tokens
    lengths = {benchmark.name: min(benchmark.typical_output_tokens, most) for benchmark in job.benchmarks}
    tokens = sum(len(unit.settings) * lengths[unit.benchmark] for unit in job.units)
    return max(1, int(tokens * max(TOKEN_SECONDS, job.model.weight_bytes / READ) / WORTH))


def usual_workers(job: Job) -> int:
    """The number of processes that pay on this machine and have room in its memory; one on a GPU."""
    if job.model.device != "cpu":
        return 1
    free, taken = free_memory(), PROCESS + (job.model.weight_bytes or 0)
    return max(1, min(cores(), worth(job), cores() if free is None else free // taken))


def local(job: Job, pool: WorkerPool) -> Iterator[Finished]:
    """Decode in this process for one worker, else in several of one thread each: by default as many as pay."""
    if pool.address:
        raise KvatlasError(f"The executor 'local' has no cluster {pool.address!r}; valid with an address is 'ray'.")
    workers = max(1, min(pool.workers or usual_workers(job), len(job.units)) >> job.halvings)
    # After a worker has died the next must not take this process with it.
    if workers <= 1 and not job.halvings:
        yield from decode(job, range(len(job.units)))
        return
    share = job.shared_by(workers)
    numbers = iter(range(len(job.units)))
    processes: dict[Connection, BaseProcess] = {}
    try:
        processes.update(_hired(pool) for _ in range(workers))
        for line in processes:
            with contextlib.suppress(OSError):  # it has died, as is seen below
                line.send(share)
        talking = set(processes)
        while talking:
            for line in talking.intersection(multiprocessing.connection.wait(talking)):
                try:
                    message = line.recv()
                    if message is None:
                        line.send(next(numbers, None))
                except (EOFError, OSError):  # the worker has died
                    talking.remove(line)
                    continue
                if message == _DONE:
                    talking.remove(line)
                    pool.idle[line] = processes.pop(line)
                elif isinstance(message, str):
                    raise KvatlasError(message)
                elif message is not None:
                    yield message
    finally:
        _end(processes)


def _hired(pool: WorkerPool) -> tuple[Connection, BaseProcess]:
    """A worker without a job, and the line to it; a new one where none is idle.

    Each worker has a pipe of its own: one killed in the middle of a message holds up no other. The job is sent after
    the start: Python would wait for ever to tell it to a process that dies while it starts.
    """
    while pool.idle:
        line, process = pool.idle.popitem()
        if process.is_alive():
            return line, process
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _end(processes: dict[Connection, BaseProcess]) -> None:
    while processes:
        _, process = processes.popitem()
        process.terminate()
        process.join()


def _end_with_the_driver() -> None:
    """End this worker when its driver ends: a killed driver cannot, and nothing would read the worker's messages."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _work(driver: Connection) -> None:
    import signal
    import threading

    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    # Ctrl-C reaches the whole process group; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where memory runs out the system should end a worker, not the driver, which goes on with fewer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")

    def claim() -> int | None:
        driver.send(None)
        number: int | None = driver.recv()
        return number

    # An ended driver is no error of the worker.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        while True:
            for message in messages(driver.recv(), iter(claim, None)):
                driver.send(message)
            driver.send(_DONE)


def messages(job: Job, claims: Iterable[int]) -> Iterator[Finished | str]:
    """The messages of a worker to its driver: finished traces, and a sentence as the last one if it fails."""
    try:
        yield from decode(job, claims)
    except KvatlasError as error:
        yield str(error)
    except Exception as error:
        yield f"A worker failed ({type(error).__name__}: {error}); what is finished is kept."


def _fault(_: str, value: Any) -> str:
    """The reason, as a clause, why a plug-in's object is no executor."""
    try:
        inspect.signature(value).bind(None, None)
    except TypeError as error:
        wanted = "expected a function of a kvatlas.sweeps.worker.Job and a kvatlas.sweeps.executors.WorkerPool"
        return f"it cannot be called with two arguments, {error}; {wanted}"
    except ValueError:  # no signature is known, as of built-in functions
        pass
    return ""


executors: Registry[Executor] = Registry(
    "executor",
    "kvatlas.executors",
    {"local": "kvatlas.sweeps.executors:local", "ray": "kvatlas.sweeps.ray:on_ray"},
    _fault,
)
