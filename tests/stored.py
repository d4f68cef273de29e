"""Runs of synthetic traces in stores."""

from collections.abc import Callable
from pathlib import Path

from kvatlas.core import Setting, Trace
from kvatlas.results import Manifest, Store
from tests.stats.synthetic import traces


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
