"""Equality of expressions by sympy, and of texts by math-verify; runs in the process of `judges.py`."""

import re
from collections.abc import Sequence
from typing import Any

import sympy

from kvatlas.answers.expressions import Chain, read_expression

#: A logarithm whose base is not stated, and the same with a symbol as its base.
_BASELESS_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
#: A natural and a common logarithm in a reference, which tell the base of a \log in the answer.
_NATURAL_LOG = re.compile(r"\\ln(?![A-Za-z])")
_COMMON_LOG = re.compile(r"\\log\s*_\s*(?:\{\s*10\s*\}|10)")
#: A logarithm in typed mathematics, which is that of \ln or \log.
_TYPED_LOG = re.compile(r"(?<![\\A-Za-z])log(?=[\s(\d])")
#: The largest difference of two equal numbers as a share of the reference, where one is written as a decimal.
ROUNDING = 1e-6
#: The largest difference of two exact numbers that are equal, alone and as a share, evaluated with `DIGITS` digits.
EXACT = 1e-25
EXACT_SHARE = 1e-300
DIGITS = 400
_DECIMALS = re.compile(r"\.(\d+)")
_TURNED = {">": "<", r"\ge": r"\le"}


def _log_spellings(reference: str, text: str) -> list[str]:
    r"""Return the spellings of an answer that are compared: they differ in what its logarithms without a base mean.

    A typed log is natural, or a `\log`. A `\log` has the base of the logarithms of the reference if these are all
    natural or all common, since models write `\log` for both. A `\log` of the reference is equal to no other logarithm.
    """
    spellings = [text, _TYPED_LOG.sub(r"\\log", text)]
    is_natural = _NATURAL_LOG.search(reference) is not None
    is_common = _COMMON_LOG.search(reference) is not None
    if is_natural != is_common:
        base = r"\\ln" if is_natural else r"\\log_{10}"
        spellings += [_BASELESS_LOG.sub(base, spelling) for spelling in spellings]
    return list(dict.fromkeys(spellings))


def equal(reference: str, text: str, find_in_text: bool) -> bool:
    """Return whether two expressions are equal; False if one cannot be read (see `compare_expressions`)."""
    try:
        if find_in_text:
            return _verified(reference, text)
        decimals = [len(digits) for digits in _DECIMALS.findall(f"{reference} {text}")]
        last_digit = 10.0 ** -max(decimals) if decimals else 0.0
        first = read_expression(reference)
        readings = map(read_expression, _log_spellings(reference, text))
        return first is not None and any(second is not None and _same(first, second, last_digit) for second in readings)
    except MemoryError:
        raise
    except Exception:
        return False


def _verified(reference: str, text: str) -> bool:
    """Return whether math-verify finds the reference in a text.

    In both orders: an interval and the equivalent inequality are equal in one order only.
    """
    import math_verify

    # The library's own time limits need the main thread's alarm, which is ours.
    parsed = [math_verify.parse(each, parsing_timeout=None) for each in (f"${reference}$", text)]
    return any(math_verify.verify(*order, timeout_seconds=None) for order in (parsed, parsed[::-1]))


def _same(first: Any, second: Any, last_digit: float) -> bool:
    """Return whether two readings are equal."""
    if first.signs and second.signs:
        return _same_relations(first, second, last_digit)
    value, chain = (second, first) if first.signs else (first, second)
    if not set(chain.signs) <= {"=", r"\approx"} or not _holds(chain):
        return False
    # Each side of an equation between numbers states the value, else the last one; 7 = x + y states none.
    is_number = [side.is_number for side in chain.sides]
    if is_number[0] and not is_number[-1]:
        return False
    sides = chain.sides if all(is_number) else chain.sides[-1:]
    return any(_same_value(value.sides[0], side, last_digit) for side in sides)


def _holds(chain: Any) -> bool:
    """Return whether the neighbouring numbers of an equation are equal; a decimal may be rounded."""
    for sign, left, right in zip(chain.signs, chain.sides, chain.sides[1:], strict=False):
        if not (left.is_number and right.is_number) or _same_value(left, right, 0.0):
            continue
        places = max(_places(left), _places(right))
        # The last digit may be cut off where the sign tells of it, else it is rounded.
        error = 10.0**-places * (1.0 if sign == r"\approx" else 0.5)
        if places < (1 if sign == r"\approx" else 2) or abs(sympy.N(left - right)) > error:
            return False
    return True


def _places(number: Any) -> int:
    """Return the decimal places of a number; 0 for an integer and for one that is no decimal."""
    if not number.is_Rational:
        return 0
    return next((places for places in range(1, 16) if (number * 10**places).is_integer), 0)


def _same_value(first: Any, second: Any, last_digit: float) -> bool:
    """Return whether two values are equal: numbers by their digits, others by algebra."""
    if first == second:
        return True
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        is_matrix = all(isinstance(each, sympy.MatrixBase) for each in (first, second))
        if not is_matrix or first.shape != second.shape:
            return False
        return all(_same_value(a, b, last_digit) for a, b in zip(first, second, strict=True))
    # A product from 1 to n is one from 2 to n, but not what was written.
    first, second = (each if each.free_symbols and each.has(sympy.Product) else each.doit() for each in (first, second))
    if first == second:
        return True
    if not (first.is_number and second.is_number):
        return _same_formula(first, second)

    sizes = [abs(sympy.N(each)) for each in (first, second)]
    if not all(size.is_finite for size in sizes):
        return bool(first == second and first.is_extended_real)
    difference = abs(sympy.N(first - second, 15, maxn=DIGITS))
    # A decimal is a rounded number, an integer is not.
    is_rounded = last_digit and not (first.is_Integer or second.is_Integer)
    if is_rounded and difference <= min(ROUNDING * sizes[0], last_digit):
        return True
    if first.is_Rational and second.is_Rational:
        return False
    return bool(difference <= min(EXACT, EXACT_SHARE * max(sizes))) or (
        bool(difference <= EXACT) and sympy.simplify(first - second) == 0
    )


def _same_formula(first: Any, second: Any) -> bool:
    """Return whether two expressions with symbols are equal; of roots for positive values of the symbols."""
    if sympy.simplify(first - second) == 0:
        return True

    def has_root(formula: Any) -> bool:
        return any(power.exp.is_Rational and power.exp.q == 2 for power in formula.atoms(sympy.Pow))

    if not (has_root(first) and has_root(second)) or first.has(sympy.Abs) or second.has(sympy.Abs):
        return False
    difference = first - second
    positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in difference.free_symbols}
    return bool(sympy.simplify(difference.subs(positive)) == 0)


def _same_relations(first: Any, second: Any, last_digit: float) -> bool:
    """Return whether two chains of relations are equal, from left to right or turned round."""
    chains = []
    for chain in (first, second):
        if _TURNED.keys() & set(chain.signs):
            signs = tuple(_TURNED.get(sign, f"not {sign}") for sign in reversed(chain.signs))
            chain = Chain(chain.sides[::-1], signs)
        # A statement about numbers differs from every other statement.
        if all(side.is_number for side in chain.sides):
            return False
        chains.append(chain)
    first, second = chains

    is_equation = set(first.signs) == set(second.signs) == {"="}
    if is_equation and max(len(first.signs), len(second.signs)) > 1:
        # The steps of a chain are on the way to its last value.
        pairs = [(first.sides[0], second.sides[0]), (first.sides[-1], second.sides[-1])]
        return all(_same_value(*pair, last_digit) for pair in pairs)
    if first.signs != second.signs:
        return False
    is_single = len(first.signs) == 1 and all(isinstance(side, sympy.Expr) for side in first.sides + second.sides)
    if is_single and first.signs[0] in ("=", r"\ne"):
        return _same_equation(first.sides, second.sides)
    if is_single and first.signs[0] in ("<", r"\le"):
        ratio = sympy.simplify((first.sides[0] - first.sides[1]) / (second.sides[0] - second.sides[1]))
        return bool(ratio.is_number and ratio.is_finite and ratio > 0)
    return all(_same_value(a, b, last_digit) for a, b in zip(first.sides, second.sides, strict=True))


def _same_equation(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two equations, of two sides each, have proportional sides or the same solutions."""
    difference = first[0] - first[1]
    other_difference = second[0] - second[1]
    ratio = sympy.simplify(difference / other_difference)
    if ratio.is_number:
        return bool(ratio.is_finite and ratio != 0)

    # Of periodic functions sympy gives some of the zeros.
    periodic = (sympy.sin, sympy.cos, sympy.tan)
    if difference.has(*periodic) or other_difference.has(*periodic):
        return False
    symbols = difference.free_symbols
    if not symbols or symbols != other_difference.free_symbols:
        return False
    for symbol in symbols:
        zeros = {sympy.simplify(zero) for zero in sympy.solve(difference, symbol)}
        other_zeros = {sympy.simplify(zero) for zero in sympy.solve(other_difference, symbol)}
        if not zeros or zeros != other_zeros:
            return False
    return True
