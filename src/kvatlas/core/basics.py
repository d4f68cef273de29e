"""Errors as sentences, values that can be stored, canonical text, and grouping: what every room uses."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")

#: The beginning of the names of modules of users' files of code.
OWN_FILE = "kvatlas_file_"


class KvatlasError(Exception):
    """An error of a spec, file, model or setting in one sentence: the field, the expected value, the given one."""


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, cut to the length of a clause.

    A line that ends with a colon has the next ones beside it; a missing key is told as missing.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"byte {error.start + 1:,} of what was read, 0x{byte:02x}, is not UTF-8; save it as UTF-8"
    if isinstance(error, OSError) and error.strerror:
        # Without the number of the error.
        file = f": {error.filename!r}" if error.filename is not None else ""
        return f"{error.strerror}{file}{_place_in_own_file(error)}"

    try:
        text = str(error)
    except Exception:  # an error of foreign code may have no text
        text = ""
    if isinstance(error, KeyError) and len(error.args) == 1:
        # Python writes the key alone, and quotes around sentences.
        key = error.args[0]
        text = key if isinstance(key, str) and " " in key.strip() else f"there is no {text}"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    line = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return (line if len(line) <= 300 else f"{line[:300]} ...") + _place_in_own_file(error)


def _place_in_own_file(error: BaseException) -> str:
    """Return the innermost line of a user's file of code that an error came through, as a clause; else nothing."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        # The code that @dataclass writes belongs to the module, and stands in no file.
        if str(frame.f_globals.get("__name__")).startswith(OWN_FILE) and file == frame.f_globals.get("__file__"):
            place = f", line {line} of {Path(file).name}"
    return place


def described(error: BaseException) -> str:
    """Return the type and the reason of an error of foreign code."""
    name = type(error).__name__
    # `KeyError: 'nope'` says by its type that the key is missing.
    sentence = reason(error).removeprefix("there is no ") if isinstance(error, KeyError) else reason(error)
    return sentence if sentence.partition(", line ")[0] == name else f"{name}: {sentence}"


def shortened(value: object) -> str:
    """Return a value for an error sentence; Python does not write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    # Models and tensors have many lines.
    text = " ".join(map(str.strip, repr(value).splitlines()))
    return text if len(text) <= 100 else f"{text[:100]} ... ({len(text):,} characters)"


@contextmanager
def refusal(sentence: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn these errors into `sentence` with the reason; if none are given, every error of foreign code.

    These include its calls of sys.exit, and panics of libraries written in Rust, which derive from BaseException only.
    """
    kinds = errors or (BaseException,)
    try:
        yield
    except (KvatlasError, KeyboardInterrupt, GeneratorExit):
        raise
    except kinds as error:
        raise KvatlasError(f"{sentence} ({reason(error)}).") from error


def check_form(form: type[BaseModel], data: object, subject: str) -> Any:
    """Return data as a pydantic model. Raises ValueError with the place of the first fault; `subject` has the data."""
    from pydantic import ValidationError

    try:
        return form.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise ValueError(f"{subject} has a wrong {place!r}: {fault['msg']}") from error


@contextmanager
def importing(purpose: str, extra: str) -> Iterator[None]:
    """Turn a failed import of a package of an `extra` into a sentence with the module, which may be a dependency.

    Modules of kvatlas itself are no packages of an extra: their errors pass.
    """
    try:
        yield
    except ImportError as error:
        module = error.name or "of a package"
        if module.partition(".")[0] == "kvatlas":
            raise
        install = f"pip install 'kvatlas[{extra}]'"
        if isinstance(error, ModuleNotFoundError):
            sentence = f"{purpose} needs the module {module!r}, which is missing: {install}."
        else:
            sentence = (
                f"{purpose} needs the module {module!r}, which is installed and cannot be imported ({reason(error)}); "
                f"install it anew, with what it depends on: {install} --force-reinstall."
            )
        raise KvatlasError(sentence) from error


#: Suffixes of files of problems, which may end in .gz, too.
PROBLEM_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def has_problem_suffix(name: str) -> bool:
    """Return whether a name ends as that of a problem file does."""
    return name.lower().removesuffix(".gz").endswith(PROBLEM_SUFFIXES)


#: The name that each exported trace has.
TRACE_MARK = b"run_key"
#: Bytes at both ends of a file in which a mark is sought.
_MARKED = 2**16


def holds(path: Path, mark: bytes) -> bool:
    """Return whether a file has a mark near one of its ends, by which kvatlas knows its own files."""
    with refusal(f"{str(path)!r} cannot be read", OSError), path.open("rb") as file:
        text = file.read(_MARKED)
        # Parquet files name their columns at the end.
        file.seek(-min(_MARKED, path.stat().st_size), os.SEEK_END)
        return mark in text + file.read()


def refuse_problem_file(name: str | Path, expected: str, way_out: str) -> None:
    """Raise KvatlasError if a file of problems is named in the place of something else."""
    if Path(name).is_file() and has_problem_suffix(str(name)):
        # A map may be a CSV file, too.
        kind = "a CSV file" if str(name).lower().endswith(".csv") else "a file of problems"
        if holds(Path(name), TRACE_MARK):
            kind = "an export of traces"
            way_out = "Name the folder of their run."
        raise KvatlasError(f"{str(name)!r} is {kind}; expected {expected}. {way_out}")


def refuse_pointer(path: Path) -> None:
    """Raise KvatlasError for a file that git-lfs has not fetched yet: a text of three lines in its place."""
    if not path.is_file():
        # A pipe would be waited for.
        return
    with path.open("rb") as file:
        head = file.read(40)
    if head.startswith(b"version https://git-lfs"):
        raise KvatlasError(f"{str(path)!r} is a pointer of git-lfs, not yet the file; `git lfs pull` fetches it.")


def refuse_spec(name: str | Path) -> None:
    """Raise KvatlasError if a spec is named in the place of a run."""
    if Path(name).is_file() and str(name).lower().endswith((".yaml", ".yml")):
        raise KvatlasError(f"{str(name)!r} is a spec, not a run: `kvatlas sweep {name} --out RUN` makes one; name RUN.")


#: The largest integer of 64 bits with a sign, as tables and files have them.
LARGEST_INTEGER = 2**63 - 1


def is_storable_number(value: object) -> bool:
    """Return whether a value is a finite number that every file format holds."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_INTEGER
    return isinstance(value, float) and math.isfinite(value)


def is_storable_text(value: object) -> bool:
    """Return whether a value is a text without half surrogate pairs, which no file holds."""
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None


def python_number(value: Any) -> Any:
    """Return a number of numpy as one of Python, float32 by its short decimal; other values unchanged."""
    if not hasattr(value, "dtype") or getattr(value, "ndim", True):
        return value
    return float(str(value)) if isinstance(value.item(), float) else value.item()


def percent(share: float | None) -> float | None:
    """Return a share in percent with four decimals, the form of JSON and CSV files."""
    return None if share is None else round(100 * share, 4)


def rounded(value: float | None, places: int) -> float | None:
    """Return the value with so many decimals."""
    return None if value is None else round(value, places)


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values have equal texts on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical text in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Return the items by their keys, groups and items in their order."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the index of the first items that differ, or None for equal sequences.

    If one sequence begins with the whole other one, this is the length of the shorter one.
    """
    for index, (item, counterpart) in enumerate(zip(one, other, strict=False)):
        if item != counterpart:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def differing(values: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all of these, in their order."""
    every = list(values)
    found = []
    for name in dict.fromkeys(chain.from_iterable(every)):
        # Values may be unhashable; equal ones have equal texts.
        texts = {repr(mapping.get(name)) for mapping in every}
        if len(texts) > 1:
            found.append(name)
    return found
