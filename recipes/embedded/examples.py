"""Training sequences, written down word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vocabulary import ASSISTANT, END, END_THINK, THINK, USER, words


@dataclass(frozen=True)
class Example:
    """One training sequence of a task as words; the first `prompt` of them are given, the rest is to be learnt.

    `results` are the places [start, end) where each intermediate result is stated, by its name. `weights` holds the
    loss weights of words that are neither 1 nor in the answer. `needed` names the results that the answer needs, None
    for all.
    """

    task: str
    words: tuple[str, ...]
    prompt: int
    results: tuple[tuple[str, int, int], ...]
    weights: tuple[tuple[int, float], ...] = ()
    needed: frozenset[str] | None = None

    @property
    def thinking_end(self) -> int:
        """The place of the word that ends the thinking."""
        return self.words.index(END_THINK)


@dataclass
class Scribe:
    """Writes an example from left to right."""

    task: str
    question: str
    words: list[str] = field(default_factory=list)
    results: list[tuple[str, int, int]] = field(default_factory=list)
    weights: list[tuple[int, float]] = field(default_factory=list)
    needed: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self.words = [USER, *words(self.question + "\n"), ASSISTANT, THINK]
        self.prompt = len(self.words)

    def say(self, *said: str) -> None:
        self.words += said

    def weigh(self, weight: float) -> None:
        """The loss of the word said last counts `weight` times."""
        self.weights.append((len(self.words) - 1, weight))

    def heavy(self, weight: float, *said: str) -> None:
        """Say words whose loss counts `weight` times."""
        for word in said:
            self.say(word)
            self.weigh(weight)

    def result(self, name: str, *said: str) -> None:
        """Say words that state the result of that name."""
        self.results.append((name, len(self.words), len(self.words) + len(said)))
        self.words += said

    def finish(self, answer: Sequence[str]) -> Example:
        self.say(END_THINK, *answer, END)
        return Example(self.task, tuple(self.words), self.prompt, tuple(self.results), tuple(self.weights), self.needed)
