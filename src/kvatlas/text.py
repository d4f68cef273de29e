"""Untrusted text made visible, spreadsheet formulas guarded, values read from text.

Text of models and files is untrusted. Control characters, escapes, marks that change the direction of writing, private
and unpaired characters are written as `⟨U+001B⟩`, so that no text controls a terminal, a figure, a table or a page.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import fields
from typing import Any, TextIO

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


def read_value(owner: type, name: str, text: str) -> Any:
    """Return the value that `text` spells for a field of a dataclass, by the declared type of the field.

    Text fields take the text, numeric fields a number, all others YAML. Text that cannot be read stays text, as does
    the value of an unknown field, so that later checks can quote it.
    """
    declared = next((field for field in fields(owner) if field.name == name), None)
    if declared is None or isinstance(declared.default, str):
        return text
    # Annotations are texts in modules that postpone them.
    kind = declared.type.__name__ if isinstance(declared.type, type) else str(declared.type)
    types = set(re.findall(r"\w+", kind)) - {"None", "Optional", "typing"}
    if types == {"str"}:
        return text
    value = number(text) if types <= {"int", "float"} else text
    return parse_yaml(text) if isinstance(value, str) else value


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
