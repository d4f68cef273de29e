"""pass@k and maj@k: against enumeration and against scorio."""

from itertools import combinations

import numpy as np
import pytest
from scorio import eval as scorio

from kvatlas.core import KvatlasError
from kvatlas.stats.intervals import interval
from kvatlas.stats.metrics import RIGHT, Rule, majority, rule

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
    assert Rule("pass", k).values(list(GRADES.values()), []) == pytest.approx(shares)
    estimate = Rule("pass", k).estimate(list(GRADES.values()), [])
    assert estimate.value == pytest.approx(float(scorio.pass_at_k(MATRIX, k)))
    assert 0 <= estimate.low < estimate.value < estimate.high <= 1
    assert (estimate.problems, estimate.samples) == (5, 6)


def _by_hand(votes, k):
    won = []
    for subset in combinations(votes, k):
        counts = {vote: subset.count(vote) for vote in subset if vote is not None}
        best = max(counts.values(), default=0)
        first = [vote for vote, count in counts.items() if count == best]
        won.append((RIGHT in first) / len(first) if first else 0.0)
    return float(np.mean(won))


@pytest.mark.parametrize(
    "votes",
    [
        [RIGHT, RIGHT, "7", "7", "8", None],
        [RIGHT, "7", "7", "7", "7", "7"],
        [None] * 6,
        [RIGHT] * 6,
        ["7", "8", "9", RIGHT, None, None],
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_majority_is_that_of_all_subsets(votes, k):
    assert majority(votes, k) == pytest.approx(_by_hand(votes, k))


def test_names_and_too_few_samples():
    assert rule("pass@4") == Rule("pass", 4)
    assert [rule(name) for name in ("pass@1", "progress", "pass@0", "maj@", "pass@-1")] == [None] * 5
    with pytest.raises(KvatlasError, match="maj@7 needs 7 samples of every problem; the fewest that one has is 6"):
        Rule("maj", 7).estimate(list(GRADES.values()), [])


def test_intervals_of_pass_at_k_hold_where_rare_problems_decide_the_mean():
    rng = np.random.default_rng(3)
    wrong = 64 - rng.binomial(64, rng.random((3_000, 30)))
    values = 1 - np.prod([np.maximum(wrong - i, 0) / (64 - i) for i in range(16)], axis=0)
    truth = 16 / 17
    low, high = interval(values)
    assert 0.95 < np.mean((low <= truth) & (truth <= high)) < 0.99
