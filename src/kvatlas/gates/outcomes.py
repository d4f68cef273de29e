"""A side of a comparison: graded answers, and all that may have changed them; that of logs of one task each."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.core import KvatlasError, Status, grouped
from kvatlas.gates.cards import MOST_NEW_TOKENS, NONE, UNKNOWN, Card, is_drawn, shared_card

#: The name of an answer in its log: task, problem, sample.
AnswerName = tuple[str, str, int]
#: A question and the text of an answer to it.
AnswerTexts = tuple[str, str]


class GradedAnswer(NamedTuple):
    """One answer with its score.

    `question`, `reference` and `prompt` (all that the model read) are digests, empty where the log does not have these.
    `score` is in [0, 1], NaN for an answer that the log lacks. `status` tells how the answer ended, whatever its score
    is. `length` is counted in the unit of the side, NaN if unknown. `asked` and `text` are the texts of question and
    answer, and `fingerprint` tells answers apart where the text is not all of them; 0 stands for that of the text.
    """

    task: str
    problem: str
    sample: int
    score: float
    question: str = ""
    reference: str = ""
    prompt: str = ""
    status: Status = Status.OK
    length: float = float("nan")
    asked: str = ""
    text: str = ""
    fingerprint: int = 0


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    `cards` name, for each task, what may change an answer besides its question. `endings_known` says that the log
    tells truncated answers from others. `read` returns all answers, `stored_texts` the texts of some of them where
    `read` leaves them out. `independent` is True for samples drawn apart at a temperature above 0, False for greedy
    ones, None if unknown. `may_copy` is False where samples are known to have random numbers of their own, so that
    equal texts are no copies. `begun` is the time of the log, as text that sorts. `sources` are the files or cells
    that were read: two sides have none in common.
    """

    name: str
    kind: str
    read: Callable[[], Iterable[GradedAnswer]]
    cards: Mapping[str, Card] = field(default_factory=dict)
    length_unit: str = ""
    endings_known: bool = False
    independent: bool | None = None
    may_copy: bool = True
    begun: str = ""
    sources: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    #: What problems share with others, by task and problem.
    clusters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stored_texts: Callable[[Collection[AnswerName]], Mapping[AnswerName, AnswerTexts]] | None = None

    @property
    def token_limit(self) -> str:
        """The limit of new tokens that the cards name, "" without one."""
        limits = dict.fromkeys((card.sampling or {}).get(MOST_NEW_TOKENS) for card in self.cards.values())
        return " or ".join(limit for limit in limits if limit)

    def texts(self, names: Collection[AnswerName]) -> Mapping[AnswerName, AnswerTexts]:
        """Return question and text of some answers, as far as the log has them."""
        if self.stored_texts is not None:
            return self.stored_texts(names)
        requested = set(names)
        answers = (answer for answer in self.read() if answer[:3] in requested and answer.text)
        return {answer[:3]: (answer.asked, answer.text) for answer in answers}


@dataclass(frozen=True)
class SideOptions:
    """The choices of a user among what logs hold; empty ones stand for the first, or for all tasks.

    `allow` are the differences that are accepted (`cards.ALLOWED`).
    """

    metric: str = ""
    filter: str = ""
    tasks: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def has_task(self, task: str) -> bool:
        """Return whether a task is compared."""
        return not self.tasks or task in self.tasks

    def check_tasks(self, side: str, tasks: Iterable[str]) -> None:
        """Raise KvatlasError if a side lacks a task that is compared."""
        found = dict.fromkeys(tasks)
        lacking = ", ".join(task for task in self.tasks if task not in found)
        if lacking:
            raise KvatlasError(f"{side!r} has no task {lacking!r}; there are: {', '.join(found)}.")


def digest_of(*values: Any) -> str:
    """Return a digest of plain data."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def reference_digest(reference: Any) -> str:
    """Return the digest of a reference: 8, 8.0 and "8" are one; "" for a missing one."""
    if reference is None or reference == "":
        return ""
    return digest_of(re.sub(r"^(-?\d+)\.0+$", r"\1", str(reference).strip()))


def file_sources(files: Iterable[Path]) -> frozenset[str]:
    """Return what identifies files themselves, whatever they are called and whatever links lead to them."""
    return frozenset(f"{about.st_dev}:{about.st_ino}" for about in map(Path.stat, files))


# -- logs of one task each ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskLog:
    """A log of one task.

    `begun` is its time as text that sorts, `run` tells which run it is of. `read` yields its answers, `samples` of each
    problem, whose numbers begin with the given one.
    """

    path: Path
    task: str
    begun: str
    run: str
    card: Card
    samples: int
    read: Callable[[int], Iterable[GradedAnswer]]
    notes: Sequence[str] = ()


def side_of_logs(logs: Iterable[TaskLog], name: str, kind: str, length_unit: str, endings_known: bool = False) -> Side:
    """Return the side of logs. Raises KvatlasError for logs of a task that are no samples of one thing."""
    ordered = sorted(logs, key=lambda log: log.begun)
    by_task = grouped(ordered, lambda log: log.task)
    cards = {}
    tasks_by_note: dict[str, list[str]] = {}
    for task, of_task in by_task.items():
        cards_of_logs = {log.path.name: log.card for log in of_task}
        cards[task] = shared_card(cards_of_logs, [log.run for log in of_task], f"{name!r} ({task})")
        for note in of_task[0].notes:
            tasks_by_note.setdefault(note, []).append(task)

    # Several logs of one seed are perhaps one draw.
    has_one_seed = any(
        len(by_task[task]) > 1 and card.entry("seed") not in (NONE, UNKNOWN) for task, card in cards.items()
    )

    def read() -> Iterator[GradedAnswer]:
        for of_task in by_task.values():
            begin = 0
            for log in of_task:
                yield from log.read(begin)
                begin += log.samples

    return Side(
        name,
        kind,
        read,
        cards,
        length_unit,
        endings_known,
        independent=None if has_one_seed else is_drawn(cards.values()),
        begun=ordered[0].begun,
        sources=file_sources(log.path for log in ordered),
        notes=tuple(f"{', '.join(tasks)}: {note}" for note, tasks in tasks_by_note.items()),
    )
