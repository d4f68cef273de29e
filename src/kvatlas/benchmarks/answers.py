r"""From a model's text to a grade: find the answer (the last `\boxed{}`, else a stated final answer; letters for
choices), then compare it with the reference (benchmarks/equality.py), by the grader that a spec names.

`kvatlas` is our own grader. `dynts` follows the code of DynTS (qw_evaluation/parser.py, Robin930/DynTS at a55dc37,
after Qwen2.5-Math): the last box, else the text after "he answer is" or "final answer is", else the last number;
numbers within 1e-4, with or without percent; of choices the last letter A to E that stands alone, in any case.
`math-verify` gives the whole answer to that library.

The search is linear in the length of the text, which comes from a model and may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from kvatlas.benchmarks import equality, judges, normal
from kvatlas.benchmarks.judges import Equality
from kvatlas.benchmarks.normal import LONGEST
from kvatlas.core import Grade, Status

OWN = "kvatlas"
#: Rises whenever a verdict of another grader changes.
VERSION = 1
#: Characters at the end of a text that are searched for an unboxed final answer.
TAIL = 20_000
#: The longest bare last line that counts as an answer, in characters.
SHORT = 80
#: The most boxes within boxes that are followed outwards.
DEPTH = 8

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_STATED = re.compile(
    r"(?:final\s{1,3}answer|answer|result)[*_]{0,3}\s{0,3}"
    r"(?:(?:to|of|for)\s[^\n.:=]{1,80}?\s)?"
    r"(?:is(?![A-Za-z])|=|:|are(?![A-Za-z])|should\s+be|must\s+be)[\s:=*]{0,8}"
    r"|^(?:#{1,6}\s{1,3}|\*\*)(?:the\s)?final\s{1,3}answer[*_]{0,3}[ \t]{0,3}\n\s{0,8}",
    re.IGNORECASE | re.MULTILINE,
)
#: The beginning of an answer that is a sentence: "the largest $n$ is 34".
_SENTENCE = re.compile(
    r"^(?=[A-Za-z]{2,}\s|\$?[A-Za-z]\$?\s)[^\n]{0,200}\s(?:is|are|equals)(?![A-Za-z])\s*:?(?=\s*[^\s.])"
)
#: The end of a stated answer: of the line, or a full stop that ends a sentence (not the point of 3.5).
_END = re.compile(
    r"\n|(?<!\\)[.!;](?=\s|$|\*|\$\s*$)|,\s+(?:so|since|because|which|as|where|and\s+(?:we|this|that))(?![A-Za-z])"
)
_BECAUSE = re.compile(r"\s+(?:because|since|as|by|when|if|which|obtained|after)(?![A-Za-z])")
#: Signs around a formula, words in it, and relations: a formula with words or relations is a step and no answer.
_DRESS = re.compile(r"^(?:\*\*|\$|\\\(|\\\[|\s)+|(?:\*\*|\$|\\\)|\\\]|\s)+(?=\.?$)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_RELATION = re.compile(r"[=<>:?≤≥≈]|\\(?:leq?|geq?|approx|neq?|implies|to)(?![A-Za-z])")
#: The text between two boxes of one list.
_MARK = r"\s|\$|\*|\\[()\[\]]"
_JOINT = re.compile(
    rf"(?:{_MARK})*(?:,(?:\s*(?:and|or))?|;|and|or)(?![A-Za-z])(?:{_MARK}|[A-Za-z](?:_\{{?\w\}}?)?\s*=)*"
)


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` that is not empty, boxes inside it unwrapped; None without any.

    An unclosed box holds the rest of its line; `\boxed 7` holds the next word.
    """
    boxes = _boxes(text)
    return boxes[-1] if boxes else None


def _boxes(text: str) -> list[str]:
    r"""Return the last box, behind the boxes of the same list: `\boxed{1} and \boxed{-2}`."""
    starts = [match.start() for match in _BOX.finditer(text)]
    boxes: list[str] = []
    first = last = len(text)
    for start in reversed(starts[-4 * DEPTH :]):
        content, end = _content(text, start)
        if not content.strip() and not boxes:
            continue
        if boxes and end >= last:
            # It encloses the last box: the outer one is the answer.
            boxes.pop(0)
        elif boxes and not _JOINT.fullmatch(text[end + 1 : first][: SHORT + 1]):
            break
        content = content.strip()
        for _ in range(DEPTH):
            if not _BOX.match(content):
                break
            content = _content(content, 0)[0].strip()
        boxes.insert(0, content[:LONGEST])
        first, last = start, end
    return boxes


def _content(text: str, start: int) -> tuple[str, int]:
    """Return the content of the box at `start` and the place where it ends."""
    match = _BOX.match(text, start)
    assert match is not None
    at = match.end()
    if at >= len(text) or text[at] != "{":
        word = re.compile(r"-?\\?\w[\w.,/]*").match(text, at)
        return (word[0].rstrip(".,"), word.end()) if word else ("", at)
    depth, i = 0, at
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[at + 1 : i], i
        i += 1
    line = text[at + 1 :].split("\n", 1)[0][: 4 * LONGEST]
    line = re.split(r"\$|\\\)|\\\]|[.!](?=\s|$)", line, maxsplit=1)[0].strip()
    # Of the braces of an unclosed box only those that close something belong to the answer.
    return (line[:-1] if line.count("}") > line.count("{") else line), len(text)


def stated(text: str) -> str | None:
    """Return the last "the answer is ..." of a text without boxes; None without any."""
    tail = text[-TAIL:]
    for match in reversed(list(_STATED.finditer(tail))):
        part = tail[match.end() : match.end() + LONGEST]
        for end in (_END, _BECAUSE):
            part = end.split(part, maxsplit=1)[0]
        part = _SENTENCE.sub("", part).strip().strip("*").strip().rstrip(".,;:").strip()
        if re.search(r"[^\W_]", part):
            return part
    return None


def bare(text: str) -> str | None:
    """Return the last line if it is an answer and no sentence: a number or a formula alone, or after `####`."""
    line = text[-TAIL:].rstrip().rpartition("\n")[2].strip()[:LONGEST]
    marked = line.startswith("####")
    part = _DRESS.sub("", line.removeprefix("####").strip()).rstrip(".").strip()
    formula = len(part) <= SHORT and not _RELATION.search(part) and not _WORD.search(_COMMAND.sub(" ", part))
    return part if re.search(r"[^\W_]", part) and (marked or (formula and re.search(r"\d|\\", part))) else None


def letter(text: str, choices: Sequence[str]) -> str | None:
    r"""Return the letter that a text chooses: `\boxed{C}`, `(C)`, `The answer is C.`; never the A of "Consider A."

    A box may hold the text of one of the `choices` instead of its letter. Without choices all letters count.
    """
    last = chr(ord("A") + len(choices) - 1) if choices else "Z"
    box = boxed(text)
    if box is not None:
        return _leading_letter(box, last) or _choice(box, choices)
    tail = text[-TAIL:]
    wrapped = rf"(?:[*$({{\[]|\\\(|\\text|\\mathrm|\\textbf|\\mathbf){{0,6}}(?P<letter>[A-{last}])"
    # A lone A may be an article and a lone I a pronoun: they count only where a sentence could end.
    after = r"(?=[*$)}\].:,;!]|\\\)|\s*$|\s*\n|\s+(?:because|since|as|is|and|with|which)\b|(?<![AI])\s)"
    statement = re.compile(
        r"(?i:answer|option|choice|choose|select|pick)(?i:\s{1,3}(?:option|choice|letter|is|are|would\s+be|must\s+be|should"
        rf"\s+be)|\s{{0,3}}[:=]){{0,4}}[\s*:]{{0,6}}{wrapped}(?![A-Za-z'’]){after}"
    )
    matches = list(statement.finditer(tail))
    if matches:
        return matches[-1]["letter"]
    lines = [line for line in tail.splitlines() if line.strip()]
    alone = rf"[\s*$(\[{{]*(?:(?i:answer)[\s:*$(\[{{]*)?([A-{last}])[\s*$)\]}}.]*"
    match = re.fullmatch(alone, lines[-1]) if lines else None
    return match[1] if match else None


def _leading_letter(box: str, last: str) -> str | None:
    inner = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mathsf|operatorname|textit)(?![A-Za-z])\s*", "", box)
    match = re.match(rf"[\s{{(\[$*]*(?:(?i:option|choice|answer)[\s:({{\[]*)?([A-{last}])(?![A-Za-z0-9])", inner)
    if match is None:
        return None
    rest = inner[match.end() :]
    # "C" or "C) 3 eV" or "C: ...", but not the C of "C = 3" or "C + 1".
    return match[1] if not rest.strip(" })]$*.") or re.match(r"[\s})\]$*]*[).:,\-]", rest) else None


def _choice(box: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the only choice with the text of a box."""

    def plain(text: str) -> str:
        return re.sub(r"[\s$]|\\(?:text|mathrm|left|right|[,;!])", "", text).strip("{}.").casefold()

    chosen = [i for i, choice in enumerate(choices) if plain(choice) == plain(box)]
    return chr(ord("A") + chosen[0]) if len(chosen) == 1 else None


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


def _final(text: str) -> str | None:
    """Return the boxes of a text, each content once, else its statement."""
    return ", ".join(dict.fromkeys(filter(None, _boxes(text)))) or stated(text)


def _own(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Verdict:
    right_letter = reference_letter(reference)
    by_letter = bool(choices or right_letter)
    answer = letter(text, choices) if by_letter else None
    if answer is None and not choices:
        answer = _final(text)
    if answer is None and with_bare:
        last = bare(text)
        answer = letter(last, choices) if last and by_letter else last
    if answer is None:
        return None, Equality.UNEQUAL
    return answer, Equality(answer == (right_letter or reference)) if by_letter else equality.same(reference, answer)


def _dynts(reference: str, choices: Sequence[str], text: str, _: bool) -> _Verdict:
    answer = _dynts_letter(text) if choices else _dynts_answer(text)
    if not answer:
        return None, Equality.UNEQUAL
    if re.fullmatch("[A-E]", reference):
        return answer, Equality(_dynts_letter(answer) == reference)
    first, second = (
        normal.rational(normal.without_unit(normal.tidy(value)).rstrip("%\\ ")) for value in (reference, answer)
    )
    if first is not None and second is not None:
        within = max(abs(first), abs(second)) / 10_000
        if any(abs(first * scale - second) <= within for scale in (Fraction(1, 100), 1, 100)):
            return answer, Equality.EQUAL
    return answer, equality.same(reference, answer)


def _dynts_letter(text: str) -> str:
    head, *tails = re.split("choice is|answer is", text)
    letters = re.findall(r"\b([A-E])\b", (tails[-1] if tails else head).upper())
    return (letters[0] if tails else letters[-1]) if letters else ""


def _dynts_answer(text: str) -> str:
    if "boxed" in text:
        return boxed(text[text.rindex("boxed") - 1 :]) or ""
    for words in ("he answer is", "final answer is"):
        if words in text:
            return text.split(words)[-1].strip().removeprefix(":").removesuffix(".").strip()[:LONGEST]
    numbers = re.findall(r"-?\d*\.?\d+", text.replace(",", ""))
    return numbers[-1] if numbers else ""


def _math_verify(reference: str, choices: Sequence[str], text: str, with_bare: bool) -> _Verdict:
    if choices:
        return _own(reference, choices, text, with_bare)
    return _final(text) or text[-SHORT:].strip() or None, judges.compare(reference, text[-TAIL:], "read")


GRADERS: Mapping[str, Callable[[str, Sequence[str], str, bool], _Verdict]] = {
    OWN: _own,
    "dynts": _dynts,
    "math-verify": _math_verify,
}
