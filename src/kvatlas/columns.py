"""The columns of a cell, declared once: JSON, CSV maps, the DataFrame, pages and figures of costs read this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from kvatlas.core import Cell


@dataclass(frozen=True)
class Column:
    """One value of a cell, and the forms in which files, the DataFrame, the app and figures have it.

    name: its name in JSON, and in CSV maps if `in_csv` is true.
    source: a field of `Cell`, with dots for fields of fields, or a function of a cell; unknown values are
        None.
    unit: what is counted, such as tokens; "" for a share.
    is_share: the value is in [0, 1] in Python, and in percent with four decimals in files.
    digits: decimals of another number in files; all if None.
    frame: its name in the DataFrame of `Run.cells`; "" if the DataFrame does not have it.
    page: its name in the app; "" if the app does not have it.
    in_csv: CSV maps have it.
    title: the label of a cost, which `kvatlas map --metric` draws by its name `frame`; "" for other columns.
    """

    name: str
    source: str | Callable[[Cell], Any]
    unit: str = ""
    is_share: bool = False
    digits: int | None = None
    frame: str = ""
    page: str = ""
    in_csv: bool = False
    title: str = ""

    def read(self, cell: Cell) -> Any:
        """Return the value of a cell, shares in [0, 1]; None if it is unknown."""
        if callable(self.source):
            return self.source(cell)
        return attrgetter(self.source)(cell)

    def file_value(self, cell: Cell) -> Any:
        """Return the value of a cell as files have it: shares in percent, other numbers with their decimals."""
        value = self.read(cell)
        if value is None:
            return None
        if self.is_share:
            return round(100 * value, 4)
        return value if self.digits is None else round(value, self.digits)


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
    Column("problems", "estimate.problems", "problems", frame="problems", page="problems", in_csv=True),
    Column("samples", "estimate.samples", "samples", frame="samples", page="samples", in_csv=True),
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
    ),
    Column("kv_bytes_mean", "mean_kv_bytes", "bytes", digits=0),
    Column("kv_bytes_peak", "peak_kv_bytes", "bytes"),
    Column(
        "peak_kv_tokens",
        "peak_kv_tokens",
        "tokens",
        frame="peak_kv_tokens",
        page="peak",
        in_csv=True,
        title="peak KV cache",
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
    ),
    Column(
        "truncated", "truncated", "traces", frame="truncated", page="truncated", in_csv=True, title="truncated answers"
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


#: A cost without a column: the KV memory in bytes, measured, or that of the tokens in a model that is known.
KV_MEMORY = "kv_memory"


def cost_columns() -> dict[str, Column]:
    """Return the columns that are costs by their names for `kvatlas map --metric`."""
    return {column.frame: column for column in CELL_COLUMNS if column.title}


def cost_names() -> list[str]:
    """Return the names of all costs for `kvatlas map --metric`."""
    return [*cost_columns(), KV_MEMORY]
