"""Comparisons in pairs, and which costs of what is chosen are ties."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from kvatlas.api import Run
from kvatlas.core import Setting
from kvatlas.stats.pairs import CHOSEN, SELECTED, comparisons
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import choose, pair, systems_of
from tests.stats.synthetic import WINDOWS, grid, manifest, setting, trace, traces


def _chance(item):
    return {"dynts": 0.7, "random": 0.3, "window": 0.2, "full": 0.9}[item.policy]


def test_policies_meet_at_equal_parameters_pooled_over_benchmarks():
    plan = manifest(grid("dynts", "random"))
    between = [c for c in comparisons(RunData(plan, traces(plan, _chance))) if not c.note]
    assert [(c.benchmark, c.first, c.second, c.cells) for c in between] == [("2 benchmarks", "dynts", "random", 18)]
    difference = between[0].difference
    assert (difference.problems, difference.pairs) == (24, 18 * 12 * 2)
    assert difference.low < 0.4 < difference.high
    assert difference.p < 0.001


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
    """Of policies over all cells, of two settings, of systems on the pairwise figure, and beside a recommendation."""
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

    (choice,) = unequal.recommend()
    chosen = choice.by_memory.setting
    (against,) = choice.against[chosen.id].values()
    (same,) = unequal.compare(" ".join([chosen.policy, *(f"{k}={v}" for k, v in chosen.parameters)]), "full")
    assert astuple(same.difference)[:4] == pytest.approx(astuple(against)[:4])


def test_a_policy_with_one_of_the_axes_meets_at_that_axis():
    beside = [Setting.of("window", kv_budget=96, local_window=w) for w in WINDOWS]
    plan = manifest([*grid("dynts"), *beside], benchmarks=("CHAIN6",))
    between = [c for c in comparisons(RunData(plan, traces(plan, _chance))) if not c.note]
    assert [(c.benchmark, c.first, c.second, c.cells) for c in between] == [("CHAIN6", "dynts", "window", 9)]


def test_policies_that_never_agree_do_not_meet():
    other = [Setting.of("random", kv_budget=64, local_window=w, ratio=r) for w in (8, 16) for r in (0.1, 0.3)]
    plan = manifest([*grid("dynts"), *other])
    assert all(c.note for c in comparisons(RunData(plan, traces(plan, _chance))))


def test_the_best_cell_meets_each_baseline_and_is_said_to_be_chosen():
    plan = manifest(grid("dynts"))
    best = setting("dynts", 16, 0.3)
    result = comparisons(RunData(plan, traces(plan, lambda s: 1.0 if s == best else 0.2)))
    assert [(c.model, c.benchmark, c.second, c.note) for c in result] == [
        ("tiny", "CHAIN6", "full", CHOSEN.format(9)),
        ("tiny", "CHAIN8", "full", CHOSEN.format(9)),
    ]
    assert result[0].first == "best dynts cell (local_window=16, ratio=0.3)"
    assert result[0].difference.value == pytest.approx(0.8, abs=0.2)


def test_traces_that_do_not_overlap_are_not_compared():
    plan = manifest(grid("dynts"), benchmarks=("CHAIN6",))
    kept = [(key, trace) for key, trace in traces(plan) if (trace.problem == "p0") == (trace.setting.policy == "full")]
    assert comparisons(RunData(plan, kept)) == []


def test_a_best_cell_that_is_behind_keeps_its_p_value():
    plan = manifest(grid("dynts"))
    result = comparisons(RunData(plan, traces(plan, lambda s: 0.9 if s.policy == "full" else 0.1)))
    assert {c.note for c in result} == {SELECTED}


def test_models_meet_policy_by_policy():
    plan = manifest(grid("dynts", "random"), models=("one", "two"))
    between = [c for c in comparisons(RunData(plan, traces(plan))) if c.first == "one"]
    assert [(c.model, c.first, c.second, c.cells, c.note) for c in between] == [
        ("one, two", "one", "two", 18, "dynts"),
        ("one, two", "one", "two", 18, "random"),
    ]
    assert all(c.difference.low < 0 < c.difference.high for c in between)


def test_costs_that_are_not_shown_to_be_higher_are_ties():
    """The extra costs: 0.5 %, 3 % with a large spread, 3 % with hardly any, and 10 % of all others."""
    settings = grid("dynts")
    plan, rng = manifest(settings, problems=120, samples=1), np.random.default_rng(0)
    extra = dict.fromkeys(settings, (10.0, 0.1))
    extra |= dict(zip(settings, [(0.0, 0.1), (0.5, 0.1), (3.0, 40.0), (3.0, 0.1)], strict=False))
    traces = []
    for expected in plan.expected:
        more, spread = extra.get(expected.setting, (0.0, 0.0))
        noise = rng.normal(0, spread, 120)
        for problem, off in zip(expected.problems, noise - noise.mean(), strict=True):
            item = trace(expected, problem, 0, correct=True)
            usage = replace(item.usage, mean_kv_tokens=100 + more + off, seconds=(100 + more) / 100)
            traces.append((expected.run_key, replace(item, usage=usage)))
    (choice,) = RunAnalysis(RunData(plan, traces)).choices
    assert choice.by_memory.setting == choice.by_time.setting == settings[0]
    assert (choice.tied, choice.tied_by_time) == (2, 1)
