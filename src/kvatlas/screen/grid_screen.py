"""Screens of a grid: every setting reads the full cache's traces, which are decoded first or copied from a run.

A screen tells where settings depart from the full cache and how far their distributions differ from it. It does not
give Pass@1: a setting that departs may still find the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.policies import CompressingPolicy
from kvatlas.results import Store
from kvatlas.results.store import FILE
from kvatlas.sweeps.plan import FULL, Plan
from kvatlas.sweeps.run import Progress, promised, sweep


def screening(plan: Plan) -> Plan:
    """Return the plan of a screen, which has all settings that compress; KvatlasError without any."""
    chosen = tuple((policy, baseline) for policy, baseline in plan.policies if isinstance(policy, CompressingPolicy))
    if not chosen:
        raise KvatlasError(
            "The spec has no setting that compresses; a screen compares such settings with the full cache."
        )

    packed = next((policy.setting for policy, _ in chosen if policy.storage.packed), None)
    if packed is not None:
        raise KvatlasError(f"A screen compares settings of 16 bits with the full cache; {packed} has fewer.")
    capped = next((policy.setting for policy, _ in chosen if policy.cap is not None), None)
    if capped is not None:
        raise KvatlasError(f"A screen reads given texts, which no cap ends; leave thinking_tokens out of {capped}.")

    return replace(plan, policies=chosen, screened=True)


def screen(
    plan: Plan,
    folder: Path,
    *,
    traces: Path | None = None,
    replace: bool = False,
    allow_code: bool = False,
    on_trace: Callable[[Progress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> None:
    """Screen the settings of a `screening` plan into `folder`, resume it, or add to the screen there.

    `replace`, `allow_code` and `options` are those of a sweep. Full-cache traces are copied from the run `traces` if it
    has them, else decoded. `on_message` gets the notes of the plan, and a sentence on traces to decode. Raises
    KvatlasError for a folder that holds a sweep, and for a run whose traces have other weights, prompts or sampling.
    """
    if not replace and (folder / FILE).is_file():
        with Store.open(folder) as store:
            if store.keys() and not store.manifest().screened:
                raise KvatlasError(
                    f"{str(folder)!r} holds a sweep, whose maps a screen would hide; name another folder for the "
                    f"screen and give it the full-cache traces by --from {folder}."
                )

    for sentence in plan.notes:
        on_message(sentence)
    with Store.create(folder) as store:
        promise = promised(plan, store, replace, allow_code)
        store.set_aside(plan.full_cache.contents_by_key())
        if traces is not None:
            _copy_traces(plan.full_cache, traces, store)
        missing = plan.full_cache.missing(store.samples())

    if missing:
        on_message(f"{missing} full-cache traces are missing: they are decoded first.")
        sweep(plan.full_cache, folder, promise=promise, **options)
    sweep(plan, folder, promise=promise, on_trace=on_trace, **options)


def _copy_traces(plan: Plan, traces: Path, to: Store) -> None:
    """Copy the full-cache traces of a plan from another run; KvatlasError if that run has none with these keys."""
    expected = plan.contents_by_key()
    with Store.open(traces) as source:
        manifest = source.manifest()
        if manifest.screened:
            # Another screen holds such traces, which are not in its manifest.
            stored_keys = source.keys()
            keys = {run_key for run_key, setting, *_ in stored_keys if setting == FULL.setting.id}
        else:
            keys = {cell.run_key for cell in manifest.expected if cell.setting == FULL.setting}
        if not keys:
            raise KvatlasError(f"The run {str(traces)!r} has no setting 'full', whose traces a screen reads.")
        if not expected.keys() & keys:
            unlike = plan.manifest().unlike(manifest) or "other weights or prompts than the spec"
            raise KvatlasError(f"The full-cache traces of {str(traces)!r} cannot be read: they have {unlike}.")

        contents = {key: source.contents(key) for key in expected}
        for key, trace in source.traces_of_all_sweeps():
            content = contents.get(key, {}).get(trace.problem)
            if trace.setting == FULL.setting and content and content == expected[key].get(trace.problem):
                to.add(key, trace)
