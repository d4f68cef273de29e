"""Driving a sweep: what is missing is decoded, graded and stored, trace by trace; a second start goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvatlas import policies
from kvatlas.benchmarks import asked_of
from kvatlas.core import KvatlasError, Setting, Trace, digest
from kvatlas.models import ModelHandle
from kvatlas.results import Manifest, Store
from kvatlas.sweeps.executors import Executor, WorkerPool, executors
from kvatlas.sweeps.job import CPU_BATCH, Job
from kvatlas.sweeps.plan import Plan, WorkItem, provenance

FULL = Setting.of("full")


@dataclass(frozen=True)
class Progress:
    """Told after every stored trace. `done` counts traces of the whole sweep, earlier sessions' included."""

    trace: Trace
    done: int
    total: int
    decoded_tokens: int
    saved_tokens: int


def sweep(
    plan: Plan,
    folder: Path,
    *,
    replace: bool = False,
    promise: Manifest | None = None,
    executor: str = "local",
    workers: int | None = None,
    address: str = "",
    pool: WorkerPool | None = None,
    batch_size: int | None = None,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> None:
    """Run or resume a sweep into `folder`, or add it to the run there; returns when all traces of the plan are stored.

    With `replace` the run promises this plan alone from now on; what it holds already stays in its store. A `promise`
    takes the place of that.
    Where `workers` is None the executor takes as many as there is room for, where `batch_size` is None each of them
    decodes as many sequences together as fit into its memory; `address` is that of a cluster. A `pool` stands for both,
    and its workers stay for the next sweep. `on_message` gets what
    the plan notes and, of an adaptive plan, which asks block by block, a sentence for each and the reason to stop. Only
    this process writes the store.
    KvatlasError if the folder or the cluster cannot be used, if the run there is of other models, benchmarks or
    sampling, or if workers die again and again.
    """
    for sentence in plan.notes:
        on_message(sentence)
    run = executors.get(executor)
    with ExitStack() as stack:
        store = stack.enter_context(Store.create(folder, provenance()))
        promise = promise or promised(plan, store, replace)
        store.set_aside(plan.contents_by_key)
        pool = pool or stack.enter_context(WorkerPool(workers, address))
        decode = _Decode(plan, store, run, pool, batch_size, on_trace, on_message)
        if plan.spec.allocate.kind == "full":
            store.put_manifest(promise)
            for model in plan.models:
                decode.all(model, lambda units: units)
            return
        # Statistics take long to import, and workers import this module too.
        from kvatlas.sweeps.allocation import Adaptive

        adaptive = Adaptive.begin(plan, store.columns())
        for model in plan.models:
            decode.seen = adaptive.add
            for sentence in adaptive.stages(model):
                on_message(sentence)
                store.put_manifest(adaptive.manifest())
                decode.all(model, partial(adaptive.units, model=model.name))
            on_message(f"{model.name}: {adaptive.stopped[model.name]}.")
        store.put_manifest(adaptive.manifest())


def promised(plan: Plan, store: Store, alone: bool = False) -> Manifest:
    """The promise of a run with the plan added to it, or `alone` in it.

    Raises KvatlasError with what differs if the two cannot be one run.
    """
    now = plan.manifest()
    try:
        earlier = now if alone else store.manifest()
    except KvatlasError:
        return now
    cells = [{(cell.run_key, cell.setting.id, cell.benchmark) for cell in each.expected} for each in (now, earlier)]
    if cells[0] == cells[1] and not {cell.name for cell in now.expected} & {cell.name for cell in earlier.expected}:
        # The same cells of a model that was moved.
        return now
    kind = "the records of a screen" if earlier.screened else "the traces of a sweep"
    unlike, others = kind if now.screened != earlier.screened else now.unlike(earlier), now.others(earlier)
    if not unlike and plan.spec.allocate.kind == "adaptive":
        if not others and not earlier.others(now):
            return now
        unlike = "other settings, and an adaptive sweep decides on all of them together"
    if not unlike and others:
        settings = dict.fromkeys(cell.setting for cell in others)
        keys = replace(plan, policies=tuple((policies.of(setting), False) for setting in settings)).keys
        changed = [cell for cell in others if keys.get(cell.name) != cell.run_key]
        unlike = f"{changed[0].setting} of other weights, problems, prompts or versions" if changed else ""
    if unlike:
        raise KvatlasError(
            f"The run in {str(store.path.parent)!r} has {unlike}; name another folder, or let --replace make the run "
            "promise this spec alone (its traces stay in the store)."
        )
    return now.joined(earlier)


class _Decode:
    """Decodes what is missing and counts what was done; `seen` is shown every new trace."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        run: Executor,
        pool: WorkerPool,
        batch_size: int | None,
        on_trace: Callable[[Progress], None],
        on_message: Callable[[str], None],
    ) -> None:
        self.plan, self.store, self.batch_size = plan, store, batch_size
        self.run, self.pool, self.on_trace, self.on_message = run, pool, on_trace, on_message
        self.halvings = 0
        self.seen: Callable[[str, Trace], None] = lambda *_: None
        self.decoded = self.saved = 0
        #: Run keys of the full cache's traces, which a screen reads.
        self.full_keys = plan.full_cache.keys
        #: Every model's units that lack traces, as long as nothing was added.
        self.missing = self._missing()
        self.finished = plan.traces - sum(len(unit.settings) for units in self.missing.values() for unit in units)

    def _missing(self) -> dict[str, list[WorkItem]]:
        done = self.store.samples()
        return {model.name: self.plan.units(model, done) for model in self.plan.models}

    def all(self, model: ModelHandle, asked: Callable[[Sequence[WorkItem]], Sequence[WorkItem]]) -> None:
        """Decode and store until nothing of what is `asked` of a model's missing units is missing."""
        units = asked(self.missing[model.name])
        while units:
            job = Job(
                model=model,
                weights=model.stream,
                benchmarks=tuple(asked_of(benchmark, model.reads) for benchmark in self.plan.benchmarks),
                units=tuple(self._scripted(model, unit) if self.plan.screened else unit for unit in units),
                sampling=self.plan.spec.sampling.sampling(),
                seed=self.plan.spec.seed,
                batch_size=self.batch_size,
                screened=self.plan.screened,
                identities={policy.setting: digest(policy.identity(model)) for policy, _ in self.plan.policies},
                halvings=self.halvings,
                prompt=max(max(self.plan.prompts[model.name, benchmark.name]) for benchmark in self.plan.benchmarks),
            )
            before = self.finished
            for trace, own in self.run(job, self.pool):
                key = self.plan.keys[model.name, trace.benchmark, trace.setting]
                self.store.add(key, trace)
                self.seen(key, trace)
                self.finished += 1
                self.decoded += own
                self.saved += len(trace.tokens) - own
                self.on_trace(Progress(trace, self.finished, self.plan.traces, self.decoded, self.saved))
            self.missing = self._missing()
            units = asked(self.missing[model.name])
            if not units:
                return
            if self.finished == before and (self.batch_size or CPU_BATCH) >> self.halvings <= 1:
                raise KvatlasError(
                    f"The workers ended without a result and {len(units)} problems are still to do, with one sequence "
                    "at a time, too; what is finished is kept."
                )
            self.halvings += 1
            self.on_message(
                f"Workers ended without the traces of {len(units)} problems, as they do where memory runs out: these "
                "are decoded again with half the batch and half the workers."
            )

    def _scripted(self, model: ModelHandle, unit: WorkItem) -> WorkItem:
        """The unit with what the full cache wrote for it."""
        key = self.full_keys[model.name, unit.benchmark, FULL]
        trace = self.store.trace((key, FULL.id, unit.benchmark, unit.problem.id, unit.sample))
        return replace(unit, script=trace.tokens)
