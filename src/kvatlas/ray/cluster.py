"""The executor of a Ray cluster: one worker for each GPU, or for each core of a cluster without GPUs.

A queue on the driver's node gives out the units one by one. A worker that dies is replaced; its unfinished units are
lost, and the sweep requests the missing traces again. Traces travel through Ray to the driver, which alone writes the
store.
"""

import logging
import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvatlas.core import KvatlasError, importing
from kvatlas.sweeps.executors import WorkerPool, cores, messages
from kvatlas.sweeps.plan import provenance
from kvatlas.sweeps.worker import Finished, Job

#: Packages that must have one version on all nodes, so that traces are the same.
SAME = ("kvatlas", "torch", "transformers")
#: Seconds to wait for a trace before checking the workers.
TRACE_SECONDS = 2.0
#: Seconds to wait for a cluster to answer.
CONNECT_SECONDS = 10.0
#: Bytes of the object store of a local Ray, through which traces pass one by one.
OBJECT_STORE = 128 * 2**20


def on_ray(job: Job, pool: WorkerPool) -> Iterator[Finished]:
    """Decode on the cluster at `pool.address`, or on a local one; KvatlasError if it cannot be reached."""
    with importing("The executor 'ray'", "ray"):
        import ray
    if not ray.is_initialized():
        pool.kept.callback(ray.shutdown)
        _connect(ray, pool)
    yield from RayWorkers(ray, job, pool).traces()


def _connect(ray: Any, pool: WorkerPool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not pool.address:
        # Each worker needs a core, else some would wait.
        size = {"num_cpus": max(cores(), pool.workers or 0), "object_store_memory": OBJECT_STORE}
        # Without "local" Ray would join another cluster on this machine.
        ray.init(address="local", include_dashboard=False, **size, **common)
        return

    try:
        # Ray itself would try for minutes to reach a silent host.
        host, _, port = pool.address.removeprefix("ray://").rpartition(":")
        if host:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address=pool.address, **common)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise KvatlasError(
            f"The Ray cluster {pool.address!r} cannot be reached ({str(error).splitlines()[0]}); expected HOST:PORT of "
            "its head node, 'auto' on a node of it, or ray://HOST:PORT, and its token if it has one."
        ) from error


class RayWorkers:
    """The workers of one pass over a job's units, and their messages."""

    def __init__(self, ray: Any, job: Job, pool: WorkerPool) -> None:
        self.ray = ray
        resources = ray.cluster_resources()
        # The device is known for this machine only; other nodes use the requested one.
        device = job.model.options.device if pool.address else job.model.device
        gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
        self.needs = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
        self.workers = max(1, min(pool.workers or gpus or int(resources.get("CPU", 1)), len(job.units)))

        # Ray gives each worker a GPU of its own.
        self.job = ray.put(job.shared_by(self.workers, 1 if gpus else self.workers))
        node = ray.get_runtime_context().get_node_id()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        self.queue = ray.remote(WorkQueue).options(num_cpus=0, scheduling_strategy=here).remote(len(job.units))
        self.running: dict[Any, tuple[int, Any]] = {}
        self.hired = self.lost = 0

    def traces(self) -> Iterator[Finished]:
        """Yield traces until the queue is empty and no living worker holds a unit."""
        for _ in range(self.workers):
            self._hire()
        try:
            while self.running:
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=TRACE_SECONDS)
                if not ready:
                    left, takers = self.ray.get([self.queue.left.remote(), self.queue.takers.remote()])
                    # The workers that run may be those that the cluster had no room for.
                    if not left and takers.isdisjoint(worker_id for worker_id, _ in self.running.values()):
                        return

                for stream in ready:
                    message = self._next_message(stream)
                    if isinstance(message, str):
                        raise KvatlasError(message)
                    if message is not None:
                        self.lost = 0
                        yield message
        finally:
            for _, worker in self.running.values():
                self.ray.kill(worker)
            self.ray.kill(self.queue)

    def _hire(self) -> None:
        worker = self.ray.remote(Worker).options(**self.needs).remote()
        stream = worker.decode.options(num_returns="streaming").remote(self.job, self.queue, self.hired)
        self.running[stream] = (self.hired, worker)
        self.hired += 1

    def _next_message(self, stream: Any) -> Finished | str | None:
        """Return the next message of a worker, or None if it has ended; a dead one is replaced if units are left."""
        errors = self.ray.exceptions
        try:
            message: Finished | str = self.ray.get(next(stream))
            return message
        except StopIteration:
            del self.running[stream]
        except errors.RayTaskError as error:
            return f"A worker failed ({str(error.cause).splitlines()[0]}); finished traces are kept."
        except errors.RayError:
            worker_id, worker = self.running.pop(stream)
            self.ray.kill(worker)
            self.lost += 1
            self.ray.get(self.queue.lose.remote(worker_id))
            # Workers that keep dying without a trace in between are not replaced.
            if self.lost <= 2 * self.workers and self.ray.get(self.queue.left.remote()):
                self._hire()
        return None


class WorkQueue:
    """The queue of unit numbers, and the living workers that took any."""

    def __init__(self, units: int) -> None:
        self._numbers = deque(range(units))
        self._takers: set[int] = set()

    def claim(self, worker: int) -> int | None:
        """Return the number of the next unit, or None."""
        self._takers.add(worker)
        return self._numbers.popleft() if self._numbers else None

    def lose(self, worker: int) -> None:
        """Remove a worker that died."""
        self._takers.discard(worker)

    def left(self) -> int:
        """Return the number of units that no worker has taken."""
        return len(self._numbers)

    def takers(self) -> set[int]:
        """Return the living workers that took a unit at any time."""
        return self._takers


class Worker:
    """A worker on one GPU or one core of a node."""

    def decode(self, job: Job, queue: Any, worker_id: int) -> Iterator[Finished | str]:
        """Yield traces as they finish, or a sentence if this node differs from the driver's."""
        import ray

        unlike = difference_of_node(job)
        if unlike is not None:
            yield f"A worker on the node {ray.util.get_node_ip_address()} {unlike}."
            return
        yield from messages(job, iter(lambda: ray.get(queue.claim.remote(worker_id)), None))


def difference_of_node(job: Job) -> str | None:
    """Return the difference of this node from the driver's in versions or model as a clause, or None."""
    here = provenance()
    for name in SAME:
        if here[name] != job.made_with[name]:
            return f"has {name} {here[name]}, the driver {job.made_with[name]}; install the same on all nodes"

    folder = job.model.folder
    if not folder.is_dir():
        return f"finds no folder {str(folder)!r} of the model {job.model.name!r}; it must be there on all nodes"
    if replace(job.model).stream != job.weights:
        return f"finds other weights of the model {job.model.name!r} in {str(folder)!r} than the driver"
    return None
