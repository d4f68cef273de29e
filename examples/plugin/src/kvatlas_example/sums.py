"""SUMn: n digits to be added up."""

import random
from dataclasses import dataclass
from typing import ClassVar

from kvatlas.core import Grade, KvatlasError, Problem, Status


@dataclass(frozen=True)
class Sum:
    """The benchmark SUMn."""

    size: int
    version: ClassVar[int] = 1
    about: ClassVar[str] = "digits to be added up (generated)"
    examples: ClassVar[str] = "SUM2 ... SUM99"

    @classmethod
    def named(cls, rest: str) -> "Sum":
        if not (rest.isdecimal() and 2 <= int(rest) <= 99):
            raise KvatlasError(f"Unknown benchmark {'SUM' + rest!r}; expected {cls.examples}.")
        return cls(int(rest))

    @property
    def name(self) -> str:
        return f"SUM{self.size}"

    @property
    def typical_output_tokens(self) -> int:
        return 10 * self.size

    def problems(self, limit: int | None = None) -> list[Problem]:
        return [self.problem(i) for i in range(100 if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"sum {self.size} {index}")
        digits = [rng.randrange(10) for _ in range(self.size)]
        return Problem(f"{self.name}-{index}", " + ".join(map(str, digits)), str(sum(digits)))

    def prompt(self, problem: Problem) -> str:
        return f"{problem.question} = ?"

    def grade(self, problem: Problem, answer: str) -> Grade:
        if not answer.strip():
            return Grade(False, 0.0, None, Status.NO_ANSWER)
        correct = answer.strip() == problem.answer
        return Grade(correct, float(correct), answer.strip(), Status.OK)
