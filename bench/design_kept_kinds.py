"""Structures of the designs that are kept back, none of which appears in the designs for tuning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.random import Generator
from scipy import special

from design_kinds import Depths, Maps, Policies, Prices, Sequences, TwoSettings
from design_parts import ROWS, Change, Copies, Structure, paired_counts


@dataclass(frozen=True)
class RandomLoss(Change):
    """Each problem loses a share of its chance, from Beta(low, high): with a small `low` mostly next to nothing."""

    low: float = 0.05
    high: float = 1.0

    def apply(self, chance: ndarray, fate: ndarray) -> ndarray:
        return chance * (1 - special.betaincinv(self.low, self.high, fate))

    def mean(self, mean: float, weight: float = 1.0) -> float:
        return mean * self.high / (self.low + self.high)


def shrink(scale: float, mean: float) -> Change:
    """Return a change that moves all chances towards their mean: easy problems lose, hard ones gain, the mean stays."""
    return Change(((1.0, scale, (1 - scale) * mean),))


def random_loss(points: float, low: float = 0.05) -> RandomLoss:
    """Return a random loss of this share of the chance on average."""
    return RandomLoss(low=low, high=low * (1 - points) / points)


@dataclass(frozen=True)
class PartialCredit(TwoSettings):
    """A share of each grade is credit for the work, equal to the chance; the rest is 0 or 1."""

    credit: float = 0.5

    def grades(self, rng: Generator, chance: ndarray, changed: ndarray) -> list[ndarray]:
        first, second = super().grades(rng, chance, changed)
        return [self.credit * chance + (1 - self.credit) * first, self.credit * changed + (1 - self.credit) * second]


@dataclass(frozen=True)
class AgreeingSamples(TwoSettings):
    """On a share of the problems all samples of a setting have the same grade."""

    agreement: float = 0.6

    def grades(self, rng: Generator, chance: ndarray, changed: ndarray) -> list[ndarray]:
        agree = rng.random(chance.shape) < self.agreement
        singles = paired_counts(rng, chance, changed, 1, self.likeness)
        means = super().grades(rng, chance, changed)
        return [np.where(agree, single, mean) for single, mean in zip(singles, means, strict=True)]


@dataclass(frozen=True)
class UnequalSamples(TwoSettings):
    """Problems have 1 to `samples` samples, whatever their grades."""

    def grades(self, rng: Generator, chance: ndarray, changed: ndarray) -> list[ndarray]:
        samples = rng.integers(1, self.samples + 1, chance.shape)
        return [count / samples for count in paired_counts(rng, chance, changed, samples, self.likeness)]


@dataclass(frozen=True)
class AlikeOnSome(TwoSettings):
    """On a share `likeness` of the problems both settings have the same trace; on all others they are independent."""

    def grades(self, rng: Generator, chance: ndarray, changed: ndarray) -> list[ndarray]:
        likeness = (rng.random(chance.shape) < self.likeness).astype(float)
        return [count / self.samples for count in paired_counts(rng, chance, changed, self.samples, likeness)]


@dataclass(frozen=True)
class LengthTrunk:
    """A trunk whose length says how likely the answer is right: short traces are mostly right, long ones wrong.

    Cells that compress before the answer is decided draw again among traces of that length, so every cell depends on
    the length. Cells of one row share a branch with chance `branch`.
    """

    slope: float = 1.0
    branch: float = 0.0
    exchangeable = frozenset()

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        reach = (rows / max(rows.max(), 1) + columns / max(columns.max(), 1)) / 2
        decided = rng.random((len(chance), 1, samples))
        numbers = Copies(0.0, self.branch).uniforms(rng, chance, samples, rows, columns)
        numbers = np.where(decided <= reach[:, None], rng.random(decided.shape), numbers)
        mean = chance[:, None, None]
        given_length = mean + self.slope * np.minimum(mean, 1 - mean) * (1 - 2 * decided)
        # Numbers below the chance given the length become numbers below the mean chance, and keep being uniform.
        right = numbers * mean / np.maximum(given_length, 1e-12)
        wrong = mean + (numbers - given_length) * (1 - mean) / np.maximum(1 - given_length, 1e-12)
        return np.where(numbers < given_length, right, wrong)


@dataclass(frozen=True)
class Field:
    """Cells are the more alike the nearer they lie on the grid, in both directions (normal copula)."""

    reach: float = 3.0
    exchangeable = frozenset()

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        distance = np.abs(rows[:, None] - rows) + np.abs(columns[:, None] - columns)
        factor = np.linalg.cholesky(np.exp(-distance / self.reach) + 1e-9 * np.eye(len(rows)))
        normal = rng.standard_normal((len(chance), len(rows), samples))
        return special.ndtr(np.einsum("cd,nds->ncs", factor, normal) / np.sqrt(1 + 1e-9))


@dataclass(frozen=True)
class Mirror:
    """The last column has the opposite random numbers of the first; the others copy a common one."""

    likeness: float = 0.9
    exchangeable = frozenset({ROWS})

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        result = Copies(self.likeness).uniforms(rng, chance, samples, rows, columns)
        result[:, columns == columns.max()] = 1 - result[:, columns == 0]
        return result


@dataclass(frozen=True)
class OneCell:
    """One cell alone is unlike the rest, and all its samples of a problem agree; all others are the same."""

    cell: int = 0
    exchangeable = frozenset()

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        result = np.repeat(rng.random((len(chance), 1, samples)), len(rows), 1)
        result[:, self.cell] = rng.random((len(chance), 1))
        return result


@dataclass(frozen=True)
class Agreeing:
    """On a share of the problems all samples of a cell agree; cells are as alike as `structure` says."""

    structure: Structure
    agreement: float = 0.6

    @property
    def exchangeable(self) -> frozenset[str]:
        return self.structure.exchangeable

    def uniforms(self, rng: Generator, chance: ndarray, samples: int, rows: ndarray, columns: ndarray) -> ndarray:
        result = self.structure.uniforms(rng, chance, samples, rows, columns)
        agree = rng.random((len(chance), 1, 1)) < self.agreement
        return np.where(agree, result[..., :1], result)


@dataclass(frozen=True)
class Staircase(Maps):
    """A grid whose later rows lack their last columns: cells are compared in rows that have every level."""

    lacking: int = 2

    @property
    def _present(self) -> ndarray:
        row, column = np.indices(self.shape)
        lacks = (row >= self.shape[0] - self.lacking) & (column >= self.shape[1] - self.lacking)
        return ~lacks.ravel()

    @property
    def rows(self) -> ndarray:
        return super().rows[self._present]

    @property
    def columns(self) -> ndarray:
        return super().columns[self._present]


@dataclass(frozen=True)
class CreditMaps(Maps):
    """Half of each grade is credit for the work, equal to the chance."""

    def grades(self, uniforms: ndarray, chance: ndarray) -> ndarray:
        return (chance + super().grades(uniforms, chance)) / 2


@dataclass(frozen=True)
class DisjointFates(Sequences):
    """No problem collapses under two settings, as far as shares allow: what one setting loses, others keep."""

    def fates(self, rng: Generator, problems: int) -> ndarray:
        turns = np.arange(len(self.changes))[:, None] / len(self.changes)
        return (rng.random(problems) + turns) % 1


@dataclass(frozen=True)
class StoppedSweep(Sequences):
    """Cheaper settings have fewer problems: a sweep was stopped, and each benchmark lacks its last ones."""

    last: float = 0.5

    def missing_traces(self, rng: Generator) -> ndarray:
        place = np.concatenate([np.arange(size) / size for size in self.sizes])
        present = np.linspace(1, self.last, len(self.changes))
        return place >= present[:, None]


@dataclass(frozen=True)
class CreditSequences(Sequences):
    """Half of each grade is credit for the work, equal to the chance."""

    def grades(self, uniforms: ndarray, chance: ndarray) -> ndarray:
        return (chance + super().grades(uniforms, chance)) / 2


@dataclass(frozen=True)
class ProbitDepths(Depths):
    """Samples of a problem agree through a normal copula with correlation `likeness`."""

    def grades(self, rng: Generator, chance: ndarray) -> ndarray:
        shared = rng.standard_normal((self.problems, 1))
        own = rng.standard_normal((self.problems, self.samples))
        uniforms = special.ndtr(np.sqrt(self.likeness) * shared + np.sqrt(1 - self.likeness) * own)
        return (uniforms < chance[:, None]).astype(float)


@dataclass(frozen=True)
class WholeProblems(Depths):
    """All samples of a problem agree on a share `likeness` of the problems, and are independent on all others."""

    def grades(self, rng: Generator, chance: ndarray) -> ndarray:
        uniforms = rng.random((self.problems, self.samples))
        agree = rng.random((self.problems, 1)) < self.likeness
        return (np.where(agree, uniforms[:, :1], uniforms) < chance[:, None]).astype(float)


@dataclass(frozen=True)
class ShallowAgree(Depths):
    """The likelier a problem is solved, the more its samples agree."""

    def grades(self, rng: Generator, chance: ndarray) -> ndarray:
        uniforms = rng.random((self.problems, self.samples))
        agree = rng.random((self.problems, 1)) < np.sqrt(chance)[:, None]
        return (np.where(agree, uniforms[:, :1], uniforms) < chance[:, None]).astype(float)


@dataclass(frozen=True)
class MissingSamples(Depths):
    """Problems lack samples (NaN), whatever their grades; each has at least one."""

    def grades(self, rng: Generator, chance: ndarray) -> ndarray:
        grades = super().grades(rng, chance)
        count = rng.integers(1, self.samples + 1, (self.problems, 1))
        return np.where(np.arange(self.samples) < count, grades, np.nan)


@dataclass(frozen=True)
class ParetoPrices(Prices):
    """Costs of problems have a Pareto tail; with an exponent near 2 the variance barely exists."""

    exponent: float = 2.5

    def noise(self, rng: Generator, problems: int) -> ndarray:
        return (1 + rng.pareto(self.exponent, problems)) * (self.exponent - 1) / self.exponent


@dataclass(frozen=True)
class RunToLimit(Prices):
    """Some wrong answers run to the limit of tokens and cost exactly `limit`; `wrong` is what they add on average."""

    limit: float = 8.0

    def sample_costs(self, rng: Generator, right: ndarray) -> ndarray:
        noise = rng.lognormal(-(self.sample_noise**2) / 2, self.sample_noise, right.shape)
        stuck = ~right & (rng.random(right.shape) < self.wrong / (self.limit - 1))
        return np.where(stuck, self.limit, noise)


@dataclass(frozen=True)
class SamplesAgree(Prices):
    """All samples of a problem have the same grade: more samples tell nothing about accuracy."""

    def right_samples(self, rng: Generator, chance: ndarray, changed: ndarray) -> tuple[ndarray, ndarray]:
        right, base_right = super().right_samples(rng, chance, changed)
        return np.repeat(right[:, :1], self.samples, 1), np.repeat(base_right[:, :1], self.samples, 1)


@dataclass(frozen=True)
class OwnFates(Policies):
    """Each cell collapses on problems of its own."""

    def fates(self, rng: Generator, problems: int) -> ndarray:
        return rng.random((problems, self.cells))


@dataclass(frozen=True)
class DisjointCells(Policies):
    """No problem collapses in two cells, as far as shares allow."""

    def fates(self, rng: Generator, problems: int) -> ndarray:
        return (rng.random((problems, 1)) + np.arange(self.cells) / self.cells) % 1
