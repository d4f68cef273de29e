"""Types, levels and small functions that all methods share.

Everywhere `strata` [problems] numbers the benchmark of each problem, from 0. Benchmarks weigh equally, whatever their
sizes, and so do the problems of one benchmark. Problems are the independent units; samples of one problem are not.
Problems that share a passage, a seed or a template are no independent units either: `clusters` [problems] numbers what
they share, the mean over a cluster stands in their place, and clusters weigh equally, whatever their sizes.
Correlations, decay with depth and autopsies count problems all the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: The chance of a false claim that a claim or a family of claims may have.
LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """A difference or correlation with its limits: what is proven of it, and what it rests on.

    `p` is the two-sided p-value of "none", NaN where it has none; `p_holm` is adjusted over all differences that are
    tested together.

    A loss that is tested against a margin (`against_reference`) has a `limit`, the one-sided upper limit at the level
    at which it was tested, or would be tested next: it decides, `low` and `high` decide nothing. `joint_limit` is that
    for all settings together. `is_kept`: proven to lose at most the margin; `is_broken`: proven to lose more. Of a
    control nothing is claimed but that it is broken.

    It rests on so many independent `units`, on `problems`, and on `pairs` of traces, of which some are `missing`.
    Of a loss so many `traces` are under a KV budget, of which some were `compressed`; `by_benchmark` has its parts.
    `claims` has the same difference by each claim that can be made, the narrowest first. `p_kept` and `p_broken` are
    the p-values of "more than the margin" and "at most the margin", where these are tested.
    """

    value: float
    low: float
    high: float
    p: float = math.nan
    p_holm: float = math.nan
    limit: float = field(default=1.0, repr=False)
    joint_limit: float = field(default=1.0, repr=False)
    is_kept: bool = field(default=False, repr=False)
    is_broken: bool = field(default=False, repr=False)
    is_control: bool = field(default=False, repr=False)
    units: int = field(default=0, repr=False)
    problems: int = 0
    pairs: int = 0
    missing: int = field(default=0, repr=False)
    traces: int = field(default=0, repr=False)
    compressed: int = field(default=0, repr=False)
    by_benchmark: Mapping[str, float] = field(default_factory=dict, repr=False)
    claims: Mapping[str, Difference] = field(default_factory=dict)
    p_kept: float = field(default=math.nan, repr=False)
    p_broken: float = field(default=math.nan, repr=False)

    @property
    def is_proven(self) -> bool:
        """True if it is proven among all that are tested together."""
        return self.p_holm <= LEVEL

    @property
    def excludes_zero(self) -> bool:
        """True if its own limits lie on one side of 0."""
        return self.low > 0 or self.high < 0

    @property
    def keeps_like(self) -> bool:
        """Return whether a loss of at most the margin is proven by every claim; problems like these is among them."""
        return all(one.is_kept for one in self.claims.values()) if self.claims else self.is_kept

    @property
    def breaks_like(self) -> bool:
        """Return the same of a loss of more than the margin."""
        return all(one.is_broken for one in self.claims.values()) if self.claims else self.is_broken

    @property
    def keeps_any(self) -> bool:
        """Return whether a loss of at most the margin is proven by the narrowest claim."""
        return next(iter(self.claims.values()), self).is_kept

    @property
    def breaks_any(self) -> bool:
        """Return the same of a loss of more than the margin."""
        return next(iter(self.claims.values()), self).is_broken

    @property
    def missing_share(self) -> float:
        """The share of the promised pairs of traces that are missing."""
        return self.missing / self.pairs if self.pairs else 0.0

    def limit_of(self, claim: str) -> float | None:
        """Return the upper limit by a claim; None where it cannot be made."""
        of_claim = self.claims.get(claim)
        return None if of_claim is None else of_claim.limit

    def in_percent(self, value: str = "value", low: str = "low", high: str = "high") -> dict[str, float | None]:
        """Return the difference and its limits under these names: in percent with four decimals, None if unknown."""
        shares = {value: self.value, low: self.low, high: self.high}
        return {name: round(100 * share, 4) if math.isfinite(share) else None for name, share in shares.items()}


def normal_quantile(one_sided_level: float) -> float:
    """Return the normal quantile that is exceeded with this chance."""
    return float(-special.ndtri(one_sided_level))


#: The 97.5 % quantile of the normal distribution.
Z = normal_quantile(LEVEL / 2)


def weights(strata: Ints) -> Floats:
    """Return the weight of each problem; they sum to 1, equal for every benchmark."""
    sizes = np.bincount(strata)
    return np.asarray(1.0 / (len(sizes) * sizes[strata]), float)


def problems_by_benchmark(strata: Ints) -> list[Ints]:
    """Return the indices of the problems of each benchmark."""
    return [np.flatnonzero(strata == stratum) for stratum in range(int(strata.max()) + 1)]


def strata_of_sizes(sizes: Sequence[int]) -> Ints:
    """Return the strata of problems that lie benchmark by benchmark; `sizes` are the numbers of their problems."""
    return np.repeat(np.arange(len(sizes)), sizes)


def mean_of_known(values: Floats) -> Floats:
    """Return the means over the last axis of the values that are known; NaN where none is."""
    count = (~np.isnan(values)).sum(-1)
    return np.asarray(np.where(count > 0, np.nansum(values, axis=-1) / np.maximum(count, 1), math.nan), float)


def cluster_numbers(names: Sequence[Hashable]) -> Ints | None:
    """Return the number of each problem's cluster, from 0 in the order of the names; None if each has its own."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(name, len(numbers)) for name in names]
    return None if len(numbers) == len(found) else np.array(found)


def means_of_clusters(values: Floats, clusters: Ints | None) -> Floats:
    """Return the means [..., clusters] of the known values [..., problems] of each cluster; NaN where none is known.

    Without `clusters` the values themselves.
    """
    if clusters is None:
        return values
    places = [np.flatnonzero(clusters == cluster) for cluster in range(int(clusters.max()) + 1)]
    return np.stack([mean_of_known(values[..., problems]) for problems in places], axis=-1)


def strata_of_clusters(strata: Ints, clusters: Ints | None) -> Ints:
    """Return the benchmark of each cluster from those of the problems."""
    if clusters is None:
        return strata
    return np.asarray(strata[np.unique(clusters, return_index=True)[1]])


def standard_error(values: Floats, strata: Ints) -> Floats:
    """Return the standard error of the mean over benchmarks of `values` [..., problems].

    Infinite where a benchmark has a single problem, since its variance is unknown.
    """
    variance_of_sum = np.zeros(values.shape[:-1])
    benchmarks = problems_by_benchmark(strata)
    for problems in benchmarks:
        if len(problems) < 2:
            return np.full(values.shape[:-1], np.inf)
        variance_of_sum = variance_of_sum + values[..., problems].var(-1, ddof=1) / len(problems)
    return np.asarray(np.sqrt(variance_of_sum) / len(benchmarks), float)


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: the chance of any false claim among those at most 0.05 is at most 0.05.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65-70.
    """
    adjusted = list(p)
    so_far = 0.0
    for rank, index in enumerate(np.argsort(p, kind="stable").tolist()):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted
