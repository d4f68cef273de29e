"""Inference on a whole map, on arrays: is there any difference, and what do the axes do.

Everywhere `means` is [problems, cells]: the mean grade of a problem under each setting, in [0, 1]. `strata` is
[problems]: the number, from 0, of the benchmark that a problem belongs to. Benchmarks weigh equally and so do the
problems of one. Problems are the independent units; nothing is assumed about how alike cells are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

from kvatlas.core import KvatlasError
from kvatlas.stats.intervals import (
    Floats,
    Ints,
    Z,
    correlations,
    imagined_ends,
    interval,
    p_value,
    score,
    simultaneous_p,
    simultaneous_quantile,
)

FLIPS = 10_000
#: Up to this many problems all sign patterns are tried instead of a sample of them.
EXACT_UP_TO = 14
#: The quantile to add for a power of 0.8.
POWER = float(special.ndtri(0.8))


class TestMethod(StrEnum):
    """The test of "all cells equal"."""

    LARGEST = (
        "spread of the cells and difference of each level of an axis to the others, against sign flips of whole "
        "problems: no cell differs from another on any problem"
    )
    CHI_SQUARE = (
        "chi-square test with the binomial bound: as if all samples of the same problems were independent draws of "
        "equal difficulty"
    )


@dataclass(frozen=True)
class Test:
    """A test of "all cells equal". `statistic` is the spread between cells over what chance gives: 1 is noise."""

    statistic: float
    p: float
    method: TestMethod


@dataclass(frozen=True)
class Contrast:
    """A difference or correlation with its 95 % interval, and the two-sided p-value of "none" or NaN."""

    value: float
    low: float
    high: float
    p: float = math.nan


def contrasts(*numbers: Floats) -> list[Contrast]:
    """The contrasts of values, lower and upper limits, and p-values."""
    return [Contrast(*map(float, own)) for own in zip(*numbers, strict=True)]


def weights(strata: Ints) -> Floats:
    """The weight of each problem; they sum to 1, equal for every benchmark."""
    sizes = np.bincount(strata)
    return np.asarray(1.0 / (len(sizes) * sizes[strata]), float)


def omnibus(means: Floats, strata: Ints, rows: Floats | None = None) -> Test:
    """Test "the settings are the same to this model" by the spread of the cells, and by contrasts `rows` [k, cells].

    The statistic is the sum of squares of the cells' mean deviations over its expectation by chance. The p-value is
    that of the smallest p-value of the spread and of each contrast, under the sign flips of `flip_p`.
    """
    count = means.shape[1]
    own = weights(strata)[:, None] * (means - means.mean(1, keepdims=True))
    expected = float((own**2).sum())
    if count < 2 or expected < 1e-18:
        return Test(0.0, 1.0, TestMethod.LARGEST)
    spread = float((own.sum(0) ** 2).sum())
    flips = np.concatenate([np.ones((1, len(means))), signs(len(means))])
    rows = np.zeros((0, count)) if rows is None else rows
    values = np.concatenate([((flips @ own) ** 2).sum(1)[None], np.abs(flips @ _scaled(means, strata, rows)).T])
    ranks = [len(row) - np.searchsorted(np.sort(row), row - 1e-12) for row in values]
    smallest = np.min(ranks, axis=0)
    # All patterns of few problems hold the observed one already.
    first = int(len(means) <= EXACT_UP_TO)
    return Test(spread / expected, float((smallest[first:] <= smallest[0]).mean()), TestMethod.LARGEST)


def flip_p(means: Floats, strata: Ints, rows: Floats) -> Floats:
    """Return the p-value [k] of each contrast of `rows` [k, cells], adjusted over all of them by flipping signs.

    If the settings are the same to the model, a problem's differences are as likely with all signs reversed. The
    hypothesis says more than equal means: it is also rejected where one setting collapses on a few problems and gains a
    little on the others.

    Source: Romano and Wolf (2005), JASA 100:94-108; Hemerik, Goeman and Finos (2020), J. Royal Statistical Society B
    82:841-864 (sign flips of score contributions).
    """
    scaled = _scaled(means, strata, rows)
    chance = np.sort(np.abs(signs(len(means)) @ scaled).max(1))
    beyond = len(chance) - np.searchsorted(chance, np.abs(scaled.sum(0)) - 1e-9)
    # All patterns of few problems hold the observed one already.
    more = int(len(means) > EXACT_UP_TO)
    return np.asarray(np.where(np.abs(scaled).max(0) > 0, (more + beyond) / (more + len(chance)), 1.0), float)


def _scaled(means: Floats, strata: Ints, rows: Floats) -> Floats:
    """[problems, k]: the contrasts of `rows` by problem, in units of the root of their summed squares; else 0."""
    own = weights(strata)[:, None] * (means @ rows.T)
    norms = np.sqrt((own**2).sum(0))
    return np.asarray(np.where(norms > 1e-12, own / np.maximum(norms, 1e-12), 0.0), float)


def joint_contrasts(
    means: Floats, strata: Ints, rows: Floats, *, samples: int = 1, flip: bool = False
) -> list[Contrast]:
    """The contrasts of `rows` [k, cells] of coefficients, with limits and p-values that hold together.

    The p-values are where the limits reach 0, or with `flip` those of `flip_p`, which see more and test more.
    """
    values, levels = rows @ means.T, weights(strata) @ means
    alike = correlations(values, strata)
    plus, minus = np.maximum(rows, 0), np.minimum(rows, 0)
    # The cells on one side of a contrast move a typical problem to 0 or 1, the others stay at their means.
    low = np.minimum(minus @ levels, plus @ levels + minus.sum(1))
    high = np.maximum(plus @ levels, minus @ levels + plus.sum(1))
    low, high, unseen = imagined_ends(values, low, high, samples, (minus.sum(1), plus.sum(1)))
    bottom, top = interval(values, low, high, simultaneous_quantile(alike), strata, unseen)
    p = flip_p(means, strata, rows) if flip else simultaneous_p(score(values, 0.0, low, high, strata, unseen), alike)
    return contrasts(values @ weights(strata), bottom, top, p)


def mean_contrast(
    values: Floats, strata: Ints | None = None, *, samples: int = 1, means: tuple[float, float] = (0.5, 0.5)
) -> Contrast:
    """The mean of the differences `values` [problems], with its interval and the p-value of 0 (`score`).

    With several samples a problem the interval looks at the `means` of the two settings (`imagined_ends`).
    """
    first, second = means
    low, high, unseen = imagined_ends(values, -max(second, 1 - first), max(first, 1 - second), samples)
    bottom, top = interval(values, low, high, Z, strata, unseen)
    p = p_value(score(values, 0.0, low, high, strata, unseen))
    value = values.mean() if strata is None else weights(strata) @ values
    return Contrast(float(value), float(bottom), float(top), float(p))


def level_effect(levels: Sequence[int], level: int) -> Floats:
    """Coefficients over cells of the mean of one level minus the mean of the others."""
    sizes = np.bincount(levels)
    others = max(int((sizes > 0).sum()) - 1, 1)
    return np.asarray([(1.0 if at == level else -1 / others) / sizes[at] for at in levels], float)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the chance of any false claim among those below 0.05 is at most 0.05.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65-70.
    """
    adjusted, so_far = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted


@lru_cache(maxsize=4)
def signs(problems: int) -> Floats:
    """[patterns, problems] of +1 and -1: every pattern for few problems, otherwise `FLIPS` random ones."""
    if problems <= EXACT_UP_TO:
        bits = (np.arange(2**problems)[:, None] >> np.arange(problems)) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, size=(FLIPS, problems))
    return np.asarray(1 - 2 * bits, np.float64)


#: The share of problems on which one setting is right and the other wrong, with one sample each: near settings and far
#: ones on the demo's grid.
DISCORDANCE = (0.05, 0.2)
#: Normal quantiles of a two-sided 5 % and of a power of 0.8, added.
_NEEDED = Z + POWER


def problems_for(difference: float, discordance: float) -> int:
    """Return the problems that show a paired `difference` in (0, 1), with a power of 0.8 at a two-sided p of 5 %.

    A paired difference is -1, 0 or 1, and not 0 with the chance `discordance` in (0, 1], as with one sample a problem.
    Raises KvatlasError for a difference out of range.
    """
    if not 0 < difference < 1:
        raise KvatlasError(f"A difference to detect lies between 0 and 100 points; {100 * difference:g} was given.")
    return math.ceil(discordance * (_NEEDED / difference) ** 2)


def detectable(problems: float, discordance: float) -> float:
    """Return the difference in (0, 1] that `problems` show with a power of 0.8; 1 where none is shown."""
    return min(1.0, _NEEDED * math.sqrt(discordance / problems))


def designs(sizes: Sequence[int], points: float) -> list[dict[str, Any]]:
    """Return for each discordance the problems that show `points`, and the points that benchmarks of `sizes` show."""
    # Benchmarks weigh equally, so small ones decide.
    own = round(len(sizes) ** 2 / sum(1 / size for size in sizes))
    return [
        {
            "points": points,
            "discordance": share,
            "problems": problems_for(points / 100, share),
            "own_problems": own,
            "own_points": round(100 * detectable(own, share), 4),
        }
        for share in DISCORDANCE
    ]
