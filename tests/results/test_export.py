"""Exports of a run: every trace flat, maps as CSV, the file whole or not at all."""

import csv
import json

import pyarrow.parquet as pq
import pytest

from kvatlas.core import Grade, KvatlasError, Setting, Status
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from kvatlas.results.export import csv_text, replacing, trace_record, write_maps, write_traces
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, trace
from tests.stored import maze_run, store_run

pytestmark = pytest.mark.newest

NAMES = [
    "model", "benchmark", "problem", "sample", "policy", "kv_budget", "local_window", "ratio", "status", "correct",
    "progress", "answer", "output_tokens", "thinking_tokens", "peak_kv_tokens", "mean_kv_tokens", "prompt_tokens",
    "compressions", "seconds", "run_key", "text",
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return store_run(tmp_path / "run", manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=3))


def test_jsonl_has_one_object_per_trace(run, tmp_path):
    out = tmp_path / "new" / "traces.jsonl"
    write_traces(run, "jsonl", out)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert (len(rows), list(rows[0])) == (60, NAMES)
    with Store.open(run) as store:
        assert rows == [trace_record(key, trace) for key, trace in store.traces()]
    assert [name for name in rows[-1] if name in ("kv_budget", "ratio")] == []


def test_parquet_has_the_same_rows(run, tmp_path):
    write_traces(run, "parquet", tmp_path / "t.parquet")
    with Store.open(run) as store:
        expected = [trace_record(key, trace) for key, trace in store.traces()]
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.names == NAMES
    assert [str(table.schema.field(name).type) for name in ("correct", "sample", "ratio", "text")] == [
        "bool", "int64", "double", "string",
    ]  # fmt: skip
    assert [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()] == [
        {k: v for k, v in row.items() if v is not None} for row in expected
    ]


def test_parquet_holds_parameters_of_mixed_kinds(tmp_path):
    settings = [Setting.from_parameters("a", level=1, sample=1), Setting.from_parameters("b", level="high", sample=0.5)]
    plan = manifest(settings, benchmarks=("CHAIN6",), problems=1, baselines=())
    write_traces(store_run(tmp_path / "run", plan), "parquet", tmp_path / "t.parquet")
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert {row["level"] for row in rows} == {"1", "high"}
    assert {row["setting_sample"] for row in rows} == {1.0, 0.5}
    assert {row["sample"] for row in rows} == {0, 1}


def test_csv_is_a_map_with_costs_and_baselines(run, tmp_path):
    write_maps(maps_of_run(RunData.open(run)), tmp_path / "m.csv")
    rows = list(csv.DictReader((tmp_path / "m.csv").open(encoding="utf-8")))
    assert list(rows[0]) == [
        "model", "benchmark", "policy", "local_window", "ratio", "pass_at_1", "low", "high", "problems", "samples",
        "kept_tokens_mean", "kv_bytes_mean", "peak_kv_tokens", "stays_tokens", "output_tokens_mean", "truncated",
        "seconds_mean",
    ]  # fmt: skip
    assert len(rows) == 10
    # The window, the prompt of 20 tokens, and a tenth of the 44 others.
    assert (rows[0]["stays_tokens"], rows[-1]["stays_tokens"]) == ("56.0", "")
    read = {map_.name: map_ for map_ in read_maps(tmp_path / "m.csv")}
    for map_ in maps_of_run(RunData.open(run)):
        kept = {coord: cell.number("stays_tokens") for coord, cell in map_.cells.items()}
        assert {coord: cell.number("stays_tokens") for coord, cell in read[map_.name].cells.items()} == kept
    assert (rows[0]["local_window"], rows[0]["ratio"], rows[0]["kept_tokens_mean"]) == ("32", "0.1", "60.5")
    assert (rows[-1]["policy"], rows[-1]["local_window"], rows[-1]["ratio"]) == ("full", "", "")


def test_faults_are_named(run, tmp_path):
    with pytest.raises(KvatlasError, match="is a folder"):
        write_traces(run, "jsonl", tmp_path)
    with pytest.raises(KvatlasError, match="cannot be written"):
        write_traces(run, "jsonl", run / "run.sqlite" / "x.jsonl")
    with pytest.raises(KvatlasError, match="no map to write"):
        csv_text([])
    with Store.create(tmp_path / "empty"):
        pass
    with pytest.raises(KvatlasError, match="is empty: no sweep was started"):
        write_traces(tmp_path / "empty", "parquet", tmp_path / "x")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    out = tmp_path / "out.txt"
    out.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(out) as part:
        part.write_text("half \ud800", "utf-8")
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_further_metrics_are_columns(tmp_path):
    run = maze_run(tmp_path / "run", {("A", Setting.from_parameters("full")): 0.3}, problems=10)
    write_traces(run, "jsonl", tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text("utf-8").splitlines()]
    graded = [row for row in rows if row["status"] == "ok"]
    assert 0 < len(graded) < 20
    assert all(0 <= row["progress_valid"] <= 1 and row["first_error"] for row in graded)
    assert all("recall" not in row for row in rows if row["status"] == "truncated")
    write_traces(run, "parquet", tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    kinds = [str(table.schema.field(n).type) for n in ("recall", "first_error", "first_error_index")]
    assert kinds == ["double", "string", "int64"]
    assert table["recall"].null_count == 20 - len(graded)


def test_a_metric_whose_name_is_taken_gets_a_prefix():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=1)
    grade = Grade(True, 1.0, "7", Status.OK, {"ratio": 0.5, "beauty": 1.0})
    row = trace_record("key", trace(plan.expected[0], "p0", 0, True, grade=grade))
    assert (row["metric_ratio"], row["ratio"], row["beauty"]) == (0.5, 0.1, 1.0)
