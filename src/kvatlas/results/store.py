"""The SQLite store of a run: one row for each trace, one transaction for each finished trace."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import sqlite3
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.core import KvatlasError, Trace, canonical, digest, reason, refusal, refuse_problem_file, refuse_spec
from kvatlas.results.manifest import Manifest
from kvatlas.results.records import (
    COLUMNS,
    Key,
    RefusedTraceError,
    TraceColumns,
    answer_digest,
    check_cell,
    check_values,
    checksum,
    join_records,
    record,
    row_of,
    trace_of,
)
from kvatlas.text import did_you_mean_file

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: Rises whenever the tables change.
SCHEMA_VERSION = 5
FILE = "run.sqlite"
#: The lock of the writing process.
LOCK = "run.lock"
#: The file with the name of the writing process.
OWNER = "run.owner"
#: Seconds to wait for the transaction of another process.
BUSY = 60.0
#: Seconds between two checkpoints.
CHECKPOINT = 1.0
#: The prefix of the problem digests of a run key.
_CONTENTS = "contents:"
#: The separator in the key of traces that are set aside.
_ASIDE = "~"

#: `records` holds the small columns of each trace once more, which are read and checked without tokens and text
#: (results/records.py).
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE traces (
    run_key TEXT NOT NULL, setting TEXT NOT NULL, model TEXT NOT NULL, benchmark TEXT NOT NULL,
    problem TEXT NOT NULL, sample INTEGER NOT NULL,
    correct INTEGER NOT NULL, progress REAL NOT NULL, answer TEXT, status TEXT NOT NULL, metrics TEXT NOT NULL,
    usage TEXT NOT NULL, tokens BLOB NOT NULL, text BLOB NOT NULL, fate BLOB NOT NULL,
    checksum TEXT, environment INTEGER,
    PRIMARY KEY (run_key, setting, benchmark, problem, sample)
);
CREATE TABLE environments (id INTEGER PRIMARY KEY, made_with TEXT NOT NULL UNIQUE);
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, checksum INTEGER NOT NULL);
CREATE TABLE records (trace INTEGER PRIMARY KEY, record BLOB NOT NULL, metrics BLOB NOT NULL);
"""
_ORDER = "run_key, setting, benchmark, problem, sample"
_ALL = ", ".join(COLUMNS)
_KEY = "run_key=? AND setting=? AND benchmark=? AND problem=? AND sample=?"
_DELETE_RECORD = f"DELETE FROM records WHERE trace = (SELECT rowid FROM traces WHERE {_KEY})"
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, zlib.error, OverflowError)
_NO_ACCESS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
#: The key of a problem in one cell: run key, setting id, benchmark, problem.
ProblemKey = tuple[str, str, str, str]


class Store(contextlib.AbstractContextManager["Store"]):
    """The results of a run. Only the driver of a sweep writes; any number of readers may read at the same time."""

    def __init__(self, connection: sqlite3.Connection, path: Path, held: BaseFileLock | None = None) -> None:
        self._connection = connection
        self._held = held
        self.path = path
        self._file_id = _file_id(path)
        self._made_with = ""
        #: Fills the measures of the run in each trace that is added.
        self.measured: Callable[[Trace], Trace] = lambda trace: trace
        self._names: dict[str, int] = {}
        self._cached_name_id = lru_cache(1 << 16)(self._name_id)
        self._checked = time.monotonic()
        # Digests and checksums are computed in SQLite, so that queries need not return tokens and texts.
        connection.create_function("digest", 2, answer_digest, deterministic=True)
        connection.create_function("checksum", len(COLUMNS), checksum, deterministic=True)

    @classmethod
    def create(cls, folder: Path, made_with: Mapping[str, str] | None = None) -> Store:
        """Open the store of a run for writing; a missing folder or file is made.

        New traces get the versions `made_with`. Raises KvatlasError if another process writes the run.
        """
        check_folder(folder)
        path = folder / FILE

        with _store_sentences(path), contextlib.ExitStack() as failed:
            folder.mkdir(parents=True, exist_ok=True)
            held = lock(path.resolve().parent)
            if held is not None:
                failed.callback(held.release)

            connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                # Tables and version in one transaction: a killed process leaves an empty file, never half a store.
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
            _check_version(connection, path)
            connection.execute("PRAGMA synchronous=NORMAL")

            store = cls(connection, path, held)
            store._made_with = canonical(dict(made_with)) if made_with else ""
            store._checkpoint()
            failed.pop_all()
        return store

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open the store of an existing run for reading, also on a read-only medium."""
        way_out = f"`kvatlas run MODEL {folder} --out runs/mine` makes a run of problems."
        refuse_problem_file(folder, "the folder of a run", way_out)
        refuse_spec(folder)
        if folder.is_file():
            way_out = f"name its folder {str(folder.parent)!r}" if folder.name == FILE else "name a folder"
            raise KvatlasError(f"{str(folder)!r} is a file, and a run is the folder that --out named; {way_out}.")
        check_folder(folder)
        path = folder / FILE
        if not folder.exists():
            guess = did_you_mean_file(folder)
            run, _, setting = str(folder).partition("@")
            if setting and Path(run).is_dir():
                guess = f" Name the run {run!r}, and its cell with --policy {setting!r}."
            raise KvatlasError(f"There is no run {str(folder)!r}; expected its folder.{guess}")
        if not path.is_file():
            raise KvatlasError(
                f"{str(folder)!r} is no run: there is no {FILE} in it; expected a folder that --out of `kvatlas sweep` "
                "or `kvatlas run` named."
            )

        with _store_sentences(path):
            connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
            try:
                _check_version(connection, path)
            except sqlite3.OperationalError:
                # Readers of a write-ahead log write beside it. A read-only medium has no other writer either.
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
            self._held.release()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put_manifest(self, manifest: Manifest) -> None:
        """Write the manifest in place of an earlier one.

        Raises KvatlasError for a cell whose traces no store can hold.
        """
        for cell in manifest.expected:
            check_cell(cell.model, cell.benchmark, cell.setting, cell.problems, cell.samples)
        text = json.dumps(manifest.to_json())
        with _store_sentences(self.path):
            rows = "manifest", text, "manifest_digest", digest(text)
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?), (?, ?)", rows)
            self._checkpoint()

    def manifest(self, empty: Manifest | None = None) -> Manifest:
        """Return the manifest, or `empty` for a store without a sweep.

        Raises KvatlasError for a damaged manifest, and for a store without a sweep if `empty` is None.
        """
        with _store_sentences(self.path, *_DAMAGE):
            entries = dict(self._connection.execute("SELECT name, value FROM meta WHERE name LIKE 'manifest%'"))
            if "manifest" not in entries:
                if empty is not None:
                    return empty
                raise KvatlasError(f"The run {str(self.path.parent)!r} is empty: no sweep was started in it.")
            if entries.get("manifest_digest") != digest(entries["manifest"]):
                raise ValueError("the manifest is not what was written")
            return Manifest.from_json(json.loads(entries["manifest"]))

    def add(self, run_key: str, trace: Trace) -> None:
        """Write one finished trace to disk; a trace with `made_with` keeps it.

        Raises RefusedTraceError for a trace that could not be read again; nothing of it is stored.
        """
        self.add_all([(run_key, trace)])

    def add_all(self, traces: Iterable[tuple[str, Trace]]) -> None:
        """Write traces with their run keys in one transaction.

        Raises RefusedTraceError for traces that could not be read again, and for those whose measures fail, which are
        stored without them; the others are stored before it is raised.
        """
        refused: list[RefusedTraceError] = []
        with self._transaction():
            for run_key, trace in traces:
                try:
                    trace = self.measured(trace)
                except KvatlasError as error:
                    refused.append(RefusedTraceError(f"{error} The trace is stored without its measures."))
                try:
                    row = row_of(run_key, trace)
                except RefusedTraceError as error:
                    refused.append(error)
                    continue
                self._put(row, trace.made_with or self._made_with)

        if time.monotonic() - self._checked > CHECKPOINT:
            with _store_sentences(self.path):
                self._checkpoint()
        if refused:
            raise RefusedTraceError.of_several(refused)

    def _put(self, row: Sequence[Any], made_with: str) -> None:
        run_key, setting, _, benchmark, problem, sample, *_ = row
        execute = self._connection.execute

        key = run_key, setting, benchmark, problem, sample
        execute(_DELETE_RECORD, key)
        if made_with:
            execute("INSERT OR IGNORE INTO environments (made_with) VALUES (?)", (made_with,))

        values = (*row, checksum(*row), made_with)
        marks = "?," * (len(values) - 1)
        environment = "(SELECT id FROM environments WHERE made_with = ?)"
        query = f"INSERT OR REPLACE INTO traces ({_ALL}, checksum, environment) VALUES ({marks} {environment})"
        trace_id = execute(query, values).lastrowid

        written = bytes.fromhex(answer_digest(row[-3], row[-2]))
        body, measured = record(row[:-3], written, made_with, self._cached_name_id)
        execute("INSERT INTO records VALUES (?, ?, ?)", (trace_id, body, measured))

    def contents(self, run_key: str) -> dict[str, str]:
        """Return the digests of the problems whose traces are stored under a run key."""
        with _store_sentences(self.path, *_DAMAGE):
            query = "SELECT value FROM meta WHERE name = ?"
            row = self._connection.execute(query, (_CONTENTS + run_key,)).fetchone()
            return {} if row is None else dict(json.loads(row[0]))

    def set_aside(self, contents: Mapping[str, Mapping[str, str]]) -> set[str]:
        """Keep only traces of problems with these digests under each run key; return the problems that had another one.

        Traces of a problem with another digest are set aside, and restored when the problem has that digest again.
        """
        before = {key: self.contents(key) for key in contents}
        changed = set()
        with self._transaction():
            for key, now in contents.items():
                for problem, old in before[key].items():
                    if now.get(problem, old) != old:
                        changed.add(problem)
                        self._move(key, f"{key}{_ASIDE}{old}", problem)
                        self._move(f"{key}{_ASIDE}{now[problem]}", key, problem)
                row = (_CONTENTS + key, json.dumps(before[key] | dict(now)))
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)
        return changed

    def _move(self, key: str, to: str, problem: str) -> None:
        # Damaged traces stay, and are reported when they are read.
        query = f"{self._select(_ALL)} WHERE run_key = ? AND problem = ?"
        for *row, _, made_with, sound in self._connection.execute(query, (key, problem)).fetchall():
            if sound:
                old = key, row[1], row[3], problem, row[5]
                self._connection.execute(_DELETE_RECORD, old)
                self._connection.execute(f"DELETE FROM traces WHERE {_KEY}", old)
                self._put((to, *row[1:]), made_with)

    def put_metrics(self, metrics: Mapping[Key, Mapping[str, float | str]]) -> None:
        """Write the metrics of regraded traces in one transaction."""
        place = COLUMNS.index("metrics")
        with self._transaction():
            for key, values in metrics.items():
                query = f"{self._select(_ALL)} WHERE {_KEY}"
                *row, _, made_with, _ = self._connection.execute(query, key).fetchone()
                row[place] = json.dumps(values)
                self._put(row, made_with)

    def keys(self) -> set[Key]:
        """Return the keys of all traces in the store."""
        with _store_sentences(self.path, *_DAMAGE):
            return set(self._connection.execute(f"SELECT {_ORDER} FROM traces"))

    def samples(self) -> dict[ProblemKey, frozenset[int]]:
        """Return the samples of all traces in the store by (run key, setting id, benchmark, problem)."""
        with _store_sentences(self.path, *_DAMAGE):
            rows = self._connection.execute(
                "SELECT run_key, setting, benchmark, problem, group_concat(sample) FROM traces GROUP BY 1, 2, 3, 4"
            )
            return {
                (run_key, setting, name, problem): frozenset(map(int, samples.split(",")))
                for run_key, setting, name, problem, samples in rows
            }

    def columns(self, most: int = 20_000) -> Iterator[TraceColumns]:
        """Yield all traces without tokens and texts, at most so many at a time; KvatlasError for damaged ones."""
        with _store_sentences(self.path, *_DAMAGE):
            self._connection.execute("BEGIN")  # a sweep may write meanwhile
            try:
                (count,) = self._connection.execute("SELECT count(*) FROM traces").fetchone()
                last = 0
                found = 0
                size = most
                while size == most:
                    last, columns = self.added(last, most)
                    size = len(columns)
                    found += size
                    yield columns
                if found != count:
                    raise ValueError(f"{count:,} traces are stored and {found:,} are listed")
            finally:
                self._connection.execute("COMMIT")

    def traces(self, *, texts: bool = True) -> Iterator[tuple[str, Trace]]:
        """Yield the promised traces with their run keys in key order; without tokens and text if `texts` is false.

        The manifest promises them: traces of former prompts, of removed problems and samples, and of settings that were
        replaced are left out. Raises KvatlasError for a damaged trace.
        """
        cells = {(cell.run_key, cell.setting.id, cell.benchmark): cell for cell in self.manifest().expected}
        problems = {key: frozenset(cell.problems) for key, cell in cells.items()}
        for run_key, trace in self.traces_of_all_sweeps(texts=texts):
            key = run_key, trace.setting.id, trace.benchmark
            if key in cells and trace.problem in problems[key] and trace.sample < cells[key].samples:
                yield run_key, trace

    def traces_of_all_sweeps(self, *, texts: bool = True) -> Iterator[tuple[str, Trace]]:
        """Yield what `traces` does, and traces of earlier sweeps that the run no longer has.

        It is for copies of stores; everything that counts or shows traces reads `traces`. Traces that are set aside are
        left out.
        """
        columns = _ALL if texts else ", ".join((*COLUMNS[:-3], "x'', x'', x''"))
        with _store_sentences(self.path, *_DAMAGE):
            kept = f"WHERE instr(run_key, '{_ASIDE}') = 0"
            for row in self._connection.execute(f"{self._select(columns)} {kept} ORDER BY {_ORDER}"):
                yield row[0], self._trace(row)

    def version(self) -> int:
        """Return a number that changes when another connection writes to the store.

        Raises KvatlasError if the file was deleted, moved or replaced: the connection stays with the old one.
        """
        if _file_id(self.path) != self._file_id:
            raise KvatlasError(
                f"The store {str(self.path)!r} was deleted, moved or replaced after it was opened; what was read "
                "before is shown. Start again to read what is there now."
            )
        with _store_sentences(self.path, *_DAMAGE):
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def added(self, after: int, most: int) -> tuple[int, TraceColumns]:
        """Return the row number of the last trace and at most so many traces written after the row `after`."""
        with _store_sentences(self.path, *_DAMAGE):
            query = "SELECT trace, record, metrics FROM records WHERE trace > ? ORDER BY trace LIMIT ?"
            last, records, measured = join_records(self._connection.execute(query, (after, most)))
            query = "SELECT * FROM names WHERE id >= ? ORDER BY id"
            for name_id, text, check in self._connection.execute(query, (len(self._names),)):
                if name_id != len(self._names) or check != _sum(name_id, text):
                    raise ValueError(f"name {name_id} is not what was written")
                self._names[text] = name_id
            columns = TraceColumns(records, measured, tuple(self._names))
            check_values(columns)
            return max(last, after), columns

    def _name_id(self, text: str) -> int:
        """Return the number of a name; an unknown name is added."""
        row = self._connection.execute("SELECT id FROM names WHERE text = ?", (text,)).fetchone()
        if row is not None:
            return int(row[0])
        (name_id,) = self._connection.execute("SELECT coalesce(max(id) + 1, 0) FROM names").fetchone()
        self._connection.execute("INSERT INTO names VALUES (?, ?, ?)", (name_id, text, _sum(name_id, text)))
        return int(name_id)

    def text(self, key: Key) -> str:
        """Return the text of a trace without checking it; empty if the trace is missing."""
        with _store_sentences(self.path, *_DAMAGE):
            row = self._connection.execute(f"SELECT text FROM traces WHERE {_KEY}", key).fetchone()
            return zlib.decompress(row[0]).decode() if row and row[0] else ""

    def trace(self, key: Key) -> Trace:
        """Return one whole trace; KeyError if it is missing."""
        with _store_sentences(self.path, *_DAMAGE):
            row = self._connection.execute(f"{self._select(_ALL)} WHERE {_KEY}", key).fetchone()
            if row is not None:
                return self._trace(row)
        raise KeyError(key)

    def copy(self, folder: Path) -> int:
        """Copy the run into a new folder and return the number of traces; the run may be written meanwhile.

        Raises KvatlasError if there is a run in that folder, or if the store is damaged.
        """
        if (folder / FILE).exists():
            raise KvatlasError(f"There is a run in {str(folder)!r} already; name a new folder.")
        with _store_sentences(self.path, *_DAMAGE):
            # Reading all traces makes sure that no damage is copied.
            deque(self.traces_of_all_sweeps(), maxlen=0)
            (count,) = self._connection.execute("SELECT count(*) FROM traces").fetchone()
        with Store.create(folder) as other:
            self._connection.backup(other._connection)
            # An earlier version may have stored secrets of its spec: they are overwritten in the copy.
            other._connection.execute("PRAGMA secure_delete=ON")
            empty = Manifest((), (), {}, {})
            manifest = other.manifest(empty)
            if manifest is not empty:
                other.put_manifest(manifest)
            other._checkpoint()
        return int(count)

    def _select(self, columns: str) -> str:
        """Return a query of these columns, the digest of the answer, the versions, and if the checksum holds."""
        made_with = "coalesce((SELECT made_with FROM environments WHERE id = environment), '')"
        return f"SELECT {columns}, digest(tokens, text), {made_with}, checksum = checksum({_ALL}) FROM traces"

    def _trace(self, row: tuple[Any, ...]) -> Trace:
        *values, written, made_with, sound = row
        if not sound:
            raise ValueError(f"sample {row[5]} of {row[4]} under {row[1]} is not what was written")
        return trace_of(tuple(values), written, made_with)

    def _checkpoint(self) -> None:
        """Move the transactions of the log into the file, so that a copy of the file is a store."""
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._checked = time.monotonic()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write everything or nothing."""
        with _store_sentences(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                self._cached_name_id.cache_clear()
                with contextlib.suppress(sqlite3.DatabaseError):
                    self._connection.execute("ROLLBACK")
                raise


def check_folder(folder: Path) -> None:
    """Raise KvatlasError if `folder` cannot hold a run."""
    with refusal(f"The run folder {str(folder)!r} cannot be used", OSError, ValueError):
        if folder.exists() and not folder.is_dir():
            raise KvatlasError(f"The run folder {str(folder)!r} is a file; name a folder, new or of an earlier run.")
        near = next(parent for parent in folder.absolute().parents if parent.exists())
        if not near.is_dir():
            raise KvatlasError(f"The run folder {str(folder)!r} cannot be made: {str(near)!r} is a file.")


#: Suffixes of files: a new folder of such a name would be taken for one.
_OF_FILE = re.compile(
    r"\.(arrow|bmp|csv|db|docx?|eps|feather|gguf|gif|gz|html?|ipynb|jpe?g|jsonl?|log|md|ndjson|np[yz]|od[st]|parquet|pdf|"
    r"pickle|pkl|png|pptx?|ps|pt|rtf|safetensors|sqlite|svg|tar|tex|tiff?|toml|tsv|txt|webp|xlsx?|xml|ya?ml|zip)",
    re.IGNORECASE,
)


def check_new_folder(folder: Path, or_else: str = "") -> None:
    """Raise KvatlasError if `folder` cannot be written: it is a file, or a new folder whose name is one of a file.

    `or_else` ends the sentence with another way out.
    """
    check_folder(folder)
    logs = [*folder.glob("samples_*.jsonl*"), *folder.glob("*/samples_*.jsonl*"), *folder.glob("*.eval")]
    if logs and not (folder / FILE).exists():
        raise KvatlasError(f"{str(folder)!r} holds the log {logs[0].name}, which a run would hide; name a new folder.")
    if _OF_FILE.fullmatch(folder.suffix) and not folder.is_dir():
        raise KvatlasError(
            f"The name {folder.name!r} is one of a file, and a folder is written; name a folder without a suffix"
            f"{or_else}."
        )


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not version and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise KvatlasError(
            f"The store {str(path)!r} cannot be used: it is empty, since no sweep was started in it or all was lost; "
            f"the same sweep with --out {path.parent} fills it."
        )
    if version != SCHEMA_VERSION:
        raise KvatlasError(
            f"The store {str(path)!r} has version {version}, this kvatlas reads version {SCHEMA_VERSION}; use another "
            "folder, or the kvatlas that wrote it."
        )
    # A view in place of a table may compute without an end.
    query = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
    for kind, name in connection.execute(query):
        raise KvatlasError(f"The store {str(path)!r} is damaged: it has the {kind} {name!r}; expected tables alone.")


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode, by which a file differs from a later one of its name; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sum(name_id: int, text: str) -> int:
    """Return the checksum of a row of `names`."""
    return zlib.crc32(f"{name_id} {text}".encode())


@contextmanager
def _store_sentences(path: Path, *damage: type[Exception]) -> Iterator[None]:
    """Turn errors of the disk (full, read-only) and of a file that is no store, or is damaged, into one sentence.

    `damage` are the errors of reading what is no trace or manifest.
    """
    faults: tuple[type[Exception], ...] = (OSError, sqlite3.DatabaseError, UnicodeDecodeError, *damage)
    try:
        yield
    except sqlite3.ProgrammingError:
        # A mistake in a query of ours says nothing about the file.
        raise
    except faults as error:
        # Errors for texts that are not UTF-8 have no code.
        code = getattr(error, "sqlite_errorcode", 0) & 255
        sentence = f"is damaged ({reason(error)}). Take a copy of it, or run the sweep into a new folder."
        # An operational error other than a wrong query tells of a sound file that cannot be used now.
        is_operational = isinstance(error, sqlite3.OperationalError) and code > sqlite3.SQLITE_ERROR
        if isinstance(error, OSError) or is_operational:
            way_out = "what was finished before is kept, and the same command goes on from there."
            if code in _NO_ACCESS or getattr(error, "errno", 0) in (errno.EROFS, errno.EACCES, errno.EPERM):
                way_out = "name a folder that you may read and write."
            sentence = f"cannot be used ({error}); {way_out}"
        raise KvatlasError(f"The store {str(path)!r} {sentence}") from error


def lock(folder: Path) -> BaseFileLock | None:
    """Return the lock of a folder's store, held until it is released; None on file systems without locks.

    Raises KvatlasError with the name of the process that holds the lock.
    """
    from filelock import FileLock, Timeout

    # A locked file cannot be read on Windows, so the name of its owner stands beside it.
    owner = folder / OWNER
    held = FileLock(folder / LOCK, timeout=0, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        name = ""
        with contextlib.suppress(OSError, ValueError):
            name = owner.read_text(encoding="utf-8")[:200].strip()
        raise KvatlasError(
            f"The run {str(folder)!r} is being written by {name or 'another process'}; wait for its end, or name "
            "another folder."
        ) from None
    except (OSError, NotImplementedError):
        # A file system without locks, as of some network drives: the run is written without one.
        return None
    with contextlib.suppress(OSError):
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return held
