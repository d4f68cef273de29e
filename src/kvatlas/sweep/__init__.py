"""From a spec to a plan to a run."""

from kvatlas.sweep.plan import Plan, make_plan
from kvatlas.sweep.run import Progress, sweep
from kvatlas.sweep.screen import screen, screening
from kvatlas.sweep.spec import Spec, parse_spec, read_spec

__all__ = ["Plan", "Progress", "Spec", "make_plan", "parse_spec", "read_spec", "screen", "screening", "sweep"]
