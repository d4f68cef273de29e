"""Paired comparisons against simulation and hand computation."""

import numpy as np
import pytest

from kvatlas.core import KvatlasError
from kvatlas.stats.inference import mean_contrast
from kvatlas.stats.losses import paired_difference


def test_no_difference_at_all():
    same = {("A", f"p{i}"): {0: 1.0, 1: 0.0} for i in range(30)}
    result = paired_difference(same, same)
    assert (result.value, result.p) == (0.0, 1.0)
    assert -0.2 < result.low < 0 < result.high < 0.2


def test_size_of_the_test_under_no_difference():
    generator = np.random.default_rng(4)
    rejected = 0
    for _ in range(300):
        chance = generator.random(12)
        first, second = (generator.random((12, 3)) < chance[:, None] for _ in range(2))
        rejected += mean_contrast(first.mean(1) - second.mean(1)).p < 0.05
    assert rejected / 300 < 0.08


def test_only_common_problems_and_samples_count():
    first = {("A", "a"): {0: 1.0, 1: 1.0}, ("A", "b"): {0: 1.0}, ("A", "c"): {0: 1.0}}
    second = {("A", "a"): {1: 0.0, 2: 0.0}, ("A", "b"): {0: 1.0}, ("A", "d"): {0: 0.0}}
    result = paired_difference(first, second)
    assert (result.value, result.problems, result.pairs) == (0.5, 2, 2)
    with pytest.raises(KvatlasError, match="in common"):
        paired_difference(first, {("B", "a"): {0: 1.0}})
