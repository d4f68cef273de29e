"""Memory in averages alone: what published maps, of which no trace is known, say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from kvatlas.core import Map, grouped, windows_apart
from kvatlas.stats.csv_tests import variance
from kvatlas.stats.numerics.arrays import Contrast, Floats, Z
from kvatlas.stats.windows_at_memory import WINDOW

RATIO = "ratio"


@dataclass(frozen=True)
class MemoryTrend:
    """Memory in the averages of one model's maps, in Pass@1 as a share; limits are the binomial bound's.

    `per_thousand` is the slope over 1,000 tokens that stay. `lowest_ratio` minus the cells of higher ratios that keep
    no more tokens, `against_thriftier`, is the mean over all such pairs; None without any.
    """

    model: str
    low_tokens: float
    high_tokens: float
    total_tokens: float
    per_thousand: Contrast
    lowest_ratio: Any
    against_thriftier: Contrast | None
    #: The local windows, ascending.
    windows: tuple[Any, ...]
    #: True if the narrowest and the widest of them keep no number of tokens in common.
    is_blind: bool

    @property
    def is_shown(self) -> bool:
        """True if the limits of the slope exclude 0."""
        return self.per_thousand.low > 0 or self.per_thousand.high < 0


@dataclass(frozen=True)
class TokenKinds:
    """The slopes, over 1,000 tokens, of a chosen token more and of one moved to the window, in the mean over maps.

    Of the `maps` so many have the sign of the mean; `benchmarks` are the units that could prove it.
    """

    chosen: float
    chosen_alike: int
    moved: float
    moved_alike: int
    maps: int
    benchmarks: int


def memory_trends(maps: Sequence[Map]) -> list[MemoryTrend]:
    """Return the trend of each model over the maps of averages whose tokens are known."""
    usable = [map_ for map_ in maps if _has_windows_and_ratios(map_)]
    trends = []
    for of_model in grouped(usable, lambda map_: (map_.model, map_.axes)).values():
        variances = [largest for largest in map(variance, of_model) if largest is not None]
        # Nothing is known where the problems of a benchmark are unknown.
        if len(variances) == len(of_model):
            trends.append(_memory_trend(of_model, math.sqrt(math.fsum(variances)) / len(of_model)))
    return trends


def token_kinds(maps: Sequence[Map]) -> TokenKinds | None:
    """Return the worth of chosen tokens and of the window over maps of averages; None without such maps."""
    slopes = []
    for map_ in filter(_has_windows_and_ratios, maps):
        # Least squares: 1,000 tokens more at one window, and 1,000 more of window beside.
        tokens, values = _tokens_and_values(map_)
        design = np.stack([np.ones(len(tokens)), tokens / 1000, _axis_numbers(map_, WINDOW) / 1000], axis=1)
        slopes.append(np.linalg.lstsq(design, values, rcond=None)[0][1:])
    if not slopes:
        return None

    chosen, moved = np.array(slopes).T
    alike = [int((np.sign(slope) == np.sign(slope.mean())).sum()) for slope in (chosen, moved)]
    benchmarks = len({map_.benchmark for map_ in maps})
    return TokenKinds(float(chosen.mean()), alike[0], float(moved.mean()), alike[1], len(slopes), benchmarks)


def _has_windows_and_ratios(map_: Map) -> bool:
    """Return whether a map of averages has windows, ratios, and known tokens in all cells."""
    names = [name for name, _ in map_.axes]
    if map_.validity is not None or map_.is_mean or sorted(names) != sorted((WINDOW, RATIO)):
        return False
    if len(map_.cells) < 4 or min(len(values) for _, values in map_.axes) < 2:
        return False
    return all(cell.stays_tokens is not None for cell in map_.cells.values())


def _axis_numbers(map_: Map, axis: str) -> Floats:
    side = [name for name, _ in map_.axes].index(axis)
    return np.array([float(coord[side]) for coord in map_.cells])


def _tokens_and_values(map_: Map) -> tuple[Floats, Floats]:
    cells = map_.cells.values()
    return np.array([cell.stays_tokens for cell in cells], float), np.array([cell.estimate.value for cell in cells])


def _memory_trend(maps: Sequence[Map], deviation: float) -> MemoryTrend:
    """Return the trend of the maps of one model on unlike benchmarks, whose means have the standard deviation."""
    first = maps[0]
    by_map = [_tokens_and_values(map_) for map_ in maps]
    tokens = np.mean([of_map for of_map, _ in by_map], axis=0)
    means = np.mean([of_map for _, of_map in by_map], axis=0)
    centred = (tokens - tokens.mean()) / 1000
    slope_weights = centred / (centred @ centred)
    ratios = _axis_numbers(first, RATIO)
    pair_weights = _lowest_ratio_weights(ratios, tokens)

    share = next(iter(first.cells.values())).stays_share
    windows = next(values for name, values in first.axes if name == WINDOW)
    by_window = {window: tokens[_axis_numbers(first, WINDOW) == window].tolist() for window in windows}
    return MemoryTrend(
        first.model,
        float(tokens.min()),
        float(tokens.max()),
        math.nan if share is None else float(tokens[0] / share),
        _weighted_sum(slope_weights, means, deviation),
        float(ratios.min()),
        None if pair_weights is None else _weighted_sum(pair_weights, means, deviation),
        windows,
        (windows[0], windows[-1]) in windows_apart(by_window),
    )


def _lowest_ratio_weights(ratios: Floats, tokens: Floats) -> Floats | None:
    """Return weights of cells: the lowest ratio minus cells of higher ratios that keep no more, over all such pairs."""
    is_lowest = ratios == ratios.min()
    pairs = [
        (one, other)
        for one, other in permutations(range(len(tokens)), 2)
        if is_lowest[one] and not is_lowest[other] and tokens[other] <= tokens[one]
    ]
    if not pairs:
        return None

    cell_weights = np.zeros(len(tokens))
    for one, other in pairs:
        cell_weights[one] += 1 / len(pairs)
        cell_weights[other] -= 1 / len(pairs)
    return cell_weights


def _weighted_sum(cell_weights: Floats, means: Floats, deviation: float) -> Contrast:
    """Return a weighted sum of cells of this standard deviation each, with its 95 % limits."""
    value = float(cell_weights @ means)
    reach = Z * deviation * math.sqrt(float(cell_weights @ cell_weights))
    return Contrast(value, value - reach, value + reach)
