"""What a benchmark is: a named set of problems with a prompt format and a grader."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from kvatlas.core import Grade, KvatlasError, Problem, Status, refusal

#: The last problem of benchmarks that have no end.
MOST_INDEX = 99_999


class Benchmark(Protocol):
    """The contract of every benchmark; a new one is one file that satisfies it.

    `version` rises whenever problems, prompts or verdicts change: it is part of the run key. A benchmark whose problems
    or prompts depend on more than its name and version has a property `identity` (plain data) that says on what, and
    where that tells of other problems, too, a property `rules_identity` with what is left for each problem alone. One
    that asks models in different ways has a method `asked_of` (see below).
    """

    version: ClassVar[int]

    @property
    def name(self) -> str:
        """As it is named in specs and on figures."""
        ...

    @property
    def typical_output_tokens(self) -> int:
        """Output tokens of a usual trace, for `plan` to reckon with."""
        ...

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """The first `limit` problems, always the same ones in the same order; all (or a standard number) for None."""
        ...

    def prompt(self, problem: Problem) -> str:
        """The user message that is sent, before the model's chat template."""
        ...

    def grade(self, problem: Problem, answer: str) -> Grade:
        """The verdict on the text after the end of thinking (a truncated trace never comes here)."""
        ...


class Family(Protocol):
    """Benchmarks that differ in what follows their common name: `CHAIN12` is `named("12")` of the family CHAIN."""

    about: str
    examples: str

    def named(self, rest: str, **options: Any) -> Benchmark:
        """The benchmark; KvatlasError says which are valid. A family read from files takes the option `file`."""
        ...


@dataclass(frozen=True)
class Sized(ABC):
    """A generated benchmark: `FAMILYn` (`smallest` and `largest` are n), or `FAMILYm-n`, whose problem i is of size k
    for k from m to n in turn: a mixture of easy and hard problems, as public benchmarks are."""

    smallest: int
    largest: int
    family: ClassVar[str]
    #: The smallest and the largest size there is.
    sizes: ClassVar[tuple[int, int]]
    standard_problems: ClassVar[int] = 300

    @classmethod
    def named(cls, size: str) -> Self:
        """Of size 12 from "12", of sizes 8 to 15 from "8-15"; KvatlasError outside `sizes`."""
        first, dash, last = size.partition("-")
        bounds = [int(text) if re.fullmatch("[0-9]{1,3}", text) else 0 for text in (first, last if dash else first)]
        if not cls.sizes[0] <= bounds[0] <= bounds[1] <= cls.sizes[1] or (dash and bounds[0] == bounds[1]):
            raise KvatlasError(
                f"Unknown benchmark '{cls.family}{size}'; expected {cls.family}{cls.sizes[0]} to "
                f"{cls.family}{cls.sizes[1]}, and ranges of these sizes with the smaller one first, as in "
                f"{cls.family}8-15."
            )
        return cls(*bounds)

    @property
    def name(self) -> str:
        return f"{self.family}{self.smallest}" + (f"-{self.largest}" if self.largest > self.smallest else "")

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """Generated from (size, index) alone: the same problems on every machine, disjoint from training seeds."""
        return [self.problem(i) for i in range(self.standard_problems if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        """The problem of that index."""
        return self.drawn(self.smallest + index % (self.largest - self.smallest + 1), index)

    @abstractmethod
    def drawn(self, size: int, index: int) -> Problem:
        """The problem of that size and index."""

    def prompt(self, problem: Problem) -> str:
        return problem.question


def nth(benchmark: Benchmark, index: int) -> Problem:
    """The problem of that index from 0, alone where the benchmark can draw it without those before it.

    KvatlasError where there are fewer.
    """
    if index > MOST_INDEX:
        raise KvatlasError(f"There is no problem {index + 1} of {benchmark.name}; expected up to {MOST_INDEX + 1:,}.")
    alone = getattr(benchmark, "problem", None)
    if alone is not None:
        drawn: Problem = alone(index)
        return drawn
    problems = benchmark.problems(index + 1)
    if index >= len(problems):
        raise KvatlasError(f"There is no problem {index + 1} of {benchmark.name}; expected 1 to {len(problems):,}.")
    return problems[index]


def asked_of(benchmark: Benchmark, reads: Callable[[str], bool]) -> Benchmark:
    """The benchmark as it asks one model, which `reads` a text or has no tokens for it."""
    chosen: Callable[[Callable[[str], bool]], Benchmark] | None = getattr(benchmark, "asked_of", None)
    return benchmark if chosen is None else chosen(reads)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_text(value: object) -> bool:
    """Whether it can be stored: half a surrogate pair cannot."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


#: For each field of a grade its check, and what it is to be.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "correct": (lambda value: isinstance(value, int) and value in (0, 1), "true or false"),
    "progress": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "answer": (lambda value: value is None or _is_text(value), "a text or None"),
    "status": (lambda value: value in tuple(Status), "a Status"),
    "metrics' names": (_is_text, "texts"),
    "metrics": (lambda value: _is_number(value) or _is_text(value), "finite numbers and texts"),
}


def judge(benchmark: Benchmark, problem: Problem, answer: str) -> Grade:
    """The benchmark's verdict in plain numbers and texts, as it is stored; KvatlasError names a field that is not so.

    Numbers of numpy, and tensors of one number, become Python's.
    """
    where = f"The benchmark {benchmark.name!r}"

    def plain(field: str, value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        check, expected = _FIELDS[field]
        if not check(value):
            raise KvatlasError(f"{where} grades {problem.id!r} with {field} {value!r}; expected {expected}.")
        return value

    with refusal(f"{where} cannot grade an answer to {problem.id!r}"):
        given = benchmark.grade(problem, answer)
        return Grade(
            bool(plain("correct", given.correct)),
            plain("progress", given.progress),
            plain("answer", given.answer),
            Status(plain("status", given.status)),
            {plain("metrics' names", name): plain("metrics", value) for name, value in given.metrics.items()},
        )


def identity(benchmark: Benchmark) -> list[Any]:
    """All that can change what a benchmark asks and how it judges: recorded with every run."""
    return [benchmark.name, benchmark.version, *getattr(benchmark, "identity", ())]


def rules(benchmark: Benchmark) -> list[Any]:
    """The same without the content of problems, of which each has its own digest: part of the run key."""
    own = getattr(benchmark, "identity", ())
    return [benchmark.name, benchmark.version, *getattr(benchmark, "rules_identity", own)]


def grade_text(benchmark: Benchmark, problem: Problem, text: str, cut: bool) -> Grade:
    """Return the grade of a whole text: what comes after `</think>` counts, a text that was `cut` off is wrong."""
    _, closed, answer = text.rpartition("</think>")
    if not cut and (closed or "<think>" not in text):
        return judge(benchmark, problem, answer)
    # With the metrics of an empty answer: every trace has the same metrics.
    nothing = judge(benchmark, problem, "").metrics
    return Grade(False, 0.0, None, Status.TRUNCATED if cut else Status.NO_ANSWER, nothing)
