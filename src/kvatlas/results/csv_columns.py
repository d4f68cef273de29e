"""Columns and numbers of CSV maps as people write them: which column is meant, and what a number says."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from kvatlas.core import KvatlasError

#: Other names that people give to columns, once letter case, signs and units are left out.
_USUAL: Mapping[str, tuple[str, ...]] = {
    "model": ("model_name", "llm"),
    "benchmark": ("benchmark_name", "bench", "dataset", "data_set", "task"),
    "policy": ("method",),
    "local_window": ("window", "window_size", "local_window_size"),
    "ratio": ("keep_ratio", "kept_ratio", "selection_ratio", "retention_ratio"),
    "pass_at_1": ("pass_1", "pass1", "accuracy", "acc"),
    "problems": ("n_problems", "num_problems", "questions"),
    "samples": ("n_samples", "num_samples"),
    "kv_budget": ("budget",),
}
_SEPARATORS = ",;\t|"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")


class GuessWarning(UserWarning):
    """What was understood in a file without being sure, in one sentence."""


def separator(text: str) -> str:
    """What separates the fields: of comma, semicolon, tab and bar the one that the first line has most of."""
    head = next((line for line in text.splitlines() if line.strip()), "")
    return max(_SEPARATORS, key=head.count)


def plain(column: str) -> str:
    """A column's name without letter case, spaces, signs and unit: `Pass@1 (%)` is `pass_at_1`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.strip()).casefold().replace("@", "_at_")
    words = re.sub(r"[\s_(\[]*(%|in percent|percent)[)\]]*$", "", words)
    return re.sub(r"[^\w]+|_+", "_", words).strip("_")


def spelt(name: str, header: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The header with the names that are meant, and what is told of those that were not plain.

    Names that are no spelling of a known column stay. KvatlasError where two columns mean the same.
    """
    meant, told = list(header), []
    for number, column in enumerate(header):
        if column in known:
            continue
        close = plain(column)
        usual = next((word for word, names in _USUAL.items() if close in names), "")
        if close in known:
            meant[number] = close
        elif usual and usual not in {*header, *map(plain, header)}:
            meant[number] = usual
            told.append(f"column {column} is read as {usual}")
    for column in meant:
        if column and meant.count(column) > 1:
            both = [written for written, meaning in zip(header, meant, strict=True) if meaning == column]
            raise KvatlasError(f"{name} has the column {column} twice in its header: {', '.join(both)}.")
    return meant, told


def did_you_mean(missing: Sequence[str], others: Sequence[str], likeness: float = 0.6) -> str:
    """A question for every missing column that another one resembles; "" where none does."""
    guesses = [(name, get_close_matches(name, others, 1, likeness)) for name in missing]
    said = [f"{close[0]} for {name}" for name, close in guesses if close]
    return f" Did you mean {', '.join(said)}?" if said else ""


def number(where: str, column: str, text: str, whole: bool = False) -> float:
    """A number, with or without a percent sign or decimal comma; in `whole` columns a comma groups thousands."""
    plain_text = text.strip().removesuffix("%").rstrip()
    if whole and _THOUSANDS.fullmatch(plain_text):
        plain_text = plain_text.replace(",", "")
    elif _DECIMAL_COMMA.fullmatch(plain_text):
        plain_text = plain_text.replace(",", ".")
    # Python would read digits of any script, and underscores between them.
    try:
        value = float(plain_text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise KvatlasError(f"{where}: {column} is {text!r}; it must be a number.")
    return value
