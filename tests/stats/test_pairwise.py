from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvatlas.core import KvatlasError, Setting
from kvatlas.stats.systems import ModelSetting, correlation, pair, pairs_of


def system(name: str, values: list[float] | np.ndarray, depths: np.ndarray | None = None) -> ModelSetting:
    outcomes = {("B", str(i)): {0: float(value)} for i, value in enumerate(values)}
    about = {} if depths is None else {("B", str(i)): {"L": float(depth)} for i, depth in enumerate(depths)}
    return ModelSetting(name, Setting.of("full"), outcomes, about)


def test_shares_and_difference_by_hand() -> None:
    first, second = system("a", [0.2, 0.5, 1.0, 0.9]), system("b", [0.4, 0.5, 0.0, 0.7])
    first.outcomes["B", "9"] = {0: 1.0}
    second.outcomes["B", "0"] = {0: 0.0, 1: 0.8}
    result = pair(first, second)
    assert len(result.places) == 4
    assert (result.above, result.on, result.below) == (0.25, 0.25, 0.5)
    value, low, high = result.difference.value, result.difference.low, result.difference.high
    assert value == pytest.approx((-0.2 + 0 + 1.0 + 0.2) / 4)
    assert low < 0 < value < high
    assert result.given_depth is None
    data = result.to_json("a", "b")
    assert (data["x"], data["problems"], data["above"], data["spearman_given_L"]) == ("a", 4, 0.25, None)


def test_every_pair_once_and_in_order() -> None:
    four = [system(name, [0.1, 0.6, 0.3]) for name in "abcd"]
    assert [(i, j) for i, j, _ in pairs_of(four)] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    with pytest.raises(KvatlasError, match="needs two or more systems; there is 1"):
        pairs_of(four[:1])
    with pytest.raises(KvatlasError, match="have 1 problems in common"):
        pair(four[0], system("e", [0.3]))


def test_spearman_is_scipys_and_its_interval_covers() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    truth = 6 / np.pi * np.arcsin(0.6 / 2)
    for run in range(100):
        x = generator.standard_normal(60)
        y = 0.6 * x + 0.8 * generator.standard_normal(60)
        result = correlation(np.stack([x, y]), run)
        assert result is not None
        assert result.value == pytest.approx(stats.spearmanr(x, y).statistic)
        covered += result.low <= truth <= result.high
    assert 0.9 <= covered / 100 <= 1


def test_a_shared_depth_alone_correlates_two_models_and_is_taken_out() -> None:
    generator = np.random.default_rng(1)
    depths = generator.integers(4, 60, 400).astype(float)
    fall = np.exp(-depths / 30)
    first, second = (np.clip(fall + 0.1 * generator.standard_normal(400), 0, 1) for _ in range(2))
    result = pair(system("a", first, depths), system("b", second, depths))
    assert result.spearman is not None
    assert result.given_depth is not None
    assert result.spearman.value > 0.6
    assert result.given_depth.low < 0 < result.given_depth.high


def test_what_does_not_vary_has_no_correlation() -> None:
    assert correlation(np.array([[1.0, 1.0, 1.0], [0.1, 0.2, 0.3]])) is None
    depths = np.array([1.0, 2.0, 3.0])
    assert correlation(np.array([[0.1, 0.2, 0.3], [0.3, 0.1, 0.2], depths])) is None
