"""Driving a sweep: what is missing is decoded, graded and stored, trace by trace; a second start goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvatlas.core import KvatlasError, Trace
from kvatlas.results import Store
from kvatlas.sweep.executors import executors
from kvatlas.sweep.plan import Plan
from kvatlas.sweep.work import Job

#: Sequences decoded together by one worker; on CPUs more gain nothing.
BATCH_SIZE = 64


@dataclass(frozen=True)
class Progress:
    """Told after every stored trace. `done` counts traces of the whole sweep, earlier sessions' included."""

    trace: Trace
    done: int
    total: int
    decoded_tokens: int
    saved_tokens: int


def cores() -> int:
    """Cores that this process may use: the default number of workers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sweep(
    plan: Plan,
    folder: Path,
    *,
    executor: str = "local",
    workers: int | None = None,
    batch_size: int = BATCH_SIZE,
    tell: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Run or resume a sweep into `folder`; returns when every trace of the plan is stored.

    `workers` is all cores on CPUs where it is None, and one on a GPU, which several would have to share.

    Only this process writes the store. KvatlasError if the folder cannot be used, or if workers die again and again.
    """
    run = executors.get(executor)
    with Store.create(folder) as store:
        store.put_manifest(plan.manifest())
        decoded = saved = 0
        for model in plan.models:
            done = store.keys()
            units = plan.units(model, done)
            finished = plan.traces - sum(len(unit.settings) for each in plan.models for unit in plan.units(each, done))
            while units:
                job = Job(
                    model=model,
                    weights=model.weights_digest,
                    benchmarks=plan.benchmarks,
                    units=tuple(units),
                    sampling=plan.spec.sampling.sampling(),
                    seed=plan.spec.seed,
                    batch_size=batch_size,
                )
                before = finished
                for trace, own in run(job, workers or (cores() if model.device == "cpu" else 1)):
                    store.add(plan.keys[model.name, trace.benchmark, trace.setting], trace)
                    finished += 1
                    decoded += own
                    saved += len(trace.tokens) - own
                    tell(Progress(trace, finished, plan.traces, decoded, saved))
                units = plan.units(model, store.keys())
                if units and finished == before:
                    raise KvatlasError(
                        f"The workers ended without a result and {len(units)} problems are still to do; what is "
                        "finished is kept, the same command tries again."
                    )
