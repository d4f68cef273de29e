"""The side of a file of answers that any program can write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvatlas.benchmarks.problem_files import read_rows
from kvatlas.core import KvatlasError, Outcome
from kvatlas.gates.cards import check_direction, more_is_better
from kvatlas.gates.outcomes import (
    GradedAnswer,
    Side,
    SideOptions,
    digest_of,
    file_sources,
    reference_digest,
)
from kvatlas.integrations.answer_rows import NOUN, read_answers

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
        raise KvatlasError(
            f"{where} has no column 'problem'; its columns are: {columns}; rename the one of the problems."
        )
    grades = [options.metric] if options.metric else [name for name in _GRADES if name in first]
    if options.metric and options.metric not in first:
        raise KvatlasError(f"{where} has no column {options.metric!r}; its columns are: {columns}.")
    if len(grades) != 1:
        expected = "expected one of 'correct' and 'score'"
        raise KvatlasError(f"{where} has {' and '.join(grades) or 'neither'}; {expected}, its columns are: {columns}.")
    if grades[0] not in _GRADES:
        check_direction(grades[0], path.name, more_is_better(grades[0]), options.allow)

    unit = ""
    if {"tokens", "output_tokens"} & first.keys():
        unit = "tokens"
    elif "text" in first:
        unit = "characters"
    return Side(
        name,
        "file of answers",
        partial(_file_answers, path, name, grades[0], unit, options),
        length_unit=unit,
        endings_known=bool({"truncated", "finish"} & first.keys()),
        sources=file_sources([path]),
    )


def _file_answers(path: Path, name: str, grade: str, unit: str, options: SideOptions) -> Iterator[GradedAnswer]:
    """Yield the answers of a file. Raises KvatlasError for one without a task that is compared, or without grades."""
    tasks: dict[str, None] = {}
    without_grade = ""
    has_grades = False
    for row in read_answers(path, grade):
        tasks[row.benchmark] = None
        if not options.has_task(row.benchmark):
            continue
        if math.isnan(row.score):
            without_grade = without_grade or row.where
        else:
            has_grades = True
        question = row.values.get("question")
        yield GradedAnswer(
            row.benchmark,
            row.problem,
            row.sample,
            row.score,
            digest_of(question) if question else "",
            reference_digest(row.values.get("reference")),
            ending="" if row.status.answered else str(Outcome[row.status.name]),
            length=float(len(row.text)) if unit == "characters" else row.tokens,
            asked=str(question or ""),
            text=row.text,
        )
    options.check_tasks(name, tasks)
    if not has_grades:
        raise KvatlasError(f"{without_grade}: {grade!r} is blank, as in all rows; expected a score from 0 to 1.")
