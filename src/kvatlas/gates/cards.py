"""The identity card of a side for a task, and the one place where two cards are compared.

An entry is a value, `NONE` (the log says that it was not set) or `UNKNOWN` (the log does not say). A value against
`NONE` differs; what is unknown on a side is not compared, and is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from kvatlas.core import KvatlasError, digest

NONE = "none"
UNKNOWN = "unknown"
#: Entries that every card answers, if only by `UNKNOWN`, with the word that allows them to differ where they change a
#: question or its grade. Questions and prompts are compared row by row (pairing.py).
ENTRIES: Mapping[str, str | None] = {
    "model": None,
    "task version": "version",
    "task arguments": "version",
    "few-shot examples": "prompts",
    "system message": "prompts",
    "solver": None,
    "metric": "grading",
    "filter": "grading",
    "grading rules": "grading",
}
#: Further entries of this kind, which some cards have.
_FURTHER = {"scorer options": "grading", "models of roles": "grading"}
#: Further entries of which a difference is told first, as one of sampling is.
TOLD_FIRST = ("solver", "solver parameters")
#: What can be allowed.
ALLOWED = ("prompts", "version", "grading", "missing")
#: The limit of an answer, by which truncated answers are explained.
MOST_NEW_TOKENS = "most new tokens"
#: The longest value that is printed; a longer one ends with its digest.
_LONGEST = 120


class ConditionDifference(NamedTuple):
    """A condition that differs between the sides, or is unknown on one; `task` is the first of some tasks alone."""

    condition: str
    before: str
    after: str
    task: str = ""

    @property
    def is_unknown(self) -> bool:
        """Return whether a side does not tell it."""
        return UNKNOWN in (self.before, self.after)

    @property
    def is_open(self) -> bool:
        """Return whether the sides are not known to be equal in it."""
        return self.before != self.after or self.is_unknown

    @property
    def name(self) -> str:
        """The condition, with the task that it is of."""
        return f"{self.condition} of {self.task}" if self.task else self.condition

    def to_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return {"condition": self.name, "before": self.before, "after": self.after}

    def __str__(self) -> str:
        """Return name and values as a clause."""
        return f"{self.name} {self.before} before, {self.after} after"


@dataclass(frozen=True)
class Card:
    """The conditions of one task besides its answers, as a log says them.

    `sampling` are the settings of a generation, None if they are unknown; what it lacks was not set. `entries` are all
    others; what they lack is unknown, or `NONE` on a card that is `complete`.
    """

    entries: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, str] | None = None
    complete: bool = False

    def entry(self, name: str) -> str:
        """Return the value of an entry, `NONE` or `UNKNOWN`."""
        return self.entries.get(name, NONE if self.complete else UNKNOWN)

    def sampling_text(self) -> str:
        """Return the settings of the generation in a line, `NONE` or `UNKNOWN`."""
        if self.sampling is None:
            return UNKNOWN
        return ", ".join(f"{name} {value}" for name, value in self.sampling.items()) or NONE

    def compare(self, other: Card) -> tuple[list[ConditionDifference], list[ConditionDifference]]:
        """Return the entries and the settings of the generation that are not known to be equal on both cards."""
        names = dict.fromkeys((*ENTRIES, *self.entries, *other.entries))
        entries = [ConditionDifference(name, self.entry(name), other.entry(name)) for name in names]
        if self.sampling is None or other.sampling is None:
            sampling = [ConditionDifference("sampling", self.sampling_text(), other.sampling_text())]
        else:
            sampling = [
                ConditionDifference(name, self.sampling.get(name, NONE), other.sampling.get(name, NONE))
                for name in dict.fromkeys((*self.sampling, *other.sampling))
            ]
        return [row for row in entries if row.is_open], [row for row in sampling if row.is_open]


def entry_text(value: Any) -> str:
    """Return plain data as the value of an entry; empty data are `NONE`."""
    if value is None or value in ("", [], {}):
        return NONE
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({digest(text)[:8]})"


def card_entries(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of plain data by name."""
    return {name: entry_text(value) for name, value in values.items()}


def is_drawn(cards: Collection[Card]) -> bool | None:
    """Return whether all answers were drawn at a temperature above 0, None if that of one is unknown."""
    temperatures = [(card.sampling or {}).get("temperature") for card in cards]
    if any(temperature is not None and "0" in temperature.split(" and ") for temperature in temperatures):
        return False
    return None if None in temperatures else True


def shared_card(cards: Mapping[str, Card], runs: Sequence[str], where: str) -> Card:
    """Return the card of several logs of one task, by their names, which are samples of one thing.

    `runs` tell which run a log is of. Raises KvatlasError for logs of unlike conditions (seeds may differ), for greedy
    ones, and for two of one run. The seed stays on the card if it is the same in all.
    """
    names = list(cards)
    first = cards[names[0]]
    if len(cards) == 1:
        return first
    seeds = {card.entry("seed") for card in cards.values()}
    for name in names[1:]:
        for row in chain(*first.compare(cards[name])):
            if row.before != row.after and row.condition != "seed":
                raise KvatlasError(
                    f"{where} holds logs of one task under unlike conditions: {row.condition} is {row.before!r} in "
                    f"{names[0]} and {row.after!r} in {name}. Name one of them."
                )

    is_greedy = is_drawn([first]) is False
    if is_greedy or len(set(runs)) < len(names):
        why = "at temperature 0" if is_greedy else "of one run"
        raise KvatlasError(
            f"{where} holds {len(cards)} logs of one task {why} ({', '.join(names)}), which are no samples: one is an "
            "older run, or a copy. Name one of them."
        )
    if len(seeds) == 1:
        return first
    return replace(first, entries={name: value for name, value in first.entries.items() if name != "seed"})


def compare_cards(
    before: Mapping[str, Card], after: Mapping[str, Card], tasks: Mapping[str, str]
) -> tuple[list[ConditionDifference], list[ConditionDifference], list[ConditionDifference]]:
    """Return all differences of two sides, those of sampling and what is told with it, and what is unknown.

    `tasks` map names of tasks before to those after. A difference of some tasks alone is named after the first of them.
    """
    tasks_by_row: dict[tuple[int, ConditionDifference], list[str]] = {}
    for task, other in tasks.items():
        for kind, rows in enumerate(before.get(task, Card()).compare(after.get(other, Card()))):
            for row in rows:
                tasks_by_row.setdefault((2 if row.is_unknown else kind, row), []).append(task)

    entries: list[ConditionDifference] = []
    sampling: list[ConditionDifference] = []
    unknown: list[ConditionDifference] = []
    for (kind, row), of_row in tasks_by_row.items():
        is_of_all = len(of_row) == len(tasks)
        (entries, sampling, unknown)[kind].append(row if is_of_all else row._replace(task=of_row[0]))
    told_first = [row for row in entries if row.condition in TOLD_FIRST]
    return [*entries, *sampling], [*told_first, *sampling], unknown


def check_allowed(differences: Collection[ConditionDifference], allow: Collection[str]) -> None:
    """Raise KvatlasError for a difference that changes a question or its grade, unless it is allowed."""
    for row in differences:
        word = ENTRIES.get(row.condition) or _FURTHER.get(row.condition)
        if word is not None and word not in allow:
            raise KvatlasError(
                f"The sides differ in {row.name} ({row.before!r} before, {row.after!r} after), which changes what is "
                f"compared; --allow {word} compares them all the same."
            )


# -- metrics -----------------------------------------------------------------------------------------------------------

#: Words of metrics of which more is better, of those of which less is, and words that change neither.
_MORE = re.compile(
    r"acc|accuracy|bleu|chrf|correct|em|exact|f1|includes|match|mc[12]|mcc|pass|passed|passes|precision|recall|right|"
    r"rouge(\d|l|lsum)?|solved|success|verify"
)
_LESS = re.compile(
    r"bias|brier|cer|cost|distance|errors?|fail|failed|failures?|hallucinations?|harm|harmful|incorrect|latency|loss|"
    r"mae|mse|nll|perplexity|ppl|regret|rmse|stereotype|ter|toxic|toxicity|unsafe|wer|wrong"
)
_EITHER = re.compile(
    r"\d*|all|answer|at|avg|bytes|flexible|graded|info|inst|is|k|level|loose|macro|math|max|mean|micro|model|mutual|norm|"
    r"normalized|numbers|of|prompt|qa|quasi|score|strict"
)


def more_is_better(metric: str) -> bool | None:
    """Return whether more of a metric is better by the words of its name, None if they do not tell.

    One unknown word is enough to turn the others: `attack_success`, `not_correct`.
    """
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(map(_LESS.fullmatch, words)):
        return False
    is_known = all(_MORE.fullmatch(word) or _EITHER.fullmatch(word) for word in words)
    return True if is_known and any(map(_MORE.fullmatch, words)) else None


def check_direction(metric: str, task: str, allow: Collection[str], higher: Any = None) -> None:
    """Raise KvatlasError for a metric of which less is better, or of which that is unknown.

    `higher` says whether more is better where it is True or False, else the name of the metric does.
    """
    is_better = higher if isinstance(higher, bool) else more_is_better(metric)
    if is_better is False:
        raise KvatlasError(f"Of {metric!r} of {task} less is better; name a metric of right answers with --metric.")
    if is_better is None and "grading" not in allow:
        raise KvatlasError(
            f"Nothing says whether more of {metric!r} of {task} is better, neither its name nor a results file beside "
            "the log; --allow grading counts it as right answers."
        )
