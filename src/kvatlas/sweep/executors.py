"""Where units are decoded: in this process, in several local ones, or on a cluster. Executors are found by name."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.core import KvatlasError, Trace
from kvatlas.registry import Registry
from kvatlas.sweep.work import Job, decode

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

#: A trace with the number of tokens that were decoded for it alone.
Finished = tuple[Trace, int]


@dataclass(frozen=True)
class Crew:
    """Who decodes: `workers` of them (None: as many as there is room for), at the `address` of a cluster if any."""

    workers: int | None = None
    address: str = ""


class Executor(Protocol):
    """Runs one model's job and yields traces with their own decoded tokens as they finish.

    A worker that dies takes its unfinished units with it; the sweep notices what is missing and asks again.
    """

    def __call__(self, job: Job, crew: Crew) -> Iterator[Finished]: ...


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local(job: Job, crew: Crew) -> Iterator[Finished]:
    """Decode in this process for one worker, else in several of one thread each: all cores, or one for a GPU."""
    if crew.address:
        raise KvatlasError(f"The executor 'local' has no cluster {crew.address!r}; valid with an address is 'ray'.")
    # Several processes would have to share a GPU.
    workers = min(crew.workers or (cores() if job.model.device == "cpu" else 1), len(job.units))
    if workers <= 1:
        yield from decode(job, range(len(job.units)))
        return
    context = multiprocessing.get_context("spawn")
    claimed = context.Value("q", 0)
    found: multiprocessing.Queue[Any] = context.Queue()
    share = job.shared_by(workers)
    processes = [context.Process(target=_work, args=(share, claimed, found), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    try:
        running = workers
        while running:
            try:
                message = found.get(timeout=1.0)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            if message is None:
                running -= 1
            elif isinstance(message, str):
                raise KvatlasError(message)
            else:
                yield message
        for process in processes:
            process.join(timeout=10)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _end_with_the_driver() -> None:
    """A killed driver cannot end its workers: they would wait for ever for someone to read what they found."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _work(job: Job, claimed: Synchronized[int], found: multiprocessing.Queue[Any]) -> None:
    import signal
    import threading

    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    # Ctrl-C reaches the whole process group; the driver alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def claims() -> Iterator[int]:
        while True:
            with claimed.get_lock():
                number = claimed.value
                claimed.value += 1
            if number >= len(job.units):
                return
            yield number

    for message in messages(job, claims()):
        found.put(message)
    found.put(None)


def messages(job: Job, claims: Iterable[int]) -> Iterator[Finished | str]:
    """What a worker tells its driver: finished traces, and a sentence as the last thing if it fails."""
    try:
        yield from decode(job, claims)
    except KvatlasError as error:
        yield str(error)
    except Exception as error:
        yield f"A worker failed ({type(error).__name__}: {error}); what is finished is kept."


executors: Registry[Executor] = Registry(
    "executor",
    "kvatlas.executors",
    {"local": "kvatlas.sweep.executors:local", "ray": "kvatlas.sweep.ray_executor:on_ray"},
)
