"""The driver of a sweep: it decodes, grades and stores missing traces one by one, so that a second start resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas import models, policies
from kvatlas.benchmarks import Benchmark, for_model
from kvatlas.core import KvatlasError, Setting, Trace, digest, grouped
from kvatlas.models import ModelHandle
from kvatlas.policies import CompressingPolicy, Policy, Signal
from kvatlas.results import Expected, Key, Manifest, Store
from kvatlas.results.records import RefusedTraceError
from kvatlas.sweeps.executors import Executor, WorkerPool, cores, devices, local, needs_text
from kvatlas.sweeps.plan import FULL, Plan, WorkItem, decoded_policies, provenance
from kvatlas.sweeps.worker import Job, fitting_batch

if TYPE_CHECKING:
    from kvatlas.engine import Engine
    from kvatlas.engine.timing import TimedEngine

#: Steps that a plan times.
TIMED_STEPS = 32
#: Rows of the timed batch on a CPU.
TIMED_ROWS = 32

#: New traces, or a quarter of all, from which on the time left is estimated.
ESTIMATED = 8


@dataclass(frozen=True)
class Progress:
    """The state of a sweep after a stored trace; `done` includes traces of earlier sessions."""

    trace: Trace
    done: int
    total: int
    decoded_tokens: int
    saved_tokens: int

    def text(self, before: int, seconds: float) -> str:
        """Return traces, tokens per second, the share of tokens saved by shared trunks, and the time left.

        `before` traces are of earlier sessions, and not of these `seconds`. A screen decodes no tokens; a few traces
        are too few for an estimate of the time.
        """
        decoded = self.decoded_tokens
        saved = self.saved_tokens
        new = self.done - before
        parts = [f"{self.done:,}/{self.total:,} traces"]
        if decoded and seconds > 0:
            share = saved / (decoded + saved)
            parts += [f"{decoded / seconds:,.0f} tokens/s", f"{share:.0%} of tokens shared"]
        if new >= min(ESTIMATED, (self.total - before) / 4):
            parts.append(f"{timedelta(seconds=round(seconds * (self.total - self.done) / new))} left")
        # Last, where a narrow terminal cuts it.
        return ", ".join([*parts, self.trace.benchmark])


def measure(plan: Plan) -> float | None:
    """Return the tokens per second that all workers of this machine decode, from timed steps and compressions.

    The rows are prompts of the plan under its policies; on a GPU a worker's batch with as many cached tokens as rows
    have on average. Returns None for models of the hub, which may need a download.
    """
    import torch

    torch.set_num_threads(1)
    seconds_per_token = 0.0
    for model in plan.models:
        if model.repository is not None:
            return None
        chosen = [policy for policy in plan.policies_on(model) if Signal.ANSWER not in policy.observes] or [FULL]
        sampling = plan.spec.sampling.sampling()
        job = Job(model, "", plan.benchmarks, (), sampling, plan.spec.seed, prompt=plan.longest_prompt(model))
        if model.device == "cpu":
            seconds_per_token += _seconds_on_cpu(plan, job, chosen) / cores() / len(plan.models)
        else:
            seconds_per_token += _seconds_on_gpu(plan, job, chosen) / len(devices(job)) / len(plan.models)
    return 1 / seconds_per_token


def _seconds_on_cpu(plan: Plan, job: Job, chosen: Sequence[Policy]) -> float:
    """Return the seconds for one token of a worker, without those for prompts."""
    from kvatlas.engine.timing import TimedEngine

    model = job.model
    benchmark = for_model(plan.benchmarks[0], model.reads)
    problems = plan.problems[benchmark.name][:TIMED_ROWS]
    texts = [model.encode(benchmark.prompt(problem)) for problem in problems]
    decoded = decoded_policies(plan.policies_on(model), plan.screened)
    rows = min(fitting_batch(job, decoded, plan.trees(model), loaded=False), TIMED_ROWS)
    engine = TimedEngine(model, model.load(), chosen, job.sampling, rows)
    _timed(engine, chosen, texts, 1)
    # Both read the prompts, the second one decodes more steps.
    prefill_seconds, prefill_tokens = _timed(engine, chosen, texts, 1)
    all_seconds, all_tokens = _timed(engine, chosen, texts, 1 + TIMED_STEPS)
    seconds = max(all_seconds - prefill_seconds, 1e-9)
    return seconds / max(1, all_tokens - prefill_tokens) + _compression_seconds(plan, engine, chosen)


def _seconds_on_gpu(plan: Plan, job: Job, chosen: Sequence[Policy]) -> float:
    """Return the seconds for one token of a worker, without those for prompts and compilers."""
    from kvatlas.engine.scheduler import cache_form
    from kvatlas.engine.timing import TimedEngine

    # A batch stays full, since no trace ends.
    model = replace(job.model, overrides=models.ENDLESS)
    loaded = model.load()
    traces = plan.trees(model) * len(chosen)
    decoded = decoded_policies(plan.policies_on(model), plan.screened)
    rows = min(fitting_batch(job, decoded, plan.trees(model)), traces)
    total = 0.0
    # Settings of unlike forms are decoded one after the other.
    for together in grouped(chosen, lambda policy: cache_form(policy, model.device)).values():
        engine = TimedEngine(model, loaded, together, job.sampling, rows)
        seconds, tokens = engine.time_steps(together, plan.mean_cached(model), TIMED_STEPS)
        total += len(together) * (seconds / tokens + _compression_seconds(plan, engine, together))
        # The next one needs its memory.
        del engine
    return total / len(chosen)


def _compression_seconds(plan: Plan, engine: TimedEngine, chosen: Sequence[Policy]) -> float:
    """Return the seconds that compressions add to a token on average, from one compression of each kind of policy.

    A row decodes as many tokens between two compressions as one of them evicts.
    """
    prompt = plan.longest_prompt(engine.handle)
    longest = plan.longest_trace(engine.handle)
    seconds_by_name: dict[str, float] = {}
    total = 0.0
    for policy in chosen:
        if not isinstance(policy, CompressingPolicy) or policy.budget.most(prompt) >= longest:
            continue
        if policy.name not in seconds_by_name:
            seconds, evicted = engine.time_compression(policy, prompt, policy.budget.most(prompt))
            seconds_by_name[policy.name] = seconds / max(1, evicted)
        total += seconds_by_name[policy.name]
    return total / len(chosen)


def _timed(
    engine: Engine, policies: Sequence[Policy], texts: Sequence[tuple[int, ...]], steps: int
) -> tuple[float, int]:
    """Return the seconds and the new tokens of a full batch with so many steps."""
    from kvatlas.engine import Request

    sampling = replace(engine.sampling, max_new_tokens=steps)
    requests = [
        Request(row, texts[row % len(texts)], row, (policies[row % len(policies)],), sampling=sampling)
        for row in range(engine.batch_size)
    ]
    began = time.perf_counter()
    tokens = sum(len(generation.tokens) for generation in engine.run(requests))
    return time.perf_counter() - began, tokens


def executor_of(name: str) -> Executor:
    """Return the executor of a name. Raises KvatlasError for an unknown one."""
    if name == "local":
        return local
    if name == "ray":
        from kvatlas.ray.cluster import on_ray

        return on_ray
    raise KvatlasError(f"Unknown executor {name!r}; expected: local, ray.")


def sweep(
    plan: Plan,
    folder: Path,
    *,
    replace: bool = False,
    allow_code: bool = False,
    promise: Manifest | None = None,
    executor: str = "local",
    workers: int | None = None,
    address: str = "",
    pool: WorkerPool | None = None,
    batch_size: int | None = None,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> None:
    """Run or resume a sweep into `folder`, or add it to the run there; return when all traces of the plan are stored.

    With `replace` the manifest has this plan alone; other traces stay in the store. With `allow_code` the files of
    policies that only the run there names may be run. A `promise` replaces both manifests. By default the executor
    chooses the number of `workers`, and each worker the largest `batch_size` that fits into its memory. `address` is
    that of a cluster. A `pool` replaces both, and keeps its workers for the next sweep. `on_message` gets the notes of
    the plan and, in an adaptive sweep, a sentence for each block and the reason to stop. Only this process writes the
    store. Raises KvatlasError if the folder or the cluster cannot be used, if the run there is of other models,
    benchmarks, problems or sampling, or if workers die repeatedly.
    """
    for sentence in plan.notes:
        on_message(sentence)
    run = executor_of(executor)
    with ExitStack() as stack:
        store = stack.enter_context(Store.create(folder, provenance()))
        promise = promise or promised(plan, store, replace, allow_code)
        sentence = _hidden(promise, store) if replace else _decoded_again(promise, store.manifest(empty=promise))
        if sentence:
            on_message(sentence)
        store.set_aside(plan.contents_by_key())
        pool = pool or stack.enter_context(WorkerPool(workers, address))
        driver = Driver(plan, store, run, pool, batch_size, on_trace, on_message)
        if plan.spec.allocate.kind == "adaptive":
            # Statistics take long to import, and workers import this module.
            from kvatlas.adaptive.allocation import Adaptive

            Adaptive(plan, store, driver.decode, on_message).run()
            return
        store.put_manifest(promise)
        expected = plan.expected()
        for model in plan.models:
            driver.decode(model, expected)


def promised(plan: Plan, store: Store, alone: bool = False, allow_code: bool = False) -> Manifest:
    """Return the manifest of a run with the plan added to it, or with the plan `alone`.

    Raises KvatlasError with the differences if both cannot be one run, for a damaged manifest, and, unless
    `allow_code`, for a policy of the run whose file the user did not name.
    """
    now = plan.manifest()
    earlier = now if alone else store.manifest(empty=now)
    changed = ", ".join(filter(None, (_changed(plan, benchmark, earlier) for benchmark in plan.benchmarks)))
    if changed:
        raise _other_run(store, f"{changed} that this spec lacks or changes")
    if _is_moved(now, earlier):
        return now
    unlike = _unlike(now, earlier)
    if unlike:
        raise _other_run(store, unlike)
    others = now.others(earlier)
    if plan.spec.allocate.kind == "adaptive":
        if others or earlier.others(now):
            raise _other_run(store, "other settings, and an adaptive sweep decides on all of them together")
        return now
    if others:
        _check_others(plan, others, store, allow_code)
    return now.merge_with(earlier)


def _hidden(now: Manifest, store: Store) -> str:
    """Return a sentence on the stored traces of the run that it does not have any more, or ""."""
    try:
        earlier = store.manifest(empty=now)
    except KvatlasError:
        # A damaged manifest, which is replaced, does not say what the run had.
        return ""
    places = _stored_places(now, store)
    count = len(_stored_places(earlier, store) - places)
    if not count:
        return ""
    traces = "1 trace" if count == 1 else f"{count:,} traces"
    return f"Warning: {traces} of earlier sweeps are not part of the run any more; they stay stored and are not shown."


def _stored_places(manifest: Manifest, store: Store) -> set[Key]:
    """Return the keys of the stored traces that a manifest promises."""
    samples = store.samples()
    found: set[Key] = set()
    for cell in manifest.expected:
        for problem in cell.problems:
            key = cell.run_key, cell.setting.id, cell.benchmark, problem
            found.update((*key, sample) for sample in samples.get(key, ()) if sample < cell.samples)
    return found


def _decoded_again(now: Manifest, earlier: Manifest) -> str:
    """Return a sentence on the cells of the run that this sweep decodes in another way, or ""."""
    run_keys = {cell.name: cell.run_key for cell in now.expected}
    count = sum(run_keys.get(cell.name, cell.run_key) != cell.run_key for cell in earlier.expected)
    if not count:
        return ""
    cells = "1 cell" if count == 1 else f"{count:,} cells"
    return (
        f"Warning: {cells} of the run had other weights, prompts or versions and are decoded again; the former traces "
        "stay in the store and are not shown."
    )


def _is_moved(now: Manifest, earlier: Manifest) -> bool:
    """Return True if both have the same cells under other names, as after a model was moved."""

    def identities(manifest: Manifest) -> set[tuple[str, str, str]]:
        return {(cell.run_key, cell.setting.id, cell.benchmark) for cell in manifest.expected}

    def names(manifest: Manifest) -> set[tuple[str, str, Setting]]:
        return {cell.name for cell in manifest.expected}

    return identities(now) == identities(earlier) and names(now).isdisjoint(names(earlier))


def _unlike(now: Manifest, earlier: Manifest) -> str:
    """Return the difference that keeps two manifests from being one run as a clause, or ""."""
    if now.screened == earlier.screened:
        return now.unlike(earlier)
    return "the records of a screen" if earlier.screened else "the traces of a sweep"


def _check_others(plan: Plan, others: Sequence[Expected], store: Store, allow_code: bool) -> None:
    """Raise KvatlasError for cells of the run that the plan lacks, if they would have other run keys today."""
    settings = dict.fromkeys(cell.setting for cell in others)
    if allow_code:
        policies.permit(*(setting.policy for setting in settings))
    with_others = replace(plan, policies=tuple((policies.from_setting(setting), False) for setting in settings))
    keys = with_others.compute_keys()
    for cell in others:
        if keys.get(cell.name) != cell.run_key:
            raise _other_run(store, f"{cell.setting} of other weights, prompts or versions")


def _changed(plan: Plan, benchmark: Benchmark, earlier: Manifest) -> str:
    """Return number and names of the problems of an earlier sweep that the benchmark lacks or changes, or ""."""
    problems = plan.problems[benchmark.name]
    count = len(earlier.contents.get(benchmark.name, ()))
    # The earlier sweep may have asked for more problems.
    if count > len(problems):
        problems = benchmark.problems(count)
    return earlier.changed_problems(benchmark.name, problems)


def _other_run(store: Store, unlike: str) -> KvatlasError:
    return KvatlasError(
        f"The run in {str(store.path.parent)!r} has {unlike}; name another folder, or replace its settings by this "
        "spec with --replace (its traces stay in the store)."
    )


@dataclass
class Driver:
    """The decoding of a plan's missing traces into its store, with counts."""

    plan: Plan
    store: Store
    run: Executor
    pool: WorkerPool
    batch_size: int | None
    on_trace: Callable[[Progress], None]
    on_message: Callable[[str], None]
    halvings: int = 0
    finished: int = field(init=False)
    decoded: int = 0
    saved: int = 0

    def __post_init__(self) -> None:
        self.finished = self.plan.traces - self.plan.missing(self.store.samples())

    @cached_property
    def full_keys(self) -> Mapping[tuple[str, str, Setting], str]:
        """The run keys of the full-cache traces that a screen reads."""
        return self.plan.full_cache.compute_keys()

    def _missing(self, model: ModelHandle, cells: Iterable[Expected]) -> list[WorkItem]:
        return self.plan.units([cell for cell in cells if cell.model == model.name], self.store.samples())

    def _can_halve(self) -> bool:
        from kvatlas.engine.memory_plan import GPU_BATCH

        return (self.batch_size or GPU_BATCH) >> self.halvings > 1

    def decode(self, model: ModelHandle, cells: Iterable[Expected]) -> None:
        """Decode and store until no trace of a model's promised `cells` is missing."""
        plan = self.plan
        keys = plan.compute_keys()
        units = self._missing(model, cells)
        while units:
            job = self._job(model, units)
            before = self.finished
            if self.run is local:
                self.on_message(needs_text(job, self.pool))
            refused: list[RefusedTraceError] = []
            for trace, decoded in self.run(job, self.pool):
                try:
                    self.store.add(keys[model.name, trace.benchmark, trace.setting], trace)
                except RefusedTraceError as error:
                    # The traces that are being decoded are still to be stored.
                    refused.append(error)
                    continue
                self.finished += 1
                self.decoded += decoded
                self.saved += len(trace.tokens) - decoded
                self.on_trace(Progress(trace, self.finished, plan.traces, self.decoded, self.saved))
            if refused:
                raise RefusedTraceError.of_several(refused)
            units = self._missing(model, cells)
            if not units:
                return
            if self.finished == before and not self._can_halve():
                raise KvatlasError(
                    f"The workers ended without a result even with one sequence at a time; {len(units)} problems are "
                    "missing, finished traces are kept."
                )
            self.halvings += 1
            self.on_message(
                f"Workers ended without the traces of {len(units)} problems, probably because memory ran out; they are "
                "decoded again with half the batch and half the workers."
            )

    def _job(self, model: ModelHandle, units: Sequence[WorkItem]) -> Job:
        """Return the job that decodes the units of a model."""
        plan = self.plan
        if plan.screened:
            units = [self._scripted(model, unit) for unit in units]
        return Job(
            model=model,
            weights=model.stream,
            benchmarks=tuple(for_model(benchmark, model.reads) for benchmark in plan.benchmarks),
            units=tuple(units),
            sampling=plan.spec.sampling.sampling(),
            seed=plan.spec.seed,
            batch_size=self.batch_size,
            screened=plan.screened,
            identities={policy.setting: digest(policy.identity(model)) for policy, _ in plan.policies},
            halvings=self.halvings,
            prompt=plan.longest_prompt(model),
            registered=tuple(policies.policies.added.values()),
        )

    def _scripted(self, model: ModelHandle, unit: WorkItem) -> WorkItem:
        """Return the unit with the full cache's tokens."""
        key = self.full_keys[model.name, unit.benchmark, FULL.setting]
        trace = self.store.trace((key, FULL.setting.id, unit.benchmark, unit.problem.id, unit.sample))
        return replace(unit, script=trace.tokens)
