"""Do windows differ at equal memory? Pairs of settings that are fixed before outcomes, and lines as an estimate.

A wider local window keeps more tokens at the same ratio, so a difference between windows may be one of memory. Two
claims can be made of a map without that confusion, under one assumption: a setting that keeps more tokens with the same
window loses nothing by it (more memory does no harm).

Dominance. A setting that keeps no more tokens than one of another window, and is better, is not better by its memory.
Each setting is compared with the one of each other window that keeps least among those that keep no fewer tokens, and
only if it is the one of its own window that keeps most among those that keep no more than that one. The pairs depend
on the numbers of tokens alone. Tests are one-sided and adjusted by Holm over the map, so a map in which only memory
matters names a window in at most 5 % of runs: in each pair the expected difference is 0 or less. Numbers of tokens are
means over problems and benchmarks. Where prompts of unlike lengths make a setting keep more than the other one on some
of them, that bound rests on the mean alone; `kvatlas.stats.map_tests` names such benchmarks.

Lines. The mean over problems is joined by straight lines between the settings of a window, and two windows are compared
in the mean over the numbers of tokens that both have. The limits are those of a weighted mean of settings. It is an
estimate and no proof: between two settings the truth need not be straight, and a cliff there looks like a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Difference, Floats, Ints, holm, normal_quantile, weights
from kvatlas.stats.numerics.bounded import lower_limit, mean_difference, score, upper_limit

#: Tokens and differences below this count as 0.
_TINY = 1e-9
#: The numbers of a better setting and of the one that it is compared with.
Pair = tuple[int, int]


class LineEstimate(NamedTuple):
    """The wide window minus the narrow one, by their numbers, over the `low` to `high` tokens that both keep."""

    wide: int
    narrow: int
    low: float
    high: float
    difference: Difference


def dominance_pairs(tokens: Floats, window: Ints) -> list[Pair]:
    """Return the pairs of settings that are tested, from the tokens that stay and the window of each setting."""
    pairs = []
    for first in range(len(tokens)):
        for other in range(int(window.max()) + 1):
            keeps_no_less = np.flatnonzero((window == other) & (tokens >= tokens[first] - _TINY))
            if other == window[first] or not len(keeps_no_less):
                continue
            second = int(keeps_no_less[np.argmin(tokens[keeps_no_less])])
            keeps_no_more = np.flatnonzero((window == window[first]) & (tokens <= tokens[second] + _TINY))
            if keeps_no_more[np.argmax(tokens[keeps_no_more])] == first:
                pairs.append((first, second))
    return pairs


def compare_pairs(values: Floats, strata: Ints, pairs: Sequence[Pair], widening: float = 1.0) -> dict[Pair, Difference]:
    """Return the first minus the second of each pair of columns of `values` [units, settings], if the first is better.

    Limits hold for all pairs of the map together, each side at 5 %, so that the lower one is above 0 wherever the
    largest distance is proven; they are NaN where nothing is proven.
    A value that is missing is NaN and counts against the first of a pair. At an early look limits lie `widening` times
    as far away (`looks`).
    """
    if not pairs:
        return {}
    first, second = np.array(pairs).T
    differences = (values[:, first] - values[:, second]).T
    lowest = np.where(np.isnan(differences), -1.0, differences)
    highest = np.where(np.isnan(differences), 1.0, differences)
    means = lowest @ weights(strata)
    # A setting that is not better on these units has a p-value above one half, whatever it is.
    is_better = means > _TINY
    p = np.ones(len(pairs))
    if is_better.any():
        scores = score(lowest[is_better], 0.0, -1.0, 1.0, strata, highest[is_better])
        p[is_better] = special.ndtr(-scores / widening)
    adjusted = np.array(holm(p.tolist()))

    # Limits take longer than tests, and are only told of proven pairs.
    is_proven = adjusted <= LEVEL
    low = np.full(len(pairs), np.nan)
    high = np.full(len(pairs), np.nan)
    if is_proven.any():
        z = widening * normal_quantile(LEVEL / len(pairs))
        low[is_proven] = lower_limit(lowest[is_proven], -1.0, 1.0, z, strata)
        high[is_proven] = upper_limit(highest[is_proven], -1.0, 1.0, z, strata)
    contrasts = map(Difference, means.tolist(), low.tolist(), high.tolist(), p.tolist(), adjusted.tolist())
    return dict(zip(pairs, contrasts, strict=True))


def strongest(tests: Mapping[Pair, Difference]) -> Pair | None:
    """Return the proven pair of the smallest p-value, of equal ones the largest difference; None without one."""
    proven = [pair for pair, difference in tests.items() if difference.is_proven]
    return min(proven, key=lambda pair: (tests[pair].p, -tests[pair].value), default=None)


def line_weights(tokens: Floats, low: float, high: float) -> Floats:
    """Return weights of settings: those of the mean, from `low` to `high` tokens, of straight lines between them.

    The settings keep these `tokens`, in any order. Settings that keep the same number count as their mean.
    """
    kept, place = np.unique(tokens, return_inverse=True)
    inside = kept[(kept > low) & (kept < high)]
    knots = np.concatenate([[low], inside, [high]])
    lengths = np.diff(knots)
    if high - low <= _TINY:
        knot_weights = np.array([1.0, *np.zeros(len(knots) - 1)])
    else:
        knot_weights = (np.append(lengths, 0.0) + np.insert(lengths, 0, 0.0)) / 2 / (high - low)
    # [knots, kept]: the value of the line at each knot.
    at_knots = np.stack([np.interp(knots, kept, one) for one in np.eye(len(kept))], axis=1)
    shared = np.bincount(place)
    return np.asarray((knot_weights @ at_knots / shared)[place], float)


def line_estimate(values: Floats, strata: Ints, tokens: Floats, window: Ints) -> LineEstimate | None:
    """Estimate the wider window minus the narrower one of the two that are farthest apart and share numbers of tokens.

    `values` [units, settings] and windows are numbered from the narrowest. None if no two windows share any. It
    proves nothing, so it has no p-value.
    """
    count = int(window.max()) + 1
    by_distance = sorted(permutations(range(count), 2), key=lambda pair: (pair[1] - pair[0], pair))
    for wide, narrow in by_distance[: len(by_distance) // 2]:
        low = max(tokens[window == wide].min(), tokens[window == narrow].min())
        high = min(tokens[window == wide].max(), tokens[window == narrow].max())
        if low > high + _TINY:
            continue
        setting_weights = np.zeros(len(tokens))
        setting_weights[window == wide] = line_weights(tokens[window == wide], low, max(low, high))
        setting_weights[window == narrow] -= line_weights(tokens[window == narrow], low, max(low, high))
        difference = mean_difference(values @ setting_weights, strata)
        return LineEstimate(wide, narrow, float(low), float(high), replace(difference, p=float("nan")))
    return None
