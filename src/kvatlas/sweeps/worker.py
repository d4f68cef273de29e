"""The worker of a sweep, which decodes and grades units in this process, in another one, or on a cluster."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.spawn
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from kvatlas import class_files, policies
from kvatlas.answers.reading import read_tokens
from kvatlas.benchmarks import Benchmark, prompt_of
from kvatlas.benchmarks.base import grade_reading
from kvatlas.core import KvatlasError, Sampling, Setting, Trace, digest, refusal
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle
from kvatlas.noise import stream_key
from kvatlas.policies import Policy
from kvatlas.sweeps.plan import WorkItem, provenance

if TYPE_CHECKING:
    from kvatlas.engine.memory_plan import Peak

#: A trace with the number of tokens decoded for it alone.
Finished = tuple[Trace, int]


@dataclass(frozen=True)
class Job:
    """The units of one model, with everything that a worker needs to decode them.

    `weights` is the digest of the model's weights, which names the random streams. If `batch_size` is None each worker
    takes as many sequences as fit into its share of the memory, at most `most`; `workers` are those that share the
    memory of its device. The longest prompt has `prompt` tokens. Batches are halved `halvings` times, once for each
    pass in which a worker died. `identities` are digests of the policies at the time of the run keys.
    """

    model: ModelHandle
    weights: str
    benchmarks: tuple[Benchmark, ...]
    units: tuple[WorkItem, ...]
    sampling: Sampling
    seed: int
    batch_size: int | None = None
    prompt: int = 0
    most: int = 2**31
    workers: int = 1
    made_with: Mapping[str, str] = field(default_factory=provenance)
    halvings: int = 0
    identities: Mapping[Setting, str] = field(default_factory=dict)
    #: Policies that `kvatlas.register` added in the driver.
    registered: tuple[type[Policy], ...] = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the job for a worker, which loads the files of benchmarks before the objects of their classes."""
        files = {class_files.recorded_file(type(benchmark)) for benchmark in self.benchmarks}
        code = {file: class_files.code_of(file) for file in files if file is not None}
        return (_load_job, (code, pickle.dumps(vars(self)))) if code else super().__reduce_ex__(protocol)

    def shared_by(self, workers: int, on_device: int) -> Job:
        """Return the job for one of so many workers, with a batch that leaves work for the others.

        So many of the workers are `on_device`, the device of this one.
        """
        rows = sum(len(unit.settings) for unit in self.units)
        share = max(1, -(-rows // workers))
        size = None if self.batch_size is None else min(self.batch_size, share)
        return replace(self, batch_size=size, most=share, workers=on_device)

    def peak(self, policies: Sequence[Policy], batch_size: int, trees: int | None = None) -> Peak:
        """Return the bytes of one worker at their largest; by default it has as many trees as the job has units."""
        from kvatlas.engine.memory_plan import peak

        most = self.sampling.max_new_tokens
        return peak(self.model, policies, batch_size, trees or len(self.units), self.prompt, most)

    def policies(self) -> dict[Setting, Policy]:
        """Return the policies of the settings; KvatlasError if a file of one changed since the run keys were made."""
        for kind in self.registered:
            policies.policies.added.setdefault(kind.name, kind)
        settings = dict.fromkeys(itertools.chain.from_iterable(unit.settings for unit in self.units))
        # The process that planned the job had the permission.
        class_files.permit(*(setting.policy for setting in settings))
        by_setting = {setting: policies.from_setting(setting).bind(self.model) for setting in settings}
        for setting, policy in by_setting.items():
            if setting in self.identities and self.identities[setting] != digest(policy.identity(self.model)):
                raise KvatlasError(f"A file of {setting} was replaced after the sweep began; start the sweep again.")
        return by_setting


def _load_job(code: Mapping[str, Any], values: bytes) -> Job:
    """Return a pickled job; `code` are the digests of its benchmarks' files, which have the driver's permission."""
    class_files.permit(*code)
    for file, planned in code.items():
        if class_files.code_of(file) != planned:
            raise KvatlasError(f"The file {file!r} was replaced after the sweep began; start the sweep again.")
    return Job(**pickle.loads(values))


def load_job(pickled: bytes, main: dict[str, Any]) -> Job:
    """Return a job in a worker, which imports the `main` module only for a job with classes of it.

    Raises KvatlasError if something of the job cannot be imported, and if the main module sweeps while it is imported.
    """
    process: Any = multiprocessing.current_process()
    with refusal("A worker cannot load its job; write its classes into a file of their own, or give workers=1"):
        try:
            return cast(Job, pickle.loads(pickled))
        except AttributeError as error:
            if "__main__" not in str(error):
                raise
            # As Python marks a new process that imports its main module.
            process._inheriting = True
            multiprocessing.spawn.prepare(main)
            process._inheriting = False
            return cast(Job, pickle.loads(pickled))


def refuse_import() -> None:
    """Raise KvatlasError in a process that imports the main module, whose sweep would begin again there."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise KvatlasError(
            "The workers import this script for the classes that it defines, and its sweep would begin again there; "
            "write the sweep below `if __name__ == '__main__':`, the classes into a file, or give workers=1."
        )


def fitting_batch(job: Job, policies: Sequence[Policy], trees: int | None = None, loaded: bool = True) -> int:
    """Return the batch that fits into a worker's share of the free memory of its device.

    It has to hold as many `trees` as the job has units, unless they are given. The free memory is that beside the
    weights if they are `loaded`.
    """
    from kvatlas.engine.memory_plan import CPU_BATCH, GPU_BATCH, largest_batch

    model = job.model
    most = min(CPU_BATCH if model.device == "cpu" else GPU_BATCH, job.most)
    free = free_memory(model.device)
    if free is None:
        return most

    weight_bytes = model.weight_bytes or 0
    if model.shares_weights:
        # Mapped weights are in memory that counts as free, and all workers have them once.
        memory = max(0, free - weight_bytes) / job.workers + weight_bytes
    else:
        memory = (free + (weight_bytes if loaded else 0)) / job.workers
    return max(1, largest_batch(memory, most, lambda size: job.peak(policies, size, trees)))


def decode(job: Job, claims: Iterable[int]) -> Iterator[Finished]:
    """Decode and grade the units with the numbers `claims`, which are pulled as rows become free.

    Yields every trace as it finishes.
    """
    import torch

    from kvatlas.engine import Engine, Request

    # Workers with one thread each are much faster than workers that share cores.
    torch.set_num_threads(1)
    model = job.model.load()
    settings = job.policies()
    chosen = list(settings.values())
    size = _batch_size(job, chosen, loaded=True)
    engine = Engine(job.model, model, chosen, job.sampling, size)
    # Those of other storages come later.
    first = [policy for policy in chosen if policy.storage == engine.storage]
    engine.reserve(job.peak(first, size))

    by_name = {benchmark.name: benchmark for benchmark in job.benchmarks}

    def request_of(index: int) -> Request[int]:
        unit = job.units[index]
        return Request(
            key=index,
            prompt=job.model.encode(prompt_of(by_name[unit.benchmark], unit.problem)),
            stream=stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample),
            policies=tuple(settings[setting] for setting in unit.settings),
        )

    for generation in engine.run(map(request_of, claims)):
        unit = job.units[generation.key]
        answer = read_tokens(job.model, generation.tokens, generation.finished)
        trace = Trace(
            model=job.model.name,
            benchmark=unit.benchmark,
            problem=unit.problem.id,
            sample=unit.sample,
            setting=generation.policy.setting,
            tokens=generation.tokens,
            text=job.model.text(generation.tokens),
            grade=grade_reading(by_name[unit.benchmark], unit.problem, answer),
            usage=generation.usage,
            eviction_trace=generation.eviction_trace,
        )
        yield trace, generation.decoded


def _batch_size(job: Job, chosen: Sequence[Policy], loaded: bool) -> int:
    # A larger batch than all rows that there are would be allocated for nothing.
    rows = sum(len(unit.settings) + 1 for unit in job.units)
    return max(1, min(job.batch_size or fitting_batch(job, chosen, loaded=loaded), rows) >> job.halvings)


def worker_needs(job: Job) -> tuple[int, int]:
    """Return the batch of one worker, and the bytes of its weights and caches at their largest."""
    chosen = list(job.policies().values())
    size = _batch_size(job, chosen, loaded=False)
    return size, job.peak(chosen, size).total
