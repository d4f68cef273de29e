"""A trace as a row of the store and as a record of numbers; records of many traces as columns."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from struct import Struct
from types import UnionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import (
    LARGEST_INTEGER,
    Costs,
    EvictionTrace,
    Grade,
    KvatlasError,
    Setting,
    Status,
    Trace,
    Usage,
    is_storable_number,
    is_storable_text,
    reason,
)

#: The columns of a trace in order; the last three are large.
COLUMNS = (
    "run_key", "setting", "model", "benchmark", "problem", "sample",
    "correct", "progress", "answer", "status", "metrics", "usage", "tokens", "text", "fate",
)  # fmt: skip
#: The costs of a trace in the order of a record. Stored records have this order: never change it.
COSTS = (
    "prompt_tokens", "output_tokens", "thinking_tokens", "peak_kv_tokens", "mean_kv_tokens", "compressions", "seconds",
)  # fmt: skip
#: The costs that are counts; the others are means and times.
_COUNTS = frozenset(COSTS) - {"mean_kv_tokens", "seconds"}
#: The most samples of a problem; a table has a place for each of them.
MAX_SAMPLES = 10_000
#: What sentences expect of a name or a text, and of a value of a setting or a metric.
_TEXT = "a text of whole characters"
_VALUE = "a finite number or a text of whole characters"
#: The largest number of a token, and of a step.
_LARGEST_TOKEN = 2**31 - 1


class RefusedTraceError(KvatlasError):
    """A trace that a store cannot hold, in one sentence with its place and the value."""

    @classmethod
    def of_several(cls, errors: Sequence[RefusedTraceError]) -> RefusedTraceError:
        """Return one error of several: the first sentence, and how many there are besides."""
        if len(errors) == 1:
            return errors[0]
        return cls(f"{errors[0]} {len(errors) - 1:,} more were refused, too.")


def check_cell(model: str, benchmark: str, setting: Setting, problems: Sequence[str], samples: int) -> None:
    """Raise KvatlasError for a promised cell whose traces no store can hold."""
    faults: list[str] = []
    for name in (model, benchmark, *problems):
        faults += _clauses("a name", name, is_storable_text(name), _TEXT)
    faults += setting_faults(setting)
    is_number = _is_integer(samples, MAX_SAMPLES) and samples > 0
    faults += _clauses("the number of samples", samples, is_number, f"an integer from 1 to {MAX_SAMPLES:,}")
    if faults:
        raise KvatlasError(f"A run cannot hold {_short(setting)} of {_short(model)}: {faults[0]}.")


def _faults(trace: Trace) -> Iterator[str]:
    """Yield a clause for each value of a trace that a store cannot hold.

    A value of another type comes first: what follows needs the right ones.
    """
    yield from _type_faults(trace)
    for name in ("model", "benchmark", "problem", "text"):
        text = getattr(trace, name)
        yield from _clauses(name, text, is_storable_text(text), _TEXT)
    yield from setting_faults(trace.setting)
    is_sample = _is_integer(trace.sample, MAX_SAMPLES - 1)
    yield from _clauses("its number", trace.sample, is_sample, f"an integer from 0 to {MAX_SAMPLES - 1:,}")
    yield from _grade_faults(trace.grade)
    for name in COSTS:
        cost = getattr(trace.usage, name)
        expected = "an integer from 0" if name in _COUNTS else "a finite number from 0"
        yield from _clauses(name, cost, is_cost(name, cost), expected)

    for token in trace.tokens:
        if not _is_integer(token, _LARGEST_TOKEN):
            yield from _clauses("a token", token, False, "the number of a token")
    if trace.eviction_trace is not None and not _is_readable_again(trace.eviction_trace):
        yield "its eviction trace contradicts itself"

    try:
        finite_object(trace.made_with or "{}")
    except ValueError as error:
        yield f"made_with is no JSON of numbers and texts ({reason(error)})"


def _type_faults(trace: Trace) -> Iterator[str]:
    """Yield a clause for each part of a trace that is of another type than the class says."""
    evictions = trace.eviction_trace
    parts: dict[str, tuple[object, type | UnionType]] = {
        "the setting": (trace.setting, Setting),
        "tokens": (trace.tokens, tuple | list),
        "the grade": (trace.grade, Grade),
        "usage": (trace.usage, Costs),
        "made_with": (trace.made_with, str),
        "the eviction trace": (evictions, EvictionTrace | None),
        "parameters": (getattr(trace.setting, "parameters", ()), tuple),
        "metrics": (getattr(trace.grade, "metrics", {}), Mapping),
        "evicted_at": (getattr(evictions, "evicted_at", ()), tuple),
        "kept_by": (getattr(evictions, "kept_by", ()), tuple),
    }
    for name, (value, expected) in parts.items():
        if not isinstance(value, expected):
            yield f"{name} is of the type {type(value).__name__}, expected {getattr(expected, '__name__', expected)}"
    if not all(isinstance(each, tuple) and len(each) == 2 for each in trace.setting.parameters):
        yield "a parameter of its setting is no pair of a name and a value"


def setting_faults(setting: Setting) -> Iterator[str]:
    """Yield a clause for each part of a setting that a store cannot hold."""
    yield from _clauses("the policy", setting.policy, is_storable_text(setting.policy), _TEXT)
    for name, value in setting.parameters:
        if is_storable_text(name) and name != "policy":
            yield from _clauses(name, value, _is_plain(value), _VALUE)
        else:
            yield from _clauses("the name of a parameter", name, False, f"{_TEXT} other than 'policy'")
    names = [name for name, _ in setting.parameters]
    is_in_order = names == sorted(set(names))
    yield from _clauses("the order of its parameters", ", ".join(map(str, names)), is_in_order, "each once, by name")


def is_cost(name: str, value: Any) -> bool:
    """Return whether a value can be the cost `name` of a trace: None, a count, or a finite number from 0."""
    if value is None:
        return True
    kinds = int if name in _COUNTS else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and is_storable_number(value) and value >= 0


def _grade_faults(grade: Grade) -> Iterator[str]:
    is_truth = isinstance(grade.correct, int | float | np.bool) and grade.correct in (0, 1)
    yield from _clauses("correct", grade.correct, is_truth, "true or false")
    is_share = is_storable_number(grade.progress) and 0 <= grade.progress <= 1
    yield from _clauses("progress", grade.progress, is_share, "a number from 0 to 1")
    yield from _clauses("the answer", grade.answer, grade.answer is None or is_storable_text(grade.answer), _TEXT)
    statuses = [status for status in STATUS if status is not Status.UNKNOWN]
    is_status = isinstance(grade.status, Status) and grade.status in statuses
    yield from _clauses("the status", grade.status, is_status, ", ".join(statuses))
    for name, value in grade.metrics.items():
        yield from _clauses("the name of a metric", name, is_storable_text(name), _TEXT)
        yield from _clauses(f"the metric {_short(name)}", value, _is_plain(value), _VALUE)


def _is_plain(value: object) -> bool:
    """Return whether a value is None, or a number or a text that every file format holds."""
    return value is None or is_storable_number(value) or is_storable_text(value)


def _is_integer(value: object, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def _is_readable_again(evictions: EvictionTrace) -> bool:
    """Return whether an eviction trace is read back as it is."""
    numbers = (*evictions.evicted_at, *evictions.kept_by)
    if not all(_is_integer(count, _LARGEST_TOKEN) for count in (evictions.holders, *numbers)):
        return False
    return evictions.holders > 0 and _unpack(_pack(evictions)) == evictions


def _clauses(name: str, value: object, is_right: bool, expected: str) -> list[str]:
    """Return a clause on a value, or nothing if it is right."""
    return [] if is_right else [f"{name} is {_short(value)}, expected {expected}"]


def _short(value: Any) -> str:
    """Return a value for a sentence: short, and in characters that a terminal shows."""
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return f"an integer of {value.bit_length():,} bits"
    try:
        text = str(value)
    except Exception:  # a setting of other data has no text
        text = f"an object of the type {type(value).__name__}"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def row_of(run_key: str, trace: Trace) -> tuple[Any, ...]:
    """Return the values of `COLUMNS` of a trace: the gate of every store.

    Raises RefusedTraceError for a trace that could not be read, exported or drawn.
    """
    fault = next(_faults(trace), "")
    if fault:
        raise RefusedTraceError(
            f"Sample {_short(trace.sample)} of {_short(trace.problem)} in {_short(trace.benchmark)} "
            f"under {_short(trace.setting)} of {_short(trace.model)} cannot be stored: {fault}."
        )
    packed = b"" if trace.eviction_trace is None else _pack(trace.eviction_trace)
    text = zlib.compress(trace.text.encode(), 1)
    return (*map(_as_read_back, small_of(run_key, trace)), array("i", trace.tokens).tobytes(), text, packed)


def _as_read_back(value: Any) -> Any:
    """Return a value as SQLite gives it back, which a checksum depends on: no subclasses, and 0.0 for -0.0."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return value + 0.0 if isinstance(value, float) else value


def _pack(evictions: EvictionTrace) -> bytes:
    """Return the number of holders, then `evicted_at`, then `kept_by` unless there is one holder."""
    numbers = array("i", (evictions.holders, *evictions.evicted_at))
    if evictions.holders > 1:
        numbers.extend(evictions.kept_by)
    return zlib.compress(numbers.tobytes(), 1)


def small_of(run_key: str, trace: Trace) -> tuple[Any, ...]:
    """Return the values of `COLUMNS` of a trace without the large ones."""
    grade = trace.grade
    return (
        run_key,
        trace.setting.id,
        trace.model,
        trace.benchmark,
        trace.problem,
        trace.sample,
        int(grade.correct),
        float(grade.progress),
        grade.answer,
        grade.status.value,
        json.dumps(dict(grade.metrics)),
        json.dumps({name: getattr(trace.usage, name) for name in COSTS}),
    )


def trace_of(row: tuple[Any, ...], token_digest: str, made_with: str) -> Trace:
    """Return the trace that `row_of` was given; ValueError, KeyError, TypeError or zlib.error for other rows."""
    _, setting_id, model, benchmark, problem, sample, *grade, usage, tokens, text, eviction_trace = row
    correct, progress, answer, status, metrics = grade
    check_row(sample, correct, progress, answer)

    costs = finite_object(usage)
    return Trace(
        model=model,
        benchmark=benchmark,
        problem=problem,
        sample=sample,
        setting=_setting_of_id(setting_id),
        tokens=tuple(array("i", tokens)),
        text=zlib.decompress(text).decode() if text else "",
        grade=Grade(bool(correct), progress, answer, _status_of_text(status), finite_object(metrics)),
        usage=Costs(**costs) if None in costs.values() else Usage(**costs),
        eviction_trace=_unpack(eviction_trace),
        token_digest=token_digest,
        made_with=sys.intern(made_with),
    )


def _status_of_text(text: str) -> Status:
    """Return the status of a text; a later version may have others."""
    try:
        return Status(text)
    except ValueError:
        return Status.UNKNOWN


def check_row(sample: Any, correct: Any, progress: Any, answer: Any) -> None:
    """Raise ValueError for values that no trace has; a column of SQLite holds values of any type."""
    if type(sample) is not int or sample < 0:
        raise ValueError(f"the sample is {sample!r}")
    if correct not in (0, 1):
        raise ValueError(f"correct is {correct!r}")
    if not isinstance(progress, int | float) or not 0 <= progress <= 1:
        raise ValueError(f"progress is {progress!r}")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the answer is {answer!r}")


def finite_object(text: str) -> dict[str, Any]:
    """Return a JSON object of finite numbers, texts and nulls; ValueError for other texts."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(reason(error)) from error
    if not isinstance(value, dict):
        raise ValueError("a cell is no object of numbers and texts")
    for name, item in value.items():
        # JSON has numbers beyond all range, as 1e400, and Python reads NaN.
        if not is_storable_text(name) or not _is_plain(item):
            raise ValueError(f"{_short(name)} is {_short(item)}, expected a finite number or a text")
    return value


@lru_cache(maxsize=4096)
def _setting_of_id(identity: str) -> Setting:
    parameters = json.loads(identity)
    return Setting.from_parameters(parameters.pop("policy"), **parameters)


def checksum(*row: Any) -> str:
    """Return a digest of all values of a row, each with its length."""
    digest = hashlib.blake2b(digest_size=8)
    for value in row:
        piece = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def answer_digest(tokens: bytes, text: bytes) -> str:
    """Return a digest that tells what traces wrote apart: their tokens, else their packed text; "" without both."""
    if tokens:
        return hashlib.blake2b(tokens, digest_size=16).hexdigest()
    try:
        return text_digest(zlib.decompress(text).decode()) if text else ""
    except (zlib.error, ValueError):
        # The checksum of the row tells that it is damaged.
        return ""


def text_digest(text: str) -> str:
    """Return a digest of a text, whether its thinking came in a field or in tags; "" for an empty one.

    Servers that take thinking out of a text drop its tags and the white space beside them.
    """
    written = _THINK_TAG.sub("\0", text.strip()).strip("\0")
    return hashlib.blake2b(written.encode(), digest_size=16).hexdigest() if written else ""


def _unpack(packed: bytes) -> EvictionTrace | None:
    """Return the eviction trace that `_pack` was given; None for one that is not known."""
    if not packed:
        return None
    numbers = array("i", zlib.decompress(packed))
    holders = numbers[0]
    if holders == 1:
        evicted_at = tuple(numbers[1:])
        # A single holder kept the tokens that it did not evict.
        return EvictionTrace(holders, evicted_at, tuple(int(step == 0) for step in evicted_at))
    tokens = (len(numbers) - 1) // 2
    return EvictionTrace(holders, tuple(numbers[1 : 1 + tokens]), tuple(numbers[1 + tokens :]))


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: The key of a trace in the store: run key, setting id, benchmark, problem, sample.
Key = tuple[str, str, str, str, int]
#: A row number, a record and the values of its metrics.
Row = tuple[int, bytes, bytes]

#: The codes of statuses in records; 0 is a missing trace. Stores hold them: never change one, never use one again.
STATUS = {
    Status.OK: 1,
    Status.TRUNCATED: 2,
    Status.NO_ANSWER: 3,
    Status.GRADER_TIMEOUT: 4,
    Status.UNKNOWN: 255,
}
_NAMES = ("run_key", "setting", "model", "benchmark", "problem", "made_with", "metrics")
#: One trace. Names are indices into a list of texts, `metrics` that of its metrics' names. Unknown costs are NaN.
#: `answer` is a digest of the answer, 0 without one; `token_digest` is that of its tokens, 0 if unknown.
RECORD = np.dtype(
    [
        *[(name, "<i4") for name in _NAMES],
        ("sample", "<i4"),
        ("status", "u1"),
        ("correct", "u1"),
        ("progress", "<f8"),
        *[(name, "<f8") for name in COSTS],
        ("answer", "<u8"),
        ("token_digest", "V16"),
        ("check", "<u4"),
    ]
)
#: The fields of `RECORD` without the checksum.
_PACKED = Struct("<8i2B8dQ16s")
_UNKNOWN_DIGEST = bytes(16)
#: A tag of thinking as texts of servers have it, with the white space beside it.
_THINK_TAG = re.compile(r"\s*</?think>\s*")
#: The digest of no tokens, which earlier versions stored for texts of other programs.
_NO_TOKENS = hashlib.blake2b(digest_size=16).digest()
#: Records joined at a time.
_CHUNK = 10_000


def record(
    small: Sequence[Any], token_digest: bytes, made_with: str, name_id: Callable[[str], int]
) -> tuple[bytes, bytes]:
    """Return a trace as bytes: its `RECORD`, and the values of its metrics.

    `small` are the columns of a row without the large ones, `name_id` returns the index of a text.
    """
    run_key, setting, model, benchmark, problem, sample, correct, progress, answer, status, metrics, usage = small
    present = {name: value for name, value in json.loads(metrics).items() if value is not None}
    is_text = {name: isinstance(value, str) for name, value in present.items()}
    names = (run_key, setting, model, benchmark, problem, made_with, json.dumps(is_text))
    values = [float(name_id(value) if is_text[name] else value) for name, value in present.items()]
    name_ids = [name_id(name) for name in names]

    costs = json.loads(usage)
    # A digest of the answer, 0 for none.
    answer_code = 0
    if answer is not None:
        answer_code = int.from_bytes(hashlib.blake2b(answer.encode(), digest_size=8).digest(), "little") or 1
    body = _PACKED.pack(
        *name_ids,
        sample,
        STATUS[_status_of_text(status)],
        bool(correct),
        progress,
        *(math.nan if costs[name] is None else costs[name] for name in COSTS),
        answer_code,
        token_digest or _UNKNOWN_DIGEST,
    )

    measured = np.array(values, "<f8").tobytes()
    return body + zlib.crc32(measured, zlib.crc32(body)).to_bytes(4, "little"), measured


@dataclass(frozen=True)
class TraceColumns:
    """Traces in the order of writing; `records` has the fields of `RECORD`, `names` the texts."""

    records: NDArray[np.void]
    measured: Floats
    names: Sequence[str]

    def __post_init__(self) -> None:
        codes = [self.records[name] for name in _NAMES]
        if len(self) and (np.min(codes) < 0 or np.max(codes) >= len(self.names)):
            raise ValueError("names of traces are missing")

    def __len__(self) -> int:
        return len(self.records)

    def by_cell(self) -> dict[tuple[str, str, str], Ints]:
        """Return the indices of the traces by run key, setting id and benchmark."""
        count = len(self.names)
        names = self.records[["run_key", "setting", "benchmark"]]
        # One number for each cell, so that one sort brings the traces of a cell together.
        codes = (names["run_key"].astype(int) * count + names["setting"]) * count + names["benchmark"]

        order = np.argsort(codes, kind="stable")
        begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
        firsts = names[order[begins]].tolist()
        groups = np.split(order, begins[1:]) if firsts else []

        texts = self.names
        return {
            (texts[run_key], texts[setting], texts[benchmark]): rows
            for (run_key, setting, benchmark), rows in zip(firsts, groups, strict=True)
        }

    def metrics(self) -> dict[str, Floats]:
        """Return the metrics by name: a number for each trace, NaN for missing values and texts."""
        # Traces may have different metrics: a kind of trace has the names of its metrics, and whether each is a text.
        codes, kind_of_trace = np.unique(self.records["metrics"], return_inverse=True)
        kinds: list[dict[str, bool]] = [json.loads(self.names[code]) for code in codes]

        # The values of all traces lie one behind the other, those of a trace in the order of its kind's names.
        counts = np.array([len(kind) for kind in kinds], int)[kind_of_trace]
        begins = np.cumsum(counts) - counts

        values_by_name: dict[str, Floats] = {}
        for kind_index, kind in enumerate(kinds):
            rows = np.flatnonzero(kind_of_trace == kind_index)
            for offset, (name, is_text) in enumerate(kind.items()):
                if not is_text:
                    values = values_by_name.setdefault(name, np.full(len(self), math.nan))
                    values[rows] = self.measured[begins[rows] + offset]
        return values_by_name


def check_values(columns: TraceColumns) -> None:
    """Raise ValueError for values that no trace has: a checksum may belong to wrong values, too."""
    records = columns.records
    statuses = records["status"] > 0
    progress = (records["progress"] >= 0) & (records["progress"] <= 1)
    if not (statuses & progress & (records["correct"] <= 1) & (records["sample"] >= 0)).all():
        raise ValueError("the values of a trace are out of range")
    if not np.isfinite(columns.measured).all():
        raise ValueError("a metric is no finite number")
    for name in ("made_with", "metrics"):
        for code in np.unique(records[name]).tolist():
            finite_object(columns.names[code] or "{}")


def join_records(rows: Iterable[Row]) -> tuple[int, NDArray[np.void], Floats]:
    """Return the number of the last row, the records of all, and the values of their metrics, one behind the other.

    Raises ValueError for a row that fails its checksum.
    """
    last = 0
    joined = bytearray()
    measured = bytearray()
    rows = iter(rows)

    while chunk := list(islice(rows, _CHUNK)):
        bodies = b"".join([body for _, body, _ in chunk])
        # The last four bytes of a body are its checksum, over the others and the values.
        sums = [zlib.crc32(values, zlib.crc32(body[:-4])) for _, body, values in chunk]
        wrong = np.flatnonzero(np.frombuffer(bodies, RECORD)["check"] != np.array(sums, np.uint32))
        if len(wrong):
            raise ValueError(f"trace {chunk[wrong[0]][0]} is not what was written")
        joined += bodies
        measured += b"".join([values for _, _, values in chunk])
        last = chunk[-1][0]

    records = np.frombuffer(joined, RECORD)
    is_known = np.isin(records["status"], [0, *STATUS.values()])
    # A later version may have other statuses; the checksums of their records hold.
    records["status"][~is_known] = STATUS[Status.UNKNOWN]
    records["token_digest"][records["token_digest"] == np.void(_NO_TOKENS)] = np.void(_UNKNOWN_DIGEST)
    return last, records, np.frombuffer(measured, "<f8")
