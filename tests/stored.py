"""Runs in stores: of synthetic traces, and decoded ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvatlas.core import Setting, Trace
from kvatlas.results import Manifest, Store
from kvatlas.sweeps import make_plan, parse_spec, sweep
from tests.stats.synthetic import traces


def traces_of(folder: Path) -> list[Trace]:
    """Return all traces of a run."""
    with Store.open(folder) as store:
        return [trace for _, trace in store.traces()]


def decode_run(spec: dict[str, Any], folder: Path) -> Path:
    """Decode the run of a spec in this process."""
    sweep(make_plan(parse_spec(spec)), folder, workers=1)
    return folder


def store_run(
    folder: Path,
    plan: Manifest,
    chance: Callable[[Setting], float] = lambda _: 0.5,
    change: Callable[[Trace], Trace] = lambda trace: trace,
) -> Path:
    """Store the run of a plan; a trace is correct with the chance of its setting, and changed before it is stored."""
    with Store.create(folder) as store:
        store.put_manifest(plan)
        store.add_all((key, change(trace)) for key, trace in traces(plan, chance))
    return folder
