"""CODE: programs written to a statement, graded by running them on tests in a sandbox.

Twelve problems come with the package; `CODE@FILE` takes one's own, rows with a question and tests, each an input and
its output. A program reads standard input and writes standard output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from kvatlas.benchmarks import sandbox, tables
from kvatlas.benchmarks.sandbox import End
from kvatlas.core import Grade, KvatlasError, Problem, Status, digest

#: Longer programs are cut off by the kernel's limit on arguments, in characters.
LONGEST = 100_000
_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.I)
_REQUEST = (
    "\n\nWrite a Python program that reads the input from standard input and writes the answer to standard output. "
    "End with the whole program in one block that begins with ```python and ends with ```."
)
_TESTS = ("tests", "test cases", "public test cases")


@dataclass(frozen=True)
class Code:
    """The problems of a file, or those of the package."""

    file: str = ""
    version: ClassVar[int] = 1
    about: ClassVar[str] = "Python programs, graded by running them in a sandbox (12 problems, or CODE@FILE)"
    examples: ClassVar[str] = "CODE, CODE@FILE"

    @classmethod
    def named(cls, rest: str, file: str = "") -> Code:
        """The benchmark; KvatlasError where programs cannot be contained."""
        if rest:
            raise KvatlasError(f"Unknown benchmark {'CODE' + rest!r}; valid are {cls.examples}.")
        reason = sandbox.why_not()
        if reason:
            raise KvatlasError(reason)
        return cls(file)

    @property
    def name(self) -> str:
        return "CODE"

    @property
    def typical_output_tokens(self) -> int:
        return 6000

    @property
    def identity(self) -> list[Any]:
        """A digest of the problems with their tests: the same problems are the same from any file."""
        return [digest([[p.id, p.question, p.about["tests"]] for p in self._problems])]

    def problems(self, limit: int | None = None) -> Sequence[Problem]:
        return self._problems[:limit]

    def prompt(self, problem: Problem) -> str:
        given, wanted = problem.about["tests"][0]
        return f"{problem.question}\n\nAn input:\n{given}\nIts output:\n{wanted}{_REQUEST}"

    def grade(self, problem: Problem, answer: str) -> Grade:
        """Correct where the last block of code passes all tests; progress is the share that it passes.

        Tests after one that takes too much time or output are not run: they count as failed.
        """
        blocks = _BLOCK.findall(answer)
        if not blocks:
            return Grade(False, 0.0, None, Status.NO_ANSWER)
        program, tests = blocks[-1], problem.about["tests"]
        passed = 0
        # NUL bytes cannot be part of an argument.
        for given, wanted in tests if len(program) <= LONGEST and "\0" not in program else ():
            result = sandbox.run(program, given)
            passed += result.end is End.DONE and _lines(result.output) == _lines(wanted)
            if result.end in (End.TIME, End.OUTPUT):
                break
        return Grade(passed == len(tests), passed / len(tests), program, Status.OK)

    @cached_property
    def _problems(self) -> tuple[Problem, ...]:
        own = files("kvatlas.benchmarks") / "programs.jsonl"
        where = f"The problem file {self.file!r}" if self.file else "The problem file of the package"
        rows: Sequence[tables.Row] = (
            tables.read_rows(Path(self.file).expanduser()) if self.file else tables.json_lines(own.read_text("utf-8"))
        )
        return tuple(_problem(f"CODE-{number:03d}", row, where) for number, row in enumerate(rows, 1))

    def __getstate__(self) -> Mapping[str, Any]:
        return {"file": self.file}


def _problem(id_: str, row: tables.Row, where: str) -> Problem:
    question = str(row[tables.column(row, (*tables.QUESTION, "question content"), None, where, "question")])
    given = row[tables.column(row, _TESTS, None, where, "tests")]
    try:
        decoded = json.loads(given) if isinstance(given, str) else given
        tests = [_test(test) for test in decoded]
    except (ValueError, TypeError, KeyError) as error:
        raise KvatlasError(f"{where} has tests that are no inputs with their outputs ({id_}).") from error
    if not tests:
        raise KvatlasError(f"{where} has a problem without tests ({id_}).")
    return Problem(id_, question.strip(), str(row.get("solution") or ""), {"tests": tests})


def _test(test: Any) -> tuple[str, str]:
    if isinstance(test, Mapping):
        if test.get("testtype", "stdin") != "stdin":
            raise ValueError("it calls a function")
        return str(test["input"]), str(test["output"])
    given, wanted = test
    return str(given), str(wanted)


def _lines(text: str) -> list[str]:
    """What is compared: white space at the ends of lines and of the text makes no difference."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
