"""Parts of designs with known truth: difficulties of problems, changes of chances, likeness of settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy import stats

ROWS = "rows"
COLUMNS = "columns"
INFINITE = float("inf")


@dataclass(frozen=True)
class Difficulty:
    """A mixture of Beta distributions of a problem's chance to be solved.

    A part is (weight, mean, concentration); with an infinite concentration it is one point.
    """

    parts: tuple[tuple[float, float, float], ...]

    def draw(self, rng: Generator, shape: tuple[int, ...]) -> ndarray:
        weights, means, concentrations = np.array(self.parts).T
        part = rng.choice(len(weights), shape, p=weights)
        chance = means[part]
        concentration = concentrations[part]
        spread = np.isfinite(concentration)
        right = chance[spread] * concentration[spread]
        chance[spread] = rng.beta(right, concentration[spread] - right)
        return chance

    @property
    def mean(self) -> float:
        return sum(weight * mean for weight, mean, _ in self.parts)

    @property
    def second_moment(self) -> float:
        return sum(weight * (mean**2 + mean * (1 - mean) / (1 + spread)) for weight, mean, spread in self.parts)


@dataclass(frozen=True)
class Change:
    """A change of a problem's chance to scale * chance + offset, for a share of the problems of each kind.

    A kind is (share, scale, offset). Problems of no kind stay as they are.
    """

    kinds: tuple[tuple[float, float, float], ...] = ()

    def apply(self, chance: ndarray, fate: ndarray) -> ndarray:
        """Return the changed chances. `fate`, uniform on [0, 1) for each problem, decides the kind."""
        changed = chance.copy()
        start = 0.0
        for share, scale, offset in self.kinds:
            chosen = (fate >= start) & (fate < start + share)
            changed = np.where(chosen, scale * chance + offset, changed)
            start += share
        return np.clip(changed, 0, 1)

    def mean(self, mean: float, weight: float = 1.0) -> float:
        """Return the mean of the changed chances; with weights of mean `weight`, the mean of weight * chance."""
        return mean + sum(share * ((scale - 1) * mean + offset * weight) for share, scale, offset in self.kinds)


SAME = Change()


def point(mean: float) -> Difficulty:
    return Difficulty(((1.0, mean, INFINITE),))


def two_points(share: float, high: float, low: float) -> Difficulty:
    return Difficulty(((share, high, INFINITE), (1 - share, low, INFINITE)))


def beta(mean: float, concentration: float) -> Difficulty:
    return Difficulty(((1.0, mean, concentration),))


def collapse(share: float, floor: float = 0.0) -> Change:
    """Return a change by which a share of whole problems falls to `floor`."""
    return Change(((share, 0.0, floor),))


def collapse_and_gain(share: float, mean: float) -> Change:
    """Return a change by which a share of problems collapses and all others gain, so that the mean stays."""
    gain = share * mean / ((1 - share) * (1 - mean))
    return Change(((share, 0.0, 0.0), (1 - share, 1 - gain, gain)))


def loss(points: float, mean: float) -> Change:
    """Return a change by which problems of this mean chance lose so much on average, each in proportion."""
    return Change(((1.0, 1 - points / mean, 0.0),))


def exchange(collapsing: float, rescued: float) -> Change:
    """Return a change by which shares of whole problems fall to 0 and rise to 1."""
    return Change(((collapsing, 0.0, 0.0), (rescued, 0.0, 1.0)))


def limit_share(problems: int, seen: int = 0, level: float = 0.05) -> float:
    """Return a share 1 % above the Clopper-Pearson limit when `seen` are observed, where limits are tested hardest.

    So few or fewer are observed in nearly `level` of all runs, and limits that are longer by a hair do not escape.
    """
    return 1.01 * float(stats.beta.ppf(1 - level, seen + 1, problems - seen))


def each(value: object, count: int) -> tuple:
    """Return one value for each benchmark, from one value for all or a tuple."""
    return value if isinstance(value, tuple) else (value,) * count


def strata_of(sizes: tuple[int, ...]) -> ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def draw_chances(rng: Generator, sizes: tuple[int, ...], difficulty: Difficulty | tuple[Difficulty, ...]) -> ndarray:
    parts = each(difficulty, len(sizes))
    return np.concatenate([part.draw(rng, (size,)) for part, size in zip(parts, sizes, strict=True)])


def mean_chance(sizes: tuple[int, ...], difficulty: Difficulty | tuple[Difficulty, ...]) -> float:
    return float(np.mean([part.mean for part in each(difficulty, len(sizes))]))


def paired_counts(
    rng: Generator, first: ndarray, second: ndarray, samples: int | ndarray, likeness: float | ndarray
) -> list[ndarray]:
    """Return right answers of two settings whose samples share a random number with chance `likeness`.

    With a negative likeness they use opposite random numbers with that chance. `samples` and `likeness` may differ by
    problem.
    """
    strength = np.abs(likeness)
    extreme = np.where(np.asarray(likeness) >= 0, np.minimum(first, second), np.maximum(first + second - 1, 0))
    both = strength * extreme + (1 - strength) * first * second
    only_first = first - both
    only_second = second - both
    count_both = rng.binomial(samples, np.clip(both, 0, 1))
    count_first = rng.binomial(samples - count_both, _share(only_first, 1 - both))
    rest = samples - count_both - count_first
    count_second = rng.binomial(rest, _share(only_second, 1 - both - only_first))
    return [count_both + count_first, count_both + count_second]


def _share(part: ndarray, whole: ndarray) -> ndarray:
    return np.clip(np.divide(part, whole, out=np.zeros_like(part), where=whole > 1e-12), 0, 1)


class Structure(Protocol):
    """A likeness of the cells of a grid. Every cell's uniform numbers stay uniform for each problem."""

    def uniforms(
        self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray
    ) -> ndarray:  # [problems, cells, samples]
        ...

    @property
    def exchangeable(self) -> frozenset[str]:
        """Axes whose whole levels could be exchanged without changing the joint distribution."""
        ...


@dataclass(frozen=True)
class Copies:
    """Each cell takes, with these chances, the random number of all cells, of its row, of its column, or its own."""

    common: float = 0.0
    row: float = 0.0
    column: float = 0.0
    exchangeable = frozenset({ROWS, COLUMNS})

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        problems = len(chance)
        shape = (problems, len(rows), samples)
        choice = rng.random(shape)
        result = rng.random(shape)
        by_column = rng.random((problems, columns.max() + 1, samples))[:, columns]
        result = np.where(choice < self.common + self.row + self.column, by_column, result)
        by_row = rng.random((problems, rows.max() + 1, samples))[:, rows]
        result = np.where(choice < self.common + self.row, by_row, result)
        return np.where(choice < self.common, rng.random((problems, 1, samples)), result)


@dataclass(frozen=True)
class Groups:
    """Levels of an axis fall into groups by their order; cells of a group copy one draw with the group's chance."""

    axis: str
    shares: tuple[float, ...]
    likeness: tuple[float, ...]

    @property
    def exchangeable(self) -> frozenset[str]:
        return frozenset({ROWS, COLUMNS}) - {self.axis}

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        levels = rows if self.axis == ROWS else columns
        position = (levels + 0.5) / (levels.max() + 1)
        group = np.searchsorted(np.cumsum(self.shares)[:-1], position)
        shared = rng.random((len(chance), len(self.shares), samples))[:, group]
        own = rng.random(shared.shape)
        copied = rng.random(shared.shape) < np.array(self.likeness)[group][:, None]
        return np.where(copied, shared, own)


@dataclass(frozen=True)
class Trunk:
    """Settings of higher levels compress later and share more of the trace with the full cache and with each other.

    An answer is decided at some time of the trace. A cell that has not compressed by then has the answer of the full
    cache, all others have their own. `row_weight` says how much of the time of compression the row decides;
    with `longer_if_hard` the traces of hard problems are decided later.
    """

    row_weight: float = 0.5
    longer_if_hard: bool = True
    exchangeable = frozenset()

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        reach = self.row_weight * rows / max(rows.max(), 1) + (1 - self.row_weight) * columns / max(columns.max(), 1)
        decided = rng.random((len(chance), 1, samples))
        if self.longer_if_hard:
            decided = decided ** (2 * chance[:, None, None])
        own = rng.random((len(chance), len(rows), samples))
        return np.where(decided <= reach[:, None], rng.random(decided.shape), own)


@dataclass(frozen=True)
class Noisy:
    """One level is noisier: all samples of a problem agree there, with `whole` in all its cells, too."""

    axis: str
    level: int
    common: float = 0.0
    whole: bool = False

    @property
    def exchangeable(self) -> frozenset[str]:
        return frozenset({ROWS, COLUMNS}) - {self.axis}

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        result = Copies(self.common).uniforms(rng, chance, samples, rows, columns)
        noisy = np.flatnonzero((rows if self.axis == ROWS else columns) == self.level)
        cells = 1 if self.whole else len(noisy)
        result[:, noisy] = rng.random((len(chance), cells, 1))
        return result


@dataclass(frozen=True)
class Chain:
    """Neighbours along an axis are alike: each level copies the level before with this chance, sample by sample."""

    axis: str
    likeness: float

    @property
    def exchangeable(self) -> frozenset[str]:
        return frozenset({ROWS, COLUMNS}) - {self.axis}

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        levels = rows if self.axis == ROWS else columns
        other = columns if self.axis == ROWS else rows
        result = rng.random((len(chance), len(rows), samples))
        for cell in np.argsort(levels, kind="stable"):
            before = np.flatnonzero((levels == levels[cell] - 1) & (other == other[cell]))
            if len(before):
                copied = rng.random((len(chance), samples)) < self.likeness
                result[:, cell] = np.where(copied, result[:, before[0]], result[:, cell])
        return result
