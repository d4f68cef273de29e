"""Problem files in usual layouts: JSON lines, JSON, CSV, Parquet; columns are found by their usual names."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason

Row = Mapping[str, Any]

#: Usual names of columns, the likeliest first; letter case and underscores make no difference.
QUESTION = ("problem", "question", "prompt", "input", "query", "instruction")
ANSWER = ("answer", "final answer", "expected answer", "target", "gold", "label", "correct answer", "solution answer")
IDENTITY = ("id", "unique id", "problem id", "problem idx", "question id", "record id", "uuid", "idx")
OPTIONS = ("options", "choices")
CORRECT, INCORRECT = "correct answer", tuple(f"incorrect answer {i}" for i in range(1, 10))
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; KvatlasError for a missing, empty or unreadable one."""
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix not in SUFFIXES:
        raise KvatlasError(
            f"The problem file {str(path)!r} has an unknown suffix; valid are {', '.join(SUFFIXES)} (also with .gz)."
        )
    if not path.is_file():
        raise KvatlasError(f"The problem file {str(path)!r} is not there.")
    try:
        rows = _parquet(path) if suffix == ".parquet" else _text_rows(path, suffix)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        raise KvatlasError(f"The problem file {str(path)!r} cannot be read ({reason(error)}).") from error
    if not rows:
        raise KvatlasError(f"The problem file {str(path)!r} holds no problems.")
    if not all(isinstance(row, dict) for row in rows):
        raise KvatlasError(f"The problem file {str(path)!r} must hold one object with named fields for each problem.")
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise KvatlasError(f"Reading {path.name} needs the extra: pip install 'kvatlas[parquet]'.") from error

    try:
        rows: list[Row] = read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from error
    return rows


def _text_rows(path: Path, suffix: str) -> list[Row]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    if suffix in (".csv", ".tsv"):
        # The limit holds for the whole process, and other readers rely on theirs.
        before = csv.field_size_limit(2**27)
        try:
            return _table(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ","))
        finally:
            csv.field_size_limit(before)
    if suffix == ".jsonl":
        return json_lines(text, parse_constant=_no_number)
    rows = json.loads(text, parse_constant=_no_number) if text.strip() else []
    if isinstance(rows, dict):
        # {"data": [...]}, {"test": [...]}, or columns as lists.
        lists = [value for value in rows.values() if isinstance(value, list)]
        if lists and all(isinstance(item, dict) for item in lists[0]):
            return lists[0]
        if lists and len({len(values) for values in lists}) == 1 and len(lists) == len(rows):
            return [dict(zip(rows, values, strict=True)) for values in zip(*lists, strict=True)]
        return list(rows.values())
    if not isinstance(rows, list):
        raise ValueError("it is neither a list nor an object")
    return rows


def json_lines(text: str, **options: Any) -> list[Any]:
    """The value in each line that is not blank; ValueError names the line that holds none."""
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            values += [json.loads(line, **options)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from error
    return values


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number that JSON knows")


def _table(reader: csv.DictReader[str]) -> list[Row]:
    """The rows of a table; ValueError for one with more fields than the header, or fewer."""
    rows: list[Row] = []
    for row in reader:
        if None in row or None in row.values():
            many = "more" if None in row else "fewer"
            raise ValueError(
                f"line {reader.line_num} has {many} fields than the header; a text that holds the separator or the "
                "end of a line needs quotes"
            )
        rows.append(row)
    return rows


def column(row: Row, names: Sequence[str], wanted: str | None, where: str, what: str, advice: str = "") -> str:
    """The name of the row's column that holds `what`: the one that was asked for, else the first usual one."""
    if wanted:
        if wanted not in row:
            raise KvatlasError(f"{where} has no column {wanted!r} for the {what}; there are: {', '.join(row)}.")
        return wanted
    key = find(row, names)
    if key is None:
        raise KvatlasError(
            f"{where} has no column for the {what}; there are: {', '.join(map(str, row))}; usual names are "
            f"{', '.join(names[:4])}{advice.format(what)}."
        )
    return key


def find(row: Row, names: Sequence[str]) -> str | None:
    """The row's column that has one of these names."""
    there = {_plain(key): key for key in row}
    return next((there[_plain(name)] for name in names if _plain(name) in there), None)


def lettered(row: Row) -> list[str]:
    """The columns A, B, ... (or `option A`, `choice_a`) with a row's options, in order; empty below two."""
    for prefix in ("", "option ", "choice ", "option", "op"):
        columns = [find(row, (prefix + letter,)) for letter in "abcdefghijk"]
        there = [
            at for at in columns[: columns.index(None) if None in columns else None] if at and row[at] not in (None, "")
        ]
        if len(there) > 1:
            return there
    return []


def _plain(name: object) -> str:
    return str(name).strip().casefold().replace("_", " ").replace("-", " ")


def as_text(value: Any) -> str:
    """An answer as text: 27.0 is 27, a list of one is its item, None is empty."""
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value)
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value).strip()
    # What was read from CSV comes as text: 27.0 there is the same float.
    whole, point, zero = text.partition(".")
    return whole if point and zero and set(zero) == {"0"} and whole.lstrip("-").isdecimal() else text
