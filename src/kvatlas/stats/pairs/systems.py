"""Who is compared problem by problem: every model under every setting that one or several runs hold."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from kvatlas.core import KvatlasError, Note, NoteKind, Setting, Trace
from kvatlas.stats.estimates.at_k import Rule
from kvatlas.stats.estimates.cells import add_traces, cells_of
from kvatlas.stats.estimates.metrics import Measure
from kvatlas.stats.estimates.run_data import RunData

#: A problem of a benchmark.
ProblemKey = tuple[str, str]


@dataclass
class System:
    """A model under a setting. `outcomes[benchmark, problem][sample]` is the metric, in [0, 1].

    `about[benchmark, problem]` says how hard the problem is; `missing` counts promised traces that are not there,
    `unmeasured` those of which the metric is unknown. With a `rule` the metric is made of a problem's samples together,
    for maj@K of their `votes`.
    """

    model: str
    setting: Setting
    outcomes: dict[ProblemKey, dict[int, float]] = field(default_factory=dict)
    about: dict[ProblemKey, Mapping[str, Any]] = field(default_factory=dict)
    promised: int = 0
    unmeasured: int = 0
    rule: Rule | None = None
    votes: dict[ProblemKey, dict[int, Hashable]] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        return self.promised - self.unmeasured - sum(len(samples) for samples in self.outcomes.values())

    def compared(self) -> Mapping[ProblemKey, Mapping[int, float]]:
        """What paired comparisons compare: the grades by sample, or a value for each problem where a rule makes it."""
        return self.outcomes if self.rule is None else {key: {0: value} for key, value in self.means().items()}

    def means(self) -> dict[ProblemKey, float]:
        """The metric of each problem: the mean over samples, or what its rule makes of them.

        Raises KvatlasError where a problem has fewer samples than the rule needs.
        """
        if self.rule is not None:
            grades = {key: [samples[n] for n in sorted(samples)] for key, samples in self.outcomes.items()}
            votes = {key: [samples[n] for n in sorted(samples)] for key, samples in self.votes.items()}
            self.rule.check(grades)
            return dict(zip(grades, map(float, self.rule.values(grades, votes)), strict=True))
        return {key: math.fsum(samples.values()) / len(samples) for key, samples in self.outcomes.items()}


def systems_of(
    runs: Sequence[RunData], metric: str = "progress", benchmarks: Sequence[str] | None = None
) -> list[System]:
    """All systems of some runs, in the order of their manifests, on these benchmarks or on all.

    `metric` is any that the runs have (`stats.estimates.metrics`). Raises KvatlasError for one that they do not have,
    for a benchmark that no run has, and where two runs hold the same trace.
    """
    there = list(dict.fromkeys(cell.benchmark for run in runs for cell in run.manifest.expected))
    for asked in benchmarks or ():
        if asked not in there:
            raise KvatlasError(f"No run has the benchmark {asked!r}; there are: {', '.join(there)}.")
    by_name: dict[tuple[str, Setting], System] = {}
    measures = [Measure(run.manifest, metric) for run in runs]
    for run, measure in zip(runs, measures, strict=True):
        cells = cells_of(run.manifest, measure)
        add_traces(cells, run.columns, measure)
        for cell in cells:
            expected = cell.expected
            if benchmarks and expected.benchmark not in benchmarks:
                continue
            name = expected.model, expected.setting
            system = by_name.setdefault(name, System(*name, rule=measure.rule))
            system.promised += cell.promised
            system.unmeasured += cell.unmeasured
            about = run.manifest.about.get(expected.benchmark, {})
            system.about.update({(expected.benchmark, id_): about[id_] for id_ in expected.problems if id_ in about})
            for problem, samples in cell.outcomes().items():
                own = system.outcomes.setdefault((expected.benchmark, problem), {})
                if again := own.keys() & samples.keys():
                    raise KvatlasError(
                        f"Two of the runs hold sample {min(again)} of {problem} for {expected.model} under "
                        f"{expected.setting}; compare runs that do not overlap."
                    )
                own.update(samples)
            for problem, votes in cell.votes().items():
                system.votes.setdefault((expected.benchmark, problem), {}).update(votes)
    for measure in measures:
        measure.check(measures)
    return [system for system in by_name.values() if system.outcomes]


def choose(systems: Sequence[System], names: Sequence[str]) -> list[System]:
    """The systems that the names say, each exactly one, in the order of the names; all of them without any name.

    A name is words that must all fit: a model, a policy (`*` stands for anything), `PARAMETER=VALUE`. So `full`,
    `R1-Qwen full` and `dynts ratio=0.3 local_window=500` are names.
    """
    if not names:
        return list(systems)
    chosen = []
    for name in names:
        fits = [system for system in systems if all(_fits(word, system) for word in name.split())]
        if len(fits) != 1:
            there = "; ".join(f"{system.model} {system.setting}" for system in fits or systems)
            raise KvatlasError(
                f"{name!r} fits {len(fits) or 'none'} of the {len(systems)} systems and must fit one. "
                f"{'It fits' if fits else 'There are'}: {there}."
            )
        chosen += fits
    if len({id(system) for system in chosen}) < len(chosen):
        raise KvatlasError(f"The names {', '.join(map(repr, names))} say a system twice.")
    return chosen


def _fits(word: str, system: System) -> bool:
    parameter, equals, value = word.partition("=")
    if equals:
        return parameter in system.setting.values and str(system.setting.values[parameter]) == value
    names = system.setting.policy, system.model, system.model.rpartition(":")[2], system.model.rpartition("/")[2]
    return any(fnmatchcase(text, word) for text in names)


def trace_of(run: RunData, problem: str, sample: int, name: str | None = None) -> Trace:
    """The trace of one problem and sample, of the system that the name fits; KvatlasError if that is not one."""
    keys = {(cell.run_key, cell.setting.id, cell.benchmark) for cell in run.manifest.expected}
    there = run.columns.records["sample"] == sample
    there &= run.columns.records["problem"] == run.columns.number.get(problem, -1)
    with run.store() as store:
        matching = [store.trace(key) for key in run.columns.keys(there) if key[:3] in keys]
    fitting = choose([System(trace.model, trace.setting) for trace in matching], [name] if name else [])
    if len(fitting) != 1:
        named = "; ".join(f"{trace.model} {trace.setting}" for trace in matching) or "none"
        raise KvatlasError(f"Name one system with sample {sample} of {problem}; there are: {named}.")
    return next(t for t in matching if (t.model, t.setting) == (fitting[0].model, fitting[0].setting))


def check_complete(systems: Sequence[System], partial: bool) -> list[Note]:
    """Notes for a figure of these systems; KvatlasError where traces are missing and `partial` is false."""
    missing = sum(system.missing for system in systems)
    if not missing:
        return []
    promised = sum(system.promised for system in systems)
    if not partial:
        raise KvatlasError(
            f"{missing} of {promised} traces are missing; finish the runs, or compare what is there with --partial."
        )
    return [Note(NoteKind.PARTIAL, f"PARTIAL: {missing} of {promised} traces are missing")]
