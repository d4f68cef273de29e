"""Expressions compared by math-verify, in a pool of killable processes with limits on time and memory."""

from __future__ import annotations

import threading
from enum import Enum

from kvatlas.killable import Programs

#: Seconds for one comparison, and bytes of address space of a process.
SECONDS, MEMORY = 5, 2 * 2**30


class Verdict(Enum):
    """What came of a comparison; `timeout` also where memory ran out."""

    EQUAL = True
    UNEQUAL = False
    TIMEOUT = None


class Judges(Programs):
    """Processes that compare, at most `size` of them."""

    def __init__(self, size: int = 2, seconds: int = SECONDS, memory: int = MEMORY) -> None:
        super().__init__(
            "kvatlas.benchmarks.verifier",
            seconds,
            memory,
            size=size,
            seconds=seconds,
            probe=["1", "1"],
            missing="Answers cannot be compared: the process that runs math-verify does not start.",
        )

    def compare(self, first: str, second: str) -> Verdict:
        """Whether two expressions (LaTeX without dollar signs, or plain) are equal."""
        try:
            return Verdict(self.ask([first, second]))
        except TimeoutError:
            return Verdict.TIMEOUT

    def read(self, reference: str, text: str) -> Verdict:
        """Whether math-verify finds the reference in a text, whatever it takes for the text's answer."""
        try:
            return Verdict(self.ask([reference, text, "read"]))
        except TimeoutError:
            return Verdict.TIMEOUT


_judges: Judges | None = None
_lock = threading.Lock()


def compare(first: str, second: str) -> Verdict:
    """Whether two expressions are equal, decided in this process's own pool."""
    return _pool().compare(first, second)


def read(reference: str, text: str) -> Verdict:
    """Whether math-verify finds the reference in a text."""
    return _pool().read(reference, text)


def _pool() -> Judges:
    global _judges
    with _lock:
        if _judges is None or not _judges.owned:
            _judges = Judges()
    return _judges
