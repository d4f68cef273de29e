"""Problem files in usual layouts: JSON lines, JSON, CSV, Parquet; columns are found by their usual names."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.benchmarks.answers import reference_letter
from kvatlas.core import KvatlasError, Problem, digest, reason

Row = Mapping[str, Any]

#: Usual names of columns, the likeliest first; case and underscores do not matter.
QUESTION = ("problem", "question", "prompt", "input", "query", "instruction")
ANSWER = ("answer", "final answer", "expected answer", "target", "gold", "label", "correct answer", "solution answer")
IDENTITY = ("id", "unique id", "problem id", "problem idx", "question id", "record id", "uuid", "idx")
OPTIONS = ("options", "choices")
CORRECT, INCORRECT = "correct answer", tuple(f"incorrect answer {i}" for i in range(1, 10))
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
#: The seed of the seeds of all permutations of choices: part of the benchmark, the same for every user.
CHOICE_SEED = 0
#: The mark of a choice inside a question.
_MARK = re.compile(r"\(([A-K])\)|(?:^|\n|\\n)\s*([A-K])[.):]\s")


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a file. Raises KvatlasError for a missing, empty or unreadable one."""
    where = f"The problem file {str(path)!r}"
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix not in SUFFIXES:
        raise KvatlasError(f"{where} has an unknown suffix; expected {', '.join(SUFFIXES)} (also with .gz).")
    if not path.is_file():
        raise KvatlasError(f"{where} is not there.")
    try:
        rows = _parquet(path) if suffix == ".parquet" else _text_rows(read_text(path), suffix)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        raise KvatlasError(f"{where} cannot be read ({reason(error)}).") from error
    if not rows:
        raise KvatlasError(f"{where} holds no problems.")
    if not all(isinstance(row, dict) for row in rows):
        raise KvatlasError(f"{where} must hold one object with named fields for each problem.")
    return rows


def read_text(path: Path) -> str:
    """Return the text of a file, compressed or not."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")


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


def _text_rows(text: str, suffix: str) -> list[Row]:
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
    """Return the value of each line that is not blank. Raises ValueError with the number of a faulty line."""
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


def find(row: Row, *names: str) -> str | None:
    """Return the row's column with the first of these names that exists."""

    def plain(name: object) -> str:
        return str(name).strip().casefold().replace("_", " ").replace("-", " ")

    columns = {plain(key): key for key in row}
    return next((columns[plain(name)] for name in names if plain(name) in columns), None)


def lettered(row: Row) -> list[str]:
    """Return the columns A, B, ... (or `option A`, `choice_a`) with a row's options, in order; empty below two."""
    for prefix in ("", "option ", "choice ", "option", "op"):
        columns = [find(row, prefix + letter) or "" for letter in "abcdefghijk"]
        columns = [at for at in columns[: [*columns, ""].index("")] if row[at] not in (None, "")]
        if len(columns) > 1:
            return columns
    return []


def as_text(value: Any) -> str:
    """Return an answer as text: 27.0 is 27, a list of one is its item, None is empty."""
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value)
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value).strip()
    # CSV files hold texts: 27.0 there is the same float.
    whole, point, zero = text.partition(".")
    return whole if point and zero and set(zero) == {"0"} and whole.lstrip("-").isdecimal() else text


def problem(id_: str, row: Row, named: Mapping[str, str], where: str) -> Problem:
    """Return the problem in a row. Raises KvatlasError, beginning with `where`, for a missing or wrong field.

    `named` are the user's names of columns (question, answer, id, options).
    """
    question = str(row[_column(row, "question", QUESTION, named, where)] or "").strip()
    if not question:
        raise KvatlasError(f"{where} has an empty question ({id_}).")
    about: dict[str, Any] = {}
    identity_at = named.get("id") or find(row, *IDENTITY)
    if identity_at:
        about["source_id"] = str(row.get(identity_at))
    correct_at = find(row, CORRECT)
    wrong = [str(row[at]).strip() for name in INCORRECT if (at := find(row, name)) and row[at]]
    if correct_at and wrong:
        # The order of the choices comes from the question's own seed, which is stored with it.
        correct = str(row[correct_at]).strip()
        seed = int(digest(["choices", CHOICE_SEED, id_])[:8], 16)
        choices = [correct, *wrong]
        random.Random(seed).shuffle(choices)
        about |= {"choices": choices, "choice_seed": seed}
        return Problem(id_, question, _letter(choices.index(correct)), about)
    value = row[_column(row, "answer", ANSWER, named, where)]
    # GSM8K's references are whole solutions with this end.
    answer = as_text(value).rpartition("\n#### ")[2].strip()
    options_at = named.get("options") or find(row, *OPTIONS)
    options = row.get(options_at) if options_at else [row[at] for at in lettered(row)]
    if options:
        by_index = isinstance(value, int | float) and not isinstance(value, bool)
        about["choices"], answer = _options(options, answer, where, by_index)
    elif answer and (choices := _choices_inside(question)) and (letter := _chosen(answer, choices)):
        about |= {"choices": choices, "choices_in_question": True}
        answer = letter
    return Problem(id_, question, answer, about)


def _column(row: Row, content: str, usual: Sequence[str], named: Mapping[str, str], where: str) -> str:
    """Return the row's column with this content: the user's, else the first usual one."""
    name = named.get(content)
    if name:
        if name not in row:
            raise KvatlasError(f"{where} has no column {name!r} for the {content}; there are: {', '.join(row)}.")
        return name
    key = find(row, *usual)
    if key is None:
        raise KvatlasError(
            f"{where} has no column for the {content}; there are: {', '.join(map(str, row))}; usual names are "
            f"{', '.join(usual[:4])}; name another with columns: {{{content}: NAME}} in a spec, or --column "
            f"{content}=NAME of kvatlas run and kvatlas check."
        )
    return key


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


def _options(value: Any, answer: str, where: str, by_index: bool) -> tuple[list[str], str]:
    """Return choices as texts without their letters, and the answer as a letter.

    A number (`by_index`) counts from 0 even if it is the text of an option, too.
    """
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)] if "text" not in value else value["text"]
    if not isinstance(value, list | tuple):
        raise KvatlasError(f"{where} has options that are no list.")
    choices = [re.sub(r"^\s*\(?[A-Z][).:]\s+", "", str(option)).strip() for option in value]
    letter = reference_letter(answer)
    if letter and ord(letter) - ord("A") >= len(choices):
        letter = ""
    elif not letter and answer.isdecimal() and int(answer) < len(choices) and (by_index or answer not in choices):
        letter = _letter(int(answer))
    if not letter and answer in choices:
        letter = _letter(choices.index(answer))
    if not letter:
        raise KvatlasError(f"{where} has the answer {answer!r}; expected one of its options.")
    return choices, letter
