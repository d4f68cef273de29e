r"""From a model's text to a grade: find the answer (answers/finding.py), then compare it with the reference
(answers/equality.py), by the grader that a spec names.

`kvatlas` is our own grader. `dynts` follows the code of DynTS (qw_evaluation/parser.py, Robin930/DynTS at a55dc37,
after Qwen2.5-Math): the last box, else the text after "he answer is" or "final answer is", else the last number;
numbers within 1e-4, with or without percent; of choices the last letter A to E that stands alone, in any case.
`math-verify` gives the whole answer to that library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from kvatlas.answers import equality, judges, normal
from kvatlas.answers.finding import (
    SHORT,
    TAIL,
    bare_last_line,
    boxed_or_stated,
    chosen_letter,
    last_box,
    marked_answer,
    without_signs,
    wrapped_last_line,
)
from kvatlas.answers.judges import Equality
from kvatlas.answers.normal import LONGEST
from kvatlas.core import Grade, Status

OWN = "kvatlas"
#: Rises whenever a verdict of another grader changes.
VERSION = 3


def reference_letter(reference: str) -> str:
    """Return the letter of a reference answer such as `B`, `(B)` or `$B$`; "" for other answers."""
    match = re.fullmatch(r"\$?\s*(?:\\text\s*\{)?\s*\(?\s*([A-K])\s*\)?\s*\}?\s*\$?", reference)
    return match[1] if match else ""


def grade(grader: str, reference: str, choices: Sequence[str], text: str, with_bare: bool = False) -> Grade:
    """Grade a text. With `with_bare` a bare last line is an answer, too, as the prompt did not say how to end."""
    answer, comparison = GRADERS[grader](reference, choices, text, with_bare)
    if answer is None:
        return Grade(False, 0.0, None, Status.NO_ANSWER)
    correct = comparison is Equality.EQUAL
    status = Status.GRADER_TIMEOUT if comparison is Equality.TIMEOUT else Status.OK
    return Grade(correct, float(correct), answer, status)


#: The answer that a grader finds, and its comparison with the reference.
_Verdict = tuple[str | None, Equality]


def _own(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Verdict:
    """Return the verdict of our own grader."""
    right_letter = reference_letter(reference)
    if choices or right_letter:
        chosen = _letter_in_text(choices, text, with_bare)
        return chosen, Equality(chosen == (right_letter or reference))
    answer = _open_answer(text, with_bare)
    return answer, Equality.UNEQUAL if answer is None else equality.same(reference, answer)


def _letter_in_text(choices: Sequence[str], text: str, with_bare: bool) -> str | None:
    """Return the letter that a text chooses; any boxed or stated answer if the problem lists no choices."""
    marked = marked_answer(text)
    answer = chosen_letter(marked, choices)
    if answer is None and not choices:
        answer = boxed_or_stated(marked)
    if answer is None and with_bare and (last := bare_last_line(marked)):
        answer = chosen_letter(last, choices)
    return answer


def _open_answer(text: str, with_bare: bool) -> str | None:
    """Return the answer in a text to a problem without choices."""
    marked = marked_answer(text)
    answer = boxed_or_stated(marked)
    if answer is None and (with_bare or marked is not text):
        answer = bare_last_line(marked)
    if answer is None:
        answer = wrapped_last_line(text) if marked is text else without_signs(marked)[:LONGEST]
    return answer or None


def _dynts(reference: str, choices: Sequence[str], text: str, _: bool) -> _Verdict:
    answer = _dynts_letter(text) if choices else _dynts_answer(text)
    if not answer:
        return None, Equality.UNEQUAL
    if re.fullmatch("[A-E]", reference):
        return answer, Equality(_dynts_letter(answer) == reference)
    if _is_close_for_dynts(reference, answer):
        return answer, Equality.EQUAL
    return answer, equality.same(reference, answer)


def _is_close_for_dynts(reference: str, answer: str) -> bool:
    """Return whether both are numbers within 1e-4, with or without percent."""

    def value(text: str) -> Fraction | None:
        return normal.rational(normal.without_unit(normal.tidy(text)).rstrip("%\\ "))

    expected = value(reference)
    given = value(answer)
    if expected is None or given is None:
        return False
    tolerance = max(abs(expected), abs(given)) / 10_000
    return any(abs(expected * scale - given) <= tolerance for scale in (Fraction(1, 100), 1, 100))


def _dynts_letter(text: str) -> str:
    head, *tails = re.split("choice is|answer is", text)
    letters = re.findall(r"\b([A-E])\b", (tails[-1] if tails else head).upper())
    if not letters:
        return ""
    # The first letter after an announcement, else the last of the text.
    return str(letters[0] if tails else letters[-1])


def _dynts_answer(text: str) -> str:
    if "boxed" in text:
        return last_box(text[text.rindex("boxed") - 1 :]) or ""
    for words in ("he answer is", "final answer is"):
        if words in text:
            return text.split(words)[-1].strip().removeprefix(":").removesuffix(".").strip()[:LONGEST]
    numbers = re.findall(r"-?\d*\.?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else ""


def _math_verify(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Verdict:
    if choices:
        return _own(reference, choices, text, with_bare)
    return boxed_or_stated(text) or text[-SHORT:].strip() or None, judges.compare(
        reference, text[-TAIL:], find_in_text=True
    )


GRADERS: Mapping[str, Callable[[str, Sequence[str], str, bool], _Verdict]] = {
    OWN: _own,
    "dynts": _dynts,
    "math-verify": _math_verify,
}
