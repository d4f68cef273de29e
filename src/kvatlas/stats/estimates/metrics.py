"""Which metrics a run has, and how each grades one trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import KvatlasError, Status
from kvatlas.results.columns import STATUS, Floats, TraceColumns
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.at_k import Rule, rule

#: What every trace is graded by, in [0, 1]. Truncated and answerless traces are not correct. Beside these: what the
#: run's benchmarks measure themselves, and the `RULES`.
METRICS: Mapping[str, Callable[[NDArray[np.void]], Floats]] = {
    "pass@1": lambda records: ((records["correct"] > 0) & (records["status"] == STATUS[Status.OK])).astype(float),
    "progress": lambda records: records["progress"],
}
#: Made of the pass@1 of K samples (`stats.at_k`).
RULES = ("pass@K", "avg@K", "maj@K")
#: What maps of a screen show of each setting and trace (sweep/screen.py says how it is measured).
SCREENED = ("unchanged", "agreed", "top1", "likeness", "answer_kept")
#: What settings cost, which `map` draws (figures/panels.py says how).
COSTS = ("mean_kv_tokens", "peak_kv_tokens", "kv_memory", "seconds", "output_tokens", "truncated")
_AND_COSTS = f", and for maps the costs {', '.join(COSTS)}."


def usual_metric(manifest: Manifest) -> str:
    """What maps of a run show if nobody says."""
    return SCREENED[0] if manifest.screened else "pass@1"


class Measure:
    """How a metric grades the traces of a run: called for some of them, in [0, 1], NaN where a trace does not tell.

    A trace that was not graded by a benchmark's own metric counts 0 if it has no answer. Raises KvatlasError for a
    metric that no screen has; `check`, once all traces were seen, for a cost and for what these traces do not have.
    """

    def __init__(self, manifest: Manifest, metric: str) -> None:
        self.metric = metric
        self.screened = manifest.screened
        self.rule: Rule | None = None if manifest.screened else rule(metric)
        self._common = METRICS["pass@1"] if self.rule is not None else METRICS.get(metric)
        self._shares: set[str] = set()
        self._others: set[str] = set()
        #: What every answered trace has: only that can be mapped.
        self._everywhere: set[str] | None = None
        self._samples = min((cell.samples for cell in manifest.expected), default=1)
        self._lacked = False
        if manifest.screened and metric in COSTS:
            raise self._cost()
        if manifest.screened and metric not in SCREENED:
            raise KvatlasError(
                f"This run is a screen, which says where settings depart from the full cache and knows no {metric!r}; "
                f"valid metrics are: {', '.join(SCREENED)}{_AND_COSTS}"
            )

    def __call__(self, traces: TraceColumns, counted: NDArray[np.bool_]) -> Floats:
        if self._common is not None and not self.screened:
            return self._common(traces.records)
        values = np.full(len(traces), math.nan if self.screened else 0.0)
        for name, rows, own in traces.metrics(counted):
            if name == self.metric and own is not None:
                values[rows] = own
            shares = np.zeros(1, bool) if own is None else (own >= 0) & (own <= 1)
            self._shares |= {name} if shares.any() else set()
            self._others |= set() if shares.all() else {name}
        unanswered = [STATUS[Status.TRUNCATED], STATUS[Status.NO_ANSWER]]
        answered = counted & ~np.isin(traces.records["status"], unanswered)
        if answered.any():
            here = traces.metrics_of_all(answered)
            self._everywhere = here if self._everywhere is None else self._everywhere & here
            self._lacked |= self.metric not in here
        return values

    def check(self, among: Sequence[Measure] = ()) -> None:
        """Raise KvatlasError if the traces were not all graded by this metric with a share.

        What it names as valid is so for the runs of the measures `among` which it is, too.
        """
        if self.metric in COSTS:
            raise self._cost()
        among = among or [self]
        if self.screened or self._common is not None:
            return
        valid = f"valid are: {', '.join(self._valid(among))}{_AND_COSTS}"
        if self.metric not in self._shares | self._others:
            raise KvatlasError(f"Unknown metric {self.metric!r}; {valid}")
        if self._lacked or self.metric in self._others:
            raise KvatlasError(f"Not every trace was graded by {self.metric!r} with a number from 0 to 1; {valid}")

    def _cost(self) -> KvatlasError:
        return KvatlasError(
            f"{self.metric!r} is a cost and no grade: `kvatlas map --metric {self.metric}` draws it; valid here are: "
            f"{', '.join(self._valid([self]))}."
        )

    def _valid(self, among: Sequence[Measure]) -> list[str]:
        if self.screened:
            return list(SCREENED)
        samples = min(measure._samples for measure in among)
        rules = f"{', '.join(RULES)} (K up to {samples})"
        own = set.intersection(*(measure._own for measure in among)) - {self.metric}
        return [*METRICS, *([rules] if samples > 1 else []), *sorted(own)]

    @property
    def _own(self) -> set[str]:
        """What the benchmarks of all traces measure themselves, with a share."""
        return (self._shares & (self._everywhere or set())) - self._others
