"""Comparisons in pairs of policies, models and settings, and the cost of a right answer against the full cache's."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from kvatlas.api import Run
from kvatlas.core import Setting, policy_name
from kvatlas.stats.numerics.ratios import cost_ratio, share_ratio
from kvatlas.stats.pairs import comparisons
from kvatlas.stats.prices import COSTS, prices
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, pair, systems_of
from tests.stats.synthetic import grid, manifest, trace, traces


@pytest.fixture(scope="module")
def unequal():
    """30 problems of CHAIN6, on which `dynts` is ahead of `random`, and 198 of CHAIN8, where it is behind."""
    plan, rng = manifest(grid("dynts", "random"), problems=198, samples=1), np.random.default_rng(0)
    short = {"CHAIN6": 30, "CHAIN8": 198}
    plan = replace(plan, expected=tuple(replace(c, problems=c.problems[: short[c.benchmark]]) for c in plan.expected))
    chances = {("CHAIN6", "dynts"): 0.7, ("CHAIN8", "random"): 0.65}
    made = [
        (cell.run_key, trace(cell, problem, 0, rng.random() < chances.get((cell.benchmark, cell.setting.policy), 0.5)))
        for cell in plan.expected
        for problem in cell.problems
    ]
    return Run(RunData(plan, made, lose_at_most=60))


def test_a_pooled_difference_is_that_of_the_means_shown(unequal):
    """Of policies over all cells, of two settings, and of systems on the pairwise figure."""
    means = {map_.policy: map_ for map_ in unequal.maps(mean=True)}
    pooled = [float(np.mean([cell.estimate.value for cell in means[name].cells.values()])) for name in means]
    (between,) = unequal.compare("dynts", "random")
    assert between.difference.value == pytest.approx(pooled[0] - pooled[1])
    assert between.difference.low < between.difference.value < between.difference.high

    at = (16, 0.3)
    own, other = means["dynts"].cells[at].estimate.value, means["random"].cells[at].estimate.value
    names = [f"{policy} local_window=16 ratio=0.3" for policy in ("dynts", "random")]
    (settings,) = unequal.compare(*names)
    systems = pair(*choose(systems_of([unequal.data], "pass@1"), names)).difference
    assert settings.difference.value == pytest.approx(own - other)
    assert astuple(systems)[:4] == pytest.approx(astuple(settings.difference)[:4])


def test_traces_that_do_not_overlap_are_not_compared():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",))
    kept = [(key, trace) for key, trace in traces(plan) if (trace.problem == "p0") == (trace.setting.policy == "full")]
    assert comparisons(RunData(plan, kept)) == []


def test_models_meet_policy_by_policy():
    plan = manifest(grid("dynts", "random"), models=("one", "two"))
    between = [c for c in comparisons(RunData(plan, traces(plan))) if c.first == "one"]
    assert [(c.model, c.first, c.second, c.cells, c.note) for c in between] == [
        ("one, two", "one", "two", 18, "dynts"),
        ("one, two", "one", "two", 18, "random"),
    ]
    assert all(c.difference.low < 0 < c.difference.high for c in between)


def test_policies_meet_at_equal_bits():
    bits = ({}, {"kv_bits": 4})
    settings = [
        Setting.from_parameters(policy, kv_budget=96, local_window=window, **of_bits)
        for policy in ("snapkv", "rkv")
        for window in (8, 16)
        for of_bits in bits
    ]
    plan = manifest(settings, benchmarks=("CHAIN6",), axes=(("kv_bits", (4, 16)), ("local_window", (8, 16))))
    (between,) = comparisons(RunData(plan, traces(plan)))
    assert between.cells == 4


def test_policies_meet_whatever_their_own_parameters_are():
    settings = [*grid("snapkv", queries=32), *grid("rkv", queries=8)]
    plan = manifest(settings, benchmarks=("CHAIN6",))
    (between,) = comparisons(RunData(plan, traces(plan)))
    assert between.cells == 9


def drawn(rng: np.random.Generator, problems: int) -> np.ndarray:
    """Return costs by problem and outcome; the first setting writes 20 % more and is right less often."""
    level = rng.normal(0, 1, problems)
    chance = 1 / (1 + np.exp(-level - 1))
    right = [rng.random((2, problems)) < chance * share for share in (0.8, 1.0)]
    costs = [
        300 * factor * np.exp(-0.2 * level) * (1.3 - 0.3 * own) for factor, own in zip((1.2, 1.0), right, strict=True)
    ]
    return np.stack([part.mean(0) for pair in zip(costs, right, strict=True) for part in pair])


def ratio_of(benchmarks):
    """Return the ratio of costs of a right answer of benchmarks [cost, right, full cost, full right] by problem."""
    shares = share_ratio([table[1] for table in benchmarks], [table[3] for table in benchmarks])
    return None if shares is None else cost_ratio([(table[0], table[2]) for table in benchmarks], shares)


def test_the_interval_covers_the_true_ratio() -> None:
    everything = drawn(np.random.default_rng(0), 400_000).mean(1)
    truth = everything[0] * everything[3] / everything[1] / everything[2]
    rng, hit = np.random.default_rng(1), 0
    for _ in range(200):
        ratio = ratio_of([drawn(rng, 30), drawn(rng, 30)])
        hit += ratio.low <= truth <= ratio.high
    assert hit / 200 >= 0.95


def test_benchmarks_weigh_alike_and_too_few_right_answers_have_no_limits() -> None:
    few, many = np.array([[100.0] * 3, [1.0] * 3, [100.0] * 3, [1.0] * 3]), np.ones((4, 30)) * 50.0
    many[0], many[1], many[3] = 300.0, 1.0, 1.0
    assert ratio_of([few, many]).value == pytest.approx(200 / 75)
    assert ratio_of([few * [[1], [0], [1], [1]]]) is None
    one_right = np.stack([np.ones(40), np.arange(40) < 1, np.ones(40), np.arange(40) < 1]).astype(float)
    assert ratio_of([one_right]).high == np.inf


def test_prices_of_a_run_are_those_of_its_traces() -> None:
    plan = manifest(grid("dynts"))
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(100, 7)) for cell in plan.expected))
    stored = list(traces(plan, lambda setting: 0.9 if setting.values.get("ratio", 1) > 0.2 else 0.4))
    run = RunData(plan, stored)
    for cell in (traces_of_cell.cell for traces_of_cell in run.cells):
        assert cell.mean_kv_bytes == pytest.approx(100 * cell.mean_kv_tokens + 7)
        assert cell.peak_kv_bytes == 100 * cell.peak_kv_tokens + 7
    found = prices(run)
    assert {price.cost for price in found} <= set(COSTS)
    full = next(
        price for price in found if price.setting == Setting.from_parameters("full") and price.cost == "output_tokens"
    )
    assert (full.ratio, full.low, full.high) == pytest.approx((1.0, 1.0, 1.0))
    own = [trace for _, trace in stored if trace.setting == full.setting]
    right = sum(trace.grade.correct for trace in own)
    assert full.value == pytest.approx(sum(trace.usage.output_tokens or 0 for trace in own) / right)
    worst = next(price for price in found if price.setting.values.get("ratio") == 0.1 and price.cost == "output_tokens")
    assert worst.low > 1.2


def test_policies_of_files_are_shown_by_their_class():
    """In maps, comparisons and settings; with the file where two files have a class of one name."""
    of_files = ["/home/me/mine.py:Sinks", "other.py:Oldest"]
    plan = manifest(grid(*of_files), problems=20)
    run = RunData(plan, traces(plan))
    assert {name.policy for name in run.groups} == {"Sinks", "Oldest"}
    assert [(c.first, c.second) for c in comparisons(run)] == [("Sinks", "Oldest")]
    assert str(plan.expected[0].setting) == "Sinks(kv_budget=96, local_window=8, ratio=0.1)"
    assert plan.expected[0].setting.is_of("Sinks")

    same = ["mine.py:Sinks", "yours.py:Sinks"]
    plan = manifest(grid(*same), problems=20)
    run = RunData(plan, traces(plan))
    assert [name.policy for name in run.groups] == same * 2
    assert [(c.first, c.second) for c in comparisons(run)] == [tuple(same)]


def test_names_that_are_no_files_stay_whole():
    assert policy_name("triattention@paper") == "triattention@paper"
    assert policy_name("ours: version 2") == "ours: version 2"
