r"""Other graders of questions with short answers, by the names that specs and `kvatlas grade` know.

`kvatlas` is our own (benchmarks/public.py). `dynts` follows the code of DynTS (qw_evaluation/parser.py, Robin930/DynTS
at a55dc37, after Qwen2.5-Math): the last box, else what follows "he answer is" or "final answer is", else the last
number; numbers within 1e-4, with or without percent; of choices the last letter A to E that stands alone, in any case.
Expressions that are no numbers are compared as ours are. `math-verify` gives the whole answer to that library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from kvatlas.benchmarks import answers, equality, judges, normal, units
from kvatlas.benchmarks.judges import Verdict
from kvatlas.core import Grade, KvatlasError, Status

OWN = "kvatlas"
#: Rises whenever a verdict of one of `GRADERS` changes.
VERSION = 1
_STATED = ("he answer is", "final answer is")
_DIGITS = re.compile(r"-?\d*\.?\d+")


def graded(verdict: Verdict, answer: str | None) -> Grade:
    """The grade of a verdict on what was found; no answer where that is None."""
    if answer is None:
        return Grade(False, 0.0, None, Status.NO_ANSWER)
    status = Status.GRADER_TIMEOUT if verdict is Verdict.TIMEOUT else Status.OK
    correct = verdict is Verdict.EQUAL
    return Grade(correct, float(correct), answer, status)


def dynts(reference: str, choices: Sequence[str], answer: str) -> Grade:
    """As the code of DynTS grades."""
    given = _letter(answer) if choices else _short(answer)
    if not given:
        return graded(Verdict.UNEQUAL, None)
    if re.fullmatch("[A-E]", reference):
        return graded(Verdict(_letter(given) == reference), given)
    return graded(Verdict.EQUAL if _is_close(reference, given) else equality.same(reference, given), given)


def _letter(text: str) -> str:
    head, *said = re.split("choice is|answer is", text)
    letters = re.findall(r"\b([A-E])\b", (said[-1] if said else head).upper())
    return (letters[0] if said else letters[-1]) if letters else ""


def _short(text: str) -> str:
    if "boxed" in text:
        return answers.boxed(text[text.rindex("boxed") - 1 :]) or ""
    for words in _STATED:
        if words in text:
            return text.split(words)[-1].strip().removeprefix(":").removesuffix(".").strip()[: answers.LONGEST]
    numbers = _DIGITS.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""


def _is_close(reference: str, answer: str) -> bool:
    first, second = map(_number, (reference, answer))
    if first is None or second is None:
        return False
    within = max(abs(first), abs(second)) / 10_000
    return any(abs(first * scale - second) <= within for scale in (Fraction(1, 100), 1, 100))


def _number(text: str) -> Fraction | None:
    return normal.rational(units.without_unit(normal.tidy(text)).rstrip("%\\ "))


def math_verify(reference: str, choices: Sequence[str], answer: str) -> Grade:
    """As math-verify reads and compares on its own."""
    verdict = judges.read(reference, answer[-answers.TAIL :])
    return graded(verdict, answers.final(answer) or answer[-answers.SHORT :].strip() or None)


GRADERS: Mapping[str, Callable[[str, Sequence[str], str], Grade]] = {"dynts": dynts, "math-verify": math_verify}


def check(name: str) -> None:
    """KvatlasError unless it is the name of a grader."""
    if name not in (OWN, *GRADERS):
        raise KvatlasError(f"Unknown grader {name!r}; valid are {', '.join((OWN, *GRADERS))}.")
