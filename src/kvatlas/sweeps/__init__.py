"""Sweeps: which settings are decoded, where, and what is missing.

Read `spec` (what a user writes), `plan` (checked, with its run keys and its cost), `run` (the driver), `executors` and
`worker` (decoding and grading). Beside them stand `plan_notes`, `measured_rate` (the time of a plan) and `doctor`.
"""

from kvatlas.sweeps.plan import Plan, make_plan
from kvatlas.sweeps.run import Progress, sweep
from kvatlas.sweeps.spec import Spec, parse_spec, read_spec
