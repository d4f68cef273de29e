"""Which settings of a run meet, and what comes out."""

import pytest

from kvatlas.core import Setting
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.pairs.comparisons import CHOSEN, SELECTED, comparisons
from tests.stats.synthetic import WINDOWS, grid, manifest, setting, traces


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
