"""What problems are like in the simulations of bench/calibration.py: kinds of problems, and how often each comes.

A third of each list is kept back: the constants of the methods were chosen on the others, and `KEPT` ones are used by
the final run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
#: A chance, or the parameters of a Beta distribution of chances.
Chance = float | tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """Problems that come with a `share`; `chance` of the first setting, of the second `other` (None: the same)."""

    share: float
    chance: Chance
    other: Chance | None = None


@dataclass(frozen=True)
class Spread:
    """A mixture of kinds. Chances of two settings on one problem are drawn with the same quantile."""

    name: str
    kinds: Sequence[Kind]

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Floats, Floats]:
        """The chances of both settings."""
        which = rng.choice(len(self.kinds), size=shape, p=[kind.share for kind in self.kinds])
        first, second = np.zeros(shape), np.zeros(shape)
        for number, kind in enumerate(self.kinds):
            own = which == number
            mine = _drawn(kind.chance, int(own.sum()), rng)
            first[own] = mine
            second[own] = mine if kind.other is None else _drawn(kind.other, int(own.sum()), rng)
        return first, second

    def means(self) -> tuple[float, float]:
        """The means of both settings over problems."""
        first = sum(kind.share * _mean(kind.chance) for kind in self.kinds)
        return first, sum(kind.share * _mean(kind.chance if kind.other is None else kind.other) for kind in self.kinds)


def _drawn(chance: Chance, count: int, rng: np.random.Generator) -> Floats:
    return rng.beta(*chance, count) if isinstance(chance, tuple) else np.full(count, chance)


def _mean(chance: Chance) -> float:
    return chance[0] / sum(chance) if isinstance(chance, tuple) else chance


def _one(name: str, *kinds: tuple[float, Chance]) -> Spread:
    return Spread(name, [Kind(share, chance) for share, chance in kinds])


def _two(name: str, *kinds: tuple[float, Chance, Chance]) -> Spread:
    return Spread(name, [Kind(*kind) for kind in kinds])


#: Difficulty under one setting.
SINGLE = (
    _one("U-shaped", (1, (0.3, 0.3))), _one("hard", (1, (0.6, 2.0))), _one("easy", (1, (2.0, 0.3))),
    _one("even", (1, (1.0, 1.0))), _one("nearly all right", (1, (3.0, 0.15))), _one("all alike at 0.98", (1, 0.98)),
    _one("all alike at 0.5", (1, 0.5)), _one("5 % collapse", (0.95, 0.995), (0.05, 0.1)),
    _one("2 % collapse", (0.98, 1.0), (0.02, 0.0)), _one("rarely right", (0.97, 0.0), (0.03, 0.9)),
)  # fmt: skip
SINGLE_KEPT = (
    _one("harder", (1, (0.3, 1.2))), _one("nearly all wrong", (1, (0.1, 3.0))),
    _one("3 % collapse", (0.97, 0.99), (0.03, 0.0)), _one("saturated with a tail", (0.9, 0.98), (0.1, (1.0, 1.0))),
    _one("all alike at 0.995", (1, 0.995)),
)  # fmt: skip
#: Two settings; the second is the one that may lose.
PAIRS = (
    _two("equal, U-shaped", (1, (0.3, 0.3), (0.3, 0.3))), _two("the same chances", (0.5, 0.9, 0.9), (0.5, 0.3, 0.3)),
    _two("3 % collapse", (0.97, 0.95, 0.95), (0.03, 0.95, 0.0)),
    _two("equal means, 3 % collapse", (0.97, 0.90, 0.93), (0.03, 0.97, 0.0)),
    _two("saturated", (0.99, 0.999, 0.999), (0.01, 0.9, 0.2)), _two("4 points for all", (1, 0.6, 0.56)),
)  # fmt: skip
PAIRS_KEPT = (
    _two("6 % collapse on hard problems", (0.5, 0.1, 0.1), (0.44, 0.9, 0.9), (0.06, 0.9, 0.05)),
    _two("equal means, 5 % gain", (0.95, 0.80, 0.76), (0.05, 0.05, 0.81)), _two("a cliff", (0.8, 0.98, 0.97), (0.2,
    0.9, 0.1)),
)  # fmt: skip
#: What the settings of a map lose: on which share of problems an answer is lost and gained, setting by setting.
LOSSES = {
    "like the demo": (np.r_[np.linspace(0.005, 0.06, 12), np.linspace(0.08, 0.7, 28)], np.full(40, 0.02)),
    "flat, just beyond the margin": (np.full(20, 0.0501), np.full(20, 0.02)),
    "collapse, just beyond the margin": (np.full(20, 0.0301), np.zeros(20)),
    "little lost": (np.full(20, 0.015), np.full(20, 0.012)),
    "half of them harmless": (np.repeat([0.01, 0.06], 10), np.full(20, 0.008)),
}
LOSSES_KEPT = {
    "cliffs": (np.where(np.arange(20) % 2 == 0, 0.0351, 0.3), np.full(20, 0.005)),
    "nothing lost": (np.full(20, 0.01), np.full(20, 0.01)),
    "a step, in no order of cost": (np.where(np.arange(30) * 7 % 30 < 8, 0.012, 0.12), np.full(30, 0.01)),
}
