"""What maps of bare Pass@1 can show: permutation within rows, granularity, and planning."""

import numpy as np
import pytest

from kvatlas.core import KvatlasError
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.bare_maps import axis_effect, implied_samples, peak_p, possible
from kvatlas.stats.inference import detectable, problems_for

PUBLISHED = [item for name in ("llama", "qwen") for item in read_maps(f"published:dynts_r1_{name}")]


def _values(maps):
    return np.array(
        [[[map_.cells[w, r].estimate.value for r in map_.axes[1][1]] for w in map_.axes[0][1]] for map_ in maps]
    )


def test_the_published_maps_show_a_ratio_effect_and_nothing_else():
    ratio = axis_effect(_values(PUBLISHED))
    assert ratio.p < 2e-4
    assert ratio.value[0] == pytest.approx(-0.0155, abs=1e-4)
    assert (ratio.below[0], ratio.maps) == (8, 8)
    assert ratio.high[0] < 0
    window = axis_effect(_values(PUBLISHED).transpose(0, 2, 1))
    assert window.p > 0.2
    assert peak_p(_values(PUBLISHED)) > 0.2


def test_size_of_the_permutation_test():
    rng = np.random.default_rng(0)
    p = [axis_effect(rng.normal(size=(4, 4, 5)), draws=400, seed=n).p for n in range(300)]
    assert np.mean(np.array(p) <= 0.05) <= 0.05 + 0.038
    assert np.mean([peak_p(rng.normal(size=(4, 4, 5)), draws=400, seed=n) <= 0.05 for n in range(200)]) <= 0.05 + 0.05


def test_a_level_that_is_lower_is_found_with_its_size():
    rng = np.random.default_rng(1)
    values = rng.normal(0, 0.01, (6, 4, 5))
    values[..., 2] -= 0.05
    result = axis_effect(values, draws=2_000)
    assert result.level_p.argmin() == 2
    assert result.low[2] < -0.05 < result.high[2]
    with pytest.raises(KvatlasError, match="two of its levels"):
        axis_effect(values[..., :1])


def test_granularity_by_hand():
    assert not possible("43.7", 150)
    assert possible("43.3", 150)
    assert possible("44.0", 150)


def test_the_published_maps_have_five_samples():
    texts = [f"{100 * cell.estimate.value:.10g}" for cell in PUBLISHED[0].cells.values()]
    assert implied_samples(texts, 30) == 5
    assert implied_samples(["50.0"], 30) is None
    assert implied_samples(["43.7", "43.8", "43.9", "44.1"], 1) is None


def test_problems_to_detect_two_points():
    assert problems_for(0.02, 0.05) == pytest.approx(980, rel=0.005)
    assert problems_for(0.02, 0.2) == pytest.approx(3_920, rel=0.005)
    assert detectable(982, 0.05) == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(KvatlasError, match="between 0 and 100 points; 0 was given"):
        problems_for(0.0, 0.05)
    with pytest.raises(KvatlasError, match="discordance"):
        problems_for(0.02, 0.0)
