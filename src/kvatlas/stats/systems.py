"""Models under settings, compared problem by problem: who is ahead how often, and how alike they find problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations
from operator import attrgetter
from typing import Any

import numpy as np

from kvatlas.core import KvatlasError, Setting, grouped
from kvatlas.stats.numerics.arrays import Contrast, Floats, Ints
from kvatlas.stats.numerics.bounded import mean_difference
from kvatlas.stats.paired import Outcomes, strata_of
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces, ProblemKey, check_distinct, check_pairs, check_same_problems


@dataclass(frozen=True)
class ModelSetting:
    """A model under a setting. `outcomes[benchmark, problem][sample]` is the metric, `about` the difficulty."""

    model: str
    setting: Setting
    outcomes: Outcomes = field(default_factory=dict)
    about: Mapping[ProblemKey, Mapping[str, Any]] = field(default_factory=dict)
    cells: tuple[CellTraces, ...] = ()

    @cached_property
    def compared(self) -> Outcomes:
        """The grades of paired comparisons: by sample, or one for each problem where a rule makes it of its samples.

        Raises KvatlasError for cells that cannot be compared in pairs.
        """
        check_pairs(self.cells)
        has_rule = any(cell.rule is not None for cell in self.cells)
        return by_sample(self.cells, CellTraces.values) if has_rule else self.outcomes

    def means(self) -> dict[ProblemKey, float]:
        """The metric of each problem: the mean over samples, or that of a rule over samples."""
        return {key: math.fsum(samples.values()) / len(samples) for key, samples in self.compared.items()}


def by_sample(cells: Iterable[CellTraces], values: Callable[[CellTraces], Floats]) -> Outcomes:
    """The known `values` [problem, sample] of cells, by benchmark and problem, and by sample."""
    found: dict[ProblemKey, dict[int, float]] = {}
    for cell in cells:
        for problem, row in zip(cell.place, values(cell).tolist(), strict=True):
            known = {sample: value for sample, value in enumerate(row) if not math.isnan(value)}
            found.setdefault((cell.benchmark, problem), {}).update(known)
    return {key: samples for key, samples in found.items() if samples}


def systems_of(
    runs: Sequence[RunData], metric: str = "progress", benchmarks: Sequence[str] | None = None
) -> list[ModelSetting]:
    """All models under their settings of some runs, in the order of the manifests, on these benchmarks or on all.

    Raises KvatlasError for a metric or benchmark that the runs do not have, and where two runs hold the same trace.
    """
    there = list(dict.fromkeys(cell.benchmark for run in runs for cell in run.manifest.expected))
    for asked in benchmarks or ():
        if asked not in there:
            raise KvatlasError(f"No run has the benchmark {asked!r}; there are: {', '.join(there)}.")
    for run in runs:
        run.table.check(metric, [other.table for other in runs])
    cells = [cell for run in runs for cell in run.table.cells(metric) if not benchmarks or cell.benchmark in benchmarks]
    check_distinct(cells)
    check_same_problems(cells)
    by_name = grouped(cells, lambda cell: (cell.model, cell.setting))
    about: dict[ProblemKey, Mapping[str, Any]] = {}
    for run in runs:
        for benchmark, known in run.manifest.about.items():
            about |= {(benchmark, problem): values for problem, values in known.items()}
    systems = [
        ModelSetting(*name, by_sample(own, attrgetter("grades")), about, tuple(own)) for name, own in by_name.items()
    ]
    return [system for system in systems if system.outcomes]


def choose(systems: Sequence[ModelSetting], names: Sequence[str]) -> list[ModelSetting]:
    """The system of each name, in the order of the names; all systems without any name.

    All words of a name must fit: a model, a policy (`*` stands for anything), `PARAMETER=VALUE`, as in `R1-Qwen full`
    or `dynts ratio=0.3 local_window=500`. Raises KvatlasError unless each name fits one system of its own.
    """
    if not names:
        return list(systems)
    chosen = []
    for name in names:
        fits = [system for system in systems if all(_fits(word, system) for word in name.split())]
        if len(fits) != 1:
            there = "; ".join(f"{system.model} {system.setting}" for system in fits or systems)
            raise KvatlasError(f"{name!r} fits {len(fits) or 'none'} of the systems and must fit one of: {there}.")
        chosen += fits
    if len({id(system) for system in chosen}) < len(chosen):
        raise KvatlasError(f"The names {', '.join(map(repr, names))} say a system twice.")
    return chosen


def _fits(word: str, system: ModelSetting) -> bool:
    parameter, equals, value = word.partition("=")
    if equals:
        return parameter in system.setting.values and str(system.setting.values[parameter]) == value
    names = system.setting.policy, system.model, system.model.rpartition(":")[2], system.model.rpartition("/")[2]
    return any(fnmatchcase(text, word) for text in names)


#: Resamples of problems behind the intervals of correlations.
RESAMPLES = 2000
#: Differences of means up to this count as being on the line.
EQUAL = 1e-9


@dataclass(frozen=True)
class Pair:
    """System x against system y on the problems of both; `x`, `y` [problems] are means over samples.

    `above`, `on`, `below` are the shares of problems above the line y = x (y is ahead), on it, and below (x is ahead).
    `difference` is the mean of x - y over benchmarks. The rank correlations have intervals of percentiles of
    resampled problems; they are None where a side, or L, does not vary.
    """

    places: tuple[ProblemKey, ...]
    x: Floats
    y: Floats
    above: float
    on: float
    below: float
    difference: Contrast
    spearman: Contrast | None
    given_depth: Contrast | None

    def to_json(self, first: str, second: str) -> dict[str, Any]:
        """Plain data."""

        def limits(number: Contrast | None) -> dict[str, float] | None:
            return None if number is None else {"value": number.value, "low": number.low, "high": number.high}

        return {
            "x": first,
            "y": second,
            "problems": len(self.places),
            "above": self.above,
            "on": self.on,
            "below": self.below,
            "difference": limits(self.difference),
            "spearman": limits(self.spearman),
            "spearman_given_L": limits(self.given_depth),
        }


def pairs_of(systems: Sequence[ModelSetting], seed: int = 0) -> list[tuple[int, int, Pair]]:
    """Every pair of systems by their places in the sequence, first with second, first with third, and so on."""
    if len(systems) < 2:
        raise KvatlasError(f"A comparison needs two or more systems; there is {len(systems)}.")
    return [(i, j, pair(systems[i], systems[j], seed)) for i, j in combinations(range(len(systems)), 2)]


def pair(first: ModelSetting, second: ModelSetting, seed: int = 0) -> Pair:
    """Compare two systems on the problems that both have; KvatlasError if there are fewer than two."""
    mine, theirs = first.means(), second.means()
    places = tuple(key for key in mine if key in theirs)
    if len(places) < 2:
        raise KvatlasError(
            f"{first.model} under {first.setting} and {second.model} under {second.setting} have "
            f"{len(places)} problems in common; a comparison needs at least 2."
        )
    about = {**second.about, **first.about}
    depths = [about.get(key, {}).get("L") for key in places]
    x = np.array([mine[place] for place in places])
    y = np.array([theirs[place] for place in places])
    contrast = mean_difference(x - y, strata_of(places))
    ahead = y - x
    return Pair(
        places,
        x,
        y,
        above=float(np.mean(ahead > EQUAL)),
        on=float(np.mean(np.abs(ahead) <= EQUAL)),
        below=float(np.mean(ahead < -EQUAL)),
        difference=contrast,
        spearman=correlation(np.stack([x, y]), seed),
        given_depth=None if None in depths else correlation(np.stack([x, y, np.array(depths, float)]), seed),
    )


def correlation(rows: Floats, seed: int = 0) -> Contrast | None:
    """Spearman's correlation of the first two rows of [rows, problems], given the third (L) where there is one.

    Given L each rank counts as its distance from the mean rank of its level of L, so that systems that are independent
    within every level have a correlation of 0. Where most levels have one problem, neighbours make levels of five. The
    interval is made of percentiles over resampled problems. None where a row does not vary.
    """
    levels = np.zeros(rows.shape[1], int) if len(rows) == 2 else _levels(rows[2])
    value = float(_rank_correlation(rows[:2, None, :], levels[None])[0])
    if math.isnan(value):
        return None
    generator = np.random.default_rng(seed)
    count = rows.shape[1]
    chosen = generator.integers(0, count, size=(RESAMPLES, count))
    again = _rank_correlation(rows[:2, chosen], levels[chosen])
    low, high = np.nanquantile(again, [0.025, 0.975])
    return Contrast(value, float(low), float(high))


def _levels(depth: Floats) -> Ints:
    """[problems]: the number of each problem's level of L."""
    _, own, counts = np.unique(depth, return_inverse=True, return_counts=True)
    if counts[own].min(initial=2) > 1 or (counts[own] > 1).mean() >= 0.5:
        return np.asarray(own, np.int64)
    return np.asarray(np.argsort(np.argsort(depth, kind="stable"), kind="stable") // 5, np.int64)


def _rank_correlation(rows: Floats, levels: Ints) -> Floats:
    """[2, resamples, problems] and the problems' levels -> [resamples]; NaN where it is not defined."""
    from scipy.stats import rankdata

    ranks = rankdata(rows, axis=-1)
    for level in np.unique(levels):
        own = levels == level
        ranks = ranks - own * (ranks * own).sum(-1, keepdims=True) / np.maximum(own.sum(-1, keepdims=True), 1)
    norms = np.sqrt((ranks**2).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        product = (ranks[0] * ranks[1]).sum(-1) / (norms[0] * norms[1])
    return np.where(norms.min(0) > 1e-9, np.clip(product, -1, 1), np.nan)
