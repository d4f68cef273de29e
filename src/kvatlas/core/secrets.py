"""Secrets in specs and commands: the names that hold them, and `***` in their place."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
#: `HF_TOKEN`, `api_key` and `password` hold secrets; `max_new_tokens`, `tokenizer` and `keyfile` do not.
_WORD = r"(?:(?:keys?|token|passwd)(?![a-z])|secret|password|authorization)"
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)
#: Values that are never secrets: `$NAME`, `{parameter}`, numbers, switches, nothing.
_NO_SECRET = re.compile(r"\$\w+|\$?\{\w+\}|[-+.\d]{0,7}|true|false|none|null|\*+", re.IGNORECASE)
_NAME = rf"[\w.-]*{_WORD}[\w.-]*"
#: `--api-key X`, `--api-key=X`, `HF_TOKEN=X`, `api_key: X`, `"api_key": "X"` and `Authorization: Bearer X` in a text.
_ARGUMENT = re.compile(
    rf"(?<![\w.-])(?P<head>(?:(?P<name>{_NAME})[\"']?\s*[=:]|(?P<option>--?{_NAME})(?=\s))\s*(?:(?:bearer|basic)\s+)?)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|(?!--)[^\s\"',;}\]]+)",
    re.IGNORECASE,
)
#: `https://user:password@host`.
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def is_secret(name: str, value: object) -> bool:
    """Return whether a value of this name is a secret in clear; `$NAME` refers to the environment."""
    text = str(value).strip("\"'")
    return _SECRET_NAME.search(name) is not None and _NO_SECRET.fullmatch(text) is None


def secret_arguments(command: str) -> list[str]:
    """Return the names of the arguments of a command whose values are secrets in clear."""
    found = []
    for match in _ARGUMENT.finditer(command):
        name = match["option"] or match["name"]
        if is_secret(name, match["value"]):
            found.append(name)
    return found


def without_secrets(value: Any, name: str = "") -> Any:
    """Return plain data with `***` in place of the secrets in it, at every depth; `name` is the key that holds it.

    Prompts stay as they are: models read them.
    """
    if isinstance(value, Mapping):
        holder = f"{name} " if _SECRET_NAME.search(name) else ""
        return {key: without_secrets(entry, f"{holder}{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(entry, name) for entry in value]
    if not isinstance(value, str) or name == "prompt":
        return value
    if is_secret(name, value):
        return MASK
    return _IN_ADDRESS.sub(MASK, _ARGUMENT.sub(_masked_argument, value))


def _masked_argument(match: re.Match[str]) -> str:
    if is_secret(match["option"] or match["name"], match["value"]):
        return match["head"] + MASK
    return match[0]
