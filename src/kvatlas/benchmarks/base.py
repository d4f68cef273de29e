"""The contract of a benchmark: a named set of problems with a prompt format and a grader."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from kvatlas import class_files
from kvatlas.answers.reading import Reading
from kvatlas.core import Grade, KvatlasError, Problem, Status, canonical, is_storable_number, is_storable_text, refusal

#: Problems of a user's benchmark that are read twice.
REPEATED = 8


class Benchmark(Protocol):
    """The contract of every benchmark.

    `version` rises whenever problems, prompts or grades change: it is part of the run key. Optional members:
    `identity` (plain data) if prompts or grades depend on more than name, version and problem;
    `problem(index)` if one problem can be generated alone; `for_model(reads)` if models are prompted in different ways.
    """

    version: ClassVar[int]

    @property
    def name(self) -> str:
        """The name in specs and on figures."""

    @property
    def typical_output_tokens(self) -> int:
        """Output tokens of a usual trace, for the estimates of `plan`."""

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        """Return the first `limit` problems, in a fixed order; all (or a standard number) for None."""

    def prompt(self, problem: Problem) -> str:
        """Return the user message, before the model's chat template."""

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Grade the text after the end of thinking. Truncated traces are not graded."""


class Family(Protocol):
    """Benchmarks that differ in what follows their common name: `CHAIN12` is `named("12")` of the family CHAIN."""

    about: str
    examples: str

    def named(self, rest: str, **options: Any) -> Benchmark:
        """Return the benchmark. Raises KvatlasError for an unknown name. Families of files take the option `file`."""


@dataclass(frozen=True)
class Sized:
    """A generated benchmark: `FAMILYn`, all of size n, or `FAMILYm-n`, whose problems have the sizes m to n in turn."""

    smallest: int
    largest: int
    family: ClassVar[str]
    #: Returns a random problem of a size, with its `question` and `answer`.
    generator: ClassVar[staticmethod[[int, random.Random], Any]]
    #: The smallest and the largest possible size.
    sizes: ClassVar[tuple[int, int]]
    standard_problems: ClassVar[int] = 300

    @classmethod
    def named(cls, size: str) -> Self:
        """Return the benchmark of a size "12" or of a range "8-15". Raises KvatlasError outside `sizes`."""
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
        """Return problems generated from (size, index) alone, disjoint from the seeds of training."""
        return [self.problem(i) for i in range(self.standard_problems if limit is None else limit)]

    def problem(self, index: int) -> Problem:
        size = self.smallest + index % (self.largest - self.smallest + 1)
        drawn = self.generator(size, random.Random(f"kvatlas {self.family.lower()} {size} test {index}"))
        return Problem(f"{self.name}-{index:04d}", drawn.question, drawn.answer, {"n": size})

    def prompt(self, problem: Problem) -> str:
        return problem.question


def problems_of(benchmark: Benchmark, limit: int | None = None) -> list[Problem]:
    """Return the first `limit` problems of a benchmark, or all: every room reads them by this function.

    Raises KvatlasError if the code of the benchmark fails, or if it has no problems, two with one id, or others at each
    call.
    """
    where = f"The benchmark {benchmark.name!r}"

    def read(count: int | None) -> list[Problem]:
        with refusal(f"{where} cannot give its problems"):
            return list(itertools.islice(benchmark.problems(count), count))

    problems = read(limit)
    for problem in problems:
        if not isinstance(problem, Problem):
            raise KvatlasError(f"{where} has the problem {str(problem)[:100]!r}; expected a kvatlas.core.Problem.")
    if not problems:
        raise KvatlasError(f"{where} has no problems.")

    # A user's benchmark that draws its problems anew would be another one at the next command.
    if not type(benchmark).__module__.startswith("kvatlas.") and problems[:REPEATED] != read(len(problems[:REPEATED])):
        raise KvatlasError(
            f"{where} gives other problems when it is asked again; expected the first ones of one list: "
            "draw them inside problems() with random.Random(SEED), the same for every limit."
        )

    name, count = Counter(problem.id for problem in problems).most_common(1)[0]
    if count > 1:
        raise KvatlasError(f"{where} has {count:,} problems with the id {name!r}; expected another id for each.")
    return problems


def prompt_of(benchmark: Benchmark, problem: Problem) -> str:
    """Return the prompt of a problem; KvatlasError if the code of the benchmark fails or gives no text."""
    with refusal(f"The benchmark {benchmark.name!r} cannot write the prompt of {problem.id!r}"):
        prompt = benchmark.prompt(problem)
        if not is_storable_text(prompt) or not prompt.strip():
            raise TypeError(f"it is {prompt!r}, expected a text that is not blank")
        return prompt


def problem_of(benchmark: Benchmark, name: str = "") -> Problem:
    """Return the problem with an id, by default the first one; KvatlasError if the benchmark does not have it."""
    first = problems_of(benchmark, 1)[0]
    if name in ("", first.id):
        return first

    # A generated problem is made alone.
    problems: Iterable[Problem] = ()
    if not hasattr(benchmark, "problem"):
        problems = problems_of(benchmark)
    elif index := re.fullmatch(r".*-([0-9]{1,5})", name):
        problems = [benchmark.problem(int(index[1]))]
    for problem in problems:
        if problem.id == name:
            return problem
    raise KvatlasError(f"{benchmark.name} has no problem {name!r}; its first is {first.id}.")


def for_model(benchmark: Benchmark, reads: Callable[[str], bool]) -> Benchmark:
    """Return the benchmark with the prompts for one model; `reads(text)` is true if the model has tokens for a text."""
    if not hasattr(benchmark, "for_model"):
        return benchmark
    with refusal(f"The benchmark {benchmark.name!r} cannot choose its prompts for a model"):
        chosen: Benchmark = benchmark.for_model(reads)
    file = class_files.recorded_file(type(benchmark))
    if file is not None:
        class_files.record_file(type(chosen), file)
    return chosen


#: For each field of a grade its check and the expected value.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "correct": (lambda value: isinstance(value, int) and value in (0, 1), "true or false"),
    "progress": (lambda value: is_storable_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "answer": (lambda value: value is None or is_storable_text(value), "a text or None"),
    "status": (lambda value: value in tuple(Status) and value != Status.UNKNOWN, "a Status"),
    "metrics' names": (is_storable_text, "texts"),
    "metrics": (lambda value: is_storable_number(value) or is_storable_text(value), "finite numbers and texts"),
}


def grade_answer(benchmark: Benchmark, problem: Problem, answer: str) -> Grade:
    """Grade an answer, with numbers of numpy as Python's; KvatlasError for a field that cannot be stored."""
    where = f"The benchmark {benchmark.name!r}"

    def storable(field: str, value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        check, expected = _FIELDS[field]
        if not check(value):
            raise KvatlasError(f"{where} grades {problem.id!r} with {field} {value!r}; expected {expected}.")
        return value

    with refusal(f"{where} cannot grade an answer to {problem.id!r}"):
        grade = benchmark.grade(problem, answer)
        if not isinstance(grade, Grade):
            raise TypeError(
                f"its grade returned {grade!r}; expected kvatlas.core.Grade(correct, progress, answer, status), as "
                "Grade(True, 1.0, '4', Status.OK)"
            )
        return Grade(
            bool(storable("correct", grade.correct)),
            storable("progress", grade.progress),
            storable("answer", grade.answer),
            Status(storable("status", grade.status)),
            {storable("metrics' names", name): storable("metrics", value) for name, value in grade.metrics.items()},
        )


def grade_reading(benchmark: Benchmark, problem: Problem, reading: Reading, all_metrics: bool = False) -> Grade:
    """Return the grade of a reading; one that was cut off or has no answer is wrong.

    With `all_metrics` such a grade has the metrics of an empty answer, for callers that need the same ones of each.
    """
    if reading.answer is not None and reading.status.ended:
        return grade_answer(benchmark, problem, reading.answer)
    metrics = grade_answer(benchmark, problem, "").metrics if all_metrics else {}
    return Grade(False, 0.0, None, reading.status, metrics)


def identity(benchmark: Benchmark) -> list[Any]:
    """Return all that changes prompts and grades besides the problems, whose contents stand beside it in a run."""
    file = class_files.recorded_file(type(benchmark))
    code = [] if file is None else [class_files.code_of(file)]
    with refusal(f"The benchmark {benchmark.name!r} has a wrong identity; expected a list of numbers and texts"):
        values = [benchmark.name, benchmark.version, *getattr(benchmark, "identity", ()), *code]
        canonical(values)
        return values
