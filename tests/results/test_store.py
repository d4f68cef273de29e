import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.core import EvictionTrace, Grade, KvatlasError, Setting, Status, Trace, Usage
from kvatlas.results import Expected, Manifest, Store

SETTING = Setting.of("window", kv_budget=64, local_window=8, ratio=0.1)
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
        assert [key for key, _ in store.traces()] == ["key", "other"]
        assert store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 0)) == TRACE
        assert next(store.traces(texts=False))[1] == replace(TRACE, tokens=(), text="", eviction_trace=None)
        assert store.samples() == {
            (key, SETTING.id, "CHAIN8", "CHAIN8-0001"): {n} for n, key in enumerate(("key", "other"))
        }
        with pytest.raises(KeyError):
            store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 7))


def test_equal_tokens_have_equal_digests_even_unread(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        for sample, tokens in enumerate([(5, 6), (5, 6), (5, 7)]):
            store.add("key", replace(TRACE, sample=sample, tokens=tokens))
        first, same, other = (trace.written for _, trace in store.traces(texts=False))
        assert [trace.written for _, trace in store.traces()] == [first, same, other]
        assert store.trace(("key", SETTING.id, "CHAIN8", "CHAIN8-0001", 2)).written == other
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
        assert next(store.traces())[1].eviction_trace == eviction_trace


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
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    before = path.read_bytes()
    for attempt in (Store.create, Store.open):
        with pytest.raises(KvatlasError, match="has version 99, this kvatlas reads version 5"):
            attempt(tmp_path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_text("no database " * 100)
    for attempt in (Store.create, Store.open):
        with pytest.raises(KvatlasError, match="cannot be used"):
            attempt(tmp_path)
