"""The columns of a cell, declared once: JSON, CSV maps, the DataFrame, pages and figures of costs read this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvatlas.core import Cell

#: Beginning of a source that is a number of the traces, as in `traces.thinking_tokens`.
TRACES = "traces."
#: The forms in which the app prints numbers of a unit (functions of `base.js`); others are printed briefly.
_PAGE_FORMS = {"tokens": "whole", "seconds": "precise", "traces": "fixed"}


@dataclass(frozen=True)
class Column:
    """One value of a cell, and the forms in which files, the DataFrame, the app and figures have it.

    name: its name in JSON, and in CSV maps if `in_csv` is true.
    source: a field of `Cell`, with dots for fields of fields; `traces.NAME` for the mean of a number of the cell's
        traces; or a function of a cell. Unknown values are None.
    unit: what is counted, such as tokens; "" for a share.
    is_share: the value is in [0, 1] in Python, and in percent with four decimals in files.
    digits: decimals of another number in files; all if None.
    least: the smallest value of a column of integers; None for other numbers.
    frame: its name in the DataFrame of `Run.cells`; "" if the DataFrame does not have it.
    page: its name in the app; "" if the app does not have it.
    in_csv: CSV maps have it.
    title: the label of a cost, which `kvatlas map --metric` draws by its name `frame`; "" for other columns.
    scale: the colour scale of a cost, a name of `kvatlas.figures.colours.SCALES`.
    heading, choice, hover: the words of the app for a cost: over its column in a table of settings, among the measures
        of maps, and around its value (`{}`) in the facts of a cell, where words that begin with a comma go on with the
        fact before. None for words made of the title, "" if it is not there.
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
    heading: str | None = None
    choice: str | None = None
    hover: str | None = None

    @property
    def is_field(self) -> bool:
        """True if the value is a field of a cell; others are kept in its `more` where they are not computed."""
        return isinstance(self.source, str) and not self.source.startswith(TRACES)

    def read(self, cell: Cell) -> Any:
        """Return the value of a cell, shares in [0, 1]; None if it is unknown."""
        if isinstance(self.source, str) and self.is_field:
            return attrgetter(self.source)(cell)
        if callable(self.source) and self.name not in cell.more:
            return self.source(cell)
        return cell.more.get(self.name)

    def file_value(self, cell: Cell) -> Any:
        """Return the value of a cell as files have it: shares in percent, other numbers with their decimals."""
        value = self.read(cell)
        if value is None:
            return None
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
        unit = "%" if self.is_share else self.unit
        title = self.title[:1].upper() + self.title[1:]
        form = "fixed" if self.is_share else _PAGE_FORMS.get(self.unit, "brief")
        return {
            "name": self.page,
            "form": form,
            "heading": title if self.heading is None else self.heading,
            "choice": f"{title} ({unit})" if self.choice is None else self.choice,
            "hover": f"{self.title}: {{}} {unit}" if self.hover is None else self.hover,
            "scale": self.scale,
        }


def share_of_traces(count: int | None, cell: Cell) -> float | None:
    """Return a number of a cell's traces in percent of them; None where either is unknown."""
    traces = (cell.estimate.problems or 0) * (cell.estimate.samples or 0)
    return None if count is None or not traces else 100 * count / traces


def _audit(cell: Cell) -> dict[str, Any] | None:
    return None if cell.audit is None else cell.audit.to_dict()


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
    Column("unmeasured", "unmeasured", "traces"),
    Column(
        "kept_tokens_mean",
        "mean_kv_tokens",
        "tokens",
        digits=3,
        frame="mean_kv_tokens",
        page="kept",
        in_csv=True,
        title="mean KV cache",
        heading="Cached tokens",
        choice="KV memory (mean cached tokens)",
        hover="{} tokens cached on average",
    ),
    Column("kv_bytes_mean", "mean_kv_bytes", "bytes", digits=0),
    Column("kv_bytes_peak", "peak_kv_bytes", "bytes"),
    Column(
        "peak_kv_tokens",
        "peak_kv_tokens",
        "tokens",
        least=0,
        frame="peak_kv_tokens",
        page="peak",
        in_csv=True,
        title="peak KV cache",
        heading="",
        choice="",
        hover=", {} at the peak",
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
        "output_tokens_mean",
        "tokens",
        digits=3,
        frame="output_tokens",
        page="output",
        in_csv=True,
        title="answer length",
        heading="New tokens",
        choice="Tokens per answer",
        hover="{} tokens per answer",
    ),
    Column(
        "truncated",
        "truncated",
        "traces",
        least=0,
        frame="truncated",
        page="truncated",
        in_csv=True,
        title="truncated answers",
        heading="",
        choice="Truncated (%)",
        hover="{} % truncated",
    ),
    Column(
        "seconds_mean",
        "seconds_mean",
        "seconds",
        digits=4,
        frame="seconds",
        page="seconds",
        in_csv=True,
        title="time per answer",
        heading="Seconds",
        choice="Time (seconds per answer)",
        hover="{} s per answer",
    ),
    Column("audit", _audit, page="audit"),
]


def cell_document(cell: Cell) -> dict[str, Any]:
    """Return a cell in the form of JSON, CSV files and pages: values in percent, unknown ones None."""
    values = {column.name: column.file_value(cell) for column in CELL_COLUMNS}
    return {"setting": str(cell.setting), "policy": cell.setting.policy, **values}


def frame_row(cell: Cell) -> dict[str, Any]:
    """Return the columns of a cell by their names in the DataFrame, with all digits and shares in [0, 1]."""
    return {column.frame: column.read(cell) for column in CELL_COLUMNS if column.frame}


def csv_columns() -> list[Column]:
    """Return the columns that CSV maps have after the value."""
    return [column for column in CELL_COLUMNS if column.in_csv]


def means_of_traces(mean: Callable[[str], float | None]) -> dict[str, float | None]:
    """Return the columns that are means over traces by their names; `mean` gives that of a number of the traces."""
    means = {}
    for column in CELL_COLUMNS:
        if isinstance(column.source, str) and column.source.startswith(TRACES):
            means[column.name] = mean(column.source.removeprefix(TRACES))
    return means


def page_columns() -> list[Column]:
    """Return the columns that the app has for each cell."""
    return [column for column in CELL_COLUMNS if column.page]


#: A cost without a column: the KV memory in bytes, measured, or that of the tokens in a model that is known.
KV_MEMORY = "kv_memory"


def cost_columns() -> dict[str, Column]:
    """Return the columns that are costs by their names for `kvatlas map --metric`."""
    return {column.frame: column for column in CELL_COLUMNS if column.title}


def cost_names() -> list[str]:
    """Return the names of all costs for `kvatlas map --metric`."""
    return [*cost_columns(), KV_MEMORY]
