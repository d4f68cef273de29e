"""Export of traces and maps to CSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kvatlas.columns import VALUE, csv_columns, measures_of
from kvatlas.core import Cell, CellCoord, KvatlasError, Map, MapName, Trace, importing, refusal
from kvatlas.core.basics import TRACE_MARK, holds
from kvatlas.core.settings import CAP, CAP_COLUMN, columns_of
from kvatlas.results.store import Store
from kvatlas.text import guarded

if TYPE_CHECKING:
    import pandas as pd

#: The suffixes of files by their format; several formats of one suffix have the usual one first.
_SUFFIXES = {"csv": ".csv", "cells": ".csv", "jsonl": ".jsonl", "parquet": ".parquet"}
FORMATS = (*_SUFFIXES, "run")
#: Formats of maps and settings; the others have traces.
VALUE_FORMATS = ("csv", "cells")
_BATCH = 2_000
#: The beginning of each table of maps and settings.
_HEADER = b"model,benchmark"
#: The costs of a trace in the order of an export.
_COSTS = (
    "output_tokens", "thinking_tokens", "peak_kv_tokens", "mean_kv_tokens", "prompt_tokens", "compressions", "seconds",
)  # fmt: skip
#: The columns that every trace has, at the end of its record.
_MEASURED = ("status", "correct", "progress", "answer", *_COSTS, "run_key", "text")
#: The columns of the marks of a figure's cells, in the data beside it, and of their losses; they are not read.
MARKS = ("proven", "proven_like_these", "loses_more", "recommended")
LOSSES = ("loses", "loses_low", "loses_high")


def format_of(out: Path | None, given: str | None) -> str:
    """Return the format of an export: the one that is given, else that of the file's suffix, `csv` without a file.

    Raises KvatlasError for an unknown format, and for a suffix of no format or of another one.
    """
    if given is not None and given not in FORMATS:
        raise KvatlasError(f"Unknown export format {given!r}; expected: {', '.join(FORMATS)}.")
    if out is None:
        return given or "csv"

    # A name without a suffix says nothing.
    if given is not None and (given == "run" or not out.suffix):
        return given
    formats = [name for name, suffix in _SUFFIXES.items() if suffix == out.suffix.lower()]
    if not formats:
        raise KvatlasError(
            f"An export cannot be written as {out.name!r}; the name must end in .csv (maps, or with --format cells "
            "settings), .jsonl or .parquet (traces). --format run writes a folder."
        )

    if given is not None and given not in formats:
        raise KvatlasError(
            f"The format is {given} and the name {out.name!r} says {formats[0]}; expected a name that ends in "
            f"{_SUFFIXES[given]}."
        )
    return given or formats[0]


def write_traces(run: Path, kind: str, out: Path) -> None:
    """Write all traces of a run as jsonl or parquet (see `record`).

    A failure leaves no partial file. Raises KvatlasError for a folder without a run, and a file that cannot be written.
    """
    with Store.open(run) as store, replacing(out) as partial_file:
        if kind == "parquet":
            _write_parquet(store, partial_file)
            return
        with partial_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in json_lines(store))


def write_maps(maps: Sequence[Map], out: Path) -> None:
    """Write maps as one CSV map with intervals and costs (see `csv_text`)."""
    write_text(csv_text(maps), out)


def write_text(text: str, out: Path) -> None:
    """Write a text to a file, whole or not at all. Raises KvatlasError if it cannot be written."""
    with replacing(out) as partial_file:
        partial_file.write_text(text, "utf-8", newline="")


def table_text(table: pd.DataFrame) -> str:
    """Return a table of plain values as CSV for spreadsheets."""
    guarded_names = [guarded(name) for name in table.columns]
    # Whole numbers are written as such beside empty fields.
    whole = table.convert_dtypes()
    text: str = whole.map(guarded, na_action="ignore").to_csv(index=False, header=guarded_names, lineterminator="\n")
    return text


def csv_text(
    maps: Sequence[Map],
    more_columns: Sequence[str] = (),
    more_values: Callable[[Map, CellCoord], Sequence[Any]] = lambda map_, coord: (),
) -> str:
    """Return the maps as a CSV map in percent, largest vertical value first, in the form of `read_maps`.

    Baselines are rows without axis values, once for each benchmark; their policy is the text of the setting, and they
    have no values in `more_columns`. Raises KvatlasError if the maps differ in axes or metric.
    """
    if not maps:
        raise KvatlasError("There is no map to write.")
    axes = [name for name, _ in maps[0].axes]
    axis_columns = [CAP_COLUMN if name == CAP else name for name in axes]
    metric = maps[0].metric
    for map_ in maps:
        if [name for name, _ in map_.axes] != axes or map_.metric != metric:
            raise KvatlasError("One CSV map holds one metric over the same two axes; the given maps differ in them.")

    cells = itertools.chain.from_iterable((*map_.cells.values(), *map_.baselines.values()) for map_ in maps)
    columns = [VALUE, *csv_columns(measures_of(cells))]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # The metric `pass@1` is the column `pass_at_1`.
    header = [metric.replace("@", "_at_"), *(column.name for column in columns[1:]), *more_columns]
    writer.writerow(map(guarded, ("model", "benchmark", "policy", *axis_columns, *header)))

    for map_, coord, names, cell in _csv_rows(maps):
        values = [column.file_value(cell) for column in columns]
        more = [None] * len(more_columns) if coord is None else more_values(map_, coord)
        writer.writerow(map(guarded, (*names, *values, *more)))
    return text.getvalue()


def _csv_rows(maps: Sequence[Map]) -> Iterator[tuple[Map, CellCoord | None, tuple[Any, ...], Cell]]:
    """Yield map, coordinates, names and cell of each row of a CSV map; baselines have no coordinates."""
    written = set()
    for map_ in maps:
        (_, rows), (_, columns) = map_.axes
        for coord in itertools.product(reversed(rows), columns):
            if coord in map_.cells:
                yield map_, coord, (map_.model, map_.benchmark, map_.policy, *coord), map_.cells[coord]
        for name, cell in map_.baselines.items():
            names = (map_.model, map_.benchmark, name, "", "")
            if names not in written:
                written.add(names)
                yield map_, None, names, cell


def marked_csv(
    maps: Sequence[Map], losses: Mapping[MapName, Mapping[CellCoord, Sequence[float | None]]] | None = None
) -> str | None:
    """Return the maps as `csv_text` does, with what figures mark on each cell; baselines have no marks.

    `losses` adds the loss of each cell against the full cache and its limits, in points. None for maps
    that one CSV map cannot hold.
    """
    if len({(map_.metric, map_.axis_names) for map_ in maps}) != 1:
        return None

    def marks_of(map_: Map, coord: CellCoord) -> list[Any]:
        # What was not tested is empty.
        proven: list[Any] = ["", "", ""]
        if map_.keeps is not None:
            proven = [int(coord in cells) for cells in (map_.keeps, map_.keeps_like, map_.breaks or ())]
        return [*proven, int(coord == map_.recommended), *(losses[map_.name][coord] if losses else ())]

    return csv_text(maps, [*MARKS, *(LOSSES if losses else ())], marks_of)


def trace_record(run_key: str, trace: Trace) -> dict[str, Any]:
    """Return one trace as flat plain data.

    A parameter of the setting with the name of another column gets the prefix `setting_`, a metric `metric_`.
    """
    identity = {name: getattr(trace, name) for name in ("model", "benchmark", "problem", "sample")}
    identity["policy"] = trace.setting.policy

    grade = trace.grade
    measured = {
        "status": grade.status.value,
        "correct": grade.correct,
        "progress": grade.progress,
        "answer": grade.answer,
        **{name: getattr(trace.usage, name) for name in _COSTS},
        "run_key": run_key,
        "text": trace.text,
    }
    taken = identity.keys() | measured.keys()
    parameters = _prefixed("setting_", columns_of(trace.setting).items(), taken)
    taken |= parameters.keys()
    metrics = _prefixed("metric_", sorted(trace.grade.metrics.items()), taken)
    return {**identity, **parameters, **metrics, **measured}


def _prefixed(prefix: str, values: Iterable[tuple[str, Any]], taken: Collection[str]) -> dict[str, Any]:
    """Return the values by name, with the prefix before a name that is taken."""
    return {f"{prefix}{name}" if name in taken else name: value for name, value in values}


def json_lines(store: Store) -> Iterator[str]:
    """Yield each trace of a run's cells as one line of JSON in ASCII."""
    for run_key, trace in store.traces():
        yield json.dumps(trace_record(run_key, trace), ensure_ascii=True, allow_nan=False)


def _write_parquet(store: Store, out: Path) -> None:
    with importing("Writing Parquet", "parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    # The types of the values in each column, the columns that all traces have at the end.
    types: dict[str, set[type]] = {}
    for run_key, trace in store.traces(texts=False):
        for name, value in trace_record(run_key, trace).items():
            types.setdefault(name, set()).add(type(value))
    if not types:
        raise KvatlasError("The run has no traces yet, so there is nothing to export.")
    names = sorted(types, key=lambda name: name in _MEASURED)
    columns = {name: _arrow_type(types[name] - {type(None)}) for name in names}

    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    records = (trace_record(run_key, trace) for run_key, trace in store.traces())
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(records, _BATCH)):
            rows = [_in_types(row, columns) for row in batch]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _in_types(row: dict[str, Any], columns: Mapping[str, tuple[str, Callable[[Any], Any]]]) -> dict[str, Any]:
    """Return the known values of a row in the types of the columns."""
    return {name: columns[name][1](value) for name, value in row.items() if value is not None}


def _arrow_type(types: set[type]) -> tuple[str, Callable[[Any], Any]]:
    """Return the narrowest type of all values in the words of Arrow, and the conversion to it.

    A parameter may be a number in one policy and text in another.
    """
    if types == {bool}:
        return "bool", bool
    if types == {int}:
        return "int64", int
    if types and types <= {int, float}:
        return "double", float
    return "string", lambda value: value if isinstance(value, str) else json.dumps(value)


def check_target(out: Path, *suffixes: str) -> None:
    """Raise KvatlasError if no file can be written at `out`, or if its name ends in none of the suffixes."""
    if suffixes and out.suffix.lower() not in suffixes:
        raise KvatlasError(f"The file {out.name!r} cannot be written; the name must end in {' or '.join(suffixes)}.")
    with refusal(f"{str(out)!r} cannot be written", OSError, ValueError):
        if out.is_dir():
            raise KvatlasError(f"{str(out)!r} is a folder; name a file to write.")
        out.exists()  # raises OSError if the name is too long
        near = next(folder for folder in out.absolute().parents if folder.exists())
        if not (near.is_dir() and os.access(near, os.W_OK)):
            raise KvatlasError(f"{str(out)!r} cannot be written: {str(near)!r} is not a writable folder.")


def check_export(out: Path) -> None:
    """Raise KvatlasError if no export can be written at `out`, or if another file, as of problems, is there."""
    check_target(out)
    if out.is_file() and out.stat().st_size and not (holds(out, _HEADER) or holds(out, TRACE_MARK)):
        raise KvatlasError(f"{str(out)!r} is there, and no export of a run; name another file, or remove this one.")


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yield a path next to `out`, which replaces `out` on success and is removed after an error.

    Missing folders are made. Raises KvatlasError if `out` cannot be written.
    """
    check_target(out)
    partial_file = out.with_name(f".{out.name[:100]}.{uuid4().hex[:8]}.part")
    try:
        with refusal(f"{str(out)!r} cannot be written", OSError):
            out.parent.mkdir(parents=True, exist_ok=True)
            yield partial_file
            partial_file.replace(out)
    finally:
        with suppress(OSError):
            partial_file.unlink()
