"""Stores: what is added comes back; damaged, locked, copied while they are written, on a read-only medium."""

import errno
import gzip
import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import benchmarks
from kvatlas.benchmarks import find
from kvatlas.core import (
    NO_ANSWERS,
    NOT_ENDED,
    Costs,
    EvictionTrace,
    Grade,
    KvatlasError,
    Outcome,
    Setting,
    Status,
    Trace,
    Usage,
    digest,
)
from kvatlas.gates import gate_result
from kvatlas.report.app.documents import outcome_letters
from kvatlas.report.app.traces import trace_document
from kvatlas.report.materials import RunMaterials
from kvatlas.results import Expected, Manifest, Store
from kvatlas.results.manifest import contents_of
from kvatlas.results.records import COLUMNS, COSTS, RECORD, STATUS, record, row_of
from kvatlas.results.regrade import regrade
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.validity import validity_of
from tests.command_line import Call
from tests.stored import change_store

SETTING = Setting.from_parameters("window", kv_budget=64, local_window=8, ratio=0.1)
TRACE = Trace(
    model="embedded:tiny-llama",
    benchmark="CHAIN8",
    problem="CHAIN8-0001",
    sample=0,
    setting=SETTING,
    tokens=(5, 6, 70_000),
    text="a = 3 \u202e <script>\x00",
    grade=Grade(True, 1.0, "a = 3", Status.OK, {"recall": 0.5, "first_error": "none"}),
    usage=Usage(10, 3, 2, 13, 11.5, 1, 0.25),
    eviction_trace=EvictionTrace(1, (0, 2, 2, 0), (1, 0, 0, 1)),
)


def manifest() -> Manifest:
    expected = Expected("m", "CHAIN8", SETTING, "key", ("CHAIN8-0001",), 1, False)
    return Manifest((("local_window", (8,)), ("ratio", (0.1,))), (expected,), {"seed": 0}, {"kvatlas": "x"})


def test_what_is_added_comes_back(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        store.put_manifest(manifest())
        store.add("key", TRACE)
        store.add("other", replace(TRACE, sample=1, grade=Grade(False, 0.5, None, Status.NO_ANSWER)))
    with Store.open(tmp_path / "run") as store:
        assert store.manifest() == manifest()
        assert [key for key, _ in store.traces_of_all_sweeps()] == ["key", "other"]
        assert store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 0)) == TRACE
        assert next(store.traces_of_all_sweeps(texts=False))[1] == replace(
            TRACE, tokens=(), text="", eviction_trace=None
        )
        assert store.samples() == {
            (key, SETTING.id, "CHAIN8", "CHAIN8-0001"): {n} for n, key in enumerate(("key", "other"))
        }
        with pytest.raises(KeyError):
            store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 7))


def test_equal_tokens_have_equal_digests_even_unread(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        for sample, tokens in enumerate([(5, 6), (5, 6), (5, 7)]):
            store.add("key", replace(TRACE, sample=sample, tokens=tokens))
        first, same, other = (trace.token_digest for _, trace in store.traces_of_all_sweeps(texts=False))
        assert [trace.token_digest for _, trace in store.traces_of_all_sweeps()] == [first, same, other]
        assert store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 2)).token_digest == other
    assert first == same != other


@pytest.mark.parametrize(
    "eviction_trace",
    [
        None,
        EvictionTrace(1, (), ()),
        EvictionTrace(1, (0, 7), (1, 0)),
        EvictionTrace(12, (0, 9, 9), (12, 0, 0)),
        EvictionTrace(4, (0,), (3,)),
    ],
)
def test_eviction_traces_come_back(tmp_path: Path, eviction_trace: EvictionTrace | None) -> None:
    with Store.create(tmp_path) as store:
        store.add("key", replace(TRACE, eviction_trace=eviction_trace))
        assert next(store.traces_of_all_sweeps())[1].eviction_trace == eviction_trace


def test_no_run_an_empty_one_and_a_damaged_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match="is no run"):
        Store.open(tmp_path)
    with Store.create(tmp_path) as store:
        assert store.manifest(manifest()) == manifest()
        with pytest.raises(KvatlasError, match="no sweep was started"):
            store.manifest()
        store.put_manifest(manifest())
        store._connection.execute("UPDATE meta SET value = '{}' WHERE name = 'manifest'")
        with pytest.raises(KvatlasError, match="the manifest is not what was written"):
            store.manifest(manifest())


def test_a_store_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    Store.create(tmp_path).close()
    path = tmp_path / "run.sqlite"
    change_store(tmp_path, "PRAGMA user_version=99")
    before = path.read_bytes()
    for attempt in (Store.create, Store.open):
        with pytest.raises(KvatlasError, match="has version 99, this kvatlas reads version 5"):
            attempt(tmp_path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_text("no database " * 100)
    for attempt in (Store.create, Store.open):
        with pytest.raises(KvatlasError, match="is damaged"):
            attempt(tmp_path)


COUNT = 60


def filled(folder: Path) -> dict[int, Trace]:
    """A store of traces that differ, closed; what it holds by sample."""
    with Store.create(folder, {"torch": "2.0"}) as store:
        store.put_manifest(manifest())
        for sample in range(COUNT):
            store.add("key", replace(TRACE, sample=sample, text=random.Random(sample).randbytes(900).hex()))
    with Store.open(folder) as store:
        return {trace.sample: trace for _, trace in store.traces_of_all_sweeps()}


def test_damage_is_named(tmp_path: Path) -> None:
    """Bytes overwritten, or the end cut off: what is read is what was written, or a sentence says so; no copy of it."""
    sound = filled(tmp_path / "run")
    path, rng = tmp_path / "run" / "run.sqlite", random.Random(0)
    whole = path.read_bytes()
    said: list[str] = []
    for number in range(20):
        data = bytearray(whole)
        if number % 4:
            position = rng.randrange(100, len(data) - 400)
            size = rng.choice([1, 20, 400])
            data[position : position + size] = rng.randbytes(size)
        else:
            data = data[: rng.randrange(len(data))]
        path.write_bytes(data)
        try:
            with Store.open(tmp_path / "run") as store:
                assert {trace.sample: trace for _, trace in store.traces_of_all_sweeps()} == sound
                assert (
                    len(list(store.traces_of_all_sweeps(texts=False)))
                    == len(store.keys())
                    == sum(map(len, store.columns()))
                    == COUNT
                )
                assert store.manifest() == manifest()
                assert store.copy(tmp_path / f"kept-{number}") == COUNT
        except KvatlasError as error:
            said.append(str(error))
    # Where the first page is gone nothing can be read.
    assert all(any(word in item for word in ("is damaged", "cannot be used", "has version 0")) for item in said)
    assert len(said) > 10


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"no database" * 500, "is damaged (file is not a database)"),
        (lambda data: data[:5000], "is damaged (database disk image is malformed)"),
        (lambda data: data.replace(b"CREATE TABLE traces", b"CREATE TABLE tr\xffces"), "is damaged ("),
        (lambda data: data.replace(b"CREATE TABLE traces", b"CREATE TxBLE traces"), "is damaged (malformed database"),
        (lambda data: b"", "since no sweep was started in it or all was lost; the same sweep with --out "),
    ],
)
def test_a_file_that_is_no_store_is_damage_for_readers_and_writers(
    tmp_path: Path, change: Callable[[bytes], bytes], sentence: str
) -> None:
    with Store.create(tmp_path) as store:
        store.put_manifest(manifest())
    path = tmp_path / "run.sqlite"
    path.write_bytes(change(path.read_bytes()))
    for opened in (Store.open, Store.create):
        if opened == Store.create and not path.stat().st_size:
            # A killed process leaves an empty file, with which the next one goes on.
            continue
        with pytest.raises(KvatlasError) as caught, opened(tmp_path) as store:
            store.keys()
        assert sentence in str(caught.value)
        assert "goes on from there" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "way_out"),
    [(errno.EROFS, "name a folder that you may read and write."), (errno.ENOSPC, "goes on from there.")],
)
def test_a_disk_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, way_out: str
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(KvatlasError) as caught:
        Store.create(tmp_path / "run")
    assert str(caught.value).endswith(way_out)


@pytest.mark.parametrize(
    ("change", "read", "sentence"),
    [
        ("UPDATE traces SET correct = 0 WHERE sample = 7", "traces", "sample 7 of CHAIN8-0001 .*"),
        ("UPDATE records SET record = zeroblob(length(record)) WHERE trace = 8", "columns", "trace 8"),
        ("UPDATE records SET metrics = zeroblob(16) WHERE trace = 8", "columns", "trace 8"),
        ("UPDATE names SET text = 'dynts' WHERE text LIKE '%window%'", "columns", "name 2"),
        ("DELETE FROM names WHERE id = 3", "columns", "name 4"),
        ("DELETE FROM records WHERE trace = 8", "columns", "60 traces are stored and 59"),
    ],
)
def test_one_wrong_trace_is_named(tmp_path: Path, change: str, read: str, sentence: str) -> None:
    """A trace's texts, with all that is known of it, and its columns are two copies with checksums of their own."""
    filled(tmp_path / "run")
    assert change_store(tmp_path / "run", change) == 1
    wrong = pytest.raises(KvatlasError, match=rf"is damaged \({sentence}.*\)\. Take a copy of it")
    with Store.open(tmp_path / "run") as store, wrong:
        list(store.columns() if read == "columns" else store.traces_of_all_sweeps(texts=False))


def remade(**values: Any) -> list[Any]:
    """The row of a trace with other values."""
    row = dict(zip(COLUMNS, row_of("key", TRACE), strict=True))
    return list({**row, **values}.values())


@pytest.mark.parametrize(
    ("values", "made_with", "sentence"),
    [
        ({"progress": "all of it"}, "", "progress is 'all of it'"),
        ({"progress": 1.5}, "", "progress is 1.5"),
        ({"correct": 7}, "", "correct is 7"),
        ({"sample": -5}, "", "the sample is -5"),
        ({"metrics": '{"recall": NaN}'}, "", "recall is nan, expected a finite number"),
        ({"metrics": '{"recall": Infinity}'}, "", "expected a finite number"),
        ({"metrics": '{"recall": [1]}'}, "", "expected a finite number or a text"),
        ({"usage": "[]"}, "", "no object of numbers and texts"),
        ({}, "kvatlas 7", "Expecting value"),
        ({}, "[]", "no object of numbers and texts"),
    ],
)
def test_made_rows_with_right_checksums_are_damage(
    tmp_path: Path, values: dict[str, Any], made_with: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader says so, of a store that another program filled."""
    row = remade(**values)
    with Store.create(tmp_path) as store, monkeypatch.context() as patch:
        store.put_manifest(manifest())
        if values:
            # The small columns of a sound trace, so that both copies are looked at on their own.
            sound = record(row_of("key", TRACE)[:-3], bytes(16), "", store._cached_name_id)
            patch.setattr("kvatlas.results.store.record", lambda *_: sound)
        store._put(row, made_with)
    with Store.open(tmp_path) as store, pytest.raises(KvatlasError, match="is damaged") as caught:
        list(store.columns() if made_with else store.traces_of_all_sweeps())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", 0), ("progress", math.nan), ("progress", 2.0), ("sample", -1), ("setting", -1)],
)
def test_made_records_with_right_checksums_are_damage(
    tmp_path: Path, field: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.create(tmp_path) as store, monkeypatch.context() as patch:
        body, measured = record(row_of("key", TRACE)[:-3], bytes(16), "", store._cached_name_id)
        made = np.frombuffer(bytearray(body), RECORD)
        made[field] = value
        made["check"] = zlib.crc32(measured, zlib.crc32(made.tobytes()[:-4]))
        patch.setattr("kvatlas.results.store.record", lambda *_: (made.tobytes(), measured))
        store.add("key", TRACE)
    with Store.open(tmp_path) as store, pytest.raises(KvatlasError, match=r"is damaged \((the values|names) of"):
        list(store.columns())


# The codes of a store outlive the version that wrote it.

OLD = Path(__file__).parents[1] / "data" / "every_status.sqlite.gz"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run that commit 15a10f15 wrote: one trace of each status, with unlike costs."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "run.sqlite").write_bytes(gzip.decompress(OLD.read_bytes()))
    return folder


def test_a_store_of_an_earlier_commit_is_read_with_every_status_and_cost(old_run: Path) -> None:
    (cell,) = RunData.open(old_run).cells
    assert cell.outcomes == dict.fromkeys(
        (Outcome.CORRECT, Outcome.TRUNCATED, Outcome.NO_ANSWER, Outcome.GRADER_TIMEOUT), 1
    )
    assert outcome_letters(cell, cell.problems, 9) == "rtng"
    known = {"output_tokens": 20, "prompt_tokens": 10, "thinking_tokens": 15, "peak_kv_tokens": 30}
    known |= {"mean_kv_tokens": 25.5, "compressions": 2, "seconds": 0.75}
    unknown = known | {"output_tokens": 21, "prompt_tokens": 11, "peak_kv_tokens": 31, "mean_kv_tokens": 26.5}
    unknown |= {"thinking_tokens": math.nan, "compressions": math.nan, "seconds": 1.75}
    for name, value in known.items():
        values = cell.traces[name].ravel()
        assert np.array_equal(values, [value, unknown[name]] * 2, equal_nan=True)
    with Store.open(old_run) as store:
        stored = [trace for _, trace in store.traces()]
    assert [trace.grade.status.value for trace in stored] == ["ok", "truncated", "no_answer", "grader_timeout"]
    for trace in stored:
        costs = unknown if trace.usage.thinking_tokens is None else known
        assert vars(trace.usage) == {name: None if math.isnan(value) else value for name, value in costs.items()}


def later_status(folder: Path, code: int = 9) -> Path:
    """Store a run of two traces of which a later version wrote the second, with a status of its own."""
    problems = ("CHAIN8-0001", "CHAIN8-0002")
    (cell,) = manifest().expected
    with Store.create(folder) as store, pytest.MonkeyPatch.context() as patch:
        store.put_manifest(replace(manifest(), expected=(replace(cell, problems=problems),)))
        store.add("key", TRACE)
        row = remade(problem=problems[1], status="repeated", answer=None, correct=0)
        body, measured = record(row[:-3], bytes(16), "", store._cached_name_id)
        made = np.frombuffer(bytearray(body), RECORD)
        made["status"] = code
        made["check"] = zlib.crc32(measured, zlib.crc32(made.tobytes()[:-4]))
        patch.setattr("kvatlas.results.store.record", lambda *_: (made.tobytes(), measured))
        store._put(row, "")
    return folder


def test_a_status_of_a_later_version_is_unknown_to_this_one(tmp_path: Path, kvatlas: Call) -> None:
    """It is no damage, and no other status: not in tables, on the page, in an export, nor in a trace."""
    run = later_status(tmp_path / "run")
    (cell,) = RunData.open(run).cells
    assert cell.outcomes == {Outcome.CORRECT: 1, Outcome.UNKNOWN: 1}
    assert cell.cell.number("truncated") == 0
    assert outcome_letters(cell, cell.problems, 9) == "ru"
    with Store.open(run) as store:
        key, unknown = list(store.traces())[1]
    assert unknown.grade.status is Status.UNKNOWN
    assert (
        trace_document(unknown, RunMaterials.from_manifest(manifest()))["verdict"] == "wrong (unknown to this version)"
    )
    exported = [json.loads(line) for line in kvatlas.succeed("export", run, "--format", "jsonl").splitlines()]
    assert [line["status"] for line in exported] == ["ok", "unknown_to_this_version"]
    with Store.create(run) as store, pytest.raises(KvatlasError, match="the status is unknown_to_this_version"):
        store.add(key, unknown)
    with pytest.raises(KvatlasError, match="a status that this version does not know; grade the run with that version"):
        regrade(run)


def test_a_trace_of_a_later_version_that_is_set_aside_keeps_its_status(tmp_path: Path) -> None:
    run = later_status(tmp_path / "run")
    with Store.create(run) as store:
        store.set_aside({"key": {"CHAIN8-0002": "old"}})
        for contents in ("new", "old"):
            store.set_aside({"key": {"CHAIN8-0002": contents}})
        assert store._connection.execute("SELECT status FROM traces ORDER BY problem").fetchall() == [
            ("ok",), ("repeated",)
        ]  # fmt: skip
    (cell,) = RunData.open(run).cells
    assert cell.outcomes == {Outcome.CORRECT: 1, Outcome.UNKNOWN: 1}


def test_every_status_is_counted_by_validity_and_gate(old_run: Path) -> None:
    """A status that is added is counted by what it says of the trace, without a list of names by hand."""
    (cell,) = RunData.open(old_run).cells
    checked = validity_of([cell])
    assert checked is not None
    assert (checked.no_answer, checked.truncated, checked.unanswered) == (1, 1, 2)
    without_answer = {Outcome[status.name] for status in Status if not status.answered}
    assert {*NO_ANSWERS, *NOT_ENDED} == without_answer

    assert {*gate_result.TRUNCATED, *gate_result.NO_ANSWER} == {status for status in Status if not status.answered}


def test_every_status_and_cost_has_a_place_in_the_store() -> None:
    assert set(STATUS) == set(Status)
    assert len(set(STATUS.values())) == len(STATUS)
    assert set(COSTS) == {field.name for field in fields(Costs)}
    assert {outcome.name for outcome in Outcome} >= {status.name for status in Status if status is not Status.OK}


def test_a_metric_that_is_no_number_is_damage_in_the_columns_too(tmp_path: Path) -> None:
    with Store.create(tmp_path) as store:
        store._put(remade(metrics='{"recall": NaN}'), "")
    with Store.open(tmp_path) as store, pytest.raises(KvatlasError, match="a metric is no finite number"):
        list(store.columns())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field.name, None) for field in fields(Manifest)),
        ("problems", None),
        ("expected", [None]),
        ("expected", [["m", "b", "full", None, "key", 1, False]]),
        ("expected", [["m", "b", "full", {}, "key", "1", False]]),
        ("contents", {"CHAIN6": None}),
        ("clusters", {"CHAIN6": {"CHAIN6-1": 7}}),
        ("spec", {"models": None}),
        ("spec", {"sampling": None}),
        ("spec", {"models": [7]}),
        ("provenance", {"benchmarks": [[]]}),
        ("provenance", {"tags": {"m": None}}),
        ("provenance", {"tags": {"m": {"close": 7}}}),
        ("spec", {"models": [{"name": "m"}]}),
        ("spec", {"looks": [0]}),
        ("spec", {"problems": "all"}),
        ("axes", [["ratio", [[0.2]]]]),
        ("expected", [["m", "b", "full", {"ratio": [0.2]}, "key", 1, False]]),
    ],
)
def test_a_manifest_of_another_form_is_refused_with_its_field(
    tmp_path: Path, field: str, value: Any, kvatlas: Call
) -> None:
    """Whoever writes a digest beside a manifest can write any manifest."""
    filled(tmp_path / "run")
    content = {**manifest().to_json(), field: value}
    written = json.dumps(content)
    for name, text in (("manifest", written), ("manifest_digest", digest(written))):
        change_store(tmp_path / "run", f"UPDATE meta SET value = '{text}' WHERE name = '{name}'")
    for command in ("describe", "export"):
        code, _, said = kvatlas(command, tmp_path / "run")
        assert (code, "Traceback" in said) == (2, False)
        assert f"is damaged (its manifest has a wrong '{field}" in said


@pytest.mark.parametrize(("samples", "ratio"), [(0, 0.2), (-1, 0.2), (10**30, 0.2), (1, float("nan"))])
def test_a_cell_that_no_store_can_hold_is_refused_when_it_is_read(
    tmp_path: Path, samples: int, ratio: float, kvatlas: Call
) -> None:
    filled(tmp_path / "run")
    content = manifest().to_json()
    content["expected"][0][3] = {"ratio": ratio}
    content["expected"][0][5] = samples
    written = json.dumps(content)
    for name, text in (("manifest", written), ("manifest_digest", digest(written))):
        change_store(tmp_path / "run", f"UPDATE meta SET value = '{text}' WHERE name = '{name}'")
    code, _, said = kvatlas("describe", tmp_path / "run")
    assert (code, "Traceback" in said) == (2, False)
    assert "A run cannot hold" in said


def test_a_mistake_in_code_is_no_damage(tmp_path: Path) -> None:
    """SQLite counts the parameters of a query, and says nothing of the file."""
    with Store.create(tmp_path / "run") as store:
        for mistake in (
            lambda: store.put_metrics({("too", "few"): {"metric": 1.0}}),  # type: ignore[dict-item]
            lambda: store.trace(("too", "few")),  # type: ignore[arg-type]
            lambda: store.text(("a", "b", "c", "d", object())),  # type: ignore[arg-type]
        ):
            with pytest.raises(sqlite3.ProgrammingError):
                mistake()


def test_a_view_in_place_of_a_table_is_refused_before_it_is_read(tmp_path: Path) -> None:
    filled(tmp_path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with sqlite3.connect(tmp_path / "run.sqlite") as connection:
        connection.execute("ALTER TABLE traces RENAME TO hidden")
        connection.execute(f"CREATE VIEW traces AS {endless} SELECT hidden.* FROM n, hidden")
    for attempt in (Store.create, Store.open):
        with pytest.raises(KvatlasError, match="is damaged: it has the view 'traces'; expected tables alone"):
            attempt(tmp_path)


def test_the_file_alone_holds_what_was_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 4 MB of traces stood in the log beside it: a copy of the file had no tables, and "version 0"."""
    monkeypatch.setattr("kvatlas.results.store.CHECKPOINT", 0.0)
    for copied in ("before", "after"):
        (tmp_path / copied).mkdir()
    with Store.create(tmp_path / "run") as store:
        shutil.copy(tmp_path / "run" / "run.sqlite", tmp_path / "before")
        store.add("key", TRACE)
        shutil.copy(tmp_path / "run" / "run.sqlite", tmp_path / "after")
        assert store.copy(tmp_path / "whole") == 1
    for copied, count in (("before", 0), ("after", 1), ("whole", 1)):
        with Store.open(tmp_path / copied) as store:
            assert len(store.keys()) == count


def test_a_second_writer_is_refused_and_the_first_named(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run"):
        with pytest.raises(KvatlasError, match=f"being written by process {os.getpid()} on "):
            Store.create(tmp_path / "run")
        with Store.open(tmp_path / "run") as reader:
            assert reader.keys() == set()
    Store.create(tmp_path / "run").close()


def test_two_names_of_one_store_have_one_lock(tmp_path: Path) -> None:
    """A link to the file, and one to the folder."""
    filled(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.sqlite").symlink_to(tmp_path / "run" / "run.sqlite")
    (tmp_path / "third").symlink_to(tmp_path / "run")
    folders = [tmp_path / name for name in ("run", "other", "third")]
    for first in folders:
        with Store.create(first):
            for second in folders:
                with pytest.raises(KvatlasError, match=f"being written by process {os.getpid()} on "):
                    Store.create(second)


def test_the_lock_needs_no_module_of_unix(tmp_path: Path) -> None:
    """As on Windows: fcntl is imported by the package that locks, and by none of ours."""
    code = (
        "import filelock, sys; sys.modules['fcntl'] = None\n"
        "from pathlib import Path; from kvatlas.results import Store\n"
        f"held = Store.create(Path({str(tmp_path)!r})); Store.create(Path({str(tmp_path)!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is being written by process" in ended.stderr


def test_a_finished_run_is_read_where_nobody_may_write() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)
        run = Path(scratch) / "run"
        sound = filled(run)
        for path in (*run.iterdir(), run):
            path.chmod(0o555 if path.is_dir() else 0o444)
        user = os.geteuid()
        if user == 0:  # to whom nothing is forbidden
            os.seteuid(65534)
        try:
            with pytest.raises(OSError, match="denied"):
                (run / "x").touch()
            with Store.open(run) as store:
                assert {trace.sample: trace for _, trace in store.traces_of_all_sweeps()} == sound
                assert store.manifest() == manifest()
        finally:
            os.seteuid(user)
            run.chmod(0o755)


# Stored traces are graded again: the new verdicts are a further metric.

ROWS = [{"question": "One and two?", "answer": "3"}, {"question": "A half?", "answer": "0.5"}]
#: By local window: the first cell boxes, the second only ends with its number, which the code of DynTS counts.
TEXTS = {
    10: ("<think>so</think>\\boxed{3}", "<think>so</think>\\boxed{0.5}"),
    20: ("<think>so</think>One and two make 3 here", "<think>so</think>It is \\boxed{50\\%}"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two windows and two ratios on two problems, as a sweep leaves it."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(ROWS))
    benchmark = find(f"file:{file}")
    problems = benchmark.problems()
    spec = {"benchmarks": [{"name": "mine", "file": str(file)}], "problems": None}
    settings = [
        Setting.from_parameters("window", kv_budget=50, local_window=w, ratio=r) for w in TEXTS for r in (0.1, 0.2)
    ]
    expected = tuple(Expected("m", "mine", s, "key", tuple(p.id for p in problems), 1, False) for s in settings)
    axes = (("local_window", (10, 20)), ("ratio", (0.1, 0.2)))
    with Store.create(tmp_path / "run") as store:
        asked = {"benchmarks": [benchmarks.identity(benchmark)]}
        contents = {"mine": contents_of(problems)}
        store.put_manifest(Manifest(axes, expected, spec, json.loads(json.dumps(asked)), contents=contents))
        for setting in settings:
            for problem, text in zip(problems, TEXTS[setting.values["local_window"]], strict=True):
                grade = benchmark.grade(problem, text.partition("</think>")[2])
                usage = Usage(10, 20, 5, 30, 20.0, 1, 0.1)
                store.add("key", Trace("m", "mine", problem.id, 0, setting, (), text, grade, usage))
    return tmp_path / "run"


def test_a_trace_without_an_answer_that_no_other_grader_has_read_leaves_its_metric_unknown(run: Path) -> None:
    regrade(run, "dynts")
    with Store.create(run) as store:
        key, unanswered = next(
            item for item in store.traces_of_all_sweeps() if item[1].grade.status is Status.NO_ANSWER
        )
        at = (key, unanswered.setting.id, unanswered.benchmark, unanswered.problem, unanswered.sample)
        # As in a trace that was decoded after the others were graded again.
        store.put_metrics({at: {}})
    with pytest.raises(KvatlasError, match="1 of 8 traces have no graded:dynts; `kvatlas grade RUN --grader dynts`"):
        maps_of_run(RunData.open(run, "graded:dynts"))


def test_regraded_verdicts_are_shown_where_they_are_asked_for_alone(kvatlas: Call, run: Path, tmp_path: Path) -> None:
    before = kvatlas("describe", run, "--json")
    assert "\n0 verdicts changed; " in kvatlas.succeed("grade", run)
    said = kvatlas.succeed("grade", run, "--grader", "dynts")
    assert "\n2 verdicts changed; kvatlas map --metric graded:dynts draws" in said
    assert kvatlas("describe", run, "--json") == before
    rows = regrade(run, "dynts")
    changes = [(row["pass@1"], row["graded:dynts"], row["to_right"], row["to_wrong"]) for row in rows]
    assert changes == [(100.0, 100.0, 0, 0)] * 2 + [(50.0, 100.0, 1, 0)] * 2
    (own,), (other,) = (maps_of_run(RunData.open(run, metric)) for metric in ("pass@1", "graded:dynts"))
    assert {at: cell.estimate.value for at, cell in own.cells.items()} == {
        (10, 0.1): 1.0, (10, 0.2): 1.0, (20, 0.1): 0.5, (20, 0.2): 0.5
    }  # fmt: skip
    assert {cell.estimate.value for cell in other.cells.values()} == {1.0}
    figure = tmp_path / "map.svg"
    kvatlas.succeed("map", run, "--metric", "graded:dynts", "--out", figure)
    assert "Pass@1 by dynts" in figure.read_text()


def test_what_cannot_be_graded_again_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match="Unknown grader 'mine'"):
        regrade(run, "mine")
    (tmp_path / "mine.json").write_text(json.dumps([{**ROWS[0], "answer": "4"}, ROWS[1]]))
    with pytest.raises(KvatlasError, match=r"has 1 of 2 problems of mine \(mine-001\) that its file lacks or changes"):
        regrade(run)
    # A row that is added changes no problem of the run.
    (tmp_path / "mine.json").write_text(json.dumps([*ROWS, {"question": "One?", "answer": "1"}]))
    assert len(regrade(run)) == 4
