r"""Sets of real numbers, in whatever way they are written: `\{x|-2<=x<1\}`, `-2 \le x < 1`, `[-2,1)`, `x \ne 2`."""

from __future__ import annotations

import re
from typing import NamedTuple

_LEFT, _RIGHT = r"-\infty", r"\infty"
_LESS, _GREATER = ("<", r"\le"), (">", r"\ge")
_RELATION = re.compile(r"(<=|>=|<|>|=|\\(?:le|ge|ne|lt|gt)(?![A-Za-z]))")
_SPELLED = {"<=": r"\le", ">=": r"\ge", r"\lt": "<", r"\gt": ">"}
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z]|\([^()|:]*\))\s*(?:\\in\s*\\?[A-Za-z]+(?:\{[A-Z]\})?\s*)?[|:](.*)\\\}", re.DOTALL
)
_INTERVAL = re.compile(r"([(\[])([^()\[\],]*),([^()\[\],]*)([)\]])")
_POINT = re.compile(r"\\\{([^{}|:,]*)\\\}")


class Piece(NamedTuple):
    """An interval; a point is one whose ends are the same and belong to it."""

    low: str
    high: str
    with_low: bool
    with_high: bool


def condition(text: str) -> str | None:
    """What a set builder asks of its elements; None for anything else."""
    match = _BUILDER.fullmatch(text)
    return match[2].strip() if match else None


def variable(text: str) -> str | None:
    """The free variable of an inequality; None for a set, in which it is bound."""
    if condition(text) is not None:
        return None
    return next((side.strip() for side in _RELATION.split(text)[::2] if re.fullmatch(r"\s*[A-Za-z]\s*", side)), None)


def is_relation(text: str) -> bool:
    """Whether a text is a set builder or a chain of inequalities."""
    return condition(text) is not None or bool(re.search(r"[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])", text))


def pieces(text: str) -> list[Piece] | None:
    """The intervals whose union a tidy answer is, in its order; None where it is no such set."""
    inner = condition(text)
    if inner is None:
        inner = re.sub(r"^\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|=\s*(?=[(\[]))", "", text)
    separators = r"\s+or\s+|\\cup(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])"
    all_pieces: list[Piece] = []
    for part in re.split(separators, f" {inner} "):
        some = _interval(part.strip()) or _chain(part)
        if some is None:
            return None
        all_pieces += some
    return all_pieces


def _interval(text: str) -> list[Piece] | None:
    if match := _INTERVAL.fullmatch(text):
        return [Piece(_end(match[2]), _end(match[3]), match[1] == "[", match[4] == "]")]
    if match := _POINT.fullmatch(text):
        return [Piece(match[1], match[1], True, True)]
    return None


def _end(text: str) -> str:
    return re.sub(r"^\+\s*(?=\\infty)", "", text.strip())


def _chain(text: str) -> list[Piece] | None:
    r"""`x > 2`, `2 < x`, `-1 < x \le 2`, `x = 2`, `x \ne 2`: one variable, at one place."""
    parts = [part.strip() for part in _RELATION.split(text)]
    sides, signs = parts[::2], [_SPELLED.get(sign, sign) for sign in parts[1::2]]
    places = [i for i, side in enumerate(sides) if re.fullmatch(r"[A-Za-z]", side)]
    if not signs or len(sides) > 3 or len(places) != 1 or not all(sides):
        return None
    at = places[0]
    if len(sides) == 3:
        if at != 1 or not any(all(sign in direction for sign in signs) for direction in (_LESS, _GREATER)):
            return None
        (low, first), (high, second) = (sides[0], signs[0]), (sides[2], signs[1])
        if first in _GREATER:
            (low, first), (high, second) = (high, second), (low, first)
        return [Piece(low, high, first not in "<>", second not in "<>")]
    bound, sign = sides[1 - at], signs[0]
    if sign == "=":
        return [Piece(bound, bound, True, True)]
    if sign == r"\ne":
        return [Piece(_LEFT, bound, False, False), Piece(bound, _RIGHT, False, False)]
    below = (sign in _LESS) == (at == 0)
    closed = sign not in "<>"
    return [Piece(_LEFT, bound, False, closed) if below else Piece(bound, _RIGHT, closed, False)]
