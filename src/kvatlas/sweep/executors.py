"""Where units are decoded: in this process, or in several local ones. Executors are found by name."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kvatlas.core import KvatlasError, Trace
from kvatlas.registry import Registry
from kvatlas.sweep.work import Job, decode

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


class Executor(Protocol):
    """Runs one model's job on `workers` workers and yields traces with their own decoded tokens as they finish.

    A worker that dies takes its unfinished units with it; the sweep notices what is missing and asks again.
    """

    def __call__(self, job: Job, workers: int) -> Iterator[tuple[Trace, int]]: ...


def local(job: Job, workers: int) -> Iterator[tuple[Trace, int]]:
    """Decode in this process for one worker, else in `workers` processes of one thread each."""
    workers = min(workers, len(job.units))
    if workers <= 1:
        yield from decode(job, range(len(job.units)))
        return
    context = multiprocessing.get_context("spawn")
    claimed = context.Value("q", 0)
    found: multiprocessing.Queue[Any] = context.Queue()
    # Each worker takes what is next when it has room, and no more at a time than leaves work for the others.
    share = replace(job, batch_size=max(1, min(job.batch_size, -(-_rows(job) // workers))))
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


def _rows(job: Job) -> int:
    return sum(len(unit.settings) for unit in job.units)


def _work(job: Job, claimed: Synchronized[int], found: multiprocessing.Queue[Any]) -> None:
    import signal

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

    try:
        for message in decode(job, claims()):
            found.put(message)
        found.put(None)
    except KvatlasError as error:
        found.put(str(error))
    except Exception as error:
        found.put(f"A worker failed ({type(error).__name__}: {error}); what is finished is kept.")


executors: Registry[Executor] = Registry("executor", "kvatlas.executors", {"local": "kvatlas.sweep.executors:local"})
