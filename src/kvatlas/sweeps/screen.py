"""Screening a grid: the full cache's traces are decoded or taken over, then every setting reads them.

A screen says where settings would depart from the full cache and how far their distributions are from its own. It is no
Pass@1: a setting that departs may still find the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.results import Store
from kvatlas.results.store import FILE
from kvatlas.stats.table import TraceTable
from kvatlas.sweeps.plan import FULL, Plan
from kvatlas.sweeps.run import Progress, promised, sweep
from kvatlas.sweeps.spec import Allocation


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
    replace: bool = False,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> None:
    """Screen the settings of a `screening` plan into `folder`, go on with it, or add them to it.

    `replace` and `options` are those of a sweep.
    Full-cache traces are taken from the run `traces` where they are there, else decoded; `on_message` gets that, and
    what the plan notes.
    KvatlasError for a folder that holds a sweep, and for a run whose traces were drawn otherwise.
    """
    if not replace:
        _check_folder(folder)
    for sentence in plan.notes:
        on_message(sentence)
    with Store.create(folder) as store:
        promise = promised(plan, store, replace)
        store.set_aside(plan.full_cache.contents_by_key)
        if traces is not None:
            _take_over(plan.full_cache, traces, store)
        missing = plan.full_cache.missing(store.samples())
    if missing:
        on_message(f"{missing} full-cache traces are not there yet: they are decoded first.")
        sweep(plan.full_cache, folder, promise=promise, **options)
    sweep(plan, folder, promise=promise, on_trace=on_trace, **options)


def unanswered(folder: Path) -> list[str]:
    """A sentence for each model and benchmark of a screen of whose full-cache traces some have no answer."""
    with Store.open(folder) as store:
        cells = TraceTable.load(store).cells("answer_kept")
    # All settings read the same traces, so that any one of them tells how many lack an answer.
    first = {(cell.expected.model, cell.expected.benchmark): cell for cell in reversed(cells)}
    return [
        f"{cell.unmeasured} of {cell.stored} full-cache traces of {model} on {benchmark} have no answer: "
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


def _take_over(decoding: Plan, traces: Path, to: Store) -> None:
    """Copy the full-cache traces that a plan asks for from another run; KvatlasError if they were drawn otherwise."""
    wanted = decoding.contents_by_key
    with Store.open(traces) as source:
        manifest = source.manifest()
        there = {cell.run_key for cell in manifest.expected if cell.setting == FULL.setting}
        if manifest.screened:
            # Another screen holds such traces without promising them.
            stored = source.keys()
            there = {key for key, setting, *_ in stored if setting == FULL.setting.id}
        if not there:
            raise KvatlasError(f"The run {str(traces)!r} has no setting 'full', whose traces a screen reads.")
        if not wanted.keys() & there:
            unlike = decoding.manifest().unlike(manifest) or "other weights or prompts than the spec"
            raise KvatlasError(f"The full-cache traces of {str(traces)!r} cannot be read: they have {unlike}.")
        contents = {key: source.contents(key) for key in wanted}
        for key, trace in source.traces():
            content = contents.get(key, {}).get(trace.problem)
            if trace.setting == FULL.setting and content and content == wanted[key].get(trace.problem):
                to.add(key, trace)
