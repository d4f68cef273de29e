"""Paired comparisons against exact enumeration, scipy and hand computation."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.inference.resampling import sign_flip_p
from kvatlas.stats.pairs.paired import difference_interval, paired_difference


def _exact(differences):
    observed = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return np.mean([total >= observed - 1e-9 for total in sums])


def test_exact_p_is_the_enumeration():
    differences = np.array([0.2, 0.4, -0.2, 0.6, 0.0, 1.0, -0.4])
    assert sign_flip_p(differences) == pytest.approx(_exact([d for d in differences if d]))


def test_sampled_p_is_near_the_enumeration_and_never_zero():
    differences = np.random.default_rng(0).normal(0.25, 0.5, 16).clip(-1, 1)
    reference = _exact(list(differences))
    assert sign_flip_p(differences) == pytest.approx(reference, abs=0.01)
    assert sign_flip_p(np.full(60, 0.5)) == pytest.approx(1 / 10_001)
    assert sign_flip_p(differences, seed=3) == sign_flip_p(differences, seed=3)


def test_p_agrees_with_scipy():
    differences = np.random.default_rng(1).choice([-1.0, 0.0, 1.0], 40, p=[0.2, 0.4, 0.4])
    reference = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(2)
    )
    assert sign_flip_p(differences) == pytest.approx(reference.pvalue, abs=0.015)


def test_no_difference_at_all():
    same = {f"p{i}": {0: 1.0, 1: 0.0} for i in range(30)}
    result = paired_difference(same, same)
    assert (result.value, result.p) == (0.0, 1.0)
    assert -0.2 < result.low < 0 < result.high < 0.2


def test_size_of_the_test_under_no_difference():
    generator = np.random.default_rng(4)
    rejected = 0
    for _ in range(300):
        chance = generator.random(12)
        first, second = (generator.random((12, 3)) < chance[:, None] for _ in range(2))
        rejected += sign_flip_p(first.mean(1) - second.mean(1)) < 0.05
    assert rejected / 300 < 0.08


def test_only_common_problems_and_samples_count():
    first = {"a": {0: 1.0, 1: 1.0}, "b": {0: 1.0}, "c": {0: 1.0}}
    second = {"a": {1: 0.0, 2: 0.0}, "b": {0: 1.0}, "d": {0: 0.0}}
    result = paired_difference(first, second)
    assert (result.value, result.problems, result.pairs) == (0.5, 2, 2)
    with pytest.raises(KvatlasError, match="in common"):
        paired_difference(first, {"z": {0: 1.0}})


def test_the_interval_is_students_over_problems():
    differences = np.array([0.1, 0.3, -0.1, 0.5, 0.2])
    reference = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert difference_interval(differences) == pytest.approx((reference.low, reference.high))
    assert difference_interval(np.array([0.4])) == (-1.0, 1.0)
