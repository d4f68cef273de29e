"""Files of answers that any program can write, a row for each answer, and their import as the run of a map.

`kvatlas gate` reads such a file as a side. `kvatlas import` needs the columns of its settings, and makes a run of it.
Columns: `problem`, the grade (`correct` or `score`), and if known `sample`, `benchmark`, `model`, `text`, `finish` or
`truncated`, `output_tokens` or `tokens`, for the gate `question` and `reference`; others are ignored.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas import __version__
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark, find, problems_of
from kvatlas.benchmarks.base import grade_reading
from kvatlas.benchmarks.problem_files import read_rows
from kvatlas.class_files import permit
from kvatlas.core import (
    REFERENCE,
    Costs,
    Grade,
    KvatlasError,
    Problem,
    Setting,
    Status,
    Trace,
    digest,
    is_storable_number,
)
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import clusters_of, contents_of
from kvatlas.text import number

#: What the sentences on such a file call it.
NOUN = "file of answers"
_COLUMNS = ("problem", "sample", "benchmark", "model", "correct", "text", "finish", "output_tokens")
_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
#: The status of an answer by its finish reason, as servers spell it.
_FINISHED = {
    **dict.fromkeys(("", "stop", "eos", "end_turn", "stop_sequence", "tool_calls"), Status.OK),
    **dict.fromkeys(("length", "max_tokens", "model_length"), Status.TRUNCATED),
    **dict.fromkeys(("content_filter", "refusal"), Status.NO_ANSWER),
}


class AnswerRow(NamedTuple):
    """A row of a file: the name of its answer, and what it says of it.

    `score` is in [0, 1], NaN without a grade, and `tokens` is NaN if it is unknown; `status` tells how the answer
    ended, whatever its grade is.
    """

    where: str
    model: str
    benchmark: str
    problem: str
    sample: int
    score: float
    status: Status
    tokens: float
    text: str
    values: Mapping[str, Any]


def read_answers(path: Path, grade: str = "correct") -> Iterator[AnswerRow]:
    """Yield the rows of a file with the grades of a column. Raises KvatlasError, with its number, for a wrong row.

    Blanks around the names of problems, benchmarks and models do not count.
    """
    for row_number, row in enumerate(read_rows(path, NOUN), 1):
        where = f"Row {row_number} of {path.name}"
        problem = _name(row, "problem")
        if not problem:
            raise KvatlasError(f"{where} names no problem.")
        text = row.get("text")
        if not isinstance(text, str | None):
            raise KvatlasError(f"{where}: 'text' is {str(text)[:60]!r}; expected a text.")
        count = _count(row, "sample", where)
        sample = 0 if math.isnan(count) else int(count)
        tokens = _count(row, "output_tokens" if "output_tokens" in row else "tokens", where)
        finish = str(row.get("finish") or "").strip().lower()
        if finish not in _FINISHED:
            raise KvatlasError(
                f"{where}: 'finish' is {finish[:60]!r}; expected {', '.join(filter(None, _FINISHED))}. A request that "
                "failed is no answer: leave its row out, or ask again."
            )
        status = _FINISHED[finish]
        if score_of(row.get("truncated"), f"{where}: 'truncated'") > 0:
            status = Status.TRUNCATED
        score = score_of(row.get(grade), f"{where}: {grade!r}")
        model = _name(row, "model") or "model"
        benchmark = _name(row, "benchmark") or "answers"
        yield AnswerRow(where, model, benchmark, problem, sample, score, status, tokens, text or "", row)


def _name(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else str(value).strip()


def _count(row: Mapping[str, Any], column: str, where: str) -> float:
    """Return a whole number from 0, NaN for an empty cell."""
    value = row.get(column)
    if value is None or value == "":
        return math.nan
    count = -1.0 if isinstance(value, bool) else number_of(value)
    if not 0 <= count < 2**31 or not count.is_integer():
        raise KvatlasError(f"{where}: {column!r} is {str(value)[:60]!r}; expected a whole number from 0.")
    return count


def score_of(value: Any, where: str) -> float:
    """Return a score in [0, 1], NaN for a missing one; KvatlasError for any other value."""
    if value is None or value == "":
        return math.nan
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    share = number_of(value)
    if share != share or 0 <= share <= 1:
        return share
    raise KvatlasError(f"{where} is {str(value)[:60]!r}; expected a score from 0 to 1, or true and false.")


def number_of(value: Any) -> float:
    """Return a value as a number, -1 for any other value; Python would read a number in `0_1`."""
    if isinstance(value, str) and "_" in value:
        return -1.0
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return -1.0


# -- import ------------------------------------------------------------------------------------------------------------


def import_answers(
    file: Path, run: Path, axes: Sequence[str], reference: Sequence[str] = (), benchmark: str = ""
) -> tuple[int, int]:
    """Import a file of answers into a run, new or of an earlier import of that file.

    Returns the numbers of its settings and of the answers that it lacks.

    Each column in `axes` is a parameter of the setting of a row, each value in one spelling. The reference are the rows
    without any of these values, or those with the values `reference` (`NAME=VALUE`). With a `benchmark` (a file or a
    name) texts are graded. Samples are numbered in the order of their numbers in the file.
    Raises KvatlasError, with the number of the row, for what is missing, repeated or of the wrong type.
    """
    reference_values = {}
    for words in reference:
        name, equals, value = words.partition("=")
        if not equals or name not in axes:
            raise KvatlasError(f"--reference {words!r}: expected NAME=VALUE, where NAME is one of {', '.join(axes)}.")
        reference_values[name] = number(value)
    taken = [name for name in axes if name in (*_COLUMNS, "policy")]
    if taken or len(set(axes)) < len(axes):
        raise KvatlasError(f"--axis: expected other columns than {', '.join((*_COLUMNS, 'policy'))}, each once.")
    permit(*[benchmark] if benchmark else [])
    asked = find(benchmark) if benchmark else None
    problems = {} if asked is None else _problems_by_name(asked)
    answers = _AnswerFile(file, axes, reference_values, asked, problems)

    # What the rows promise: problems and samples of each setting, in the order of the file.
    by_cell: dict[tuple[str, str, Setting], dict[str, set[int]]] = {}
    repeated = ""
    for row, setting in answers.rows():
        samples = by_cell.setdefault((row.model, row.benchmark, setting), {}).setdefault(row.problem, set())
        if row.sample in samples:
            repeated = repeated or f"{row.where}: {setting} has sample {row.sample} of {row.problem!r} twice."
        samples.add(row.sample)
    if by_cell and all(setting == REFERENCE for *_, setting in by_cell):
        columns = ", ".join(next(iter(read_rows(file, NOUN))))
        raise KvatlasError(
            f"No row of {str(file)!r} has a value of {' or '.join(axes)}: expected columns of the file ({columns})."
        )
    if repeated:
        raise KvatlasError(repeated)
    lacking = [name for name in by_cell if (*name[:2], REFERENCE) not in by_cell]
    if lacking or not by_cell:
        model, name, _ = lacking[0] if lacking else ("", "", REFERENCE)
        of = f" of {model} on {name}" if lacking else ""
        expected = f"expected rows without a value of {', '.join(axes)}, or --reference NAME=VALUE"
        if reference and lacking:
            others = [setting.shown_as("").strip("()") for *cell, setting in by_cell if cell == [model, name]]
            expected = f"no row has {' and '.join(reference)}; there are {'; '.join(others)}"
        raise KvatlasError(f"{str(file)!r} has no answers of the reference{of}: {expected}.")

    ids: dict[str, dict[str, None]] = {}
    sample_numbers: set[int] = set()
    for (_, name, _), samples_by_problem in by_cell.items():
        ids.setdefault(name, {}).update(dict.fromkeys(samples_by_problem))
        sample_numbers.update(*samples_by_problem.values())
    places = {sample: place for place, sample in enumerate(sorted(sample_numbers))}
    with file.open("rb") as opened:
        source = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    cells = {}
    for (model, name, setting), samples_by_problem in by_cell.items():
        count = 1 + max(places[max(samples)] for samples in samples_by_problem.values())
        key = digest(["answers", source, model, name, list(axes), reference_values, benchmark])[:32]
        cell = Expected(model, name, setting, key, tuple(ids[name]), count, baseline=setting == REFERENCE)
        cells[model, name, setting] = cell

    settings = [setting for *_, setting in by_cell if setting != REFERENCE]

    def levels(axis: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(setting.values[axis] for setting in settings))

    answered = [problems[id_] for id_ in ids[asked.name]] if asked else []
    manifest = Manifest(
        axes=tuple((axis, levels(axis)) for axis in axes),
        expected=tuple(cells.values()),
        spec={"benchmarks": [{"name": benchmark}]} if benchmark else {},
        provenance={"kvatlas": __version__, "answers": {"file": file.name, "digest": source}},
        about={asked.name: {each.id: dict(each.about) for each in answered}} if asked else {},
        contents={asked.name: contents_of(answered)} if asked else {},
        clusters={asked.name: clusters_of(answered)} if asked else {},
    )
    with Store.create(run, {"kvatlas": __version__}) as store:
        stored = store.manifest(manifest).provenance.get("answers", {}).get("file")
        if stored != file.name:
            held = f"holds the answers of {stored}" if stored else "is no run of imported answers"
            raise KvatlasError(f"{str(run)!r} {held}; import {file.name} into a run of its own.")
        store.add_all(
            (cells[row.model, row.benchmark, setting].run_key, answers.trace(row, setting, places[row.sample]))
            for row, setting in answers.rows()
        )
        store.put_manifest(manifest)
    answered_count = sum(sum(map(len, of_cell.values())) for of_cell in by_cell.values())
    promised_count = sum(len(cell.problems) * cell.samples for cell in cells.values())
    return len(set(settings)), promised_count - answered_count


@dataclass(frozen=True)
class _AnswerFile:
    """A file of answers, the columns of its settings, and the problems that grade its texts."""

    path: Path
    axes: Sequence[str]
    reference: Mapping[str, Any]
    benchmark: Benchmark | None
    problems: Mapping[str, Problem]

    def rows(self) -> Iterator[tuple[AnswerRow, Setting]]:
        """Yield the rows with their settings."""
        spellings: dict[tuple[str, Any], str] = {}
        for row in read_answers(self.path):
            where = row.where
            if self.benchmark is not None:
                asked = self.benchmark.name
                if row.benchmark not in (asked, "answers"):
                    raise KvatlasError(f"{where} is of the benchmark {row.benchmark!r}; --benchmark has {asked!r}.")
                if row.problem not in self.problems:
                    first = next(iter(self.problems))
                    raise KvatlasError(f"{where}: {asked} has no problem {row.problem!r}; its first is {first!r}.")
                row = row._replace(benchmark=asked, problem=self.problems[row.problem].id)

            texts = {axis: str(row.values[axis]) for axis in self.axes if row.values.get(axis) is not None}
            given = {axis: number(text) for axis, text in texts.items() if text.strip()}
            for axis, value in given.items():
                text = texts[axis]
                if not isinstance(value, str) and (not is_storable_number(value) or "_" in text):
                    raise KvatlasError(f"{where}: {axis!r} is {text!r:.60}; expected a finite number or a text.")
                # 1.1 and 1.10 are one number and may be two versions.
                value = value.strip().casefold() if isinstance(value, str) else value
                spelling = spellings.setdefault((axis, value), text)
                if spelling != text:
                    raise KvatlasError(
                        f"{where} has {axis!r} as {text!r}, and a row before as {spelling!r}; expected one "
                        "spelling of a value, and letters in values that differ as texts alone (v1.10)."
                    )
            setting = Setting.from_parameters("served", **given)
            if not given and self.reference:
                raise KvatlasError(
                    f"{where} has no value of {' and '.join(self.axes)}: such rows are the reference where --reference "
                    "names no other."
                )
            if given == self.reference or not given:
                setting = REFERENCE
            elif len(given) < len(self.axes):
                absent = next(axis for axis in self.axes if axis not in given)
                raise KvatlasError(f"{where} has {next(iter(given))!r} and no {absent!r}; expected all axes, or none.")
            yield row, setting

    def trace(self, row: AnswerRow, setting: Setting, sample: int) -> Trace:
        """Return a row as a trace: as it was graded, else graded here."""
        has_text = row.values.get("text") is not None
        if row.score in (0, 1):
            status = Status.OK if row.score else row.status
            grade = Grade(bool(row.score), row.score, None, status)
        elif not math.isnan(row.score):
            raise KvatlasError(f"{row.where}: 'correct' is {row.values['correct']!r}; expected true or false.")
        elif has_text and self.benchmark is not None:
            read = reading.read_text(row.text, cut=row.status is Status.TRUNCATED)
            if row.status is Status.NO_ANSWER:
                read = replace(read, answer=None, status=row.status)
            grade = grade_reading(self.benchmark, self.problems[row.problem], read)
        else:
            needs = "--benchmark FILE, by which its text is graded" if has_text else "'correct' or 'text'"
            raise KvatlasError(f"{row.where} has no grade; expected {needs}.")
        tokens = None if math.isnan(row.tokens) else int(row.tokens)
        costs = Costs(None, tokens, None, None, None, None, None)
        return Trace(row.model, row.benchmark, row.problem, sample, setting, (), row.text, grade, costs)


def _problems_by_name(benchmark: Benchmark) -> dict[str, Problem]:
    """Return problems by their ids, and by those in the column `id` of their file."""
    problems = {problem.id: problem for problem in problems_of(benchmark)}
    named = {}
    for row_number, row in enumerate(read_rows(Path(file)) if (file := getattr(benchmark, "file", "")) else (), 1):
        problem = problems.get(f"{benchmark.name}-{row_number:03d}")
        if problem is not None and row.get("id") is not None:
            if str(row["id"]) in named:
                raise KvatlasError(f"{file!r} has two problems with the id {str(row['id'])!r}; expected it once.")
            named[str(row["id"])] = problem
    return problems | named
