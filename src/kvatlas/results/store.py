"""The SQLite store of a run: one row per trace, one transaction per finished trace, a second start resumes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvatlas.core import Fate, Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.results.manifest import Manifest

#: Rises whenever the tables change; a store of another version is refused, never migrated silently.
SCHEMA_VERSION = 3
FILE = "run.sqlite"
#: Begins the metric of a trace that was graded again; the grader's name follows.
GRADED = "graded:"

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE traces (
    run_key TEXT NOT NULL, setting TEXT NOT NULL, model TEXT NOT NULL, benchmark TEXT NOT NULL,
    problem TEXT NOT NULL, sample INTEGER NOT NULL,
    correct INTEGER NOT NULL, progress REAL NOT NULL, answer TEXT, status TEXT NOT NULL, metrics TEXT NOT NULL,
    usage TEXT NOT NULL, tokens BLOB NOT NULL, text BLOB NOT NULL, fate BLOB NOT NULL,
    PRIMARY KEY (run_key, setting, benchmark, problem, sample)
);
"""

#: What names one trace in the store.
Key = tuple[str, str, str, str, int]


class Store:
    """A run's results. Only the driver of a sweep writes; any number of readers may look at the same time."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        # So that tokens are told apart without being read.
        connection.create_function("digest", 1, _digest, deterministic=True)

    @classmethod
    def create(cls, folder: Path) -> Store:
        """Open the store of a run for writing, making folder and file where they are missing."""
        if folder.exists() and not folder.is_dir():
            raise KvatlasError(f"The run folder {str(folder)!r} is a file; name a folder, new or of an earlier run.")
        path = folder / FILE
        with _disk_sentences(path):
            folder.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, isolation_level=None)
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                # Tables and version in one transaction: a kill in between leaves an empty file, never half a store.
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
            _check_version(connection, path)
            connection.execute("PRAGMA synchronous=NORMAL")
        return cls(connection, path)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the store of an existing run for reading."""
        path = folder / FILE
        if not path.is_file():
            raise KvatlasError(f"{str(folder)!r} is no run: there is no {FILE} in it.")
        connection = sqlite3.connect(path, isolation_level=None)
        with _disk_sentences(path):
            _check_version(connection, path)
        return cls(connection, path)

    def close(self) -> None:
        """Close the file; everything added is already on disk."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put_manifest(self, manifest: Manifest) -> None:
        """Write what the run is to hold; the last sweep into a folder decides what its maps show."""
        with _disk_sentences(self.path):
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('manifest', ?)", (json.dumps(manifest.to_json()),)
            )

    def manifest(self) -> Manifest:
        """What the run is to hold; KvatlasError for a store in which no sweep was ever started."""
        row = self._connection.execute("SELECT value FROM meta WHERE name = 'manifest'").fetchone()
        if row is None:
            raise KvatlasError(f"The run {str(self.path.parent)!r} is empty: no sweep was started in it.")
        return Manifest.from_json(json.loads(row[0]))

    def add(self, run_key: str, trace: Trace) -> None:
        """Write one finished trace, on disk when this returns."""
        grade = trace.grade
        row = (
            run_key,
            trace.setting.id,
            trace.model,
            trace.benchmark,
            trace.problem,
            trace.sample,
            int(grade.correct),
            grade.progress,
            grade.answer,
            grade.status.value,
            json.dumps(dict(grade.metrics)),
            json.dumps(asdict(trace.usage)),
            array("i", trace.tokens).tobytes(),
            zlib.compress(trace.text.encode(), 1),
            _packed(trace.fate),
        )
        with _disk_sentences(self.path):
            self._connection.execute(f"INSERT OR REPLACE INTO traces VALUES ({','.join('?' * len(row))})", row)

    def put_grading(
        self, name: str, record: Mapping[str, Any], metrics: Mapping[Key, Mapping[str, float | str]]
    ) -> None:
        """Write the metrics of traces that were graded again, and how, all or nothing."""
        rows = [(json.dumps(values), *key) for key, values in metrics.items()]
        with _disk_sentences(self.path):
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "UPDATE traces SET metrics=? WHERE run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?",
                rows,
            )
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (GRADED + name, json.dumps(record)))
            self._connection.execute("COMMIT")

    def gradings(self) -> dict[str, dict[str, Any]]:
        """How the traces were graded again, by metric."""
        rows = self._connection.execute("SELECT name, value FROM meta WHERE name LIKE ?", (GRADED + "%",))
        return {name: json.loads(value) for name, value in rows}

    def tokens_per_second(self) -> float:
        """The decoding rate of one worker, over all traces; KvatlasError for a store without any."""
        tokens = seconds = 0.0
        for (usage,) in self._connection.execute("SELECT usage FROM traces"):
            counts = json.loads(usage)
            tokens, seconds = tokens + counts["output_tokens"], seconds + counts["seconds"]
        if not seconds:
            raise KvatlasError(f"The run {str(self.path.parent)!r} holds no trace to measure a rate from.")
        return float(tokens / seconds)

    def keys(self) -> set[Key]:
        """The keys (run key, setting id, benchmark, problem, sample) of all traces in the store."""
        return set(self._connection.execute("SELECT run_key, setting, benchmark, problem, sample FROM traces"))

    def traces(self, *, texts: bool = True) -> Iterator[tuple[str, Trace]]:
        """All traces with their run keys, in key order; without their tokens and text if `texts` is false."""
        columns = _COLUMNS + (", tokens, text, fate" if texts else ", x'', x'', x''") + _WRITTEN
        for row in self._connection.execute(f"SELECT {columns} FROM traces ORDER BY {_ORDER}"):
            yield row[0], _trace(row)

    def trace(self, key: Key) -> Trace:
        """One trace, whole; KeyError if it is not there."""
        row = self._connection.execute(
            f"SELECT {_COLUMNS}, tokens, text, fate{_WRITTEN} FROM traces"
            " WHERE run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?",
            key,
        ).fetchone()
        if row is None:
            raise KeyError(key)
        return _trace(row)


_ORDER = "run_key, setting, benchmark, problem, sample"
_COLUMNS = "run_key, setting, model, benchmark, problem, sample, correct, progress, answer, status, metrics, usage"
_WRITTEN = ", digest(tokens)"


def _trace(row: tuple[Any, ...]) -> Trace:
    _, setting_id, model, benchmark, problem, sample, *grade, usage, tokens, text, fate, written = row
    correct, progress, answer, status, metrics = grade
    parameters = json.loads(setting_id)
    policy = parameters.pop("policy")
    ids = array("i")
    ids.frombytes(tokens)
    return Trace(
        model=model,
        benchmark=benchmark,
        problem=problem,
        sample=sample,
        setting=Setting.of(policy, **parameters),
        tokens=tuple(ids),
        text=zlib.decompress(text).decode() if text else "",
        grade=Grade(bool(correct), progress, answer, Status(status), json.loads(metrics)),
        usage=_usage(json.loads(usage)),
        fate=_unpacked(fate),
        written=written,
    )


def _usage(stored: dict[str, Any]) -> Usage:
    """Older stores hold counts that nothing reads any more."""
    return Usage(**{field.name: stored[field.name] for field in fields(Usage)})


def _digest(tokens: bytes) -> str:
    return hashlib.blake2b(tokens, digest_size=16).hexdigest()


def _packed(fate: Fate | None) -> bytes:
    """Holders, then `left`; then `held`, unless one holder makes it plain."""
    if fate is None:
        return b""
    numbers = array("i", (fate.holders, *fate.left))
    if fate.holders > 1:
        numbers.extend(fate.held)
    return zlib.compress(numbers.tobytes(), 1)


def _unpacked(packed: bytes) -> Fate | None:
    if not packed:
        return None
    numbers = array("i")
    numbers.frombytes(zlib.decompress(packed))
    holders = numbers[0]
    length = len(numbers) - 1 if holders == 1 else (len(numbers) - 1) // 2
    left = tuple(numbers[1 : 1 + length])
    return Fate(holders, left, tuple(int(not step) for step in left) if holders == 1 else tuple(numbers[1 + length :]))


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        raise KvatlasError(
            f"The store {str(path)!r} has version {version}, this kvatlas reads version {SCHEMA_VERSION}; "
            "use another folder, or the kvatlas that wrote it."
        )


@contextmanager
def _disk_sentences(path: Path) -> Iterator[None]:
    """Turn what the disk says (full, read-only, not a database) into one sentence; nothing committed is lost."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError) as error:
        raise KvatlasError(
            f"The store {str(path)!r} cannot be used ({error}); what was finished before is kept, "
            "and the same command goes on from there."
        ) from error
