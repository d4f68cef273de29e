"""RULER-...: things to be found in long texts, of exact length in tokens; after RULER (arXiv 2404.06654), in own words.

`RULER-needle-4096@TOKENIZER` hides numbers of named things in sentences that say nothing, and asks for one of them;
`RULER-variables-4096@TOKENIZER` hides assignments, and asks which variables have a value. The question as a whole has
that many tokens of the tokenizer (a model's folder or its tokenizer.json), without the model's chat template. `-K8`
hides eight numbers or gives eight chains of variables instead of four.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.core import Grade, KvatlasError, Problem, Status, digest

STANDARD_PROBLEMS = 100
#: Variables in a chain: the first is given a number, each other the one before.
CHAIN = 5
_FILLER = (
    "The market opened late because of the rain.", "Nobody had painted the fence since spring.",
    "A train went by and the cups shook on the shelf.", "She read the letter twice and put it away.",
    "The path along the river is closed in winter.", "Bread was cheaper on the other side of the town.",
    "He counted the steps and forgot the number.", "The clock in the hall has been wrong for years.",
    "Two dogs slept in the shade of the wall.", "They talked about the harvest until it was dark.",
)  # fmt: skip
#: One token in most vocabularies, to make up what sentences leave.
_WORDS = (" and", " so", " it", " was", " on", " a", "\n", ".", "!")
_COLOURS = ("red", "blue", "green", "grey", "white", "black", "brown", "pink")
_THINGS = ("lamp", "boat", "drum", "coat", "door", "kite", "stone", "glass", "chair", "spoon", "wheel", "bell")


@dataclass(frozen=True)
class Ruler:
    """One kind of task at one length. `tokenizer` is what lengths are measured with."""

    kind: str
    length: int
    tokenizer: str
    count: int = 4
    version: ClassVar[int] = 1
    about: ClassVar[str] = "numbers or variables hidden in long texts of exact length (generated; after RULER)"
    examples: ClassVar[str] = "RULER-needle-4096@TOKENIZER, RULER-variables-8192-K8@TOKENIZER"

    @classmethod
    def named(cls, rest: str, file: str = "") -> Ruler:
        """The benchmark; KvatlasError without a tokenizer, and for what cannot be."""
        match = re.fullmatch(r"-(needle|variables)-(\d{1,7})(?:-K([1-9]\d?))?", rest)
        if match is None:
            raise KvatlasError(f"Unknown benchmark 'RULER{rest}'; valid are names like {cls.examples}.")
        if not file:
            raise KvatlasError(f"RULER{rest} needs a tokenizer to count tokens with: RULER{rest}@MODEL_FOLDER.")
        path = Path(file).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise KvatlasError(f"There is no tokenizer {str(path)!r}; name a model's folder or its tokenizer.json.")
        return cls(match[1], int(match[2]), str(path), int(match[3] or 4))

    @property
    def name(self) -> str:
        return f"RULER-{self.kind}-{self.length}" + (f"-K{self.count}" if self.count != 4 else "")

    @property
    def typical_output_tokens(self) -> int:
        return 500

    @property
    def identity(self) -> list[Any]:
        """The problems depend on how long the tokenizer makes texts."""
        return [digest(Path(self.tokenizer).read_text("utf-8"))]

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        return [self.problem(i) for i in range(STANDARD_PROBLEMS if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        """The problem of that index, of exactly `length` tokens; KvatlasError where the length is too small."""
        rng = random.Random(f"kvatlas ruler {self.kind} {self.count} {index}")
        hidden, question, answer = (self._needles if self.kind == "needle" else self._variables)(rng)
        places = [rng.random() for _ in hidden]
        filler = [rng.choice(_FILLER) for _ in range(self.length)]

        def text(sentences: int, extra: str = "") -> str:
            lines = filler[:sentences]
            for at, sentence in sorted(zip(places, hidden, strict=True), reverse=True):
                lines.insert(round(at * sentences), sentence)
            return " ".join(lines) + extra + "\n\n" + question

        fewest, most = 0, self.length
        while fewest < most:
            middle = (fewest + most + 1) // 2
            fewest, most = (middle, most) if self._tokens(text(middle)) <= self.length else (fewest, middle - 1)
        extra, missing = "", self.length - self._tokens(text(fewest))
        if missing < 0:
            raise KvatlasError(
                f"{self.name} is too short for what it hides: {self.length - missing} tokens are needed."
            )
        while missing:
            # A word may merge with what is before it.
            word = next((w for w in _WORDS if self._tokens(text(fewest, extra + w)) == self.length - missing + 1), None)
            if word is None:
                raise KvatlasError(
                    f"The tokenizer {self.tokenizer!r} has no words of one token to fill {self.name} with."
                )
            extra, missing = extra + word, missing - 1
        return Problem(f"{self.name}-{index:04d}", text(fewest, extra), answer, {"tokens": self.length})

    def _needles(self, rng: random.Random) -> tuple[list[str], str, str]:
        things = rng.sample([f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS], self.count)
        numbers = [str(number) for number in rng.sample(range(1_000_000, 10_000_000), self.count)]
        hidden = [f"The number of the {thing} is {number}." for thing, number in zip(things, numbers, strict=True)]
        return hidden, f"What is the number of the {things[0]}? Answer with that number alone.", numbers[0]

    def _variables(self, rng: random.Random) -> tuple[list[str], str, str]:
        names: list[str] = []
        while len(names) < CHAIN * self.count:
            name = "V" + "".join(rng.choices(string.ascii_uppercase, k=4))
            names += [] if name in names else [name]
        chains = [names[i : i + CHAIN] for i in range(0, len(names), CHAIN)]
        values = rng.sample(range(10_000, 100_000), self.count)
        hidden = []
        for value, chain in zip(values, chains, strict=True):
            hidden.append(f"Let {chain[0]} be {value}.")
            hidden += [f"Let {later} be {earlier}." for earlier, later in pairwise(chain)]
        question = f"Which variables have the value {values[0]}? Answer with all {CHAIN} of their names."
        return hidden, question, " ".join(chains[0])

    def prompt(self, problem: Problem) -> str:
        return problem.question

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct where the answer names what was asked for and nothing else of its kind; progress is what it names."""
        values = set(re.findall(r"\b\d{7}\b" if self.kind == "needle" else r"\bV[A-Z]{4}\b", answer.replace(",", "")))
        if not values:
            return Grade(False, 0.0, None, Status.NO_ANSWER)
        wanted = set(problem.answer.split())
        return Grade(values == wanted, len(values & wanted) / len(wanted), " ".join(sorted(values)), Status.OK)

    def _tokens(self, text: str) -> int:
        return len(self._encoder.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _encoder(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(self.tokenizer)

    def __getstate__(self) -> Mapping[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoder"}
