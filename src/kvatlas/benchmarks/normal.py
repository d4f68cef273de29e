r"""Normal forms of answers: one spelling for each expression, as far as spelling goes; algebra is math-verify's."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_CHARACTERS = {
    **{digit: f"^{{{i}}}" for i, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{digit: f"_{{{i}}}" for i, digit in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    "√": r"\sqrt ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∈": r"\in ",
    "×": r"\times ",
    "·": r"\cdot ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "∅": r"\emptyset ",
    "θ": r"\theta ",
    "（": "(",
    "）": ")",
    "，": ",",
}
_TABLE = str.maketrans(_CHARACTERS)
_WORDS = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "neq": "ne", "lvert": "|"}
_WORDS |= {
    "rvert": "|",
    "vert": "|",
    "mid": "|",
    "varnothing": "emptyset",
    "overrightarrow": "vec",
    "colon": ":",
    "lbrace": "{",
    "rbrace": "}",
}
_TEXT = re.compile(
    r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|operatorname|hbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_SPACE = re.compile(
    r"\\(?:[,;:! ]|quad|qquad|thinspace|displaystyle|limits|middle(?![a-z])|left(?![a-z])|right(?![a-z])|big|Big)|~"
)
_MIXED = re.compile(r"(-?)(\d{1,12})\s*\\frac\{(\d{1,12})\}\{(\d{1,12})\}|(-?)(\d{1,12})\s+(\d{1,12})/(\d{1,12})(?!\d)")
_REPEATING = re.compile(r"([+-]?)(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\{?(\d{1,30})\}?")
_CURRENCY = re.compile(r"[£€¥₹₩₽]|\\(?:pounds|euro|texteuro|yen|EUR)(?![A-Za-z])|\b(?:USD|EUR|GBP|CNY|JPY)\b")
#: The distance that a line break of a matrix may be given.
_DISTANCE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]")
#: Not right behind a bracket: (12,102) is an interval or a point.
_THOUSANDS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,])")


def tidy(text: str) -> str:
    """LaTeX without decoration: no dollar signs, sizes, spacing or text commands; Unicode signs as LaTeX."""
    text = "".join(_fraction(c) for c in text).translate(_TABLE)
    text = "".join(_digit(c) for c in unicodedata.normalize("NFKC", text)).translate(_TABLE)
    text = re.sub(r"^\s*\\\$\s*(\d[\d.,{}!\\]*)\s*$", r"\1 dollars", text)
    text = _CURRENCY.sub("", text)
    # A line break of a matrix is no escaped space.
    text = _DISTANCE.sub(r"\\\\", text)
    text = text.replace("\\\\", "\n")
    text = text.replace(r"\$", "").replace("$", "").replace(r"\%", "%").replace(r"\&", "&")
    text = re.sub(r"\\[()\[\]]", "", text)
    for _ in range(3):
        text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"\{,\}|,\\!\s*", ",", text)
    text = _SPACE.sub(" ", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda m: "\\" + _WORDS[m[1]] if m[1] in _WORDS else m[0], text)
    text = text.replace(r"\|", "|").replace(r"\:", ":")
    text = re.sub(r"(?<=[\d}])\s*per\s?cent(?![A-Za-z])", "%", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)(?!\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*(\d)(\d*)", _root, text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ", text)
    text = re.sub(r" *\n *", lambda _: r"\\", text) if r"\begin" in text else text
    return _bare(re.sub(r"\s+", " ", text).strip().rstrip(".").strip())


def _bare(text: str) -> str:
    """The text without braces and parentheses that enclose all of it and no list."""
    while text[:1] + text[-1:] in ("{}", "()") and _encloses(text):
        if text[0] == "(" and re.search(r"[,;]", text):
            break
        text = text[1:-1].strip()
    return text


def _encloses(text: str) -> bool:
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _root(match: re.Match[str]) -> str:
    # Of LaTeX's \sqrt12 only the 1 is under the root, but "√12" means twelve, and who writes \sqrt12 means no other.
    return rf"\sqrt{{{match[1]}{match[2]}}}"


def _fraction(character: str) -> str:
    # Before NFKC, which makes 21/2 of 2½.
    if unicodedata.decomposition(character).startswith("<fraction>"):
        value = Fraction(unicodedata.numeric(character)).limit_denominator(10)
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return character


def _digit(character: str) -> str:
    value = unicodedata.decimal(character, None)
    return character if value is None else str(value)


def without_thousands(text: str) -> str:
    """The text with 1,234 as 1234."""
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def compact(text: str) -> str:
    """A tidy answer without spaces and with one way to write powers and thousands: equal texts are equal answers."""
    # Before the spaces go: "48, 384" is a list, "48,384" a number.
    text = re.sub(r"\s+", "", without_thousands(text))
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    return text.replace("+-", "-").rstrip(".")


def rational(text: str) -> Fraction | None:
    r"""The exact value of a number in any usual spelling (2.50, 1,234, \frac{3}{4}, 1 3/4, 12\%, 1.5 \times 10^3)."""
    text, sign, rest = text.strip().partition("%")
    if sign and not rest:
        part = rational(text)
        return None if part is None else part / 100
    text += sign + rest
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign, whole, top, bottom = (mixed[i] or mixed[i + 4] or "" for i in (1, 2, 3, 4))
        if int(bottom) == 0:
            return None
        value = int(whole) + Fraction(int(top), int(bottom))
        return -value if sign else value
    number = r"[+-]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})"
    text = compact(text)
    if re.fullmatch(number, text):
        return Fraction(text if not text.endswith(".") else text[:-1])
    if match := _REPEATING.fullmatch(text):
        return _repeating(*match.groups())
    if match := re.fullmatch(rf"({number})(?:\\times|\\cdot|\*)10\^\{{?([+-]?\d{{1,3}})\}}?", text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])
    if match := re.fullmatch(r"([+-]?\d{1,60}(?:\.\d{1,30})?)[eE]([+-]?\d{1,3})", text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2])
    slash = re.fullmatch(rf"({number})/({number})", text)
    match = slash or re.fullmatch(rf"([+-]?)\\frac\{{({number})\}}\{{({number})\}}", text)
    if match:
        sign, top, bottom = ("", match[1], match[2]) if slash else (match[1], match[2], match[3])
        if Fraction(bottom) == 0:
            return None
        value = Fraction(top) / Fraction(bottom)
        return -value if sign == "-" else value
    return None


def _repeating(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    """0.1\\overline{6} is (16 - 1) / 90."""
    value = Fraction(
        int(whole + fixed + period) - int(whole + fixed or "0"), (10 ** len(period) - 1) * 10 ** len(fixed)
    )
    return -value if sign == "-" else value


def algebra(text: str) -> str:
    """A tidy answer as math-verify reads it best: mixed fractions as sums, thousands without commas."""
    return without_thousands(_MIXED.sub(_sum, text))


def _sum(match: re.Match[str]) -> str:
    sign, whole, top, bottom = (match[i] or match[i + 4] or "" for i in (1, 2, 3, 4))
    return rf"{sign}({whole}+\frac{{{top}}}{{{bottom}}})"
