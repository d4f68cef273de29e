"""The ratio of two costs of a right answer, paired by problem.

A cost of a right answer is the mean cost divided by the share of right answers. Of the ratio of two such costs, the
shares are what is uncertain: a few right answers decide. Their ratio f has the limits at which the mean of
(second share - f * first share), a bounded value of each problem, is told from 0 (`bounded`). This is Fieller's idea
with bounded limits; where there are too few right answers, it has no end. The ratio of the mean costs has Student's
limits by the delta method, and the distances of both add in squares on the scale of logarithms.

Source: Fieller (1954), J. Royal Statistical Society B 16:175-185; Zou and Donner (2008), Statistics in Medicine
27:1693-1702 (recovery of variances from intervals); Casella and Berger (2002), section 5.5.4 (delta method).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Contrast, Floats, Z, strata_of_sizes
from kvatlas.stats.numerics.bounded import score

#: Ratios that are looked at lie between 1 / this and this; beyond it nothing can be said.
LARGEST_RATIO = 20.0
_LOOKS = 121


def share_ratio(first: Sequence[Floats], second: Sequence[Floats]) -> Contrast | None:
    """Return the ratio of the mean share `second` to that of `first` with its 95 % limits.

    Each benchmark is an array of shares in [0, 1] by problem. None where either has no right answer. The lower limit is
    0 and the upper one infinite where they lie beyond 20.
    """
    means = [sum(float(part.mean()) for part in shares) / len(shares) for shares in (first, second)]
    if not all(means):
        return None
    strata = strata_of_sizes([len(part) for part in first])
    ratios = np.exp(np.linspace(-math.log(LARGEST_RATIO), math.log(LARGEST_RATIO), _LOOKS))
    values = np.concatenate(second)[None] - ratios[:, None] * np.concatenate(first)[None]
    # Falls as the ratio rises, from above Z to below -Z.
    scores = score(values, 0.0, -ratios, 1.0, strata)
    return Contrast(means[1] / means[0], _crossing(ratios, scores, Z), _crossing(ratios, scores, -Z))


def _crossing(ratios: Floats, scores: Floats, level: float) -> float:
    """Return the ratio at which falling scores reach a level; 0 or infinite where that lies beyond the ends."""
    if scores[0] < level:
        return 0.0
    if scores[-1] > level:
        return math.inf
    return float(np.exp(np.interp(-level, -scores, np.log(ratios))))


def cost_ratio(costs: Sequence[tuple[Floats, Floats]], shares: Contrast) -> Contrast:
    """Return the ratio of the costs of a right answer.

    `costs` are those of a setting and of the reference by problem, for each benchmark; `shares` is the ratio of the
    reference's share of right answers to the setting's.
    """
    own = sum(float(cost.mean()) for cost, _ in costs) / len(costs)
    reference = sum(float(cost.mean()) for _, cost in costs) / len(costs)
    errors = [cost / own - other / reference for cost, other in costs]
    variance = sum(float(error.var(ddof=1)) / len(error) for error in errors if len(error) > 1) / len(costs) ** 2
    freedom = max(1, sum(map(len, errors)) - len(errors))
    reach = float(special.stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(variance)
    ratio = own / reference * shares.value
    below = math.hypot(math.log(shares.value / shares.low), reach) if shares.low > 0 else math.inf
    above = math.hypot(math.log(shares.high / shares.value), reach) if shares.high < math.inf else math.inf
    return Contrast(ratio, ratio * math.exp(-below), ratio * math.exp(above) if above < math.inf else math.inf)
