"""Fixtures of the tests of sweeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import Trace
from kvatlas.results import Store

Build = Callable[..., dict[str, Any]]


def contents(folder: Path) -> dict[Any, Trace]:
    """Everything but the wall time."""
    with Store.open(folder) as store:
        return {
            (key, trace.setting, trace.benchmark, trace.problem, trace.sample): replace(
                trace, usage=replace(trace.usage, seconds=0.0)
            )
            for key, trace in store.traces()
        }
