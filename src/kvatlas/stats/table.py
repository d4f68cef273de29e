"""From the traces of a run to its cells: which traces count where, and what a cell costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import BudgetAudit, Cell, CellCoord, Estimate, Grade, Outcome, Trace
from kvatlas.policies.audit import audit_setting
from kvatlas.results.columns import RECORD, STATUS, Floats, Ints, TraceColumns
from kvatlas.results.manifest import Expected, Manifest
from kvatlas.results.rows import COSTS
from kvatlas.stats.intervals import pass_at_1
from kvatlas.stats.metrics import RIGHT, Measure, Rule

#: A problem of a benchmark.
ProblemKey = tuple[str, str]

#: The fields of a trace that a cell has.
_FIELDS = ("status", "correct", *COSTS, "answer", "written", "made_with")
_KEPT = np.dtype([(name, RECORD[name]) for name in _FIELDS])
_STATUSES = {number: status for status, number in STATUS.items()}


class CellTraces:
    """The traces of one promised cell, as tables [problem, sample] with `problems` in the order of their names.

    `grades` are NaN where a trace is missing or its metric unknown. `traces` has the fields of `results.columns.RECORD`
    that are needed: its `status` is 0 where a trace is missing, costs are NaN where they are unknown. With a `rule` the
    metric is made of a problem's samples together. In an `adaptive` sweep how many problems a cell has depends on
    their outcomes. Of a `screened` run the grades are no Pass@1.
    """

    def __init__(
        self, expected: Expected, rule: Rule | None = None, adaptive: bool = False, screened: bool = False
    ) -> None:
        self.expected, self.rule, self.adaptive, self.screened = expected, rule, adaptive, screened
        self.problems = tuple(sorted(set(expected.problems)))
        self.place = {problem: number for number, problem in enumerate(self.problems)}
        self.grades: Floats = np.full((len(self.problems), expected.samples), math.nan)
        self.traces: NDArray[np.void] = np.zeros(self.grades.shape, _KEPT)
        for name in COSTS:
            self.traces[name] = math.nan
        self._versions: dict[str, int] = {}
        self._cell: Cell | None = None

    def promised_of(self, columns: TraceColumns, rows: Ints) -> tuple[Ints, tuple[Ints, Ints]]:
        """Those of the rows of this setting that are promised, and their places (problem, sample)."""
        places = np.full(len(columns.names), -1)
        for problem, place in self.place.items():
            number = columns.number.get(problem)
            if number is not None:
                places[number] = place
        problem, sample = places[columns.records["problem"][rows]], columns.records["sample"][rows]
        promised = (problem >= 0) & (sample >= 0) & (sample < self.expected.samples)
        return rows[promised], (problem[promised], sample[promised])

    def add(self, columns: TraceColumns, rows: Ints, at: tuple[Ints, Ints], values: Floats) -> None:
        """Take these rows at these places, with these values of the metric."""
        records = columns.records[rows]
        made_with, which = np.unique(records["made_with"], return_inverse=True)
        versions = [self._versions.setdefault(columns.names[name], len(self._versions)) for name in made_with]
        for name in _FIELDS[:-1]:
            self.traces[name][at] = records[name]
        self.traces["made_with"][at] = np.array(versions, int)[which]
        self.grades[at] = values
        self._cell = None

    @property
    def there(self) -> NDArray[np.bool_]:
        """[problem, sample]: whether the trace is there."""
        return np.asarray(self.traces["status"] > 0)

    @property
    def stored(self) -> int:
        """How many traces of this cell are there."""
        return int(np.count_nonzero(self.traces["status"]))

    @property
    def measured(self) -> bool:
        """Whether the metric is known of any trace of this cell."""
        return not bool(np.isnan(self.grades).all())

    @property
    def measured_problems(self) -> frozenset[str]:
        """The problems of which the metric of a trace is known."""
        return frozenset(self._by_problem(self.grades))

    @property
    def unmeasured(self) -> int:
        """Of how many traces the metric is unknown: they count in costs and in no grade."""
        return int(np.count_nonzero(self.there & np.isnan(self.grades)))

    @property
    def promised(self) -> int:
        """How many traces this cell is to have."""
        return len(self.expected.problems) * self.expected.samples

    @property
    def verdicts(self) -> Counter[Outcome]:
        """How many traces came to what."""
        counts = np.bincount((2 * self.traces["status"] + self.traces["correct"]).ravel())
        found = Counter[Outcome]()
        for number, count in enumerate(counts[2:].tolist(), 2):
            if count:
                found[Grade(bool(number % 2), 0.0, None, _STATUSES[number // 2]).verdict] += count
        return found

    @property
    def made_with(self) -> Counter[str]:
        """How many traces were decoded by which versions."""
        counts = np.bincount(self.traces["made_with"][self.there], minlength=len(self._versions))
        return Counter({text: count for text, count in zip(self._versions, counts.tolist(), strict=True) if count})

    @property
    def prompts(self) -> dict[str, int]:
        """The lengths of the problems' prompts where they are known."""
        lengths = np.nan_to_num(self.traces["prompt_tokens"], nan=-1).max(1).tolist()
        return {problem: int(length) for problem, length in zip(self.problems, lengths, strict=True) if length >= 0}

    def cost_means(self, cost: str) -> dict[str, float]:
        """The mean of a cost for each problem of which it is known."""
        return {problem: float(np.mean(values)) for problem, values in self._by_problem(self.traces[cost]).items()}

    def coord(self, axes: tuple[str, str]) -> CellCoord:
        """Its values on the vertical and the horizontal axis."""
        values = self.expected.setting.values
        return values[axes[0]], values[axes[1]]

    def cell(self) -> Cell:
        """The cell on the map; KvatlasError if nothing of it is measured, or fewer samples than its rule needs."""
        if self._cell is None:
            peaks = self._known("peak_kv_tokens")
            self._cell = Cell(
                self.expected.setting,
                self._estimate(),
                mean_kv_tokens=self._mean("mean_kv_tokens"),
                peak_kv_tokens=int(max(peaks)) if peaks else None,
                output_tokens_mean=self._mean("output_tokens"),
                truncated=self.verdicts[Outcome.TRUNCATED],
                seconds_mean=self._mean("seconds"),
                unmeasured=self.unmeasured,
                audit=self.audit(),
            )
        return self._cell

    def _known(self, cost: str) -> list[float]:
        """A cost of every trace; nothing where it is unknown of one."""
        values = self.traces[cost][self.there]
        return [] if np.isnan(values).any() else values.tolist()

    def _mean(self, cost: str) -> float | None:
        values = self._known(cost)
        return math.fsum(values) / len(values) if values else None

    def audit(self) -> BudgetAudit | None:
        """What the setting's budget leaves to its policy, over the problems that have traces."""
        return audit_setting(self.expected.setting, self.prompts.values())

    def _estimate(self) -> Estimate:
        grades = self._by_problem(self.grades)
        return pass_at_1(grades) if self.rule is None else self.rule.estimate(grades, self._votes())

    def values(self) -> Floats:
        """What comparisons compare: the grades by problem and sample, or [problem, 1] what a rule makes of them."""
        if self.rule is None:
            return self.grades
        grades = self._by_problem(self.grades)
        values = np.full((len(self.problems), 1), math.nan)
        values[[self.place[problem] for problem in grades], 0] = self.rule.values(grades, self._votes())
        return values

    def compared(self) -> dict[tuple[str, str], dict[int, float]]:
        """The known `values` by (benchmark, problem) and sample."""
        values = self._by_sample(self.values())
        return {(self.expected.benchmark, problem): samples for problem, samples in values.items()}

    def outcomes(self) -> dict[str, dict[int, float]]:
        """The known grades by problem and sample."""
        return self._by_sample(self.grades)

    def votes(self) -> dict[str, dict[int, Hashable]]:
        """For maj@K what tells answers apart, `RIGHT` or None, by problem and sample; else nothing."""
        if self.rule is None or self.rule.kind != "maj":
            return {}
        answers = self.traces["answer"]
        return {
            problem: {n: RIGHT if value else int(answers[self.place[problem], n]) or None for n, value in own.items()}
            for problem, own in self.outcomes().items()
        }

    def _by_sample(self, table: Floats) -> dict[str, dict[int, float]]:
        rows = zip(self.problems, table.tolist(), strict=True)
        known = {problem: {n: value for n, value in enumerate(row) if not math.isnan(value)} for problem, row in rows}
        return {problem: own for problem, own in known.items() if own}

    def _by_problem(self, table: Floats) -> dict[str, list[float]]:
        known = ~np.isnan(table)
        rows = zip(self.problems, table, known, strict=True)
        return {problem: row[there].tolist() for problem, row, there in rows if there.any()}

    def _votes(self) -> dict[str, list[Hashable]]:
        return {problem: list(own.values()) for problem, own in self.votes().items()}


def aligned(cells: Sequence[CellTraces]) -> tuple[tuple[str, ...], Floats]:
    """What cells compare side by side: problems, and values [problem, cell, sample], NaN where one is not known."""
    tables = [cell.values() for cell in cells]
    problems = dict.fromkeys(problem for cell in cells for problem in cell.problems)
    places = {problem: number for number, problem in enumerate(problems)}
    values = np.full((len(places), len(cells), max(table.shape[1] for table in tables)), math.nan)
    for number, (cell, table) in enumerate(zip(cells, tables, strict=True)):
        values[[places[problem] for problem in cell.problems], number, : table.shape[1]] = table
    return tuple(places), values


def add_traces(cells: Iterable[CellTraces], columns: TraceColumns, measure: Measure) -> None:
    """Give the cells their traces.

    A trace counts where its run key, setting, benchmark, problem and sample are the promised ones; all others (an
    earlier sweep's, another seed's) are passed over.
    """
    rows = columns.by_cell()
    found = []
    for cell in cells:
        own = rows.get((cell.expected.run_key, cell.expected.setting.id, cell.expected.benchmark))
        if own is not None:
            found.append((cell, *cell.promised_of(columns, own)))
    counted = np.zeros(len(columns), bool)
    for _, own, _ in found:
        counted[own] = True
    values = measure(columns, counted)
    for cell, own, at in found:
        cell.add(columns, own, at, values[own])


def cells_of(manifest: Manifest, measure: Measure) -> list[CellTraces]:
    """The promised cells in the manifest's order, without traces."""
    adaptive, screened = bool(manifest.allocation), manifest.screened
    return [CellTraces(expected, measure.rule, adaptive, screened) for expected in manifest.expected]


def gather(
    manifest: Manifest, traces: TraceColumns | Iterable[tuple[str, Trace]], metric: str = "pass@1"
) -> list[CellTraces]:
    """The promised cells in the manifest's order, each with its traces.

    Raises KvatlasError for a metric that the run does not have.
    """
    measure = Measure(manifest, metric)
    cells = cells_of(manifest, measure)
    add_traces(cells, TraceColumns.of(traces), measure)
    measure.check()
    return cells
