"""WORDSn: word problems in plain English, n counts that follow from one another; WORDSm-n takes m to n in turn.

`Rosa has 4 more marbles than Tom. Ben has 3 fewer marbles than Rosa. Tom has 5 marbles. How many marbles does Ben
have?` The facts are shuffled. For every three needed facts there are two that do not matter (about other people or
other things). The answer names all people on the way and ends with the number: `Tom 5, Rosa 9, Ben 6. Answer: 6`. A
solver must find out which people are compared, and remember that and the counts.

The same generator writes the problems that the thinking adapter of SmolLM2 is trained on, from other seeds.
"""

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from kvatlas.benchmarks.base import Sized
from kvatlas.core import Grade, Problem, Status

#: The largest count.
MOST = 60
#: The range of differences.
DIFFERENCES = (2, 9)
NAMES = (
    *("Adam", "Alice", "Amy", "Anna", "Ben", "Bob", "Carl", "Clara", "Dan", "David", "Emma", "Eric", "Eva", "Finn"),
    *("Frank", "Fred", "George", "Grace", "Harry", "Helen", "Henry", "Hugo", "Jack", "Jane", "Jim", "John", "Julia"),
    *("Kate", "Kevin", "Laura", "Leo", "Lily", "Linda", "Lisa", "Lucy", "Maria", "Mark", "Martin", "Mary", "Max"),
    *("Mia", "Nancy", "Nick", "Nina", "Noah", "Oliver", "Oscar", "Paul", "Peter", "Rachel", "Robert", "Rosa", "Ruth"),
    *("Sam", "Sara", "Simon", "Sophie", "Steve", "Susan", "Tim", "Tom", "Tony", "Vera", "Victor", "Walter"),
)
THINGS = ("marbles", "stickers", "books", "coins", "apples", "stamps", "shells", "cards", "pencils", "beads", "buttons")


@dataclass(frozen=True)
class Fact:
    """`name` has `count` things, more or fewer by `difference` than `than`, or stated outright without `than`."""

    name: str
    than: str
    difference: int
    count: int
    things: str

    def __str__(self) -> str:
        if not self.than:
            return f"{self.name} has {self.count} {self.things}."
        comparison = "more" if self.difference > 0 else "fewer"
        return f"{self.name} has {abs(self.difference)} {comparison} {self.things} than {self.than}."


@dataclass(frozen=True)
class Story:
    """A problem: the facts on the way from a stated count to the one in question, and all facts in their order."""

    way: tuple[Fact, ...]
    facts: tuple[Fact, ...]

    @property
    def question(self) -> str:
        last = self.way[-1]
        return f"{' '.join(map(str, self.facts))} How many {last.things} does {last.name} have?"

    @property
    def answer(self) -> str:
        counts = ", ".join(f"{fact.name} {fact.count}" for fact in self.way)
        return f"{counts}. Answer: {self.way[-1].count}"


def draw_story(size: int, rng: random.Random) -> Story:
    """Return a random story with `size` facts on the way and two thirds as many beside it."""
    aside = -(-2 * size // 3)
    names = rng.sample(NAMES, size + aside)
    things, others = rng.sample(THINGS, 2)
    way = [Fact(names[0], "", 0, rng.randint(3, 30), things)]
    for name in names[1:size]:
        way.append(_comparing_fact(name, way[-1], rng))

    facts = list(way)
    for name in names[size:]:
        if rng.random() < 0.75:
            # A comparison with any person of the same things: a way that leads elsewhere.
            facts.append(_comparing_fact(name, rng.choice([fact for fact in facts if fact.things == things]), rng))
        else:
            facts.append(Fact(name, "", 0, rng.randint(3, 30), others))
    rng.shuffle(facts)
    return Story(tuple(way), tuple(facts))


def _comparing_fact(name: str, base: Fact, rng: random.Random) -> Fact:
    signs = [sign for sign in (1, -1) if 1 <= base.count + sign * DIFFERENCES[1] <= MOST]
    difference = rng.choice(signs) * rng.randint(*DIFFERENCES)
    return Fact(name, base.name, difference, base.count + difference, base.things)


class Words(Sized):
    """The benchmark WORDSn, or WORDSm-n."""

    version: ClassVar[int] = 1
    family: ClassVar[str] = "WORDS"
    generator = staticmethod(draw_story)
    sizes: ClassVar[tuple[int, int]] = (2, 20)
    about: ClassVar[str] = "word problems: who has how many more than whom, with facts that lead nowhere (generated)"
    examples: ClassVar[str] = f"WORDS{sizes[0]} ... WORDS{sizes[1]}, WORDS4-9"

    @property
    def typical_output_tokens(self) -> int:
        # Reference solutions in SmolLM2's tokens: 40 for each fact on the way.
        return 20 * (self.smallest + self.largest)

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct if the last number is right; progress is the share of leading counts on the way that are right."""
        way, expected = _counts_and_answer(problem.answer)
        stated, given = _counts_and_answer(answer)
        if given is None:
            return Grade(False, 0.0, None, Status.NO_ANSWER)

        counts = dict(stated)
        right = 0
        while right < len(way) and counts.get(way[right][0]) == way[right][1]:
            right += 1
        return Grade(given == expected, right / len(way), str(given), Status.OK)


def _counts_and_answer(text: str) -> tuple[list[tuple[str, int]], int | None]:
    """Return the counts by name in an answer, and its final number: after `Answer:`, else the last one."""
    counts = [(name, int(count)) for name, count in re.findall(r"\b(?!Answer\b)([A-Z][a-z]+):? (\d{1,9})\b", text)]
    numbers = re.findall(r"Answer:?\s*(\d{1,9})\b", text) or re.findall(r"\b\d{1,9}\b", text)
    return counts, int(numbers[-1]) if numbers else None
