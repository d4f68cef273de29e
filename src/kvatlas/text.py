"""Texts at the edges: hostile text made visible, formulas guarded, values read as people write them.

Text that models and files wrote is hostile wherever it is shown: control characters, escapes, marks that turn the
direction of writing, private and unpaired characters are written out as `⟨U+001B⟩`, so that no text steers a terminal,
a figure, a table or a page. Values of parameters are read by the declared type of the field, never guessed.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import Field, fields
from typing import Any, TextIO


def visible(value: Any) -> Any:
    """A text with hidden characters written out, line feeds and tabs as they are; what is no text, unchanged.

    Nor is markup of templates (`__html__`), whose texts were made visible when they went in.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    if value.replace("\n", "").replace("\t", "").isprintable():
        return value
    return "".join(f"⟨U+{ord(mark):04X}⟩" if _hidden(mark) else mark for mark in value)


def _hidden(mark: str) -> bool:
    return mark not in "\n\t" and unicodedata.category(mark) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


class VisibleStream:
    """A text stream through which only visible text goes; all but writing is the stream's own.

    Rich draws with escapes of its own, so it writes to the stream itself (`rich_proxied_file` is its name for that);
    what it is given is to be made visible before.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write a text made visible; the number of its characters."""
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        # Bytes would go past.
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def unfiltered(stream: TextIO) -> TextIO:
    """The stream itself, for text that has to come out as it is: only where that is no terminal."""
    raw: TextIO = getattr(stream, "rich_proxied_file", stream)
    return stream if raw.isatty() else raw


def guarded(value: Any) -> Any:
    """A value of a CSV file: a text that a spreadsheet would run as a formula gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and _is_formula(value) else value


def unguarded(text: str) -> str:
    """The inverse of `guarded`."""
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
    """The value that `text` spells for a field of a dataclass.

    A text stays as it is, a number is read as one, all else as YAML. What cannot be read stays text as well, and so
    does the value of an unknown field: the sentence of whoever checks it then names what was given.
    """
    declared = next((field for field in fields(owner) if field.name == name), None)
    if declared is None or _is_text(declared):
        return text
    value = number(text) if _types(declared) <= {"int", "float"} else text
    return spelled(text) if isinstance(value, str) else value


def number(text: str) -> int | float | str:
    """The number that a text spells in ASCII digits; else the text."""
    for kind in (int, float) if text.isascii() else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def spelled(text: str) -> Any:
    """The value of a text without a declared type: read as YAML; else the text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _is_text(declared: Field[Any]) -> bool:
    return _types(declared) == {"str"} or isinstance(declared.default, str)


def _types(declared: Field[Any]) -> set[str]:
    """Names of the types of a field, None left out; annotations are text in modules that postpone them."""
    kind = declared.type
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return set(re.findall(r"\w+", text)) - {"None", "Optional", "typing"}
