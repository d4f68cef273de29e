"""A maze as its facts state it: the sentences, written and read (wording of seqBench, arXiv 2509.16866).

Walls are not stated: what no sentence joins is not joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvatlas.core import KvatlasError

AGENT, TARGET = "Bob", "Alice"


@dataclass(frozen=True)
class Maze:
    """What the facts state. Doors join two rooms; a locked one names its key; `keys` says which room holds which."""

    open_doors: tuple[tuple[str, str], ...]
    locked_doors: tuple[tuple[str, str, str], ...]
    keys: tuple[tuple[str, str], ...]
    start: str
    goal: str

    @cached_property
    def doors(self) -> Mapping[str, Mapping[str, str | None]]:
        """Room -> neighbouring room -> the key of the door between them, None for an open door."""
        doors: dict[str, dict[str, str | None]] = {self.start: {}, self.goal: {}}
        ways: list[tuple[str, str, str | None]] = [(a, b, None) for a, b in self.open_doors]
        for a, b, key in [*ways, *self.locked_doors]:
            doors.setdefault(a, {})[b] = key
            doors.setdefault(b, {})[a] = key
        return doors

    @property
    def rooms(self) -> tuple[str, ...]:
        """All rooms that a fact names, in order of first mention."""
        return tuple(self.doors)


def open_door(a: str, b: str) -> str:
    """An open door between two neighbouring rooms."""
    return f"Room {a} and {b} are connected by an open door."


def locked_door(a: str, b: str, key: str) -> list[str]:
    """A locked door and the key that it requires: two sentences."""
    return [
        f"Room {a} and {b} are connected by a closed and locked door.",
        f"The locked door between {a} and {b} requires key {key}.",
    ]


def key_in(key: str, room: str) -> str:
    """Where a key lies."""
    return f"Key {key} is in room {room}."


def person_in(person: str, room: str) -> str:
    """Where Bob is at first, or Alice."""
    return f"{person} is in room {room}."


_ROOM = r"([A-Z]+\d+)"
_SENTENCES = {
    "open": re.compile(rf"Room {_ROOM} and {_ROOM} are connected by an open door\."),
    "locked": re.compile(rf"Room {_ROOM} and {_ROOM} are connected by a closed and locked door\."),
    "requires": re.compile(rf"The locked door between {_ROOM} and {_ROOM} requires key (\d+)\."),
    "key": re.compile(rf"Key (\d+) is in room {_ROOM}\."),
    "start": re.compile(rf"{AGENT} is in room {_ROOM}\."),
    "goal": re.compile(rf"{TARGET} is in room {_ROOM}\."),
}


def read_maze(sentences: Iterable[str]) -> Maze:
    """The maze that facts state, in any order. KvatlasError quotes the sentence that is none of the six kinds."""
    facts: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in _SENTENCES}
    for sentence in sentences:
        for kind, pattern in _SENTENCES.items():
            if match := pattern.fullmatch(sentence.strip()):
                facts[kind].append(match.groups())
                break
        else:
            raise KvatlasError(f"{sentence.strip()[:80]!r} is no fact of a seqBench maze.")
    if len(facts["start"]) != 1 or len(facts["goal"]) != 1:
        raise KvatlasError(f"The facts of a seqBench maze say once where {AGENT} is and once where {TARGET} is.")
    key_of = {frozenset((a, b)): key for a, b, key in facts["requires"]}
    return Maze(
        open_doors=tuple((a, b) for a, b in facts["open"]),
        # A door whose key no fact names stays shut for ever: no key is called "".
        locked_doors=tuple((a, b, key_of.get(frozenset((a, b)), "")) for a, b in facts["locked"]),
        keys=tuple((key, room) for key, room in facts["key"]),
        start=facts["start"][0][0],
        goal=facts["goal"][0][0],
    )
