"""What a benchmark is: a named set of problems with a prompt format and a grader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from kvatlas.core import Grade, Problem


class Benchmark(Protocol):
    """The contract of every benchmark; a new one is one file that satisfies it.

    `version` rises whenever problems, prompts or verdicts change: it is part of the run key. A benchmark whose problems
    or prompts depend on more than its name and version has a property `identity` (plain data) that says on what.
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


def identity(benchmark: Benchmark) -> list[Any]:
    """All that can change what a benchmark asks and how it judges: part of the run key."""
    return [benchmark.name, benchmark.version, *getattr(benchmark, "identity", ())]
