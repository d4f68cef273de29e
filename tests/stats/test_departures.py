"""Texts that depart behind the first compression are told from texts that numerics alone let depart."""

from __future__ import annotations

import numpy as np
import pytest

from kvatlas.stats.losses import Departures, departure_p, most_unseen


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


def test_what_none_of_so_many_shows() -> None:
    assert most_unseen(1) == pytest.approx(0.95)
    assert (1 - most_unseen(32)) ** 32 == pytest.approx(0.05)
