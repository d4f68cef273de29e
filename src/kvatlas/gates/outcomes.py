"""A side of a comparison: graded answers, and all that may have changed them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.core import KvatlasError

#: The name of an answer in its log: task, problem, sample.
AnswerName = tuple[str, str, int]
#: A question and the text of an answer to it.
AnswerTexts = tuple[str, str]


class GradedAnswer(NamedTuple):
    """One answer with its score.

    `content` is a digest of question and reference, `prompt` one of all that the model read, `fingerprint` one of the
    text; they are empty or 0 where the log does not have these. `score` is in [0, 1], NaN for an answer that the log
    lacks. `ending` is `truncated`, `no answer` or empty. `length` is counted in the unit of the side, NaN if unknown.
    """

    task: str
    problem: str
    sample: int
    score: float
    content: str = ""
    prompt: str = ""
    fingerprint: int = 0
    ending: str = ""
    length: float = float("nan")


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    `conditions` name, for each task, what may change an answer besides its question. `endings_known` says that the
    log tells truncated answers from others. `texts` returns the texts of some answers, `read` all answers.
    `independent` is True for samples drawn apart at a temperature above 0, False for greedy ones, None if unknown.
    `may_copy` is False where samples are known to have random numbers of their own, so that equal texts are no copies.
    `begun` is the time of the log, as text that sorts. Sides of one `identity` are the same log or cell.
    """

    name: str
    kind: str
    read: Callable[[], Iterable[GradedAnswer]]
    texts: Callable[[Collection[AnswerName]], Mapping[AnswerName, AnswerTexts]]
    conditions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    length_unit: str = ""
    endings_known: bool = False
    independent: bool | None = None
    may_copy: bool = True
    begun: str = ""
    identity: str = ""
    notes: tuple[str, ...] = ()
    #: What problems share with others, by task and problem.
    clusters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class SideOptions:
    """The choices of a user among what logs hold; empty ones stand for the first, or for all tasks."""

    metric: str = ""
    filter: str = ""
    tasks: tuple[str, ...] = ()

    def has_task(self, task: str) -> bool:
        """Return whether a task is compared."""
        return not self.tasks or task in self.tasks


def digest_of(*values: Any) -> str:
    """Return a digest of plain data."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def fingerprint_of(text: str) -> int:
    """Return a number that tells texts apart in this process; 0 for an empty one."""
    return hash(text) if text else 0


def score_of(value: Any, where: str) -> float:
    """Return a score in [0, 1], NaN for a missing one; KvatlasError for any other value."""
    if value is None or value == "":
        return float("nan")
    if isinstance(value, str):
        value = _WORDS.get(value.strip().lower(), value)
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if share != share or 0 <= share <= 1:
        return share
    raise KvatlasError(f"{where} is {str(value)[:60]!r}; expected a score from 0 to 1, or true and false.")


_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


def file_digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, whatever their names."""
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "blake2b").hexdigest())
    return " ".join(sorted(digests))
