"""Import of answers that any program collected under several settings of servers: the run of a map.

A row is one answer: `problem`, the values of the axes, one of `correct` and `text`, and if known `sample`, `benchmark`,
`model`, `finish` (`length` for an answer that was cut) and `output_tokens`; other columns are ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas import __version__
from kvatlas.answers import reading
from kvatlas.benchmarks import Benchmark, find
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
from kvatlas.results.records import MAX_SAMPLES, is_cost
from kvatlas.text import number

#: What the sentences on such a file call it.
_NOUN = "file of answers"
_COLUMNS = ("problem", "sample", "benchmark", "model", "correct", "text", "finish", "output_tokens")
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class _Row:
    """A row of the file: the name of its answer, and what it says of it."""

    model: str
    benchmark: str
    setting: Setting
    problem: str
    sample: int
    where: str
    values: Mapping[str, Any]


def import_answers(
    file: Path, run: Path, axes: Sequence[str], reference: Sequence[str] = (), benchmark: str = ""
) -> tuple[Expected, ...]:
    """Import a file of answers into a run, new or of an earlier import of answers, and return its cells.

    Each column in `axes` is a parameter of the setting of a row, each value in one spelling. The reference are the rows
    without any of these values, or those with the values `reference` (`NAME=VALUE`). With a `benchmark` (a file or a
    name) texts are graded.
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
    for row in answers.rows():
        samples = by_cell.setdefault((row.model, row.benchmark, row.setting), {}).setdefault(row.problem, set())
        if row.sample in samples:
            repeated = repeated or f"{row.where}: {row.setting} has sample {row.sample} of {row.problem!r} twice."
        samples.add(row.sample)
    if by_cell and all(setting == REFERENCE for *_, setting in by_cell):
        raise KvatlasError(f"No row of {str(file)!r} has a value of {' or '.join(axes)}: expected columns of the file.")
    if repeated:
        raise KvatlasError(repeated)
    lacking = [name for name in by_cell if (*name[:2], REFERENCE) not in by_cell]
    if lacking or not by_cell:
        model, name, _ = lacking[0] if lacking else ("", "", REFERENCE)
        of = f" of {model} on {name}" if lacking else ""
        raise KvatlasError(
            f"{str(file)!r} has no answers of the reference{of}: expected rows without a value of {', '.join(axes)}, "
            "or --reference NAME=VALUE."
        )

    ids: dict[str, dict[str, None]] = {}
    for (_, name, _), samples_by_problem in by_cell.items():
        ids.setdefault(name, {}).update(dict.fromkeys(samples_by_problem))
    with file.open("rb") as opened:
        source = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    cells = {}
    for (model, name, setting), samples_by_problem in by_cell.items():
        count = 1 + max(max(samples) for samples in samples_by_problem.values())
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
        spec={},
        provenance={"kvatlas": __version__, "answers": {"file": file.name, "digest": source}},
        about={asked.name: {each.id: dict(each.about) for each in answered}} if asked else {},
        contents={asked.name: contents_of(answered)} if asked else {},
        clusters={asked.name: clusters_of(answered)} if asked else {},
    )
    with Store.create(run, {"kvatlas": __version__}) as store:
        if "answers" not in store.manifest(manifest).provenance:
            raise KvatlasError(f"{str(run)!r} is no run of imported answers; import the file into a run of its own.")
        keyed = ((cells[row.model, row.benchmark, row.setting].run_key, answers.trace(row)) for row in answers.rows())
        store.add_all(keyed)
        store.put_manifest(manifest)
    return manifest.expected


@dataclass(frozen=True)
class _AnswerFile:
    """A file of answers, the columns of its settings, and the problems that grade its texts."""

    path: Path
    axes: Sequence[str]
    reference: Mapping[str, Any]
    benchmark: Benchmark | None
    problems: Mapping[str, Problem]

    def rows(self) -> Iterator[_Row]:
        """Yield the rows with their settings."""
        spellings: dict[tuple[str, Any], str] = {}
        for row_number, values in enumerate(read_rows(self.path, _NOUN), 1):
            where = f"Row {row_number} of {self.path.name}"
            texts = {name: "" if value is None else str(value) for name, value in values.items()}
            problem = texts.get("problem", "")
            if not problem:
                raise KvatlasError(f"{where} names no problem.")
            sample = number(texts.get("sample") or "0")
            if not isinstance(sample, int) or not 0 <= sample < MAX_SAMPLES:
                expected = f"expected a whole number from 0 to {MAX_SAMPLES - 1:,}"
                raise KvatlasError(f"{where}: the sample is {sample!r}; {expected}.")

            name = texts.get("benchmark") or "answers"
            if self.benchmark is not None:
                asked = self.benchmark.name
                if texts.get("benchmark", asked) != asked:
                    raise KvatlasError(f"{where} is of the benchmark {name!r}; --benchmark has {asked!r}.")
                if problem not in self.problems:
                    first = next(iter(self.problems))
                    raise KvatlasError(f"{where}: {asked} has no problem {problem!r}; its first is {first!r}.")
                name = asked
                problem = self.problems[problem].id

            given = {axis: number(texts[axis]) for axis in self.axes if texts.get(axis)}
            for axis, value in given.items():
                if not isinstance(value, str) and (not is_storable_number(value) or "_" in texts[axis]):
                    raise KvatlasError(f"{where}: {axis!r} is {texts[axis]!r:.60}; expected a finite number or a text.")
                # 1.1 and 1.10 are one number and may be two versions.
                value = value.strip().casefold() if isinstance(value, str) else value
                spelling = spellings.setdefault((axis, value), texts[axis])
                if spelling != texts[axis]:
                    raise KvatlasError(
                        f"{where} has {axis!r} as {texts[axis]!r}, and a row before as {spelling!r}; expected one "
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
            yield _Row(texts.get("model") or "model", name, setting, problem, sample, where, values)

    def trace(self, row: _Row) -> Trace:
        """Return a row as a trace: as it was graded, else graded here."""
        correct = row.values.get("correct")
        text = row.values.get("text")
        if text is not None and not isinstance(text, str):
            raise KvatlasError(f"{row.where}: 'text' is {str(text)[:60]!r}; expected a text.")
        was_cut = row.values.get("finish") == "length"
        if correct is not None and correct != "":
            truth = _TRUTHS.get(str(correct).strip().lower())
            if truth is None:
                raise KvatlasError(f"{row.where}: 'correct' is {str(correct)[:60]!r}; expected true or false.")
            status = Status.TRUNCATED if was_cut and not truth else Status.OK
            grade = Grade(truth, float(truth), None, status)
        elif text is not None and self.benchmark is not None:
            grade = grade_reading(self.benchmark, self.problems[row.problem], reading.read_text(text, cut=was_cut))
        else:
            needs = "--benchmark FILE, by which its text is graded" if text is not None else "'correct' or 'text'"
            raise KvatlasError(f"{row.where} has no grade; expected {needs}.")

        # Text in CSV files.
        tokens: Any = row.values.get("output_tokens")
        if isinstance(tokens, str):
            tokens = number(tokens) if tokens else None
        if not is_cost("output_tokens", tokens):
            raise KvatlasError(f"{row.where}: 'output_tokens' is {str(tokens)[:60]!r}; expected a whole number from 0.")
        costs = Costs(None, tokens, None, None, None, None, None)
        return Trace(row.model, row.benchmark, row.problem, row.sample, row.setting, (), text or "", grade, costs)


def _problems_by_name(benchmark: Benchmark) -> dict[str, Problem]:
    """Return problems by their ids, and by those in the column `id` of their file."""
    problems = {problem.id: problem for problem in benchmark.problems(None)}
    named = {}
    for row_number, row in enumerate(read_rows(Path(file)) if (file := getattr(benchmark, "file", "")) else (), 1):
        problem = problems.get(f"{benchmark.name}-{row_number:03d}")
        if problem is not None and row.get("id") is not None:
            if str(row["id"]) in named:
                raise KvatlasError(f"{file!r} has two problems with the id {str(row['id'])!r}; expected it once.")
            named[str(row["id"])] = problem
    return problems | named
