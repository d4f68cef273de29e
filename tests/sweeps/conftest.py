"""Fixtures of the tests of sweeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import Trace
from kvatlas.results import Store
from kvatlas.sweeps import make_plan, parse_spec
from kvatlas.sweeps.worker import Job

Build = Callable[..., dict[str, Any]]


def job(data: dict[str, Any], **changes: Any) -> Job:
    """The job of a spec with one model."""
    plan = make_plan(parse_spec(data))
    (model,) = plan.models
    values = {"prompt": max(max(prompt) for prompt in plan.prompts.values()), **changes}
    units = tuple(plan.units(plan.manifest().expected, {}))
    return Job(model, model.weights_digest, plan.benchmarks, units, plan.spec.sampling.sampling(), 3, **values)


def contents(folder: Path) -> dict[Any, Trace]:
    """Everything but the wall time."""
    with Store.open(folder) as store:
        return {
            (key, trace.setting, trace.benchmark, trace.problem, trace.sample): replace(
                trace, usage=replace(trace.usage, seconds=0.0)
            )
            for key, trace in store.traces_of_all_sweeps()
        }
