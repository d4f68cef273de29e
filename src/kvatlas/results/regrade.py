"""Regrading of the stored traces of a run by another grader or version, with overruled verdicts.

The first grade of a trace stays; the new verdict is a further metric, `graded:NAME`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvatlas import __version__, benchmarks, models
from kvatlas.benchmarks import Benchmark, judges, tables
from kvatlas.benchmarks.answers import OWN, check_grader
from kvatlas.benchmarks.public import Questions
from kvatlas.core import Grade, KvatlasError, Problem, Setting, Status, Trace
from kvatlas.models import ModelHandle
from kvatlas.results.export import replacing
from kvatlas.results.manifest import Manifest
from kvatlas.results.records import Key
from kvatlas.results.store import GRADED, Store
from kvatlas.text import guarded, unguarded

_YES, _NO = ("true", "1", "1.0", "yes", "right"), ("false", "0", "0.0", "no", "wrong")
_CLOSE, _OPEN = "</think>", "<think>"
#: Characters at the end of an answer's text that stand for it.
SHOWN = 400


@dataclass(frozen=True)
class Overruled:
    """A person's verdict on an answer to a problem in all traces; texts without an answer are named by their end."""

    benchmark: str
    problem: str
    answer: str
    correct: bool
    reason: str = ""


@dataclass
class Regraded:
    """Counts of the traces of one cell: all, right before and after, changed to right and to wrong."""

    model: str
    benchmark: str
    setting: Setting
    traces: int = 0
    before: int = 0
    after: int = 0
    to_right: int = 0
    to_wrong: int = 0

    def to_json(self, grader: str) -> dict[str, Any]:
        """Return plain data, shares in percent."""
        return {
            "model": self.model,
            "benchmark": self.benchmark,
            "setting": str(self.setting),
            "traces": self.traces,
            "pass@1": round(100 * self.before / self.traces, 1),
            f"graded:{grader}": round(100 * self.after / self.traces, 1),
            "to_right": self.to_right,
            "to_wrong": self.to_wrong,
        }


@dataclass(frozen=True)
class Disagreement:
    """An answer of so many traces that math-verify judges differently; `text` is the end of one of them."""

    benchmark: str
    problem: str
    reference: str
    answer: str
    correct: bool
    traces: int
    text: str

    def __str__(self) -> str:
        verdict, other = ("right", "wrong") if self.correct else ("wrong", "right")
        return (
            f"{self.problem}: reference {self.reference}, answer {self.answer} in {self.traces} traces, graded "
            f"{verdict}; math-verify says {other}.\n    ..." + self.text.replace("\n", "\n    ")
        )


@dataclass
class _Answers:
    """The grades of the answers to one problem, and the numbers of traces that gave them, by the answer's text."""

    problem: Problem
    grades: dict[str, Grade] = field(default_factory=dict)
    traces: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def regrade(
    folder: Path, grader: str = OWN, overruled: Sequence[Overruled] = (), audit: bool = False
) -> tuple[list[Regraded], list[Disagreement]]:
    """Grade all traces of a run again and store the verdicts as the metric `graded:NAME`.

    With `audit` also return the answers that math-verify judges differently. Raises KvatlasError if problems of the
    run are missing, or if its benchmarks have only one grader.
    """
    check_grader(grader)
    with Store.open(folder) as store:
        manifest = store.manifest()
        if manifest.screened:
            raise KvatlasError(f"{str(folder)!r} is a screen: it holds no answers to grade.")
        handles, by_name = _models(manifest), _benchmarks(manifest, grader)
        limit = manifest.spec.get("problems")
        problems = {
            (name, problem.id): problem for name, benchmark in by_name.items() for problem in benchmark.problems(limit)
        }
        for entry in overruled:
            if (entry.benchmark, entry.problem) not in problems:
                raise KvatlasError(
                    f"The overruled problem {entry.problem!r} of {entry.benchmark!r} is not in this run."
                )
        verdicts = {(entry.benchmark, entry.problem, entry.answer): entry.correct for entry in overruled}
        cells: dict[tuple[str, str, str], Regraded] = {}
        answers: dict[tuple[str, str], _Answers] = {}
        metrics: dict[Key, dict[str, Any]] = {}
        for run_key, trace in store.traces():
            name = trace.benchmark, trace.problem
            problem = problems.get(name)
            if problem is None:
                raise KvatlasError(
                    f"The problem {trace.problem!r} is not in {trace.benchmark} any more; put back the file that the "
                    "run was made with."
                )
            text = _answer(handles.get(trace.model), trace)
            right = False
            if text is not None:
                given = answers.setdefault(name, _Answers(problem))
                if text not in given.grades:
                    given.grades[text] = benchmarks.judge(by_name[trace.benchmark], problem, text)
                given.traces[text] += 1
                grade = given.grades[text]
                usual = grade.correct and grade.status is Status.OK
                right = verdicts.get((*name, _named(grade, text)), usual)
            key = run_key, trace.setting.id, trace.benchmark, trace.problem, trace.sample
            metrics[key] = {**trace.grade.metrics, GRADED + grader: float(right)}
            cell_key = trace.model, trace.benchmark, trace.setting.id
            cell = cells.setdefault(cell_key, Regraded(trace.model, trace.benchmark, trace.setting))
            before = trace.grade.correct and trace.grade.status is Status.OK
            cell.traces += 1
            cell.before += before
            cell.after += right
            cell.to_right += right and not before
            cell.to_wrong += before and not right
    if not metrics:
        raise KvatlasError(f"The run {str(folder)!r} has no traces to grade yet.")
    record = {"kvatlas": __version__, "grader": grader, "overruled": [vars(entry) for entry in overruled]}
    with Store.create(folder) as store:
        store.put_grading(grader, record, metrics)
    return list(cells.values()), _disagreements(by_name, answers) if audit else []


def read_overruled(path: Path) -> list[Overruled]:
    """Read a person's verdicts (CSV, JSON or JSON lines): columns benchmark, problem, answer, correct, reason."""
    entries = []
    for number, row in enumerate(tables.read_rows(path), 1):
        missing = [name for name in ("benchmark", "problem", "answer", "correct") if row.get(name) is None]
        if missing:
            raise KvatlasError(f"Row {number} of {str(path)!r} has no {missing[0]!r}.")
        correct = str(row["correct"]).strip().casefold()
        if correct not in _YES + _NO:
            raise KvatlasError(f"Row {number} of {str(path)!r} says correct {correct!r}; expected true and false.")
        name, problem, answer = (unguarded(str(row[name])) for name in ("benchmark", "problem", "answer"))
        entries.append(Overruled(name, problem, answer, correct in _YES, str(row.get("reason") or "")))
    return entries


def _models(manifest: Manifest) -> Mapping[str, ModelHandle]:
    """Return the models that are available; their tokenizers find the end of thinking."""
    by_name = {}
    for entry in manifest.spec.get("models", ()):
        with suppress(KvatlasError):
            model = models.find(**entry)
            by_name[model.name] = model
    return by_name


def _benchmarks(manifest: Manifest, grader: str) -> Mapping[str, Benchmark]:
    """Return the benchmarks of the run with the grader."""
    names = dict.fromkeys(cell.benchmark for cell in manifest.expected)
    entries = manifest.spec.get("benchmarks") or [{"name": name} for name in names]
    recorded = {entry[0]: entry for entry in manifest.provenance.get("benchmarks", ())}
    graded: dict[str, Benchmark] = {}
    for benchmark in (benchmarks.find(**entry) for entry in entries):
        if not isinstance(benchmark, Questions):
            if grader != OWN:
                raise KvatlasError(f"{benchmark.name} has one grader, its own; leave the name of a grader out.")
            graded[benchmark.name] = benchmark
            continue
        before, now = recorded.get(benchmark.name, []), benchmarks.identity(benchmark)
        # Name, version, prompt format, its version, digest of the problems.
        if len(before) > 4 and before[4] != now[4]:
            raise KvatlasError(f"The problems of {benchmark.name} are not those that the run was made with.")
        graded[benchmark.name] = replace(benchmark, grader=grader)
    return graded


def _answer(model: ModelHandle | None, trace: Trace) -> str | None:
    """Return the text after the end of thinking, or None."""
    if trace.grade.status is Status.TRUNCATED:
        return None
    if model is not None and trace.tokens:
        return model.answer(trace.tokens)
    _, closed, answer = trace.text.rpartition(_CLOSE)
    return answer if closed or _OPEN not in trace.text else None


def _named(grade: Grade, text: str) -> str:
    """Return the extracted answer, else the end of the text."""
    return grade.answer or text.strip()[-SHOWN:]


def _disagreements(by_name: Mapping[str, Benchmark], answers: Mapping[tuple[str, str], _Answers]) -> list[Disagreement]:
    """Return answers that math-verify judges differently, except letters and problems without a short answer."""
    looked = [
        (name, given.problem, text, grade, given.traces[text])
        for (name, _), given in answers.items()
        for text, grade in given.grades.items()
        if isinstance(by_name[name], Questions) and not given.problem.about.get("choices")
    ]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda item: judges.read(item[1].answer, item[2]), looked))
    return [
        Disagreement(name, problem.id, problem.answer, _named(grade, text), grade.correct, traces, text[-SHOWN:])
        for (name, problem, text, grade, traces), verdict in zip(looked, verdicts, strict=True)
        if verdict.value is not None and verdict.value != grade.correct
    ]


def write_audit(disagreements: Sequence[Disagreement], path: Path) -> None:
    """Write disagreements as CSV, to be corrected and read by `read_overruled`."""
    names = ["benchmark", "problem", "answer", "correct", "reason", "reference", "traces", "text"]
    with replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for disagreement in disagreements:
            row = {"reason": "", **vars(disagreement)}
            writer.writerow({name: guarded(value) for name, value in row.items()})
