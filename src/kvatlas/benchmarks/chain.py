"""CHAINn: n shuffled definitions over single digits, evaluated one after another; CHAINm-n takes sizes m to n in turn.

A problem reads `v = d - q ; b = 4 ; w = d + b ... ? v , w`: every letter is defined once, by a digit or by the sum or
difference (modulo 10) of two other letters, in shuffled order. The answer states every computed letter, in the order
of the question: `v = 3 , w = 9`. A solver must find definitions with known operands, evaluate them one by one and
remember results that were written long ago, which KV-cache token selection puts to the test. Difficulty is n.

The same generator writes the reference solutions that the embedded models are trained on, from other seeds.
"""

import random
import re
import string
from dataclasses import dataclass
from typing import ClassVar

from kvatlas.benchmarks.base import Sized
from kvatlas.core import Grade, Problem, Status


@dataclass(frozen=True)
class Definition:
    """`name = digit` (`operator` empty) or `name = left operator right` over letters defined elsewhere."""

    name: str
    operator: str
    left: str
    right: str
    value: int

    def __str__(self) -> str:
        body = f"{self.left} {self.operator} {self.right}" if self.operator else str(self.value)
        return f"{self.name} = {body}"


@dataclass(frozen=True)
class System:
    """A problem: definitions in an order of evaluation, the same as the question states them, the names in question."""

    definitions: tuple[Definition, ...]
    stated: tuple[Definition, ...]
    queries: tuple[str, ...]

    @property
    def values(self) -> dict[str, int]:
        return {definition.name: definition.value for definition in self.definitions}

    @property
    def question(self) -> str:
        return f"{' ; '.join(map(str, self.stated))} ? {' , '.join(self.queries)}"

    @property
    def answer(self) -> str:
        values = self.values
        return " , ".join(f"{name} = {values[name]}" for name in self.queries)


def draw_system(size: int, rng: random.Random) -> System:
    """Return a random system of `size` definitions: a fifth are digits, operands are uniform over earlier letters."""
    names = rng.sample(string.ascii_lowercase, size)
    digits = max(2, size // 5)
    definitions = [Definition(name, "", "", "", rng.randrange(10)) for name in names[:digits]]
    for name in names[digits:]:
        left = rng.choice(definitions)
        right = rng.choice(definitions)
        operator = rng.choice("+-")
        value = (left.value + right.value if operator == "+" else left.value - right.value) % 10
        definitions.append(Definition(name, operator, left.name, right.name, value))

    stated = list(definitions)
    rng.shuffle(stated)
    queries = rng.sample(names[digits:], size - digits)
    return System(tuple(definitions), tuple(stated), tuple(queries))


class Chain(Sized):
    """The benchmark CHAINn, or CHAINm-n."""

    version: ClassVar[int] = 2
    family: ClassVar[str] = "CHAIN"
    generator = staticmethod(draw_system)
    sizes: ClassVar[tuple[int, int]] = (3, 26)
    about: ClassVar[str] = "shuffled definitions over digits, to be evaluated one after another (generated)"
    examples: ClassVar[str] = f"CHAIN{sizes[0]} ... CHAIN{sizes[1]}, CHAIN8-15"

    @property
    def typical_output_tokens(self) -> int:
        # Of embedded:tiny-llama with the full cache: 238 tokens at size 8, 509 at 14.
        return max(20, 21 * (self.smallest + self.largest) - 90)

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct if every value in question is right; progress is their share. The last statement counts."""
        reference, stated = (dict(re.findall(r"\b([a-z]) = (\d+)\b", text)) for text in (problem.answer, answer))
        if not stated:
            return Grade(False, 0.0, None, Status.NO_ANSWER)
        right = sum(stated.get(name) == value for name, value in reference.items())
        extracted = " , ".join(f"{name} = {stated[name]}" for name in reference if name in stated)
        return Grade(right == len(reference), right / len(reference), extracted or None, Status.OK)
