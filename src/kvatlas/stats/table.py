"""The trace table: the promised traces of a run as columns of numbers, without tokens and texts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import BudgetAudit, Cell, CellCoord, Estimate, Grade, KvatlasError, Outcome, Setting, Status, grouped
from kvatlas.policies.audit import audit_setting
from kvatlas.results import Key, Manifest, TraceColumns
from kvatlas.results.records import COSTS as TRACE_COSTS
from kvatlas.results.records import RECORD, STATUS
from kvatlas.stats.estimates import estimates, pass_at_1
from kvatlas.stats.metrics import COSTS, METRICS, RIGHT, SCREENED, Rule, rule
from kvatlas.stats.numerics.arrays import Floats, Ints

#: A problem of a benchmark.
ProblemKey = tuple[str, str]
#: The estimates of all cells of a table by one metric, computed when one is first asked for.
Estimates = Callable[[], list[Estimate | None]]
#: The numbers of a trace that a table copies from its record, and their type with the codes that follow them.
_COPIED = ("status", "correct", "progress", *TRACE_COSTS, "answer", "written")
_PLACE = np.dtype([*((name, RECORD[name]) for name in _COPIED), ("made_with", "<i4"), ("metrics", "<i4")])
_STATUSES = {number: status for status, number in STATUS.items()}


class TraceTable:
    """The promised traces of a run: one place for each problem and sample of each promised cell.

    Cells are in the manifest's order, problems in the order of their names. `records` [places] has the numbers
    of each trace: `status` is 0 where it is missing, costs are NaN where they are unknown, `made_with` and `metrics`
    are codes of the texts in `versions` and `kinds`. `measured[name]` [places] is a metric of the benchmark itself, NaN
    where it is no number.
    """

    def __init__(self, manifest: Manifest, parts: Iterable[TraceColumns] = ()) -> None:
        self.manifest = manifest
        orders = {
            problems: {problem: number for number, problem in enumerate(sorted(set(problems)))}
            for problems in {cell.problems for cell in manifest.expected}
        }
        self.orders = [orders[cell.problems] for cell in manifest.expected]
        self.shapes = [(len(order), cell.samples) for order, cell in zip(self.orders, manifest.expected, strict=True)]
        ends = list(accumulate(map(math.prod, self.shapes), initial=0))
        self.spans = [slice(begin, end) for begin, end in pairwise(ends)]
        keys = [(cell.run_key, cell.setting.id, cell.benchmark) for cell in manifest.expected]
        self._cells_of = grouped(range(len(keys)), keys.__getitem__)
        self.records: NDArray[np.void] = np.zeros(ends[-1], _PLACE)
        for name in ("progress", *TRACE_COSTS):
            self.records[name] = math.nan
        self.measured: dict[str, Floats] = {}
        self.versions: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        for columns in parts:
            self.append(columns)

    def append(self, columns: TraceColumns) -> None:
        """Add traces, in place of earlier ones of the same places, except those that are not promised."""
        rows, places = self._placed(columns)
        records = columns.records[rows]
        for name in _COPIED:
            self.records[name][places] = records[name]
        for name, codes in (("made_with", self.versions), ("metrics", self.kinds)):
            texts, which = np.unique(records[name], return_inverse=True)
            known = [codes.setdefault(columns.names[text], len(codes)) for text in texts]
            self.records[name][places] = np.array(known, int)[which]
        for values in self.measured.values():
            values[places] = math.nan
        for name, values in columns.metrics().items():
            own = self.measured.setdefault(name, np.full(len(self.records), math.nan))
            own[places] = values[rows]

    def _placed(self, columns: TraceColumns) -> tuple[Ints, Ints]:
        """The rows of the promised traces, and the place of each."""
        rows, places = [np.zeros(0, int)], [np.zeros(0, int)]
        orders: dict[int, Ints] = {}
        problems, samples = columns.records["problem"], columns.records["sample"]
        for key, own in columns.by_cell().items():
            for number in self._cells_of.get(key, ()):
                order, width = self.orders[number], self.manifest.expected[number].samples
                if id(order) not in orders:
                    orders[id(order)] = np.array([order.get(name, -1) for name in columns.names])
                problem, sample = orders[id(order)][problems[own]], samples[own]
                promised = (problem >= 0) & (sample >= 0) & (sample < width)
                rows.append(own[promised])
                places.append(self.spans[number].start + problem[promised] * width + sample[promised])
        return np.concatenate(rows), np.concatenate(places)

    def cells(self, metric: str = "pass@1") -> list[CellTraces]:
        """The promised cells in the manifest's order, with the traces so far.

        Raises KvatlasError for a metric that the run does not have.
        """
        self.check(metric)
        values = self._grades(metric)
        grades = [values[span].reshape(shape) for span, shape in zip(self.spans, self.shapes, strict=True)]
        known = cache(lambda: estimates(grades))
        return [CellTraces(self, number, metric, own, known) for number, own in enumerate(grades)]

    def _grades(self, metric: str) -> Floats:
        """[places]: the metric in [0, 1]; NaN where it is unknown. Without an answer a benchmark's own metric is 0."""
        status = self.records["status"]
        if metric == "progress":
            values = self.records["progress"]
        elif metric in METRICS or rule(metric) is not None:
            values = (self.records["correct"] > 0) & (status == STATUS[Status.OK])
        else:
            values = self.measured.get(metric, np.full(len(status), math.nan))
            values = values if self.manifest.screened else np.nan_to_num(values)
        return np.where(status > 0, values, math.nan)

    def check(self, metric: str, among: Sequence[TraceTable] = ()) -> None:
        """Raise KvatlasError if not all traces have this metric as a share; it names the metrics of all the tables."""
        screened = self.manifest.screened
        if metric in SCREENED if screened else metric in {*METRICS, *self._own_metrics()} or rule(metric):
            return
        tables = among or [self]
        samples = min((cell.samples for table in tables for cell in table.manifest.expected), default=1)
        several = [f"pass@K, maj@K (K up to {samples})"] if samples > 1 else []
        own = set.intersection(*(table._own_metrics() for table in tables))
        valid = SCREENED if screened else [*METRICS, *several, *sorted(own)]
        unknown = f"This run is a screen, which knows no {metric!r}" if screened else f"Unknown metric {metric!r}"
        raise KvatlasError(f"{unknown}; expected: {', '.join(valid)}, and for maps the costs {', '.join(COSTS)}.")

    def _own_metrics(self) -> set[str]:
        """The benchmark's metrics that all answered traces have as a number from 0 to 1."""
        kinds: list[Mapping[str, bool]] = [json.loads(text) for text in self.kinds]
        status, codes = self.records["status"], self.records["metrics"]
        is_answered = np.isin(status, [STATUS[status] for status in Status if status.answered])
        own = set(self.measured).intersection(*(kinds[code] for code in np.unique(codes[is_answered])))
        texts = {name for code in np.unique(codes[status > 0]) for name, is_text in kinds[code].items() if is_text}
        return {name for name in own - texts if not ((self.measured[name] < 0) | (self.measured[name] > 1)).any()}


class CellTraces:
    """The traces of one promised cell of a table, as arrays [problem, sample], graded by a metric.

    `place` numbers the `problems` in the order of their names. `traces` are the cell's part of the table's `records`,
    `grades` the metric, NaN where a trace is missing or its metric unknown.
    With a `rule` the metric is made of a problem's samples together. In an `adaptive` sweep the number of problems of a
    cell depends on their outcomes.
    """

    def __init__(self, table: TraceTable, number: int, metric: str, grades: Floats, known: Estimates) -> None:
        self.table, self.number, self.metric, self.grades, self._known_estimates = table, number, metric, grades, known
        self.expected = expected = table.manifest.expected[number]
        self.model, self.benchmark, self.setting = expected.model, expected.benchmark, expected.setting
        self.baseline = expected.baseline
        self.place = table.orders[number]
        self.problems = tuple(self.place)
        self.adaptive, self.screened = bool(table.manifest.allocation), table.manifest.screened
        self.rule: Rule | None = None if self.screened else rule(metric)
        self.traces = table.records[table.spans[number]].reshape(grades.shape)

    @property
    def there(self) -> NDArray[np.bool_]:
        """True for each trace that is there."""
        return np.asarray(self.traces["status"] > 0)

    @property
    def stored(self) -> int:
        """Number of traces of this cell that are there."""
        return int(np.count_nonzero(self.traces["status"]))

    @property
    def promised(self) -> int:
        """Number of traces that this cell is to have."""
        return len(self.expected.problems) * self.expected.samples

    @property
    def measured(self) -> bool:
        """True if the metric is known of any trace of this cell."""
        return not bool(np.isnan(self.grades).all())

    @property
    def unmeasured(self) -> int:
        """Of how many traces the metric is unknown: they count in costs and in no grade."""
        return int(np.count_nonzero(self.there & np.isnan(self.grades)))

    @cached_property
    def verdicts(self) -> Counter[Outcome]:
        """The number of traces with each outcome."""
        codes, counts = np.unique(2 * self.traces["status"] + self.traces["correct"], return_counts=True)
        found = Counter[Outcome]()
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            if code > 1:
                found[Grade(bool(code % 2), 0.0, None, _STATUSES[code // 2]).verdict] += count
        return found

    @property
    def made_with(self) -> Counter[str]:
        """The number of traces by the versions that decoded them."""
        counts = np.bincount(self.traces["made_with"][self.there], minlength=len(self.table.versions))
        return Counter({text: n for text, n in zip(self.table.versions, counts.tolist(), strict=True) if n})

    @property
    def prompts(self) -> dict[str, int]:
        """The lengths of the problems' prompts where they are known."""
        lengths = np.nan_to_num(self.traces["prompt_tokens"], nan=-1).max(1).tolist()
        return {problem: int(length) for problem, length in zip(self.place, lengths, strict=True) if length >= 0}

    def key(self, problem: str, sample: int) -> Key:
        """The key of a trace in the store."""
        return self.expected.run_key, self.setting.id, self.benchmark, problem, sample

    def stored_keys(self) -> list[Key]:
        """The keys in the store of the traces that are there."""
        problems = self.problems
        return [self.key(problems[problem], sample) for problem, sample in np.argwhere(self.there).tolist()]

    def coord(self, axes: tuple[str, str]) -> CellCoord:
        """Its values on the vertical and the horizontal axis."""
        values = self.setting.on_axes
        return values[axes[0]], values[axes[1]]

    @cached_property
    def cell(self) -> Cell:
        """The cell on the map; KvatlasError if nothing of it is measured, or a problem has too few samples."""
        peak = max(self._known("peak_kv_tokens"), default=None)
        if self.rule is None:
            estimate = self._known_estimates()[self.number] or pass_at_1({})
        else:
            estimate = self.rule.estimate(*self._samples())
        mean, (token, beside) = self._mean("mean_kv_tokens"), self.expected.kv_bytes or (0, 0)
        return Cell(
            self.setting,
            estimate,
            mean_kv_tokens=mean,
            peak_kv_tokens=None if peak is None else int(peak),
            mean_kv_bytes=mean * token + beside if token and mean is not None else None,
            peak_kv_bytes=int(peak) * token + beside if token and peak is not None else None,
            output_tokens_mean=self._mean("output_tokens"),
            truncated=self.verdicts[Outcome.TRUNCATED],
            seconds_mean=self._mean("seconds"),
            unmeasured=self.unmeasured,
            audit=self.audit,
        )

    def _known(self, cost: str) -> list[float]:
        """A cost of every trace; nothing where it is unknown of one."""
        values = self.traces[cost][self.there]
        return [] if np.isnan(values).any() else values.tolist()

    def _mean(self, cost: str) -> float | None:
        values = self._known(cost)
        return math.fsum(values) / len(values) if values else None

    @cached_property
    def audit(self) -> BudgetAudit | None:
        """The audit of the setting's budget over the problems that have traces."""
        return audit_setting(self.setting, self.prompts.values())

    def values(self) -> Floats:
        """The values that comparisons read: the grades [problem, sample], or [problem, 1] by a rule."""
        if self.rule is None:
            return self.grades
        values = np.full((len(self.place), 1), math.nan)
        values[~np.isnan(self.grades).all(1), 0] = self.rule.values(*self._samples())
        return values

    def in_order(self, table: NDArray[Any], problems: Iterable[str], missing: object = math.nan) -> NDArray[Any]:
        """The rows of a table [problem, ...] of this cell for these problems; `missing` for those it does not have."""
        rows = np.concatenate([table, np.full((1, *table.shape[1:]), missing, table.dtype)])
        return rows[[self.place.get(problem, -1) for problem in problems]]

    def _samples(self) -> tuple[list[list[float]], list[list[Hashable]]]:
        """The known grades of each problem that has any, and their votes: answers as codes, `RIGHT`, or None."""
        rows = zip(~np.isnan(self.grades), self.grades, self.traces["answer"], strict=True)
        known = [(grades[there].tolist(), answers[there].tolist()) for there, grades, answers in rows if there.any()]
        votes = [[RIGHT if right else answer or None for right, answer in zip(*own, strict=True)] for own in known]
        return [grades for grades, _ in known], votes


# -- several cells -----------------------------------------------------------------------------------------------------


def select(
    cells: Iterable[CellTraces],
    *,
    model: str | None = None,
    benchmark: str | None = None,
    setting: Setting | None = None,
    baseline: bool | None = None,
) -> list[CellTraces]:
    """The cells with these values."""
    values = {"model": model, "benchmark": benchmark, "setting": setting, "baseline": baseline}
    return [cell for cell in cells if all(v is None or getattr(cell, name) == v for name, v in values.items())]


def missing(cells: Sequence[CellTraces]) -> tuple[int, int, int]:
    """The number of missing traces of some cells, that of the promised ones, and that of the cells that lack any."""
    lacking = [cell.promised - cell.stored for cell in cells]
    return sum(lacking), sum(cell.promised for cell in cells), sum(count > 0 for count in lacking)


def check_distinct(cells: Iterable[CellTraces]) -> None:
    """Raise KvatlasError where two runs hold the same trace."""
    earlier: dict[Hashable, set[tuple[str, int]]] = {}
    for cell in cells:
        own = {key[-2:] for key in cell.stored_keys()}
        for problem, sample in sorted(own & earlier.setdefault(cell.expected.name, set()))[:1]:
            raise KvatlasError(
                f"Two of the runs hold sample {sample} of {problem} for {cell.model} under {cell.setting}; compare "
                "runs that do not overlap."
            )
        earlier[cell.expected.name] |= own


def aligned(cells: Sequence[CellTraces]) -> tuple[tuple[str, ...], Floats]:
    """Cells of one benchmark side by side: problems, and their values [problem, cell, sample], NaN where unknown."""
    tables = [cell.values() for cell in cells]
    problems = tuple(dict.fromkeys(problem for cell in cells for problem in cell.place))
    values = np.full((len(problems), len(cells), max(table.shape[1] for table in tables)), math.nan)
    for number, (cell, table) in enumerate(zip(cells, tables, strict=True)):
        values[:, number, : table.shape[1]] = cell.in_order(table, problems)
    return problems, values


@dataclass(frozen=True)
class GradeMatrix:
    """Cells side by side on the problems and samples that all of them have.

    `means` [problems, cells] are over `samples` or more; `strata` [problems] numbers benchmarks; `left_out` counts
    problems that not every cell has.
    """

    columns: tuple[Any, ...]
    means: Floats
    strata: Ints
    samples: int
    left_out: int = 0


def matrix(benchmarks: Sequence[Mapping[Hashable, CellTraces]]) -> GradeMatrix | None:
    """The cells of one or more benchmarks by the columns that all have; None if they share no problem and sample."""
    measured = [{column: cell for column, cell in cells.items() if cell.measured} for cells in benchmarks]
    columns = [name for name in measured[0] if all(name in others for others in measured[1:])] if measured else []
    rows: list[Floats] = []
    strata: list[int] = []
    left_out = 0
    for number, cells in enumerate(measured if columns else ()):
        _, values = aligned([cells[name] for name in columns])
        known = ~np.isnan(values)
        shared = np.asarray(known.all(1))
        rows += [row[:, samples] for row, samples in zip(values, shared, strict=True) if samples.any()]
        strata += [number] * int(shared.any(1).sum())
        left_out += int((known.any((1, 2)) & ~shared.any(1)).sum())
    if not rows or len(set(strata)) < len(measured):
        return None
    means = np.array([row.mean(1) for row in rows])
    return GradeMatrix(tuple(columns), means, np.array(strata), min(row.shape[1] for row in rows), left_out)
