"""One setting against another: paired differences, losses of many settings, departures of an endpoint."""

from __future__ import annotations

import numpy as np
import pytest

from kvatlas.core import KvatlasError, Setting
from kvatlas.stats.losses import Departures, departure_p, losses, paired_difference
from kvatlas.stats.verdicts import kept_by_rule


def test_only_common_problems_and_samples_count():
    first = {("A", "a"): {0: 1.0, 1: 1.0}, ("A", "b"): {0: 1.0}, ("A", "c"): {0: 1.0}}
    second = {("A", "a"): {1: 0.0, 2: 0.0}, ("A", "b"): {0: 1.0}, ("A", "d"): {0: 0.0}}
    result = paired_difference(first, second)
    assert (result.value, result.problems, result.pairs) == (0.5, 2, 2)
    with pytest.raises(KvatlasError, match="in common"):
        paired_difference(first, {("B", "a"): {0: 1.0}})


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
    assert kept_by_rule(Setting.of("window", **values), token=110, beside=264) == kept


FOUR = np.repeat(np.arange(4), 60)
ONE = np.zeros(600, int)


def _differences(rng, lost, gained, problems=240):
    drawn = rng.random((len(lost), problems))
    return np.where(drawn < np.array(lost)[:, None], -1.0, np.where(drawn > 1 - np.array(gained)[:, None], 1.0, 0.0))


def test_equal_texts_lose_at_most_what_so_many_problems_can_hide():
    (result,) = losses(np.zeros((1, 240)), FOUR, 0.03)
    assert result.shown
    assert result.needed == 240
    assert 0.012 < result.high < 0.016
    (few,) = losses(np.zeros((1, 40)), FOUR[:40] * 0, 0.03)
    assert not few.shown
    assert 100 < few.needed < 115
    assert losses(np.zeros((1, few.needed)), np.zeros(few.needed, int), 0.03)[0].high == pytest.approx(0.03, abs=0.001)


def test_losses_are_shown_broken_or_open():
    rng = np.random.default_rng(0)
    result = losses(_differences(rng, [0.0, 0.3, 0.05], [0.0, 0.0, 0.03]), FOUR, 0.03)
    assert [loss.shown for loss in result] == [True, False, False]
    assert [loss.broken for loss in result] == [False, True, False]
    assert all(loss.low < loss.value + 1e-9 < loss.high + 2e-9 for loss in result)


def test_a_setting_that_breaks_the_margin_is_rarely_shown_to_keep_it():
    """At most 5 % over all settings and both ways together, with three standard errors of 200 rounds."""
    rng = np.random.default_rng(1)
    rounds = (losses(_differences(rng, [0.0801] * 8, [0.05] * 8), FOUR, 0.03, chains=[range(8)]) for _ in range(200))
    assert sum(any(loss.shown for loss in result) for result in rounds) / 200 <= 0.05 + 0.046


def test_a_chain_shows_what_limits_over_all_settings_do_not():
    # Of 240 problems two are lost and two gained: the setting's own limit is below 3 points, that over 32 is not.
    differences = np.zeros((2, 240))
    differences[:, [0, 70]], differences[:, [130, 190]] = -1.0, 1.0
    many = np.concatenate([differences, _differences(np.random.default_rng(3), [0.3] * 30, [0.0] * 30)])
    plain, chained = (losses(many, FOUR, 0.03, chains=chains) for chains in ((), [range(len(many))]))
    assert [loss.shown for loss in plain[:3]] == [False, False, False]
    assert [loss.shown for loss in chained[:3]] == [True, True, False]
    assert chained[0].high == 0.03 < plain[0].high
    # A setting that loses more ends the chain.
    worst_first = losses(many[::-1], FOUR, 0.03, chains=[range(len(many))])
    assert not any(loss.shown for loss in worst_first)


def test_each_setting_rests_on_the_problems_that_it_shares_with_the_full_cache():
    rng = np.random.default_rng(4)
    whole = _differences(rng, [0.05] * 3, [0.03] * 3)
    missing = whole.copy()
    missing[1, ::10] = np.nan
    missing[2, FOUR == 3] = np.nan
    complete, partial = losses(whole, FOUR, 0.03), losses(missing, FOUR, 0.03)
    assert partial[0].value == pytest.approx(complete[0].value, abs=1e-15)
    assert partial[0].high == pytest.approx(complete[0].high, abs=0.01)
    assert partial[1].value == pytest.approx(-np.nanmean(missing[1].reshape(4, 60), axis=1).mean())
    assert partial[1].high - partial[1].low > 1.01 * (complete[1].high - complete[1].low)
    # Without a benchmark there is no mean over benchmarks.
    assert partial[2] is None


def test_several_samples_narrow_the_limits():
    rng = np.random.default_rng(5)
    grades = rng.binomial(5, rng.beta(0.3, 0.3, 60)[None, :, None], (2, 60, 1))[..., 0] / 5
    differences, strata = (grades[0] - grades[1])[None], np.zeros(60, int)
    (one,) = losses(differences, strata, 0.03)
    (five,) = losses(differences, strata, 0.03, reference=float(grades[1].mean()), samples=5)
    assert five.value == one.value
    assert (five.high - five.low) < 0.85 * (one.high - one.low)


def test_as_many_problems_as_are_said_show_it_in_four_of_five_cases():
    lost, gained = 0.04, 0.03
    rng = np.random.default_rng(2)
    # A pilot that saw the very rates, too small to show it.
    pilot = np.repeat([[-1.0, 1.0, 0.0]], np.round(600 * np.array([lost, gained, 1 - lost - gained])).astype(int), 1)
    (loss,) = losses(pilot, ONE, 0.03)
    assert not loss.shown
    least, most = loss.needed_range
    assert least < loss.needed
    assert most is None or most > loss.needed
    strata = np.zeros(loss.needed, int)
    drawn = (losses(_differences(rng, [lost], [gained], loss.needed), strata, 0.03)[0] for _ in range(200))
    assert abs(sum(result.shown for result in drawn) / 200 - 0.8) < 0.1
    assert losses(pilot, ONE, 0.001)[0].needed is None


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
