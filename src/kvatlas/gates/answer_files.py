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

from kvatlas.benchmarks.problem_files import read_rows
from kvatlas.core import KvatlasError
from kvatlas.gates.cards import check_direction, more_is_better
from kvatlas.gates.outcomes import (
    AnswerName,
    AnswerTexts,
    GradedAnswer,
    Side,
    SideOptions,
    digest_of,
    file_sources,
    fingerprint_of,
    number_of,
    reference_digest,
    score_of,
)

#: What the sentences on such a file call it.
NOUN = "file of answers"
_GRADES = ("correct", "score")


def side_of_answer_file(path: Path, name: str, options: SideOptions) -> Side:
    """Return the side of a file of answers. Raises KvatlasError if it lacks a column that is needed."""
    where = f"The {NOUN} {str(path)!r}"
    first = next(read_rows(path, NOUN), None)
    if first is None:
        raise KvatlasError(f"{where} is empty.")

    # The column with the grades.
    columns = ", ".join(map(str, first))
    if "problem" not in first:
        raise KvatlasError(f"{where} has no column 'problem'; its columns are: {columns}.")
    grades = [options.metric] if options.metric else [name for name in _GRADES if name in first]
    if options.metric and options.metric not in first:
        raise KvatlasError(f"{where} has no column {options.metric!r}; its columns are: {columns}.")
    if len(grades) != 1:
        expected = "expected one of 'correct' and 'score'"
        raise KvatlasError(f"{where} has {' and '.join(grades) or 'neither'}; {expected}, its columns are: {columns}.")

    if grades[0] not in _GRADES:
        check_direction(grades[0], path.name, more_is_better(grades[0]), options.allow)

    unit = ""
    if "tokens" in first:
        unit = "tokens"
    elif "text" in first:
        unit = "characters"
    return Side(
        name,
        "file of answers",
        partial(_file_answers, path, grades[0], options),
        partial(_file_texts, path, options),
        length_unit=unit,
        endings_known="truncated" in first,
        sources=file_sources([path]),
    )


def _file_answers(path: Path, grade: str, options: SideOptions) -> Iterator[GradedAnswer]:
    # A column has few different values beside the problems: each is read once.
    questions = _ReadOnce(lambda value, _: digest_of(value) if value else "")
    references = _ReadOnce(lambda value, _: reference_digest(value))
    grades = _ReadOnce(lambda value, row: score_of(value, f"Row {row} of {path.name}: {grade!r}"))
    truncated = _ReadOnce(lambda value, row: score_of(value, f"Row {row} of {path.name}: 'truncated'"))
    samples = _ReadOnce(lambda value, row: _sample_number(value, f"Row {row} of {path.name}"))
    lengths = _ReadOnce(lambda value, row: _row_tokens(value, f"Row {row} of {path.name}"))
    for row_number, row in enumerate(read_rows(path, NOUN), 1):
        task = _benchmark_of_row(row, path)
        if not options.has_task(task):
            continue
        problem = row.get("problem")
        if problem is None or problem == "":
            raise KvatlasError(f"Row {row_number} of {path.name} names no problem.")

        text = str(row.get("text") or "")
        length = float(len(text)) if "text" in row else math.nan
        yield GradedAnswer(
            task,
            str(problem),
            samples.read(row.get("sample"), row_number),
            grades.read(row.get(grade), row_number),
            questions.read(row.get("question"), row_number),
            references.read(row.get("reference"), row_number),
            "",
            fingerprint_of(text),
            "truncated" if truncated.read(row.get("truncated"), row_number) > 0 else "",
            lengths.read(row["tokens"], row_number) if "tokens" in row else length,
        )


class _ReadOnce:
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


def _benchmark_of_row(row: Mapping[str, Any], path: Path) -> str:
    """Return the benchmark of a row; a file without that column has one."""
    if "benchmark" not in row:
        return "answers"
    task = row["benchmark"]
    if not task:
        raise KvatlasError(f"A row of {path.name} names no benchmark, as others do.")
    return str(task)


def _sample_number(value: Any, where: str) -> int:
    if value is None or value == "":
        return 0
    value_read = number_of(value)
    if not 0 <= value_read < 2**31 or not value_read.is_integer():
        raise KvatlasError(f"{where}: the sample is {str(value)[:60]!r}; expected a whole number from 0.")
    return int(value_read)


def _row_tokens(value: Any, where: str) -> float:
    if value is None or value == "":
        return math.nan
    value_read = number_of(value)
    if not 0 <= value_read < 1e12:
        raise KvatlasError(f"{where}: 'tokens' is {str(value)[:60]!r}; expected a number from 0.")
    return value_read


def _file_texts(path: Path, options: SideOptions, names: Collection[AnswerName]) -> dict[AnswerName, AnswerTexts]:
    requested = set(names)
    texts: dict[AnswerName, AnswerTexts] = {}
    for row in read_rows(path, NOUN):
        task = _benchmark_of_row(row, path)
        if not row.get("text") or not options.has_task(task):
            continue
        name = (task, str(row["problem"]), _sample_number(row.get("sample"), ""))
        if name in requested:
            texts[name] = (str(row.get("question") or ""), str(row["text"]))
    return texts
