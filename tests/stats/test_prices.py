"""The cost of a right answer against the full cache's."""

from dataclasses import replace

import numpy as np
import pytest

from kvatlas.core import Setting
from kvatlas.stats.prices import COSTS, price_ratio, prices
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, traces


def drawn(rng: np.random.Generator, problems: int) -> np.ndarray:
    """Return costs by problem and outcome; the first setting writes 20 % more and is right less often."""
    level = rng.normal(0, 1, problems)
    chance = 1 / (1 + np.exp(-level - 1))
    right = [rng.random((2, problems)) < chance * share for share in (0.8, 1.0)]
    costs = [
        300 * factor * np.exp(-0.2 * level) * (1.3 - 0.3 * own) for factor, own in zip((1.2, 1.0), right, strict=True)
    ]
    return np.stack([part.mean(0) for pair in zip(costs, right, strict=True) for part in pair])


def test_the_interval_covers_the_true_ratio() -> None:
    everything = drawn(np.random.default_rng(0), 400_000).mean(1)
    truth = everything[0] * everything[3] / everything[1] / everything[2]
    rng, hit = np.random.default_rng(1), 0
    for _ in range(400):
        ratio = price_ratio([drawn(rng, 30), drawn(rng, 30)])
        hit += ratio[1] <= truth <= ratio[2]
    assert 0.93 <= hit / 400 <= 0.98


def test_benchmarks_weigh_alike_and_no_right_answer_has_no_price() -> None:
    few, many = np.array([[100.0] * 3, [1.0] * 3, [100.0] * 3, [1.0] * 3]), np.ones((4, 30)) * 50.0
    assert price_ratio([few, few]) == pytest.approx((1.0, 1.0, 1.0))
    many[0], many[1], many[3] = 300.0, 1.0, 1.0
    ratio = price_ratio([few, many])
    assert ratio[0] == pytest.approx(200 / 75)
    assert price_ratio([few * [[1], [0], [1], [1]]]) is None


def test_prices_of_a_run_are_those_of_its_traces() -> None:
    plan = manifest(grid("dynts"))
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(100, 7)) for cell in plan.expected))
    stored = list(traces(plan, lambda setting: 0.9 if setting.values.get("ratio", 1) > 0.2 else 0.4))
    found = prices(RunData(plan, stored))
    assert {price.cost for price in found} <= set(COSTS)
    full = next(price for price in found if price.setting == Setting.of("full") and price.cost == "output_tokens")
    assert (full.ratio, full.low, full.high) == pytest.approx((1.0, 1.0, 1.0))
    own = [trace for _, trace in stored if trace.setting == full.setting]
    right = sum(trace.grade.correct for trace in own)
    assert full.value == pytest.approx(sum(trace.usage.output_tokens or 0 for trace in own) / right)
    worst = next(price for price in found if price.setting.values.get("ratio") == 0.1 and price.cost == "output_tokens")
    assert worst.low > 1.2
