"""Two settings on the same problems and samples: difference, interval and p-value, all by problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.pass_at_1 import Floats, Z
from kvatlas.stats.inference.resampling import Contrast, sign_flip_p

#: Sign patterns behind a p-value, where not all are tried.
FLIPS = 20_000

P = TypeVar("P", bound=Hashable)
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over problems of (first - second), in [-1, 1].

    `problems` are those that both settings have, `pairs` the samples of both on which the difference rests.
    """

    problems: int = 0
    pairs: int = 0


def paired_difference(
    first: Mapping[P, Mapping[S, float]], second: Mapping[P, Mapping[S, float]], *, flips: int = FLIPS, seed: int = 0
) -> Difference:
    """Compare two settings: `first[problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    A problem's difference is the mean over its pairs; problems weigh equally and are the independent units. Raises
    KvatlasError where the two have no pair in common.
    """
    differences, pairs = problem_differences(first, second)
    if not pairs:
        raise KvatlasError("The two settings have no problem and sample in common, so there is nothing to compare.")
    low, high = difference_interval(differences)
    p = sign_flip_p(differences, flips=flips, seed=seed)
    return Difference(float(differences.mean()), low, high, p, len(differences), pairs)


def problem_differences(
    first: Mapping[P, Mapping[S, float]], second: Mapping[P, Mapping[S, float]]
) -> tuple[Floats, int]:
    """[problems]: the mean of first - second over the samples that both have; and how many such pairs there are."""
    differences: list[float] = []
    pairs = 0
    for problem, samples in first.items():
        other = second.get(problem, {})
        shared = [sample for sample in samples if sample in other]
        if shared:
            differences.append(math.fsum(samples[s] - other[s] for s in shared) / len(shared))
            pairs += len(shared)
    return np.array(differences), pairs


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
