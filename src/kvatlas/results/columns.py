"""Traces as columns of numbers, without tokens and texts: how the store keeps them, and how statistics take them."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import Status, Trace
from kvatlas.results.rows import COSTS, small_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: What names one trace in the store: run key, setting id, benchmark, problem, sample.
Key = tuple[str, str, str, str, int]
#: A number, a record and the values of its metrics.
Row = tuple[int, bytes, bytes]

#: The numbers of statuses; 0 is a trace that is missing.
STATUS = {status: number for number, status in enumerate(Status, 1)}
_NAMES = ("run_key", "setting", "model", "benchmark", "problem", "made_with", "metrics")
#: One trace. Names are places in a list of texts, `metrics` that of its metrics' names; costs are NaN where they are
#: unknown; `answer` tells answers apart and is 0 for none; `written` is the digest of the tokens, 0 where unknown.
RECORD = np.dtype(
    [
        *((name, "<i4") for name in (*_NAMES, "sample")),
        *(("status", "u1"), ("correct", "u1"), ("progress", "<f8")),
        *((name, "<f8") for name in COSTS),
        *(("answer", "<u8"), ("written", "V16"), ("check", "<u4")),
    ]
)
_PACKED = Struct("<8i2B8dQ16s")
_UNKNOWN = bytes(16)
#: Records that are joined at once.
_CHUNK = 10_000


def record(small: Sequence[Any], written: bytes, made_with: str, number: Callable[[str], int]) -> tuple[bytes, bytes]:
    """A trace as bytes: its `RECORD`, and the values of its metrics.

    `small` are the columns of a row without the large ones, `number` gives the place of a text.
    """
    run_key, setting, model, benchmark, problem, sample, correct, progress, answer, status, metrics, usage = small
    known = {name: value for name, value in json.loads(metrics).items() if value is not None}
    kinds = {name: isinstance(value, str) for name, value in known.items()}
    values = [float(number(value) if kinds[name] else value) for name, value in known.items()]
    costs = json.loads(usage)
    body = _PACKED.pack(
        *map(number, (run_key, setting, model, benchmark, problem, made_with, json.dumps(kinds))),
        *(sample, STATUS[status], bool(correct), progress),
        *(math.nan if costs[name] is None else costs[name] for name in COSTS),
        0 if answer is None else _answer(answer),
        written or _UNKNOWN,
    )
    measured = np.array(values, "<f8").tobytes()
    return body + zlib.crc32(measured, zlib.crc32(body)).to_bytes(4, "little"), measured


def _answer(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


@dataclass(frozen=True)
class TraceColumns:
    """Traces in the order in which they were written; `records` has the fields of `RECORD`, `names` the texts."""

    records: NDArray[np.void]
    measured: Floats
    names: Sequence[str]

    def __post_init__(self) -> None:
        if len(self) and max(int(self.records[name].max()) for name in _NAMES) >= len(self.names):
            raise ValueError("names of traces are missing")

    @classmethod
    def of(cls, traces: TraceColumns | Iterable[tuple[str, Trace]]) -> TraceColumns:
        """The columns of traces with their run keys."""
        if isinstance(traces, TraceColumns):
            return traces
        numbers: dict[str, int] = {}
        rows = (
            (
                0,
                *record(
                    small_of(run_key, trace),
                    bytes.fromhex(trace.written),
                    trace.made_with,
                    lambda text: numbers.setdefault(text, len(numbers)),
                ),
            )
            for run_key, trace in traces
        )
        _, records, measured = join(rows)
        return cls(records, measured, tuple(numbers))

    def __len__(self) -> int:
        return len(self.records)

    def by_cell(self) -> dict[tuple[str, str, str], Ints]:
        """The places of the traces by run key, setting id and benchmark."""
        count, names = len(self.names), self.records[["run_key", "setting", "benchmark"]]
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
        """The metrics by name: a number for each trace, NaN where it has none or a text."""
        codes, which = np.unique(self.records["metrics"], return_inverse=True)
        kinds: list[dict[str, bool]] = [json.loads(self.names[code]) for code in codes]
        widths = np.array([len(own) for own in kinds], int)[which]
        begins = np.cumsum(widths) - widths
        found: dict[str, Floats] = {}
        for group, own in enumerate(kinds):
            rows = np.flatnonzero(which == group)
            for place, (name, is_text) in enumerate(own.items()):
                if not is_text:
                    found.setdefault(name, np.full(len(self), math.nan))[rows] = self.measured[begins[rows] + place]
        return found


def join(rows: Iterable[Row]) -> tuple[int, NDArray[np.void], Floats]:
    """The last number of the rows, and their records and values; ValueError for what is not what was written."""
    last, joined, measured, rows = 0, bytearray(), bytearray(), iter(rows)
    while chunk := list(islice(rows, _CHUNK)):
        part = b"".join([body for _, body, _ in chunk])
        sums = [zlib.crc32(values, zlib.crc32(body[:-4])) for _, body, values in chunk]
        wrong = np.flatnonzero(np.frombuffer(part, RECORD)["check"] != np.array(sums, np.uint32))
        if len(wrong):
            raise ValueError(f"trace {chunk[wrong[0]][0]} is not what was written")
        joined += part
        measured += b"".join([values for _, _, values in chunk])
        last = chunk[-1][0]
    return last, np.frombuffer(joined, RECORD), np.frombuffer(measured, "<f8")
