"""What a worker is given, and what workers of sweeps and of screens both need."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvatlas import policies
from kvatlas.benchmarks import Benchmark
from kvatlas.core import KvatlasError, Sampling, Setting, digest
from kvatlas.machine import free_memory
from kvatlas.models import ModelHandle
from kvatlas.policies import Policy, ReferenceTrace
from kvatlas.sweeps.plan import WorkItem, provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The share of the free memory that a batch is chosen to fill.
MARGIN = 0.8
#: The largest batch that is chosen for a CPU, where more gain nothing.
CPU_BATCH = 64


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know: one model's units and how to decode them.

    `weights` is the digest of the model's weights, computed once by the driver: it names the random streams. Where
    `batch_size` is None each worker takes what fits into its memory, up to `most` sequences; the longest prompt has
    `prompt` tokens. After each pass in which a worker died batches are halved: so often, `halvings` times. `identities`
    are digests of what the settings' policies were when the run keys were made.
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
    screened: bool = False
    halvings: int = 0
    identities: Mapping[Setting, str] = field(default_factory=dict)

    def shared_by(self, workers: int) -> Job:
        """The same for one of so many: no more sequences at a time than leave work for the others."""
        rows = sum(len(unit.settings) for unit in self.units)
        share = max(1, -(-rows // workers))
        size = None if self.batch_size is None else min(self.batch_size, share)
        return replace(self, batch_size=size, most=share, workers=workers)


def policies_of(job: Job) -> dict[Setting, Policy]:
    """The policies of a job's settings; KvatlasError for one that has another file than its run key says."""
    settings = dict.fromkeys(itertools.chain.from_iterable(unit.settings for unit in job.units))
    by_setting = {setting: policies.of(setting) for setting in settings}
    for setting, policy in by_setting.items():
        if setting in job.identities and job.identities[setting] != digest(policy.identity(job.model)):
            raise KvatlasError(f"A file of {setting} was replaced after the sweep began; start the sweep again.")
    return by_setting


def batch_of(job: Job, policies: Sequence[Policy]) -> int:
    """The batch size of a worker: the job's, or what fits, and half of it for each of the job's halvings."""
    return max(1, (job.batch_size or fitting(job, policies)) >> job.halvings)


def fitting(job: Job, policies: Sequence[Policy]) -> int:
    """The batch size for the memory that there is, shared by the job's workers on a CPU: a power of two.

    At most `CPU_BATCH` on a CPU and 256 on a GPU.
    """
    from kvatlas.engine.scheduler import peak

    there = free_memory(job.model.device)
    cpu = job.model.device == "cpu"
    size = min(CPU_BATCH if cpu else 256, job.most)
    while there is not None and size > 1:
        taken = peak(job.model, policies, size, len(job.units), job.prompt, job.sampling.max_new_tokens)
        # The weights are loaded already.
        if taken.total - taken.weights <= MARGIN * there / (job.workers if cpu else 1):
            break
        size //= 2
    return size


def reference(
    handle: ModelHandle, model: PreTrainedModel, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> ReferenceTrace | None:
    """What the answer of a full-cache trace attended to, by a second pass over it; None for a trace without one."""
    from kvatlas.predictor import answer_attention

    split = handle.split(tokens)
    if split is None or split[1] >= len(tokens):
        return None
    whole = prompt + tokens
    attention, _ = answer_attention(model, list(whole), len(prompt) + split[1])
    return ReferenceTrace(whole, attention)
