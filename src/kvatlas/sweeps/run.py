"""The driver of a sweep: it decodes, grades and stores missing traces one by one, so that a second start resumes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from kvatlas import policies
from kvatlas.benchmarks import for_model, problems_of
from kvatlas.core import KvatlasError, Trace, digest
from kvatlas.results import Key, Manifest, Store
from kvatlas.results.records import RefusedTraceError
from kvatlas.results.regrade import start_measuring
from kvatlas.sweeps.executors import Executor, WorkerPool, executors, local, needs_text
from kvatlas.sweeps.plan import Plan, provenance
from kvatlas.sweeps.planned_problems import other_run
from kvatlas.sweeps.worker import Job, refuse_import
from kvatlas.text import counted

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
        """Return traces, the time left, tokens per second, and the share of tokens saved by shared trunks.

        `before` traces are of earlier sessions, and not of these `seconds`. A few traces are too few for an estimate
        of the time. A narrow terminal cuts the end.
        """
        decoded = self.decoded_tokens
        new = self.done - before

        parts = [f"{self.done:,}/{self.total:,} traces"]
        if new >= min(ESTIMATED, (self.total - before) / 4):
            parts.append(f"{timedelta(seconds=round(seconds * (self.total - self.done) / new))} left")
        if decoded and seconds > 0:
            share = self.saved_tokens / (decoded + self.saved_tokens)
            parts += [f"{decoded / seconds:,.0f} tokens/s", f"{share:.0%} of tokens shared"]
        return ", ".join([*parts, self.trace.benchmark])


def sweep(
    plan: Plan,
    folder: Path,
    *,
    replace: bool = False,
    allow_code: bool = False,
    executor: str = "local",
    workers: int | None = None,
    address: str = "",
    pool: WorkerPool | None = None,
    batch_size: int | None = None,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
    on_start: Callable[[str], None] = lambda _: None,
) -> None:
    """Run or resume a sweep into `folder`, or add it to the run there; return when all traces of the plan are stored.

    With `replace` the manifest has this plan alone; other traces stay in the store. With `allow_code` the files of
    policies that only the run there names may be run. By default the executor chooses the number of `workers`, and each
    worker the largest `batch_size` that fits into its memory. `address` is that of a cluster. A `pool` replaces both,
    and keeps its workers for the next sweep. `on_message` gets warnings and the notes of the plan, `on_start` what is
    started. Only this process writes the store. Raises KvatlasError if the folder or the cluster cannot be used, if
    the run there is of other models, benchmarks, problems or sampling, or if workers die repeatedly.
    """
    refuse_import()
    for name, count in (("workers", workers), ("batch_size", batch_size)):
        if count is not None and count < 1:
            raise KvatlasError(f"{name} is {count}; expected an integer >= 1.")
    for sentence in plan.notes:
        on_message(sentence)
    run = executors.get(executor)
    with ExitStack() as stack:
        store = stack.enter_context(Store.create(folder, provenance()))
        promise = promised(plan, store, replace, allow_code)
        for sentence in (*_changes_of_stored_traces(promise, store, replace), *plan.kept_beside(promise)):
            on_message(sentence)
        store.set_aside({cell.run_key: plan.contents[cell.model, cell.benchmark] for cell in plan.expected()})
        pool = pool or stack.enter_context(WorkerPool(workers, address))
        start_measuring(store, promise, plan.measures)
        store.put_manifest(promise)
        _decode_missing(plan, store, run, pool, batch_size, on_trace, on_message, on_start)


def promised(plan: Plan, store: Store, alone: bool = False, allow_code: bool = False) -> Manifest:
    """Return the manifest of a run with the plan added to it, or with the plan `alone`.

    Raises KvatlasError with the differences if both cannot be one run, for a damaged manifest, and, unless
    `allow_code`, for a policy of the run whose file the user did not name.
    """
    now = plan.manifest()
    if alone:
        is_replaced = _is_chosen_later(now, store)
        return replace(now, provenance={**now.provenance, "replaced": True}) if is_replaced else now
    earlier = store.manifest(empty=now)

    # The problems that the earlier sweep asked, of which it may have had more.
    changes = []
    for benchmark in plan.benchmarks:
        problems = plan.problems[benchmark.name]
        count = len(earlier.contents.get(benchmark.name, ()))
        if count > len(problems):
            problems = problems_of(benchmark, count)
        changes.append(earlier.changed_problems(benchmark.name, problems))
    changed = ", ".join(filter(None, changes))
    if changed:
        raise other_run(store.path.parent, f"{changed} that this spec lacks or changes")

    # A model that was moved has the same cells under another name.
    names = {cell.name for cell in now.expected}
    if _identities(now) == _identities(earlier) and names.isdisjoint(cell.name for cell in earlier.expected):
        return now

    unlike = now.unlike(earlier)
    if unlike:
        raise other_run(store.path.parent, unlike)

    others = now.others(earlier)
    # Cells of the run that the plan lacks would have to have the same run keys today.
    settings = dict.fromkeys(cell.setting for cell in others)
    if allow_code:
        policies.permit(*(setting.policy for setting in settings))
    with_others = replace(plan, policies=tuple((policies.from_setting(setting), False) for setting in settings))
    keys = with_others.compute_keys()
    for cell in others:
        if keys.get(cell.name) != cell.run_key:
            raise other_run(store.path.parent, f"{cell.setting} of other weights, prompts or versions")
    return now.merge_with(earlier)


def _is_chosen_later(now: Manifest, store: Store) -> bool:
    """Return whether a manifest takes the place of another one of which traces are there.

    Settings that are left out once their losses were seen let others be tested, each of which may be proven by chance:
    with four settings of a chain that all lose the margin, one is "proven" in up to 14 % of runs.
    """
    try:
        earlier = store.manifest(empty=now)
    except KvatlasError:
        return True
    is_same = earlier.expected == now.expected and earlier.decided == now.decided
    return bool(earlier.provenance.get("replaced")) or (not is_same and bool(_stored_keys(now, store)))


def _identities(manifest: Manifest) -> set[tuple[str, str, str]]:
    """Return what names the traces of the cells of a manifest in the store, without their problems."""
    return {(cell.run_key, cell.setting.id, cell.benchmark) for cell in manifest.expected}


def _changes_of_stored_traces(now: Manifest, store: Store, replace: bool) -> Iterator[str]:
    """Yield a sentence on stored traces that the run will not show any more, if there are any."""
    try:
        earlier = store.manifest(empty=now)
    except KvatlasError:
        # A damaged manifest, which is replaced, does not say what the run had.
        return

    for benchmark, (problems, before, units) in now.changed_units(earlier).items():
        yield (
            f"Warning: the clusters of {benchmark} were changed: the run's {problems:,} problems were {before:,} units "
            f"and are {units:,}. All its claims on problems like these are made anew by these units, chosen after the "
            "data; claims on these problems alone stay as they are."
        )

    if replace:
        count = len(_stored_keys(earlier, store) - _stored_keys(now, store))
        if count:
            yield (
                f"Warning: {counted(count, 'trace')} of earlier sweeps are not part of the run any more; they stay "
                "stored and are not shown."
            )
        return

    run_keys = {cell.name: cell.run_key for cell in now.expected}
    count = sum(run_keys.get(cell.name, cell.run_key) != cell.run_key for cell in earlier.expected)
    if count:
        yield (
            f"Warning: {counted(count, 'cell')} of the run had other weights, prompts, code or versions and are "
            "decoded again; the former traces stay in the store and are not shown. Where only a grader was changed, "
            "`kvatlas grade RUN --allow-code` before that grades the stored texts."
        )


def _stored_keys(manifest: Manifest, store: Store) -> set[Key]:
    """Return the keys of the stored traces that a manifest promises."""
    samples = store.samples()
    found: set[Key] = set()
    for cell in manifest.expected:
        for problem in cell.problems:
            key = cell.run_key, cell.setting.id, cell.benchmark, problem
            found.update((*key, sample) for sample in samples.get(key, ()) if sample < cell.samples)
    return found


def _decode_missing(
    plan: Plan,
    store: Store,
    run: Executor,
    pool: WorkerPool,
    batch_size: int | None,
    on_trace: Callable[[Progress], None],
    on_message: Callable[[str], None],
    on_start: Callable[[str], None],
) -> None:
    """Decode and store until no trace of a plan is missing."""
    keys = plan.compute_keys()
    names = {policy.setting.policy for policy, _ in plan.policies}
    finished = plan.traces - plan.missing(store.samples())
    decoded_tokens = 0
    saved_tokens = 0
    halvings = 0
    for model in plan.models:
        cells = [cell for cell in plan.expected() if cell.model == model.name]
        while units := plan.units(cells, store.samples()):
            job = Job(
                model=model,
                weights=model.stream,
                benchmarks=tuple(for_model(benchmark, model.reads) for benchmark in plan.benchmarks),
                units=tuple(units),
                sampling=plan.spec.sampling.sampling(),
                seed=plan.spec.seed,
                batch_size=batch_size,
                identities={policy.setting: digest(policy.identity(model)) for policy, _ in plan.policies},
                halvings=halvings,
                prompt=plan.longest_prompt(model),
                registered=tuple(kind for name, kind in policies.policies.added.items() if name in names),
            )
            before = finished
            if run is local:
                on_start(needs_text(job, pool))

            refused: list[RefusedTraceError] = []
            for trace, decoded in run(job, pool):
                try:
                    store.add(keys[model.name, trace.benchmark, trace.setting], trace)
                except RefusedTraceError as error:
                    # The traces that are being decoded are still to be stored.
                    refused.append(error)
                    continue
                finished += 1
                decoded_tokens += decoded
                saved_tokens += len(trace.tokens) - decoded
                on_trace(Progress(trace, finished, plan.traces, decoded_tokens, saved_tokens))
            if refused:
                raise RefusedTraceError.of_several(refused)

            # Workers that died leave units without traces.
            lost = len(plan.units(cells, store.samples()))
            if not lost:
                break
            from kvatlas.engine.memory_plan import GPU_BATCH

            if finished == before and (batch_size or GPU_BATCH) >> halvings <= 1:
                raise KvatlasError(
                    f"The workers ended without a result even with one sequence at a time; {lost} problems are "
                    "missing, finished traces are kept."
                )
            halvings += 1
            on_message(
                f"Workers ended without the traces of {lost} problems, probably because memory ran out; they are "
                "decoded again with half the batch and half the workers."
            )
