"""Units decoded by actors on a Ray cluster: one per GPU, or per core where there is none.

A desk on the driver's node gives out the units one by one. A worker that dies, or whose node is lost, takes its
unfinished units with it and another starts in its place; the sweep asks again for what is missing. Traces travel
through Ray to the driver, which alone writes the store.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError
from kvatlas.sweeps.executors import Finished, WorkerPool, cores, messages
from kvatlas.sweeps.plan import provenance

if TYPE_CHECKING:
    from kvatlas.sweeps.job import Job

#: What has to be the same on every node for traces to be the same.
SAME = ("kvatlas", "torch", "transformers")
#: How long the driver waits for a trace before it looks after its workers, in seconds.
WAIT = 2.0
#: How long a cluster may take to answer at all, in seconds.
PATIENCE = 10.0
#: Bytes of the object store of a Ray that is started here: traces pass through it one by one.
OBJECT_STORE = 128 * 2**20


def on_ray(job: Job, pool: WorkerPool) -> Iterator[Finished]:
    """Decode on the cluster at `pool.address`, else on one started here; KvatlasError if it cannot be reached."""
    try:
        import ray
    except ImportError:
        raise KvatlasError("The executor 'ray' needs the package ray: pip install 'kvatlas[ray]'.") from None
    if not ray.is_initialized():
        pool.kept.callback(ray.shutdown)
        _connect(ray, pool)
    yield from _Driver(ray, job, pool).traces()


def _connect(ray: Any, pool: WorkerPool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not pool.address:
        # One thread each: a core too few for the workers that were asked for must not leave some of them waiting.
        room = max(cores(), pool.workers or 0)
        # Said in so many words, or Ray would join a cluster that somebody started on this machine.
        ray.init(
            address="local",
            num_cpus=room,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            **common,
        )
        return
    try:
        # Ray itself would try for minutes to reach a host that does not answer.
        host, _, port = pool.address.removeprefix("ray://").rpartition(":")
        if host:
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
        ray.init(address=pool.address, **common)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        if _refused_token(error):
            raise KvatlasError(
                f"The Ray cluster {pool.address!r} asks for a token, and this driver's is missing or another one: set "
                "RAY_AUTH_MODE=token here and on every node, with the head's ~/.ray/auth_token (or RAY_AUTH_TOKEN)."
            ) from error
        raise KvatlasError(
            f"The Ray cluster {pool.address!r} cannot be reached ({reason}); valid is HOST:PORT of its head node, "
            "'auto' on a node of it, or ray://HOST:PORT."
        ) from error


def _refused_token(error: BaseException | None) -> bool:
    """Whether Ray could not connect for want of a token, which only what led to its error says."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


class _Driver:
    """Workers and what they say, in one pass over a job's units."""

    def __init__(self, ray: Any, job: Job, pool: WorkerPool) -> None:
        self.ray = ray
        resources = ray.cluster_resources()
        # What a model takes on this machine is known; what it will take on another node is what was asked for.
        device = job.model.options.device if pool.address else job.model.device
        gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
        self.needs = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
        room = pool.workers or gpus or int(resources.get("CPU", 1))
        self.workers = max(1, min(room, len(job.units)))
        self.job = ray.put(job.shared_by(self.workers))
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.desk = ray.remote(WorkQueue).options(num_cpus=0, scheduling_strategy=here).remote(len(job.units))
        self.running: dict[Any, tuple[int, Any]] = {}
        self.hired = self.lost = 0

    def traces(self) -> Iterator[Finished]:
        """Traces until the desk has no more units and no worker that is alive holds one."""
        for _ in range(self.workers):
            self._hire()
        try:
            while self.running:
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=WAIT)
                if not ready and self._nothing_left():
                    return
                for stream in ready:
                    message = self._next(stream)
                    if isinstance(message, str):
                        raise KvatlasError(message)
                    if message is not None:
                        self.lost = 0
                        yield message
        finally:
            for _, worker in self.running.values():
                self.ray.kill(worker)
            self.ray.kill(self.desk)

    def _hire(self) -> None:
        worker = self.ray.remote(Worker).options(**self.needs).remote()
        stream = worker.decode.options(num_returns="streaming").remote(self.job, self.desk, self.hired)
        self.running[stream] = (self.hired, worker)
        self.hired += 1

    def _next(self, stream: Any) -> Finished | str | None:
        """What a worker said next; None if it has ended. In place of a lost one another starts where units are left."""
        errors = self.ray.exceptions
        try:
            message: Finished | str = self.ray.get(next(stream))
            return message
        except StopIteration:
            del self.running[stream]
        except errors.RayTaskError as error:
            return f"A worker failed ({str(error.cause).splitlines()[0]}); what is finished is kept."
        except errors.RayError:
            number, worker = self.running.pop(stream)
            self.ray.kill(worker)
            self.lost += 1
            self.ray.get(self.desk.lose.remote(number))
            # Workers that die one after the other without a trace in between will go on to do so.
            if self.lost <= 2 * self.workers and self.ray.get(self.desk.left.remote()):
                self._hire()
        return None

    def _nothing_left(self) -> bool:
        """Whether all that still run are workers for which the cluster never had room, and nothing is to be done."""
        if self.ray.get(self.desk.left.remote()):
            return False
        at_work = self.ray.get(self.desk.at_work.remote())
        return not any(number in at_work for number, _ in self.running.values())


class WorkQueue:
    """Gives out the numbers of units, each once, and knows which workers took any."""

    def __init__(self, units: int) -> None:
        self.units, self.given = units, 0
        self.takers: set[int] = set()

    def claim(self, worker: int) -> int | None:
        """The number of the next unit; None when all are given out."""
        self.takers.add(worker)
        if self.given == self.units:
            return None
        self.given += 1
        return self.given - 1

    def lose(self, worker: int) -> None:
        """Forget a worker that died."""
        self.takers.discard(worker)

    def left(self) -> int:
        """Units that nobody took yet."""
        return self.units - self.given

    def at_work(self) -> set[int]:
        """Workers that took a unit at any time and did not die."""
        return self.takers


class Worker:
    """Decodes on one GPU or one core of some node."""

    def decode(self, job: Job, desk: Any, number: int) -> Iterator[Finished | str]:
        """Traces as they finish; a sentence instead where this node is not like the driver's."""
        import ray

        def claims() -> Iterator[int]:
            while (unit := ray.get(desk.claim.remote(number))) is not None:
                yield unit

        unlike = difference(job)
        if unlike is not None:
            yield f"A worker on the node {ray.util.get_node_ip_address()} {unlike}."
            return
        yield from messages(job, claims())


def difference(job: Job) -> str | None:
    """How this node differs from the driver's in what decides traces; None if it does not."""
    here = provenance()
    for name in SAME:
        if here[name] != job.made_with[name]:
            return f"has {name} {here[name]}, the driver {job.made_with[name]}; install the same on all nodes"
    folder = job.model.folder
    if not folder.is_dir():
        return f"finds no folder {str(folder)!r} of the model {job.model.name!r}; it has to be there on all nodes"
    if replace(job.model).stream != job.weights:
        return f"finds other weights of the model {job.model.name!r} in {str(folder)!r} than the driver"
    return None
