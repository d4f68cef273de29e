"""Text: words for names and numbers, untrusted text made visible, spreadsheet formulas guarded, values read from text.

Text of models and files is untrusted. Control characters, escapes, marks that change the direction of writing, private
and unpaired characters are written as `⟨U+001B⟩`, so that no text controls a terminal, a figure, a table or a page.
"""

from __future__ import annotations

import csv
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from decimal import ROUND_HALF_UP, Decimal
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TextIO, Union, get_args, get_origin, get_type_hints

from kvatlas.core import Estimate

#: Words for parameters and metrics that are not their names; axes begin them with a capital.
LABELS: Mapping[str, str] = {"pass@1": "Pass@1", "progress": "Progress Ratio"}
#: Parameters whose axes say more, as in published maps.
_AXES = {"local_window": "Local Window Size", "kv_bits": "Bits", "every": "Compression Every (Tokens)"}
#: Values in brackets behind a name, and the name of a parameter before its value: `dynts(kv_budget=144)`.
_IN_BRACKETS = re.compile(r" ?\(([a-z_]+=[^()]*)\)")
_PARAMETER = re.compile(r"\b([a-z_]+)=")
#: The most decimals of a limit that lies next to a border.
_MOST_DIGITS = 4
#: The separators of CSV files; of equally likely ones the first.
SEPARATORS = (",", ";", "\t")
#: A number with a decimal comma, also with a unit; one whose comma may as well separate thousands; one with both marks.
_UNIT = r"(\s*([%°€]|[A-Za-z]{1,5}))?"
_DECIMAL_COMMA = re.compile(rf"[-+]?\d*,\d+{_UNIT}")
_UNCLEAR_COMMA = re.compile(rf"[-+]?[1-9]\d{{0,2}},\d{{3}}{_UNIT}")
_POINTS_AND_COMMA = re.compile(rf"[-+]?\d{{1,3}}(\.\d{{3}})+,\d+{_UNIT}")


class UnclearNumber(str):
    """The text of a number that cannot be read in one way only; refused where it is an answer."""


def axis_label(name: str) -> str:
    """Return a parameter or metric as it stands on an axis: `local_window` is `Local Window Size`.

    A metric that was graded again is `Pass@1 by GRADER`.
    """
    graded, _, grader = name.partition(":")
    if grader and graded == "graded":
        return f"Pass@1 by {grader}"
    words = _AXES.get(name) or parameter_words(name)
    return words[:1].upper() + words[1:]


def parameter_words(name: str) -> str:
    """Return a parameter or metric as it stands in a sentence: `kv_budget` is `KV budget`."""
    return LABELS.get(name) or " ".join("KV" if word == "kv" else word for word in name.split("_"))


def in_words(name: str, words: Callable[[str], str] = parameter_words) -> str:
    """Return the name of a setting as figures show it: `dynts(kv_budget=144)` is `dynts, KV budget 144`."""
    return _PARAMETER.sub(lambda match: f"{words(match[1])} ", _IN_BRACKETS.sub(r", \1", name))


def model_name(name: str) -> str:
    """Return a model as titles show it: `embedded:tiny-llama` is `tiny-llama`, `hf:/models/R1-Llama` is `R1-Llama`."""
    kind, _, rest = name.partition(":")
    if kind not in ("embedded", "hf") or not rest:
        return name
    return rest.rstrip("/").rpartition("/")[2]


def fixed(value: float, digits: int = 1) -> str:
    """Return a number with so many decimals; halves go away from 0: 51.25 is `51.3`, -0.04 is `0.0`."""
    # To four decimals first, as exports and JSON are: 0.2875 is 28.8 everywhere, whatever its last binary digit.
    rounded = Decimal(round(value, 4)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{rounded or abs(rounded):f}"


def grouped_digits(value: float, digits: int = 0) -> str:
    """Return a number as `fixed` does, with commas between thousands: 12345.5 is `12,346`."""
    return f"{Decimal(fixed(value, digits)):,f}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 problem`, `2,000 problems`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent_text(share: float, digits: int = 1) -> str:
    """Return a share in [0, 1] as a percentage without the sign: 0.4933 is `49.3`."""
    return fixed(100 * share, digits)


def digits_apart(share: float, border: float) -> int:
    """Return the decimals of a percentage that tell it from a border, as a margin or 0: one, or more where it is near.

    One, too, where four are too few.
    """
    for digits in range(1, _MOST_DIGITS + 1):
        if fixed(100 * share, digits) != fixed(100 * border, digits):
            return digits
    return 1


def limit_text(share: float, border: float = 0.0) -> str:
    """Return a limit in percent, told from a border: 0.0302 is `3.02` beside a margin of 0.03, and 0.031 is `3.1`."""
    return percent_text(share, digits_apart(share, border))


def bytes_text(size: float) -> str:
    """Return a number of bytes with three digits in the unit that suits it: 2640000000 is `2.46 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def duration_text(seconds: float) -> str:
    """Return a duration in the unit that suits it: 40 is `40 seconds`, 754 is `13 minutes`, 19000 is `5.3 hours`."""
    if seconds < 60:
        return counted(max(1, math.ceil(seconds)), "second")
    if seconds < 2 * 3600:
        return counted(math.ceil(seconds / 60), "minute")
    return f"{grouped_digits(seconds / 3600, 1)} hours"


def margin_text(margin: float) -> str:
    """Return a margin in points without more places than needed: 0.03 is `3 points`, 0.01 is `1 point`."""
    points = f"{round(100 * margin, 4):g}"
    return f"{points} point{'' if points == '1' else 's'}"


def margin_question(points: float | None) -> str:
    """Return a question on a margin in points that somebody may have taken for a share; "" for others."""
    if points is None or not 0 < points < 0.5:
        return ""
    return f"lose_at_most counts points; was {100 * points:g} meant, and not {points:g}?"


def signed(value: float, digits: int = 1, minus: str = "−") -> str:
    """Return a number with its sign: 3.2 is `+3.2`, -3.2 is `−3.2`, 0 is `0.0`.

    `minus` is the true minus of figures by default; text for terminals and files takes the hyphen.
    """
    text = fixed(value, digits)
    return text.replace("-", minus) if float(text) <= 0 else f"+{text}"


def points_text(difference: float) -> str:
    """Return a difference of shares in points: 0.032 is `+3.2`, and 0.0002 is `+0.02`, since it is not 0."""
    return signed(100 * difference, digits_apart(difference, 0.0), minus="-")


def p_text(p: float) -> str:
    """Return a p-value with two digits; a bound near 0, and above 0.5, where it says nothing."""
    if p < 0.001:
        return "< 0.001"
    return "> 0.5" if p > 0.5 else f"{p:.2g}"


def interval_text(estimate: Estimate) -> str:
    """Return the interval as `32.6–65.4` in percent, empty where it is unknown."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{percent_text(estimate.low)}–{percent_text(estimate.high)}"


#: Unicode categories of hidden characters.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible(value: Any) -> Any:
    """Return a text with hidden characters written out, except line feeds and tabs; other values unchanged.

    Markup of templates (`__html__`) stays unchanged, too: its texts were made visible when they were inserted.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    if value.replace("\n", "").replace("\t", "").isprintable():
        return value
    return "".join(
        f"⟨U+{ord(mark):04X}⟩" if mark not in "\n\t" and unicodedata.category(mark) in _HIDDEN else mark
        for mark in value
    )


class VisibleStream:
    """A text stream that writes only visible text and forwards everything else to the stream it wraps.

    Rich writes escapes of its own to the inner stream, which it finds as `rich_proxied_file`; its texts must be made
    visible before.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write a text made visible and return its number of characters."""
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # Bytes would not be filtered.
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the inner stream for text that must not change, unless it is a terminal."""
    raw: TextIO = getattr(stream, "rich_proxied_file", stream)
    return stream if raw.isatty() else raw


def guarded(value: Any) -> Any:
    """Return a value for a CSV file: visible, and with an apostrophe before a formula that a spreadsheet would run."""
    text = visible(value)
    return f"'{text}" if isinstance(text, str) and _is_formula(text) else text


def unguarded(text: str) -> str:
    """Return the text that `guarded` was given."""
    return text[1:] if text[:1] == "'" and _is_formula(text[1:]) else text


def _is_formula(text: str) -> bool:
    text = text.lstrip("'")
    if not text or text[0] not in "=+-@\t\r":
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ` Did you mean 'rkv'?` for a name that is spelled almost like one of the names, else nothing."""
    close = closest_name(name, names)
    return f" Did you mean {close!r}?" if close else ""


def closest_name(name: str, names: Iterable[str]) -> str:
    """Return the one of the names that a name is spelled almost like, or that it abbreviates or begins with, or ""."""
    given = str(name).lower()
    in_small_letters = {candidate.lower(): candidate for candidate in names}
    close = get_close_matches(given, in_small_letters, n=1, cutoff=0.6)
    for candidate in in_small_letters:
        shorter, longer = sorted((given, candidate), key=len)
        if not close and len(shorter) >= 3 and longer.startswith(shorter):
            close = [candidate]
    return in_small_letters[close[0]] if close else ""


def did_you_mean_file(path: Path) -> str:
    """Return ` Did you mean 'mine.jsonl'?` for a path beside a file or folder of almost its name, else nothing."""
    return did_you_mean(str(path), map(str, path.parent.iterdir()) if path.parent.is_dir() else [])


def read_value(owner: type, name: str, text: str) -> Any:
    """Return the value that `text` spells for a field of a dataclass, by the declared type of the field.

    Text fields take the text, numeric fields a number, all others YAML. Text that cannot be read stays text, as does
    the value of an unknown field, so that later checks can quote it.
    """
    declared = next((field for field in fields(owner) if field.name == name), None)
    if declared is None:
        return text
    types = _declared_types(owner, name)
    # A number of tokens may also be a word.
    if types == {str} or (isinstance(declared.default, str) and int not in types):
        return text
    value = number(text) if types <= {int, float} else text
    return parse_yaml(text) if isinstance(value, str) else value


def _declared_types(owner: type, name: str) -> set[Any]:
    """Return the types that a field of a dataclass may have, without None."""
    try:
        declared = get_type_hints(owner)[name]
    except NameError:
        # A third party's annotation names what it imports for type checkers alone.
        return {Any}
    types = {declared}
    if get_origin(declared) in (Union, UnionType):
        types = set(get_args(declared))
    return types - {NoneType}


def number(text: str) -> int | float | str:
    """Return the number that a text spells in ASCII digits, else the text."""
    for kind in (int, float) if text.isascii() else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def scalar(text: Any) -> Any:
    """Return the number, truth value or None that a text spells in YAML, else the text; other data as it is."""
    value = parse_yaml(text) if isinstance(text, str) else text
    return value if isinstance(value, int | float | None) else text


def parse_yaml(text: str) -> Any:
    """Return the value of a text read as YAML, else the text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def open_csv(file: TextIO) -> csv.DictReader[str]:
    """Return the reader of a CSV file; its header tells the separator."""
    header = file.readline()
    file.seek(0)
    separator = max(SEPARATORS, key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))
    return csv.DictReader(file, delimiter=separator)


def with_decimal_point(text: str, separator: str) -> str:
    """Return a number with a decimal comma with a point, other texts as they are.

    Spreadsheets write semicolons where the comma is the decimal point. A text whose comma may as well separate
    thousands is marked as unclear.
    """
    if separator != ";":
        return text
    if _UNCLEAR_COMMA.fullmatch(text.strip()):
        return UnclearNumber(text)
    if _POINTS_AND_COMMA.fullmatch(text.strip()):
        text = text.replace(".", "")
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text.strip()) else text
