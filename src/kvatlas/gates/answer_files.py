"""Files of answers that any program can write: a row for each answer, as JSON lines, JSON, CSV or Parquet.

Columns: `problem`, one of `correct` and `score`, and if known `benchmark`, `sample`, `question`, `reference`, `tokens`,
`truncated` and `text`; others are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.problem_files import SUFFIXES, read_rows
from kvatlas.core import KvatlasError
from kvatlas.gates.outcomes import (
    Answer,
    AnswerName,
    Choice,
    Side,
    Texts,
    digest_of,
    file_digest,
    fingerprint_of,
    score_of,
)

#: What the sentences on such a file call it.
NOUN = "file of answers"
_GRADES = ("correct", "score")


def is_table(path: Path) -> bool:
    """Return whether the suffix is one of a table."""
    return path.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def side_of(path: Path, name: str, choice: Choice) -> Side:
    """Return the side of a file of answers. Raises KvatlasError if it lacks a column that is needed."""
    where = f"The {NOUN} {str(path)!r}"
    first = next(read_rows(path, NOUN), None)
    if first is None:
        raise KvatlasError(f"{where} is empty.")
    grade = _grade_column(first, choice.metric, where)
    has_text = "text" in first
    unit = ""
    if "tokens" in first:
        unit = "tokens"
    elif has_text:
        unit = "characters"
    return Side(
        name,
        "file of answers",
        partial(_answers, path, grade, choice),
        partial(_texts, path, choice),
        length_unit=unit,
        endings_known="truncated" in first,
        identity=file_digest([path]),
    )


def _grade_column(row: Mapping[str, Any], chosen: str, where: str) -> str:
    """Return the name of the column with the grades."""
    columns = ", ".join(map(str, row))
    if "problem" not in row:
        raise KvatlasError(f"{where} has no column 'problem'; its columns are: {columns}.")
    if chosen:
        if chosen not in row:
            raise KvatlasError(f"{where} has no column {chosen!r}; its columns are: {columns}.")
        return chosen
    found = [name for name in _GRADES if name in row]
    if len(found) != 1:
        expected = "expected one of 'correct' and 'score'"
        raise KvatlasError(f"{where} has {' and '.join(found) or 'neither'}; {expected}, its columns are: {columns}.")
    return found[0]


def _answers(path: Path, grade: str, choice: Choice) -> Iterator[Answer]:
    # A column has few different values beside the problems: each is read once.
    contents = _Column(lambda values, _: digest_of(*values))
    grades = _Column(lambda value, row: score_of(value, f"Row {row} of {path.name}: {grade!r}"))
    truncated = _Column(lambda value, row: score_of(value, f"Row {row} of {path.name}: 'truncated'"))
    samples = _Column(lambda value, row: _sample(value, f"Row {row} of {path.name}"))
    lengths = _Column(lambda value, row: _tokens(value, f"Row {row} of {path.name}"))
    for row_number, row in enumerate(read_rows(path, NOUN), 1):
        task = _task(row, path)
        if not choice.has_task(task):
            continue
        problem = row.get("problem")
        if problem is None or problem == "":
            raise KvatlasError(f"Row {row_number} of {path.name} names no problem.")
        question = row.get("question")
        text = str(row.get("text") or "")
        length = float(len(text)) if "text" in row else math.nan
        yield Answer(
            task,
            str(problem),
            samples.read(row.get("sample"), row_number),
            grades.read(row.get(grade), row_number),
            contents.read((question, row.get("reference")), row_number) if question else "",
            "",
            fingerprint_of(text),
            "truncated" if truncated.read(row.get("truncated"), row_number) > 0 else "",
            lengths.read(row["tokens"], row_number) if "tokens" in row else length,
        )


class _Column:
    """The values of a column as they are read, each different one once."""

    def __init__(self, convert: Callable[[Any, int], Any]) -> None:
        self.convert = convert
        self.values: dict[Any, Any] = {}

    def read(self, value: Any, row: int) -> Any:
        """Return what a value of this row means. Raises KvatlasError for one that means nothing."""
        try:
            return self.values[value]
        except KeyError:
            converted = self.values[value] = self.convert(value, row)
            return converted
        except TypeError:
            # Lists and objects of JSON are no keys.
            return self.convert(value, row)


def _task(row: Mapping[str, Any], path: Path) -> str:
    """Return the benchmark of a row; a file without that column has one."""
    if "benchmark" not in row:
        return "answers"
    task = row["benchmark"]
    if not task:
        raise KvatlasError(f"A row of {path.name} names no benchmark, as others do.")
    return str(task)


def _sample(value: Any, where: str) -> int:
    if value is None or value == "":
        return 0
    try:
        value_read = int(value)
    except (TypeError, ValueError):
        value_read = -1
    if not 0 <= value_read < 2**31:
        raise KvatlasError(f"{where}: the sample is {str(value)[:60]!r}; expected a whole number from 0.")
    return value_read


def _tokens(value: Any, where: str) -> float:
    if value is None or value == "":
        return math.nan
    try:
        value_read = float(value)
    except (TypeError, ValueError):
        value_read = -1.0
    if not 0 <= value_read < 1e12:
        raise KvatlasError(f"{where}: 'tokens' is {str(value)[:60]!r}; expected a number from 0.")
    return value_read


def _texts(path: Path, choice: Choice, names: Collection[AnswerName]) -> dict[AnswerName, Texts]:
    wanted = set(names)
    texts: dict[AnswerName, Texts] = {}
    for row in read_rows(path, NOUN):
        task = _task(row, path)
        if not row.get("text") or not choice.has_task(task):
            continue
        name = (task, str(row["problem"]), _sample(row.get("sample"), ""))
        if name in wanted:
            texts[name] = (str(row.get("question") or ""), str(row["text"]))
    return texts
