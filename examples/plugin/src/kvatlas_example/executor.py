"""`one-by-one`: units are decoded alone, one after the other; traces are the same as with any other executor."""

from collections.abc import Iterator

from kvatlas.core import Trace
from kvatlas.sweep.work import Job, decode


def one_by_one(job: Job, workers: int) -> Iterator[tuple[Trace, int]]:
    """Decode each unit by a call of its own, in this process, whatever `workers` says."""
    for number in range(len(job.units)):
        yield from decode(job, [number])
