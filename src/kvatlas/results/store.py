"""The SQLite store of a run: one row per trace, one transaction per finished trace, a second start resumes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from kvatlas.core import KvatlasError, Trace, canonical, digest, reason
from kvatlas.results.manifest import Manifest
from kvatlas.results.records import COLUMNS, Key, Row, TraceColumns, checksum, join, record, row_of, trace_of
from kvatlas.results.records import digest as digest_of_tokens

#: Rises whenever the tables change. Stores of `READABLE` versions are read, and get what they lack when written to.
SCHEMA_VERSION = 5
READABLE = range(3, SCHEMA_VERSION + 1)
FILE, LOCK = "run.sqlite", "run.lock"
#: Seconds to wait for another process' transaction, and between two checkpoints.
BUSY, CHECKPOINT = 60.0, 1.0
#: Begins the metric of a trace that was graded again; the grader's name follows.
GRADED = "graded:"
#: Begins what the problems under a run key were; divides the key of traces that were set aside.
_CONTENTS, _ASIDE = "contents:", "~"

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
#: What versions added: 4 a checksum for each trace, and with what it was made, as a number; 5 its small columns once
#: more, so that they are read and checked without its tokens and text (results/records.py).
_ADDED = {
    4: """
ALTER TABLE traces ADD COLUMN checksum TEXT;
ALTER TABLE traces ADD COLUMN environment INTEGER;
CREATE TABLE environments (id INTEGER PRIMARY KEY, made_with TEXT NOT NULL UNIQUE);
""",
    5: """
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, checksum INTEGER NOT NULL);
CREATE TABLE records (trace INTEGER PRIMARY KEY, record BLOB NOT NULL, metrics BLOB NOT NULL);
""",
}
_ORDER = "run_key, setting, benchmark, problem, sample"
_ALL = ", ".join(COLUMNS)
_SMALL = ", ".join(COLUMNS[:-3])
_KEY = "run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?"
_SOUND = f"(checksum IS NULL OR checksum = checksum({_ALL}))"
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, zlib.error, OverflowError)
_NO_DAMAGE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)

#: What names a problem of one cell: run key, setting id, benchmark, problem.
ProblemKey = tuple[str, str, str, str]


class Store:
    """A run's results. Only the driver of a sweep writes; any number of readers may look at the same time."""

    def __init__(self, connection: sqlite3.Connection, path: Path, lock_file: IO[str] | None = None) -> None:
        self._connection, self._held = connection, lock_file
        self.path = path
        self._made_with = ""
        self._places: dict[str, int] = {}
        self._number = lru_cache(1 << 16)(self._numbered)
        self._checked = time.monotonic()
        # So that tokens are told apart, and damage is seen, without any of it being kept in memory.
        connection.create_function("digest", 1, digest_of_tokens, deterministic=True)
        connection.create_function("checksum", len(COLUMNS), checksum, deterministic=True)

    @classmethod
    def create(cls, folder: Path, made_with: Mapping[str, str] | None = None) -> Store:
        """Open the store of a run for writing, making folder and file where they are missing.

        `made_with` are the versions that every new trace gets. KvatlasError where another process writes it.
        """
        check_folder(folder)
        path = folder / FILE
        with _disk_sentences(path):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as failed:
                lock_file = lock(folder / LOCK)
                if lock_file is not None:
                    failed.enter_context(lock_file)
                store = cls._written(path, lock_file, made_with or {})
                failed.pop_all()
        return store

    @classmethod
    def _written(cls, path: Path, lock_file: IO[str] | None, made_with: Mapping[str, str]) -> Store:
        connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            # Tables and version in one transaction: a kill in between leaves an empty file, never half a store.
            connection.execute("PRAGMA journal_mode=WAL")
            added = " ".join(_ADDED.values())
            connection.executescript(f"BEGIN; {_TABLES} {added} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        version = _check_version(connection, path)
        connection.execute("PRAGMA synchronous=NORMAL")
        store = cls(connection, path, lock_file)
        if version < SCHEMA_VERSION:
            store._upgrade(version)
        store._made_with = canonical(dict(made_with)) if made_with else ""
        store._checkpoint()
        return store

    def _upgrade(self, version: int) -> None:
        """Add what the store of an earlier version lacks, for which all of its traces are read."""
        with self._damage_sentences(), self._transaction():
            added = (_ADDED[later] for later in range(version + 1, SCHEMA_VERSION + 1))
            for statement in filter(str.strip, "".join(added).split(";")):
                self._connection.execute(statement)
            self._connection.executemany("INSERT INTO records VALUES (?, ?, ?)", self._made_rows(self._number))
            self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the store of an existing run for reading, on a read-only medium too."""
        check_folder(folder)
        path = folder / FILE
        if not path.is_file():
            raise KvatlasError(f"{str(folder)!r} is no run: there is no {FILE} in it.")
        with _disk_sentences(path):
            connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
            try:
                _check_version(connection, path)
            except sqlite3.OperationalError:
                # Readers of a write-ahead log write beside it. Where nothing may be written nobody else writes either.
                log = path.with_name(FILE + "-wal")
                if log.is_file() and log.stat().st_size:
                    raise
                connection.close()
                connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
                _check_version(connection, path)
        return cls(connection, path)

    def close(self) -> None:
        """Close the file; everything added is already on disk."""
        self._connection.close()
        if self._held is not None:
            self._held.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put_manifest(self, manifest: Manifest) -> None:
        """Write what the run is to hold, in place of an earlier promise."""
        text = json.dumps(manifest.to_json())
        with _disk_sentences(self.path):
            rows = [("manifest", text), ("manifest_digest", digest(text))]
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?), (?, ?)", (*rows[0], *rows[1]))
            self._checkpoint()

    def manifest(self) -> Manifest:
        """What the run is to hold; KvatlasError for a store in which no sweep was ever started, or a damaged one."""
        with self._damage_sentences():
            entries = dict(self._connection.execute("SELECT name, value FROM meta WHERE name LIKE 'manifest%'"))
            if "manifest" not in entries:
                raise KvatlasError(f"The run {str(self.path.parent)!r} is empty: no sweep was started in it.")
            if entries.get("manifest_digest", digest(entries["manifest"])) != digest(entries["manifest"]):
                raise ValueError("what the run is to hold is not what was written")
            return Manifest.from_json(json.loads(entries["manifest"]))

    def add(self, run_key: str, trace: Trace) -> None:
        """Write one finished trace, on disk when this returns; one that names its versions keeps them."""
        self.add_all([(run_key, trace)])

    def add_all(self, traces: Iterable[tuple[str, Trace]]) -> None:
        """Write traces with their run keys as `add` does, all of them or none."""
        with self._transaction():
            for run_key, trace in traces:
                self._put(row_of(run_key, trace), trace.made_with or self._made_with)
        if time.monotonic() - self._checked > CHECKPOINT:
            with _disk_sentences(self.path):
                self._checkpoint()

    def _put(self, row: Sequence[Any], made_with: str) -> None:
        run_key, setting, _, benchmark, problem, sample, *_ = row
        key = run_key, setting, benchmark, problem, sample
        self._connection.execute(f"DELETE FROM records WHERE trace = (SELECT rowid FROM traces WHERE {_KEY})", key)
        values = (*row, checksum(*row), self._environment_of(made_with) if made_with else None)
        marks = ",".join("?" * len(values))
        number = self._connection.execute(
            f"INSERT OR REPLACE INTO traces ({_ALL}, checksum, environment) VALUES ({marks})", values
        ).lastrowid
        written = digest_of_tokens(row[-3])
        made = record(row[:-3], bytes.fromhex(written), made_with, self._number)
        self._connection.execute("INSERT INTO records VALUES (?, ?, ?)", (number, *made))

    def contents(self, run_key: str) -> dict[str, str]:
        """Digests of the problems whose traces are under a run key."""
        with self._damage_sentences():
            query = "SELECT value FROM meta WHERE name = ?"
            row = self._connection.execute(query, (_CONTENTS + run_key,)).fetchone()
            return {} if row is None else dict(json.loads(row[0]))

    def set_aside(self, contents: Mapping[str, Mapping[str, str]]) -> None:
        """Keep under each run key the traces of problems with these digests alone.

        Traces of a problem that had another one are set aside; they come back when the problem has that one again.
        """
        before = {key: self.contents(key) for key in contents}
        with self._transaction():
            for key, now in contents.items():
                for problem, old in before[key].items():
                    if now.get(problem, old) != old:
                        self._move(key, f"{key}{_ASIDE}{old}", problem)
                        self._move(f"{key}{_ASIDE}{now[problem]}", key, problem)
                row = (_CONTENTS + key, json.dumps(before[key] | dict(now)))
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)

    def _move(self, key: str, to: str, problem: str) -> None:
        # What is damaged stays, and is told when it is read.
        query = f"{self._select(_ALL)} WHERE run_key = ? AND problem = ?"
        for *row, _, made_with, sound in self._connection.execute(query, (key, problem)).fetchall():
            if sound:
                old = key, row[1], row[3], problem, row[5]
                self._connection.execute(
                    f"DELETE FROM records WHERE trace = (SELECT rowid FROM traces WHERE {_KEY})", old
                )
                self._connection.execute(f"DELETE FROM traces WHERE {_KEY}", old)
                self._put((to, *row[1:]), made_with)

    def put_grading(
        self, name: str, record: Mapping[str, Any], metrics: Mapping[Key, Mapping[str, float | str]]
    ) -> None:
        """Write the metrics of traces that were graded again, and how, all or nothing."""
        place = COLUMNS.index("metrics")
        with self._transaction():
            for key, values in metrics.items():
                query = f"{self._select(_ALL)} WHERE {_KEY}"
                *row, _, made_with, _ = self._connection.execute(query, key).fetchone()
                row[place] = json.dumps(values)
                self._put(row, made_with)
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (GRADED + name, json.dumps(record)))

    def gradings(self) -> dict[str, dict[str, Any]]:
        """How the traces were graded again, by metric."""
        with self._damage_sentences():
            rows = self._connection.execute("SELECT name, value FROM meta WHERE name LIKE ?", (GRADED + "%",))
            return {name: json.loads(value) for name, value in rows}

    def tokens_per_second(self) -> float:
        """The decoding rate of one worker, over all traces; KvatlasError for a store without any."""
        tokens = seconds = 0.0
        for columns in self.columns():
            known = (columns.records["seconds"] > 0) & (columns.records["output_tokens"] >= 0)
            tokens += float(columns.records["output_tokens"][known].sum())
            seconds += float(columns.records["seconds"][known].sum())
        if not seconds:
            raise KvatlasError(f"The run {str(self.path.parent)!r} holds no trace to measure a rate from.")
        return tokens / seconds

    def keys(self) -> set[Key]:
        """The keys (run key, setting id, benchmark, problem, sample) of all traces in the store."""
        with self._damage_sentences():
            return set(self._connection.execute(f"SELECT {_ORDER} FROM traces"))

    def samples(self) -> dict[ProblemKey, frozenset[int]]:
        """The samples of all traces in the store, by (run key, setting id, benchmark, problem)."""
        with self._damage_sentences():
            rows = self._connection.execute(
                "SELECT run_key, setting, benchmark, problem, group_concat(sample) FROM traces GROUP BY 1, 2, 3, 4"
            )
            return {
                (run_key, setting, name, problem): frozenset(map(int, numbers.split(",")))
                for run_key, setting, name, problem, numbers in rows
            }

    def columns(self, most: int = 20_000) -> Iterator[TraceColumns]:
        """All traces as they are now, without their tokens and texts, at most so many at once.

        Raises KvatlasError where they are not what was written; of a store of an earlier version all is read for it.
        """
        with self._damage_sentences():
            self._connection.execute("BEGIN")  # a sweep may write meanwhile
            try:
                (count,) = self._connection.execute("SELECT count(*) FROM traces").fetchone()
                last, found, added = 0, 0, most
                while added == most:
                    last, columns = self._columns(last, most)
                    added = len(columns)
                    found += added
                    yield columns
                if found != count:
                    raise ValueError(f"{count:,} traces are stored and {found:,} are listed")
            finally:
                self._connection.execute("COMMIT")

    def traces(self, *, texts: bool = True) -> Iterator[tuple[str, Trace]]:
        """All traces with their run keys, in key order; without their tokens and text if `texts` is false.

        Traces that were set aside are left out.
        Raises KvatlasError for a trace that is not what was written.
        """
        columns = _ALL if texts else ", ".join((*COLUMNS[:-3], "x'', x'', x''"))
        with self._damage_sentences():
            kept = f"WHERE instr(run_key, '{_ASIDE}') = 0"
            for row in self._connection.execute(f"{self._select(columns)} {kept} ORDER BY {_ORDER}"):
                yield row[0], self._trace(row)

    def version(self) -> int:
        """A number that is another one once another connection has written to the store."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def added(self, after: int, most: int) -> tuple[int, TraceColumns]:
        """At most so many traces written after that row, and the row of the last one."""
        with self._damage_sentences():
            return self._columns(after, most)

    def _columns(self, after: int = 0, most: int = -1) -> tuple[int, TraceColumns]:
        if self._version < SCHEMA_VERSION:
            rows = self._made_rows(lambda text: self._places.setdefault(text, len(self._places)), after, most)
            last, records, measured = join(rows)
        else:
            query = "SELECT trace, record, metrics FROM records WHERE trace > ? ORDER BY trace LIMIT ?"
            last, records, measured = join(self._connection.execute(query, (after, most)))
            self._read_names()
        return max(last, after), TraceColumns(records, measured, tuple(self._places))

    def _made_rows(self, number: Callable[[str], int], after: int = 0, most: int = -1) -> Iterator[Row]:
        """The rows of `records` that traces without them would have; ValueError for one that is damaged."""
        query = f"{self._select(f'rowid, {_SMALL}')} WHERE rowid > ? ORDER BY rowid LIMIT ?"
        for row, *small, written, made_with, sound in self._connection.execute(query, (after, most)):
            if not sound:
                raise ValueError(_changed(small))
            yield row, *record(small, bytes.fromhex(written), made_with, number)

    def _read_names(self) -> None:
        """Read the names that were written since the last time; ValueError for one that is damaged."""
        rows = self._connection.execute("SELECT * FROM names WHERE id >= ? ORDER BY id", (len(self._places),))
        for number, text, check in rows:
            if number != len(self._places) or check != _sum(number, text):
                raise ValueError(f"name {number} is not what was written")
            self._places[text] = number

    def _numbered(self, text: str) -> int:
        """The number of a name, a new one where it has none."""
        row = self._connection.execute("SELECT id FROM names WHERE text = ?", (text,)).fetchone()
        if row is not None:
            return int(row[0])
        (number,) = self._connection.execute("SELECT coalesce(max(id) + 1, 0) FROM names").fetchone()
        self._connection.execute("INSERT INTO names VALUES (?, ?, ?)", (number, text, _sum(number, text)))
        return int(number)

    def text(self, key: Key) -> str:
        """The text of a trace, its checksum not looked at; empty if it is not there."""
        with self._damage_sentences():
            row = self._connection.execute(f"SELECT text FROM traces WHERE {_KEY}", key).fetchone()
            return zlib.decompress(row[0]).decode() if row and row[0] else ""

    def trace(self, key: Key) -> Trace:
        """One trace, whole; KeyError if it is not there."""
        with self._damage_sentences():
            row = self._connection.execute(f"{self._select(_ALL)} WHERE {_KEY}", key).fetchone()
            trace = None if row is None else self._trace(row)
        if trace is None:
            raise KeyError(key)
        return trace

    def copy(self, folder: Path) -> int:
        """Copy the run, also while it is written, into a new folder, and return the number of traces.

        Raises KvatlasError if there is a run in that folder, or if the store is damaged.
        """
        if (folder / FILE).exists():
            raise KvatlasError(f"There is a run in {str(folder)!r} already; name a new folder.")
        with self._damage_sentences():
            # All traces are read, so that no damage is copied.
            deque(self.traces(), maxlen=0)
            (count,) = self._connection.execute("SELECT count(*) FROM traces").fetchone()
        with Store.create(folder) as other:
            self._connection.backup(other._connection)
            other._checkpoint()
        return int(count)

    @property
    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _select(self, columns: str) -> str:
        """A query of these columns, then of each trace's digest, its versions, and whether it is what was written."""
        if self._version < 4:
            return f"SELECT {columns}, digest(tokens), '', 1 FROM traces"
        made_with = "(SELECT made_with FROM environments WHERE id = environment)"
        return f"SELECT {columns}, digest(tokens), coalesce({made_with}, ''), {_SOUND} FROM traces"

    def _trace(self, row: tuple[Any, ...]) -> Trace:
        *values, written, made_with, sound = row
        if not sound:
            raise ValueError(_changed(row))
        return trace_of(tuple(values), written, made_with)

    def _environment_of(self, text: str) -> int:
        self._connection.execute("INSERT OR IGNORE INTO environments (made_with) VALUES (?)", (text,))
        (number,) = self._connection.execute("SELECT id FROM environments WHERE made_with = ?", (text,)).fetchone()
        return int(number)

    def _checkpoint(self) -> None:
        """Bring the log's transactions into the file, so that a copy of it alone is a store."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._checked = time.monotonic()

    # -- damage ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that is written in it, or nothing."""
        with _disk_sentences(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._number.cache_clear()
                with contextlib.suppress(sqlite3.DatabaseError):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _damage_sentences(self) -> Iterator[None]:
        """Turn what cannot be read into one sentence."""
        try:
            yield
        except (sqlite3.DatabaseError, *_DAMAGE) as error:
            # Texts that are no UTF-8 any more come without a code.
            if getattr(error, "sqlite_errorcode", 0) & 255 in _NO_DAMAGE:
                raise _unusable(self.path, error) from error
            raise KvatlasError(
                f"The store {str(self.path)!r} is damaged ({reason(error)}). Take a copy of it, or run the sweep "
                "into a new folder."
            ) from error


def check_folder(folder: Path) -> None:
    """Raise KvatlasError where no run can be in `folder`, before anything is computed for it."""
    try:
        if folder.exists() and not folder.is_dir():
            raise KvatlasError(f"The run folder {str(folder)!r} is a file; name a folder, new or of an earlier run.")
        near = next(parent for parent in folder.absolute().parents if parent.exists())
        if not near.is_dir():
            raise KvatlasError(f"The run folder {str(folder)!r} cannot be made: {str(near)!r} is a file.")
    except (OSError, ValueError) as error:
        raise KvatlasError(f"The run folder {str(folder)!r} cannot be used ({reason(error)}).") from error


def _check_version(connection: sqlite3.Connection, path: Path) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in READABLE:
        raise KvatlasError(
            f"The store {str(path)!r} has version {version}, this kvatlas reads versions "
            f"{READABLE[0]} to {READABLE[-1]}; use another folder, or the kvatlas that wrote it."
        )
    return int(version)


def _changed(small: Sequence[Any]) -> str:
    return f"sample {small[5]} of {small[4]} under {small[1]} is not what was written"


def _sum(number: int, text: str) -> int:
    return zlib.crc32(f"{number} {text}".encode())


def _unusable(path: Path, error: BaseException) -> KvatlasError:
    return KvatlasError(
        f"The store {str(path)!r} cannot be used ({error}); what was finished before is kept, "
        "and the same command goes on from there."
    )


@contextmanager
def _disk_sentences(path: Path) -> Iterator[None]:
    """Turn what the disk says (full, read-only, not a database) into one sentence; nothing committed is lost."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError) as error:
        raise _unusable(path, error) from error


def lock(path: Path) -> IO[str] | None:
    """The open file that holds the lock until it is closed; None where the system has no such locks.

    Raises KvatlasError that names the process that has it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(200).strip() or "another process"
        file.close()
        raise KvatlasError(
            f"The run {str(path.parent)!r} is being written by {owner}; wait for its end, or name another folder."
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return file
