"""PairedAnswers of answers: the same question to both sides, found by its content, and all that differs besides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import NO_ANSWERS, NOT_ENDED, KvatlasError, Outcome
from kvatlas.gates.outcomes import AnswerName, GradedAnswer, Side
from kvatlas.results.manifest import NAMED
from kvatlas.stats.numerics.arrays import Floats, Ints, cluster_numbers

#: Differences that change the question or its grade, and the word that allows them.
REFUSED: Mapping[str, str] = {
    "few-shot examples": "prompts",
    "system message": "prompts",
    "task version": "version",
    "task arguments": "version",
    "metric": "grading",
    "filter": "grading",
}
#: What can be allowed.
ALLOWED = ("prompts", "version", "grading", "missing")
#: The largest share of missing pairs with which something can be proven.
MOST_MISSING = 0.05
_ENDINGS = ("", *map(str, (*NO_ANSWERS, *NOT_ENDED)))


class ConditionDifference(NamedTuple):
    """A condition that differs between the sides, "" where a side does not name it."""

    condition: str
    before: str
    after: str


@dataclass(frozen=True)
class AnswerGrid:
    """Answers of one side [problems, samples]: NaN and 0 where one is missing.

    `endings` index `_ENDINGS`; `task`, `names` and `samples` are those of the log.
    """

    scores: Floats
    lengths: Floats
    endings: NDArray[np.int8]
    fingerprints: Ints
    task: str
    names: tuple[str | None, ...]
    samples: tuple[int, ...]

    def name_of(self, row: int, column: int) -> AnswerName:
        """Return the name of an answer in its log."""
        return self.task, str(self.names[row]), self.samples[column]

    def ended(self, outcomes: Iterable[Outcome]) -> int:
        """Return the number of answers whose ending is one of these outcomes."""
        endings = [_ENDINGS.index(str(outcome)) for outcome in outcomes]
        return int(np.isin(self.endings, endings).sum())


@dataclass(frozen=True)
class TaskPairs:
    """The pairs of one task; both grids have the same problems and samples."""

    task: str
    before: AnswerGrid
    after: AnswerGrid
    by_content: bool
    missing: tuple[int, int] = (0, 0)
    #: The number of the cluster of each problem; None if each stands for itself.
    clusters: Ints | None = None

    @cached_property
    def losses(self) -> Floats:
        """Before minus after [problems, samples], NaN where a pair is missing."""
        return self.before.scores - self.after.scores

    @cached_property
    def problems(self) -> list[str]:
        """The names of the problems, those before the change where both have one."""
        pairs = zip(self.before.names, self.after.names, strict=True)
        return [str(first if first is not None else second) for first, second in pairs]


@dataclass(frozen=True)
class PairedAnswers:
    """All pairs of two sides, task by task, with what differs besides, and notes."""

    tasks: tuple[TaskPairs, ...]
    differences: tuple[ConditionDifference, ...]
    notes: tuple[str, ...] = ()

    @property
    def missing_share(self) -> float:
        """The share of pairs that lack an answer."""
        losses = [task.losses for task in self.tasks]
        return sum(int(np.isnan(values).sum()) for values in losses) / sum(values.size for values in losses)


@dataclass
class _TaskAnswers:
    """The answers of one side to one task, in columns; problems are numbered as they come."""

    places: dict[str, int] = field(default_factory=dict)
    contents: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    endings: list[int] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)

    def add(self, answer: GradedAnswer, side: str) -> None:
        place = self.places.get(answer.problem)
        if place is None:
            place = self.places[answer.problem] = len(self.places)
            self.contents.append(answer.content)
            self.prompts.append(answer.prompt)
        elif self.contents[place] != answer.content:
            raise KvatlasError(f"{side} asks two questions as problem {answer.problem!r} of {answer.task}.")
        self.rows.append(place)
        self.samples.append(answer.sample)
        self.scores.append(answer.score)
        self.lengths.append(answer.length)
        self.endings.append(_ENDINGS.index(answer.ending))
        self.fingerprints.append(answer.fingerprint)

    @property
    def sample_count(self) -> int:
        """The number of samples of a problem."""
        return len(set(self.samples))

    def check_distinct(self, task: str, side: str) -> None:
        """Raise KvatlasError for a sample that stands twice."""
        codes = np.array(self.rows) * (max(self.samples) + 1) + np.array(self.samples)
        values, first, counts = np.unique(codes, return_index=True, return_counts=True)
        repeated = int((counts - 1).sum())
        if repeated:
            index = int(first[counts > 1][0])
            problem = list(self.places)[self.rows[index]]
            raise KvatlasError(
                f"{side} has {repeated:,} answers of {task} twice (as sample {self.samples[index]} of problem "
                f"{problem!r}): is it two logs in one file? {len(values):,} are distinct."
            )

    def keys(self, by_content: bool) -> list[tuple[str, int]]:
        """Return the key of each problem; problems of equal content are numbered in the order of their names."""
        if not by_content:
            return [(problem, 0) for problem in self.places]
        alike: dict[str, list[str]] = {}
        for problem, content in zip(self.places, self.contents, strict=True):
            alike.setdefault(content, []).append(problem)
        ranks: dict[str, int] = {}
        for problems in alike.values():
            if len(problems) > 1:
                ranks |= {problem: rank for rank, problem in enumerate(sorted(problems))}
        return [(self.contents[place], ranks.get(problem, 0)) for problem, place in self.places.items()]

    def grid(self, task: str, places: Ints, samples: int) -> AnswerGrid:
        """Return the first `samples` samples of problems by their places, -1 for one that is missing."""
        numbers = np.unique(self.samples)[:samples]
        column = np.searchsorted(numbers, self.samples)
        is_kept = np.isin(self.samples, numbers)
        rows = np.array(self.rows)[is_kept]
        columns = column[is_kept]

        def table(values: list[Any], kind: Any, missing: object) -> NDArray[Any]:
            # The last row stays empty: it stands for missing problems.
            filled = np.full((len(self.places) + 1, samples), missing, kind)
            filled[rows, columns] = np.array(values, kind)[is_kept]
            return filled[places]

        names = list(self.places)
        return AnswerGrid(
            table(self.scores, np.float64, np.nan),
            table(self.lengths, np.float64, np.nan),
            table(self.endings, np.int8, 0),
            table(self.fingerprints, np.int64, 0),
            task,
            tuple(names[place] if place >= 0 else None for place in places.tolist()),
            tuple(numbers.tolist()),
        )


def pair_answers(before: Side, after: Side, allow: Collection[str] = ()) -> PairedAnswers:
    """Return the pairs of two sides.

    Raises KvatlasError for sides that do not answer the same questions, and for differences that change a question or
    its grade unless they are allowed.
    """
    unknown = next((word for word in allow if word not in ALLOWED), None)
    if unknown is not None:
        raise KvatlasError(f"--allow {unknown}: expected {', '.join(ALLOWED)}.")
    first = _answers_by_task(before)
    second = _answers_by_task(after)
    notes = [note for note in before.notes if note in after.notes]
    for side in (before, after):
        notes += [f"{side.name}: {note}" for note in side.notes if note not in notes]

    # The tasks of the first side, with their names on the second.
    names = {task: task for task in first}
    if first.keys() != second.keys():
        names = _renamed_task(first, second, after, notes)
    if not names:
        for side, lacking in ((after, first.keys() - second.keys()), (before, second.keys() - first.keys())):
            if lacking:
                shared = sorted(first.keys() & second.keys())
                hint = f"name those of both with --task: {', '.join(shared)}" if shared else "no task is in both"
                raise KvatlasError(f"{side.name!r} lacks the task {', '.join(sorted(lacking))}; {hint}.")

    # Differences that change the question; what one side does not name is not known to differ.
    differences = _condition_differences(before, after, names)
    for condition, value_before, value_after in differences:
        word = REFUSED.get(condition.partition(" of ")[0])
        if word is not None and word not in allow and value_before and value_after:
            raise KvatlasError(
                f"The sides differ in {condition} ({value_before!r} before, {value_after!r} after), which changes what "
                f"is compared; --allow {word} compares them all the same."
            )

    tasks = []
    for task, other in names.items():
        sides = (first[task], second[other])
        pairs = _pair_task((task, other), sides, allow)
        named = {**after.clusters.get(other, {}), **before.clusters.get(task, {})}
        names_of_problems = [(named[name],) if name in named else name for name in pairs.problems]
        pairs = replace(pairs, clusters=cluster_numbers(names_of_problems))
        tasks.append(pairs)
        notes += _task_notes(pairs, sides, (before.name, after.name))
    if "missing" not in allow:
        for pairs in tasks:
            _check_missing(pairs, (before.name, after.name))

    by_name = [task.task for task in tasks if not task.by_content]
    if by_name:
        notes.append(f"{', '.join(by_name)}: paired by the names of problems, since a log has no text of the questions")
    if before.begun and after.begun and before.begun[:19] > after.begun[:19]:
        notes.append(
            f"before was made after the other side ({before.begun[:19]}, {after.begun[:19]}): are they swapped?"
        )
    return PairedAnswers(tuple(tasks), tuple(differences), tuple(dict.fromkeys(notes)))


def _answers_by_task(side: Side) -> dict[str, _TaskAnswers]:
    tasks: dict[str, _TaskAnswers] = {}
    for answer in side.read():
        answers = tasks.get(answer.task)
        if answers is None:
            answers = tasks[answer.task] = _TaskAnswers()
        answers.add(answer, side.name)
    if not tasks:
        raise KvatlasError(f"{side.name!r} has no answers of the tasks that are compared.")

    for task, answers in tasks.items():
        answers.check_distinct(task, side.name)
        if np.isnan(answers.scores).all():
            raise KvatlasError(f"{side.name!r} has no score of {task}.")
    return tasks


def _renamed_task(
    first: Mapping[str, _TaskAnswers], second: Mapping[str, _TaskAnswers], after: Side, notes: list[str]
) -> dict[str, str]:
    """Return the only task of each side if both ask the same questions under unlike names, else {}."""
    if len(first) != 1 or len(second) != 1:
        return {}
    task = next(iter(first))
    other = next(iter(second))
    if not set(first[task].contents) & set(second[other].contents) - {""}:
        return {}
    notes.append(f"{task} is called {other} by {after.name}; the questions are the same")
    return {task: other}


# -- conditions --------------------------------------------------------------------------------------------------------


def _condition_differences(before: Side, after: Side, names: Mapping[str, str]) -> list[ConditionDifference]:
    """Return the conditions that differ in any task, each once for all tasks with the same values."""
    found: dict[ConditionDifference, list[str]] = {}
    if before.kind != after.kind:
        found[ConditionDifference("kind of log", before.kind, after.kind)] = list(names)
    for task, other in names.items():
        first = before.conditions.get(task, {})
        second = after.conditions.get(other, {})
        for condition in dict.fromkeys((*first, *second)):
            values = ConditionDifference(condition, first.get(condition, ""), second.get(condition, ""))
            if values.before != values.after:
                found.setdefault(values, []).append(task)

    every = len(names)
    return [
        difference if len(tasks) == every else difference._replace(condition=f"{difference.condition} of {tasks[0]}")
        for difference, tasks in found.items()
    ]


# -- problems ----------------------------------------------------------------------------------------------------------


def _pair_task(tasks: tuple[str, str], sides: tuple[_TaskAnswers, _TaskAnswers], allow: Collection[str]) -> TaskPairs:
    """Return the pairs of one task, which the sides may call by unlike names."""
    task = tasks[0]
    by_content = all(all(side.contents) for side in sides)
    keys = [side.keys(by_content) for side in sides]
    places = [dict(zip(of_side, range(len(of_side)), strict=True)) for of_side in keys]
    shared = [(places[0][key], places[1][key]) for key in places[0] if key in places[1]]
    if not shared and by_content:
        same_names = len(sides[0].places.keys() & sides[1].places.keys())
        named = f" ({same_names:,} of them have the same names)" if same_names else ""
        raise KvatlasError(
            f"The sides ask other questions of {task}: no question with its reference is the same{named}."
        )
    if not shared:
        first, second = (next(iter(side.places)) for side in sides)
        raise KvatlasError(
            f"The sides have no problem of {task} in common: the first is {first!r} before and {second!r} after."
        )

    # The same questions in other words, where both logs have the prompts.
    reworded = []
    for place, other in shared:
        prompts = (sides[0].prompts[place], sides[1].prompts[other])
        if all(prompts) and prompts[0] != prompts[1]:
            reworded.append(place)
    if reworded and "prompts" not in allow:
        problem = list(sides[0].places)[reworded[0]]
        raise KvatlasError(
            f"{len(reworded):,} of {len(shared):,} questions of {task} were put in other words (as problem "
            f"{problem!r}): other examples, another template or another system message. --allow prompts compares them."
        )

    # Both grids have the problems of either side, and the samples that both have.
    every = list(dict.fromkeys((*keys[0], *keys[1])))
    samples = min(side.sample_count for side in sides)
    grids = []
    for name, side, of_side in zip(tasks, sides, places, strict=True):
        rows = np.array([of_side.get(key, -1) for key in every])
        grids.append(side.grid(name, rows, samples))
    missing = [int(np.isnan(grid.scores).sum()) for grid in grids]
    return TaskPairs(task, grids[0], grids[1], by_content, (missing[0], missing[1]))


def _task_notes(pairs: TaskPairs, sides: tuple[_TaskAnswers, _TaskAnswers], names: tuple[str, str]) -> list[str]:
    """Return notes on unequal numbers of samples, and on missing answers."""
    notes = []
    counts = [side.sample_count for side in sides]
    if counts[0] != counts[1]:
        notes.append(
            f"{pairs.task} has {counts[0]} samples of a problem before and {counts[1]} after: the first {min(counts)} "
            "are used"
        )
    for count, name in zip(pairs.missing, names, strict=True):
        if count:
            notes.append(
                f"{name} lacks {count:,} of {pairs.losses.size:,} answers of {pairs.task}; they count as the worst case"
            )
    return notes


def _check_missing(pairs: TaskPairs, names: tuple[str, str]) -> None:
    """Raise KvatlasError if too many answers of a task are missing."""
    is_missing = np.isnan(pairs.losses)
    if is_missing.sum() <= MOST_MISSING * is_missing.size:
        return
    side = int(pairs.missing[1] > pairs.missing[0])
    problems = [pairs.problems[row] for row in np.flatnonzero(is_missing.any(1))[:NAMED]]
    raise KvatlasError(
        f"{names[side]!r} lacks {pairs.missing[side]:,} of {is_missing.size:,} answers of {pairs.task} (as problem "
        f"{', '.join(problems)}): the log is unfinished, or was made of fewer problems. At most 5 % may be "
        "missing; --allow missing counts them as the worst case and gives no verdict."
    )
