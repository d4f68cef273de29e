"""Screening a grid: the full cache's traces are decoded or taken over, then every setting reads them.

A screen says where settings would depart from the full cache and how far their distributions are from its own. It is no
Pass@1: a setting that departs may still find the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas import policies
from kvatlas.core import Grade, KvatlasError, Status, Trace
from kvatlas.noise import stream_key
from kvatlas.policies import Signal
from kvatlas.results import Store
from kvatlas.results.store import FILE
from kvatlas.stats.estimates.cells import gather
from kvatlas.sweeps.plan import Plan
from kvatlas.sweeps.run import FULL, Progress, sweep
from kvatlas.sweeps.spec import Allocation
from kvatlas.sweeps.work import fitting, reference

if TYPE_CHECKING:
    from kvatlas.engine.forced import Tally
    from kvatlas.models import Model
    from kvatlas.sweeps.work import Job


def screening(plan: Plan) -> Plan:
    """The plan of a screen: all settings that compress; KvatlasError if there is none."""
    chosen = tuple((policy, baseline) for policy, baseline in plan.policies if policy.budget is not None)
    if not chosen:
        raise KvatlasError(
            "The spec has no setting that compresses; a screen compares such settings with the full cache."
        )
    spec = plan.spec.model_copy(update={"allocate": Allocation()})
    return replace(plan, spec=spec, policies=chosen, screened=True)


def screen(
    plan: Plan,
    folder: Path,
    *,
    traces: Path | None = None,
    tell: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> None:
    """Screen the settings of a `screening` plan into `folder`, or go on with it; `options` are those of a sweep.

    Full-cache traces are taken from the run `traces` where they are there, else decoded; `note` is told that, and what
    the plan notes.
    KvatlasError for a folder that holds a sweep, and for a run whose traces were drawn otherwise.
    """
    decoding = replace(plan, policies=((policies.of(FULL), True),), screened=False)
    _check_folder(folder)
    for sentence in plan.notes:
        note(sentence)
    if traces is not None:
        _take_over(decoding, traces, folder)
    with Store.create(folder) as store:
        # Before anything is decoded, so that the folder counts as a screen from now on.
        store.put_manifest(plan.manifest())
        done = store.keys()
    missing = sum(len(decoding.units(model, done)) for model in decoding.models)
    if missing:
        note(f"{missing} full-cache traces are not there yet: they are decoded first.")
        sweep(decoding, folder, **options)
    sweep(plan, folder, tell=tell, **options)


def unanswered(folder: Path) -> list[str]:
    """A sentence for each model and benchmark of a screen of whose full-cache traces some have no answer."""
    with Store.open(folder) as store:
        cells = gather(store.manifest(), store.traces(texts=False), "answer_kept")
    # All settings read the same traces, so that any one of them tells how many lack an answer.
    first = {(cell.expected.model, cell.expected.benchmark): cell for cell in reversed(cells)}
    return [
        f"{len(cell.unmeasured)} of {cell.found} full-cache traces of {model} on {benchmark} have no answer: "
        "answer_kept is unknown there."
        for (model, benchmark), cell in sorted(first.items())
        if cell.unmeasured
    ]


def _check_folder(folder: Path) -> None:
    if not (folder / FILE).is_file():
        return
    with Store.open(folder) as store:
        if store.keys() and not store.manifest().screened:
            raise KvatlasError(
                f"{str(folder)!r} holds a sweep, whose maps a screen would hide; name another folder for the screen "
                f"and give it the full-cache traces by --traces {folder}."
            )


def _take_over(decoding: Plan, traces: Path, folder: Path) -> None:
    """Copy the full-cache traces that a plan asks for from another run; KvatlasError if they were drawn otherwise."""
    wanted = set(decoding.keys.values())
    with Store.open(traces) as source:
        manifest = source.manifest()
        there = {cell.run_key for cell in manifest.expected if cell.setting == FULL}
        if manifest.screened:
            # Another screen holds such traces without promising them.
            stored = source.keys()
            there = {key for key, setting, *_ in stored if setting == FULL.id}
        if not there:
            raise KvatlasError(f"The run {str(traces)!r} has no setting 'full', whose traces a screen reads.")
        if not wanted & there:
            raise KvatlasError(
                f"The full-cache traces of {str(traces)!r} cannot be read: {_unlike(decoding, manifest.spec)}."
            )
        with Store.create(folder) as store:
            for key, trace in source.traces():
                if key in wanted and trace.setting == FULL:
                    store.add(key, trace)


def _unlike(decoding: Plan, other: Mapping[str, Any]) -> str:
    """In what another run's spec differs."""
    mine = decoding.spec.model_dump(mode="json")
    unlike = [
        f"{name} is {other[name]} there and {mine[name]} in the spec"
        for name in ("sampling", "seed")
        if name in other and other[name] != mine[name]
    ]
    return " and ".join(unlike) or "they are of other models, benchmarks or prompts than the spec's"


def read(job: Job, claims: Iterable[int]) -> Iterator[tuple[Trace, int]]:
    """The worker's side: screen the units whose numbers `claims` gives, each with its full-cache tokens.

    Yields a record for every setting: a trace without tokens, whose grade's metrics are the `measures` and whose status
    is the `outcome` of the trace that was read.
    """
    import torch

    from kvatlas.engine import Request
    from kvatlas.engine.forced import ForcedReader

    torch.set_num_threads(1)
    model = job.model
    found = {benchmark.name: benchmark for benchmark in job.benchmarks}
    settings = {setting: policies.of(setting) for unit in job.units for setting in unit.settings}
    network, chosen = model.network(), tuple(settings.values())
    reader = ForcedReader(model, network, chosen, job.sampling, max(2, job.batch_size or fitting(job, chosen)))
    for number in claims:
        unit = job.units[number]
        prompt = model.encode(found[unit.benchmark].prompt(unit.problem))
        stream = stream_key(job.seed, job.weights, unit.benchmark, unit.problem.id, unit.sample)
        chosen = tuple(settings[setting] for setting in unit.settings)
        answers = any(Signal.ANSWER in policy.observes for policy in chosen)
        seen = reference(model, reader.network, prompt, unit.script) if answers else None
        status = outcome(model, unit.script)
        for result in reader.screen(Request(number, prompt, stream, chosen, seen, unit.script)):
            measured = measures(result.tally, len(unit.script), answered=status is Status.OK)
            grade = Grade(bool(measured["unchanged"]), measured["agreed"], None, status, measured)
            yield (
                Trace(
                    model=model.name,
                    benchmark=unit.benchmark,
                    problem=unit.problem.id,
                    sample=unit.sample,
                    setting=result.policy.setting,
                    tokens=(),
                    text="",
                    grade=grade,
                    usage=result.usage,
                ),
                0,
            )


def outcome(model: Model, tokens: tuple[int, ...]) -> Status:
    """Whether a full-cache trace has an answer to keep (`ok`), or was cut before it ended, or never answered."""
    if tokens[-1] not in model.stops:
        return Status.TRUNCATED
    split = model.split(tokens)
    answer = "" if split is None else model.text(tokens[split[1] :])
    return Status.OK if answer.strip() else Status.NO_ANSWER


def measures(tally: Tally, tokens: int, answered: bool = True) -> dict[str, float]:
    """What a screen's maps show, all in [0, 1], and the numbers behind it.

    `unchanged` is 1 where the setting would have drawn every token of the trace, `agreed` the share before the first
    other one, `top1` the share of thinking tokens after the first compression with the same likeliest token,
    `likeness` exp(-`kl`), `answer_kept` the part of the answer's likelihood that is left, at most 1. Beside: `kl`
    (mean over those thinking tokens, nats), `answer_change` (log-likelihood, nats), `departs_at`. What never came to a
    compression has lost nothing. Where the trace has no finished answer (`answered` is false) nothing is known of what
    is kept of it: `answer_kept` and `answer_change` are missing.
    """
    kl = max(0.0, tally.kl / tally.thinking) if tally.thinking else 0.0
    at = tally.departs_at
    found = {
        "unchanged": float(at is None),
        "agreed": 1.0 if at is None else at / tokens,
        "top1": tally.top1 / tally.thinking if tally.thinking else 1.0,
        "likeness": math.exp(-kl),
        "kl": kl,
    }
    if answered:
        found |= {"answer_kept": math.exp(min(0.0, tally.answer_change)), "answer_change": tally.answer_change}
    return found if at is None else {**found, "departs_at": float(at)}
