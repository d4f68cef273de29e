"""What a benchmark is: a named set of problems with a prompt format and a grader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from kvatlas.core import Grade, KvatlasError, Problem

#: The last problem of benchmarks that have no end.
MOST_INDEX = 99_999


class Benchmark(Protocol):
    """The contract of every benchmark; a new one is one file that satisfies it.

    `version` rises whenever problems, prompts or verdicts change: it is part of the run key. A benchmark whose problems
    or prompts depend on more than its name and version has a property `identity` (plain data) that says on what. One
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


def nth(benchmark: Benchmark, index: int) -> Problem:
    """The problem of that index from 0, alone where the benchmark can draw it without those before it.

    KvatlasError where there are fewer.
    """
    if index > MOST_INDEX:
        raise KvatlasError(f"There is no problem {index + 1} of {benchmark.name}; valid are up to {MOST_INDEX + 1:,}.")
    alone = getattr(benchmark, "problem", None)
    if alone is not None:
        drawn: Problem = alone(index)
        return drawn
    problems = benchmark.problems(index + 1)
    if index >= len(problems):
        raise KvatlasError(f"There is no problem {index + 1} of {benchmark.name}; valid are 1 to {len(problems):,}.")
    return problems[index]


def asked_of(benchmark: Benchmark, reads: Callable[[str], bool]) -> Benchmark:
    """The benchmark as it asks one model, which `reads` a text or has no tokens for it."""
    chosen: Callable[[Callable[[str], bool]], Benchmark] | None = getattr(benchmark, "asked_of", None)
    return benchmark if chosen is None else chosen(reads)


def identity(benchmark: Benchmark) -> list[Any]:
    """All that can change what a benchmark asks and how it judges: part of the run key."""
    return [benchmark.name, benchmark.version, *getattr(benchmark, "identity", ())]
