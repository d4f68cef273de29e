r"""Units and counted things behind a number: `5\text{ cm}^2`, `60 kilometers per hour`, `25 marbles`."""

from __future__ import annotations

import re
from collections import Counter

#: Names of units and their other spellings; a plural s may follow each that has more than two letters.
_SPELLINGS = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "dm": "decimeter decimetre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "g": "gram",
    "mg": "milligram",
    "kg": "kilogram kilo",
    "lb": "pound lbs",
    "oz": "ounce",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr hrs",
    "day": "",
    "week": "",
    "month": "",
    "year": "",
    "L": "liter litre l",
    "mL": "milliliter millilitre ml",
    "dollar": "usd",
    "cent": "",
    "deg": "degree",
    "rad": "radian",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "Pa": "pascal",
    "Hz": "hertz",
    "mol": "mole",
    "K": "kelvin",
}
_NAMES = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others.split())}
_POWERS = {"square": 2, "sq": 2, "cubic": 3}
#: Words behind a number that say another number or an expression.
_NO_NOUNS = (
    "and|or|to|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|scores?|tens|half|halves|thirds?|quarters?"
    "|fifths?|percent|plus|minus|times\\s+\\w+|over|squared|cubed|factorial|mod|base|pi|infinity|log|ln|exp|sin|cos|tan"
    "|cot|sec|csc|sqrt|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|am|pm|AM|PM|January|February|March|April|May"
    "|June|July|August|September|October|November|December"
)
_ANY = "|".join(sorted(_NAMES, key=len, reverse=True))
_LONG = "|".join(sorted((name for name in _NAMES if len(name) > 1), key=len, reverse=True))
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
#: Letters of one unit are units only after a space or in a quotient.
_UNIT = re.compile(
    rf"(?:(?<=[\d}}\s)\]a-zA-Z])(?<![a-zA-Z](?=[a-zA-Z]))\s*(?:(?:{_ANY})\s*/\s*(?:{_ANY})|mph|square|cubic|sq|units?|points?|people|students?"
    rf"|ways|times|percent|(?:{_LONG})s?){_POWER}|(?<=\s)[smgLhN]{_POWER}|(?<=\d)\s*''?|\^\{{?\\circ\}}?\s*[CF]?)\s*$"
)
_NOUNS = re.compile(
    rf"(?<=[\d}})\]])\s+(?!(?:{_NO_NOUNS})\b)(?:[A-Za-z][A-Za-z-]{{2,}}|(?:{_LONG})\b)"
    rf"(?:\s+(?!(?:{_NO_NOUNS})\b)[A-Za-z][A-Za-z-]+)*\s*$"
)


def without_unit(text: str) -> str:
    """A tidy answer without the units, or the names of what is counted, behind it."""
    text = _NOUNS.sub("", text)
    for _ in range(3):
        shorter = _UNIT.sub("", text).strip()
        if not re.search(r"\w", shorter):
            break
        text = shorter
    return text


def differ(unit: str, other: str) -> bool:
    """Whether two tidy answers have known units that are not the same."""
    first, second = _unit(unit), _unit(other)
    return bool(first and second and first != second)


def _unit(text: str) -> Counter[str] | None:
    """Exponents of the units behind a text; None where a word there is none."""
    counts: Counter[str] = Counter()
    sign, power, last = 1, 1, ""
    suffix = text[len(without_unit(text)) :].replace("mph", "mi/h").replace("''", "in").replace("'", "ft")
    for token in re.findall(r"[A-Za-z]+|/|-?\d+", suffix.replace(r"\circ", "deg ")):
        if token in ("/", "per"):
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token.lstrip("-").isdecimal():
            counts[last] *= int(token)
        else:
            last = _name(token)
            if not last:
                return None
            counts[last] += sign * power
            power = 1
    return counts


def _name(word: str) -> str:
    for spelling in (word, word.removesuffix("s"), word.casefold(), word.casefold().removesuffix("s")):
        if spelling in _NAMES:
            return _NAMES[spelling]
    return ""
