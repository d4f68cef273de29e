from __future__ import annotations

import math

import numpy as np
import pytest

from kvatlas.core import KvatlasError
from kvatlas.stats.decay import fit

DEPTHS = np.arange(5, 105, 5)


def simulate(
    generator: np.random.Generator, depth: float, samples: int, spread: float
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """Ten problems at each depth; `spread` makes problems of one depth unlike, so that their samples agree."""
    outcomes, depths = {}, {}
    for i, at in enumerate(np.repeat(DEPTHS, 10)):
        chance = math.exp(-at / depth)
        if spread:
            # Keeps the mean chance: some problems are always solved or never, the others as often as before.
            drawn = generator.random()
            chance = chance if drawn > spread else float(generator.random() < chance)
        outcomes[i] = [float(generator.random() < chance) for _ in range(samples)]
        depths[i] = float(at)
    return outcomes, depths


@pytest.mark.parametrize(("depth", "samples", "spread"), [(10.0, 1, 0.0), (85.7, 1, 0.0), (40.0, 4, 0.7)])
def test_500_simulations_cover_the_true_depth_95_times_in_100(depth: float, samples: int, spread: float) -> None:
    generator, hits = np.random.default_rng(11), 0
    for _ in range(500):
        result = fit(*simulate(generator, depth, samples, spread))
        hits += result.low <= depth <= result.high
    assert 0.93 <= hits / 500 <= 0.97


def test_all_right_and_all_wrong_have_open_intervals() -> None:
    depths = {i: float(i + 1) for i in range(50)}
    right = fit({i: [1.0] for i in depths}, depths)
    assert (right.depth, right.high) == (math.inf, math.inf)
    assert right.low > 50
    wrong = fit({i: [0.0] for i in depths}, depths)
    assert wrong.low == wrong.depth == 0
    assert 1 < wrong.high < 3
    assert list(wrong(np.array([1.0, 5.0]))) == [0, 0]


@pytest.mark.parametrize(("outcomes", "depths"), [({}, {}), ({1: [0.5]}, {1: 3.0}), ({1: [1.0]}, {1: 0.0})])
def test_bad_input_is_one_sentence(outcomes: dict, depths: dict) -> None:
    with pytest.raises(KvatlasError, match="0 or 1, at depths above 0"):
        fit(outcomes, depths)
