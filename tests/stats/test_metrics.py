"""pass@k: against enumeration and against scorio."""

from itertools import combinations

import numpy as np
import pytest
from scorio import eval as scorio

from kvatlas.core import KvatlasError
from kvatlas.stats.intervals import interval
from kvatlas.stats.metrics import estimate_at_k, k_of, pass_at_k

GRADES = {
    "a": [1.0, 0, 0, 1, 0, 0],
    "b": [0.0] * 6,
    "c": [1.0] * 6,
    "d": [0.0, 0, 0, 0, 0, 1],
    "e": [1.0, 1, 1, 0, 1, 0],
}
MATRIX = np.array(list(GRADES.values()), int)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_and_scorios(k):
    shares = [np.mean([any(subset) for subset in combinations(stored, k)]) for stored in GRADES.values()]
    assert pass_at_k(GRADES, k) == pytest.approx(shares)
    estimate = estimate_at_k(GRADES, k)
    assert estimate.value == pytest.approx(float(scorio.pass_at_k(MATRIX, k)))
    assert 0 <= estimate.low < estimate.value < estimate.high <= 1
    assert (estimate.problems, estimate.samples) == (5, 6)


def test_names_and_too_few_samples():
    assert [k_of(name) for name in ("pass@4", "pass@1", "progress", "pass@0", "maj@4")] == [4, None, None, None, None]
    with pytest.raises(KvatlasError, match="pass@7 needs 7 samples of every problem; the fewest that one has is 6"):
        estimate_at_k(GRADES, 7)


def test_intervals_of_pass_at_k_hold_where_rare_problems_decide_the_mean():
    rng = np.random.default_rng(3)
    wrong = 64 - rng.binomial(64, rng.random((3_000, 30)))
    values = 1 - np.prod([np.maximum(wrong - i, 0) / (64 - i) for i in range(16)], axis=0)
    truth = 16 / 17
    low, high = interval(values)
    assert 0.95 < np.mean((low <= truth) & (truth <= high)) < 0.99
