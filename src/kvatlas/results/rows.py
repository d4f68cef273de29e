"""A trace as a row of the store, and back; a checksum over all of it."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from dataclasses import fields
from functools import lru_cache
from operator import not_
from typing import Any

from kvatlas.core import Costs, EvictionTrace, Grade, Setting, Status, Trace, Usage

#: The columns of a trace in their order; the last three are large.
COLUMNS = (
    "run_key", "setting", "model", "benchmark", "problem", "sample",
    "correct", "progress", "answer", "status", "metrics", "usage", "tokens", "text", "fate",
)  # fmt: skip
#: What a trace cost, in the order of its fields.
COSTS = tuple(field.name for field in fields(Costs))


def row_of(run_key: str, trace: Trace) -> tuple[Any, ...]:
    """The values of `COLUMNS`."""
    return (
        *small_of(run_key, trace),
        array("i", trace.tokens).tobytes(),
        zlib.compress(trace.text.encode(), 1),
        _packed(trace.eviction_trace),
    )


def small_of(run_key: str, trace: Trace) -> tuple[Any, ...]:
    """The values of `COLUMNS` without the large ones."""
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


def trace_of(row: tuple[Any, ...], written: str, made_with: str) -> Trace:
    """The inverse of `row_of`; ValueError, KeyError, TypeError or zlib.error for what no trace ever was."""
    _, setting_id, model, benchmark, problem, sample, *grade, usage, tokens, text, eviction_trace = row
    correct, progress, answer, status, metrics = grade
    ids = array("i")
    ids.frombytes(tokens)
    return Trace(
        model=model,
        benchmark=benchmark,
        problem=problem,
        sample=sample,
        setting=_setting(setting_id),
        tokens=tuple(ids),
        text=zlib.decompress(text).decode() if text else "",
        grade=Grade(bool(correct), progress, answer, Status(status), json.loads(metrics)),
        usage=_usage(json.loads(usage)),
        eviction_trace=_unpacked(eviction_trace),
        written=written,
        made_with=sys.intern(made_with),
    )


@lru_cache(maxsize=4096)
def _setting(identity: str) -> Setting:
    parameters = json.loads(identity)
    return Setting.of(parameters.pop("policy"), **parameters)


def checksum(*row: Any) -> str:
    """A digest of all values of a row, each with its length."""
    digest = hashlib.blake2b(digest_size=8)
    for value in row:
        piece = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def digest(tokens: bytes) -> str:
    """By which tokens are told apart without being read."""
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def _usage(stored: dict[str, Any]) -> Costs:
    """Older stores hold counts that nothing reads any more."""
    known = {name: stored[name] for name in COSTS}
    return Costs(**known) if None in known.values() else Usage(**known)


def _packed(eviction_trace: EvictionTrace | None) -> bytes:
    """Holders, then `left`; then `held`, unless one holder makes it plain."""
    if eviction_trace is None:
        return b""
    numbers = array("i", (eviction_trace.holders, *eviction_trace.left))
    if eviction_trace.holders > 1:
        numbers.extend(eviction_trace.held)
    return zlib.compress(numbers.tobytes(), 1)


def _unpacked(packed: bytes) -> EvictionTrace | None:
    if not packed:
        return None
    numbers = array("i")
    numbers.frombytes(zlib.decompress(packed))
    holders = numbers[0]
    length = len(numbers) - 1 if holders == 1 else (len(numbers) - 1) // 2
    left = tuple(numbers[1 : 1 + length])
    return EvictionTrace(holders, left, tuple(bytes(map(not_, left))) if holders == 1 else tuple(numbers[1 + length :]))
