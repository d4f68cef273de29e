"""From the traces of a run to its cells: which traces count where, and what a cell costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvatlas.core import BudgetAudit, Cell, Estimate, KvatlasError, Status, Trace
from kvatlas.policies.audit import audit_setting
from kvatlas.results.manifest import Expected, Manifest
from kvatlas.stats.at_k import RIGHT, Rule, rule
from kvatlas.stats.estimates import pass_at_1
from kvatlas.stats.sequential import mean_interval

#: What a map can show, by its name: the grade of one trace in [0, 1]. Truncated and answerless traces are not correct.
#: Beside these: pass@K, avg@K, maj@K and bayes, which are made of several samples' pass@1 (`stats.at_k`).
METRICS: Mapping[str, Callable[[Trace], float]] = {
    "pass@1": lambda trace: float(trace.grade.correct and trace.grade.status is Status.OK),
    "progress": lambda trace: trace.grade.progress,
}
#: What maps of a screen show of each setting and trace (sweep/screen.py says how it is measured).
SCREENED = ("unchanged", "agreed", "top1", "likeness", "answer_kept")


@dataclass
class Gathered:
    """The traces of one promised cell: `outcomes[problem][sample]` is the grade, and how many are missing.

    `prompts` are the lengths of the problems' prompts, `written` digests of what each trace says, where they are known.
    With a `rule` the metric is made of a problem's samples together, for maj@K of their `votes`. In an `adaptive` sweep
    how many problems a cell has depends on their outcomes, so its interval is one that holds for any such reason. Of a
    `screened` run the grades are no Pass@1.
    """

    expected: Expected
    rule: Rule | None = None
    adaptive: bool = False
    screened: bool = False
    outcomes: dict[str, dict[int, float]] = field(default_factory=dict)
    votes: dict[str, dict[int, str | None]] = field(default_factory=dict)
    kept_tokens: list[float] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    peak_kv_tokens: int = 0
    truncated: int = 0
    no_answer: int = 0
    compressed: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    written: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def found(self) -> int:
        """How many traces of this cell are there."""
        return len(self.output_tokens)

    @property
    def promised(self) -> int:
        """How many traces this cell is to have."""
        return len(self.expected.problems) * self.expected.samples

    def add(self, trace: Trace, grade: Callable[[Trace], float]) -> None:
        """Count a trace of this setting, once, if its problem and sample are promised."""
        if trace.problem not in self._problems or not 0 <= trace.sample < self.expected.samples:
            return
        samples = self.outcomes.setdefault(trace.problem, {})
        if trace.sample in samples:
            return
        samples[trace.sample] = grade(trace)
        if self.rule is not None and self.rule.kind == "maj":
            answer = RIGHT if samples[trace.sample] else trace.grade.answer
            self.votes.setdefault(trace.problem, {})[trace.sample] = answer
        self.kept_tokens.append(trace.usage.mean_kv_tokens)
        self.output_tokens.append(trace.usage.output_tokens)
        self.seconds += trace.usage.seconds
        self.peak_kv_tokens = max(self.peak_kv_tokens, trace.usage.peak_kv_tokens)
        self.truncated += trace.grade.status is Status.TRUNCATED
        self.no_answer += trace.grade.status is Status.NO_ANSWER
        self.compressed += trace.usage.compressions > 0
        self.prompts[trace.problem] = trace.usage.prompt_tokens
        if trace.written:
            self.written[trace.problem, trace.sample] = trace.written

    @cached_property
    def _problems(self) -> frozenset[str]:
        return frozenset(self.expected.problems)

    def cell(self) -> Cell:
        """The cell on the map; KvatlasError if it has no trace, or fewer samples than its rule needs."""
        return Cell(
            self.expected.setting,
            self._estimate(),
            kept_tokens_mean=math.fsum(self.kept_tokens) / self.found,
            peak_kv_tokens=self.peak_kv_tokens,
            output_tokens_mean=sum(self.output_tokens) / self.found,
            truncated=self.truncated,
            seconds_mean=self.seconds / self.found,
            audit=self.audit(),
        )

    def audit(self) -> BudgetAudit | None:
        """What the setting's budget leaves to its policy, over the problems that have traces."""
        return audit_setting(self.expected.setting, self.prompts.values())

    def _estimate(self) -> Estimate:
        grades, votes = self._by_sample()
        found = pass_at_1(grades) if self.rule is None else self.rule.estimate(grades, votes)
        if not self.adaptive:
            return found
        values = np.array([np.mean(list(held.values())) for held in self.compared().values()])
        low, high = mean_interval(values, np.zeros(len(values), int))
        return Estimate(found.value, min(low, found.value), max(high, found.value), found.problems, found.samples)

    def compared(self) -> dict[str, dict[int, float]]:
        """What paired comparisons compare: the grades by sample, or a value for each problem where a rule makes it."""
        if self.rule is None or self.rule.kind == "bayes":
            return self.outcomes
        values = self.rule.values(*self._by_sample())
        return {problem: {0: float(value)} for problem, value in zip(self.outcomes, values, strict=True)}

    def _by_sample(self) -> tuple[dict[str, list[float]], dict[str, list[str | None]]]:
        grades = {problem: [held[n] for n in sorted(held)] for problem, held in self.outcomes.items()}
        return grades, {problem: [held[n] for n in sorted(held)] for problem, held in self.votes.items()}


def gather(manifest: Manifest, traces: Iterable[tuple[str, Trace]], metric: str = "pass@1") -> list[Gathered]:
    """The promised cells in the manifest's order, each with its traces.

    A trace counts where its run key, setting, benchmark, problem and sample are the promised ones, once; all others
    (an earlier sweep's, another seed's) are passed over. Raises KvatlasError for an unknown metric.
    """
    made = None if manifest.screened else rule(metric)
    grade = measure(manifest, metric)
    cells = [Gathered(expected, made, bool(manifest.allocation), manifest.screened) for expected in manifest.expected]
    by_key: dict[tuple[str, str, str], list[Gathered]] = {}
    for cell in cells:
        key = (cell.expected.run_key, cell.expected.setting.id, cell.expected.benchmark)
        by_key.setdefault(key, []).append(cell)
    for run_key, trace in traces:
        for cell in by_key.get((run_key, trace.setting.id, trace.benchmark), []):
            cell.add(trace, grade)
    return cells


def usual_metric(manifest: Manifest) -> str:
    """What maps of a run show if nobody says."""
    return SCREENED[0] if manifest.screened else "pass@1"


def measure(manifest: Manifest, metric: str) -> Callable[[Trace], float]:
    """How a metric grades one trace of a run; KvatlasError for one that the run does not have."""
    if manifest.screened:
        if metric not in SCREENED:
            raise KvatlasError(
                f"This run is a screen, which says where settings depart from the full cache and knows no {metric!r}; "
                f"valid metrics are: {', '.join(SCREENED)}."
            )
        return lambda trace: float(trace.grade.metrics[metric])
    if rule(metric) is not None:
        return METRICS["pass@1"]
    if metric not in METRICS:
        valid = ", ".join((*METRICS, "pass@K", "avg@K", "maj@K", "bayes"))
        raise KvatlasError(f"Unknown metric {metric!r}; valid are: {valid}.")
    return METRICS[metric]
