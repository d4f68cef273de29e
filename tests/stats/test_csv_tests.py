"""Maps of bare Pass@1: bounds, printed values, and effects of the axes."""

from dataclasses import replace

import numpy as np
import pytest

from kvatlas.core import KvatlasError
from kvatlas.report.description import one_page
from kvatlas.report.result import analyse
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.csv_tests import ONE_SAMPLE, bound_tests, bound_tests_of_maps, variance
from kvatlas.stats.map_tests import Basis
from kvatlas.stats.numerics.averages import least_p, level_intervals, permute_benchmarks
from kvatlas.stats.numerics.planning import detectable, problems_for
from kvatlas.stats.power import designs

HEAD = "model,benchmark,local_window,ratio,pass_at_1\n"


@pytest.fixture
def read(tmp_path):
    def _read(values, benchmark="AIME24", **options):
        rows = [
            f"M,{benchmark},{window},{ratio},{values[4 * i + j]}\n"
            for i, window in enumerate((500, 1000))
            for j, ratio in enumerate((0.1, 0.2, 0.3, 0.4))
        ]
        path = tmp_path / "map.csv"
        path.write_text(HEAD + "".join(rows))
        return read_maps(path, **options)

    return _read


def test_a_map_with_one_clear_cell_is_more_than_noise(read):
    maps = read([40, 42, 41, 90, 43, 40, 41, 42], problems=30, samples=16)
    (found,) = bound_tests_of_maps(maps).values()
    assert found.evidence
    assert found.plateau == ((500, 0.4),)
    assert found.basis is Basis.BOUND
    assert found.notes == ()


def test_without_samples_one_is_taken_and_said(read):
    (found,) = bound_tests_of_maps(read([40, 42, 41, 55, 43, 40, 41, 42])).values()
    assert not found.evidence
    assert len(found.plateau) == 8
    assert found.notes == (ONE_SAMPLE,)


def test_unknown_problems_give_no_verdict(read):
    assert bound_tests_of_maps(read([40] * 8, benchmark="MINE")) == {}
    assert len(bound_tests_of_maps(read([40] * 8, benchmark="MINE", problems=12))) == 1


@pytest.mark.parametrize("value", [0, 100])
def test_all_right_and_all_wrong_are_no_evidence(read, value):
    (found,) = bound_tests_of_maps(read([value] * 8)).values()
    assert (found.omnibus.p, found.evidence) == (1.0, False)
    assert not any(np.isnan(lost) for lost in found.may_lose.values())


def test_the_bound_rejects_at_most_as_often_as_it_should():
    """Maps of equal cells with problems of equal difficulty, the worst case: 5 % and three standard errors."""
    (item, *_) = read_maps("published:dynts_r1_llama")
    rng = np.random.default_rng(0)
    rejected = kept = 0
    for _ in range(400):
        values = rng.binomial(150, 0.45, size=20) / 150
        cells = {
            coord: replace(cell, estimate=replace(cell.estimate, value=float(value)))
            for (coord, cell), value in zip(item.cells.items(), values, strict=True)
        }
        drawn = replace(item, cells=cells)
        found = bound_tests(drawn, variance(drawn), 5)
        rejected += found.evidence
        kept += (2000, 0.3) in found.plateau
    assert rejected / 400 < 0.05 + 0.033
    assert kept / 400 > 0.95 - 0.033


PUBLISHED = [item for name in ("llama", "qwen") for item in read_maps(f"published:dynts_r1_{name}")]


def _values(maps):
    return np.array(
        [[[map_.cells[w, r].estimate.value for r in map_.axes[1][1]] for w in map_.axes[0][1]] for map_ in maps]
    )


def _p(*values, **options):
    return min(contrast.p for contrast in permute_benchmarks(*values, **options)[0])


def test_the_published_maps_show_a_ratio_effect_and_nothing_else():
    (tenth, *_), (below, *_) = permute_benchmarks(_values(PUBLISHED))
    assert tenth.p < 2e-4
    assert tenth.value == pytest.approx(-0.0155, abs=1e-4)
    assert below == 8
    assert tenth.high < 0
    # Benchmarks as units, since both models answer the same problems; p and limits belong together.
    by_benchmark, _ = permute_benchmarks(_values(PUBLISHED), [map_.benchmark for map_ in PUBLISHED])
    assert by_benchmark[0].p == pytest.approx(0.0077, abs=0.002)
    assert all((level.p <= 0.05) == (level.high < 0 or level.low > 0) for level in by_benchmark)
    assert _p(_values(PUBLISHED).transpose(0, 2, 1)) > 0.2


def test_maps_of_one_benchmark_are_one_unit():
    """Two models on the same problems, whose difficulty moves both alike: an order for each would reject too often."""
    rng = np.random.default_rng(1)
    shared = np.repeat(rng.normal(size=(200, 4, 1, 5)), 2, axis=1)
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    together, apart = (
        np.mean([_p(values, names, draws=400, seed=n) <= 0.05 for n, values in enumerate(shared)])
        for names in (groups, None)
    )
    assert together <= 0.05 + 0.047 < apart


def test_a_level_that_is_lower_is_found_with_its_size():
    rng = np.random.default_rng(1)
    values = rng.normal(0, 0.01, (6, 4, 5))
    values[..., 2] -= 0.05
    contrasts, _ = permute_benchmarks(values, draws=2_000)
    assert min(contrasts, key=lambda contrast: contrast.p) == contrasts[2]
    assert contrasts[2].low < -0.05 < contrasts[2].high


def test_problems_to_detect_two_points():
    assert problems_for(0.02, 0.05) == pytest.approx(980, rel=0.005)
    assert problems_for(0.02, 0.2) == pytest.approx(3_920, rel=0.005)
    assert detectable(982, 0.05) == pytest.approx(0.02, abs=1e-4)
    with pytest.raises(KvatlasError, match="between 0 and 100 points; 0 was given"):
        designs([30], 0.0)


def test_equal_levels_have_no_effect_by_rounding() -> None:
    rows = np.random.default_rng(1).random((6, 5, 1))
    values = np.repeat(rows, 3, axis=2)
    values[..., 0] = np.nextafter(values[..., 0], 0)
    contrasts, below = permute_benchmarks(values, draws=500)
    assert [(contrast.value, contrast.p) for contrast in contrasts] == [(0.0, 1.0)] * 3
    assert below == [0, 0, 0]


def grid_of(tmp_path, values, problems=60, benchmarks=("A",)):
    """A CSV map of three windows and three ratios for each benchmark, whose values [window, ratio] are given."""
    rows = [
        f"M,{name},{window},{ratio},{values[i][j]},{problems}\n"
        for name in benchmarks
        for i, window in enumerate((8, 16, 32))
        for j, ratio in enumerate((0.1, 0.3, 0.5))
    ]
    path = tmp_path / "map.csv"
    path.write_text("model,benchmark,local_window,ratio,pass_at_1,problems\n" + "".join(rows))
    return analyse([path])


def test_a_ratio_that_halves_the_value_is_found_on_one_map(tmp_path):
    result = grid_of(tmp_path, [[33.3, 80.0, 85.0], [48.3, 83.3, 86.7], [51.7, 81.7, 86.7]])
    (ratio,) = [effect for effect in result.effects if effect.axis == "ratio"]
    (window,) = [effect for effect in result.effects if effect.axis == "local_window"]
    assert ratio.is_proven
    assert not window.is_found
    assert ratio.strongest[1] == 0.1
    assert window.hidden < 0.5
    page = one_page(result)
    assert "ratio 0.1 is 39.5 points below 0.3 and 0.5 (-66.3 to -5.9, p 0.023)" in page
    assert "no difference between the settings is found" not in page
    even = grid_of(tmp_path, [[80.0, 81.7, 80.0]] * 3)
    assert not any(effect.is_found for effect in even.effects)
    assert "In 1 of 1 map no difference between the settings is found" in one_page(even)


def test_intervals_of_levels_rarely_find_what_is_not_there():
    """Cells of a problem share their outcomes, wholly or not at all; two levels are equal and one is not."""
    rng = np.random.default_rng(0)
    for share in (0.0, 1.0):
        wrong = missed = 0
        for _ in range(200):
            common = rng.random((60, 1, 1)) < 0.6
            own = rng.random((60, 3, 3)) < 0.6
            grades = np.where(rng.random((60, 1, 1)) < share, common, own).astype(float)
            grades[:, :, 2] *= 0.2
            contrasts = level_intervals(grades.mean(0)[None], [60])
            truth = [0.6 - 0.36, 0.6 - 0.36, 0.12 - 0.6]
            wrong += any(not one.low <= true <= one.high for one, true in zip(contrasts, truth, strict=True))
            missed += contrasts[2].p > 0.05
        assert wrong <= 10
        assert missed < 20


def test_permutation_is_left_to_maps_of_enough_benchmarks(tmp_path):
    assert least_p(1, 4) == 1
    assert least_p(4, 4) < 1e-4
    values = [[33.3, 80.0, 85.0], [48.3, 83.3, 86.7], [51.7, 81.7, 86.7]]
    few = grid_of(tmp_path, values, benchmarks=("A", "B"))
    many = grid_of(tmp_path, values, benchmarks=("A", "B", "C", "D"))
    assert {effect.maps for effect in few.effects} == {0}
    assert {effect.maps for effect in many.effects} == {4}


@pytest.mark.parametrize("lower", [100.0, 80.0])
def test_one_limit_is_told_of_a_level_and_none_that_says_nothing(tmp_path, lower):
    """The binomial bound of the whole map is no second answer beside the limits of the levels."""
    values = np.array([[lower, 100.0, 100.0]] * 3)
    page = one_page(grid_of(tmp_path, values))
    assert "no effect of ratio is proven" in page
    assert page.count("a level may lie up to") == 2
    assert "a level of an axis may lie up to" not in page
    assert "100.0 points" not in page
