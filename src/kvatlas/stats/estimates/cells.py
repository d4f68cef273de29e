"""From the traces of a run to its cells: which traces count where, and what a cell costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kvatlas.core import BudgetAudit, Cell, CellCoord, Estimate, Outcome, Trace
from kvatlas.policies.audit import audit_setting
from kvatlas.results.manifest import Expected, Manifest
from kvatlas.stats.estimates.at_k import RIGHT, Rule
from kvatlas.stats.estimates.metrics import Measure
from kvatlas.stats.estimates.pass_at_1 import pass_at_1


@dataclass
class CellTraces:
    """The traces of one promised cell: `outcomes[problem][sample]` is the grade, and how many are missing.

    `prompts` are the lengths of the problems' prompts, `written` digests of what each trace says, where they are known.
    With a `rule` the metric is made of a problem's samples together, for maj@K of their `votes`. In an `adaptive` sweep
    how many problems a cell has depends on their outcomes, so its interval is one that holds for any such reason. Of a
    `screened` run the grades are no Pass@1. `unmeasured` are the problems and samples of whose trace the metric is
    unknown: they count in costs and in no grade. `verdicts` count what the traces came to, `made_with` the versions
    that decoded them. Costs are listed where they are known.
    """

    expected: Expected
    rule: Rule | None = None
    adaptive: bool = False
    screened: bool = False
    outcomes: dict[str, dict[int, float]] = field(default_factory=dict)
    votes: dict[str, dict[int, str | None]] = field(default_factory=dict)
    kv_tokens: dict[tuple[str, int], float] = field(default_factory=dict)
    output_tokens: list[int] = field(default_factory=list)
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    peak_kv_tokens: list[int] = field(default_factory=list)
    unmeasured: set[tuple[str, int]] = field(default_factory=set)
    verdicts: Counter[Outcome] = field(default_factory=Counter)
    compressed: int = 0
    #: Traces of which it is known whether they were compressed.
    watched: int = 0
    prompts: dict[str, int] = field(default_factory=dict)
    written: dict[tuple[str, int], str] = field(default_factory=dict)
    made_with: Counter[str] = field(default_factory=Counter)

    @property
    def stored(self) -> int:
        """How many traces of this cell are there."""
        return self.verdicts.total()

    @property
    def measured(self) -> bool:
        """Whether the metric is known of any trace of this cell."""
        return bool(self.outcomes)

    @property
    def promised(self) -> int:
        """How many traces this cell is to have."""
        return len(self.expected.problems) * self.expected.samples

    def add(self, trace: Trace, grade: Callable[[Trace], float | None]) -> None:
        """Count a trace of this setting, once, if its problem and sample are promised."""
        if trace.problem not in self._problems or not 0 <= trace.sample < self.expected.samples:
            return
        key = trace.problem, trace.sample
        if key in self.unmeasured or trace.sample in self.outcomes.get(trace.problem, {}):
            return
        value = grade(trace)
        if value is None:
            self.unmeasured.add(key)
        else:
            self.outcomes.setdefault(trace.problem, {})[trace.sample] = value
            if self.rule is not None and self.rule.kind == "maj":
                answer = RIGHT if value else trace.grade.answer
                self.votes.setdefault(trace.problem, {})[trace.sample] = answer
        self.verdicts[trace.grade.verdict] += 1
        self.made_with[trace.made_with] += 1
        used = trace.usage
        if used.mean_kv_tokens is not None:
            self.kv_tokens[key] = used.mean_kv_tokens
        for known, value in ((self.output_tokens, used.output_tokens), (self.peak_kv_tokens, used.peak_kv_tokens)):
            if value is not None:
                known.append(value)
        if used.seconds is not None:
            self.seconds[key] = used.seconds
        self.compressed += bool(used.compressions)
        self.watched += used.compressions is not None
        if used.prompt_tokens is not None:
            self.prompts[trace.problem] = used.prompt_tokens
        if trace.written:
            self.written[key] = trace.written

    def coord(self, axes: tuple[str, str]) -> CellCoord:
        """Its values on the vertical and the horizontal axis."""
        values = self.expected.setting.values
        return values[axes[0]], values[axes[1]]

    @cached_property
    def _problems(self) -> frozenset[str]:
        return frozenset(self.expected.problems)

    def cell(self) -> Cell:
        """The cell on the map; KvatlasError if nothing of it is measured, or fewer samples than its rule needs."""
        return Cell(
            self.expected.setting,
            self._estimate(),
            mean_kv_tokens=self._mean(self.kv_tokens.values()),
            peak_kv_tokens=max(self.peak_kv_tokens) if len(self.peak_kv_tokens) == self.stored else None,
            output_tokens_mean=self._mean(self.output_tokens),
            truncated=self.verdicts[Outcome.TRUNCATED],
            seconds_mean=self._mean(self.seconds.values()),
            unmeasured=len(self.unmeasured),
            audit=self.audit(),
        )

    def _mean(self, values: Collection[float]) -> float | None:
        """Of a cost; None unless it is known of every trace."""
        return math.fsum(values) / self.stored if len(values) == self.stored else None

    def audit(self) -> BudgetAudit | None:
        """What the setting's budget leaves to its policy, over the problems that have traces."""
        return audit_setting(self.expected.setting, self.prompts.values())

    def _estimate(self) -> Estimate:
        grades, votes = self._by_sample()
        return pass_at_1(grades) if self.rule is None else self.rule.estimate(grades, votes)

    def compared(self) -> dict[tuple[str, str], dict[int, float]]:
        """What paired comparisons compare, by benchmark and problem: the grades by sample, or what a rule makes."""
        benchmark = self.expected.benchmark
        if self.rule is None:
            return {(benchmark, problem): samples for problem, samples in self.outcomes.items()}
        values = self.rule.values(*self._by_sample())
        return {(benchmark, problem): {0: float(value)} for problem, value in zip(self.outcomes, values, strict=True)}

    def _by_sample(self) -> tuple[dict[str, list[float]], dict[str, list[str | None]]]:
        grades = {problem: [by_n[n] for n in sorted(by_n)] for problem, by_n in self.outcomes.items()}
        return grades, {problem: [by_n[n] for n in sorted(by_n)] for problem, by_n in self.votes.items()}


def gather(manifest: Manifest, traces: Iterable[tuple[str, Trace]], metric: str = "pass@1") -> list[CellTraces]:
    """The promised cells in the manifest's order, each with its traces.

    A trace counts where its run key, setting, benchmark, problem and sample are the promised ones, once; all others
    (an earlier sweep's, another seed's) are passed over. Raises KvatlasError for a metric that the run does not have.
    """
    grade = Measure(manifest, metric)
    cells = [
        CellTraces(expected, grade.rule, bool(manifest.allocation), manifest.screened) for expected in manifest.expected
    ]
    by_key: dict[tuple[str, str, str], list[CellTraces]] = {}
    for cell in cells:
        key = (cell.expected.run_key, cell.expected.setting.id, cell.expected.benchmark)
        by_key.setdefault(key, []).append(cell)
    for run_key, trace in traces:
        for cell in by_key.get((run_key, trace.setting.id, trace.benchmark), []):
            cell.add(trace, grade)
    grade.check()
    return cells
