"""What a training sequence is, and how one is written down word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vocabulary import ASSISTANT, END, END_THINK, NAMES, THINK, USER, words


@dataclass(frozen=True)
class Example:
    """One training sequence as words; the first `prompt` of them are given, the rest is to be learnt.

    `results` are the places [start, end) where each intermediate result is stated, by its name. `weights` holds the
    loss weights of words that are neither 1 nor in the answer, `choices` the words that would be as right, where there
    are several, `goals` the places of the letters that a chain is at.
    """

    words: tuple[str, ...]
    prompt: int
    results: tuple[tuple[str, int, int], ...]
    weights: tuple[tuple[int, float], ...] = ()
    choices: tuple[tuple[int, tuple[str, ...]], ...] = ()
    goals: tuple[int, ...] = ()

    @property
    def task(self) -> str:
        """ "chain" or "maze"."""
        return "chain" if self.words[1] in NAMES else "maze"

    @property
    def thinking_end(self) -> int:
        """The place of the word that ends the thinking."""
        return self.words.index(END_THINK)


@dataclass
class Scribe:
    """Writes an example from left to right."""

    question: str
    words: list[str] = field(default_factory=list)
    results: list[tuple[str, int, int]] = field(default_factory=list)
    weights: list[tuple[int, float]] = field(default_factory=list)
    choices: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    goals: list[int] = field(default_factory=list)

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

    def choose(self, weight: float, word: str, *right: str) -> None:
        """Say a word whose loss counts `weight` times and asks for any of the `right` ones."""
        self.choices.append((len(self.words), right))
        self.heavy(weight, word)

    def result(self, name: str, *said: str) -> None:
        """Say words that state the result of that name."""
        self.results.append((name, len(self.words), len(self.words) + len(said)))
        self.words += said

    def finish(self, answer: Sequence[str]) -> Example:
        self.say(END_THINK, *answer, END)
        lists = (self.words, self.results, self.weights, self.choices, self.goals)
        said, results, weights, choices, goals = map(tuple, lists)
        return Example(said, self.prompt, results, weights, choices, goals)
