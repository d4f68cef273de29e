"""Text that models and files wrote is hostile: what may reach a terminal, a figure, a table or a page of it.

Control characters, escapes, marks that turn the direction of writing, private and unpaired characters are written out
as `⟨U+001B⟩`, so that no text steers what shows it.
"""

from __future__ import annotations

import unicodedata
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
    """What `guarded` was given."""
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
