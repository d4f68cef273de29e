"""Descriptions: the JSON's shape and numbers, and their Markdown."""

import json
from dataclasses import replace

import pytest

from kvatlas.core import KvatlasError
from kvatlas.report.words import as_text, cost, describe, p_text
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.comparisons import comparisons_of_run
from kvatlas.stats.estimates import BINOMIAL_NOTE, with_binomial_bounds
from kvatlas.stats.maps import maps_of_run
from tests.stats.synthetic import grid, manifest, traces


@pytest.fixture(scope="module")
def published():
    return describe(with_binomial_bounds(read_maps("published:dynts_r1_llama")))


def test_the_documented_keys_are_there(published):
    assert {"maps", "means", "recommendation", "notes"} <= set(published)
    keys = {"model", "benchmark", "metric", "axes", "cells", "problems", "samples", "mean", "min", "max", "peaks",
            "omnibus", "evidence_of_difference", "plateau", "samples_to_decide"}  # fmt: skip
    for one in (*published["maps"], *published["means"]):
        assert keys <= set(one)
        assert one["omnibus"] == {"statistic": None, "p": None, "method": None}
        assert (one["evidence_of_difference"], one["plateau"], one["samples_to_decide"]) == (None, None, None)
    assert set(published["recommendation"].values()) == {None}
    assert json.loads(json.dumps(published, allow_nan=False)) == published


def test_the_numbers_are_percent(published):
    first = published["maps"][0]
    assert (first["min"], first["max"], first["mean"]) == (39.3, 49.3, 44.36)
    assert first["axes"] == {"local_window": [500, 1000, 2000, 3000], "ratio": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert (first["cells"], first["problems"], first["samples"]) == (20, 30, None)
    assert [(p["local_window"], p["ratio"], p["value"]) for p in first["peaks"]] == [
        (1000, 0.2, 49.3),
        (2000, 0.3, 49.3),
    ]
    assert first["peaks"][0]["low"] == pytest.approx(32.5, abs=0.05)
    (mean,) = published["means"]
    assert (mean["benchmark"], mean["problems"]) == ("mean of 4", 298)


def test_markdown_has_the_numbers(published):
    text = as_text(published)
    assert text.startswith("# Overview\n")
    assert "49.3 (32.5–66.2) at local_window 2000, ratio 0.3" in text
    assert "# Means over benchmarks" in text
    assert text.count(BINOMIAL_NOTE) == 1
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {13}


def test_comparisons_baselines_and_notes_of_a_run():
    plan = manifest(grid("dynts", "random"))
    kept = [t for t in traces(plan, lambda s: 0.9 if s.policy == "dynts" else 0.3) if t[1].problem != "p0"]
    maps = maps_of_run(plan, kept, partial=True)
    description = describe(maps, comparisons=comparisons_of_run(plan, kept), notes=["by hand"])
    first = description["comparisons"][0]
    assert (first["first"], first["second"], first["problems"], first["note"]) == ("dynts", "random", 22, None)
    assert 40 < first["difference"] < 80
    assert description["maps"][0]["baselines"][0]["setting"] == "full"
    text = as_text(description)
    assert "# Paired comparisons" in text
    assert "< 0.001" in text
    assert "- by hand\n" in text
    assert "PARTIAL" in text


def test_means_that_cannot_be_are_said():
    maps = read_maps("published:dynts_r1_llama")
    narrow = replace(maps[1], axes=(maps[1].axes[0], ("ratio", (0.1,))))
    description = describe([maps[0], narrow])
    assert description["means"] == []
    assert "No means over benchmarks: A mean needs equal axes" in description["notes"][0]
    assert "# Means" not in as_text(description)
    assert describe(maps, means=[])["means"] == []


def test_nothing_to_describe():
    with pytest.raises(KvatlasError, match="no map"):
        describe([])


def test_small_words():
    assert [p_text(p) for p in (0.0004, 0.0312, 1.0)] == ["< 0.001", "0.031", "1.000"]
    assert cost(read_maps("published:dynts_r1_llama_mean")[0].cells[500, 0.1]) == []
    plan = manifest(grid("dynts"))
    assert cost(maps_of_run(plan, traces(plan, lambda _: 1.0))[0].cells[8, 0.1]) == [
        "12 problems", "2 samples each", "60 tokens kept on average", "96 at the peak", "100 tokens per answer",
        "0 truncated",
    ]  # fmt: skip
