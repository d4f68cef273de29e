r"""Formulas beside their neighbours, which differ in one sign, digit, function, relation or letter.

A formula is equal to itself and to none of its neighbours, whatever it means. `\pm` stays, as both its signs count.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from kvatlas.answers.grading import grade_text

DATA = Path(__file__).parent.parent / "data"

#: A command or sign, and those that replace it.
FUNCTIONS = {
    r"\sin": (r"\cos", r"\tan"),
    r"\cos": (r"\sin", r"\sec"),
    r"\tan": (r"\cot",),
    r"\cot": (r"\tan",),
    r"\arctan": (r"\arcsin",),
    r"\log": (r"\sin",),
    r"\ln": (r"\cos",),
    r"\lg": (r"\ln",),
    r"\sqrt": (r"\sin",),
    r"\binom": (r"\frac",),
    r"\gcd": (r"\max", r"\operatorname{lcm}"),
    r"\max": (r"\min",),
    r"\Re": (r"\Im",),
    r"\arg": (r"\det",),
    r"\det": (r"\arg",),
    r"\lfloor": (r"\lceil",),
    r"\sum": (r"\prod",),
    r"\exp": (r"\ln",),
    r"\coth": (r"\tanh",),
    r"\dot": (r"\ddot",),
    r"\vec": (r"\hat",),
}
RELATIONS = {
    "=": (r"\ne ", "<", r"\not= ", r"\ge "),
    "<": (">", r"\le ", "="),
    ">": ("<", r"\ge ", "="),
    r"\le": ("<", r"\ge"),
    r"\leq": ("<", r"\geq"),
    r"\ge": (">", r"\le"),
    r"\geq": (">", r"\leq"),
    r"\ne": ("=", "<"),
    r"\not=": ("=",),
    r"\neq": ("=",),
    r"\equiv": ("=",),
    r"\approx": (r"\ne",),
    r"\in": (r"\notin",),
    r"\cup": (r"\cap",),
    r"\cap": (r"\cup",),
    r"\subset": (r"\supset",),
    r"\perp": (r"\parallel",),
    r"\Rightarrow": (r"\Leftarrow",),
    r"\setminus": (r"\cup",),
}
#: A command, a number, or one sign; `\pm` and `\not=` are one each.
_TOKEN = re.compile(r"\\not=|\\[A-Za-z]+|\\.|\d+|.", re.DOTALL)
#: Text of words, which is compared as words.
_WORDS = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end|mathbb)\s*\{[^{}]*\}")


def neighbours(formula: str) -> Iterator[tuple[str, str]]:
    """Yield the kind of change and the changed formula."""
    tokens = _TOKEN.findall(formula)
    in_words = [match.span() for match in _WORDS.finditer(formula)]
    start = 0
    for i, token in enumerate(tokens):
        is_word = any(begin <= start < end for begin, end in in_words)
        start += len(token)
        for kind, replacement in () if is_word else _replacements(tokens, i):
            changed = "".join([*tokens[:i], replacement, *tokens[i + 1 :]])
            yield kind, changed
    is_zero = re.fullmatch(r"\$?0\S*|.*=\s*0", formula) or formula.startswith("0 <")
    has_value = re.match(r"\$?(?!\\(?:\{|pm|text|\$)|\(|[A-Z])[\dA-Za-z(\\]", formula)
    if has_value and not is_zero:
        at = formula.startswith("$")
        yield "sign", formula[:at] + "-" + formula[at:]


def _replacements(tokens: list[str], i: int) -> Iterator[tuple[str, str]]:
    token = tokens[i]
    before = "".join(tokens[:i]).rstrip()
    if token in "+-":
        # 10^{+3} and (+\infty are as they were without the sign.
        yield "sign", "-" if token == "+" else "+"
    elif token.isdecimal():
        for j in sorted({0, len(token) - 1}):
            yield "digit", token[:j] + str(int(token[j]) % 9 + 1) + token[j + 1 :]
    elif token in FUNCTIONS:
        for function in FUNCTIONS[token]:
            yield "function", function
    elif token in RELATIONS and not before.endswith("_{n"):
        for relation in RELATIONS[token]:
            yield "relation", relation
    elif re.fullmatch("[xyzkmnab]", token) and not re.search("[A-Za-z]$", before):
        yield "letter", "w"


def formulas() -> list[str]:
    """Return the formulas of the fixture."""
    lines = (DATA / "formulas.txt").read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("# ")]


def is_right(reference: str, answer: str) -> bool:
    return grade_text("kvatlas", reference, (), rf"\boxed{{{answer}}}").correct


#: Every eighth formula; the others take a minute.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.deep) for part in range(1, 8))]


@pytest.mark.parametrize("part", PARTS)
def test_a_formula_equals_itself_and_none_of_its_neighbours(part: int) -> None:
    """One neighbour of each kind in turn, the formula being the reference or the answer."""
    equal = []
    for number, formula in islice(enumerate(formulas()), part, None, 8):
        assert is_right(formula, formula), formula
        by_kind = {kind: changed for kind, changed in neighbours(formula) if changed != formula}
        for kind, changed in by_kind.items():
            pair = (formula, changed) if number % 2 else (changed, formula)
            if is_right(*pair):
                equal.append((kind, *pair))
    assert not equal


def test_there_are_neighbours_of_each_kind() -> None:
    kinds = [kind for formula in formulas() for kind, _ in neighbours(formula)]
    assert set(kinds) == {"sign", "digit", "function", "relation", "letter"}
    assert len(kinds) > 2500
