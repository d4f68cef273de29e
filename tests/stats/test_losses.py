"""One setting against another: paired differences, losses, departures of an endpoint."""

import math
from pathlib import Path

import numpy as np
import pytest

from kvatlas.core import FULL, KvatlasError, Setting
from kvatlas.stats.losses import losses_of
from kvatlas.stats.numerics.planning import needed_problems, provable_margin, provable_sizes
from kvatlas.stats.numerics.texts import Departures, departure_p
from kvatlas.stats.orders import kept_by_rule
from kvatlas.stats.power import provable
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import compared_systems
from tests.stats.synthetic import losses, manifest, system
from tests.stored import store_run


def test_only_common_problems_and_samples_count():
    missing = math.nan
    first = system("a", FULL, [[1, 1], [1, missing], [1, missing], [missing, 0]])
    second = system("b", FULL, [[missing, 0], [1, missing], [missing, 0]])
    _, result = compared_systems(first, second)
    assert (result.value, result.problems, result.pairs) == (0.5, 2, 2)
    third = system("c", FULL, [[missing, missing], [missing, 1]])
    with pytest.raises(KvatlasError, match="in common"):
        compared_systems(first, third)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"kv_budget": 100, "local_window": 20, "ratio": 0.3}, 44.0),
        ({"kv_budget": "11KiB", "local_window": 20, "ratio": 0.3}, 44.0),
        ({"kv_budget": "11KiB", "local_window": 20, "every": 16}, 100.0),
        ({"kv_budget": 100, "ratio": 0.3}, None),
    ],
)
def test_the_tokens_that_a_setting_keeps_follow_from_its_numbers(values, kept):
    assert kept_by_rule(Setting.from_parameters("window", **values), token_bytes=110, tail_bytes=264) == kept


FOUR = np.repeat(np.arange(4), 60)
ONE = np.zeros(600, int)


def _differences(rng, lost, gained, problems=240):
    drawn = rng.random((len(lost), problems))
    return np.where(drawn < np.array(lost)[:, None], -1.0, np.where(drawn > 1 - np.array(gained)[:, None], 1.0, 0.0))


def test_what_so_many_problems_can_prove_is_decided_by_their_number():
    """With nothing lost one benchmark proves 1 - 0.05 ** (1 / n); of unlike ones the smallest decides."""
    assert provable_margin([60]) == pytest.approx(1 - 0.05 ** (1 / 60), rel=0.01)
    assert provable_margin([60, 60, 60, 60]) == pytest.approx(1 - 0.05 ** (1 / 240), rel=0.01)
    # The smallest margins for which no rare kind of problem stays unseen in 5 % of cases, by Lagrange's multipliers.
    for sizes, least in (((8, 198), 0.156), ((30, 30, 40, 198), 0.0244), ((8, 30, 198), 0.104)):
        assert least < provable_margin(sizes) < 1.1 * least
    assert provable_sizes([1], 0.03) == [99]
    assert provable_sizes([1], 0.05) == [59]
    assert provable_sizes([30, 30], 0.03)[0] == 50
    result = provable([30, 30], 0.03, {})
    assert not result.is_enough
    assert result.to_dict()["smallest_margin"] == pytest.approx(4.9, abs=0.1)


def test_equal_texts_lose_at_most_what_so_many_problems_can_hide():
    (result,) = losses(np.zeros((1, 240)), FOUR, 0.03, [[0]])
    assert result.is_kept
    assert result.limit == pytest.approx(provable_margin([60] * 4))
    (few,) = losses(np.zeros((1, 60)), np.zeros(60, int), 0.03, [[0]])
    assert not few.is_kept
    assert not few.is_broken


def test_losses_are_kept_broken_or_open():
    rng = np.random.default_rng(0)
    result = losses(_differences(rng, [0.0, 0.3, 0.05], [0.0, 0.0, 0.03]), FOUR, 0.03, [[0, 1, 2]])
    assert [loss.is_kept for loss in result] == [True, False, False]
    assert [loss.is_broken for loss in result] == [False, True, False]
    assert all(loss.low < loss.value + 1e-9 < loss.limit < loss.high for loss in result)
    assert result[1].low > 0.03


def test_a_setting_that_loses_whole_problems_is_rarely_proven_to_keep_the_margin():
    """60 problems, 3.01 % of which collapse from 5 of 5 to 0 of 5: by chance none is met in 16 of 100 runs."""
    for count in (60, 120, 240):
        chance = 0.0
        for met in range(10):
            differences = np.zeros((1, count))
            differences[0, :met] = -1.0
            (loss,) = losses(differences, np.zeros(count, int), 0.03, [[0]])
            chance += loss.is_kept * math.comb(count, met) * 0.0301**met * 0.9699 ** (count - met)
        assert chance <= 0.05


def test_a_setting_that_breaks_the_margin_is_rarely_marked_as_keeping_it():
    """At most 5 % over all settings together, with three standard errors of 200 rounds."""
    rng = np.random.default_rng(1)
    rounds = (losses(_differences(rng, [0.0801] * 8, [0.05] * 8), FOUR, 0.03, [range(8)]) for _ in range(200))
    assert sum(any(loss.is_kept for loss in result) for result in rounds) / 200 <= 0.05 + 0.046


def test_a_sequence_stops_at_the_first_setting_that_is_not_proven():
    differences = np.zeros((4, 240))
    differences[2, :60] = -1.0
    kept = [loss.is_kept for loss in losses(differences, FOUR, 0.03, [[0, 1, 2, 3]])]
    assert kept == [True, True, False, False]
    # One that cannot be tested stops it, too.
    differences[1, FOUR == 3] = np.nan
    found = losses(differences, FOUR, 0.03, [[0, 1, 2, 3]])
    assert found[1] is None
    assert [loss is not None and loss.is_kept for loss in found] == [True, False, False, False]


def test_sequences_share_the_level():
    (alone,) = losses(np.zeros((1, 120)), np.zeros(120, int), 0.03, [[0]])
    shared, _ = losses(np.zeros((2, 120)), np.zeros(120, int), 0.03, [[0], [1]])
    assert alone.is_kept
    assert not shared.is_kept
    assert shared.limit == pytest.approx(provable_margin([120], sequences=2))
    assert shared.joint_limit == shared.limit


def test_each_setting_rests_on_the_problems_that_it_shares_with_the_full_cache():
    rng = np.random.default_rng(4)
    whole = _differences(rng, [0.05] * 3, [0.03] * 3)
    missing = whole.copy()
    missing[1, ::10] = np.nan
    missing[2, FOUR == 3] = np.nan
    complete = losses(whole, FOUR, 0.03, [[0, 1, 2]])
    partial = losses(missing, FOUR, 0.03, [[0, 1, 2]])
    assert partial[0].value == pytest.approx(complete[0].value, abs=1e-15)
    assert partial[0].high == pytest.approx(complete[0].high, abs=1e-9)
    assert partial[1].value == pytest.approx(-np.nanmean(missing[1].reshape(4, 60), axis=1).mean())
    assert partial[1].high - partial[1].low > 1.01 * (complete[1].high - complete[1].low)
    # Without a benchmark there is no mean over benchmarks.
    assert partial[2] is None


def test_as_many_problems_as_are_said_prove_it_in_four_of_five_cases():
    lost, gained = 0.04, 0.03
    rng = np.random.default_rng(2)
    # A pilot that saw the very rates, too small to prove it.
    pilot = -np.repeat([-1.0, 1.0, 0.0], np.round(300 * np.array([lost, gained, 1 - lost - gained])).astype(int))
    (loss,) = losses(-pilot[None], ONE[:300], 0.03, [[0]])
    assert not loss.is_kept
    needed = needed_problems(pilot, ONE[:300], 0.01, 0.03)
    strata = np.zeros(needed, int)
    drawn = (losses(_differences(rng, [lost], [gained], needed), strata, 0.03, [[0]])[0] for _ in range(200))
    assert 0.7 <= sum(result.is_kept for result in drawn) / 200 <= 0.9
    assert needed_problems(pilot, ONE[:300], 0.0, 0.03) < needed < needed_problems(pilot, ONE[:300], 0.015, 0.03)
    assert needed_problems(pilot, ONE[:300], 0.03, 0.03) is None
    # More than 20 times as many are not practicable.
    assert needed_problems(pilot[:30], ONE[:30], 0.0299, 0.03) is None


def text(near: tuple[int, int], before: float, after: float) -> Departures:
    other = (int(before > 0), int(after > 0))
    return Departures((100, 100), near, other, (0, 0), (before, after))


def test_the_chance_is_that_of_so_many_falling_behind() -> None:
    assert departure_p([text((3, 3), 0.0, 1.0)] * 5) == pytest.approx(1 / 32)
    assert departure_p([text((3, 3), 0.0, 1.0)] * 4 + [text((3, 3), 1.0, 0.0)]) == pytest.approx(6 / 32)
    # Answers that agree say nothing; nor does how far one departs.
    assert departure_p([text((3, 3), 0.0, 9.0)] * 5 + [text((3, 3), 0.0, 0.0)] * 50) == pytest.approx(1 / 32)
    assert departure_p([text((3, 3), 0.0, 0.0)] * 5) == 1.0
    # Where most near ties lie behind it, departures there are what is to be expected.
    assert departure_p([text((1, 99), 0.1, 1.0)] * 5) > 0.9


def test_numerics_alone_are_told_as_seldom_as_the_level_says() -> None:
    draw = np.random.default_rng(3)
    values = []
    for _ in range(400):
        texts = []
        for _ in range(32):
            near = draw.integers(0, 12, 2)
            # Each near tie departs by a chance that differs between texts, and by some gap.
            flipped = [draw.random(count) < draw.choice([0.02, 0.3]) for count in near]
            gaps = [float((draw.random(item.size) * item).max(initial=0.0)) for item in flipped]
            texts.append(text((int(near[0]), int(near[1])), gaps[0], gaps[1]))
        values.append(departure_p(texts))
    for level in (0.01, 0.05, 0.2):
        assert np.mean(np.array(values) < level) < level + 0.01


def test_budgets_beside_the_prompt_are_tested_from_the_largest_down(tmp_path: Path) -> None:
    """Whatever their order in the spec: `every` with budget_over thinking leaves so many tokens and the prompt."""
    rule = {"local_window": 8, "every": 32, "budget_over": "thinking"}
    settings = [Setting.from_parameters("rkv", kv_budget=budget, **rule) for budget in (24, 104, 56)]
    run = RunData.open(store_run(tmp_path / "run", manifest(settings, axes=(("kv_budget", (24, 104, 56)),))))
    family = next(iter(losses_of(run).values()))
    (order,) = family.chains
    assert [family.settings[setting].values["kv_budget"] for setting in order] == [104, 56, 24]
