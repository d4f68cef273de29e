"""Maps of bare Pass@1: what the binomial bound can and cannot say."""

from dataclasses import replace

import numpy as np
import pytest

from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.bare_maps import (
    ONE_SAMPLE,
    bound_verdict,
    model_difference,
    variance,
    verdicts_of_maps,
)
from kvatlas.stats.verdicts import Basis

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


def test_the_variance_is_that_of_independent_draws():
    (item, *_) = read_maps("published:dynts_r1_llama")
    centre = np.mean([cell.estimate.value for cell in item.cells.values()])
    assert variance(item) == pytest.approx(centre * (1 - centre) / 150)


def test_a_map_with_one_clear_cell_is_more_than_noise(read):
    maps = read([40, 42, 41, 90, 43, 40, 41, 42], problems=30, samples=16)
    (verdict,) = verdicts_of_maps(maps).values()
    assert verdict.evidence
    assert verdict.plateau == ((500, 0.4),)
    assert verdict.basis is Basis.BOUND
    assert verdict.notes == ()


def test_without_samples_one_is_taken_and_said(read):
    (verdict,) = verdicts_of_maps(read([40, 42, 41, 55, 43, 40, 41, 42])).values()
    assert not verdict.evidence
    assert len(verdict.plateau) == 8
    assert verdict.notes == (ONE_SAMPLE,)


def test_unknown_problems_give_no_verdict(read):
    assert verdicts_of_maps(read([40] * 8, benchmark="MINE")) == {}
    assert len(verdicts_of_maps(read([40] * 8, benchmark="MINE", problems=12))) == 1


@pytest.mark.parametrize("value", [0, 100])
def test_all_right_and_all_wrong_are_no_evidence(read, value):
    (verdict,) = verdicts_of_maps(read([value] * 8)).values()
    assert (verdict.omnibus.p, verdict.evidence, verdict.need.samples) == (1.0, False, None)
    assert not any(np.isnan(lost) for lost in verdict.may_lose.values())


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
        verdict = bound_verdict(drawn, variance(drawn), 5)
        rejected += verdict.evidence
        kept += (2000, 0.3) in verdict.plateau
    assert rejected / 400 < 0.05 + 0.033
    assert kept / 400 > 0.95 - 0.033


def test_models_are_compared_by_the_bound():
    llama, qwen = (read_maps(f"published:dynts_r1_{name}") for name in ("llama", "qwen"))
    result = model_difference(llama, qwen)
    centres = [
        np.mean([np.mean([c.estimate.value for c in map_.cells.values()]) for map_ in maps]) for maps in (llama, qwen)
    ]
    assert result.value == pytest.approx(centres[0] - centres[1])
    assert result.p > 0.05
    unknown = [
        replace(item, cells={p: replace(c, estimate=replace(c.estimate, problems=None)) for p, c in item.cells.items()})
        for item in qwen
    ]
    assert model_difference(llama, unknown) is None
