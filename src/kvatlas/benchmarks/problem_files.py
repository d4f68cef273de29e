"""Problem files: JSON lines, a JSON list, CSV, Parquet; columns are found by their usual names.

A cell is read as people mean it, or refused with its row and column: repeated columns, objects, numbers beyond all
range, and commas that may be decimal commas or separate thousands.
"""

import gzip
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from decimal import Decimal
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kvatlas.answers.grading import reference_letter
from kvatlas.core import PROBLEM_SUFFIXES, KvatlasError, Problem, digest, grouped, reason, refusal, refuse_pointer
from kvatlas.core.basics import importing
from kvatlas.text import UnclearNumber, did_you_mean_file, open_csv, with_decimal_point

Row = Mapping[str, Any]

CORRECT = "correct answer"
INCORRECT = tuple(f"incorrect answer {i}" for i in range(1, 10))
#: Usual names of columns by what they hold, the likeliest first; case and underscores do not matter.
USUAL = {
    "question": ("problem", "question", "prompt"),
    "answer": ("answer", "final answer"),
    "options": ("options", "choices"),
    "cluster": ("cluster",),
    **{name: (name,) for name in (CORRECT, *INCORRECT)},
}
#: Columns with the text that a question beside them is about, as of SVAMP and ASDiv.
CONTEXT = ("body", "context", "passage", "premise", "input")
#: The seed of the seeds of all permutations of choices: part of the benchmark, the same for every user.
CHOICE_SEED = 0
#: What is said of a file that is not there.
FROM_HERE = " Paths count from the folder of the command, not from that of a spec."
#: A row of JSON lines.
_EXAMPLE = '{"question": "1 + 1", "answer": "2"}'
#: Rows of a Parquet file that are read at a time.
_BATCH = 1024
#: The mark of a choice inside a question.
_MARK = re.compile(r"\(([A-K])\)|(?:^|\n|\\n)\s*([A-K])[.):]\s")


class _RepeatedKey(dict[str, Any]):
    """A JSON object that has a key twice; refused where it is a row."""

    key = ""


def read_rows(path: Path, noun: str = "problem file") -> Iterator[Row]:
    """Yield the rows of a file, read as they are asked for. Raises KvatlasError for a missing or unreadable file.

    `noun` is what the sentences call it.
    """
    where = f"The {noun} {str(path)!r}"
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix not in PROBLEM_SUFFIXES:
        raise KvatlasError(f"{where} has an unknown suffix; expected {', '.join(PROBLEM_SUFFIXES)} (also with .gz).")
    if not path.is_file():
        raise KvatlasError(f"{where} is not there.{did_you_mean_file(path) or FROM_HERE}")

    with refusal(f"{where} cannot be read"), ExitStack() as stack:
        refuse_pointer(path)
        if suffix == ".parquet":
            rows: Iterator[Any] = _read_parquet(path)
        else:
            rows = _READERS[suffix](stack.enter_context(open_text(path)))
        for row_number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise KvatlasError(
                    f"{where}, row {row_number}, is {str(row)[:60]}; expected an object with named fields, as "
                    f"{_EXAMPLE}."
                )
            if isinstance(row, _RepeatedKey):
                raise KvatlasError(f"{where}, row {row_number}, has the column {row.key!r} twice; expected it once.")
            yield row


def open_text(path: Path) -> TextIOWrapper:
    """Open a file of text, which is unpacked if it is a gzip archive; ends of lines are as they are written."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    if is_compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_parquet(path: Path) -> Iterator[Row]:
    with importing(f"Reading {path.name}", "parquet"):
        from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    _refuse_repeated(file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=_BATCH):
        for row in batch.to_pylist():
            # NaN is a missing cell, which would be graded as the text "nan".
            cells = row.items()
            yield {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in cells}


def _refuse_repeated(columns: Sequence[str]) -> None:
    """Raise ValueError for a column that a table has twice; columns without a name are never read."""
    for name in columns:
        if name and columns.count(name) > 1:
            raise ValueError(f"it has the column {name!r} twice; expected it once")


def _parse_json(text: str) -> Any:
    def refuse(word: str) -> None:
        # A missing answer in a table that pandas wrote; it would be graded as the text "nan".
        raise ValueError(f"{word} is no number of JSON")

    return json.loads(text, parse_constant=refuse, parse_float=_parse_float, object_pairs_hook=_collect_pairs)


def _parse_float(text: str) -> float | UnclearNumber:
    """Return a number; one that Python's numbers cannot hold (1e999, 1e-999) stays a text that is no answer."""
    value = float(text)
    is_lost = value == 0 and re.search("[1-9]", text.lower().partition("e")[0])
    return UnclearNumber(text) if math.isinf(value) or is_lost else value


def _collect_pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    names = [name for name, _ in pairs]
    repeated = _RepeatedKey(values)
    repeated.key = next(name for name in names if names.count(name) > 1)
    return repeated


def _read_json_list(file: TextIOWrapper) -> Iterator[Any]:
    values = _parse_json(file.read())
    if not isinstance(values, list):
        found = f"an object with the keys {', '.join(values)}" if isinstance(values, dict) else repr(values)
        raise ValueError(f"expected a list of objects, found {found[:100]}")
    yield from values


def _read_json_lines(file: TextIOWrapper) -> Iterator[Any]:
    file.reconfigure(newline="\n")
    for line_number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield _parse_json(line.rstrip())
            except json.JSONDecodeError as error:
                near = line.rstrip()[max(error.pos - 20, 0) : error.pos + 10]
                advice = f", within {near!r}; texts stand in quotes on both sides"
                if line.rstrip().endswith(","):
                    advice = "; it ends with a comma, which lines of JSON do not"
                elif error.pos == len(line.rstrip()):
                    advice = f", where the line ends with {line.rstrip()[-30:]!r}; expected a whole object in each line"
                raise ValueError(f"line {line_number}, column {error.colno}: {error.msg}{advice}") from error
            except ValueError as error:
                raise ValueError(f"line {line_number}: {error}") from error


def _read_csv(file: TextIOWrapper) -> Iterator[Row]:
    reader = open_csv(file)
    separator = reader.reader.dialect.delimiter
    _refuse_repeated([name.strip() for name in reader.fieldnames or ()])
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(
                f"line {reader.line_num} and the header have unlike numbers of fields; a text with {separator!r} or "
                "the end of a line in it needs quotes"
            )
        yield {name: with_decimal_point(text, separator) for name, text in row.items()}


_READERS: dict[str, Callable[[TextIOWrapper], Iterator[Any]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_list,
    ".csv": _read_csv,
}


def find_column(row: Row, *names: str, where: str = "The file") -> str | None:
    """Return the row's column with the first of these names that exists; KvatlasError if two columns have it."""
    columns = grouped(row, lambda key: str(key).strip().casefold().replace("_", " "))
    found = next((columns[name] for name in names if name in columns), [])
    if len(found) > 1:
        raise KvatlasError(
            f"{where} has the columns {' and '.join(map(repr, found))}; leave one out, or name the right one "
            "(--column answer=NAME, in a spec columns: {answer: NAME})."
        )
    return found[0] if found else None


def _plain_text(value: Any) -> str:
    """Return a text, UTF-8 bytes or a finite number as text; None is empty. Raises ValueError for other values."""
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, UnclearNumber):
        raise ValueError(f"holds {str(value)!r}; expected a number in one reading, such as 1234.5")
    is_number = isinstance(value, int) or (isinstance(value, float | Decimal) and math.isfinite(value))
    if not (value is None or isinstance(value, str) or is_number):
        raise ValueError(f"holds {value!r}; expected a text or a number")
    text = "" if value is None else str(value).strip()
    # Half a character cannot be asked nor stored: UnicodeEncodeError is a ValueError.
    text.encode()
    return text


def _joined_text(value: Any) -> str:
    """Return a text, or the texts of a list, as paragraphs of a context, in lines."""
    return "\n".join(map(_plain_text, value)) if isinstance(value, list) else _plain_text(value)


def answer_text(value: Any) -> str:
    """Return an answer as text: 27.0 is 27, a list its texts and numbers; ValueError for other values."""
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple | None) for item in value):
            raise ValueError(f"holds {value!r}; expected texts or numbers in a list")
        return ", ".join(answer_text(item) for item in value)
    # CSV files hold texts: 27.0 there is the same float.
    return re.sub(r"^(-?\d+)\.0+$", r"\1", _plain_text(value))


@dataclass(frozen=True)
class ProblemFile:
    """The problems of a file that have a reference answer: the first ones, or all if the file is `whole`.

    `columns` are those of the first row by what they hold. `unread` has the longest text of each column that is no part
    of the problems, `unanswered` the rows that are left out, `answer_lists` the problems whose reference answer is a
    list of several.
    """

    problems: tuple[Problem, ...]
    columns: Mapping[str, str]
    whole: bool
    unread: Mapping[str, str]
    unanswered: tuple[int, ...]
    answer_lists: tuple[Problem, ...]


def read_problems(path: Path, name: str, named: Mapping[str, str], limit: int | None = None) -> ProblemFile:
    """Read the first `limit` problems of a file, and no more of it. `name` begins their ids.

    Raises KvatlasError for an unreadable file, a wrong row, and a file without problems.
    """
    where = f"The problem file {str(path)!r}"
    problems: list[Problem] = []
    unanswered: list[int] = []
    rows = 0
    first: Row = {}
    longest: dict[str, str] = {}
    lists = defaultdict[str, list[Problem]](list)
    for rows, row in enumerate(read_rows(path), 1):
        first = first or row
        found = read_problem(f"{name}-{rows:03d}", row, named, f"{where}, row {rows},")
        asked = " ".join(found.question.split())
        for column, value in row.items():
            # A text that the question holds is read, as the whole question of SVAMP beside its parts.
            text = str(value) if isinstance(value, str | int | float) else ""
            if len(text) > len(longest.get(column, "")) and " ".join(text.split()) not in asked:
                longest[column] = text
            if isinstance(value, list) and len(value) > 1:
                lists[column].append(found)
        # A question without a reference answer could only be counted wrong.
        if found.answer:
            problems.append(found)
        else:
            unanswered.append(rows)
        if len(problems) == limit:
            break

    if not rows:
        raise KvatlasError(f"{where} holds no problems; expected a row for each, in JSON lines as {_EXAMPLE}.")
    columns = _found_columns(first, named)
    if not problems:
        raise KvatlasError(
            f"{where} holds no problem with an answer in {columns.get('answer', 'answer')!r}; --column answer=NAME, in "
            "a spec columns: {answer: NAME}, names another column."
        )
    read = set(columns.values())
    # A copy of a column that is read holds nothing else.
    read_texts = {text for column, text in longest.items() if column in read}
    unread = {name: text for name, text in longest.items() if name and name not in read and text not in read_texts}
    answer_lists = tuple(lists[columns["answer"]])
    return ProblemFile(tuple(problems), columns, len(problems) != limit, unread, tuple(unanswered), answer_lists)


def _found_columns(row: Row, named: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a row by what they hold: those that the user `named`, else those with usual names."""
    columns = {content: _column_of(content, row, named) for content in (*USUAL, "context") if content != "answer"}
    columns["answer"] = named.get("answer") or columns[CORRECT] or _column_of("answer", row, named)
    return {content: column for content, column in columns.items() if column}


def _column_of(content: str, row: Row, named: Mapping[str, str], where: str = "The file") -> str | None:
    """Return the column with this content: the user's, else the first with a usual name; None without one.

    A context is the only column with a usual name. If the user names the column of the question alone, none is added.
    """
    if content != "context":
        return named.get(content) or find_column(row, *USUAL[content], where=where)
    if "context" in named or "question" in named:
        return named.get("context")
    columns = [column for name in CONTEXT if (column := find_column(row, name, where=where))]
    return columns[0] if len(columns) == 1 else None


def _column_in_row(content: str, row: Row, named: Mapping[str, str], where: str) -> str:
    """Return the column with this content, "" for an optional one that is not there.

    Raises KvatlasError if a row lacks the column that the user names, or its question or answer.
    """
    name = _column_of(content, row, named, where)
    is_required = content in ("question", "answer")
    if name in row or (name is None and not is_required):
        return name or ""
    expected = f"column {name!r} for the {content}" if name else f"column for the {content}"
    advice = ""
    if is_required:
        header = " (the first line names the columns: if it is a problem, write question,answer above it)"
        advice = (
            f"{header if '.csv' in where.lower() else ''}; usual names are {', '.join(USUAL[content])}; name another "
            f"with columns: {{{content}: NAME}} in a spec, or --column {content}=NAME"
        )
    raise KvatlasError(f"{where} has no {expected}; there are: {', '.join(map(str, row))}{advice}.")


def read_problem(id_: str, row: Row, named: Mapping[str, str], where: str) -> Problem:
    """Return the problem in a row; `named` are the user's columns. Raises KvatlasError for a missing or wrong field."""
    question_column = _column_in_row("question", row, named, where)
    question = _read_cell(row, question_column, where)
    if not question:
        raise KvatlasError(f"{where} has an empty question in {question_column!r}; fill it, or leave the row out.")
    context = ""
    if context_column := _column_in_row("context", row, named, where):
        without = f" `--column question={question_column}` asks without it, as columns: {{question: NAME}} in a spec."
        context = _read_cell(row, context_column, where, _joined_text, without)
    # Some files have the whole question in one column, and its parts beside it.
    if context and context not in question:
        question = f"{context}\n{question}"

    answer, about = _read_answer(row, question, named, where)
    cluster_column = _column_in_row("cluster", row, named, where)
    cluster = _read_cell(row, cluster_column, where) if cluster_column else ""
    return Problem(id_, question, answer, about, cluster)


def _read_answer(row: Row, question: str, named: Mapping[str, str], where: str) -> tuple[str, dict[str, Any]]:
    """Return the reference answer to a question, a letter if there are choices, and these."""
    # A column with the right answer and columns with wrong ones, as of GPQA.
    correct_column = _column_of(CORRECT, row, named, where)
    columns = (_column_of(name, row, named, where) for name in INCORRECT)
    wrong = [text for column in columns if column and (text := _read_cell(row, column, where))]
    if correct_column and wrong:
        correct = _read_cell(row, correct_column, where)
        # The order of the choices depends on the texts alone: neither on the row's number nor on the set's name.
        seed = int(digest(["choices", CHOICE_SEED, question])[:8], 16)
        choices = sorted([correct, *wrong])
        random.Random(seed).shuffle(choices)
        return _letter(choices.index(correct)), {"choices": choices, "choice_seed": seed}

    answer_column = _column_in_row("answer", row, named, where)
    # GSM8K's references are whole solutions with this end.
    answer = _read_cell(row, answer_column, where, answer_text).rpartition("\n#### ")[2].strip()

    # A list of options. Not "" for a column that is missing: pandas writes an index under this name.
    options_column = _column_of("options", row, named, where)
    options = None if options_column is None else row.get(options_column)
    if options:
        return _letter_and_choices(row[answer_column], answer, options, where)

    # Choices inside the question, or none.
    inside = _choices_inside(question)
    letter = _chosen(answer, inside)
    return (letter, {"choices": inside, "choices_in_question": True}) if letter else (answer, {})


def _read_cell(row: Row, column: str, where: str, read: Callable[[Any], str] = _plain_text, way_out: str = "") -> str:
    """Return the text in a cell; KvatlasError with its column, and a way out, for a value that is no text."""
    try:
        return read(row[column])
    except ValueError as error:
        # Bytes that are not UTF-8 raise ValueError, too.
        raise KvatlasError(f"{where} column {column!r}, {reason(error)}.{way_out}") from error


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _choices_inside(question: str) -> list[str]:
    """Return the texts behind the last (A), (B), ... of a question, or behind A), B), ... at the beginning of lines."""
    marks = list(_MARK.finditer(question))
    starts = [i for i, mark in enumerate(marks) if "A" in mark.groups()]
    run = marks[starts[-1] :] if starts else []
    letters = [mark[1] or mark[2] for mark in run]
    if len(run) < 2 or letters != [_letter(i) for i in range(len(run))]:
        return []
    ends = [*(mark.start() for mark in run[1:]), len(question)]
    return [question[mark.end() : end].removesuffix("\\n").strip() for mark, end in zip(run, ends, strict=True)]


def _chosen(answer: str, choices: Sequence[str]) -> str:
    """Return the letter of an answer that is a letter or the text of exactly one choice; "" for another answer."""
    letter = reference_letter(answer)
    if letter:
        return letter if ord(letter) - ord("A") < len(choices) else ""
    return _letter(choices.index(answer)) if choices.count(answer) == 1 else ""


def _letter_and_choices(value: Any, answer: str, options: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return an answer as a letter, and the options as texts without letters; an index counts from 0.

    A number as `value` of the answer is an index, the text of a number only if no option has this text.
    """
    if isinstance(options, str) and options.lstrip().startswith("["):
        # A cell of a CSV file.
        with suppress(ValueError):
            options = json.loads(options)
    if not isinstance(options, list | tuple):
        raise KvatlasError(f'{where} has the options {options!r}; expected a list, in a CSV file as ["red", "green"].')
    try:
        texts = [_plain_text(option) for option in options]
        if "" in texts:
            raise ValueError("is empty")
    except ValueError as error:
        raise KvatlasError(f"{where} has the options {options!r}, of which one {reason(error)}.") from error

    choices = [re.sub(r"^\s*\(?[A-Z][).:]\s+", "", text).strip() for text in texts]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_index = answer.isdecimal() and int(answer) < len(choices) and (is_number or answer not in choices)
    letter = _letter(int(answer)) if is_index else _chosen(answer, choices)
    if not letter:
        raise KvatlasError(
            f"{where} has the answer {answer!r}; expected one of its options ({', '.join(choices)}), "
            f"its letter, or its index from 0 to {len(choices) - 1}."
        )
    return letter, {"choices": choices}
