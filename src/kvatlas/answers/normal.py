r"""Normal forms of answers: one spelling for each expression, its number, its set of real numbers.

This is spelling alone; the algebra is in answers/judges.py.
"""

import itertools
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from kvatlas.answers import quantities

#: Longer answers are cut, in characters: all reference answers are much shorter.
LONGEST = 1000

_SIGNS = {
    **{digit: f"^{{{i}}}" for i, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{digit: f"_{{{i}}}" for i, digit in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    **dict(zip("（），、", "(),,", strict=True)),
    "°": r"^\circ ",
}
#: A sign and its command.
_COMMANDS = (
    r"√\sqrt π\pi ∞\infty ∪\cup ∩\cap ≤\le ≥\ge ≠\ne ∈\in ×\times ·\cdot ±\pm ∅\emptyset θ\theta "
    r"≡\equiv ≈\approx α\alpha β\beta γ\gamma δ\delta λ\lambda μ\mu ρ\rho σ\sigma φ\phi ω\omega Δ\Delta Ω\Omega"
)
_TABLE = str.maketrans(_SIGNS | {word[0]: f"{word[1:]} " for word in _COMMANDS.split()})
#: Commands with another name.
_SYNONYMS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **{"leq": "le", "geq": "ge", "leqslant": "le", "geqslant": "ge", "neq": "ne"},
    **{"varnothing": "emptyset", "overrightarrow": "vec"},
    **{"colon": ":", "lbrace": "{", "rbrace": "}"},
    **dict.fromkeys(("cdots", "ldots", "dotsc", "dotsb"), "dots"),
    **{"varepsilon": "epsilon", "varphi": "phi", "simeq": "approx"},
}
_CURRENCIES = (
    r"[£€¥₹₩₽¢]|\\(?:pounds|euro|texteuro|yen|EUR)(?![A-Za-z])|\b(?:USD|EUR|GBP|CNY|JPY)\b"
    r"|\b(?:US|R|HK|A)(?=\\?\$)|\bRs\.?(?=[\s}]*\d)"
)
_FONTS = (
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up|sl)?|mbox|math(?:rm|bf|it|sf|normal)|operatorname|hbox|boldsymbol|bm|underline"
    r"|f?boxed)"
)
_SPACES = (
    r"[,;:! ]|quad|qquad|thinspace|displaystyle|textstyle|limits|big|Big"
    r"|(?:middle|left|right|bf|rm|it|sf|tt|small|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"
)

#: Signs of money as the names of units, around an amount alone.
_MONEY = {
    **dict.fromkeys((r"\$", "USD"), "dollar"),
    **dict.fromkeys(("€", r"\euro", "EUR"), "euro"),
    **{"£": "pound", "₹": "rupee", "¢": "cent"},
}
_SIGN_OF_MONEY = "|".join(map(re.escape, _MONEY))
_AMOUNT = r"\d[\d.,{}!\\]*"
#: An index, alone or in braces; and one that stands before a C or P.
_ITEM = r"(?:\{\s*(\w+)\s*\}|(\w))"
_UPPER = rf"(?<![\w)}}\]\\])(?:\{{\s*\}}\s*)?[_^]\s*{_ITEM}"

#: The rows of a matrix.
_ROWS = r"((?:[^\\]|\\(?!begin|end))*)"
_MATRIX = rf"\\begin\{{pmatrix\}}{_ROWS}\\end\{{pmatrix\}}"

#: The steps that remove decoration, in order: a pattern and its replacement.
_STEPS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Commands whose backslash was escaped.
    (r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|left|right|pi|infty|cup|[lg]eq?|in|times|cdot|text)(?![A-Za-z]))", r"\\"),
    *[(_FONTS + r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1 ")] * 3,
    (rf"^\s*({_SIGN_OF_MONEY})\s*({_AMOUNT})\s*$", lambda m: f"{m[2]} {_MONEY[m[1]]}"),
    (rf"^\s*({_AMOUNT})\s*({_SIGN_OF_MONEY})\s*$", lambda m: f"{m[1]} {_MONEY[m[2]]}"),
    (_CURRENCIES, ""),
    # The distance of a line break in a matrix; then line breaks, which are no escaped spaces.
    (r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]", r"\\\\"),
    (r"\\\\", "\n"),
    (r"\\\$|\$", ""),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\([%&])", r"\1"),
    (r"\\[()\[\]]", ""),
    (r"\{,\}|,\\!\s*", ","),
    # Values side by side are a list.
    (r"(?<=[\d)}])\s*\\q?quad(?![A-Za-z])\s*(?=-?\d|[A-Za-z]\s*=)", ", "),
    (rf"\\(?:{_SPACES})|~", " "),
    (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
    (r"\\log\s*_\s*(?:\{\s*e\s*\}|e(?![A-Za-z]))", r"\\ln "),
    (r"\\not\s*=", r"\\ne "),
    (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
    (r"\\([A-Za-z]+)", lambda m: "\\" + _SYNONYMS.get(m[1], m[1])),
    (r"\\([|:])", r"\1"),
    (r"\\mathbb\s+([A-Z])(?![A-Za-z])|\\mathbb([A-Z])(?![A-Za-z])", r"\\mathbb{\1\2}"),
    (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
    # Combinations and arrangements, {}_nC_k and {}^nP_k; of C_n^k those that are no power of C_5.
    (rf"{_UPPER}\s*C\s*_\s*{_ITEM}", lambda m: r"\binom{{{}}}{{{}}}".format(*filter(None, m.groups()))),
    (rf"{_UPPER}\s*P\s*_\s*{_ITEM}", lambda m: r"\frac{{{0}!}}{{({0}-{1})!}}".format(*filter(None, m.groups()))),
    (r"(?<![\w\\])C\s*_\s*\{?(\d{2,}|[a-z])\}?\s*\^\s*(?:\{(\w+)\}|(\w))", r"\\binom{\1}{\2\3}"),
    # Arrays and brackets around a matrix; cases as a list; vectors in angle brackets.
    (r"\\begin\s*\{array\}\s*\{[^{}]*\}", r"\\begin{pmatrix}"),
    (r"\\(begin|end)\s*\{(?:array|[Bpb]?(?:small)?matrix)\}", r"\\\1{pmatrix}"),
    (rf"\\\{{\s*{_MATRIX}\s*\.?\s*$", r"\\begin{cases}\1\\end{cases}"),
    (rf"[(\[]\s*{_MATRIX}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (rf"\|\s*{_MATRIX}\s*\|", r"\\begin{vmatrix}\1\\end{vmatrix}"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\\begin\{(cases|aligned)\}([^&]*)\\end\{\1\}", lambda m: re.sub(r"\s*\n\s*", ", ", m[2].strip())),
    (r"\\langle(?![A-Za-z])([^<>|]*)\\rangle(?![A-Za-z])", r"(\1)"),
    # One spelling of a modulus: (mod 3).
    (r"\\pmod\s*(?:\{(\w+)\}|(\w))|\(\s*\\?b?mod\s*\{?(\w+)\}?\s*\)", r"(\\mod \1\2\3)"),
    (r"(\\equiv.*[^\\\w(])\\?b?mod\s*\{?(\w+)\}?\s*$", r"\1(\\mod \2)"),
    # Digits that go on: 3.14...
    (r"(?<=\d)(\.\d+)(?:\s*\\dots(?![A-Za-z])|\.{2,3})\s*$", r"\1"),
    (r"^\s*\\(?:approx|sim)(?![A-Za-z])|\\checkmark\s*$", ""),
    (r"^\s*(?i:all\s+reals?(?:\s+numbers?)?)\s*$", r"\\mathbb{R}"),
    (r"\s*\(\s*(?:or|approximately|approx\.?|about|roughly|\\approx|=)(?![A-Za-z])\s*([^()]*)\)\s*$", r" \\approx \1"),
    # Typed mathematics.
    (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
    (r"(?<![\\A-Za-z])(?:oo|inf(?:ty|inity)?)(?![A-Za-z])", r"\\infty "),
    (r"(?<![\\A-Za-z])(pi|alpha|beta|gamma|theta|lambda|phi|omega)(?![A-Za-z])", r"\\\1 "),
    (r"(?<=[\d}])\s*(?:per\s?cent(?:s|age(?!\s*[A-Za-z]))?|pct)(?![A-Za-z])", "%"),
    (r"<=|=<", r"\\le "),
    (r">=|=>", r"\\ge "),
    (r"(?<=\s)!=", r"\\ne "),
    (r"\\frac\s*(\d|\\pi(?![A-Za-z]))\s*([A-Za-z0-9]|\\pi(?![A-Za-z]))", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    # Of LaTeX's \sqrt12 only the 1 is under the root, but a writer of √12 or \sqrt12 means twelve.
    (r"\\sqrt\s*(\w)(?!\w)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\d)(\d*)", r"\\sqrt{\1\2}"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?:\{\s*\})?\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\(?:text)?degree", r"^\\circ"),
    (r"(?<=[\d}])\s*deg(?:rees?)?(?!\s*[A-Za-z])", r"^\\circ"),
    # A base in words.
    (r"_\s*\{\s*(?:base\s*)?(\d+)\s*\}|_\s*(\d+)|(?<=\w)\s+base\s+(\d+)(?!\w)", r"_{\1\2\3}"),
    (r"\(\s*(\w+)\s*\)(?=_\{\d)", r"\1"),
)


def tidy(text: str) -> str:
    """Return LaTeX without decoration: no dollar signs, sizes, spacing or text commands; Unicode signs as LaTeX."""
    # Fractions before NFKC, which makes 21/2 of 2½; digits of all scripts become 0 to 9.
    characters = []
    for c in text:
        if unicodedata.decomposition(c).startswith("<fraction>"):
            value = Fraction(unicodedata.numeric(c)).limit_denominator(10)
            characters.append(rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
        elif ord(c) in _TABLE or unicodedata.category(c) not in ("Cf", "So"):
            characters.append(c)
    text = unicodedata.normalize("NFKC", "".join(characters).translate(_TABLE))
    text = "".join(str(unicodedata.decimal(c, c)) for c in text).translate(_TABLE)

    for pattern, replacement in _STEPS:
        text = re.sub(pattern, replacement, text)
    # Words beside their number: "12 (twelve)".
    text = re.sub(r"^\s*(\d+) \(\s*\1\s*\)\s*$", r"\1", quantities.numerals(text))
    if r"\pm" not in text:
        text = text.replace(r"\mp", r"\pm")
    text = re.sub(r" *\n *", lambda _: r"\\", text) if r"\begin" in text else text
    text = re.sub(r"\s+", " ", text).strip(" :").rstrip(".,;\\").strip()

    # Braces and parentheses that enclose all of it and no list.
    while text[:1] + text[-1:] in ("{}", "()") and closing(text) == len(text) - 1:
        if text[0] == "(" and re.search(r"[,;]", text):
            break
        text = text[1:-1].strip()
    return text


def closing(text: str) -> int:
    """Return the place of the bracket that closes the first one of a text; -1 without one."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c in ")]}":
            return i
    return -1


#: Not right behind a bracket: (12,102) is an interval or a point.
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,] )(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/]| \d)|\.\d{3}(?: \d{3})+(?![\d/])")
_NUMBER = rf"[+-]?(?:\d{{1,{LONGEST}}}(?:\.\d{{0,60}})?|\.\d{{1,60}})"
_PLAIN = re.compile(_NUMBER)
_MIXED = re.compile(r"(-?)(\d{1,12})\s*\\frac\{(\d{1,12})\}\{(\d{1,12})\}|(-?)(\d{1,12})\s+(\d{1,12})/(\d{1,12})(?!\d)")
_REPEATING = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\{?(\d{1,30})\}?")
_POWER_OF_TEN = re.compile(rf"({_NUMBER})(?:\\times|\\cdot|\*)10\^\{{?([+-]?\d{{1,3}})\}}?")
_EXPONENT = re.compile(r"([+-]?\d{1,60}(?:\.\d{1,30})?)[eE]([+-]?\d{1,3})")
_QUOTIENT = re.compile(rf"()({_NUMBER})/({_NUMBER})|([+-]?)\\frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}")


def without_thousands(text: str) -> str:
    """Return the text with 1,234 as 1234."""
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def compact(text: str) -> str:
    """Return a tidy answer without spaces and with one way to write powers and thousands."""
    # Before the spaces go: "48, 384" is a list, "48,384" a number; "3 1/2" is no 31/2, but "10 000" a number.
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), without_thousands(text))
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    return text.replace("+-", "-").rstrip(".")


def rational(text: str) -> Fraction | None:
    r"""Return the exact value of a number in any usual spelling (2.50, 1,234, \frac{3}{4}, 1 3/4, 12\%, 1.5e3)."""
    text = text.strip()
    number_text, percent, rest = text.partition("%")
    if percent and not rest:
        percentage = rational(number_text)
        return None if percentage is None else percentage / 100

    if match := _MIXED.fullmatch(text):
        sign, whole, top, bottom = _mixed(match)
        if int(bottom) == 0:
            return None
        return Fraction(sign + "1") * (int(whole) + Fraction(int(top), int(bottom)))

    text = compact(text)
    if _PLAIN.fullmatch(text):
        return Fraction(text)

    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = match.groups()
        # 0.1\overline{6} is (16 - 1) / 90.
        digits = int(whole + fixed + period) - int(whole + fixed or "0")
        return Fraction(digits, (10 ** len(period) - 1) * 10 ** len(fixed)) * Fraction(sign + "1")

    if match := _POWER_OF_TEN.fullmatch(text) or _EXPONENT.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])

    if match := _QUOTIENT.fullmatch(text):
        # Each group of `a/b` has its counterpart of `\frac{a}{b}` three groups later.
        sign, top, bottom = (match[i] or match[i + 3] or "" for i in (1, 2, 3))
        if Fraction(bottom) != 0:
            return Fraction(sign + "1") * Fraction(top) / Fraction(bottom)
    return None


def _mixed(match: re.Match[str]) -> tuple[str, str, str, str]:
    """Return sign, whole number, numerator and denominator of a mixed fraction, in either spelling."""
    groups = match.groups("")
    return groups[:4] if groups[1] else groups[4:]  # type: ignore[return-value]


def algebra(text: str) -> str:
    """Return a tidy answer for algebra: mixed fractions as sums, thousands without commas, `+ -1` as `- 1`."""
    text = re.sub(r"\+\s*-(?=\s*[\w\\(])", "- ", text)
    return without_thousands(_MIXED.sub(lambda match: r"{}({}+\frac{{{}}}{{{}}})".format(*_mixed(match)), text))


#: An interval of real numbers: its ends, and if each belongs to it; a point has equal ends that belong to it.
Interval = tuple[str, str, bool, bool]
_LEFT = r"-\infty"
_RIGHT = r"\infty"
_LESS = ("<", r"\le")
_GREATER = (">", r"\ge")
_RELATION = re.compile(r"(<=|>=|<|>|=|\\(?:le|ge|ne|lt|gt)(?![A-Za-z]))")
_SPELLED = {"<=": r"\le", ">=": r"\ge", r"\lt": "<", r"\gt": ">"}
_BUILDER = re.compile(
    r"\\\{\s*([A-Za-z]|\([^()|:]*\))\s*(?:\\in\s*\\?[A-Za-z]+(?:\{[A-Z]\})?\s*)?[|:](.*)\\\}", re.DOTALL
)
_INTERVAL = re.compile(r"([(\[])([^()\[\],]*),([^()\[\],]*)([)\]])")
_POINT = re.compile(r"\\\{([^{}|:,]*)\\\}")
_WITHOUT_POINTS = re.compile(r"(?:\\mathbb\{R\}|R)\s*(?:\\setminus|\\backslash|-)\s*\\\{([^{}|:]*)\\\}")
_UNION = re.compile(r"\s+or\s+|\\cup(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])")


def condition(text: str) -> str | None:
    """Return the condition of a set builder on its variable; None for anything else."""
    match = _BUILDER.fullmatch(text)
    if match is None:
        return None
    # Of a tuple of variables none is looked for.
    if len(match[1]) == 1 and not re.search(rf"(?<![\\A-Za-z]){match[1]}(?![A-Za-z])", match[2]):
        return None
    return match[2].strip()


def is_relation(text: str) -> bool:
    """Return True for a set builder and for a chain of inequalities."""
    return condition(text) is not None or bool(re.search(r"[<>]|\\(?:le|ge|ne|lt|gt)(?![A-Za-z])", text))


def variable(text: str) -> str | None:
    """Return the free variable of an inequality; None for a set, in which it is bound."""
    if condition(text) is not None:
        return None
    return next((side.strip() for side in _RELATION.split(text)[::2] if re.fullmatch(r"\s*[A-Za-z]\s*", side)), None)


def intervals(text: str) -> list[Interval] | None:
    r"""Return the intervals of a tidy answer (`\{x|-2<=x<1\}`, `-2 \le x < 1`, `[-2,1)`, `x \ne 2`) in its order; None
    for an answer of another kind."""
    inner = condition(text)
    if inner is None:
        inner = re.sub(r"^\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|=\s*(?=[(\[]))", "", text)

    union: list[Interval] = []
    variables = set()
    for member in _UNION.split(f" {inner} "):
        member = member.strip()
        if match := _WITHOUT_POINTS.fullmatch(member):
            union += _intervals_between([point.strip() for point in match[1].split(",")])
        elif match := _INTERVAL.fullmatch(member):
            low, high = (re.sub(r"^\+\s*(?=\\infty)", "", end.strip()) for end in (match[2], match[3]))
            union.append((low, high, match[1] == "[", match[4] == "]"))
        elif member == r"\mathbb{R}":
            union.append((_LEFT, _RIGHT, False, False))
        elif match := _POINT.fullmatch(member):
            union.append((match[1], match[1], True, True))
        else:
            solutions = _solutions(member)
            if solutions is None:
                return None
            union += solutions
        variables.add(variable(member))
    return union if len(variables) == 1 else None


def _intervals_between(points: list[str]) -> list[Interval]:
    """Return the intervals of all real numbers but these points, numbers in their order."""
    numbers = {point: value for point in points if (value := rational(point)) is not None}
    if len(numbers) == len(points):
        points = sorted(numbers, key=numbers.__getitem__)
    ends = [_LEFT, *points, _RIGHT]
    return [(low, high, False, False) for low, high in itertools.pairwise(ends)]


def _solutions(text: str) -> list[Interval] | None:
    r"""Return the solutions of a relation (`x > 2`, `2 < x`, `x = 2`, `x \ne 2`) or a chain of two (`-1 < x \le 2`)
    with one variable; None for anything else."""
    # Sides and signs take turns.
    tokens = [token.strip() for token in _RELATION.split(text)]
    sides = tokens[::2]
    signs = [_SPELLED.get(sign, sign) for sign in tokens[1::2]]
    places = [i for i, side in enumerate(sides) if re.fullmatch(r"[A-Za-z]", side)]
    # One variable, at one place.
    if not signs or len(sides) > 3 or len(places) != 1 or not all(sides):
        return None
    at = places[0]

    if len(sides) == 3:
        # `low < x < high` or `high > x > low`, with signs of one direction.
        if at == 1 and set(signs) <= set(_LESS):
            return [(sides[0], sides[2], signs[0] != "<", signs[1] != "<")]
        if at == 1 and set(signs) <= set(_GREATER):
            return [(sides[2], sides[0], signs[1] != ">", signs[0] != ">")]
        return None

    bound = sides[1 - at]
    sign = signs[0]
    if sign == "=":
        return [(bound, bound, True, True)]
    if sign == r"\ne":
        return [(_LEFT, bound, False, False), (bound, _RIGHT, False, False)]
    closed = sign not in "<>"
    if (sign in _LESS) == (at == 0):
        return [(_LEFT, bound, False, closed)]
    return [(bound, _RIGHT, closed, False)]
