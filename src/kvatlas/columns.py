"""The columns of a cell, declared once: JSON, CSV maps, the DataFrame, pages and figures of costs read this list."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any

from kvatlas.core import BudgetAudit, Cell, Costs, Measure, Outcome, refusal

#: Beginning of a source that is a number of the traces, as in `traces.thinking_tokens`.
TRACES = "traces."
#: Beginning of a source that is a field of the estimate.
_ESTIMATE = "estimate."
#: The forms in which the app prints numbers of a unit (functions of `base.js`); others are printed briefly.
_PAGE_FORMS = {"tokens": "whole", "seconds": "precise", "traces": "fixed"}


def mean(values: Sequence[float]) -> float:
    """Return the mean of numbers of traces, or of benchmarks, which weigh equally."""
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Column:
    """One value of a cell, and the forms in which files, the DataFrame, the app and figures have it.

    name: its name in JSON, and in CSV maps if `in_csv` is true.
    source: a field of the estimate, as `estimate.low`; `traces.NAME` for a number of the cell's traces; the key of
        another of the cell's `numbers`; or a function of a cell. Unknown values are None.
    unit: what is counted, such as tokens; "" for a share.
    is_share: the value is in [0, 1] in Python, and in percent with four decimals in files.
    digits: decimals of another number in files; all if None.
    least: the smallest value of a column of integers; None for other numbers.
    frame: its name in the DataFrame of `Run.cells`, for `kvatlas map --metric` if it is a cost, and in `Cell.numbers`;
        "" if the DataFrame does not have it.
    page: its name in the app; "" if the app does not have it.
    in_csv: CSV maps have it.
    title: the label of a cost; "" for other columns.
    scale: the colour scale of a cost, a name of `kvatlas.figures.colours.SCALES`.
    words: those of the app for a cost: over its column in a table of settings, among the measures of maps, and around
        its value (`{}`) in the facts of a cell, where words that begin with a comma go on with the fact before; "" if
        it is not there. None for words made of the title.
    merge: makes one value of those of traces, and of those of benchmarks.
    """

    name: str
    source: str | Callable[[Cell], Any]
    unit: str = ""
    is_share: bool = False
    digits: int | None = None
    least: int | None = None
    frame: str = ""
    page: str = ""
    in_csv: bool = False
    title: str = ""
    scale: str = "costs"
    words: tuple[str, str, str] | None = None
    merge: Callable[[Sequence[Any]], Any] = mean

    @property
    def key(self) -> str:
        """Its name in the `numbers` of a cell."""
        return self.frame or self.name

    @property
    def estimate_field(self) -> str:
        """The field of the estimate that it shows, or ""."""
        return str(self.source).removeprefix(_ESTIMATE) if str(self.source).startswith(_ESTIMATE) else ""

    def read(self, cell: Cell) -> Any:
        """Return the value of a cell, shares in [0, 1]; None if it is unknown."""
        if self.key in cell.numbers:
            return cell.numbers[self.key]
        if callable(self.source):
            where = f"The column {self.name!r} cannot be computed; a cell has cell.estimate.value and cell.number(NAME)"
            with refusal(where):
                return self.source(cell)
        return attrgetter(self.source)(cell) if self.estimate_field else cell.numbers.get(self.source)

    def of_traces(self, numbers: Callable[[str], Sequence[float]]) -> Any:
        """Return the value of a cell from its traces; `numbers` gives a number of each, or nothing if it is unknown."""
        values = numbers(str(self.source).removeprefix(TRACES))
        if not values:
            return None
        return self.merge(values) if self.least is None else int(self.merge(values))

    def over_benchmarks(self, cells: Sequence[Cell]) -> Any:
        """Return the value of a setting over several benchmarks; None if it is unknown of one."""
        values = [cell.numbers.get(self.key) for cell in cells]
        return None if any(value is None or isinstance(value, str) for value in values) else self.merge(values)

    def file_value(self, cell: Cell) -> Any:
        """Return the value of a cell as files have it: shares in percent, other numbers with their decimals."""
        value = self.read(cell)
        if value is None:
            return None
        if isinstance(value, BudgetAudit):
            return value.to_dict()
        if self.is_share:
            return round(100 * value, 4)
        return value if self.digits is None else round(value, self.digits)

    def page_value(self, cell: Cell) -> Any:
        """Return the value of a cell as the app has it: means of tokens to a tenth, numbers of traces in percent."""
        share = share_of_traces(self.read(cell), cell) if self.unit == "traces" else None
        if share is not None:
            return round(share, 4)
        if self.unit == "tokens" and self.digits is not None and self.read(cell) is not None:
            return round(self.read(cell), 1)
        return self.file_value(cell)

    def page_words(self) -> dict[str, str]:
        """Return the name, the form of numbers, the words and the colour scale by which the app shows a cost."""
        unit = "%" if self.is_share or self.unit == "traces" else self.unit
        title = self.title[:1].upper() + self.title[1:]
        form = "fixed" if self.is_share else _PAGE_FORMS.get(self.unit, "brief")
        usual = title, f"{title} ({unit})".removesuffix(" ()"), f"{self.title}: {{}} {unit}".rstrip()
        words = dict(zip(("heading", "choice", "hover"), self.words or usual, strict=True))
        return {"name": self.page, "form": form, **words, "scale": self.scale}


def share_of_traces(count: int | None, cell: Cell) -> float | None:
    """Return a number of a cell's traces in percent of them; None where either is unknown."""
    traces = (cell.estimate.problems or 0) * (cell.estimate.samples or 0)
    return None if count is None or not traces else 100 * count / traces


def _merge_audits(audits: Sequence[BudgetAudit]) -> BudgetAudit:
    """Return the audit over all benchmarks, which weigh equally."""
    return BudgetAudit(
        problems=sum(audit.problems for audit in audits),
        median=mean([audit.median for audit in audits]),
        worst=min(audit.worst for audit in audits),
        none=mean([audit.none for audit in audits]),
        no_choice=mean([audit.no_choice for audit in audits]),
    )


#: The metric; CSV maps have it under the name of the metric.
VALUE = Column("value", "estimate.value", is_share=True, frame="value", page="value")
#: All columns in the order of files; `kvatlas.add_column` adds one.
CELL_COLUMNS = [
    VALUE,
    Column("low", "estimate.low", is_share=True, frame="low", page="low", in_csv=True),
    Column("high", "estimate.high", is_share=True, frame="high", page="high", in_csv=True),
    Column("se_clustered", "estimate.se_clustered", is_share=True),
    Column("problems", "estimate.problems", "problems", least=1, frame="problems", page="problems", in_csv=True),
    Column("samples", "estimate.samples", "samples", least=1, frame="samples", page="samples", in_csv=True),
    Column(
        "kept_tokens_mean",
        "traces.mean_kv_tokens",
        "tokens",
        digits=3,
        frame="mean_kv_tokens",
        page="kept",
        in_csv=True,
        title="mean KV cache",
        words=("Cached tokens", "KV memory (mean cached tokens)", "{} tokens cached on average"),
    ),
    Column("kv_bytes_mean", "kv_memory", "bytes", digits=0, frame="kv_memory", in_csv=True, title="mean KV memory"),
    Column("kv_bytes_peak", "kv_bytes_peak", "bytes", merge=max),
    Column(
        "peak_kv_tokens",
        "traces.peak_kv_tokens",
        "tokens",
        least=0,
        frame="peak_kv_tokens",
        page="peak",
        in_csv=True,
        title="peak KV cache",
        words=("", "", ", {} at the peak"),
        merge=max,
    ),
    Column(
        "stays_tokens",
        "stays_tokens",
        "tokens",
        digits=3,
        frame="stays_tokens",
        in_csv=True,
        title="tokens after a compression",
    ),
    Column("stays_share", "stays_share", is_share=True, frame="stays_share"),
    Column(
        "output_tokens_mean",
        "traces.output_tokens",
        "tokens",
        digits=3,
        frame="output_tokens",
        page="output",
        in_csv=True,
        title="answer length",
        words=("New tokens", "Tokens per answer", "{} tokens per answer"),
    ),
    Column(
        "truncated",
        "traces.truncated",
        "traces",
        least=0,
        frame="truncated",
        page="truncated",
        in_csv=True,
        title="truncated answers",
        words=("", "Truncated (%)", "{} % truncated"),
        merge=sum,
    ),
    Column(
        "seconds_mean",
        "traces.seconds",
        "seconds",
        digits=4,
        frame="seconds",
        page="seconds",
        in_csv=True,
        title="time per answer",
        words=("Seconds", "Time (seconds per answer)", "{} s per answer"),
    ),
    Column("audit", "audit", page="audit", merge=_merge_audits),
]


#: Words that columns of tables and of traces have besides.
_TAKEN = {"model", "benchmark", "policy", "setting", "baseline", "name", "short", "difference", "problem", "sample"}
#: The numbers that every trace has.
NUMBERS_OF_TRACES = {"progress", *(cost.name for cost in fields(Costs)), *(one.name.lower() for one in Outcome)}


def taken_names() -> set[str]:
    """Return the names that columns and the usual numbers of a trace have."""
    taken = _TAKEN | NUMBERS_OF_TRACES
    for column in CELL_COLUMNS:
        taken |= {column.name, column.key, column.page}
    return taken - {""}


@cache
def measure_column(measure: Measure) -> Column:
    """Return the column of a measure: the mean over traces, or their number."""
    return Column(
        measure.name,
        TRACES + measure.name,
        "traces" if measure.counts else measure.unit,
        measure.is_share,
        least=0 if measure.counts else None,
        frame=measure.name,
        page=measure.name,
        in_csv=True,
        title=measure.title or measure.name.replace("_", " "),
        merge=sum if measure.counts else mean,
    )


def cell_columns(measures: Iterable[Measure] = ()) -> list[Column]:
    """Return all columns in the order of files, those of `measures` last."""
    return [*CELL_COLUMNS, *map(measure_column, dict.fromkeys(measures))]


def measures_of(cells: Iterable[Cell]) -> list[Measure]:
    """Return the measures of cells of one or more runs."""
    found: dict[Measure, None] = {}
    for cell in cells:
        found |= dict.fromkeys(cell.measures)
    return list(found)


def cell_document(cell: Cell) -> dict[str, Any]:
    """Return a cell in the form of JSON, CSV files and pages: values in percent, unknown ones None."""
    values = {column.name: column.file_value(cell) for column in cell_columns(cell.measures)}
    return {"setting": str(cell.setting), "policy": cell.setting.policy, **values}


def frame_row(cell: Cell) -> dict[str, Any]:
    """Return the columns of a cell by their names in the DataFrame, with all digits and shares in [0, 1]."""
    return {column.frame: column.read(cell) for column in cell_columns(cell.measures) if column.frame}


def csv_columns(measures: Iterable[Measure] = ()) -> list[Column]:
    """Return the columns that CSV maps have after the value."""
    return [column for column in cell_columns(measures) if column.in_csv]


def page_columns(measures: Iterable[Measure] = ()) -> list[Column]:
    """Return the columns that the app has for each cell."""
    return [column for column in cell_columns(measures) if column.page]


def cost_columns(measures: Iterable[Measure] = ()) -> dict[str, Column]:
    """Return the columns that are costs by their names for `kvatlas map --metric`."""
    return {column.key: column for column in cell_columns(measures) if column.title}


def added_columns(cells: Sequence[Cell]) -> list[Column]:
    """Return the columns that a user added to these cells, with a title: measures, and those of `add_column`."""
    return [column for column in page_columns(measures_of(cells)) if column.title and column.words is None]
