"""Values of parameters as people write them: read by the declared type of the field, never guessed from the text."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from typing import Any


def text_fields(owner: type) -> frozenset[str]:
    """Names of the fields of a dataclass that are declared as text: `str`, `str | None`, or words of an enumeration."""
    return frozenset(field.name for field in fields(owner) if _is_text(field))


def read_value(owner: type, name: str, text: str) -> Any:
    """The value that `text` spells for a field of a dataclass.

    A text stays as it is, a number is read as one, all else as YAML. What cannot be read stays text as well, and so
    does the value of an unknown field: the sentence of whoever checks it then names what was given.
    """
    declared = next((field for field in fields(owner) if field.name == name), None)
    if declared is None or _is_text(declared):
        return text
    # Python would read digits of any script, and underscores between them.
    if _types(declared) <= {"int", "float"} and text.isascii() and "_" not in text:
        for number in (int, float):
            try:
                return number(text)
            except ValueError:
                continue
    return spelled(text)


def spelled(text: str) -> Any:
    """What a text says where no type is declared: read as a spec would read it, as YAML; else the text."""
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
