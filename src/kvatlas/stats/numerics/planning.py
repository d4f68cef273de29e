"""Numbers of problems and samples: those that prove a loss, and those that show a difference.

**For problems like these** what N problems can prove at all is decided by `provable_margin`: with nothing lost, a rare
kind of problem on which a setting fails may not have been met. No method does it with fewer. Let P be any spread of
losses over problems with mean u, and Q = (1 - q) P + q (a loss of 1) with q = (m - u) / (1 - u), so that Q loses the
margin m. A run of n problems of Q looks like one of P with the chance (1 - q) ** n. So a test that errs in at most 5 %
of runs of Q proves P in at most .05 (1 - q) ** -n of runs (`power_bound`): 30 problems, margin 3: .12. Betting,
empirical Bernstein limits and joint worst cases over benchmarks were tried, and none is better by more than .09. How
many problems prove an observed loss is simulated from a pilot.

**On these problems** the units are traces, so samples count as well (`needed_samples`).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import (
    LEVEL,
    Floats,
    Ints,
    Z,
    normal_quantile,
    problems_by_benchmark,
    standard_error,
    strata_of_sizes,
    weights,
)
from kvatlas.stats.numerics.bounded import upper_limit

#: The power for which numbers of problems are given, and its normal quantile.
POWER = 0.8
POWER_QUANTILE = float(special.ndtri(POWER))
#: More than so many times the problems of a pilot are not searched, unless they are fewer than `MOST_PROBLEMS`.
MOST_TIMES = 20
MOST_PROBLEMS = 4000
#: Simulated runs at each number of problems.
_RUNS = 200


def provable_margin(sizes: Sequence[int], sequences: int = 1) -> float:
    """Return the smallest margin that benchmarks of these sizes prove where nothing is lost.

    It is the upper limit of units that all lose 0, with the level of 5 % shared among so many sequences: problems, or
    traces for the claim on these problems. For benchmarks of equal size it is 1 - level ** (1 / units), but for the
    approximation of the quantile; otherwise the smallest benchmark decides.
    """
    nothing_lost = np.zeros((1, sum(sizes)))
    z = normal_quantile(LEVEL / sequences)
    return float(upper_limit(nothing_lost, -1.0, 1.0, z, strata_of_sizes(sizes))[0])


def provable_sizes(sizes: Sequence[int], margin: float, sequences: int = 1) -> list[int]:
    """Return the smallest sizes in the same proportions that prove the margin in (0, 1) where nothing is lost."""
    enough = 1.0
    while provable_margin(scaled_sizes(sizes, enough), sequences) > margin:
        enough *= 2
    too_few = 0.0
    while (enough - too_few) * sum(sizes) > 0.5:
        middle = (enough + too_few) / 2
        if provable_margin(scaled_sizes(sizes, middle), sequences) > margin:
            too_few = middle
        else:
            enough = middle
    return scaled_sizes(sizes, enough)


def needed_samples(
    sizes: Sequence[int], differing: float, loss: float, margin: float, sequences: int = 1
) -> int | None:
    """Return the samples of each problem that prove the margin on these problems, with a power of 0.8.

    `differing` is the share of pairs of traces that differ, `loss` the true loss; None where it is not below the
    margin. By the normal distribution, at least as many as with nothing lost.
    """
    if loss >= margin:
        return None
    level = LEVEL / sequences
    # Benchmarks weigh equally, so small ones decide.
    equivalent = len(sizes) ** 2 / sum(1 / size for size in sizes)
    by_spread = differing * (normal_quantile(level) + POWER_QUANTILE) ** 2 / (margin - loss) ** 2
    with_nothing_lost = math.log(level) / math.log(1 - margin)
    return math.ceil(max(by_spread, with_nothing_lost) / equivalent)


def power_bound(problems: int, margin: float, level: float = LEVEL) -> float:
    """Return the power that no valid test of "at most the margin is lost" can pass where nothing is lost."""
    return min(1.0, level * (1 - margin) ** -problems)


def scaled_sizes(sizes: Sequence[int], factor: float) -> list[int]:
    """Return so many times the problems of each benchmark, at least one."""
    return [max(1, math.ceil(size * factor - 1e-9)) for size in sizes]


def needed_problems(pilot: Floats, strata: Ints, loss: float, margin: float, sequences: int = 1) -> int | None:
    """Return the problems that prove a loss of at most the margin with a power of 0.8, were the true loss `loss`.

    Runs are drawn from the observed losses `pilot` [problems], weighted exponentially so that their mean is `loss`, in
    benchmarks of the pilot's proportions; the share of runs whose limit keeps the margin is their power. None where
    `loss` is not below the margin, and where more than 20 times the pilot's problems, and more than 4,000, are needed.

    Source: Efron (1981), Canadian Journal of Statistics 9:139-172 (tilted resampling).
    """
    if loss >= margin:
        return None
    sizes = np.bincount(strata).tolist()
    z = normal_quantile(LEVEL / sequences)
    shift = loss - float(pilot @ weights(strata))
    tilted = [
        _tilted(pilot[problems], float(pilot[problems].mean()) + shift) for problems in problems_by_benchmark(strata)
    ]
    generator = np.random.default_rng(0)

    def power(factor: float) -> float:
        scaled = scaled_sizes(sizes, factor)
        runs = [
            generator.choice(values, size=(_RUNS, size), p=chances)
            for (values, chances), size in zip(tilted, scaled, strict=True)
        ]
        limits = upper_limit(np.concatenate(runs, axis=1), -1.0, 1.0, z, strata_of_sizes(scaled))
        return float((limits <= margin).mean())

    # By the normal distribution at first; the distance of a limit grows with the root of the number of problems.
    error = float(standard_error(pilot, strata))
    least = sum(provable_sizes(sizes, margin - max(loss, 0.0), sequences)) / sum(sizes)
    factor = least
    if math.isfinite(error):
        factor = max(least, ((z + POWER_QUANTILE) * error / (margin - loss)) ** 2)
    largest = max(MOST_TIMES, MOST_PROBLEMS / sum(sizes))
    for _ in range(6):
        factor = min(factor, largest)
        reached = power(factor)
        if abs(reached - POWER) < 0.03:
            break
        if reached < POWER and factor == largest:
            return None
        units = z + float(special.ndtri(np.clip(reached, 0.02, 0.98)))
        step = ((z + POWER_QUANTILE) / max(units, 0.5)) ** 2
        factor *= float(np.clip(step, 0.4, 2.5))
    return sum(scaled_sizes(sizes, factor))


def _tilted(values: Floats, mean: float) -> tuple[Floats, Floats]:
    """Return values with the chances that give them a mean: those observed, weighted by exp(tilt * value).

    The imagined problem of the limits, which loses 1, is among them: a rare loss may not have been met by the pilot.
    Where the mean is below all values, a gain of 1 is, too. They count a quarter: with whole ones the numbers are too
    high, without any far too low. The median number of pilots has a power of 0.75 to 0.90 so, and 0.83 to 0.97 with
    halves.
    """
    observed = len(values)
    values = np.append(values, 1.0)
    if mean <= values.min():
        values = np.append(values, -1.0)
    counts = np.full(len(values), 0.25)
    counts[:observed] = 1.0
    target = float(np.clip(mean, values.min(), values.max()))
    low = -500.0
    high = 500.0
    for _ in range(60):
        tilt = (low + high) / 2
        chances = special.softmax(tilt * values + np.log(counts))
        if float(chances @ values) < target:
            low = tilt
        else:
            high = tilt
    return values, chances


# -- differences -------------------------------------------------------------------------------------------------------

#: Normal quantiles of a two-sided 5 % and of the power, added.
_NEEDED = Z + POWER_QUANTILE


def problems_for(difference: float, discordance: float) -> int:
    """Return the problems that show a paired `difference` in (0, 1), with a power of 0.8 at a two-sided p of 5 %.

    A paired difference is -1, 0 or 1, and not 0 with the chance `discordance` in (0, 1], as with one sample a problem.
    """
    return math.ceil(discordance * (_NEEDED / difference) ** 2)


def detectable(problems: float, discordance: float) -> float:
    """Return the difference in (0, 1] that `problems` show with a power of 0.8; 1 where none is shown."""
    return min(1.0, _NEEDED * math.sqrt(discordance / problems))
