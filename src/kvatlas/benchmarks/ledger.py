"""LEDGERn: a running balance over n lines, of which the answer adds up two to four; LEDGERm-n takes m to n in turn.

A problem reads `A1 = 4 ; a3 , b7 , c2 , d9 , e4 , f1 to D6 ? B5 , A3 at 8`: the balance of the first line, six
amounts, the last line, and the lines in question. A page has six lines (A1 to A6, then B1), each with an amount of its
own: `a` is booked on lines that end in 1, `f` on those that end in 6. An amount is added to an even balance and
subtracted from an odd one, modulo 10. `at 8` asks for the first later line with that balance, which only the thinking
tells. The answer states the balances in question and adds them up: `B5 = 1 , A3 = 7 , C2 = 8 : 1 + 7 = 8 , 8 + 8 = 6`.

The prompt is short and the thinking long: every line follows from the one before, and few of them matter for the
answer, some of them written long ago. Difficulty is n.

The same generator writes the reference solutions that the embedded models are trained on, from other seeds.
"""

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from kvatlas.benchmarks.base import Sized
from kvatlas.core import Grade, Problem, Status

PAGES = "ABCDEF"
LINES_OF_A_PAGE = 6
LINES = tuple(f"{PAGES[i // LINES_OF_A_PAGE]}{i % LINES_OF_A_PAGE + 1}" for i in range(len(PAGES) * LINES_OF_A_PAGE))
AMOUNTS = "abcdef"
#: The least and the most lines in question.
QUESTIONS = (2, 4)
#: The share of problems that ask for the first line with a balance.
SEARCHES = 0.5


def amount_of(line: str) -> str:
    """Return the letter of the amount that is booked on a line."""
    return AMOUNTS[int(line[1]) - 1]


def operator_of(balance: int) -> str:
    """Return how an amount is booked on a balance."""
    return "-" if balance % 2 else "+"


def booked(balance: int, amount: int) -> int:
    """Return the balance after an amount was booked."""
    return (balance + amount if operator_of(balance) == "+" else balance - amount) % 10


@dataclass(frozen=True)
class Ledger:
    """A problem: the balance after each line, the amounts by letter, the lines asked for by name, and the balance
    whose first line is asked for besides, or None."""

    balances: dict[str, int]
    amounts: dict[str, int]
    named: tuple[str, ...]
    sought: int | None

    @property
    def found(self) -> str | None:
        """The first line with the balance that is sought."""
        return next((line for line, balance in self.balances.items() if balance == self.sought), None)

    @property
    def question(self) -> str:
        first, *_, last = self.balances
        amounts = " , ".join(f"{letter}{amount}" for letter, amount in self.amounts.items())
        asked = " , ".join(self.named) + ("" if self.sought is None else f" at {self.sought}")
        return f"{first} = {self.balances[first]} ; {amounts} to {last} ? {asked}"

    @property
    def answer(self) -> str:
        lines = [*self.named, *filter(None, [self.found])]
        total, *others = (self.balances[line] for line in lines)
        sums = []
        for other in others:
            sums.append(f"{total} + {other} = {(total + other) % 10}")
            total = (total + other) % 10
        stated = [f"{line} = {self.balances[line]}" for line in lines]
        return f"{' , '.join(stated)} : {' , '.join(sums)}"


def draw_ledger(size: int, rng: random.Random, questions: int = 0) -> Ledger:
    """Return a random ledger of `size` lines; asks for a number of `questions` lines by name, if one is given."""
    amounts = {letter: rng.randrange(10) for letter in AMOUNTS}
    balance = rng.randrange(10)
    balances = {LINES[0]: balance}
    for line in LINES[1:size]:
        balance = booked(balance, amounts[amount_of(line)])
        balances[line] = balance

    # The first line stands in the prompt, and the last is the newest when the answer begins.
    inner = LINES[1 : size - 1]
    if questions:
        return Ledger(balances, amounts, tuple(rng.sample(inner, min(questions, len(inner)))), None)

    count = rng.randint(*QUESTIONS)
    sought = None
    found = None
    if rng.random() < SEARCHES:
        values = list(balances.values())
        firsts = {value: LINES[values.index(value)] for value in sorted(set(values))}
        rows = [(value, line) for value, line in firsts.items() if line in inner]
        if rows:
            sought, found = rng.choice(rows)
    if found is not None:
        count -= 1
    named = rng.sample([line for line in inner if line != found], count)
    return Ledger(balances, amounts, tuple(named), sought)


class LedgerBenchmark(Sized):
    """The benchmark LEDGERn, or LEDGERm-n."""

    version: ClassVar[int] = 1
    family: ClassVar[str] = "LEDGER"
    generator = staticmethod(draw_ledger)
    sizes: ClassVar[tuple[int, int]] = (8, 36)
    about: ClassVar[str] = "a running balance over many lines, of which the answer adds up a few (generated)"
    examples: ClassVar[str] = f"LEDGER{sizes[0]} ... LEDGER{sizes[1]}, LEDGER20-30"

    @property
    def typical_output_tokens(self) -> int:
        # Reference solutions: 21 tokens a line.
        return 21 * (self.smallest + self.largest) // 2

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct if all balances in question and their sum are right; progress is the share of right balances."""
        reference = _stated(problem.answer)
        stated = _stated(answer)
        total = re.findall(r"= (\d)\b", answer)
        if not total:
            return Grade(False, 0.0, None, Status.NO_ANSWER)

        right = sum(stated.get(line) == balance for line, balance in reference.items())
        correct = right == len(reference) == len(stated) and total[-1] == problem.answer[-1]
        extracted = " , ".join(f"{line} = {balance}" for line, balance in stated.items())
        return Grade(correct, right / len(reference), f"{extracted} : {total[-1]}", Status.OK)


def _stated(answer: str) -> dict[str, str]:
    """Return the balances that an answer states, by line."""
    return dict(re.findall(r"\b([A-F][1-6]) = (\d)\b", answer))
