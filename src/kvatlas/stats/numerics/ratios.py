"""The ratio of two costs of a right answer, paired by problem.

A cost of a right answer is the mean cost divided by the share of right answers. Of the ratio of two such costs, the
shares are most uncertain: a few right answers decide. Their ratio f has the limits at which the mean of
(second share - f * first share), a bounded value of each problem, is told from 0 (`bounded`). This is Fieller's idea
with bounded limits; where there are too few right answers, it has no end. The ratio of the mean costs has the same
limits: the imagined problem costs as much as the dearest one seen, under one setting alone. The distances of both
ratios add in squares on the scale of logarithms.

Source: Fieller (1954), J. Royal Statistical Society B 16:175-185; Zou and Donner (2008), Statistics in Medicine
27:1693-1702 (recovery of variances from intervals).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvatlas.stats.numerics.arrays import Contrast, Floats, Ints, Z, strata_of_sizes, weights
from kvatlas.stats.numerics.bounded import score

#: Limits that lie more than so many times away from the ratio are no limits: nothing can be said.
LARGEST_RATIO = 20.0
_LOOKS = 121


def share_ratio(first: Sequence[Floats], second: Sequence[Floats]) -> Contrast | None:
    """Return the ratio of the mean share `second` to that of `first` with its 95 % limits.

    Each benchmark is an array of shares in [0, 1] by problem. None where either has no right answer. The lower limit is
    0 and the upper one infinite where they lie more than 20 times away.
    """
    strata = strata_of_sizes([len(shares) for shares in first])
    problem_weights = weights(strata)
    all_first = np.concatenate(first)
    all_second = np.concatenate(second)
    if not all_first @ problem_weights or not all_second @ problem_weights:
        return None
    return _ratio(all_second, all_first, strata, 1.0)


def cost_ratio(costs: Sequence[tuple[Floats, Floats]], shares: Contrast) -> Contrast:
    """Return the ratio of the costs of a right answer.

    `costs` are those of a setting and of the reference by problem, for each benchmark; `shares` is the ratio of the
    reference's share of right answers to the setting's.
    """
    strata = strata_of_sizes([len(cost) for cost, _ in costs])
    setting_costs = np.concatenate([cost for cost, _ in costs])
    reference_costs = np.concatenate([cost for _, cost in costs])
    dearest = float(max(setting_costs.max(), reference_costs.max()))
    cost = _ratio(setting_costs, reference_costs, strata, dearest)
    ratio = cost.value * shares.value
    low = ratio * math.exp(-math.hypot(_distance(cost.low, cost.value), _distance(shares.low, shares.value)))
    above = math.hypot(_distance(cost.value, cost.high), _distance(shares.value, shares.high))
    return Contrast(ratio, low, ratio * math.exp(above) if above < math.inf else math.inf)


def _distance(smaller: float, larger: float) -> float:
    """Return the distance of two numbers on the scale of logarithms; infinite from 0, and to infinity."""
    if smaller <= 0 or larger == math.inf:
        return math.inf
    return math.log(larger / smaller)


def _ratio(first: Floats, second: Floats, strata: Ints, largest: float) -> Contrast:
    """Return the ratio of the means of `first` and `second` [problems], which lie between 0 and the `largest`."""
    problem_weights = weights(strata)
    value = float(first @ problem_weights) / float(second @ problem_weights)
    ratios = value * np.exp(np.linspace(-math.log(LARGEST_RATIO), math.log(LARGEST_RATIO), _LOOKS))
    differences = first[None] - ratios[:, None] * second[None]
    # Falls as the ratio rises, from above Z to below -Z.
    scores = score(differences, 0.0, -ratios * largest, largest, strata)
    return Contrast(value, _ratio_at(ratios, scores, Z), _ratio_at(ratios, scores, -Z))


def _ratio_at(ratios: Floats, scores: Floats, level: float) -> float:
    """Return the ratio at which falling scores reach a level; 0 or infinite where that lies beyond the ends."""
    if scores[0] < level:
        return 0.0
    if scores[-1] > level:
        return math.inf
    return float(np.exp(np.interp(-level, -scores, np.log(ratios))))
