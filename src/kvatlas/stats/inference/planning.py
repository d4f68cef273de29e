"""How many problems and samples show a difference, before anything is decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from kvatlas.core import KvatlasError

#: The share of problems on which one setting is right and the other wrong, with one sample each: near settings and far
#: ones on the demo's grid.
DISCORDANCE = (0.05, 0.2)
#: Normal quantiles of a two-sided 5 % and of a power of 0.8, added.
_NEEDED = float(stats.norm.ppf(0.975) + stats.norm.ppf(0.8))


@dataclass(frozen=True)
class Design:
    """What a paired comparison takes: `problems` with `samples` each, of this `discordance`, show `difference`."""

    difference: float
    discordance: float
    samples: int
    problems: int


def variance_of_problem(discordance: float, samples: int = 1, within: float = 0.0) -> float:
    """The variance of a problem's mean paired difference; `within` is the share of it that more samples can remove.

    With one sample a difference is -1, 0 or 1, and its variance is the discordance less the squared mean, which is left
    out here. How much of it more samples remove is not known beforehand; with `within` 0 they remove nothing.
    """
    if not 0 < discordance <= 1:
        raise KvatlasError(f"discordance is a share above 0 and at most 1; {discordance} was given.")
    return discordance * (1 - within + within / samples)


def problems_for(difference: float, discordance: float, samples: int = 1, within: float = 0.0) -> Design:
    """The problems that show a paired `difference` in (0, 1) with a power of 0.8 at a two-sided p of 5 %.

    Raises KvatlasError for a difference outside (0, 1).
    """
    if not 0 < difference < 1:
        raise KvatlasError(f"A difference to detect lies between 0 and 100 points; {100 * difference:g} was given.")
    variance = variance_of_problem(discordance, samples, within)
    return Design(difference, discordance, samples, math.ceil(variance * (_NEEDED / difference) ** 2))


def detectable(problems: int, discordance: float, samples: int = 1, within: float = 0.0) -> float:
    """The difference in (0, 1] that `problems` show with a power of 0.8; 1 where none is."""
    variance = variance_of_problem(discordance, samples, within)
    return min(1.0, _NEEDED * math.sqrt(variance / problems))
