"""Local windows at equal memory: which settings are compared, what is proven, and what `describe` says of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.core import Setting
from kvatlas.policies.budget_rule import stays
from kvatlas.report.description import one_page
from kvatlas.report.result import Result, analyse
from kvatlas.report.sentences import memory_lines
from kvatlas.stats.numerics.arrays import strata_of_sizes
from kvatlas.stats.numerics.equal_memory import (
    compare_pairs,
    dominance_pairs,
    line_estimate,
    line_weights,
    strongest,
)
from kvatlas.sweeps import make_plan, parse_spec
from tests.report.test_tables import SPEC
from tests.stats.synthetic import manifest, run_of, traces

RECIPE = Path(__file__).parents[2] / "recipes" / "embedded" / "equal_memory.yaml"
#: Four windows of five ratios each, at a budget of 320 and prompts of 88 tokens.
WINDOWS = (8, 16, 32, 64)
GRID = [(window, ratio) for window in WINDOWS for ratio in (0.1, 0.3, 0.5, 0.7, 0.9)]
TOKENS = np.array([88 + window + int(round(ratio * (232 - window), 6)) for window, ratio in GRID], float)
WINDOW = np.array([WINDOWS.index(window) for window, _ in GRID])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=2, max_size=12).filter(
        lambda cells: {window for window, _ in cells} == set(range(max(window for window, _ in cells) + 1))
    )
)
def test_each_setting_meets_the_nearest_one_of_another_window_that_keeps_no_fewer_tokens(
    cells: list[tuple[int, int]],
) -> None:
    window = np.array([one for one, _ in cells])
    tokens = np.array([float(one) for _, one in cells])
    pairs = dominance_pairs(tokens, window)
    for first, second in pairs:
        assert window[first] != window[second]
        assert tokens[first] <= tokens[second]
        for index in range(len(cells)):
            # No setting of either window lies between the two.
            if window[index] in (window[first], window[second]):
                assert not tokens[first] < tokens[index] < tokens[second]
    # The settings that keep most never lack a partner, unless their window alone keeps so many.
    for first in range(len(cells)):
        others = [index for index in range(len(cells)) if window[index] != window[first]]
        if any(tokens[index] == tokens[first] for index in others):
            same = {tokens[one] for one, other in pairs if tokens[one] == tokens[other]}
            assert tokens[first] in same


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_weights_of_lines_are_their_mean_over_the_tokens(tokens: list[int], start: float, stop: float) -> None:
    kept = np.array(tokens, float)
    low, high = (kept.min() + share * (kept.max() - kept.min()) for share in sorted((start, stop)))
    values = np.sin(kept)
    order = np.argsort(kept)
    along = np.linspace(low, high, 20_001)
    heights = np.interp(along, kept[order], values[order])
    mean = (heights[1:] + heights[:-1]).mean() / 2
    weights = line_weights(kept, low, high)
    assert weights.sum() == pytest.approx(1)
    assert weights @ values == pytest.approx(mean, abs=1e-4)


def draw(chance: Callable[[float, int], float], problems: int, rng: np.random.Generator) -> np.ndarray:
    """Outcomes [problems, settings] that share most of their luck, as settings of one run do."""
    chances = np.array([chance(tokens, window) for tokens, (window, _) in zip(TOKENS, GRID, strict=True)])
    luck = np.where(rng.random((problems, 1)) < 0.7, rng.random((problems, 1)), rng.random((problems, len(GRID))))
    return (luck < chances).astype(float)


def rising(tokens: float) -> float:
    return 0.93 - 0.4 * float(np.exp(-(tokens - 110) / 60))


@pytest.mark.parametrize(
    "chance",
    [
        lambda tokens, window: rising(tokens),
        lambda tokens, window: 0.62 if tokens < 205 else 0.9,
        lambda tokens, window: 0.8,
    ],
    ids=["rises", "cliff", "flat"],
)
def test_where_only_memory_matters_a_window_is_rarely_proven_better(chance: Callable[[float, int], float]) -> None:
    """Also where straight lines are far from the truth: the estimate may err there, the proof may not."""
    rng = np.random.default_rng(1)
    strata = strata_of_sizes([120])
    pairs = dominance_pairs(TOKENS, WINDOW)
    runs = [draw(chance, 120, rng) for _ in range(100)]
    wrong = sum(strongest(compare_pairs(values, strata, pairs)) is not None for values in runs)
    # The chance of more than 10 of 100 at 5 % is 1 in 100.
    assert wrong <= 10


def test_a_window_that_costs_at_equal_memory_is_found_and_the_estimate_holds_it() -> None:
    def chance(tokens: float, window: int) -> float:
        return rising(tokens) - 0.12 * WINDOWS.index(window) / 3

    rng = np.random.default_rng(2)
    strata = strata_of_sizes([400])
    pairs = dominance_pairs(TOKENS, WINDOW)
    found = 0
    held = 0
    for _ in range(25):
        values = draw(chance, 400, rng)
        tests = compare_pairs(values, strata, pairs)
        best = strongest(tests)
        if best is not None:
            found += GRID[best[0]][0] < GRID[best[1]][0]
            # p and limits come from one test.
            assert tests[best].low > 0
            assert tests[best].p_holm <= 0.05
        estimate = line_estimate(values, strata, TOKENS, WINDOW)
        assert estimate is not None
        assert (estimate.wide, estimate.narrow) == (3, 0)
        held += estimate.difference.low <= -0.12 <= estimate.difference.high
    assert found >= 23
    assert held >= 22


# -- runs --------------------------------------------------------------------------------------------------------------


def of_run(chance: Callable[[Setting], float], settings: list[Setting], axes: dict[str, tuple[object, ...]]) -> Result:
    plan = manifest(settings, problems=150, samples=1, axes=tuple(axes.items()))
    plan = replace(plan, spec={**SPEC, "problems": 150, "samples": 1})
    return analyse([run_of(plan, list(traces(plan, chance)))])


def grid(windows: tuple[int, ...], ratios: tuple[float, ...]) -> list[Setting]:
    return [
        Setting.from_parameters("dynts", kv_budget=96, local_window=window, ratio=ratio, ratio_over="thinking")
        for window in windows
        for ratio in ratios
    ]


def kept(setting: Setting) -> float:
    found = stays(setting, [20])
    return 96.0 if found is None else found.tokens


def test_a_run_tells_window_from_memory() -> None:
    windows, ratios = (8, 16, 32), (0.1, 0.3, 0.5)
    axes = {"local_window": windows, "ratio": ratios}
    only_memory = of_run(lambda one: min(1.0, kept(one) / 96), grid(windows, ratios), axes)
    page = one_page(only_memory)
    assert "local_window 32 (" in page
    assert "; it also keeps more" in page
    (line,) = memory_lines(only_memory.grids)
    assert line.startswith("At equal memory no window is proven better (")
    assert "estimated by straight lines between ratios" in line
    narrow = of_run(lambda one: 1 - one.values.get("local_window", 0) / 50, grid(windows, ratios), axes)
    (line,) = memory_lines(narrow.grids)
    assert "At equal memory window 8, ratio" in line
    assert "points above window 32, ratio" in line
    document = narrow.to_dict()["means"][0]["equal_memory"]
    assert document["strongest"] in document["proven"]
    assert document["strongest"]["better"]["local_window"] == 8
    assert document["strongest"]["better"]["stays_tokens"] <= document["strongest"]["other"]["stays_tokens"]
    levels = document_levels(narrow)
    assert levels == sorted(levels)


def document_levels(result: Result) -> list[float]:
    (effect,) = [one for one in result.to_dict()["effects"] if one["axis"] == "local_window"]
    return [level["stays_tokens"] for level in effect["levels"]]


def test_a_grid_that_cannot_tell_says_so_and_the_recipe_can() -> None:
    windows, ratios = (8, 48), (0.1, 0.2)
    axes = {"local_window": windows, "ratio": ratios}
    result = of_run(lambda one: min(1.0, kept(one) / 96), grid(windows, ratios), axes)
    sentence = "Windows 8 and 48 have no memory in common: this grid cannot tell window from memory"
    assert memory_lines(result.grids) == [f"{sentence}."]
    recipe = parse_spec({**yaml.safe_load(RECIPE.read_text("utf-8")), "problems": 2})
    settings = [setting for setting, is_baseline in recipe.cells() if not is_baseline]
    for budget in recipe.axes["kv_budget"]:
        of_budget = [one for one in settings if one.policy == "dynts" and one.values["kv_budget"] == budget]
        assert len(of_budget) == 4
        assert len({stays(setting, [17, 31]) for setting in of_budget}) == 1
    # The plan of the blind grid says it before anything is decoded, that of the recipe does not.
    blind = parse_spec(
        {
            "models": ["embedded:tiny-llama"],
            "benchmarks": ["CHAIN6"],
            "problems": 2,
            "settings": [{"policy": "dynts", "kv_budget": 160}],
            "axes": {"local_window": [8, 80], "ratio": [0.1, 0.2]},
        }
    )
    assert any("Windows 8 and 80 have no memory in common" in text for text in make_plan(blind).warnings)
    assert not any("in common" in text for text in make_plan(recipe).warnings)


def test_levels_that_keep_the_same_tokens_are_told_without_memory() -> None:
    settings = [
        Setting.from_parameters("dynts", kv_budget=budget, local_window=window, every=16, budget_over="thinking")
        for budget in (32, 48)
        for window in ("10%", "50%")
    ]
    axes: dict[str, tuple[object, ...]] = {"kv_budget": (32, 48), "local_window": ("10%", "50%")}
    result = of_run(lambda one: 0.9 if one.values.get("local_window") == "10%" else 0.5, settings, axes)
    page = one_page(result)
    assert "; all keep 60 tokens" in page
    (line,) = memory_lines(result.grids)
    assert "points above window 50%, kv_budget" in line
    assert "; both keep " in line
    assert document_levels(result) == [60.0, 60.0]


def test_published_averages_prove_no_difference_of_means() -> None:
    result = analyse(["published:dynts_r1_llama", "published:dynts_r1_qwen"])
    page = one_page(result)
    assert "is below 0.2, 0.3, 0.4 and 0.5 in 8 of 8 maps" in page
    assert "which proves no difference of means" in page
    assert [effect.is_found for effect in result.effects if effect.axis == "ratio"] == [True]
    assert not any(effect.is_proven for effect in result.effects)
