"""Comparisons in pairs of policies, models and settings."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from kvatlas.api import Run
from kvatlas.core import Setting
from kvatlas.core.traces import policy_name
from kvatlas.stats.pairs import comparisons
from kvatlas.stats.systems import choose, pair, systems_of
from tests.stats.synthetic import grid, manifest, run_of, trace, traces


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
    return Run(run_of(plan, made, lose_at_most=60))


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
    assert comparisons(run_of(plan, kept)) == []


def test_models_meet_policy_by_policy():
    plan = manifest(grid("dynts", "random"), models=("one", "two"))
    between = [c for c in comparisons(run_of(plan, traces(plan))) if c.first == "one"]
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
    (between,) = comparisons(run_of(plan, traces(plan)))
    assert between.cells == 4


def test_policies_meet_whatever_their_own_parameters_are():
    settings = [*grid("snapkv", queries=32), *grid("rkv", queries=8)]
    plan = manifest(settings, benchmarks=("CHAIN6",))
    (between,) = comparisons(run_of(plan, traces(plan)))
    assert between.cells == 9


def test_bytes_of_a_cell_are_those_of_its_tokens() -> None:
    plan = manifest(grid("dynts"))
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(100, 7)) for cell in plan.expected))
    for cell in (traces_of_cell.cell for traces_of_cell in run_of(plan, traces(plan)).cells):
        assert cell.number("kv_memory") == pytest.approx(100 * cell.number("mean_kv_tokens") + 7)
        assert cell.number("kv_bytes_peak") == 100 * cell.number("peak_kv_tokens") + 7


def test_policies_of_files_are_shown_by_their_class():
    """In maps, comparisons and settings; with the file where two files have a class of one name."""
    of_files = ["/home/me/mine.py:Sinks", "other.py:Oldest"]
    plan = manifest(grid(*of_files), problems=20)
    run = run_of(plan, traces(plan))
    assert {name.policy for name in run.groups} == {"Sinks", "Oldest"}
    assert [(c.first, c.second) for c in comparisons(run)] == [("Sinks", "Oldest")]
    assert str(plan.expected[0].setting) == "Sinks(kv_budget=96, local_window=8, ratio=0.1)"
    assert plan.expected[0].setting.is_of("Sinks")

    same = ["mine.py:Sinks", "yours.py:Sinks"]
    plan = manifest(grid(*same), problems=20)
    run = run_of(plan, traces(plan))
    assert [name.policy for name in run.groups] == same * 2
    assert [(c.first, c.second) for c in comparisons(run)] == [tuple(same)]


def test_names_that_are_no_files_stay_whole():
    assert policy_name("triattention@paper") == "triattention@paper"
    assert policy_name("ours: version 2") == "ours: version 2"
