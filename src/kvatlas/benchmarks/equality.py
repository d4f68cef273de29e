"""When two answers are the same: spelling, exact numbers, parts of lists, and algebra where nothing else decides.

Also pools equal answers, so that a majority is one over answers and not over spellings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvatlas.benchmarks import judges, normal
from kvatlas.benchmarks.answers import LONGEST
from kvatlas.benchmarks.judges import Verdict

_OPEN, _CLOSE = "([{", ")]}"
_ASSIGNED = re.compile(r"^\s*[A-Za-z](?:_\{?\w\}?)?\s*(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z]+(?:[\s'-]+[A-Za-z]+)*")
_ROMAN = re.compile(r"[IVX]+")
#: Parts of a list that are compared one by one.
PARTS = 12


def same(reference: str, answer: str) -> Verdict:
    """Whether an answer means the same as the reference; `timeout` where algebra did not end within its limits."""
    if len(answer) >= LONGEST:
        return Verdict.UNEQUAL
    return _same(normal.tidy(reference), normal.tidy(answer))


def pools(answers: Sequence[str | None]) -> list[list[int]]:
    """Indices of equal answers together, in the order of first appearance; those that are None are left out.

    The largest pool is the majority's answer (maj@k); the first of several equally large ones came first.
    """
    found: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for pool in found:
            first = answers[pool[0]]
            if first == answer or (first is not None and same(first, answer) is Verdict.EQUAL):
                pool.append(index)
                break
        else:
            found.append([index])
    return found


def _same(one: str, other: str) -> Verdict:
    if not one or not other:
        return Verdict.UNEQUAL
    if normal.compact(one).casefold() == normal.compact(other).casefold():
        return _case(one, other)
    decided = _as_numbers(one, other) or _as_time(one, other)
    if decided is not None:
        return decided
    if _is_words(one) or _is_words(other):
        return _as_words(one, other)
    one, other = _without_subject(one, other)
    decided = _as_parts(one, other)
    if decided is not None:
        return decided
    one, other = normal.without_unit(one), normal.without_unit(other)
    if normal.compact(one) == normal.compact(other):
        return Verdict.EQUAL
    decided = _as_numbers(one, other)
    if decided is not None:
        return decided
    return judges.compare(normal.algebra(one), normal.algebra(other))


def _case(one: str, other: str) -> Verdict:
    # Words may differ in case ("East"), symbols may not ("a" and "A").
    exact = normal.compact(one) == normal.compact(other)
    return Verdict(exact or (_is_words(one) and _is_words(other)))


def _as_numbers(one: str, other: str) -> Verdict | None:
    """The verdict where both are plain numbers, in any spelling and with any unit."""
    first, second = (normal.rational(normal.without_unit(text)) for text in (one, other))
    if first is None or second is None:
        return _as_based(one, other)
    if first == second:
        return Verdict.EQUAL
    # A percentage may be stated with or without its sign, whatever the question asked for.
    for text, value, wanted in ((one, first, second), (other, second, first)):
        if text.rstrip().endswith("%") and value * 100 == wanted:
            return Verdict.EQUAL
    rounded = abs(first - second) <= abs(first) / 10**6 and any("." in text for text in (one, other))
    return Verdict(rounded)


def _as_based(one: str, other: str) -> Verdict | None:
    """Numbers with a base: the base may be left out by the answer, as the question states it."""
    first, second = (re.fullmatch(r"(\d+)(?:_\{?(\d+)\}?)?", normal.compact(text)) for text in (one, other))
    if first is None or second is None or not (first[2] or second[2]):
        return None
    return Verdict(first[1] == second[1] and (first[2] == second[2] or not second[2]))


def _as_time(one: str, other: str) -> Verdict | None:
    """Times of day, `5am` or `1:58 p.m.`."""
    pattern = re.compile(r"(\d{1,2})(?::(\d\d))?\s*([ap])\.?\s?m\.?", re.IGNORECASE)
    first, second = pattern.fullmatch(one), pattern.fullmatch(other)
    if first is None or second is None:
        return None

    def clock(match: re.Match[str]) -> tuple[int, int, str]:
        return int(match[1]), int(match[2] or 0), match[3].lower()

    return Verdict(clock(first) == clock(second))


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(normal.without_unit(text).strip()))


def _as_words(one: str, other: str) -> Verdict:
    def words(text: str) -> list[str]:
        found = [word.casefold() for word in re.findall(r"[A-Za-z]+|\d+", text)]
        return [word for word in found if word not in ("a", "an", "the", "is", "it")]

    return Verdict(words(one) == words(other) and bool(words(one)))


def _without_subject(one: str, other: str) -> tuple[str, str]:
    """Both without `x =`, unless both name a subject and these differ."""
    first, second = _ASSIGNED.match(one), _ASSIGNED.match(other)
    if first and second and normal.compact(first[0]) != normal.compact(second[0]):
        return one, other
    return (_ASSIGNED.sub("", one, count=1) if first else one), (_ASSIGNED.sub("", other, count=1) if second else other)


def _as_parts(one: str, other: str) -> Verdict | None:
    """The verdict on tuples, intervals, sets and bare lists, part by part; None where neither is one."""
    first, second = _parts(one), _parts(other)
    if first is None or second is None:
        # math-verify would make a set of a bare list: "3, 3, 3" is not 3.
        listed = first or second
        return Verdict.UNEQUAL if listed and listed[0] == ("", "") else None
    (brackets, parts), (other_brackets, other_parts) = first, second
    if len(parts) != len(other_parts) or len(parts) > PARTS:
        return Verdict.UNEQUAL
    loose = {("", ""), (r"\{", r"\}")}
    ordered = not {brackets, other_brackets} <= loose
    # A tuple that lost its brackets is still the tuple; an interval that changed them is another one.
    if ordered and brackets != other_brackets and ("", "") not in (brackets, other_brackets):
        return Verdict.UNEQUAL
    return _all_equal(parts, other_parts) if ordered else _matched(parts, other_parts)


def _all_equal(parts: list[str], others: list[str]) -> Verdict:
    for a, b in zip(parts, others, strict=True):
        verdict = _same(a, b)
        if verdict is not Verdict.EQUAL:
            return verdict
    return Verdict.EQUAL


def _matched(parts: list[str], others: list[str]) -> Verdict:
    """Whether each part equals one of the others, in any order (equality is transitive, so any partner will do)."""
    left = list(others)
    for part in parts:
        for candidate in left:
            verdict = _same(part, candidate)
            if verdict is Verdict.TIMEOUT:
                return verdict
            if verdict is Verdict.EQUAL:
                left.remove(candidate)
                break
        else:
            return Verdict.UNEQUAL
    return Verdict.EQUAL


def _parts(text: str) -> tuple[tuple[str, str], list[str]] | None:
    """Brackets and parts of a list; None for a single expression."""
    text = text.strip()
    brackets, inner = ("", ""), text
    for opening, closing in ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(closing) and _spans(text, opening, closing):
            brackets, inner = (opening, closing), text[len(opening) : -len(closing)]
            break
    if re.search(r"\\begin|\||:", inner):
        return None
    parts = [expanded for part in _split(inner) for expanded in _split_signs(part)]
    if len(parts) < 2:
        return (brackets, parts) if brackets == (r"\{", r"\}") else None
    return brackets, parts


def _spans(text: str, opening: str, closing: str) -> bool:
    """Whether the first bracket is closed by the last."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth == 0 and i < len(text) - 1 and c in _CLOSE:
            return False
    return True


def _split(text: str) -> list[str]:
    """At top-level commas, semicolons, "and" and "or"; commas of thousands join digits."""
    text = re.sub(r"\s(?:and|or)\s", ", ", f" {text} ")
    text = normal.without_thousands(text)
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth <= 0 and c in ",;":
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _split_signs(text: str) -> list[str]:
    r"""`1 \pm 2` as the two expressions that it stands for."""
    if text.count(r"\pm") != 1:
        return [text]
    return [text.replace(r"\pm", sign).strip() for sign in ("+", "-")]
