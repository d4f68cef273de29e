"""The trace table: the promised traces of a run as columns of numbers, without tokens and texts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.columns import TRACES, cell_columns, cost_columns
from kvatlas.core import Cell, CellCoord, Claim, Estimate, KvatlasError, Outcome, Status, changed_problems, grouped
from kvatlas.core.settings import BudgetAudit, SettingFacts, Stays, mean_stays, usual_controls
from kvatlas.results.manifest import Manifest
from kvatlas.results.records import COSTS as TRACE_COSTS
from kvatlas.results.records import RECORD, STATUS, Key, TraceColumns
from kvatlas.stats.estimates import METRICS, RIGHT, Rule, estimates, pass_at_1, rule, usual_metric
from kvatlas.stats.numerics.arrays import Flags, Floats, Ints, cluster_numbers, strata_of_sizes

#: A problem of a benchmark.
ProblemKey = tuple[str, str]
#: The estimates of all cells of a table by one metric, computed when one is first asked for.
Estimates = Callable[[], list[Estimate | None]]
#: The numbers of a trace that a table copies from its record, and their type with the codes that follow them.
_COPIED = ("status", "correct", "progress", *TRACE_COSTS, "answer", "token_digest")
_PLACE = np.dtype([*((name, RECORD[name]) for name in _COPIED), ("made_with", "<i4"), ("metrics", "<i4")])
#: The numbers of a trace that its record has.
RECORDED = ("progress", *TRACE_COSTS)
#: The outcomes by the names that they have as numbers of traces.
_OUTCOMES = {outcome.name.lower(): outcome for outcome in Outcome}


class TraceTable:
    """The promised traces of a run: one place for each problem and sample of each promised cell.

    Cells are in the manifest's order, problems in the order of their names. `records` [places] has the numbers
    of each trace: `status` is 0 where it is missing, costs are NaN where they are unknown, `made_with` and `metrics`
    are codes of the texts in `versions` and `kinds`. `measured` [places] has the metrics of benchmarks, measures, and
    verdicts of other graders.
    """

    def __init__(self, manifest: Manifest, stored: Iterable[TraceColumns] = ()) -> None:
        self.manifest = manifest
        cells = manifest.expected
        # The number of each problem of each cell, by name; cells with the same problems share one dictionary.
        by_problems: dict[tuple[str, ...], dict[str, int]] = {}
        for problems in dict.fromkeys(cell.problems for cell in cells):
            by_problems[problems] = {problem: index for index, problem in enumerate(sorted(set(problems)))}
        self.orders = [by_problems[cell.problems] for cell in cells]
        self.shapes = [(len(order), cell.samples) for order, cell in zip(self.orders, cells, strict=True)]
        ends = list(accumulate(map(math.prod, self.shapes), initial=0))
        self.spans = [slice(begin, end) for begin, end in pairwise(ends)]

        # Several promised cells may share a key; a trace fills all of them.
        keys = [(cell.run_key, cell.setting.id, cell.benchmark) for cell in cells]
        self._cells_of_key = grouped(range(len(keys)), keys.__getitem__)

        self.usual_controls = usual_controls(cell.setting.policy for cell in cells if not cell.baseline)
        self.records: NDArray[np.void] = np.zeros(ends[-1], _PLACE)
        for name in RECORDED:
            self.records[name] = math.nan
        self.measured: dict[str, Floats] = {}
        self.versions: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        for columns in stored:
            self.add(columns)

    def add(self, columns: TraceColumns) -> None:
        """Add traces, in place of earlier ones of the same places, except those that are not promised."""
        problems = columns.records["problem"]
        samples = columns.records["sample"]
        # The number of each name of the columns in an order of problems, -1 for other names. Cells share orders, so
        # they are told apart by identity.
        number_of_name: dict[int, Ints] = {}
        # The rows of the promised traces, and the place of each.
        rows_of_cells = [np.zeros(0, int)]
        places_of_cells = [np.zeros(0, int)]
        for key, cell_rows in columns.by_cell().items():
            for index in self._cells_of_key.get(key, ()):
                order = self.orders[index]
                width = self.manifest.expected[index].samples
                if id(order) not in number_of_name:
                    number_of_name[id(order)] = np.array([order.get(name, -1) for name in columns.names])
                problem = number_of_name[id(order)][problems[cell_rows]]
                sample = samples[cell_rows]
                is_promised = (problem >= 0) & (sample >= 0) & (sample < width)
                rows_of_cells.append(cell_rows[is_promised])
                places_of_cells.append(self.spans[index].start + problem[is_promised] * width + sample[is_promised])
        rows = np.concatenate(rows_of_cells)
        places = np.concatenate(places_of_cells)

        records = columns.records[rows]
        for name in _COPIED:
            self.records[name][places] = records[name]

        # The columns have codes of their own, so their texts get the codes of the table.
        for name, codes in (("made_with", self.versions), ("metrics", self.kinds)):
            texts, text_of_row = np.unique(records[name], return_inverse=True)
            table_codes = [codes.setdefault(columns.names[text], len(codes)) for text in texts]
            self.records[name][places] = np.array(table_codes, int)[text_of_row]

        # A trace that replaces an earlier one may lack some of its metrics.
        for values in self.measured.values():
            values[places] = math.nan
        for name, values in columns.metrics().items():
            self.measured.setdefault(name, np.full(len(self.records), math.nan))[places] = values[rows]

    def numbers(self, name: str, span: slice = slice(None)) -> Floats:
        """Return a number of the traces [places], NaN where it is unknown. Raises KeyError if no trace has it.

        Costs and progress are those of the records, and an outcome as `truncated` is 1 for its traces, 0 for others.
        """
        records = self.records[span]
        if name in RECORDED:
            return records[name]
        if name not in _OUTCOMES:
            return self.measured[name][span]
        outcome = _OUTCOMES[name]
        is_graded = outcome in (Outcome.CORRECT, Outcome.WRONG)
        status = records["status"]
        found = status == STATUS[Status.OK if is_graded else Status[outcome.name]]
        if is_graded:
            found &= (records["correct"] > 0) == (outcome is Outcome.CORRECT)
        return np.where(status > 0, found, math.nan)

    def cells(self, metric: str = "pass@1", claim: Callable[[], Claim] = lambda: Claim.LIKE) -> list[CellTraces]:
        """Return the promised cells in the manifest's order, with the traces so far.

        Their intervals are of the `claim`, which is asked for when one is needed. Raises KvatlasError for a metric that
        the run does not have.
        """
        self.check(metric)
        if metric == "pass@1" or rule(metric) is not None:
            values = self.numbers("correct")
        else:
            # A trace without an answer has 0 of a benchmark's own metric.
            values = np.where(self.records["status"] > 0, np.nan_to_num(self.numbers(metric)), math.nan)
        grades = [values[span].reshape(shape) for span, shape in zip(self.spans, self.shapes, strict=True)]
        # The limits of all cells at once are faster than one by one; they are computed when a cell first asks.
        estimates_once = cache(lambda: estimates(grades, claim(), [cell.clusters for cell in cells]))
        cells = [CellTraces(self, index, metric, of_cell, estimates_once) for index, of_cell in enumerate(grades)]
        return cells

    def check(self, metric: str, among: Sequence[TraceTable] = ()) -> None:
        """Raise KvatlasError if not all traces have this metric as a share; it names the metrics of all the tables."""
        usual = usual_metric(self.manifest)
        counts_right = metric == "pass@1" or rule(metric) is not None
        if counts_right and usual != "pass@1":
            # A score of 0.7 is neither right nor wrong.
            others = "" if usual == "progress" else f"{usual!r} or "
            raise KvatlasError(f"This run has graded scores, which have no {metric}; expected {others}'progress'.")
        if counts_right or metric in METRICS or metric in self._benchmark_metrics():
            return

        if metric.startswith("graded:") and metric in self.measured:
            stored = self.records["status"] > 0
            lacking = np.count_nonzero(np.isnan(self.measured[metric][stored]))
            raise KvatlasError(
                f"{lacking:,} of {np.count_nonzero(stored):,} traces have no {metric}; `kvatlas grade RUN --grader "
                f"{metric.removeprefix('graded:')}` grades them."
            )

        # The metrics that all of the tables have.
        tables = among or [self]
        promised = chain.from_iterable(table.manifest.expected for table in tables)
        samples = min((cell.samples for cell in promised), default=1)
        of_benchmarks = set.intersection(*(table._benchmark_metrics() for table in tables))
        valid = [*METRICS, *([f"pass@K, maj@K (K up to {samples})"] if samples > 1 else []), *sorted(of_benchmarks)]
        costs = ", ".join(cost_columns(self.manifest.measures))
        raise KvatlasError(f"Unknown metric {metric!r}; expected: {', '.join(valid)}, and for maps the costs {costs}.")

    def _benchmark_metrics(self) -> set[str]:
        """Return the benchmark's metrics that all answered traces have as a number from 0 to 1."""
        # By kind of trace: its metrics, and whether each is a text.
        kinds: list[Mapping[str, bool]] = [json.loads(text) for text in self.kinds]
        status = self.records["status"]
        kind_of_trace = self.records["metrics"]
        is_answered = np.isin(status, [STATUS[status] for status in Status if status.answered])

        declared = {measure.name: measure.is_share or measure.counts for measure in self.manifest.measures}
        found = {name for name in self.measured if declared.get(name, True)}
        # Measures, and other graders, may tell of a trace without an answer: one without their number is unknown.
        of_every_trace = {name for name in found if name in declared or name.startswith("graded:")}
        for kind in np.unique(kind_of_trace[is_answered]):
            found.intersection_update(kinds[kind])
        for kind in np.unique(kind_of_trace[status > 0]):
            found -= {name for name, is_text in kinds[kind].items() if is_text}
            found -= of_every_trace - kinds[kind].keys()
        return {name for name in found if not ((self.measured[name] < 0) | (self.measured[name] > 1)).any()}


class CellTraces:
    """The traces of one promised cell of a table, as arrays [problem, sample], graded by a metric.

    `place` numbers the `problems` in the order of their names. `traces` are the cell's rows of the table's `records`,
    `grades` the metric, NaN where a trace is missing or its metric unknown.
    With a `rule` the metric is made of a problem's samples together.
    """

    def __init__(self, table: TraceTable, index: int, metric: str, grades: Floats, all_estimates: Estimates) -> None:
        self.table = table
        self.metric = metric
        self.grades = grades
        self.expected = table.manifest.expected[index]
        self.model = self.expected.model
        self.benchmark = self.expected.benchmark
        self.setting = self.expected.setting
        self.baseline = self.expected.baseline
        self.place = table.orders[index]
        self.problems = tuple(self.place)
        self.rule: Rule | None = rule(metric)
        self.traces = table.records[table.spans[index]].reshape(grades.shape)
        self._index = index
        self._all_estimates = all_estimates

    @property
    def contents(self) -> Mapping[str, str]:
        """The digests of the contents of its problems by name; empty in runs of earlier versions."""
        return self.table.manifest.contents.get(self.benchmark, {})

    @cached_property
    def clusters(self) -> Ints | None:
        """The number of the cluster of each of its problems; None if each stands for itself."""
        return cluster_numbers(units_of_problems(self.table.manifest.clusters, self.benchmark, self.place))

    @property
    def is_control(self) -> bool:
        """Return whether the plan declared a control: `random` and `window` beside another policy in earlier runs."""
        if self.expected.control is None:
            return self.setting.policy in self.table.usual_controls
        return self.expected.control

    @property
    def is_stored(self) -> Flags:
        """True for each trace that is stored."""
        return np.asarray(self.traces["status"] > 0)

    @property
    def token_digest(self) -> NDArray[np.void]:
        """The digest of the tokens of each trace, else of its text; zeros where neither is known."""
        return self.traces["token_digest"]

    @property
    def stored(self) -> int:
        """Number of stored traces of this cell."""
        return int(np.count_nonzero(self.traces["status"]))

    @property
    def promised(self) -> int:
        """Number of traces that this cell is to have."""
        return len(self.expected.problems) * self.expected.samples

    @property
    def measured(self) -> bool:
        """True if the metric is known of any trace of this cell."""
        return not bool(np.isnan(self.grades).all())

    @cached_property
    def outcomes(self) -> Counter[Outcome]:
        """The number of traces with each outcome."""
        counts = {outcome: int(np.nansum(self.numbers(name))) for name, outcome in _OUTCOMES.items()}
        return +Counter(counts)

    @property
    def made_with(self) -> Counter[str]:
        """The number of traces by the versions that decoded them."""
        counts = np.bincount(self.traces["made_with"][self.is_stored], minlength=len(self.table.versions))
        return Counter({text: count for text, count in zip(self.table.versions, counts.tolist(), strict=True) if count})

    @property
    def prompts(self) -> dict[str, int]:
        """The lengths of the problems' prompts that are known."""
        lengths = np.nan_to_num(self.numbers("prompt_tokens"), nan=-1).max(1).tolist()
        return {problem: int(length) for problem, length in zip(self.place, lengths, strict=True) if length >= 0}

    @cached_property
    def facts(self) -> SettingFacts:
        """The facts of its setting, for the problems that have traces."""
        return self.expected.facts_with(self.prompts.values())

    @property
    def all_values(self) -> Mapping[str, Any]:
        """The parameters of its setting, those included that the setting does not name."""
        return self.expected.all_values

    def key(self, problem: str, sample: int) -> Key:
        """Return the key of a trace in the store."""
        return self.expected.run_key, self.setting.id, self.benchmark, problem, sample

    def stored_keys(self) -> list[Key]:
        """Return the keys of the stored traces."""
        problems = self.problems
        return [self.key(problems[problem], sample) for problem, sample in np.argwhere(self.is_stored).tolist()]

    def coord(self, axes: tuple[str, str]) -> CellCoord:
        """Return its values on the vertical and the horizontal axis."""
        values = self.all_values
        return values[axes[0]], values[axes[1]]

    @cached_property
    def cell(self) -> Cell:
        """The cell on the map; KvatlasError if nothing of it is measured, or a problem has too few samples."""
        if self.rule is None:
            estimate = self._all_estimates()[self._index] or pass_at_1({})
        else:
            clusters = self.clusters
            if clusters is not None:
                clusters = np.unique(clusters[~np.isnan(self.grades).all(1)], return_inverse=True)[1]
            estimate = self.rule.estimate(*self._samples(), clusters)

        measures = self.table.manifest.measures
        of_traces = [column for column in cell_columns(measures) if str(column.source).startswith(TRACES)]
        numbers = {column.key: column.of_traces(self._known_numbers) for column in of_traces}
        token_bytes, sequence_bytes = self.expected.kv_bytes or (0, 0)
        for key, tokens in (("kv_memory", "mean_kv_tokens"), ("kv_bytes_peak", "peak_kv_tokens")):
            is_known = token_bytes and numbers[tokens] is not None
            numbers[key] = numbers[tokens] * token_bytes + sequence_bytes if is_known else None
        numbers["audit"] = self.audit
        if self.stays:
            numbers |= {"stays_tokens": self.stays.tokens, "stays_share": self.stays.share}
        return Cell(self.setting, estimate, numbers, measures)

    def numbers(self, name: str) -> Floats:
        """Return a number of the traces [problem, sample], NaN where it is unknown."""
        return self.table.numbers(name, self.table.spans[self._index]).reshape(self.grades.shape)

    def _known_numbers(self, name: str) -> list[float]:
        """Return a number of every stored trace; nothing if it is unknown of one."""
        if name not in self.table.measured and name not in (*RECORDED, *_OUTCOMES):
            return []
        values = self.numbers(name)[self.is_stored]
        return [] if np.isnan(values).any() else values.tolist()

    @cached_property
    def audit(self) -> BudgetAudit | None:
        """The audit of the setting's budget over the problems that have traces."""
        return BudgetAudit.over(self.facts.compressions, self.prompts.values())

    @cached_property
    def stays(self) -> Stays | None:
        """The tokens after a compression by the rule of the setting, over the problems that have traces."""
        return mean_stays(self.facts.compressions, self.prompts.values())

    def values(self) -> Floats:
        """Return the values that comparisons read: the grades [problem, sample], or [problem, 1] by a rule."""
        if self.rule is None:
            return self.grades
        values = np.full((len(self.place), 1), math.nan)
        values[~np.isnan(self.grades).all(1), 0] = self.rule.values(*self._samples())
        return values

    def in_order(self, table: NDArray[Any], problems: Iterable[str], missing: object = math.nan) -> NDArray[Any]:
        """Return the rows of a table [problem, ...] of this cell for these problems; `missing` for other problems."""
        # Index -1 takes the last row, which is the missing one.
        rows = np.concatenate([table, np.full((1, *table.shape[1:]), missing, table.dtype)])
        return rows[[self.place.get(problem, -1) for problem in problems]]

    def _samples(self) -> tuple[list[list[float]], list[list[Hashable]]]:
        """Return the known grades of each problem that has any, and their votes: answers as codes, `RIGHT`, or None."""
        grades: list[list[float]] = []
        votes: list[list[Hashable]] = []
        for row, answers in zip(self.grades, self.traces["answer"], strict=True):
            is_known = ~np.isnan(row)
            if is_known.any():
                grades.append(row[is_known].tolist())
                pairs = zip(grades[-1], answers[is_known].tolist(), strict=True)
                # All right answers are one vote, however they are written. Code 0 is no answer.
                votes.append([RIGHT if right else answer or None for right, answer in pairs])
        return grades, votes


def units_of_problems(
    clusters: Mapping[str, Mapping[str, str]], benchmark: str, problems: Iterable[str]
) -> list[Hashable]:
    """Return the names of the units of problems: their `clusters[benchmark][problem]`, or the problems themselves."""
    named = clusters.get(benchmark, {})
    return [(benchmark, (named[problem],) if problem in named else problem) for problem in problems]


# -- several cells ---------------------------------------------------------------------------------------------------


def select(cells: Iterable[CellTraces], **values: object) -> list[CellTraces]:
    """Return the cells with these values: of `model`, `benchmark`, `setting` or `baseline`."""
    found = list(cells)
    for name, value in values.items():
        found = [cell for cell in found if getattr(cell, name) == value]
    return found


def missing(cells: Sequence[CellTraces]) -> tuple[int, int, int]:
    """Return the numbers of missing traces, of promised traces, and of cells that lack any."""
    lacking = [cell.promised - cell.stored for cell in cells]
    return sum(lacking), sum(cell.promised for cell in cells), sum(count > 0 for count in lacking)


def check_distinct(cells: Iterable[CellTraces]) -> None:
    """Raise KvatlasError where two runs hold the same trace."""
    earlier: dict[Hashable, set[tuple[str, int]]] = {}
    for cell in cells:
        of_name = earlier.setdefault(cell.expected.name, set())
        stored = {key[-2:] for key in cell.stored_keys()}
        for problem, sample in sorted(stored & of_name)[:1]:
            raise KvatlasError(
                f"Two of the runs hold sample {sample} of {problem} for {cell.model} under {cell.setting}; compare "
                "runs that do not overlap."
            )
        of_name |= stored


def check_same_problems(cells: Iterable[CellTraces]) -> None:
    """Raise KvatlasError where a problem of one run has another content in another run."""
    cell_of_run = {(cell.benchmark, id(cell.table.manifest)): cell for cell in cells}
    earlier: dict[str, dict[str, str]] = {}
    for cell in cell_of_run.values():
        contents = earlier.setdefault(cell.benchmark, {})
        changed = changed_problems(cell.benchmark, cell.contents, {**cell.contents, **contents})
        if changed:
            raise KvatlasError(f"The runs have other contents of {changed}; compare runs of the same problems.")
        contents.update(cell.contents)


def aligned(cells: Sequence[CellTraces]) -> tuple[tuple[str, ...], Floats]:
    """Return the problems of cells of one benchmark, and their values [problem, cell, sample], NaN where unknown.

    Raises KvatlasError for cells of unlike problems.
    """
    check_same_problems(cells)
    tables = [cell.values() for cell in cells]
    problems = tuple(dict.fromkeys(chain.from_iterable(cell.place for cell in cells)))
    values = np.full((len(problems), len(cells), max(table.shape[1] for table in tables)), math.nan)
    for column, (cell, table) in enumerate(zip(cells, tables, strict=True)):
        values[:, column, : table.shape[1]] = cell.in_order(table, problems)
    return problems, values


@dataclass(frozen=True)
class GradeMatrix:
    """Cells side by side on the problems and samples that all of them have.

    `means` [problems, cells] are over these samples; `strata` [problems] numbers benchmarks; `left_out` counts
    problems that not every cell has. `grades` [all problems, cells, samples] are NaN where a trace is missing,
    `promised` [all problems, samples] those that every cell was to have, with their benchmarks in `all_strata`.
    `clusters` [problems] and `all_clusters` number the clusters of problems, None where each stands for itself.
    """

    columns: tuple[Any, ...]
    means: Floats
    strata: Ints
    left_out: int
    grades: Floats
    promised: Flags
    all_strata: Ints
    clusters: Ints | None = None
    all_clusters: Ints | None = None

    def first(self, samples: int | None) -> tuple[Floats, Flags]:
        """Return the grades of the first samples, and which are promised; those of all samples for None."""
        return self.grades[:, :, :samples], self.promised[:, :samples]


def matrix(benchmarks: Sequence[Mapping[Hashable, CellTraces]]) -> GradeMatrix | None:
    """Return the cells of one or more benchmarks by the columns that all have.

    None if they share no column, or no problem and sample of some benchmark.
    """
    # The columns that have a measured cell on every benchmark.
    columns = list(benchmarks[0]) if benchmarks else []
    for cells in benchmarks:
        columns = [name for name in columns if name in cells and cells[name].measured]

    tables: list[Floats] = []
    promises: list[Flags] = []
    units: list[Hashable] = []
    for cells in benchmarks if columns else ():
        of_benchmark = [cells[name] for name in columns]
        problems, values = aligned(of_benchmark)
        tables.append(values)
        first = of_benchmark[0]
        units += units_of_problems(first.table.manifest.clusters, first.benchmark, problems)
        # [problem, sample] that every one of the cells was to have.
        promised = np.ones((len(problems), values.shape[2]), bool)
        for cell in of_benchmark:
            promised &= np.array([problem in cell.place for problem in problems])[:, None]
            promised[:, cell.values().shape[1] :] = False
        promises.append(promised)
    if not tables:
        return None

    samples = max(table.shape[2] for table in tables)
    grades = np.concatenate([with_samples(table, samples, math.nan) for table in tables])
    strata = strata_of_sizes([len(table) for table in tables])
    is_known = ~np.isnan(grades)
    # [problem, sample] that all cells have.
    is_shared = np.asarray(is_known.all(1))
    has_shared = is_shared.any(1)
    if len(np.unique(strata[has_shared])) < len(tables):
        return None
    rows = zip(grades[has_shared], is_shared[has_shared], strict=True)
    return GradeMatrix(
        tuple(columns),
        np.array([row[:, of_all].mean(1) for row, of_all in rows]),
        strata[has_shared],
        int((is_known.any((1, 2)) & ~has_shared).sum()),
        grades,
        np.concatenate([with_samples(table, samples, False) for table in promises]),
        strata,
        cluster_numbers([units[place] for place in np.flatnonzero(has_shared).tolist()]),
        cluster_numbers(units),
    )


def with_samples(table: NDArray[Any], samples: int, missing: object) -> NDArray[Any]:
    """Return a table [..., samples] with room for so many."""
    more = np.full((*table.shape[:-1], samples - table.shape[-1]), missing, table.dtype)
    return np.concatenate([table, more], axis=-1)
