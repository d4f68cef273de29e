"""Sentences of one page agree with each other, whatever happened in the run."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.core import FULL, Setting
from kvatlas.figures.setting_rows import nearest_words
from kvatlas.report.description import one_page
from kvatlas.report.result import Result, analyse
from kvatlas.text import limit_text
from tests.stored import store_outcomes

WINDOWS = (8, 16, 32)
RATIOS = (0.1, 0.3, 0.5)
#: The losses of a setting, the same on each benchmark or by its name.
Loss = float | Mapping[str, float]


def setting(window: int, ratio: float, policy: str = "dynts") -> Setting:
    return Setting.from_parameters(policy, kv_budget=96, local_window=window, ratio=ratio)


def grid(*by_ratio: float, policy: str = "dynts") -> dict[Setting, Loss]:
    """Return the losses of a map that depend on the ratio alone."""
    return {setting(window, ratio, policy): by_ratio[RATIOS.index(ratio)] for window, ratio in product(WINDOWS, RATIOS)}


def draw(
    seed: int, sizes: Mapping[str, int], samples: int, losses: Mapping[Setting, Loss], easy: float = 6.0
) -> dict[Setting, dict[str, Any]]:
    """Return grades of the full cache and of settings that lose in the mean; one trace in ten is drawn anew."""
    rng = np.random.default_rng(seed)
    outcomes: dict[Setting, dict[str, Any]] = {FULL: {}, **{one: {} for one in losses}}
    for name, problems in sizes.items():
        chance = rng.beta(easy, 1, (problems, 1))
        uniform = rng.random((problems, samples))
        outcomes[FULL][name] = (uniform < chance).astype(float)
        for one, loss in losses.items():
            lost = loss[name] if isinstance(loss, Mapping) else loss
            own = np.where(rng.random(uniform.shape) < 0.9, uniform, rng.random(uniform.shape))
            rest = chance * (1 - lost / chance.mean())
            if lost < 0:
                rest = chance - (1 - chance) * lost / (1 - chance.mean())
            outcomes[one][name] = (own < rest).astype(float)
    return outcomes


def check(result: Result) -> str:
    """Check that no two sentences of the page of a run contradict each other; return the page."""
    page = one_page(result)
    has_pair = any(one.verdict.memory is not None and one.verdict.memory.best is not None for one in result.grids)
    has_effect = any(effect.is_proven for effect in result.effects)
    has_mark = any(loss.keeps_any or loss.breaks_any for one in result.maps for loss in one.losses.values())
    has_difference = has_pair or has_effect or any(one.difference.is_proven for one in result.comparisons)

    if has_difference:
        assert "that it can see a loss" not in page
    if len(result.maps) == 1 and (has_difference or has_mark):
        assert "no difference between the settings is found" not in page
    for one in result.grids:
        memory = one.verdict.memory
        if memory is not None and memory.best is None and memory.estimate is not None:
            limits = memory.estimate.difference
            assert limits.excludes_zero == ("so that this is no proof" in page)
    assert "2.9 points (at most 3.0" not in page
    assert "(0.0 to " not in page
    assert " to 0.0 over" not in page
    assert " ." not in page
    assert ". ." not in page
    for choice in result.choices:
        # A ring is around the recommended cell, of which alone the sentences after its name tell.
        if choice.recommended is not None and choice.losses:
            assert "recommended" not in page
    return page


KINDS: dict[str, tuple[dict[str, int], int, dict[Setting, Loss], float, dict[str, Any]]] = {
    "two benchmarks and a control": (
        {"A": 30, "B": 30},
        4,
        grid(0.12, 0.01, 0.0) | grid(0.4, 0.2, 0.1, policy="random"),
        4.0,
        {"claim": "these_problems"},
    ),
    "one sample": ({"A": 240}, 1, grid(0.1, 0.02, 0.0), 6.0, {}),
    "gains on one benchmark mask losses on the other": (
        {"A": 40, "B": 40},
        4,
        {one: {"A": 0.12, "B": -0.06} for one in grid(0, 0, 0)},
        8.0,
        {"claim": "these_problems", "lose_at_most": 5},
    ),
    "a small effect": ({"A": 100}, 2, grid(0.04, 0.0, 0.0), 6.0, {"claim": "these_problems"}),
    "hard problems": ({"A": 60}, 4, grid(0.04, 0.0, 0.0), 0.1, {"claim": "these_problems"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_sentence_of_a_run_contradicts_another(tmp_path: Path, kind: str) -> None:
    sizes, samples, losses, easy, spec = KINDS[kind]
    for seed in range(2):
        check(analyse([store_outcomes(tmp_path / str(seed), draw(seed, sizes, samples, losses, easy), **spec)]))


def test_a_chain_that_ended_on_the_other_claim_is_named(tmp_path: Path) -> None:
    """On these problems each window has a chain; problems like these have one for all, which the dearest ends."""
    full = {"A": np.ones((100, 2))}
    outcomes = {FULL: full, **{one: {"A": full["A"].copy()} for one in grid(0, 0, 0) if one.values["local_window"] > 8}}
    outcomes[setting(32, 0.5)]["A"][:4, 0] = 0.0
    page = check(analyse([store_outcomes(tmp_path / "run", outcomes, claim="these_problems")]))
    assert (
        "For problems like these its own limit is within the margin, too (at most 2.97), but its chain ended before "
        "it, at dynts local_window 32, ratio 0.5, so nothing is proven of it there. It lost 0.0 points."
    ) in page


def test_an_estimate_by_straight_lines_is_called_no_proof(tmp_path: Path) -> None:
    """A narrow window loses five other problems at each ratio: the estimate excludes 0 where no pair is proven."""
    full = {"A": np.ones((100, 1))}
    outcomes = {
        FULL: full,
        **{one: {"A": full["A"].copy()} for one in grid(0, 0, 0) if one.values["local_window"] < 32},
    }
    for number, ratio in enumerate(RATIOS):
        outcomes[setting(8, ratio)]["A"][5 * number : 5 * number + 5] = 0.0
    page = check(analyse([store_outcomes(tmp_path / "run", outcomes)]))
    assert "t equal memory no window is proven better" in page
    assert "which are no measurements, so that this is no proof." in page


def test_a_trial_names_the_benchmark_on_which_it_loses_most(tmp_path: Path) -> None:
    full = {"A": np.ones((40, 1)), "B": np.repeat([0.0, 1.0], [6, 34])[:, None]}
    outcomes = {FULL: full}
    for one in (setting(8, 0.5), setting(8, 0.3)):
        outcomes[one] = {name: grades.copy() for name, grades in full.items()}
        outcomes[one]["A"][:6] = 0.0
        outcomes[one]["B"][:4] = 1.0
    page = check(analyse([store_outcomes(tmp_path / "run", outcomes, lose_at_most=5)]))
    assert "As a trial take dynts ratio 0.5: " in page
    assert "On A alone it lost 15.0 points, beyond the margin." in page


def test_a_loss_beside_the_margin_is_told_alike_by_page_and_figure(tmp_path: Path) -> None:
    full = {"A": np.ones((40, 1))}
    one = setting(8, 0.5)
    outcomes = {FULL: full, one: {"A": (np.arange(40) > 0).astype(float)[:, None]}}
    result = analyse([store_outcomes(tmp_path / "run", outcomes)])
    page = check(result)
    assert "more than 4,000 problems (now 40) would prove it if that is its loss." in page
    assert "the same sweep again, or `kvatlas gate` on a larger benchmark, finish the proof" in page
    assert nearest_words(result.choices[0]).endswith("; more than 4,000 problems would decide it")


def test_controls_alone_are_no_settings_that_all_lose(tmp_path: Path) -> None:
    outcomes = draw(0, {"A": 100}, 2, grid(0.3, 0.1, 0.0, policy="random"))
    folder = store_outcomes(tmp_path / "run", outcomes, controls=[one for one in outcomes if one != FULL])
    result = analyse([folder])
    assert result.headline == ""
    page = check(result)
    assert "all settings are controls. random is a control, tested for a larger loss alone." in page
    assert "of 0 settings" not in page


def test_a_gain_is_no_negative_loss(tmp_path: Path) -> None:
    page = check(analyse([store_outcomes(tmp_path / "run", draw(0, {"A": 100}, 2, grid(-0.1, -0.1, -0.1), 1.5))]))
    assert "a gain of at least" in page
    assert "at most -" not in page


def test_settings_that_were_hardly_compressed_are_told(tmp_path: Path) -> None:
    outcomes = draw(0, {"A": 100}, 2, grid(0.0, 0.0, 0.0))
    for number, window in product(RATIOS, WINDOWS):
        outcomes[setting(window, number)] = outcomes[FULL]
    compressions = {one: 0 for one in outcomes if one.values.get("ratio") == 0.5}
    result = analyse([store_outcomes(tmp_path / "run", outcomes, compressions=compressions)])
    assert "Of 3 settings hardly a trace was compressed: that nothing was lost there proves nothing." in check(result)


@pytest.mark.parametrize(
    ("share", "border", "text"),
    [(0.0302, 0.03, "3.02"), (0.02998, 0.03, "2.998"), (0.031, 0.03, "3.1"), (0.03, 0.03, "3.0"), (0.0002, 0, "0.02")],
)
def test_a_limit_is_told_from_the_border_beside_it(share: float, border: float, text: str) -> None:
    assert limit_text(share, border) == text
