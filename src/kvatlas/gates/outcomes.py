"""A side of a comparison: graded answers, and all that may have changed them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.core import KvatlasError
from kvatlas.gates.cards import Card

#: The name of an answer in its log: task, problem, sample.
AnswerName = tuple[str, str, int]
#: A question and the text of an answer to it.
AnswerTexts = tuple[str, str]


class GradedAnswer(NamedTuple):
    """One answer with its score.

    `question`, `reference` and `prompt` (all that the model read) are digests, `fingerprint` is one of the text; they
    are empty or 0 where the log does not have these. `score` is in [0, 1], NaN for an answer that the log lacks.
    `ending` is `truncated`, `no answer` or empty. `length` is counted in the unit of the side, NaN if unknown.
    """

    task: str
    problem: str
    sample: int
    score: float
    question: str = ""
    reference: str = ""
    prompt: str = ""
    fingerprint: int = 0
    ending: str = ""
    length: float = float("nan")


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    `cards` name, for each task, what may change an answer besides its question. `endings_known` says that the log
    tells truncated answers from others. `texts` returns the texts of some answers, `read` all answers. `independent` is
    True for samples drawn apart at a temperature above 0, False for greedy ones, None if unknown. `may_copy` is False
    where samples are known to have random numbers of their own, so that equal texts are no copies. `mean_of` is the
    number of responses of which each score of a task is the mean. `begun` is the time of the log, as text that sorts.
    `sources` are the files or cells that were read: two sides have none in common.
    """

    name: str
    kind: str
    read: Callable[[], Iterable[GradedAnswer]]
    texts: Callable[[Collection[AnswerName]], Mapping[AnswerName, AnswerTexts]]
    cards: Mapping[str, Card] = field(default_factory=dict)
    length_unit: str = ""
    endings_known: bool = False
    independent: bool | None = None
    may_copy: bool = True
    mean_of: Mapping[str, int] = field(default_factory=dict)
    begun: str = ""
    sources: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    #: What problems share with others, by task and problem.
    clusters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


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


def digest_of(*values: Any) -> str:
    """Return a digest of plain data."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def fingerprint_of(text: str) -> int:
    """Return a number that tells texts apart in this process; 0 for an empty one."""
    return hash(text) if text else 0


def reference_digest(reference: Any) -> str:
    """Return the digest of a reference: 8, 8.0 and "8" are one; "" for a missing one."""
    if reference is None or reference == "":
        return ""
    return digest_of(re.sub(r"^(-?\d+)\.0+$", r"\1", str(reference).strip()))


def score_of(value: Any, where: str) -> float:
    """Return a score in [0, 1], NaN for a missing one; KvatlasError for any other value."""
    if value is None or value == "":
        return float("nan")
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


_WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


def file_sources(files: Iterable[Path]) -> frozenset[str]:
    """Return what identifies files themselves, whatever they are called and whatever links lead to them."""
    found = set()
    for file in files:
        about = file.stat()
        found.add(f"{about.st_dev}:{about.st_ino}")
    return frozenset(found)
