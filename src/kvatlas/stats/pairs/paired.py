"""Two settings on the same problems and samples: difference, interval and p-value, all by problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.pass_at_1 import Z

FLIPS = 20_000
#: With at most this many nonzero differences all sign patterns are tried (2^14 of them) instead of a sample.
EXACT_UP_TO = 14

P = TypeVar("P", bound=Hashable)
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """The mean over problems of (first - second), its 95 % interval, the two-sided p-value of "no difference".

    `value`, `low` and `high` are in [-1, 1]; `problems` are those that both settings have, `pairs` the samples of
    both on which the difference rests.
    """

    value: float
    low: float
    high: float
    p: float
    problems: int
    pairs: int


def paired_difference(
    first: Mapping[P, Mapping[S, float]], second: Mapping[P, Mapping[S, float]], *, flips: int = FLIPS, seed: int = 0
) -> Difference:
    """Compare two settings: `first[problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    A problem's difference is the mean over its pairs; problems weigh equally and are the independent units. Raises
    KvatlasError where the two have no pair in common.
    """
    differences: list[float] = []
    pairs = 0
    for problem, samples in first.items():
        other = second.get(problem, {})
        shared = [sample for sample in samples if sample in other]
        if shared:
            differences.append(math.fsum(samples[s] - other[s] for s in shared) / len(shared))
            pairs += len(shared)
    if not differences:
        raise KvatlasError("The two settings have no problem and sample in common, so there is nothing to compare.")
    array = np.array(differences)
    low, high = difference_interval(array)
    p = sign_flip_p(array, flips=flips, seed=seed)
    return Difference(float(array.mean()), low, high, p, len(array), pairs)


def pooled(benchmarks: Mapping[str, Mapping[P, Mapping[S, float]]]) -> dict[tuple[str, P], Mapping[S, float]]:
    """The problems of several benchmarks as one set, for a comparison over all of them; each problem weighs equally."""
    return {(name, problem): samples for name, problems in benchmarks.items() for problem, samples in problems.items()}


def difference_interval(differences: np.ndarray) -> tuple[float, float]:
    """A 95 % interval for the mean of the problems' differences, which are in [-1, 1]: Student's t over problems.

    Where all differences are equal their spread says nothing, and one problem of +1 and one of -1 are added, as Bonett
    and Price (2012), J. Educational and Behavioral Statistics 37:479-488 do for pairs. One problem: [-1, 1].
    """
    count = len(differences)
    if count == 1:
        return -1.0, 1.0
    mean = float(differences.mean())
    spread = float(differences.std(ddof=1))
    if spread > 1e-12:
        half = float(stats.t.ppf(0.975, count - 1)) * spread / math.sqrt(count)
    else:
        widened = np.append(differences, [1.0, -1.0])
        half = Z * float(widened.std()) / math.sqrt(count + 2)
    return max(-1.0, mean - half), min(1.0, mean + half)


def sign_flip_p(differences: np.ndarray, *, flips: int = FLIPS, seed: int = 0) -> float:
    """Two-sided permutation p-value: under "no difference" each problem's difference could as well have the other sign.

    With up to 14 nonzero differences all sign patterns are counted, otherwise `flips` random ones from a generator
    of this seed, and p = (1 + hits) / (1 + flips), never 0 (Phipson and Smyth 2010, SAGMB 9:39). All zero: 1.
    """
    nonzero = differences[np.abs(differences) > 1e-12]
    count = len(nonzero)
    if count == 0:
        return 1.0
    bar = abs(float(nonzero.sum())) - 1e-9
    if count <= EXACT_UP_TO:
        bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        return float(np.mean(np.abs((1 - 2 * bits) @ nonzero) >= bar))
    generator = np.random.default_rng(seed)
    hits, left = 0, flips
    chunk = max(1, 2_000_000 // count)
    while left:
        rows = min(chunk, left)
        signs = 1 - 2 * generator.integers(0, 2, size=(rows, count), dtype=np.int8)
        hits += int(np.count_nonzero(np.abs(signs @ nonzero) >= bar))
        left -= rows
    return (1 + hits) / (1 + flips)
