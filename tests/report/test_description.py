"""Descriptions: the JSON's shape and numbers, and their Markdown."""

import json
from dataclasses import replace

import pytest

from kvatlas.core import Grade, KvatlasError, Note, NoteKind, Status
from kvatlas.report.description import describe, p_text
from kvatlas.report.description_json import to_json
from kvatlas.report.markdown import as_text
from kvatlas.report.summary import one_page
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import BINOMIAL_NOTE, with_binomial_bounds
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.pairs import comparisons
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import gather
from kvatlas.stats.validity import findings
from tests.stats.synthetic import grid, manifest, traces


@pytest.fixture(scope="module")
def description():
    return describe(with_binomial_bounds(read_maps("published:dynts_r1_llama")))


@pytest.fixture(scope="module")
def published(description):
    return to_json(description)


def test_the_documented_keys_are_there(published):
    assert {"maps", "means", "recommendation", "notes"} <= set(published)
    keys = {"model", "benchmark", "metric", "axes", "cells", "problems", "samples", "mean", "min", "max", "peaks",
            "omnibus", "evidence_of_difference", "plateau", "samples_to_decide"}  # fmt: skip
    for item in (*published["maps"], *published["means"]):
        assert keys <= set(item)
        assert set(item["omnibus"]) == {"statistic", "p", "method"}
        assert all(set(peak) == {"local_window", "ratio", "value", "low", "high"} for peak in item["peaks"])
        assert all(set(cell) == {"local_window", "ratio"} for cell in item["plateau"])
        assert isinstance(item["samples_to_decide"], int)
    assert json.loads(json.dumps(published, allow_nan=False)) == published


def test_the_numbers_are_percent(published):
    first = published["maps"][0]
    assert (first["min"], first["max"], first["mean"]) == (39.3, 49.3, 44.36)
    assert first["axes"] == {"local_window": [500, 1000, 2000, 3000], "ratio": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert (first["cells"], first["problems"], first["samples"]) == (20, 30, 5)
    assert [(p["local_window"], p["ratio"], p["value"]) for p in first["peaks"]] == [
        (1000, 0.2, 49.3),
        (2000, 0.3, 49.3),
    ]
    assert first["peaks"][0]["low"] == pytest.approx(30.85, abs=0.05)
    (mean,) = published["means"]
    assert (mean["benchmark"], mean["problems"]) == ("mean of 4", 298)


def test_the_published_maps_show_a_ratio_effect_and_no_peak():
    """By the bound none of the eight maps, nor their means, shows a difference; pooled, ratio 0.1 is below the rest."""
    both = [item for name in ("llama", "qwen") for item in read_maps(f"published:dynts_r1_{name}")]
    description = describe(with_binomial_bounds(both))
    result = to_json(description)
    assert [item["evidence_of_difference"] for item in (*result["maps"], *result["means"])] == [False] * 10
    # Standard deviations over cells against the binomial standard error of one cell, as published beside the maps.
    spreads = [(round(m["stability"]["spread"], 2), round(m["stability"]["noise"], 2)) for m in result["maps"]]
    assert spreads == [
        (2.75, 4.06), (1.75, 3.63), (1.29, 2.39), (1.05, 1.58), (2.81, 4.06), (1.78, 3.87), (1.13, 2.36), (0.98, 1.59)
    ]  # fmt: skip
    assert [len(item["plateau"]) for item in result["maps"]] == [20] * 8
    assert not any(effect["trend"]["supported"] for item in result["maps"] for effect in item["effects"])
    assert [len(across["good_for_all"]) for across in result["across"]] == [20, 20]
    (between,) = result["comparisons"]
    assert (between["first"], between["second"]) == ("R1-Llama", "R1-Qwen")
    assert between["low"] < between["difference"] < 0 < between["high"]
    assert any("unlike colour scales" in note for note in result["notes"])
    # 500 tokens and a fifth of the other 4,500 stay after a compression: the cheapest that is not shown to be worse.
    assert [(c["setting"], c["kept_tokens_mean"], c["shown"], c["loses"]) for c in result["recommendation"]["all"]] == [
        ("dynts(kv_budget=5000, local_window=500, ratio=0.2)", 1400, None, None)
    ] * 2
    ratio = next(effect for effect in result["effects"] if effect["axis"] == "ratio")
    assert (ratio["over"], ratio["below"][0], ratio["levels"][0]["level"]) == ("8 maps", 8, 0.1)
    assert ratio["adjusted_p"] < 2e-4
    assert ratio["levels"][0]["high"] < 0
    assert next(effect for effect in result["effects"] if effect["axis"] == "local_window")["adjusted_p"] > 0.2
    assert result["peak_p"] > 0.2
    text = as_text(description)
    assert "0 of 8 maps show a difference between their cells" in text
    assert text.count("No difference between the cells is shown") == 10
    page = one_page(description)
    assert "8 maps: ratio 0.1 lies 1.5 points below the rest, in 8 of 8 maps" in page
    assert "That a single cell stands out is not shown" in page
    assert "noise" not in page + text


def test_the_published_mean_alone_tells_its_peak_and_what_it_cannot_tell():
    description = describe(with_binomial_bounds(read_maps("published:dynts_r1_qwen_mean")))
    result = to_json(description)
    (peak,) = result["maps"][0]["peaks"]
    assert peak == {"local_window": 2000, "ratio": 0.4, "value": 56.3, "low": None, "high": None}
    assert result["maps"][0]["evidence_of_difference"] is None
    assert "a mean tells only together with the maps of its benchmarks" in as_text(description)


def test_markdown_has_five_sections_and_the_numbers(description):
    text = as_text(description)
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# Overview", "# Components/Axes", "# Detailed Analysis", "# Key Observations", "# Interpretation",
    ]  # fmt: skip
    assert "49.3 (30.8–67.9) at local_window 2000, ratio 0.3" in text
    assert text.count(BINOMIAL_NOTE.text) == 1
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ") and " | – |" in line}
    assert widths == {13}


def test_every_sentence_has_its_number(description):
    for line in as_text(description).splitlines():
        if line.startswith("- ") or (line and line[0].isalpha()):
            assert any(mark.isdigit() for mark in line) or line[2:] == BINOMIAL_NOTE.text, line


def test_trends_are_claimed_where_a_test_supports_them():
    plan = manifest(grid("dynts"), problems=40)
    run = list(traces(plan, lambda s: {0.1: 0.1, 0.3: 0.5, 0.5: 0.9}.get(s.values.get("ratio"), 0.9)))
    analysis = RunAnalysis(RunData(plan, run))
    description = describe(analysis.maps, verdicts=analysis.verdicts)
    result = to_json(description)
    trends = {effect["axis"]: effect["trend"] for effect in result["maps"][0]["effects"]}
    assert trends["ratio"]["supported"]
    assert trends["ratio"]["value"] > 50
    assert not trends["local_window"]["supported"]
    text = as_text(description)
    assert "Pass@1 rises along ratio from 0.1 to 0.5: +" in text
    assert "No trend along local_window from 8 to 32 is supported" in text
    assert {cell["ratio"] for cell in result["means"][0]["plateau"]} == {0.5}
    assert "The cells differ: " in text


def test_comparisons_baselines_and_notes_of_a_run():
    plan = manifest(grid("dynts", "random"))
    kept = [t for t in traces(plan, lambda s: 0.9 if s.policy == "dynts" else 0.3) if t[1].problem != "p0"]
    maps = maps_of_run(RunData(plan, kept, partial=True))
    compared = comparisons(RunData(plan, kept))
    described = describe(maps, comparisons=compared, notes=[Note(NoteKind.FIXED, "by hand")])
    description = to_json(described)
    first = description["comparisons"][0]
    assert (first["first"], first["second"], first["problems"], first["note"]) == ("dynts", "random", 22, None)
    assert 40 < first["difference"] < 80
    assert description["maps"][0]["baselines"][0]["setting"] == "full"
    text = as_text(described)
    assert "Paired comparisons: " in text
    assert all(item["p"] <= item["p_bh"] <= item["p_holm"] for item in description["comparisons"])
    assert "< 0.001" in text
    assert "- by hand.\n" in text
    assert "PARTIAL" in text


def test_findings_stand_first_and_nothing_is_recommended_from_a_vacuous_map():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",))
    run = [
        (key, replace(item, usage=replace(item.usage, compressions=0), grade=Grade(False, 0.0, None, Status.NO_ANSWER)))
        for key, item in traces(plan)
    ]
    cells = gather(plan, run)
    analysis = RunAnalysis(RunData(plan, run))
    limits = findings(cells)
    for chosen in (analysis.choices, None):
        described = describe(analysis.maps, verdicts=analysis.verdicts, choices=chosen, findings=limits)
        description = to_json(described)
        assert json.loads(json.dumps(description, allow_nan=False)) == description
        assert [finding["kind"] for finding in description["findings"]] == ["unanswered", "uncompressed", "no_choice"]
        assert description["maps"][0]["validity"] == {
            "traces": 216, "bounded": 216, "compressed": 0, "no_answer": 216, "truncated": 0, "settings": 9,
            "identical": [], "same": False, "vacuous": "uncompressed",
        }  # fmt: skip
        audit = description["maps"][0]["estimates"][0]["audit"]
        assert audit == {"problems": 12, "median": 0.0, "worst": 0, "none": 100.0, "no_choice": 100.0}
        (choice,) = description["recommendation"]["all"]
        assert (choice["setting"], choice["by_time"], choice["candidates"]) == (None, None, 9)
        text = as_text(described)
        first = "CHAIN6: 240 of 240 traces are without an answer (240) or truncated (0); they count as wrong."
        assert text.splitlines()[2] == f"- {first}"
        assert (
            "- tiny, CHAIN6: no setting is recommended, because none of the 216 traces under a KV budget was "
            "compressed.\n"
        ) in text
        assert "cheapest" not in text


def test_means_that_cannot_be_are_said():
    maps = read_maps("published:dynts_r1_llama")
    narrow = replace(maps[1], axes=(maps[1].axes[0], ("ratio", (0.1,))))
    described = describe([maps[0], narrow])
    description = to_json(described)
    assert description["means"] == []
    assert "No means over benchmarks: A mean needs equal axes" in description["notes"][0]
    assert "mean of" not in as_text(described)
    assert to_json(describe(maps, means=[]))["means"] == []


def test_nothing_to_describe():
    with pytest.raises(KvatlasError, match="no map"):
        describe([])


def test_p_values_have_three_places():
    assert [p_text(p) for p in (0.0004, 0.0312, 1.0)] == ["< 0.001", "0.031", "1.000"]
