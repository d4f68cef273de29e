"""Do maps agree, and which one fits the mean: on a shortened copy of the conflicting transcription."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.core import KvatlasError
from kvatlas.report.check import as_text, check_maps, to_json
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.pairs.agreement import ROUNDING, agreement, fit_to_mean

#: The rows of another reading of the R1-Llama figure: 500 to 3,000 tokens at ratios 0.1 and 0.5 on four benchmarks.
CONFLICTING = Path(__file__).parents[1] / "data" / "conflicting_r1_llama.csv"


@pytest.fixture(scope="module")
def maps():
    published, mean = (read_maps(f"published:dynts_r1_llama{end}") for end in ("", "_mean"))
    return published, read_maps(CONFLICTING), mean


def test_the_wrong_reading_is_found_out(maps):
    published, conflicting, mean = maps
    checked = check_maps({"published": published, "other": conflicting}, mean, ROUNDING)
    result = to_json(checked)
    assert (result["agree"], result["common"], len(result["conflicts"])) == (False, 32, 25)
    assert result["mean"]["published"] == {"checked": 20, "fitting": 20, "largest": 0.05}
    assert result["mean"]["other"]["fitting"] < result["mean"]["other"]["checked"] == 8
    assert result["right"] == "published"
    text = as_text(checked)
    assert "The maps conflict in 25 of 32 common cells" in text
    assert "So published is right and other is not" in text
    assert text.count("| R1-Llama |") == 25
    # Two measurements that differ by so little would be no surprise.
    assert result["p"] > 0.05


def test_a_map_agrees_with_itself(maps):
    checked = check_maps({"one": maps[0], "two": maps[0]}, None, ROUNDING)
    result = to_json(checked)
    assert (result["agree"], result["conflicts"], result["largest"], result["mean"], result["right"]) == (
        True,
        [],
        0,
        None,
        None,
    )
    assert "none of their 80 common cells differs by more than 0.05 points" in as_text(checked)


def test_a_mean_that_fits_both_or_none_does_not_decide(maps):
    published, _, mean = maps
    both = check_maps({"one": published, "two": published}, mean, ROUNDING)
    assert both.right is None
    assert "The mean does not tell which of the 2 is right: 2 of them fit it in every cell" in as_text(both)


def test_large_differences_are_more_than_sampling_noise(maps):
    shifted = [
        replace(map_, cells={p: replace(c, estimate=replace(c.estimate, value=0.02)) for p, c in map_.cells.items()})
        for map_ in maps[0]
    ]
    result = agreement(maps[0], shifted)
    assert result.p is not None
    assert result.p < 0.001
    assert "more than sampling noise" in as_text(check_maps({"a": maps[0], "b": shifted}, None, ROUNDING))


def test_nothing_in_common_is_refused(maps):
    qwen = read_maps("published:dynts_r1_qwen")
    with pytest.raises(KvatlasError, match="no cell in common"):
        agreement(maps[0], qwen)
    with pytest.raises(KvatlasError, match="no cell to compare"):
        fit_to_mean(maps[0][:3], maps[2])
