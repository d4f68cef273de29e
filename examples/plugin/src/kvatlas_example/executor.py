"""`one-by-one`: units are decoded alone, one after the other; traces are the same as with any other executor."""

from collections.abc import Iterator

from kvatlas.core import KvatlasError, Trace
from kvatlas.sweeps.executors import Crew
from kvatlas.sweeps.job import Job
from kvatlas.sweeps.work import decode


def one_by_one(job: Job, crew: Crew) -> Iterator[tuple[Trace, int]]:
    """Decode each unit by a call of its own, in this process, however many workers `crew` allows."""
    if crew.address:
        raise KvatlasError(
            f"The executor 'one-by-one' has no cluster {crew.address!r}; valid with an address is 'ray'."
        )
    for number in range(len(job.units)):
        yield from decode(job, [number])
