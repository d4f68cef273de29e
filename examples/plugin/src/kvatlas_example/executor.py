"""`one-by-one`: units are decoded alone, one after the other; traces are the same as with any other executor."""

from collections.abc import Iterator

from kvatlas.core import KvatlasError, Trace
from kvatlas.sweeps.executors import WorkerPool
from kvatlas.sweeps.worker import Job, decode


def one_by_one(job: Job, pool: WorkerPool) -> Iterator[tuple[Trace, int]]:
    """Decode each unit by a call of its own, in this process, however many workers `pool` allows."""
    if pool.address:
        raise KvatlasError(
            f"The executor 'one-by-one' has no cluster {pool.address!r}; valid with an address is 'ray'."
        )
    for number in range(len(job.units)):
        yield from decode(job, [number])
