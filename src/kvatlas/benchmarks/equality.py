"""When two answers are the same: spelling, exact numbers, parts of lists, and algebra where nothing else decides.

Also pools equal answers, so that a majority is one over answers and not over spellings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvatlas.benchmarks import judges, normal, solution_sets, units
from kvatlas.benchmarks.answers import LONGEST
from kvatlas.benchmarks.judges import Verdict

T = TypeVar("T")

_OPEN, _CLOSE = "([{", ")]}"
#: What a value may be given to: a name, a function, a tuple of names, an event and its probability, a named point.
_NAME = r"[A-Za-z](?:_\{?\w{1,3}\}?)?"
_EVENT = r"[A-Za-z]\w{0,3}(?:\s*(?:\\cap|\\cup)\s*\w+)*"
_ASSIGNED = re.compile(
    rf"^\s*(?:(?:{_NAME}\s*(?:\({_EVENT}(?:\s*[|=,]\s*\w+)*\))?|\({_NAME}(?:\s*,\s*{_NAME})+\s*\)|{_EVENT})\s*"
    r"(?:=(?!.*=)|\\in(?![A-Za-z]))\s*(?=\S)|[A-Z]\s*(?=\([^()]*,))"
)
#: A side of an equation that is more than the name of a value.
_COMPOUND = re.compile(r"[+*/^-]|\d\s*[A-Za-z\\]|\\(?:frac|cdot|times|sqrt)")
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
    groups: list[list[int]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for pool in groups:
            first = answers[pool[0]]
            if first == answer or (first is not None and same(first, answer) is Verdict.EQUAL):
                pool.append(index)
                break
        else:
            groups.append([index])
    return groups


def _same(value: str, other: str) -> Verdict:
    if not value or not other:
        return Verdict.UNEQUAL
    if normal.compact(value).casefold() == normal.compact(other).casefold():
        return _case(value, other)
    if units.differ(value, other):
        return Verdict.UNEQUAL
    decided = _as_time(value, other) or _as_numbers(value, other) or _as_ratios(value, other)
    if decided is not None:
        return decided
    if _is_words(value) or _is_words(other):
        return _as_words(value, other)
    decided = _as_solutions(value, other)
    if decided is not None:
        return decided
    if _is_equation(value) and not re.search(r"[=<>]|\\(?:le|ge)(?![A-Za-z])", other):
        return Verdict.UNEQUAL
    value, other = _without_subject(value, other)
    decided = _as_parts(value, other)
    if decided is not None:
        return decided
    value, other = units.without_unit(value), units.without_unit(other)
    if normal.compact(value) == normal.compact(other):
        return Verdict.EQUAL
    decided = _as_numbers(value, other)
    if decided is not None:
        return decided
    return judges.compare(normal.algebra(value), normal.algebra(other))


def _case(value: str, other: str) -> Verdict:
    # Words may differ in case ("East"), symbols may not ("a" and "A").
    exact = normal.compact(value) == normal.compact(other)
    return Verdict(exact or (_is_words(value) and _is_words(other)))


def _as_numbers(value: str, other: str) -> Verdict | None:
    """The verdict where both are plain numbers, in any spelling and with any unit."""
    first, second = (normal.rational(units.without_unit(text)) for text in (value, other))
    if first is None or second is None:
        return _as_based(value, other)
    if first == second:
        return Verdict.EQUAL
    # A percentage may be stated with or without its sign, whatever the question asked for.
    percent, other_percent = (text.rstrip().endswith("%") for text in (value, other))
    if percent != other_percent and (first * 100 == second if percent else second * 100 == first):
        return Verdict.EQUAL
    rounded = abs(first - second) <= abs(first) / 10**6 and any("." in text for text in (value, other))
    return Verdict(rounded)


def _as_based(value: str, other: str) -> Verdict | None:
    """Numbers with a base: the base may be left out by the answer, as the question states it."""
    first, second = (re.fullmatch(r"(\d+)(?:_\{?(\d+)\}?)?", normal.compact(text)) for text in (value, other))
    if first is None or second is None or not (first[2] or second[2]):
        return None
    return Verdict(first[1] == second[1] and (first[2] == second[2] or not second[2]))


def _as_time(value: str, other: str) -> Verdict | None:
    """Times of day, `5am` or `1:58 p.m.`."""
    pattern = re.compile(r"(\d{1,2})(?::(\d\d))?\s*([ap])\.?\s?m\.?", re.IGNORECASE)
    first, second = pattern.fullmatch(value), pattern.fullmatch(other)
    if first is None or second is None:
        return None

    def clock(match: re.Match[str]) -> tuple[int, int, str]:
        return int(match[1]), int(match[2] or 0), match[3].lower()

    return Verdict(clock(first) == clock(second))


def _as_ratios(value: str, other: str) -> Verdict | None:
    """Ratios, `2:3:4`: numbers in proportion; other terms one by one."""
    first, second = (re.split(r":|(?<=\d)\s+to\s+(?=\d)", text) for text in (value, other))
    if len(first) < 2 or len(second) < 2 or any(re.search(r"\\\{|\(|\[|=", text) for text in (value, other)):
        return None
    if len(first) != len(second):
        return Verdict.UNEQUAL
    values, others = ([normal.rational(part) for part in parts] for parts in (first, second))
    numbers = [(a, b) for a, b in zip(values, others, strict=True) if a is not None and b is not None]
    if len(numbers) == len(first):
        return Verdict(all(a * others[0] == b * values[0] for a, b in numbers))  # type: ignore[operator]
    return _all_equal(first, second)


def _as_solutions(value: str, other: str) -> Verdict | None:
    """Sets of real numbers by their intervals, where one of the two is a relation or a union."""
    if not any(solution_sets.is_relation(text) or r"\cup" in text for text in (value, other)):
        return None
    first, second = solution_sets.pieces(value), solution_sets.pieces(other)
    if first is None or second is None:
        conditions = [solution_sets.condition(text) for text in (value, other)]
        if conditions[0] and conditions[1]:
            return _same(conditions[0], conditions[1])
        return Verdict.UNEQUAL if conditions[0] and normal.rational(other) is not None else None
    names = {solution_sets.variable(text) for text in (value, other)} - {None}
    return Verdict.UNEQUAL if len(names) > 1 else _matched(first, second, _same_piece)


def _same_piece(piece: solution_sets.Piece, other: solution_sets.Piece) -> Verdict:
    return _all_equal(piece[:2], other[:2]) if piece[2:] == other[2:] else Verdict.UNEQUAL


def _is_equation(text: str) -> bool:
    """Whether a text relates expressions, and does not only name a value."""
    left, sign, right = text.partition("=")
    return bool(sign) and "=" not in right and not _ASSIGNED.match(text) and bool(_COMPOUND.search(left))


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(units.without_unit(text).strip()))


def _as_words(value: str, other: str) -> Verdict:
    def words(text: str) -> list[str]:
        folded = [word.casefold() for word in re.findall(r"[A-Za-z]+|\d+", text)]
        return [word for word in folded if word not in ("a", "an", "the", "is", "it")]

    return Verdict(words(value) == words(other) and bool(words(value)))


def _without_subject(value: str, other: str) -> tuple[str, str]:
    """Both without `x =`, unless the other one is an equation about something else."""
    first, second = _ASSIGNED.match(value), _ASSIGNED.match(other)
    if first and second and normal.compact(first[0]) != normal.compact(second[0]):
        return value, other
    return (
        _ASSIGNED.sub("", value, count=1) if first and (second or "=" not in other) else value,
        _ASSIGNED.sub("", other, count=1) if second and (first or "=" not in value) else other,
    )


def _as_parts(value: str, other: str) -> Verdict | None:
    """The verdict on tuples, intervals, sets and bare lists, part by part; None where neither is one."""
    first, second = _parts(value), _parts(other)
    if first is None or second is None:
        # math-verify would make a set of a bare list: "3, 3, 3" is not 3.
        listed = first or second
        return Verdict.UNEQUAL if listed and listed[0] == ("", "") else None
    (brackets, parts), (other_brackets, other_parts) = first, second
    if len(parts) != len(other_parts) or len(parts) > PARTS:
        return Verdict.UNEQUAL
    names, other_names = _names(parts), _names(other_parts)
    if names and other_names and set(names) == set(other_names):
        places = [other_names.index(name) for name in names]
        return _all_equal(parts, [other_parts[index] for index in places])
    loose = {("", ""), (r"\{", r"\}")}
    if {brackets, other_brackets} <= loose:
        return _matched(parts, other_parts, _same)
    # The answer may put brackets around a bare list, or name each part of a tuple; a bare list is no tuple.
    alike = brackets in (other_brackets, ("", "")) or (bool(other_names) and other_brackets == ("", ""))
    return _all_equal(parts, other_parts) if alike else Verdict.UNEQUAL


def _names(parts: Sequence[str]) -> list[str]:
    """What each part names; empty where not all do, or two the same."""
    named = [match[0] for part in parts if (match := re.match(rf"\s*{_NAME}\s*=", part))]
    names = [normal.compact(name) for name in named]
    return names if len(names) == len(parts) == len(set(names)) else []


def _all_equal(parts: Sequence[str], others: Sequence[str]) -> Verdict:
    for a, b in zip(parts, others, strict=True):
        verdict = _same(a, b)
        if verdict is not Verdict.EQUAL:
            return verdict
    return Verdict.EQUAL


def _matched(parts: Sequence[T], others: Sequence[T], equal: Callable[[T, T], Verdict]) -> Verdict:
    """Whether each part equals one of the others, in any order (equality is transitive, so any partner will do)."""
    left = list(others)
    for part in parts:
        for candidate in left:
            verdict = equal(part, candidate)
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
