"""Comparison of two answers: a table of rules, then algebra if no rule decides."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from kvatlas.answers import judges, normal, quantities
from kvatlas.answers.judges import Equality

T = TypeVar("T")
#: The decision of a rule on two tidy answers: equal or not, or both rewritten for the rules that follow, or None.
Decision = Equality | tuple[str, str] | None

_GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega|ell)(?![A-Za-z])"
_NAME = rf"(?:[A-Za-z]|{_GREEK})'{{0,3}}(?:_\{{?\w{{1,3}}\}}?)?"
#: A letter or a word, as a name has one: no command but those of Greek letters and angles.
_LETTER = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]|{_GREEK}|\\(?:angle|max|min)(?![A-Za-z])")
#: What a name of one quantity may hold: an index, the argument of a function.
_OF_A_NAME = re.compile(r"_\{[^{}]*\}|(?<=[f-hF-HPQ'])\([^()]*\)")
#: The beginning of a name that is one quantity of some object: \gcd(a,b), \angle ABC, \frac{dy}{dx}, \sigma^2.
_QUANTITY = re.compile(
    r"\s*\\(?:(?:gcd|det|lim|max|min|sup|inf|arg|deg|dim|int|iint|sum|prod|angle|nabla)(?![A-Za-z])"
    r"|frac\{(?:d|\\partial)|sigma\s*\^\s*\{?2\}?\s*$)"
)
#: Words before a value that say what it is: "The answer is 7".
_LED = re.compile(
    r"^(?:[A-Za-z]+(?:\s[A-Za-z]+){0,8}?\s?(?:\sis|\sare|\sequals|:)|(?i:exactly|precisely|just|only))\s*(?=[\d\\(\[.-])"
    r"|^(?i:the\s(?:final\s)?answer\sis\s)"
)
#: The scale of a temperature.
_SCALE = re.compile(r"(?:\\circ|degrees?|(?<=\d))\s*([CFK])(?:elsius|ahrenheit|elvins?)?\s*$")
#: Any relation; and an approximation, which is an assignment of a rounded value.
_ANY_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|lt|gt|equiv|approx|in|notin|to|sim)(?![A-Za-z])")
_APPROXIMATED = re.compile(rf"^\s*{_NAME}\s*\\approx(?![A-Za-z])")
_VALUE_FIRST = re.compile(rf"([^=<>,;]+)=\s*({_NAME})\s*")
#: The range of a parameter, behind a solution that has it.
_CONDITION = re.compile(r"\s*[,(]\s*([a-z]\s*\\in\s*(?:\\mathbb\{[NZR]\}|[NZR])(?:\^?[+*])?)\s*\)?$")
_MODULUS = re.compile(r"\s*\(\\mod \w+\)\s*$|\s*\\b?mod(?![A-Za-z])\s*\w+\s*$")
#: The name of a point, before its coordinates.
_POINT = re.compile(r"^\s*[A-Z]\s*(?=\([^()]*,)")
#: A side of an equation with more than the name of a value.
_COMPOUND = re.compile(r"[+*/^-]|\d\s*[A-Za-z\\]|\\(?:frac|cdot|times|sqrt)")
#: The sign of a value that is ruled out, without a subject; and words that rule one out.
_DENIED = re.compile(r"^\\ne(?![A-Za-z])|(?<![^\W_])(?i:not|never|wrong|incorrect|false|except)(?![^\W_])")
_WORDS = re.compile(r"(?=.*[^\W\d_]{4}|[^\W\d_]{2})[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
#: Letters that are factors and no word.
_PRODUCT = re.compile(r"[A-Z]{2}|[a-d]{2,3}|[b-df-hj-np-tv-z]{2,3}")
_AND = re.compile(r"[,;&]|(?<![^\W_])(?:and|or)(?![^\W_])")
#: Words that make the order of others matter.
_ORDERED = {
    *("not", "no", "but", "than", "if", "then", "to", "from", "before", "after", "of", "over", "by"),
    *("never", "only", "with", "without"),
}
_OPERATOR = re.compile(r"[+*/^=<>|]|(?:^|\s)-|\\[A-Za-z]")
#: A time of day, with minutes or with "am" or "pm".
_CLOCK = re.compile(r"(2[0-4]|[01]?\d)(?::([0-5]\d))?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
#: The most parts of a list that are compared.
PARTS = 12
#: The brackets of lists without order: no brackets, and those of sets.
_SET = (r"\{", r"\}")
_LOOSE = {("", ""), _SET}
_COLUMN = re.compile(r"\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}")


def same(reference: str, answer: str) -> Equality:
    """Compare an answer with the reference; `TIMEOUT` if algebra does not end within its limits."""
    if max(len(reference), len(answer)) >= normal.LONGEST:
        return Equality.UNEQUAL
    with judges.one_answer():
        return _same(normal.tidy(reference), normal.tidy(answer))


def _same(value: str, other: str) -> Equality:
    if not value or not other:
        return Equality.UNEQUAL
    if normal.compact(value) == normal.compact(other):
        return Equality.EQUAL
    for rule in RULES:
        decision = rule(value, other)
        if isinstance(decision, Equality):
            return decision
        value, other = decision or (value, other)
    return judges.compare_expressions(normal.algebra(value), normal.algebra(other))


def _compare_denials(value: str, other: str) -> Decision:
    r"""A value that is ruled out, `\ne 9` or "not 9", differs from a value."""
    denied = [_DENIED.search(text) is not None for text in (value, other)]
    return Equality.UNEQUAL if denied[0] != denied[1] else None


def _compare_units(value: str, other: str) -> Decision:
    """Units that differ, `5 m` and `5 s`, and the names of different things, `5 apples` and `5 oranges`."""
    first_parts = quantities.by_unit(value)
    second_parts = quantities.by_unit(other)
    if first_parts and second_parts:
        return Equality(first_parts == second_parts)
    scale = _SCALE.search(value)
    other_scale = _SCALE.search(other)
    if scale and other_scale and scale[1] != other_scale[1]:
        return Equality.UNEQUAL
    first = quantities.unit_exponents(value)
    second = quantities.unit_exponents(other, loose=True)
    if first is not None and second is not None:
        return Equality.UNEQUAL if first and second and first != second else None
    # One name may say more than the other: "balls" and "red balls".
    things, other_things = map(quantities.things, (value, other))
    is_same = things <= other_things or other_things <= things
    return None if is_same or not (things and other_things) else Equality.UNEQUAL


def _compare_times(value: str, other: str) -> Decision:
    """Times of day, `5am`, `1:58 p.m.` or `13:58`, which equal no number and no ratio."""
    clocks = [match for match in map(_CLOCK.fullmatch, (value, other)) if match and (match[2] or match[3])]
    if len(clocks) == 2:
        times = [(int(match[1]), int(match[2] or 0), (match[3] or "").lower()) for match in clocks]
        return Equality(times[0] == times[1])
    return Equality.UNEQUAL if clocks and re.search(r"\d", value) and re.search(r"\d", other) else None


def _compare_numbers(value: str, other: str) -> Decision:
    """Plain numbers, in any spelling and with any unit."""
    first = normal.rational(quantities.without_unit(value))
    # The m of 12m is a unit where the reference is a number.
    second = normal.rational(quantities.without_unit(other, loose=first is not None))
    if first is None or second is None:
        return None
    if first == second:
        return Equality.EQUAL
    # A percentage may be stated with or without its sign, whatever the question asked for.
    percent, other_percent = (text.rstrip().endswith("%") for text in (value, other))
    if percent != other_percent and (first * 100 == second if percent else second * 100 == first):
        return Equality.EQUAL
    # A decimal is a rounded number, an integer is not.
    decimals = [len(digits) for digits in re.findall(r"\.(\d+)", value + other)]
    if not decimals or first.denominator == 1 or second.denominator == 1:
        return Equality.UNEQUAL
    return Equality(abs(first - second) <= min(abs(first) / 10**6, Fraction(1, 10 ** max(decimals))))


def _compare_bases(value: str, other: str) -> Decision:
    """Numbers with a base, which the answer may omit, as the question states it."""
    first, second = (re.fullmatch(r"([\dA-F]+)(?:_\{?(\d+)\}?)?", normal.compact(text)) for text in (value, other))
    if first is None or second is None or not (first[2] or second[2]):
        return None
    return Equality(first[1] == second[1] and second[2] in (first[2], None))


def _compare_ratios(value: str, other: str) -> Decision:
    """Ratios, `2:3:4`: numbers in proportion, none of them zero; other terms one by one."""
    first, second = (re.split(r":|(?<=\d)\s+to\s+(?=\d)", text) for text in (value, other))
    if len(first) < 2 or len(second) < 2 or any(re.search(r"\\\{|\(|\[|=", text) for text in (value, other)):
        return None
    if len(first) != len(second):
        return Equality.UNEQUAL
    terms = _numbers_in(first)
    other_terms = _numbers_in(second)
    if terms is None or other_terms is None:
        return _all_equal(first, second)
    if not all(terms + other_terms):
        return Equality(terms == other_terms)
    pairs = zip(terms, other_terms, strict=True)
    return Equality(all(a * other_terms[0] == b * terms[0] for a, b in pairs))


def _numbers_in(terms: Sequence[str]) -> list[Fraction] | None:
    """Return the values of terms; None if a term is no number."""
    values = [normal.rational(term) for term in terms]
    numbers = [value for value in values if value is not None]
    return numbers if len(numbers) == len(values) else None


def _compare_words(value: str, other: str) -> Decision:
    """Words in any case and number; the members of an enumeration and adjectives in any order."""
    # Letters beside an operator or a relation are symbols: xy is x*y.
    if not (_is_words(value) or _is_words(other)) or any(map(_OPERATOR.search, (value, other))):
        return None
    letters, other_letters = (re.sub(r"\s|,|;|\band\b", "", text) for text in (value, other))
    is_list = len(letters) < len(value) or len(other_letters) < len(other)
    # Choices, "BC" or "B, C", stand in the order of the alphabet; of letters without vowels a product has any order.
    is_choices = is_list and letters.isupper() and letters == "".join(sorted(set(letters)))
    if (is_choices or _PRODUCT.fullmatch(value)) and sorted(letters) == sorted(other_letters):
        return Equality.EQUAL

    members, other_members = (sorted(map(_telling_words, _AND.split(text))) for text in (value, other))
    is_alternative = [re.search(r"\bor\b", text) is None for text in (value, other)]
    return Equality(members == other_members and any(members) and is_alternative[0] == is_alternative[1])


def _telling_words(text: str) -> list[str]:
    """Return the words of a text without articles, in the singular; adjectives in alphabetical order."""
    words = [
        word
        for word in re.findall(r"[^\W\d_]+|\d+", text)
        if word not in ("a", "an", "An", "the", "The", "is", "It", "it", "on")
    ]
    singular = [re.sub(r"(?<=..[^s])s$", "", word.casefold()) for word in words]
    if _ORDERED & set(singular) or any(len(word) == 1 for word in words):
        return singular
    # The noun is the last word.
    return [*sorted(singular[:-1]), *singular[-1:]]


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(quantities.without_unit(text).strip()))


def _compare_solution_sets(value: str, other: str) -> Decision:
    """Sets of real numbers by their intervals, if one of the two is a relation or a union; set builders of other sets
    by their conditions."""
    if not any(normal.is_relation(text) or re.search(r"\\(?:cup|setminus|mathbb)", text) for text in (value, other)):
        return None
    first = normal.intervals(value)
    second = normal.intervals(other)
    if first is None or second is None:
        # Solutions that are joined by "and" are others than those joined by "or".
        joints = [set(re.findall(r"(?<!\w)(?:and|or)(?!\w)", text)) for text in (value, other)]
        if all(joints) and joints[0] != joints[1]:
            return Equality.UNEQUAL
        condition = normal.condition(value)
        other_condition = normal.condition(other)
        if condition and other_condition:
            return _same(condition, other_condition)
        # A set builder differs from a number.
        return Equality.UNEQUAL if condition and normal.rational(other) is not None else None

    names = {normal.variable(text) for text in (value, other)} - {None}
    if len(names) > 1:
        return Equality.UNEQUAL
    return _matched(first, second, _same_interval)


def _same_interval(interval: normal.Interval, other: normal.Interval) -> Equality:
    """Compare the ends of intervals, of which both must belong to them or not."""
    return _all_equal(interval[:2], other[:2]) if interval[2:] == other[2:] else Equality.UNEQUAL


def _statement(text: str) -> tuple[str, str] | None:
    r"""Return the first and last side of an equation, `x = 5`, or a membership, `x \in A`; None for another text."""
    if re.search(r"\s(?:or|and)\s", text):
        return None
    sides = [""]
    depth = 0
    for token in re.findall(r"\\[A-Za-z]+|\\.|.", text):
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if depth == 0 and (token in ",;" or (token not in ("=", r"\in") and _ANY_RELATION.fullmatch(token))):
            return None
        if depth == 0 and token in ("=", r"\in"):
            sides.append("")
        else:
            sides[-1] += token
    return (sides[0], sides[-1].strip()) if len(sides) > 1 and all(side.strip() for side in sides) else None


def _drop_subjects(value: str, other: str) -> Decision:
    """Both without `x =`, unless the other one is an equation about another subject; points without their names."""
    if "," in value and "," in other:
        value = _POINT.sub("", value)
        other = _POINT.sub("", other)

    value = _turned(_LED.sub("", value))
    # An answer may name the modulus of a residue, and say that it is rounded.
    other = _turned(_LED.sub("", other))
    if not _ANY_RELATION.search(value):
        other = _APPROXIMATED.sub("", other)
    if "mod" not in value:
        other = _MODULUS.sub("", other)

    first = _statement(value)
    second = _statement(other)
    if first and second:
        is_same_name = normal.compact(first[0]) == normal.compact(second[0])
        return (first[1], second[1]) if is_same_name else (value, other)
    if first and _LETTER.search(first[0]) and not _ANY_RELATION.search(other):
        # An equation between expressions, which does not only name a value, differs from every value.
        name = _OF_A_NAME.sub("", _OF_A_NAME.sub("", first[0]))
        is_name = _QUANTITY.match(name) or not _COMPOUND.search(name)
        return (first[1], other) if is_name else Equality.UNEQUAL
    if second and _LETTER.search(second[0]) and not _ANY_RELATION.search(value):
        return value, second[1]
    return value, other


def _turned(equation: str) -> str:
    """Return an equation with the name of its value on the left: `x = 5` for `5 = x`."""
    match = _VALUE_FIRST.fullmatch(equation)
    return f"{match[2]} = {match[1]}" if match and not re.fullmatch(_NAME, match[1].strip()) else equation


def _drop_conditions(value: str, other: str) -> Decision:
    r"""Both without a range of a parameter behind them, `k \in \mathbb{Z}`, of which two have to be the same."""
    matches = map(_CONDITION.search, (value, other))
    if len({normal.compact(match[1]) for match in matches if match}) > 1:
        return Equality.UNEQUAL
    return _CONDITION.sub("", value), _CONDITION.sub("", other)


def _compare_lists(value: str, other: str) -> Decision:
    """Tuples, intervals, sets and bare lists, part by part."""
    first = _parts(value)
    second = _parts(other)
    if first is None or second is None:
        brackets, parts = first or second or (None, [])
        # A set of one number may go without its braces; "3, 3" is not 3.
        if brackets == _SET and len(parts) == 1:
            return _same(parts[0], other) if first else _same(value, parts[0])
        return Equality.UNEQUAL if brackets == ("", "") else None

    brackets, parts = first
    other_brackets, other_parts = second
    if len(parts) != len(other_parts) or len(parts) > PARTS:
        return Equality.UNEQUAL
    names = _names_of_parts(parts)
    other_names = _names_of_parts(other_parts)
    if names and other_names and set(names) == set(other_names):
        return _all_equal(parts, [other_parts[other_names.index(name)] for name in names])
    # Values of several letters are in order, those of x_1 and x_2 are solutions for x.
    is_ordered = bool(names) != bool(other_names) and len({name[0] for name in names or other_names}) > 1
    if is_ordered and _SET in (brackets, other_brackets):
        return Equality.UNEQUAL
    if {brackets, other_brackets} <= _LOOSE and not is_ordered:
        return _matched(parts, other_parts, _same)
    # The answer may put brackets around a bare list, or name each part of a tuple; a bare list is no tuple.
    alike = brackets in (other_brackets, ("", "")) or (bool(other_names) and other_brackets == ("", ""))
    return _all_equal(parts, other_parts) if alike else Equality.UNEQUAL


def _names_of_parts(parts: Sequence[str]) -> list[str]:
    """Return the names in the parts `name = value`; empty if a part has no name or two have the same."""
    matches = [re.match(rf"\s*{_NAME}\s*=", item) for item in parts]
    names = [normal.compact(match[0]) for match in matches if match]
    return names if len(names) == len(parts) == len(set(names)) else []


def _drop_units(value: str, other: str) -> Decision:
    """Both without units, unless degrees are inside one of them."""
    bare, other_bare = (quantities.without_unit(text) for text in (value, other))
    if r"\circ" in bare + other_bare:
        return None
    return Equality.EQUAL if normal.compact(bare) == normal.compact(other_bare) else (bare, other_bare)


#: In order: the first rule that decides gives the result.
RULES: tuple[Callable[[str, str], Decision], ...] = (
    _compare_denials,
    _drop_conditions,
    _drop_subjects,
    _compare_times,
    _compare_units,
    _compare_numbers,
    _compare_bases,
    _compare_ratios,
    _compare_words,
    _compare_solution_sets,
    _compare_lists,
    _drop_units,
)


def _all_equal(parts: Sequence[str], others: Sequence[str]) -> Equality:
    results = map(_same, parts, others)
    return next((result for result in results if result is not Equality.EQUAL), Equality.EQUAL)


def _matched(parts: Sequence[T], others: Sequence[T], equal: Callable[[T, T], Equality]) -> Equality:
    """Match each part with an equal one of the others, in any order (equality is transitive: any partner will do)."""
    if len(parts) != len(others):
        return Equality.UNEQUAL
    unmatched = list(others)
    for item in parts:
        for candidate in unmatched:
            result = equal(item, candidate)
            if result is Equality.TIMEOUT:
                return result
            if result is Equality.EQUAL:
                unmatched.remove(candidate)
                break
        else:
            return Equality.UNEQUAL
    return Equality.EQUAL


def _parts(text: str) -> tuple[tuple[str, str], list[str]] | None:
    """Return the brackets and parts of a list; None for a single expression."""
    text = text.strip()
    if match := _COLUMN.fullmatch(text):
        return ("(", ")"), [entry.strip() for entry in match[1].split("\\\\")]
    brackets = "", ""
    # The brackets around all of the text.
    if normal.closing(text) in (-1, len(text) - 1):
        pairs = (_SET, ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))
        enclosing = (pair for pair in pairs if text.startswith(pair[0]) and text.endswith(pair[1]))
        brackets = next(enclosing, brackets)
    inner = text[len(brackets[0]) : len(text) - len(brackets[1])]
    if re.search(r"\\begin|\||:", inner):
        return None

    # Split at top-level commas, semicolons, "and" and "or"; commas of thousands join digits.
    inner = normal.without_thousands(re.sub(r"\s(?:and|or)\s", ", ", f" {inner} "))
    items = [""]
    depth = 0
    for c in inner:
        depth += (c in "([{") - (c in ")]}")
        if depth <= 0 and c in ",;":
            items.append("")
        else:
            items[-1] += c

    parts: list[str] = []
    for item in filter(None, map(str.strip, items)):
        # `1 \pm 2` stands for two expressions.
        if len(_PLUS_MINUS.findall(item)) == 1:
            parts += [_PLUS_MINUS.sub(sign, item).strip() for sign in "+-"]
        else:
            parts.append(item)
    return (brackets, parts) if len(parts) > 1 or brackets == _SET else None
