"""Do maps agree, and which one fits the mean: a copy of a conflicting transcription; do runs hold the same tokens."""

import json
import sqlite3
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.report.check import compare_maps, maps_as_text
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from tests.command_line import Call
from tests.stored import decode_run

#: The rows of another reading of the R1-Llama figure: 500 to 3,000 tokens at ratios 0.1 and 0.5 on four benchmarks.
CONFLICTING = Path(__file__).parents[1] / "data" / "conflicting_r1_llama.csv"


@pytest.fixture(scope="module")
def maps():
    published, mean = (read_maps(f"published:dynts_r1_llama{end}") for end in ("", "_mean"))
    return published, read_maps(CONFLICTING), mean


def test_the_wrong_reading_is_found_out(maps):
    published, conflicting, mean = maps
    result = compare_maps({"published": published, "other": conflicting}, mean)
    assert (result["agree"], result["common"], len(result["conflicts"])) == (False, 32, 25)
    assert result["mean"]["published"] == {"checked": 20, "fitting": 20, "largest": 0.05}
    assert result["mean"]["other"]["fitting"] < result["mean"]["other"]["checked"] == 8
    assert result["right"] == "published"
    text = maps_as_text(result)
    assert "The maps conflict in 25 of 32 common cells" in text
    assert "So published is right and other is not" in text
    assert text.count("| R1-Llama |") == 25


def test_a_map_agrees_with_itself_and_a_mean_that_fits_both_does_not_decide(maps):
    result = compare_maps({"one": maps[0], "two": maps[0]}, maps[2])
    assert [result[name] for name in ("agree", "conflicts", "largest", "right")] == [True, [], 0, None]
    text = maps_as_text(result)
    assert "no two of their 80 common cells differ by more than 0.05 points" in text
    assert "The mean does not tell which of the 2 is right: 2 of them fit it in every cell" in text


def test_runs_are_compared_token_by_token(tmp_path: Path, kvatlas: Call) -> None:
    """A run made again in another folder holds the same tokens; a changed token and a missing trace are found."""
    spec = {
        "models": ["embedded:tiny-llama"], "benchmarks": ["CHAIN4"], "problems": 2, "samples": 2,
        "sampling": {"temperature": 1.0, "max_new_tokens": 80},
        "settings": [{"policy": "window", "kv_budget": 64, "budget_over": "thinking"}],
        "axes": {"local_window": [4, 8], "every": [16]},
    }  # fmt: skip
    first, again = (decode_run(spec, tmp_path / name) for name in ("first", "again"))
    assert kvatlas.succeed("compare", first, again) == "All 12 common traces hold the same tokens.\n"
    with Store.open(first) as store:
        store.copy(tmp_path / "changed")
        run_key, trace = next(iter(store.traces()))
    with Store.open(tmp_path / "changed") as store:
        store.add(run_key, replace(trace, tokens=array("i", [*trace.tokens[:-1], 5])))
    with sqlite3.connect(tmp_path / "changed" / "run.sqlite") as changed:
        changed.execute("DELETE FROM traces WHERE problem != ? AND sample = 1", (trace.problem,))
    code, out, _ = kvatlas("compare", first, tmp_path / "changed", "--json")
    document = json.loads(out)
    assert (code, document["same"], document["common"], document["only"]) == (1, False, 9, [3, 0])
    (cell,) = document["differing"]
    assert cell["problems"] == [trace.problem]
    assert f"other tokens on 1 problems ({trace.problem})" in kvatlas("compare", first, tmp_path / "changed")[1]
