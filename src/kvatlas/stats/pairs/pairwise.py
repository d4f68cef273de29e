"""Two systems on the same problems: who is ahead how often and by how much, and how alike they find problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.inference.resampling import Contrast, mean_contrast
from kvatlas.stats.pairs.paired import strata_of
from kvatlas.stats.pairs.systems import ProblemKey, System

#: Resamples of problems behind the intervals of correlations.
RESAMPLES = 2000
#: Differences of means up to this count as being on the line.
EQUAL = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Correlation:
    """A rank correlation with its 95 % interval (percentiles of resampled problems)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """System x against system y. `x`, `y` [problems] are means over samples; `depth` [problems] is L where known.

    `above`, `on`, `below` are the shares of problems above the line y = x (y is ahead), on it, and below (x is ahead).
    `difference` is the mean of x - y over benchmarks of equal weight, with its 95 % interval. Correlations are None
    where a side, or L, does not vary; `given_depth` is the partial Spearman correlation given L.
    """

    places: tuple[ProblemKey, ...]
    x: Floats
    y: Floats
    above: float
    on: float
    below: float
    difference: Contrast
    spearman: Correlation | None
    given_depth: Correlation | None

    def to_json(self, first: str, second: str) -> dict[str, Any]:
        """Plain data under the names of the two."""
        return {
            "x": first,
            "y": second,
            "problems": len(self.places),
            "above": self.above,
            "on": self.on,
            "below": self.below,
            "difference": {name: getattr(self.difference, name) for name in ("value", "low", "high")},
            "spearman": vars(self.spearman) if self.spearman else None,
            "spearman_given_L": vars(self.given_depth) if self.given_depth else None,
        }


def pairs_of(systems: Sequence[System], seed: int = 0) -> list[tuple[int, int, Pair]]:
    """Every pair of systems by their places in the sequence, first with second, first with third, and so on."""
    if len(systems) < 2:
        raise KvatlasError(f"A comparison needs two or more systems; there is {len(systems)}.")
    return [(i, j, pair(systems[i], systems[j], seed)) for i, j in combinations(range(len(systems)), 2)]


def pair(first: System, second: System, seed: int = 0) -> Pair:
    """Compare two systems on the problems that both have; KvatlasError if there are fewer than two."""
    mine, theirs = first.means(), second.means()
    places = tuple(key for key in mine if key in theirs)
    if len(places) < 2:
        raise KvatlasError(
            f"{first.model} under {first.setting} and {second.model} under {second.setting} have "
            f"{len(places)} problems in common; a comparison needs at least 2."
        )
    x, y = np.array([mine[p] for p in places]), np.array([theirs[p] for p in places])
    depth = _depths(places, {**second.about, **first.about})
    ahead = y - x
    return Pair(
        places,
        x,
        y,
        above=float(np.mean(ahead > EQUAL)),
        on=float(np.mean(np.abs(ahead) <= EQUAL)),
        below=float(np.mean(ahead < -EQUAL)),
        difference=mean_contrast(-ahead, strata_of(places)),
        spearman=correlation(np.stack([x, y]), seed),
        given_depth=None if depth is None else correlation(np.stack([x, y, depth]), seed),
    )


def _depths(places: Sequence[ProblemKey], about: Mapping[ProblemKey, Mapping[str, Any]]) -> Floats | None:
    depths = [about.get(key, {}).get("L") for key in places]
    return None if any(depth is None for depth in depths) else np.array(depths, float)


def correlation(rows: Floats, seed: int = 0) -> Correlation | None:
    """Spearman's correlation of the first two rows of [rows, problems], partial given the third where there is one.

    The interval is made of the percentiles over resampled problems: ties, which a bounded metric has plenty of, are in
    it as they are. None where a row does not vary, or only as the third row explains.
    """
    value = float(_rank_correlation(rows[:, None, :])[0])
    if math.isnan(value):
        return None
    generator = np.random.default_rng(seed)
    count = rows.shape[1]
    chosen = generator.integers(0, count, size=(RESAMPLES, count))
    again = _rank_correlation(rows[:, chosen])
    low, high = np.nanquantile(again, [0.025, 0.975])
    return Correlation(value, float(low), float(high))


def _rank_correlation(rows: Floats) -> Floats:
    """[rows, resamples, problems] -> [resamples]; NaN where it is not defined."""
    ranks = stats.rankdata(rows, axis=-1)
    ranks = ranks - ranks.mean(-1, keepdims=True)
    norms = np.sqrt((ranks**2).sum(-1))

    def product(i: int, j: int) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((ranks[i] * ranks[j]).sum(-1) / (norms[i] * norms[j]))

    plain = product(0, 1)
    if len(rows) == 2:
        return plain
    mine, other = product(0, 2), product(1, 2)
    left = (1 - mine**2) * (1 - other**2)
    with np.errstate(invalid="ignore", divide="ignore"):
        partial = (plain - mine * other) / np.sqrt(left)
    return np.where(left > 1e-9, np.clip(partial, -1, 1), np.nan)
