"""The autopsies of a run: one line each of a file beside the run's store."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvatlas.autopsy.lost_answers import LostAnswer
from kvatlas.results.store import lock

#: Rises with every change of the search: autopsies of another version are made again.
VERSION = 5
#: The file of a run's autopsies.
FILE = "autopsy.jsonl"


@dataclass(frozen=True)
class SavingToken:
    """A token whose return restores the answer, with others.

    `distance` counts the tokens from it to the compression that evicted it, `rank` the competing tokens with higher
    scores there, of which `slots` stay; `evicted` is the number of tokens that this compression evicted.
    """

    position: int
    text: str
    distance: int
    rank: float
    slots: int
    evicted: int


@dataclass
class Autopsy:
    """The autopsy of one lost answer.

    `reproduced` is False if decoding again gave other tokens than the stored ones; then nothing was tried. `tokens` are
    the smallest set found, empty without one. Of `spans` tried, `saving` restored the answer. `random` has for each
    random set of as many tokens at like distances whether it does. `full` tells whether the answer is right if no
    compression takes place until the death; None if nothing was tried.

    `held_out` has for each of the arms (`summary.ARMS`) whether the answer is right under each of the held-out random
    streams.
    """

    key: tuple[str, ...]
    death: str
    token: int | None
    reproduced: bool = False
    tokens: tuple[SavingToken, ...] = ()
    spans: int = 0
    saving: int = 0
    replays: int = 1
    random: tuple[bool, ...] = ()
    full: bool | None = None
    held_out: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    version: int = VERSION

    @property
    def problem(self) -> str:
        """The id of the problem."""
        return self.key[3]


def key_of(lost: LostAnswer) -> tuple[str, ...]:
    """Return the key of a lost answer as texts."""
    return tuple(map(str, lost.key))


def read_autopsies(folder: Path) -> dict[tuple[str, ...], Autopsy]:
    """Return the autopsies of a run by the key of their trace; a line that was not written to its end is left out."""
    from pydantic import TypeAdapter

    path = folder / FILE
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ():
        if line.endswith("\n") and f'"version": {VERSION}' in line:
            autopsy = TypeAdapter(Autopsy).validate_json(line)
            found[autopsy.key] = autopsy
    return found


@contextmanager
def writing(folder: Path) -> Iterator[Callable[[Autopsy], None]]:
    """Give a function that writes an autopsy to the disk; no other process changes the run meanwhile."""
    path = folder / FILE
    held = lock(folder)
    try:
        content = path.read_bytes() if path.is_file() else b""
        with path.open("ab") as file:
            # A killed process may have left half a line at the end.
            file.truncate(content.rfind(b"\n") + 1)

            def add(autopsy: Autopsy) -> None:
                file.write(json.dumps(asdict(autopsy)).encode() + b"\n")
                file.flush()

            yield add
    finally:
        if held is not None:
            held.release()


def token_kind(text: str) -> str:
    """Return the kind of a token by its text: digits, a letter, a word, a sign, or white space."""
    stripped = text.strip()
    if not stripped:
        return "white space"
    if stripped.isdigit():
        return "digits"
    if stripped.isalpha():
        return "letter" if len(stripped) == 1 else "word"
    return "sign" if not any(character.isalnum() for character in stripped) else "mixed"
