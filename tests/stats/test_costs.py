"""Costs beside the full cache, and losses of maps that are not paired: values, coverage, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvatlas.core import Cell, Claim, Estimate, KvatlasError, Map, Setting, Trace
from kvatlas.stats.choice import choices
from kvatlas.stats.costs import COSTS, RATE, SECONDS, cost_ratios
from kvatlas.stats.csv_tests import unpaired_losses
from kvatlas.stats.losses import losses_of
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, run_of, traces

SHARE = 0.6


def timed(seed: int, problems: int = 30) -> RunData:
    """A run in which a setting takes 0.6 of the full cache's memory and time on average, with noise by problem."""
    plan = manifest(grid("dynts")[:1], problems=problems, samples=1)
    generator = np.random.default_rng(seed)

    def changed() -> Iterator[tuple[str, Trace]]:
        for key, trace in traces(plan):
            share = 1.0 if trace.setting.policy == "full" else SHARE
            # Means of 1, so that the ratio of the means is the share.
            noise = generator.gamma(4.0, 0.25, 2)
            usage = replace(trace.usage, mean_kv_tokens=100 * share * noise[0], seconds=share * noise[1])
            yield key, replace(trace, usage=usage)

    return run_of(plan, list(changed()))


def test_a_ratio_is_that_of_means_and_its_interval_covers_the_true_one() -> None:
    covered = 0
    for seed in range(120):
        run = timed(seed)
        (setting,) = [cell.setting for cell in run.cells if not cell.baseline][:1]
        ratio = cost_ratios(run, "tiny", SECONDS, {setting.id})[setting.id]
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= SHARE <= ratio.high
    # 95 % of 120 are 114; 106 or fewer have a chance below 1 in 2,000 if that holds.
    assert covered > 106

    (choice,) = choices(run, losses_of(run))
    by_memory = cost_ratios(run, "tiny", "memory", choice.settings)
    assert {id_: ratio.value for id_, ratio in by_memory.items()} == pytest.approx(
        {id_: saving.memory for id_, saving in choice.savings.items()}
    )
    # All traces have as many tokens, so that the rate is the inverse of the time.
    rate = cost_ratios(run, "tiny", RATE, choice.settings)
    assert rate[setting.id].value == pytest.approx(1 / ratio.value)
    assert rate[setting.id].low == pytest.approx(1 / ratio.high)


def test_costs_that_are_unknown_are_refused() -> None:
    run = timed(0, 4)
    with pytest.raises(KvatlasError, match=f"--cost: expected {', '.join(COSTS)}, got 'watts'"):
        cost_ratios(run, "tiny", "watts", ())
    without = run_of(plan := manifest(grid("dynts")[:1], baselines=(), problems=4), list(traces(plan)))
    with pytest.raises(KvatlasError, match="tiny has no full cache in this run"):
        cost_ratios(without, "tiny", SECONDS, ())


def bare(values: dict[tuple[int, float], float], problems: int, full: float, benchmark: str = "B") -> Map:
    def cell(policy: str, value: float) -> Cell:
        return Cell(Setting.from_parameters(policy), Estimate(value, None, None, problems, 1))

    axes = (("local_window", (8, 16)), ("ratio", (0.1, 0.2)))
    cells = {coord: cell("p", value) for coord, value in values.items()}
    return Map("m", benchmark, "pass@1", "p", axes, cells, {"full": cell("full", full)}, claim=Claim.LIKE)


def test_unpaired_losses_hold_together_and_need_problems_and_a_full_cache() -> None:
    values = {(8, 0.1): 0.5, (8, 0.2): 0.9, (16, 0.1): 0.8, (16, 0.2): 0.9}
    one = bare(values, 4000, 0.9)
    losses = unpaired_losses([one], 0.05)[one.name]
    assert [losses[coord].is_kept for coord in values] == [False, True, False, True]
    assert [losses[coord].is_broken for coord in values] == [True, False, True, False]
    for loss in losses.values():
        # The limits of all cells at once lie beyond those of one alone.
        assert loss.low < loss.value < loss.high < loss.limit
    both = unpaired_losses([one, bare(values, 4000, 0.9, "C")], 0.05)
    assert len(both) == 3
    assert both["m", "mean of 2", "p"][8, 0.1].value == pytest.approx(0.4)
    assert unpaired_losses([replace(one, baselines={})], 0.05) == {}


def test_no_equal_setting_is_proven_to_lose_or_to_differ_by_more_than_chance() -> None:
    """Full cache and cells of one chance at the edge of the margin: a false claim in at most 5 % of maps."""
    generator = np.random.default_rng(1)
    false = 0
    for _ in range(200):
        drawn = generator.binomial(200, 0.8, 4) / 200
        full = generator.binomial(200, 0.85) / 200
        one = bare(dict(zip([(8, 0.1), (8, 0.2), (16, 0.1), (16, 0.2)], drawn.tolist(), strict=True)), 200, full)
        losses = unpaired_losses([one], 0.049)[one.name].values()
        false += any(loss.is_kept for loss in losses)
    # 5 % of 200 are 10.
    assert false <= 10
