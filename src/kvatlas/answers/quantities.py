"""Numbers in words, and the units or names of things behind a number."""

import re
import unicodedata
from collections import Counter
from fractions import Fraction

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_PARTS = ("half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_VALUES = {
    **{word: value for value, word in enumerate(_SMALL)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
}
_BELOW_100 = rf"(?:(?:{'|'.join(_TENS)})(?:[\s-]+(?:{'|'.join(_SMALL[1:10])}))?|{'|'.join(reversed(_SMALL))})(?![a-z])"
_BELOW_1000 = rf"(?:{_BELOW_100}(?:\s+hundred(?:\s+(?:and\s+)?{_BELOW_100})?(?![a-z]))?)"
_SCALED = rf"(?:(?:{_BELOW_1000}|\d[\d,]*(?:\.\d+)?)\s+(?:{'|'.join(_SCALES)})(?![a-z]))"
_NUMBER_WORDS = re.compile(
    rf"(?<![A-Za-z\\])(?<![A-Za-z]-)"
    rf"(?:{_SCALED}(?:,?\s+(?:and\s+)?{_SCALED})*(?:,?\s+(?:and\s+)?{_BELOW_1000})?|{_BELOW_1000})"
    rf"(?:[\s-]+(?:{'|'.join(_PARTS)}|halve|quarter)s?)?(?!-?[A-Za-z])",
    re.IGNORECASE,
)
#: Multipliers of East Asian languages behind a number, which are no part of a unit (千克, 百分).
_MULTIPLIERS = {"万": 10**4, "萬": 10**4, "만": 10**4, "亿": 10**8, "億": 10**8, "억": 10**8, "千": 10**3, "百": 100}
_MULTIPLIED = re.compile(rf"(\d+(?:\.\d+)?)\s*([{''.join(_MULTIPLIERS)}])(?![克米瓦卡帕分])")


def numerals(text: str) -> str:
    r"""Return the text with numbers in words as digits: twenty-one, 2 million, two thirds, minus five, 30万."""

    def digits(match: re.Match[str]) -> str:
        total = current = Fraction(0)
        divisor = 1
        for word in re.findall(r"[a-z]+|\d[\d,.]*", match[0].casefold()):
            fraction_word = {"halves": "half", "halve": "half", "quarter": "fourth"}.get(word.removesuffix("s"), word)
            if word in _VALUES:
                current += _VALUES[word]
            elif word == "hundred":
                current *= 100
            elif word in _SCALES:
                total += current * _SCALES[word]
                current = Fraction(0)
            elif fraction_word.removesuffix("s") in _PARTS:
                divisor = _PARTS.index(fraction_word.removesuffix("s")) + 2
            elif word != "and":
                current += Fraction(word.replace(",", "").rstrip("."))
        total += current
        spelled = str(total.numerator) if total.denominator == 1 else str(float(total))
        return spelled if divisor == 1 else rf"\frac{{{spelled}}}{{{divisor}}}"

    text = _MULTIPLIED.sub(lambda match: str(int(Fraction(match[1]) * _MULTIPLIERS[match[2]])), text)
    return re.sub(r"^\s*(?:minus|negative)\s+(?=[\d\\])", "-", _NUMBER_WORDS.sub(digits, text), flags=re.IGNORECASE)


#: The spellings of units, the name first; a plural s may follow each that has more than two letters.
_UNITS = """
m meter metre 米; cm centimeter centimetre 厘米; mm millimeter millimetre 毫米; dm decimeter decimetre 分米; ha hectare
km kilometer kilometre 千米 公里; in inch inches; ft foot feet; yd yard; mi mile; acre; g gram 克; mg milligram
tonne ton 吨; kg kilogram kilo 千克 公斤; lb pound lbs; oz ounce; s second sec 秒; min minute 分钟; h hour hr hrs 小时
day 天; week; month; year 年; L liter litre l 升; mL milliliter millilitre ml 毫升; gal gallon; dollar usd; cent
euro; yen 日元 円; yuan 元; rupee; deg degree 度; rad radian; N newton; J joule; kJ; W watt; kW; V volt; Pa pascal
kPa; Hz hertz; mol mole; K kelvin; ohm Omega; mph"""
_NAMES: dict[str, str] = {}
for _spellings in re.split(r"[;\n]\s*", _UNITS.strip()):
    _NAMES |= dict.fromkeys(_spellings.split(), _spellings.split()[0])
#: Symbols of units with a prefix, of which most are no words: MeV, GHz, mmol.
_PREFIXED = re.compile("[pnmkMGT]?(?:eV|Hz|J|W|V|A|Pa|mol|N|F|T|cal|bar|rad|Bq|Sv|Wb|B|s|m|g|L)")
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}
#: Words that stand behind any value, in the singular.
_ANYTHING = ("unit", "point", "people", "way", "time")
_COUNTS = (*_ANYTHING, "student", "per", *_POWERS)
#: Words behind a number that belong to the number or an expression.
_OF_NUMBERS = (
    "and or to hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens "
    "score scores tens half halves third thirds quarter quarters fifth fifths tenth tenths hundredth hundredths "
    "thousandth thousandths millionth millionths billionth billionths trillionth trillionths percent plus minus than "
    "over squared cubed doubled tripled halved negative factorial mod base pi infinity log ln exp sin cos tan cot sec "
    "csc sqrt alpha beta gamma delta theta lambda mu phi omega am pm january february march "
    "april may june july august september october november december"
)
_NO_NOUNS = frozenset(_OF_NUMBERS.split())
#: A word, with the exponent of a unit; no Greek letters.
_UNIT_WORD = r"(?:[^\W\d_\u0370-\u03ff]+\.?|\\Omega)(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT_WORDS = rf"{_UNIT_WORD}(?:(?:\s*(?:/|\\cdot(?![A-Za-z])|\*|-)\s*|\s+){_UNIT_WORD})*"
_TAIL = re.compile(rf"(?:(?P<space>\s+)|(?<=[\d}})\]%]))(?P<words>{_UNIT_WORDS})\s*$")
_BRACKETED = re.compile(rf"(?<=[\d}})\]])(?P<space>\s*)\(\s*(?P<words>{_UNIT_WORD}(?:[\s/]+{_UNIT_WORD})?)\s*\)$")
_QUOTIENT_OF_UNITS = re.compile(r"(?<=[\d\s])\\frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+)\s*\}\s*$")
#: Feet, inches and degrees; the degrees of a function belong to it.
_SIGN_OF_UNIT = re.compile(r"(?<=\d)\s*''?$|\s*\^\\circ\s*[CF]?$")
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")


def _unit_name(word: str) -> str:
    """Return the name of a unit in any spelling; "" for another word."""
    # The case of M tells: M is no m, and Mg no mg.
    folded = word if len(word) == 1 or re.fullmatch("M.", word) else word.casefold()
    spellings = (word, folded, word.removesuffix("s"), folded.removesuffix("s")) if len(word) > 2 else (word, folded)
    return next((_NAMES[spelling] for spelling in spellings if spelling in _NAMES), "")


def split_unit(text: str, loose: bool = False) -> tuple[str, str]:
    """Return a tidy answer without the units or names of things behind it, and these.

    A single letter without a space before it, the m of 12m, is a unit if `loose`, else a symbol.
    """
    if (match := _QUOTIENT_OF_UNITS.search(text)) and _unit_name(match[1]) and _unit_name(match[2]):
        text = f"{text[: match.start()]} {match[1]}/{match[2]}"
    if match := _BRACKETED.search(text):
        words = match["words"]
        # A short word may be a product of letters.
        is_unit = all(map(_unit_name, re.findall(r"[^\W\d_]+", words)))
        if not words.isascii() or (match["space"] and (len(words) > 3 or is_unit)):
            text = f"{text[: match.start()]} {words}"
    if match := _SIGN_OF_UNIT.search(text):
        is_value = re.search(r"\w", text[: match.start()]) and not _FUNCTION.search(text)
        return (text[: match.start()].strip(), match[0]) if is_value else (text, "")

    match = _TAIL.search(text)
    value = text[: match.start()].rstrip() if match else ""
    if match is None or not re.search(r"\w", value) or re.search(r"\\(?:cdot|times|div)$", value):
        return text, ""
    words = re.findall(r"[^\W\d_]+", match["words"])
    unit_names = [_unit_name(word) or _count_name(word) for word in words]
    is_spaced = bool(match["space"])
    if not all(unit_names):
        # Names of things, of three letters behind a space or in another script.
        is_latin = words[0].isascii() or unicodedata.name(words[0][0]).startswith("LATIN")
        is_noun = not is_latin or (is_spaced and (len(words[0]) > 2 or words[0] == "of" or bool(unit_names[0])))
        is_of_number = "times" in words or any(word.casefold() in _NO_NOUNS for word in words)
        is_unit = is_noun and not is_of_number and value[-1] in "0123456789})]%"
    elif any(len(word) > 1 for word in words):
        is_unit = True
    elif len(words) > 1:
        # Of letters alone a quotient or a negative power tells.
        is_unit = re.search(r"[/-]|\\cdot|\*", match["words"]) is not None
    else:
        # One letter may be a symbol, and is one in a formula.
        is_formula = re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value)) is not None
        is_unit = (is_spaced or loose) and not is_formula
    return (value, match["words"]) if is_unit else (text, "")


def _count_name(word: str) -> str:
    folded = word.casefold()
    return next((name for name in (folded, folded.removesuffix("s")) if name in _COUNTS), "")


def without_unit(text: str, loose: bool = False) -> str:
    """Return a tidy answer without the units or names of things behind it (see `split_unit`)."""
    return split_unit(text, loose)[0]


def things(text: str) -> set[str]:
    """Return the words behind a number, in one spelling; empty if they stand for anything or are of another script."""
    value, suffix = split_unit(text)
    words = re.findall(r"[^\W\d_]+", suffix)
    names = {_unit_name(word) or re.sub("(?:ies|es|s|y|e)$", "", word.casefold()) for word in words}
    if value.endswith("%"):
        names.add("%")
    is_anything = any(_count_name(word) in _ANYTHING for word in words)
    return set() if is_anything or "\\" in suffix or not suffix.isascii() else names


#: A number with its unit, and what stands before the next one.
_PART = r"(\d+(?:\.\d+)?)\s*([^\W\d_]+)\.?,?(?:\s*(?<![^\W_])and\s+|\s*)"


def by_unit(text: str) -> dict[str, Fraction]:
    """Return the numbers of a quantity in several units, `3 hours and 30 minutes`, by unit; empty for another text."""
    parts = re.findall(_PART, text) if re.fullmatch(rf"(?:{_PART}){{2,}}", text) else []
    numbers = {_unit_name(word): Fraction(digits) for digits, word in parts}
    return numbers if len(numbers) == len(parts) and "" not in numbers else {}


def unit_exponents(text: str, loose: bool = False) -> Counter[str] | None:
    r"""Return the exponents of the units behind a tidy answer (`5 cm^2`, `60 kilometers per hour`), empty without any;
    None for a word that is no unit."""
    counts: Counter[str] = Counter()
    # The sign and the power of the units that follow, and the unit before.
    sign = 1
    power = 1
    last = ""

    suffix = split_unit(text, loose)[1].replace("mph", "mi/h").replace("''", "in").replace("'", "ft")
    if text.endswith("%"):
        return Counter("%")
    for token in re.findall(r"平方|立方|[^\W\d_]+|/|-?\d+", suffix.replace(r"\circ", "deg ")):
        if token in ("/", "per"):
            sign = -1
        elif token.casefold() in _POWERS:
            power = _POWERS[token.casefold()]
        elif token.lstrip("-").isdecimal():
            counts[last] *= int(token)
        else:
            last = _unit_name(token) or (token if _PREFIXED.fullmatch(token) else "")
            if not last:
                return None
            counts[last] += sign * power
            power = 1
    return counts
