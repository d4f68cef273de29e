"""Two settings on the same problems and samples: difference, interval and p-value, all by problem."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.pass_at_1 import Floats
from kvatlas.stats.inference.resampling import Contrast, mean_contrast

P = TypeVar("P", bound=Hashable)
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over problems of (first - second), in [-1, 1].

    `problems` are those that both settings have, `pairs` the samples of both on which the difference rests.
    """

    problems: int = 0
    pairs: int = 0


def paired_difference(first: Mapping[P, Mapping[S, float]], second: Mapping[P, Mapping[S, float]]) -> Difference:
    """Compare two settings: `first[problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    A problem's difference is the mean over its pairs; problems weigh equally and are the independent units. Raises
    KvatlasError where the two have no pair in common.
    """
    differences, pairs = problem_differences(first, second)
    if not pairs:
        raise KvatlasError("The two settings have no problem and sample in common, so there is nothing to compare.")
    contrast = mean_contrast(differences)
    return Difference(contrast.value, contrast.low, contrast.high, contrast.p, len(differences), pairs)


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
