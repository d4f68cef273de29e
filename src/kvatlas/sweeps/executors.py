"""Where units are decoded: in this process, in several local ones, or on a cluster. Executors are found by name."""

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
from typing import TYPE_CHECKING, Protocol

from kvatlas.core import KvatlasError, Trace
from kvatlas.machine import free_memory
from kvatlas.registry import Registry
from kvatlas.sweeps.job import Job
from kvatlas.sweeps.work import decode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

#: Seconds of work for which one more process is worth its start, and a guess at the least that a token takes and at the
#: bytes of weights that one thread reads in a second.
WORTH, TOKEN_SECONDS, READ = 5.0, 2e-4, 1e10

#: What a worker says when it has nothing left of a job.
_DONE = True
#: Bytes that a process takes with its libraries, before weights and cache.
PROCESS = 450 * 2**20
#: A trace with the number of tokens that were decoded for it alone.
Finished = tuple[Trace, int]


@dataclass
class WorkerPool:
    """Who decodes: `workers` of them (None: as many as there is room for), at the `address` of a cluster if any.

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

    A worker that dies takes its unfinished units with it; the sweep notices what is missing and asks again, with half
    the batch and half the workers (`job.halvings`).
    """

    def __call__(self, job: Job, pool: WorkerPool) -> Iterator[Finished]: ...


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worth(job: Job) -> int:
    """How many processes a job is worth, by a rough guess at its seconds on one core."""
    if job.model.weight_bytes is None:
        return len(job.units)
    most = job.sampling.max_new_tokens
    lengths = {benchmark.name: min(benchmark.typical_output_tokens, most) for benchmark in job.benchmarks}
    tokens = sum(len(unit.settings) * lengths[unit.benchmark] for unit in job.units)
    return max(1, int(tokens * max(TOKEN_SECONDS, job.model.weight_bytes / READ) / WORTH))


def usual_workers(job: Job) -> int:
    """How many processes pay on this machine and have room in its memory."""
    if job.model.device != "cpu":  # several would have to share a GPU
        return 1
    there, taken = free_memory(), PROCESS + (job.model.weight_bytes or 0)
    return max(1, min(cores(), worth(job), cores() if there is None else there // taken))


def local(job: Job, pool: WorkerPool) -> Iterator[Finished]:
    """Decode in this process for one worker, else in several of one thread each.

    Where nobody says how many: all cores if there is work for them, or one for a GPU.
    """
    if pool.address:
        raise KvatlasError(f"The executor 'local' has no cluster {pool.address!r}; valid with an address is 'ray'.")
    workers = max(1, min(pool.workers or usual_workers(job), len(job.units)) >> job.halvings)
    # Where one has died the next does not take this process with it.
    if workers <= 1 and not job.halvings:
        yield from decode(job, range(len(job.units)))
        return
    share = job.shared_by(workers)
    numbers = iter(range(len(job.units)))
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            line, process = _hired(pool)
            processes[line] = process
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

    A pipe for each worker and nothing in common: one killed in the middle of a message holds nobody else up. No job
    among what a process starts with: Python would wait for ever to tell one that dies while it starts.
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
    """A killed driver cannot end its workers: they would wait for ever for someone to read what they found."""
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
    # Where memory runs out the system is to end a worker, not the driver, which goes on with fewer.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")

    def claims() -> Iterator[int]:
        while True:
            driver.send(None)
            number = driver.recv()
            if number is None:
                return
            yield number

    # Where the driver has ended there is nobody to tell, and nothing to say about it.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        while True:
            for message in messages(driver.recv(), claims()):
                driver.send(message)
            driver.send(_DONE)


def messages(job: Job, claims: Iterable[int]) -> Iterator[Finished | str]:
    """What a worker tells its driver: finished traces, and a sentence as the last thing if it fails."""
    try:
        yield from decode(job, claims)
    except KvatlasError as error:
        yield str(error)
    except Exception as error:
        yield f"A worker failed ({type(error).__name__}: {error}); what is finished is kept."


def _fault(_: str, value: object) -> str:
    """What keeps a plug-in's object from being an executor."""
    wanted = "valid is a function of a kvatlas.sweeps.job.Job and a kvatlas.sweeps.executors.WorkerPool"
    if not callable(value):
        return f"it is {value!r}; {wanted}"
    try:
        inspect.signature(value).bind(None, None)
    except TypeError as error:
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
