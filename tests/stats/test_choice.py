"""What to choose: which costs are ties."""

from dataclasses import replace

import numpy as np

from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, trace


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
