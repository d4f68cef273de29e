"""Who is compared problem by problem: every model under every setting that one or several runs hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from kvatlas.core import KvatlasError, Setting, Status, Trace
from kvatlas.results.manifest import Manifest
from kvatlas.stats.cells import METRICS

#: A problem of a benchmark.
Place = tuple[str, str]


@dataclass
class Entrant:
    """A model under a setting. `outcomes[benchmark, problem][sample]` is the metric, in [0, 1].

    `about[benchmark, problem]` says how hard the problem is; `missing` counts promised traces that are not there.
    """

    model: str
    setting: Setting
    outcomes: dict[Place, dict[int, float]] = field(default_factory=dict)
    about: dict[Place, Mapping[str, Any]] = field(default_factory=dict)
    promised: int = 0

    @property
    def missing(self) -> int:
        return self.promised - sum(len(samples) for samples in self.outcomes.values())

    def means(self) -> dict[Place, float]:
        """The mean over samples for each problem."""
        return {place: math.fsum(samples.values()) / len(samples) for place, samples in self.outcomes.items()}


def entrants_of(
    runs: Sequence[tuple[Manifest, Iterable[tuple[str, Trace]]]], metric: str = "progress"
) -> list[Entrant]:
    """All entrants of some runs, in the order of their manifests.

    `metric` is pass@1, progress, or any graded metric in [0, 1]. A trace without that metric counts 0 if it has no
    answer. Raises KvatlasError for a metric that no trace has, and where two runs hold the same trace.
    """
    found: dict[tuple[str, Setting], Entrant] = {}
    measure = _Measure(metric)
    for manifest, traces in runs:
        promised: dict[tuple[str, str, str], tuple[Entrant, frozenset[str], int]] = {}
        for cell in manifest.expected:
            entrant = found.setdefault((cell.model, cell.setting), Entrant(cell.model, cell.setting))
            entrant.promised += len(cell.problems) * cell.samples
            promised[cell.run_key, cell.setting.id, cell.benchmark] = entrant, frozenset(cell.problems), cell.samples
            about = manifest.about.get(cell.benchmark, {})
            entrant.about.update({(cell.benchmark, id_): about[id_] for id_ in cell.problems if id_ in about})
        seen: set[tuple[Place, str, Setting, int]] = set()
        for run_key, trace in traces:
            expected = promised.get((run_key, trace.setting.id, trace.benchmark))
            place = trace.benchmark, trace.problem
            if expected is None or trace.problem not in expected[1] or not 0 <= trace.sample < expected[2]:
                continue
            name = place, trace.model, trace.setting, trace.sample
            samples = expected[0].outcomes.setdefault(place, {})
            if name not in seen and trace.sample in samples:
                raise KvatlasError(
                    f"Two of the runs hold sample {trace.sample} of {trace.problem} for {trace.model} under "
                    f"{trace.setting}; compare runs that do not overlap."
                )
            seen.add(name)
            samples[trace.sample] = measure(trace)
    measure.check()
    return [entrant for entrant in found.values() if entrant.outcomes]


class _Measure:
    """One metric of a trace, and which others traces have."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.common: Callable[[Trace], float] | None = METRICS.get(metric)
        self.shares: set[str] = set()
        self.others: set[str] = set()
        self.lacked = False

    def __call__(self, trace: Trace) -> float:
        if self.common is not None:
            return self.common(trace)
        for name, each in trace.grade.metrics.items():
            (self.others if isinstance(each, str) or not 0 <= each <= 1 else self.shares).add(name)
        value = trace.grade.metrics.get(self.metric)
        self.lacked |= value is None and trace.grade.status not in (Status.TRUNCATED, Status.NO_ANSWER)
        return 0.0 if value is None or isinstance(value, str) else float(value)

    def check(self) -> None:
        shares = self.shares - self.others
        if self.common is None and (self.lacked or self.metric not in shares):
            valid = ", ".join([*METRICS, *sorted(shares - {self.metric})])
            raise KvatlasError(
                f"Not every trace was graded by {self.metric!r} with a number from 0 to 1; valid are: {valid}."
            )


def choose(entrants: Sequence[Entrant], names: Sequence[str]) -> list[Entrant]:
    """The entrants that the names say, each exactly one, in the order of the names; all of them without any name.

    A name is words that must all fit: a model, a policy (`*` stands for anything), `PARAMETER=VALUE`. So `full`,
    `R1-Qwen full` and `dynts ratio=0.3 local_window=500` are names.
    """
    if not names:
        return list(entrants)
    chosen = []
    for name in names:
        fits = [entrant for entrant in entrants if all(_fits(word, entrant) for word in name.split())]
        if len(fits) != 1:
            there = "; ".join(f"{entrant.model} {entrant.setting}" for entrant in fits or entrants)
            raise KvatlasError(
                f"{name!r} fits {len(fits) or 'none'} of the {len(entrants)} entrants and must fit one. "
                f"{'It fits' if fits else 'There are'}: {there}."
            )
        chosen += fits
    if len({id(entrant) for entrant in chosen}) < len(chosen):
        raise KvatlasError(f"The names {', '.join(map(repr, names))} say an entrant twice.")
    return chosen


def _fits(word: str, entrant: Entrant) -> bool:
    parameter, equals, value = word.partition("=")
    if equals:
        return parameter in entrant.setting.values and str(entrant.setting.values[parameter]) == value
    names = entrant.setting.policy, entrant.model, entrant.model.rpartition(":")[2], entrant.model.rpartition("/")[2]
    return any(fnmatchcase(text, word) for text in names)


def trace_of(
    manifest: Manifest, traces: Iterable[tuple[str, Trace]], problem: str, sample: int, name: str | None = None
) -> Trace:
    """The trace of one problem and sample, of the entrant that the name fits; KvatlasError if that is not one."""
    keys = {(cell.run_key, cell.setting.id, cell.benchmark) for cell in manifest.expected}
    found = [
        trace
        for run_key, trace in traces
        if (trace.problem, trace.sample) == (problem, sample) and (run_key, trace.setting.id, trace.benchmark) in keys
    ]
    fitting = choose([Entrant(trace.model, trace.setting) for trace in found], [name] if name else [])
    if len(fitting) != 1:
        there = "; ".join(f"{trace.model} {trace.setting}" for trace in found) or "none"
        raise KvatlasError(f"Name one entrant with sample {sample} of {problem}; there are: {there}.")
    return next(t for t in found if (t.model, t.setting) == (fitting[0].model, fitting[0].setting))


def check_complete(entrants: Sequence[Entrant], partial: bool) -> list[str]:
    """Notes for a figure of these entrants; KvatlasError where traces are missing and `partial` is false."""
    missing = sum(entrant.missing for entrant in entrants)
    if not missing:
        return []
    promised = sum(entrant.promised for entrant in entrants)
    if not partial:
        raise KvatlasError(
            f"{missing} of {promised} traces are missing; finish the runs, or compare what is there with --partial."
        )
    return [f"PARTIAL: {missing} of {promised} traces are missing"]
