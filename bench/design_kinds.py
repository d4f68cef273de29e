"""Kinds of designs with known truth, one for each kind of claim about a map. See designs.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from design_parts import (
    COLUMNS,
    ROWS,
    SAME,
    Change,
    Copies,
    Difficulty,
    Structure,
    draw_chances,
    each,
    paired_counts,
    strata_of,
)

INDEPENDENT = Copies()
ALL_ALIKE = Copies(0.7)
POLICIES_ALIKE = Copies(0.5, 0.2)


@dataclass(frozen=True)
class TwoSettings:
    """Two settings on the same problems; the second changes chances as `change` says, for all benchmarks or each."""

    sizes: tuple[int, ...]
    samples: int
    likeness: float
    difficulty: Difficulty | tuple[Difficulty, ...]
    change: Change | tuple[Change, ...] = SAME

    @property
    def strata(self) -> ndarray:
        return strata_of(self.sizes)

    @property
    def truth(self) -> float:
        """Mean over benchmarks of the true mean of second - first."""
        count = len(self.sizes)
        parts = zip(each(self.difficulty, count), each(self.change, count), strict=True)
        return float(np.mean([change.mean(difficulty.mean) - difficulty.mean for difficulty, change in parts]))

    def draw(self, rng: Generator, rounds: int) -> tuple[ndarray, ndarray]:
        """Return the problem means of both settings, [rounds, problems] each."""
        count = len(self.sizes)
        firsts = []
        seconds = []
        for size, difficulty, change in zip(
            self.sizes, each(self.difficulty, count), each(self.change, count), strict=True
        ):
            chance = difficulty.draw(rng, (rounds, size))
            changed = change.apply(chance, rng.random(chance.shape))
            first, second = self.grades(rng, chance, changed)
            firsts.append(first)
            seconds.append(second)
        return np.concatenate(firsts, 1), np.concatenate(seconds, 1)

    def grades(self, rng: Generator, chance: ndarray, changed: ndarray) -> list[ndarray]:
        return [count / self.samples for count in paired_counts(rng, chance, changed, self.samples, self.likeness)]


Place = tuple[int | None, int | None]


@dataclass(frozen=True)
class Maps:
    """A grid of settings. `changes` say in which row and column (None: all) chances differ, and how."""

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    samples: int
    difficulty: Difficulty | tuple[Difficulty, ...]
    structure: Structure = INDEPENDENT
    changes: tuple[tuple[Place, Change], ...] = ()

    @property
    def strata(self) -> ndarray:
        return strata_of(self.sizes)

    @property
    def rows(self) -> ndarray:
        return np.repeat(np.arange(self.shape[0]), self.shape[1])

    @property
    def columns(self) -> ndarray:
        return np.tile(np.arange(self.shape[1]), self.shape[0])

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, levels in zip((ROWS, COLUMNS), self.shape, strict=True) if levels > 1)

    @property
    def null(self) -> frozenset[str]:
        """Axes whose levels have the same true mean on every problem."""
        changed = set()
        for (row, column), _ in self.changes:
            if row is not None:
                changed.add(ROWS)
            if column is not None:
                changed.add(COLUMNS)
        return self.axes - changed

    @property
    def exchangeable(self) -> frozenset[str]:
        """Null axes whose levels could be exchanged, so that a permutation test must keep its level exactly."""
        return self.null & self.structure.exchangeable

    @property
    def equal_means(self) -> frozenset[str]:
        """Axes whose levels have the same true mean over problems, averaged over the other axis."""
        equal = set()
        for axis in self.axes:
            levels, others = (self.rows, self.columns) if axis == ROWS else (self.columns, self.rows)
            # Where cells are lacking, levels are compared only beside others that have every level.
            counts = np.bincount(others)
            complete = counts[others] == counts.max()
            means = [self.truth[complete & (levels == level)].mean() for level in np.unique(levels)]
            if np.ptp(means) < 1e-9:
                equal.add(axis)
        return frozenset(equal)

    @property
    def truth(self) -> ndarray:
        """The true mean of each cell, over benchmarks of equal weight."""
        by_benchmark = []
        for difficulty in each(self.difficulty, len(self.sizes)):
            means = np.full(len(self.rows), difficulty.mean)
            for place, change in self.changes:
                hit = self._hit(place)
                means[hit] = change.mean(means[hit])
            by_benchmark.append(means)
        return np.mean(by_benchmark, axis=0)

    def draw(self, rng: Generator) -> ndarray:
        """Return the problem means of each cell, [problems, cells]."""
        chance = draw_chances(rng, self.sizes, self.difficulty)
        by_cell = np.repeat(chance[:, None], len(self.rows), 1)
        for place, change in self.changes:
            hit = self._hit(place)
            by_cell[:, hit] = change.apply(by_cell[:, hit], rng.random((len(chance), 1)))
        uniforms = self.structure.uniforms(rng, chance, self.samples, self.rows, self.columns)
        return self.grades(uniforms, by_cell)

    def grades(self, uniforms: ndarray, chance: ndarray) -> ndarray:
        return (uniforms < chance[..., None]).mean(-1)

    def _hit(self, place: Place) -> ndarray:
        row, column = place
        in_row = np.full(len(self.rows), True) if row is None else self.rows == row
        in_column = np.full(len(self.rows), True) if column is None else self.columns == column
        return in_row & in_column


@dataclass(frozen=True)
class Sequences:
    """Settings in order of cost, the dearest first, beside the full cache; each changes chances in its own way.

    With `shared_fate` the same problems are the first to collapse under every setting. `only` names the one benchmark
    in which anything changes. `missing` is the chance that a setting lacks a problem, independent of its grades.
    """

    sizes: tuple[int, ...]
    samples: int
    margin: float
    difficulty: Difficulty
    changes: tuple[Change, ...]
    structure: Structure = ALL_ALIKE
    policies: int = 1
    shared_fate: bool = False
    only: int | None = None
    missing: float = 0.0

    @property
    def strata(self) -> ndarray:
        return strata_of(self.sizes)

    @property
    def policy(self) -> ndarray:
        """The number of the policy of each setting; policies take turns in the order of cost."""
        return np.arange(len(self.changes)) % self.policies

    @property
    def truth(self) -> ndarray:
        """The true loss of each setting, over benchmarks of equal weight; a gain is negative."""
        mean = self.difficulty.mean
        losses = np.array([mean - change.mean(mean) for change in self.changes])
        return losses if self.only is None else losses / len(self.sizes)

    def draw(self, rng: Generator) -> ndarray:
        """Return setting minus full cache by problem, [settings, problems], NaN where a trace is missing."""
        settings = len(self.changes)
        chance = draw_chances(rng, self.sizes, self.difficulty)
        fates = self.fates(rng, len(chance))
        by_cell = [change.apply(chance, fate) for change, fate in zip(self.changes, fates, strict=True)]
        by_cell = np.stack([*by_cell, chance], 1)
        if self.only is not None:
            by_cell = np.where((self.strata == self.only)[:, None], by_cell, chance[:, None])
        # The full cache compresses latest. It counts as a setting of the first policy.
        rows = np.append(self.policy, 0)
        columns = np.append(np.arange(settings)[::-1], settings)
        uniforms = self.structure.uniforms(rng, chance, self.samples, rows, columns)
        grades = self.grades(uniforms, by_cell)
        differences = (grades[:, :settings] - grades[:, settings:]).T
        return np.where(self.missing_traces(rng), np.nan, differences)

    def grades(self, uniforms: ndarray, chance: ndarray) -> ndarray:
        return (uniforms < chance[..., None]).mean(-1)

    def fates(self, rng: Generator, problems: int) -> ndarray:
        if self.shared_fate:
            return np.tile(rng.random(problems), (len(self.changes), 1))
        return rng.random((len(self.changes), problems))

    def missing_traces(self, rng: Generator) -> ndarray:
        return rng.random((len(self.changes), sum(self.sizes))) < self.missing


@dataclass(frozen=True)
class Depths:
    """Chains of unlike depth, solved with chance exp(-depth / scale).

    Samples of a problem agree: by `agreement` "copy" each takes the problem's shared draw with chance `likeness`; by
    "beta" a problem's chance is Beta with the correlation `likeness`. Depths are drawn from `levels`, or cycle.
    """

    problems: int
    samples: int
    scale: float
    levels: tuple[int, ...]
    likeness: float = 0.0
    agreement: str = "copy"
    cycle: bool = False

    @property
    def truth(self) -> float:
        return self.scale

    def draw(self, rng: Generator) -> tuple[ndarray, ndarray]:
        """Return grades [problems, samples] of 0 and 1, and depths [problems]."""
        levels = np.array(self.levels)
        depths = np.resize(levels, self.problems) if self.cycle else rng.choice(levels, self.problems)
        chance = np.exp(-depths / self.scale)
        return self.grades(rng, chance), depths.astype(float)

    def grades(self, rng: Generator, chance: ndarray) -> ndarray:
        shape = (self.problems, self.samples)
        own = rng.random(shape)
        if self.agreement == "beta" and 0 < self.likeness < 1:
            total = 1 / self.likeness - 1
            problem_chance = rng.beta(chance * total, (1 - chance) * total)
            return (own < problem_chance[:, None]).astype(float)
        shared = rng.random((self.problems, 1))
        uniforms = np.where(rng.random(shape) < self.likeness, shared, own)
        return (uniforms < chance[:, None]).astype(float)


@dataclass(frozen=True)
class Prices:
    """Cost and right answers of a setting and of a baseline, by problem.

    A sample of the baseline costs scale * (1 + hard * (1 - chance)) * (1 + wrong * [answer is wrong]) times lognormal
    noise of mean 1 by problem (shared by both settings with `paired`) and by sample; the setting's costs `ratio` times
    as much. `scales` are the scales of the benchmarks.
    """

    sizes: tuple[int, ...]
    samples: int
    difficulty: Difficulty | tuple[Difficulty, ...]
    change: Change = SAME
    ratio: float = 0.7
    likeness: float = 0.7
    problem_noise: float = 0.6
    sample_noise: float = 0.3
    hard: float = 0.0
    wrong: float = 0.5
    paired: bool = True
    scales: tuple[float, ...] = (1.0,)

    @property
    def strata(self) -> ndarray:
        return strata_of(self.sizes)

    @property
    def means(self) -> ndarray:
        """True means by benchmark of setting's cost, setting's right, baseline's cost, baseline's right."""
        count = len(self.sizes)
        rows = []
        for difficulty, scale in zip(each(self.difficulty, count), np.resize(self.scales, count), strict=True):
            mean = difficulty.mean
            changed = self.change.mean(mean)
            product = self.change.mean(difficulty.second_moment, mean)
            cost = self.mean_cost(mean, mean, difficulty.second_moment)
            changed_cost = self.mean_cost(mean, changed, product)
            rows.append([self.ratio * scale * changed_cost, changed, scale * cost, mean])
        return np.array(rows)

    def mean_cost(self, mean: float, right: float, product: float) -> float:
        """Return the mean cost where chances have this mean, right answers that one, and their product the third."""
        both_fail = 1 - mean - right + product
        return 1 + self.hard * (1 - mean) + self.wrong * (1 - right) + self.hard * self.wrong * both_fail

    @property
    def truth(self) -> float:
        """Setting's cost of a right answer over the baseline's; costs and answers are means over benchmarks."""
        cost, right, base_cost, base_right = self.means.mean(0)
        return float(cost / right / (base_cost / base_right))

    def draw(self, rng: Generator) -> ndarray:
        """Return [4, problems]: setting's cost, setting's right, baseline's cost, baseline's right."""
        chance = draw_chances(rng, self.sizes, self.difficulty)
        changed = self.change.apply(chance, rng.random(len(chance)))
        right, base_right = self.right_samples(rng, chance, changed)
        noise = self.noise(rng, len(chance))
        base_noise = noise if self.paired else self.noise(rng, len(chance))
        scale = np.resize(self.scales, len(self.sizes))[self.strata] * (1 + self.hard * (1 - chance))
        cost = self.ratio * scale * noise * self.sample_costs(rng, right).mean(1)
        base_cost = scale * base_noise * self.sample_costs(rng, base_right).mean(1)
        return np.array([cost, right.mean(1), base_cost, base_right.mean(1)])

    def right_samples(self, rng: Generator, chance: ndarray, changed: ndarray) -> tuple[ndarray, ndarray]:
        base = rng.random((len(chance), self.samples))
        own = np.where(rng.random(base.shape) < self.likeness, base, rng.random(base.shape))
        return own < changed[:, None], base < chance[:, None]

    def noise(self, rng: Generator, problems: int) -> ndarray:
        """Return factors of mean 1 by problem."""
        return rng.lognormal(-(self.problem_noise**2) / 2, self.problem_noise, problems)

    def sample_costs(self, rng: Generator, right: ndarray) -> ndarray:
        noise = rng.lognormal(-(self.sample_noise**2) / 2, self.sample_noise, right.shape)
        return noise * (1 + self.wrong * ~right)


@dataclass(frozen=True)
class Policies:
    """Two policies over the same cells; the grades of a problem are averaged over cells.

    From the first cell to the last, chances of both policies fall to `last_cell` times their value. The second policy
    changes chances in its first `cells_changed` cells (None: all).
    """

    sizes: tuple[int, ...]
    cells: int
    samples: int
    difficulty: Difficulty | tuple[Difficulty, ...]
    change: Change | tuple[Change, ...] = SAME
    structure: Structure = POLICIES_ALIKE
    last_cell: float = 1.0
    cells_changed: int | None = None

    @property
    def strata(self) -> ndarray:
        return strata_of(self.sizes)

    @property
    def _scales(self) -> ndarray:
        return np.linspace(1, self.last_cell, self.cells)

    @property
    def truth(self) -> float:
        """Mean over benchmarks and cells of the true mean of second - first."""
        count = len(self.sizes)
        scales = self._scales[: self.cells_changed]
        total = 0.0
        for difficulty, change in zip(each(self.difficulty, count), each(self.change, count), strict=True):
            total += sum(change.mean(scale * difficulty.mean) - scale * difficulty.mean for scale in scales)
        return float(total / count / self.cells)

    def draw(self, rng: Generator, rounds: int) -> tuple[ndarray, ndarray]:
        """Return the problem means of both policies, [rounds, problems] each."""
        pairs = [self._draw_round(rng) for _ in range(rounds)]
        return np.stack([first for first, _ in pairs]), np.stack([second for _, second in pairs])

    def _draw_round(self, rng: Generator) -> tuple[ndarray, ndarray]:
        first = draw_chances(rng, self.sizes, self.difficulty)[:, None] * self._scales
        second = first.copy()
        hit = slice(self.cells_changed)
        fate = self.fates(rng, len(first))
        for benchmark, change in enumerate(each(self.change, len(self.sizes))):
            inside = self.strata == benchmark
            second[inside, hit] = change.apply(first[inside, hit], fate[inside, hit])
        rows = np.repeat([0, 1], self.cells)
        columns = np.tile(np.arange(self.cells), 2)
        uniforms = self.structure.uniforms(rng, first[:, 0], self.samples, rows, columns)
        grades = self.grades(uniforms, np.concatenate([first, second], 1))
        return grades[:, rows == 0].mean(1), grades[:, rows == 1].mean(1)

    def fates(self, rng: Generator, problems: int) -> ndarray:
        """Return fates by problem and cell: a problem collapses in all cells or in none."""
        return np.tile(rng.random((problems, 1)), (1, self.cells))

    def grades(self, uniforms: ndarray, chance: ndarray) -> ndarray:
        return (uniforms < chance[..., None]).mean(-1)
