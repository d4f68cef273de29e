"""Pairs of answers: the same question to both sides, found by its content, and all that differs besides."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import KvatlasError, Status, grouped
from kvatlas.core.traces import NAMED
from kvatlas.gates.cards import ALLOWED, UNKNOWN, ConditionDifference, check_allowed, compare_cards
from kvatlas.gates.outcomes import AnswerName, GradedAnswer, Side
from kvatlas.stats.numerics.arrays import Floats, Ints, cluster_numbers
from kvatlas.stats.run_data import MOST_MISSING

_STATUSES = tuple(Status)


@dataclass(frozen=True)
class AnswerGrid:
    """Answers of one side [problems, samples]: NaN and 0 where one is missing.

    `statuses` index `_STATUSES`; `task`, `names` and `samples` are those of the log.
    """

    side: str
    task: str
    scores: Floats
    lengths: Floats
    statuses: NDArray[np.int8]
    fingerprints: Ints
    names: Sequence[str | None]
    samples: Sequence[int]

    @property
    def missing(self) -> int:
        """The number of answers that the side lacks."""
        return int(np.isnan(self.scores).sum())

    def name_of(self, row: int, pair: int, pairs: int) -> AnswerName:
        """Return the name in its log of the answer in a pair of a problem that has so many pairs."""
        return self.task, str(self.names[row]), self.samples[pair * len(self.samples) // pairs]

    def count(self, statuses: Iterable[Status]) -> int:
        """Return the number of answers that ended with one of these."""
        return int(np.isin(self.statuses, [_STATUSES.index(status) for status in statuses]).sum())


@dataclass(frozen=True)
class TaskPairs:
    """The pairs of one task; both grids have the same problems.

    `by_name` counts the problems that were paired by name, since a side has no text of their questions, `no_prompt`
    those of which a side has no prompt.
    """

    task: str
    #: The names of the problems, those before the change where both sides have one.
    problems: Sequence[str]
    before: AnswerGrid
    after: AnswerGrid
    by_name: int
    no_prompt: int
    #: The number of the cluster of each problem; None if each stands for itself.
    clusters: Ints | None

    @property
    def samples(self) -> tuple[int, int]:
        """The samples of a problem on both sides."""
        return self.before.scores.shape[1], self.after.scores.shape[1]

    @property
    def counts_answers(self) -> bool:
        """Return whether a pair is an answer before and one after, and no mean over several."""
        return self.samples[0] == self.samples[1]

    @property
    def right(self) -> tuple[float, float]:
        """The shares of right answers on both sides, of those that are there."""
        return float(np.nanmean(self.before.scores)), float(np.nanmean(self.after.scores))

    @cached_property
    def scores(self) -> tuple[Floats, Floats]:
        """The scores of both sides [problems, pairs], NaN where one is missing.

        Of unequal numbers of samples each stands as often as pairs need it: the mean over a row is the mean of all
        samples, and a missing sample counts for its share of the row.
        """
        pairs = math.lcm(*self.samples)
        before = np.repeat(self.before.scores, pairs // self.samples[0], axis=1)
        return before, np.repeat(self.after.scores, pairs // self.samples[1], axis=1)

    @cached_property
    def losses(self) -> Floats:
        """Before minus after [problems, pairs], NaN where a pair is missing."""
        return self.scores[0] - self.scores[1]

    @property
    def changed(self) -> tuple[int, int]:
        """The numbers of pairs that lost and gained; of problems where a pair is no single answer."""
        losses = self.losses if self.counts_answers else np.nan_to_num(self.losses).mean(1)
        # Sums of thirds are no zeros.
        return int((losses > 1e-9).sum()), int((losses < -1e-9).sum())


@dataclass(frozen=True)
class PairedAnswers:
    """All pairs of two sides, task by task, with what differs besides, and notes."""

    before: Side
    after: Side
    tasks: Sequence[TaskPairs]
    differences: Sequence[ConditionDifference]
    notes: Sequence[str]
    #: The differences of sampling, solver and scorer, and what is unknown on a side.
    sampling: Sequence[ConditionDifference]
    unknown: Sequence[ConditionDifference]

    @property
    def missing_share(self) -> float:
        """The share of pairs that lack an answer."""
        losses = [task.losses for task in self.tasks]
        return sum(int(np.isnan(values).sum()) for values in losses) / sum(values.size for values in losses)


@dataclass
class _AskedProblem:
    """The question of a problem on one side, as digests; `prompts` are those of all samples."""

    question: str
    reference: str
    prompts: set[str] = field(default_factory=set)


@dataclass
class _TaskAnswers:
    """The answers of one side to one task, without their texts, and its problems by name."""

    side: str
    task: str
    asked: dict[str, _AskedProblem] = field(default_factory=dict)
    answers: list[GradedAnswer] = field(default_factory=list)

    def add(self, answer: GradedAnswer) -> None:
        asked = self.asked.setdefault(answer.problem, _AskedProblem(answer.question, answer.reference))
        for earlier, text in ((asked.question, answer.question), (asked.reference, answer.reference)):
            if text and earlier and earlier != text:
                raise KvatlasError(f"{self.side} asks two questions as problem {answer.problem!r} of {self.task!r}.")
        asked.question = asked.question or answer.question
        asked.reference = asked.reference or answer.reference
        asked.prompts.add(answer.prompt)
        # A number that tells texts apart in this process; 0 for an empty one.
        fingerprint = answer.fingerprint or (hash(answer.text) if answer.text else 0)
        self.answers.append(answer._replace(fingerprint=fingerprint, asked="", text=""))

    def check(self) -> None:
        """Raise KvatlasError for a sample that stands twice, and for answers without any score."""
        counts = Counter((answer.problem, answer.sample) for answer in self.answers)
        repeated = len(self.answers) - len(counts)
        if repeated:
            places = {name: place for place, name in enumerate(self.asked)}
            twice = [name for name, count in counts.items() if count > 1]
            problem, sample = min(twice, key=lambda name: (places[name[0]], name[1]))
            raise KvatlasError(
                f"{self.side} has {repeated:,} answers of the task {self.task!r} twice (as sample {sample} of problem "
                f"{problem!r}): is it two logs in one file, or has the column of samples another name than 'sample'? "
                f"{len(counts):,} are distinct."
            )
        if all(math.isnan(answer.score) for answer in self.answers):
            raise KvatlasError(f"{self.side!r} has no score of the task {self.task!r}.")

    def by_question(self) -> dict[tuple[str, int], str]:
        """Return the problems by question; equal questions are numbered by their references and names."""
        named = [name for name, asked in self.asked.items() if asked.question]
        found = {}
        for question, names in grouped(named, lambda name: self.asked[name].question).items():
            for rank, name in enumerate(sorted(names, key=lambda name: (self.asked[name].reference, name))):
                found[question, rank] = name
        return found

    def units(self) -> dict[str, tuple[str, ...]]:
        """Return question, reference and prompts of each problem of which the question is known."""
        # Choices stand in the prompts.
        return {
            name: (asked.question, asked.reference, *sorted(asked.prompts))
            for name, asked in self.asked.items()
            if asked.question
        }

    def grid(self, problems: Sequence[str | None]) -> AnswerGrid:
        """Return the answers to these problems, None for one that is missing."""
        rows = {name: row for row, name in enumerate(problems)}
        samples, columns = np.unique([answer.sample for answer in self.answers], return_inverse=True)
        places = ([rows[answer.problem] for answer in self.answers], columns)

        def table(values: Iterable[Any], kind: Any, missing: object) -> NDArray[Any]:
            filled = np.full((len(problems), len(samples)), missing, kind)
            filled[places] = np.array(list(values), kind)
            return filled

        scores = table((answer.score for answer in self.answers), np.float64, np.nan)
        lengths = table((answer.length for answer in self.answers), np.float64, np.nan)
        statuses = table((_STATUSES.index(answer.status) for answer in self.answers), np.int8, 0)
        fingerprints = table((answer.fingerprint for answer in self.answers), np.int64, 0)
        return AnswerGrid(self.side, self.task, scores, lengths, statuses, fingerprints, problems, samples.tolist())


def pair_answers(before: Side, after: Side, allow: Collection[str] = ()) -> PairedAnswers:
    """Return the pairs of two sides.

    Raises KvatlasError for sides that do not answer the same questions, and for differences that change a question or
    its grade unless they are allowed.
    """
    unsupported = next((word for word in allow if word not in ALLOWED), None)
    if unsupported is not None:
        raise KvatlasError(f"--allow {unsupported}: expected {', '.join(ALLOWED)}, each with its own --allow.")
    first = _answers_by_task(before)
    second = _answers_by_task(after)
    notes = [note for note in before.notes if note in after.notes]
    for side in (before, after):
        notes += [f"{side.name}: {note}" for note in side.notes if note not in notes]

    # The tasks of the first side, with their names on the second.
    names = {task: task for task in first}
    if first.keys() != second.keys():
        names = _renamed_task(first, second)
        notes += [
            f"{task} is called {name} by {after.name}; the questions are the same" for task, name in names.items()
        ]
    if not names:
        for side, tasks_of_side, others in ((after, second, first), (before, first, second)):
            lacking = others.keys() - tasks_of_side.keys()
            if lacking:
                shared = sorted(first.keys() & second.keys())
                hint = f"it has {', '.join(tasks_of_side)}: a task needs one name on both sides"
                hint = f"name those of both with --task: {', '.join(shared)}" if shared else hint
                raise KvatlasError(f"{side.name!r} lacks the task {', '.join(sorted(lacking))}; {hint}.")

    differences, sampling, unknown = compare_cards(before.cards, after.cards, names)
    check_allowed(differences, allow)
    if before.kind != after.kind:
        differences.insert(0, ConditionDifference("kind of log", before.kind, after.kind))

    tasks = []
    for task, other in names.items():
        clusters = {**after.clusters.get(other, {}), **before.clusters.get(task, {})}
        pairs = _pair_task(first[task], second[other], clusters, allow)
        tasks.append(pairs)
        notes += _task_notes(pairs)
    if "missing" not in allow:
        for pairs in tasks:
            _check_missing(pairs)

    problems = sum(len(task.losses) for task in tasks)
    counts = {"questions": sum(task.by_name for task in tasks), "prompts": sum(task.no_prompt for task in tasks)}
    for condition, count in counts.items():
        if count:
            share = "" if count == problems else f" of {count:,} of {problems:,} problems"
            unknown.append(ConditionDifference(f"{condition}{share}", UNKNOWN, UNKNOWN))
    if before.begun and after.begun and before.begun[:19] > after.begun[:19]:
        notes.append(
            f"before was made after the other side ({before.begun[:19]}, {after.begun[:19]}): are they swapped?"
        )
    has_equal_texts = all(np.array_equal(task.before.fingerprints, task.after.fingerprints) for task in tasks)
    if before.begun and before.begun == after.begun and has_equal_texts:
        notes.append(f"both logs are of {before.begun[:19]}: is one a copy of the other?")
    return PairedAnswers(before, after, tasks, differences, list(dict.fromkeys(notes)), sampling, unknown)


def _answers_by_task(side: Side) -> dict[str, _TaskAnswers]:
    tasks: dict[str, _TaskAnswers] = {}
    for answer in side.read():
        if answer.task not in tasks:
            tasks[answer.task] = _TaskAnswers(side.name, answer.task)
        tasks[answer.task].add(answer)
    if not tasks:
        raise KvatlasError(f"{side.name!r} has no answers.")
    for answers in tasks.values():
        answers.check()
    return tasks


def _renamed_task(first: Mapping[str, _TaskAnswers], second: Mapping[str, _TaskAnswers]) -> dict[str, str]:
    """Return the only task of each side if both ask the same questions under unlike names, else {}."""
    if len(first) == len(second) == 1:
        for task, other in zip(first, second, strict=True):
            if first[task].by_question().keys() & second[other].by_question().keys():
                return {task: other}
    return {}


# -- problems ----------------------------------------------------------------------------------------------------------


def _pair_task(
    first: _TaskAnswers, second: _TaskAnswers, clusters: Mapping[str, str], allow: Collection[str]
) -> TaskPairs:
    """Return the pairs of one task, which the sides may call by unlike names.

    Problems are paired by their questions. Those of which a side has no text are paired by name.
    """
    task = first.task
    by_question = second.by_question()
    partners = {name: by_question[key] for key, name in first.by_question().items() if key in by_question}
    same_names = first.asked.keys() & second.asked.keys()
    if by_question and first.units() and not partners:
        named = f" ({len(same_names):,} of them have the same names)" if same_names else ""
        raise KvatlasError(
            f"The sides ask other questions of the task {task!r}: no question is the same{named}; give both sides the "
            "same problems, or where only their words differ no column of questions, so that names pair them."
        )

    free = same_names - partners.keys() - set(partners.values())
    by_name = [name for name in first.asked if name in free]
    by_name = [name for name in by_name if not (first.asked[name].question and second.asked[name].question)]
    if by_name:
        _check_names(first, second)
    partners |= dict(zip(by_name, by_name, strict=True))
    if not partners:
        ends = (
            f"the first is {next(iter(first.asked))!r} before and {next(iter(second.asked))!r} after; give each "
            "problem one name on both sides, in the column problem, or both sides their questions."
        )
        why = _alike_names(first.asked, second.asked) or ends
        raise KvatlasError(f"The sides have no problem of the task {task!r} in common: {why}")
    pairs = [(name, first.asked[name], second.asked[other]) for name, other in partners.items()]
    _check_same(task, pairs, allow)

    # Both grids have the problems of either side.
    paired = set(partners.values())
    lacking = [name for name in second.asked if name not in paired]
    problems = [*first.asked, *lacking]
    # Equal questions under several names are one unit, as problems of a named cluster are.
    units = {**second.units(), **first.units(), **{name: (cluster,) for name, cluster in clusters.items()}}
    before = first.grid([*first.asked, *(None for _ in lacking)])
    after = second.grid([*(partners.get(name) for name in first.asked), *lacking])
    no_prompt = sum("" in asked.prompts or "" in other.prompts for _, asked, other in pairs)
    problem_clusters = cluster_numbers([units.get(name, name) for name in problems])
    return TaskPairs(task, problems, before, after, len(by_name), no_prompt, problem_clusters)


def _check_names(first: _TaskAnswers, second: _TaskAnswers) -> None:
    """Raise KvatlasError if problems are numbered, and the numbers of a side are those of the other one, shifted."""
    numbers = []
    for side in (first, second):
        matches = [re.fullmatch(r"(.*?)(\d+)", name) for name in side.asked]
        if None in matches or len({match[1] for match in matches if match is not None}) > 1:
            return
        numbers.append([int(match[2]) for match in matches if match is not None])
    ends = [(min(of_side), max(of_side)) for of_side in numbers]
    if (ends[0][0] - ends[1][0]) * (ends[0][1] - ends[1][1]) > 0:
        raise KvatlasError(
            f"Problems of {first.task!r} are numbered from {ends[0][0]} to {ends[0][1]} before and from {ends[1][0]} "
            f"to {ends[1][1]} after, and a side has no text of their questions: names alone would pair other "
            "questions. Number them alike, or give both sides a column 'question'."
        )


def _check_same(task: str, pairs: Sequence[tuple[str, _AskedProblem, _AskedProblem]], allow: Collection[str]) -> None:
    """Raise KvatlasError if pairs have other references, or were put in other words, as far as both logs know."""
    regraded = []
    reworded = []
    for name, before, after in pairs:
        if before.reference and after.reference and before.reference != after.reference:
            regraded.append(name)
        prompts = (before.prompts - {""}, after.prompts - {""})
        if all(prompts) and prompts[0] != prompts[1]:
            reworded.append(name)

    if regraded and "grading" not in allow:
        raise KvatlasError(
            f"{len(regraded):,} of {len(pairs):,} problems of {task!r} have another reference (as {regraded[0]!r}): "
            "they are other questions, or their answers were corrected. --allow grading compares them."
        )
    if reworded and "prompts" not in allow:
        raise KvatlasError(
            f"{len(reworded):,} of {len(pairs):,} questions of the task {task!r} were put in other words (as problem "
            f"{reworded[0]!r}): other examples, another template or another system message. --allow prompts compares "
            "them."
        )


def _task_notes(pairs: TaskPairs) -> list[str]:
    """Return notes on problems that are one unit, on unequal numbers of samples, and on missing answers."""
    notes = []
    if pairs.clusters is not None:
        units = len(set(pairs.clusters.tolist()))
        notes.append(
            f"{pairs.task} has {len(pairs.problems):,} problems with {units:,} questions or passages: the units of the "
            "claim on problems like these"
        )
    before, after = pairs.samples
    if before != after:
        notes.append(
            f"{pairs.task} has {before} samples of a problem before and {after} after: means over all are compared"
        )
    for grid in (pairs.before, pairs.after):
        if grid.missing:
            lacking = f"{grid.side} lacks {grid.missing:,} of {grid.scores.size:,} answers of {pairs.task}"
            notes.append(f"{lacking}; they count as the worst case")
    return notes


def _check_missing(pairs: TaskPairs) -> None:
    """Raise KvatlasError if too many answers of a task are missing."""
    is_missing = np.isnan(pairs.losses)
    if is_missing.sum() <= MOST_MISSING * is_missing.size:
        return
    lacking = []
    unpaired = []
    for grid in (pairs.before, pairs.after):
        unpaired.append([pairs.problems[row] for row, name in enumerate(grid.names) if name is None])
        if grid.missing:
            rows = np.flatnonzero(np.isnan(grid.scores).any(1))[:NAMED]
            problems = ", ".join(pairs.problems[row] for row in rows)
            answers = f"{grid.missing:,} of {grid.scores.size:,} answers"
            lacking.append(f"{grid.side!r} lacks {answers} (as problem {problems})")

    # What a side lacks has the name that the other gives it.
    alike = _alike_names(unpaired[1], unpaired[0])
    raise KvatlasError(
        f"Of the task {pairs.task!r}, {' and '.join(lacking)}: "
        f"{alike or 'a log is unfinished, has no score there, or was made of fewer problems.'} At most 5 % may be "
        "missing; --allow missing counts them as the worst case and gives no verdict."
    )


def _alike_names(before: Iterable[str], after: Iterable[str]) -> str:
    """Return as a sentence that names which one side has differ in spelling alone, with the way out, or ""."""
    first = {_plain_name(name): name for name in before}
    second = {_plain_name(name): name for name in after}
    alike = min(first.keys() & second.keys(), default="")
    if not alike:
        return ""
    return (
        f"problems as {first[alike]!r} and {second[alike]!r} differ by case, spaces or leading zeros alone. Use the "
        "same `problem` on both sides, or add the column `question`, by which they are paired."
    )


def _plain_name(name: str) -> str:
    # 007 is 7, and 100 stays.
    return re.sub(r"(?<!\d)0+(?=\d)|\s", "", name).casefold()
