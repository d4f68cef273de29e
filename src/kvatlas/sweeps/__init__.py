"""Sweeps: the spec, the plan, and the run of it."""

from kvatlas.sweeps.plan import Plan, make_plan
from kvatlas.sweeps.run import Progress, measure, sweep
from kvatlas.sweeps.spec import Spec, parse_spec, read_spec

__all__ = [
    "Plan",
    "Progress",
    "Spec",
    "make_plan",
    "measure",
    "parse_spec",
    "read_spec",
    "sweep",
]
