"""Two settings on the same problems and samples: difference, interval and p-value, by problem and benchmark."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.pass_at_1 import Floats, Ints
from kvatlas.stats.inference.resampling import Contrast, mean_contrast
from kvatlas.stats.pairs.systems import ProblemKey

S = TypeVar("S", bound=Hashable)
Outcomes = Mapping[ProblemKey, Mapping[S, float]]


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over benchmarks of the mean over problems of (first - second), in [-1, 1].

    `problems` are those that both settings have, `pairs` the samples of both on which the difference rests.
    """

    problems: int = 0
    pairs: int = 0


def paired_difference(first: Outcomes[S], second: Outcomes[S]) -> Difference:
    """Compare two settings: `first[benchmark, problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    A problem's difference is the mean over its pairs. Problems are the independent units; benchmarks weigh equally, as
    in mean maps, and so do the problems of one. Raises KvatlasError where the two have no pair in common.
    """
    differences, strata, pairs = problem_differences(first, second)
    if not pairs:
        raise KvatlasError("The two settings have no problem and sample in common, so there is nothing to compare.")
    contrast = mean_contrast(differences, strata)
    return Difference(contrast.value, contrast.low, contrast.high, contrast.p, len(differences), pairs)


def problem_differences(first: Outcomes[S], second: Outcomes[S]) -> tuple[Floats, Ints, int]:
    """[problems]: the mean of first - second over the samples of both, their strata, and how many such pairs."""
    differences: dict[ProblemKey, float] = {}
    pairs = 0
    for problem, samples in first.items():
        other = second.get(problem, {})
        shared = [sample for sample in samples if sample in other]
        if shared:
            differences[problem] = math.fsum(samples[s] - other[s] for s in shared) / len(shared)
            pairs += len(shared)
    return np.array(list(differences.values())), strata_of(differences), pairs


def strata_of(problems: Iterable[ProblemKey]) -> Ints:
    """[problems]: the number, from 0, of each problem's benchmark."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(benchmark, len(numbers)) for benchmark, _ in problems])
