"""Comparisons in pairs of policies, models and settings."""

from dataclasses import astuple, replace

import numpy as np
import pytest

from kvatlas.api import Run
from kvatlas.stats.pairs import comparisons
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
