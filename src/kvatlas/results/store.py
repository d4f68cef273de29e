"""The SQLite store of a run: one row per trace, one transaction per finished trace, a second start resumes."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvatlas.core import KvatlasError, Trace, canonical, digest, reason
from kvatlas.results.lock import lock
from kvatlas.results.manifest import Manifest
from kvatlas.results.rows import COLUMNS, checksum, row_of, trace_of
from kvatlas.results.rows import digest as digest_of_tokens

#: Rises whenever the tables change. Stores of `READABLE` versions are read, and get what they lack when written to.
SCHEMA_VERSION = 4
READABLE = (3, SCHEMA_VERSION)
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
#: What version 4 added: a checksum for each trace, and with what it was made, as a number.
_ADDED = """
ALTER TABLE traces ADD COLUMN checksum TEXT;
ALTER TABLE traces ADD COLUMN environment INTEGER;
CREATE TABLE environments (id INTEGER PRIMARY KEY, made_with TEXT NOT NULL UNIQUE);
"""
_ORDER = "run_key, setting, benchmark, problem, sample"
_ALL = ", ".join(COLUMNS)
_SOUND = f"(checksum IS NULL OR checksum = checksum({_ALL}))"
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, zlib.error, OverflowError)
_NO_DAMAGE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)

#: What names one trace in the store.
Key = tuple[str, str, str, str, int]


class Store:
    """A run's results. Only the driver of a sweep writes; any number of readers may look at the same time."""

    def __init__(self, connection: sqlite3.Connection, path: Path, lock_file: IO[str] | None = None) -> None:
        self._connection, self._held = connection, lock_file
        self.path = path
        self._environment: int | None = None
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
            connection.executescript(f"BEGIN; {_TABLES} {_ADDED} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif _check_version(connection, path) < SCHEMA_VERSION:
            connection.executescript(f"BEGIN; {_ADDED} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        connection.execute("PRAGMA synchronous=NORMAL")
        store = cls(connection, path, lock_file)
        if made_with:
            store._environment = store._environment_of(canonical(dict(made_with)))
        store._checkpoint()
        return store

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
        """Write what the run is to hold; the last sweep into a folder decides what its maps show."""
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
        row = row_of(run_key, trace)
        made_with = self._environment_of(trace.made_with) if trace.made_with else self._environment
        row = (*row, checksum(*row), made_with)
        with _disk_sentences(self.path):
            self._connection.execute(
                f"INSERT OR REPLACE INTO traces ({_ALL}, checksum, environment) VALUES ({','.join('?' * len(row))})",
                row,
            )
            if time.monotonic() - self._checked > CHECKPOINT:
                self._checkpoint()

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
        with _disk_sentences(self.path):
            self._connection.execute("BEGIN")
            for key, now in contents.items():
                for problem, old in before[key].items():
                    if now.get(problem, old) != old:
                        self._move(key, f"{key}{_ASIDE}{old}", problem)
                        self._move(f"{key}{_ASIDE}{now[problem]}", key, problem)
                row = (_CONTENTS + key, json.dumps(before[key] | dict(now)))
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)
            self._connection.execute("COMMIT")

    def _move(self, key: str, to: str, problem: str) -> None:
        # What was damaged before stays so.
        changed = f"CASE WHEN {_SOUND} THEN checksum(?1, {', '.join(COLUMNS[1:])}) ELSE checksum END"
        where = "run_key=?2 AND problem=?3"
        values = (to, key, problem)
        self._connection.execute(f"UPDATE traces SET run_key=?1, checksum={changed} WHERE {where}", values)

    def put_grading(
        self, name: str, record: Mapping[str, Any], metrics: Mapping[Key, Mapping[str, float | str]]
    ) -> None:
        """Write the metrics of traces that were graded again, and how, all or nothing."""
        rows = [(json.dumps(values), *key) for key, values in metrics.items()]
        changed = ", ".join("?1" if name == "metrics" else name for name in COLUMNS)
        with _disk_sentences(self.path):
            self._connection.execute("BEGIN")
            self._connection.executemany(
                f"UPDATE traces SET metrics=?1, checksum=checksum({changed})"
                " WHERE run_key=?2 AND setting=?3 AND benchmark=?4 AND problem=?5 AND sample=?6",
                rows,
            )
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (GRADED + name, json.dumps(record)))
            self._connection.execute("COMMIT")

    def gradings(self) -> dict[str, dict[str, Any]]:
        """How the traces were graded again, by metric."""
        with self._damage_sentences():
            rows = self._connection.execute("SELECT name, value FROM meta WHERE name LIKE ?", (GRADED + "%",))
            return {name: json.loads(value) for name, value in rows}

    def tokens_per_second(self) -> float:
        """The decoding rate of one worker, over all traces; KvatlasError for a store without any."""
        tokens = seconds = 0.0
        with self._damage_sentences():
            for (usage,) in self._connection.execute("SELECT usage FROM traces"):
                counts = json.loads(usage)
                if counts["seconds"] and counts["output_tokens"] is not None:
                    tokens, seconds = tokens + counts["output_tokens"], seconds + counts["seconds"]
        if not seconds:
            raise KvatlasError(f"The run {str(self.path.parent)!r} holds no trace to measure a rate from.")
        return float(tokens / seconds)

    def keys(self) -> set[Key]:
        """The keys (run key, setting id, benchmark, problem, sample) of all traces in the store."""
        with self._damage_sentences():
            return set(self._connection.execute(f"SELECT {_ORDER} FROM traces"))

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

    def added(self, after: int, most: int) -> list[tuple[int, str, Trace]]:
        """At most so many traces written after that row, each with its row and run key, in the order of their rows.

        Neither tokens nor text are read, nor is the checksum looked at: what this costs does not depend on their size.
        """
        columns = ", ".join((*COLUMNS[:-3], "x'', x'', x''"))
        made_with = "''" if self._old else "coalesce((SELECT made_with FROM environments WHERE id = environment), '')"
        query = f"SELECT rowid, {columns}, {made_with} FROM traces WHERE rowid > ? ORDER BY rowid LIMIT ?"
        with self._damage_sentences():
            rows = self._connection.execute(query, (after, most)).fetchall()
            return [(number, values[0], trace_of(values[:-1], "", values[-1])) for number, *values in rows]

    def text(self, key: Key) -> str:
        """The text of a trace, its checksum not looked at; empty if it is not there."""
        with self._damage_sentences():
            packed = self._column("text", key)
            return zlib.decompress(packed).decode() if packed else ""

    def last_tokens(self, key: Key, count: int) -> array[int]:
        """At most the last `count` new tokens of a trace; none if it is not there."""
        newest = array("i")
        with self._damage_sentences():
            newest.frombytes(self._column(f"substr(tokens, -{count * newest.itemsize})", key))
        return newest

    def _column(self, column: str, key: Key) -> bytes:
        where = "run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?"
        row = self._connection.execute(f"SELECT {column} FROM traces WHERE {where}", key).fetchone()
        return b"" if row is None else bytes(row[0])

    def trace(self, key: Key) -> Trace:
        """One trace, whole; KeyError if it is not there."""
        where = " WHERE run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?"
        with self._damage_sentences():
            row = self._connection.execute(self._select(_ALL) + where, key).fetchone()
            trace = None if row is None else self._trace(row)
        if trace is None:
            raise KeyError(key)
        return trace

    def copy(self, folder: Path) -> int:
        """Write all that can be read, of a run that is being written or damaged too, as a run in a new folder.

        Returns the number of traces. Raises KvatlasError where there is a run in that folder.
        """
        if (folder / FILE).exists():
            raise KvatlasError(f"There is a run in {str(folder)!r} already; name a new folder.")
        with Store.create(folder) as other:
            to = other._connection
            try:
                if any(self._unsound()) or self._connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                    raise ValueError
                self._connection.backup(to)
            except (sqlite3.DatabaseError, ValueError):
                for table in ("meta", "environments"):
                    with contextlib.suppress(sqlite3.DatabaseError):
                        for row in self._connection.execute(f"SELECT * FROM {table}"):
                            to.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", row)
                for row in self._readable():
                    to.execute(f"INSERT OR REPLACE INTO traces VALUES ({','.join('?' * len(row))})", row)
            other._checkpoint()
            return int(to.execute("SELECT count(*) FROM traces").fetchone()[0])

    @property
    def _old(self) -> bool:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0]) < SCHEMA_VERSION

    def _select(self, columns: str) -> str:
        """A query of these columns, then of each trace's digest, its versions, and whether it is what was written."""
        if self._old:
            return f"SELECT {columns}, digest(tokens), '', 1 FROM traces"
        made_with = "(SELECT made_with FROM environments WHERE id = environment)"
        return f"SELECT {columns}, digest(tokens), coalesce({made_with}, ''), {_SOUND} FROM traces"

    def _trace(self, row: tuple[Any, ...]) -> Trace:
        *values, written, made_with, sound = row
        if not sound:
            raise ValueError(f"sample {row[5]} of {row[4]} under {row[1]} is not what was written")
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

    def _unsound(self) -> Iterator[bool]:
        """For each trace in the order of the file whether it is damaged; the first place that cannot be read raises."""
        for row in self._connection.execute(self._select("1")):
            yield not row[-1]

    def _readable(self) -> Iterator[tuple[Any, ...]]:
        """All rows that can be read and are what was written, as they stand in the table of the newest version."""
        last = 0
        # The end of the table, or the end of its index where that is what is left.
        for index in ("INDEXED BY sqlite_autoindex_traces_1", ""):
            with contextlib.suppress(sqlite3.DatabaseError):
                last = max(last, self._connection.execute(f"SELECT max(rowid) FROM traces {index}").fetchone()[0] or 0)
        more = "NULL, NULL" if self._old else "checksum, environment"
        for number in range(1, min(last, self.path.stat().st_size) + 1):
            with contextlib.suppress(sqlite3.DatabaseError, *_DAMAGE):
                query = f"{self._select(f'{_ALL}, {more}')} WHERE rowid = ?"
                row = self._connection.execute(query, (number,)).fetchone()
                if row is not None:
                    self._trace((*row[: len(COLUMNS)], *row[-3:]))
                    yield row[:-3]

    @contextmanager
    def _damage_sentences(self) -> Iterator[None]:
        """Turn what cannot be read into one sentence that says what is left."""
        try:
            yield
        except (sqlite3.DatabaseError, *_DAMAGE) as error:
            # Texts that are no UTF-8 any more come without a code.
            if getattr(error, "sqlite_errorcode", 0) & 255 in _NO_DAMAGE:
                raise _unusable(self.path, error) from error
            left = 0
            with contextlib.suppress(sqlite3.DatabaseError):
                left = sum(1 for _ in self._readable())
            raise KvatlasError(
                f"The store {str(self.path)!r} is damaged ({reason(error)}). {left:,} of its traces are sound: "
                f"kvatlas export {self.path.parent} --store --out FOLDER copies them into a new run, in which the same "
                "sweep decodes the others again."
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
            f"The store {str(path)!r} has version {version}, this kvatlas reads version "
            f"{' and '.join(map(str, READABLE))}; use another folder, or the kvatlas that wrote it."
        )
    return int(version)


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
