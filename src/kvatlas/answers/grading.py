r"""From a model's text to a grade: find the answer (answers/finding.py), then compare it with the reference
(answers/equality.py), by the grader that a spec names.

`kvatlas` is our own grader. `dynts` follows the code of DynTS (qw_evaluation/parser.py, Robin930/DynTS at a55dc37,
after Qwen2.5-Math): the last box, else the text after "he answer is" or "final answer is", else the last number;
numbers within 1e-4, with or without percent; of choices the last letter A to E that stands alone, in any case.
`math-verify` gives the whole answer to that library.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from kvatlas.answers import equality, finding, judges, normal, quantities
from kvatlas.answers.judges import Equality
from kvatlas.core import Grade, Status

OWN = "kvatlas"
#: Rises whenever a grade of another grader changes.
VERSION = 5


def reference_letter(reference: str) -> str:
    """Return the letter of a reference answer such as `B`, `(B)` or `$B$`; "" for other answers."""
    match = re.fullmatch(r"\$?\s*(?:\\text\s*\{)?\s*\(?\s*([A-K])\s*\)?\s*\}?\s*\$?", reference)
    return match[1] if match else ""


def grade_text(grader: str, reference: str, choices: Sequence[str], text: str, with_bare: bool = False) -> Grade:
    """Grade a text. With `with_bare` a bare last line is an answer, too, as the prompt did not say how to end."""
    answer, comparison = GRADERS[grader](reference, choices, text, with_bare)
    if answer is None:
        return Grade(False, 0.0, None, Status.NO_ANSWER)
    correct = comparison is Equality.EQUAL
    status = Status.GRADER_TIMEOUT if comparison is Equality.TIMEOUT else Status.OK
    return Grade(correct, float(correct), answer, status)


#: The answer that a grader finds, and its comparison with the reference.
_Graded = tuple[str | None, Equality]


def _grade_by_rules(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Graded:
    """Grade by our own rules."""
    marked = finding.marked_answer(text)
    right_letter = reference_letter(reference)
    if choices or right_letter:
        # A letter; any boxed or stated answer if the problem lists no choices.
        answer = finding.chosen_letter(marked, choices)
        if answer is None and not choices:
            answer = finding.boxed_or_stated(marked)
        if answer is None and with_bare and (last := finding.bare_last_line(marked)):
            answer = finding.chosen_letter(last, choices)
        return answer, Equality(answer == (right_letter or reference))

    answer = finding.boxed_or_stated(marked)
    if answer is None and (with_bare or marked is not text):
        answer = finding.bare_last_line(marked)
    if answer is None:
        answer = finding.wrapped_last_line(text) if marked is text else finding.without_signs(marked)[: normal.LONGEST]
    return (answer, equality.same(reference, answer)) if answer else (None, Equality.UNEQUAL)


def _grade_as_dynts(reference: str, choices: Sequence[str], text: str, _: bool) -> _Graded:
    """Grade as the code of DynTS."""
    if choices:
        answer = _dynts_letter(text)
    elif "boxed" in text:
        answer = finding.last_box(text[text.rindex("boxed") - 1 :]) or ""
    else:
        numbers = re.findall(r"-?\d*\.?\d+", text.replace(",", ""))
        answer = numbers[-1] if numbers else ""
        # Where both stand, the last words count.
        for words in ("final answer is", "he answer is"):
            if words in text:
                answer = text.split(words)[-1].strip().removeprefix(":").removesuffix(".").strip()[: normal.LONGEST]
    if not answer:
        return None, Equality.UNEQUAL
    if re.fullmatch("[A-E]", reference):
        return answer, Equality(_dynts_letter(answer) == reference)

    # Numbers within 1e-4, with or without percent.
    tidy = [quantities.without_unit(normal.tidy(value)).rstrip("%\\ ") for value in (reference, answer)]
    expected, given = (normal.rational(value) for value in tidy)
    if expected is not None and given is not None:
        tolerance = max(abs(expected), abs(given)) / 10_000
        if any(abs(expected * scale - given) <= tolerance for scale in (Fraction(1, 100), 1, 100)):
            return answer, Equality.EQUAL
    return answer, equality.same(reference, answer)


def _dynts_letter(text: str) -> str:
    """Return the letter A to E that a text chooses; "" without any."""
    head, *tails = re.split("choice is|answer is", text)
    letters = re.findall(r"\b([A-E])\b", (tails[-1] if tails else head).upper())
    if not letters:
        return ""
    # The first letter after an announcement, else the last of the text.
    return str(letters[0] if tails else letters[-1])


def _grade_by_math_verify(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Graded:
    """Give the whole answer to math-verify, unless the problem has choices."""
    if choices:
        return _grade_by_rules(reference, choices, text, with_bare)
    comparison = judges.compare_expressions(reference, text[-finding.TAIL :], find_in_text=True)
    return finding.boxed_or_stated(text) or text[-finding.SHORT :].strip() or None, comparison


GRADERS: Mapping[str, Callable[[str, Sequence[str], str, bool], _Graded]] = {
    OWN: _grade_by_rules,
    "dynts": _grade_as_dynts,
    "math-verify": _grade_by_math_verify,
}
