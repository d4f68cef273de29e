"""The programs in bench/ that need minutes or a GPU run in small by `make deep`; what they found is read here.

tests/test_documented.py sees that what they import is there.
"""

import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program in this process and returns the document that it prints."""

    def call(name: str, *words: str) -> dict[str, Any]:
        monkeypatch.syspath_prepend(BENCH)
        monkeypatch.setattr(sys, "argv", [str(BENCH / name), *words])
        runpy.run_path(str(BENCH / name), run_name="__main__")
        document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return document

    return call


@pytest.mark.deep
def test_the_gpu_program_runs_on_a_cpu_in_small(tmp_path: Path, run: Run) -> None:
    result = run("gpu.py", "--tiny", "--out", str(tmp_path / "results" / "gpu.json"))
    assert result["hardware"]
    assert json.loads((tmp_path / "results" / "gpu.json").read_text()) == result
    parts = result["results"]
    assert [entry["by"] for entry in parts["steps"][1:]] == ["kvatlas", "generate"] * 2
    assert all(entry["equal_to_generate"] == entry["of"] == 3 for entry in parts["tokens"])
    assert len({entry["policy"] for entry in parts["compressions"]}) == 8
    assert {entry["policy"] for entry in parts["passes"]} == {"full", "h2o"}
    (swept,) = parts["sweep"]
    assert swept["planned_tokens"] == swept["decoded_tokens"]


@pytest.mark.deep
def test_decoding_is_measured_against_others_in_turns(run: Run, write_spec: Callable[..., Path]) -> None:
    words = ("--cases", "2x128", "--layers", "1", "--steps", "1", "--rounds", "1", "--demo", "1")
    result = run("decode.py", *words, "--grid", str(write_spec()))
    (case,) = result["results"]
    assert set(case["step_ms"]) == {"window", "dynamic", "static", "generate", "bits 8", "bits 4"}
    assert case["kv_bytes"]["bits 4"] < 0.8 * case["kv_bytes"]["bits 8"]
    assert case["kept"] < case["kv_tokens"] < case["budget"]
    roofline = case["roofline"]
    # Weights of one layer and of the head, and 2 x 128 tokens of 2 KB.
    assert roofline["read_bytes"] == pytest.approx(4 * result["parameters"] + 2 * 128 * 2048, rel=0.01)
    # Two sequences; the norms are the only parameters that are not multiplied.
    assert roofline["flops"] == pytest.approx(2 * (2 * result["parameters"] + 4 * 768 * 128), rel=0.01)
    assert (roofline["bound"] == "memory") == (roofline["reading_ms"] >= roofline["computing_ms"])
    assert roofline["share"] > 0
    assert 0 < case["overhead"] < 1
    assert [len(runs) for runs in result["demo"]["runs"].values()] == [1]
    assert result["demo"]["speed_of_first"] == {".": 1.0}


def test_more_gpus_take_less_time_in_the_model_of_a_published_grid(run: Run) -> None:
    result = run("scaling.py")
    hours = [result["hours"][gpus]["trees"] for gpus in ("1", "8", "64")]
    assert hours == sorted(hours, reverse=True)
    counted = kept("sweep_cost")["published"]["decoded_tokens"]
    assert result["tokens"] == {"separate": counted["separate"], "trees": counted["shared"]}


# The documents in bench/results are what documents quote.


def kept(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BENCH / "results" / f"{name}.json").read_text())
    return document


@pytest.mark.deep
def test_the_program_of_calibration_runs_in_small(tmp_path: Path, run: Run) -> None:
    parts = ["claims", "traces_of_three_values", "scan"]
    result = run("calibration.py", "--rounds", "20", "--out", str(tmp_path / "calibration.json"), "--only", *parts)
    assert list(result) == parts
    for part in result.values():
        assert part["rounds"] == 20
        for worst in part["worst"].values():
            assert worst["design"] in [row["design"] for row in part["rows"]]
    assert json.loads((tmp_path / "calibration.json").read_text()) == {"final": result}


def worst(part: str, measure: str) -> float:
    """Return the worst value in the kept calibration on the designs that were kept back."""
    return float(kept("calibration")["final"][part]["worst"][measure]["value"])


def test_the_kept_calibration_holds_on_the_worst_designs() -> None:
    assert worst("exact", "highest over_level") <= 0.0005
    assert worst("recommendation", "highest error") <= 0.05
    assert worst("scan", "highest error") <= 0.05
    for part in ("two_settings", "policies"):
        assert worst(part, "lowest coverage") >= 0.94
        assert worst(part, "highest contradictions") == 0
    assert worst("maps", "highest contradictions") == 0


def test_the_kept_rules_of_death_agree_with_walks_that_know_the_truth() -> None:
    languages = kept("death_rules")["languages"]
    assert set(languages) == {"CHAIN", "WORDS", "SEQBENCH"}
    languages |= kept("death_rules_ledgers")["languages"]
    assert "LEDGER" in languages
    assert all(one["agree"] >= 0.95 for one in languages.values())


def test_the_kept_causes_restore_more_than_random_tokens_do() -> None:
    summaries = [found["summary"] for found in kept("equal_arms")["numbers"].values()]
    assert len(summaries) >= 2
    assert all(summary["held_out"]["cause_over_random"]["low"] > 0 for summary in summaries)
    assert all(summary["replays"] <= 60 for summary in summaries)


def test_the_peak_of_a_command_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    measured = runpy.run_path(str(BENCH / "large_run.py"))["measured"]
    held = bytearray(600 * 2**20)
    assert measured("-c", "pass")["peak_mb"] < 200 < len(held) // 2**20
    assert measured("-c", "held = bytearray(300 * 2**20); held[::4096] = b'a' * len(held[::4096])")["peak_mb"] >= 300


def test_an_audit_finds_the_kept_numbers_and_one_wrong_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    audit, outcomes, real_gpu = (importlib.import_module(name) for name in ("audit", "outcomes", "real_gpu"))
    document = kept("real_gpu")
    stored = document["numbers"]["second"]
    of_second = document["outcomes"]["second"]
    computed = json.loads(json.dumps(real_gpu.part_numbers(of_second)))
    assert list(audit.differences(stored, computed)) == []

    right = outcomes.from_hex(of_second["settings"][0]["right"])
    right[0] = not right[0]
    of_second["settings"][0]["right"] = outcomes.to_hex(right)
    computed = json.loads(json.dumps(real_gpu.part_numbers(of_second)))
    faults = list(audit.differences(stored, computed))
    assert any("/settings/0/loses:" in fault for fault in faults)


@pytest.mark.parametrize("name", ["equal_arms", "fp8_rounding", "vllm_equality", "vllm_plugin"])
def test_numbers_and_pages_follow_from_the_kept_outcomes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(BENCH)
    audit = importlib.import_module("audit")
    assert audit.audit(name) == []


def test_error_rates_are_those_of_their_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    audit, error_rates = (importlib.import_module(name) for name in ("audit", "error_rates"))
    rows = error_rates.every_line()
    assert len(rows) > 20
    assert audit.missing_lines(rows, error_rates.PAGES) == []
    changed = rows[0].replace("5.0 %", "4.0 %")
    assert len(audit.missing_lines([changed], error_rates.PAGES)) == 1


def test_the_page_of_the_gpus_map_has_the_kept_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    real_gpu = importlib.import_module("real_gpu")
    lines = real_gpu.lines(kept("real_gpu")["numbers"])
    assert len(lines) == 24 + 2 + 6
    (page,) = real_gpu.PAGES
    assert set(lines) <= set((BENCH.parent / page).read_text().splitlines())
