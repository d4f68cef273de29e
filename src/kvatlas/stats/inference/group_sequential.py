"""Deciding early which settings lose at most a margin: a group-sequential design on blocks of problems, on arrays.

After each of its blocks of problems a setting is looked at. Its loss against the full cache has limits at the quantile
that the look allows: with equal blocks, O'Brien and Fleming's boundaries c / sqrt(share of problems seen) spend almost
nothing on early looks. Whatever is decided at a look for whatever reason, the limits of all looks of all settings hold
together with 95 %, so a setting that breaks the margin is ever shown to keep it with at most 2.5 %.

So it is free which settings come next. The question is for the cheapest, hence a setting waits while cheaper ones are
likely to be shown, and goes on where it stood if they are not.

Source: O'Brien and Fleming (1979), Biometrics 35:549-556; Jennison and Turnbull (1989), J. Royal Statistical Society B
51:305-361 (repeated confidence intervals); Sidak (1967), JASA 62:626-633 (any correlation between settings);
Spiegelhalter, Freedman and Blackburn (1986), Controlled Clinical Trials 7:8-17 (predictive chance).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from kvatlas.stats.estimates.bounded_mean import LEVEL, Floats, Ints, groups, interval
from kvatlas.stats.inference.resampling import weights

Flags = NDArray[np.bool_]
#: A setting is given up where the chance that its last look shows it is less than this.
HOPELESS = 0.05
#: A setting waits while so many of the cheaper ones are to be expected to be shown.
ENOUGH = 0.8


@dataclass(frozen=True)
class Seen:
    """What is known: `differences` [settings, problems] to the full cache, NaN where not yet.

    Problems stand in the order in which they come; `strata` [problems] numbers their benchmarks from 0 and `block`
    [problems] their block. `sizes` are the problems of each benchmark in all, `looks` the number of blocks, `costs`
    [settings] what each setting costs.
    """

    differences: Floats
    strata: Ints
    block: Ints
    sizes: Sequence[int]
    looks: int
    costs: Floats


@dataclass(frozen=True)
class Decision:
    """Where the settings stand, [settings] each: losses with limits that hold at any look, and what is decided.

    `shown`: at most the margin is lost; `broken`: more; `hopeless`: given up; `open`: none of these, and cheaper than
    `recommended`, the cheapest setting that is shown (None where there is none yet). `blocks` were seen of each, `goal`
    is how many each is to have next, and `chance` is that of being shown by all problems.
    """

    value: Floats
    low: Floats
    high: Floats
    chance: Floats
    blocks: Ints
    goal: Ints
    shown: Flags
    broken: Flags
    hopeless: Flags
    open: Flags
    recommended: int | None

    @property
    def next(self) -> Flags:
        """The settings that come next."""
        return self.goal > self.blocks


def begin(settings: int) -> Decision:
    """Before the first look: nothing is known and every setting comes next."""
    none, every = np.zeros(settings, bool), np.ones(settings, bool)
    unknown, ones = np.full(settings, math.nan), np.ones(settings)
    return Decision(unknown, -ones, ones, ones, none.astype(int), every.astype(int), none, none, none, every, None)


def look(before: Decision, seen: Seen, margin: float) -> Decision:
    """What the blocks up to the `goal` of each setting decide.

    Settings take one block at a time; one that waited takes twice what it had, until it has as many as others.
    """
    blocks = before.goal
    value, low, high, chance = (array.copy() for array in (before.value, before.low, before.high, before.chance))
    final = last_quantile(len(blocks), seen.looks)
    for count in np.unique(blocks[before.next]):
        rows, upto, share = before.next & (blocks == count), seen.block < count, count / seen.looks
        differences, strata = seen.differences[rows][:, upto], seen.strata[upto]
        least, most = interval(differences, -1.0, 1.0, final / math.sqrt(share), strata)
        value[rows], low[rows], high[rows] = -(differences @ weights(strata)), -most, -least
        chance[rows] = _chance(differences, strata, seen.sizes, final, share, margin)
    shown, broken = before.shown | (high <= margin), before.broken | (low > margin)
    hopeless = before.hopeless | (~shown & ~broken & (chance < HOPELESS))
    recommended = int(np.where(shown, seen.costs, np.inf).argmin()) if shown.any() else None
    open_ = ~shown & ~broken & ~hopeless
    if recommended is not None:
        open_ &= seen.costs < seen.costs[recommended]
    by_cost = np.argsort(seen.costs, kind="stable")
    expected = np.where(open_, chance, 0.0)[by_cost]
    ahead = np.empty(len(blocks))
    ahead[by_cost] = np.cumsum(expected) - expected
    more = np.clip(np.minimum(blocks, blocks.max() - blocks), 1, None)
    goal = blocks + more * (open_ & (ahead < ENOUGH))
    return Decision(value, low, high, chance, blocks, goal, shown, broken, hopeless, open_, recommended)


def decisions(seen: Seen, margin: float) -> Iterator[Decision]:
    """Look after look, as far as the problems go; first the state before any."""
    state = begin(len(seen.differences))
    yield state
    while state.next.any() and complete(state, seen):
        state = look(state, seen, margin)
        yield state


def decide(seen: Seen, margin: float) -> Decision:
    """The last of the `decisions`."""
    *_, last = decisions(seen, margin)
    return last


def complete(state: Decision, seen: Seen) -> bool:
    """Whether the settings that come next have all of their blocks."""
    return not bool(np.isnan(seen.differences[seen.block < state.goal[:, None]]).any())


def _chance(
    differences: Floats, strata: Ints, sizes: Sequence[int], final: float, share: float, margin: float
) -> Floats:
    """The predictive chance that the last look shows a setting, were the problems left like those of `differences`."""
    if share > 1 - 1e-9:
        return np.zeros(len(differences))
    parts = groups(strata)
    every = np.concatenate([part[np.arange(n) * len(part) // n] for part, n in zip(parts, sizes, strict=True)])
    whole = np.repeat(np.arange(len(sizes)), sizes)
    limit = -interval(differences[:, every], -1.0, 1.0, final, whole)[0]
    error = (limit + differences[:, every] @ weights(whole)) / final
    spread = error * math.sqrt(1 / share - 1)
    return np.asarray(stats.norm.cdf((margin - limit) / np.maximum(spread, 1e-9)), float)


@lru_cache(maxsize=64)
def last_quantile(settings: int, looks: int, level: float = LEVEL) -> float:
    """The quantile c of the last look; that of a look after a share t of all problems is c / sqrt(t)."""
    per_setting = 1 - (1 - level) ** (1 / settings)
    return float(optimize.brentq(lambda c: _crossing(c, looks) - per_setting, 1.0, 8.0, xtol=1e-6))


def _crossing(bound: float, looks: int) -> float:
    """The chance that a Brownian motion leaves -bound to bound at one of `looks` equally spaced times up to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    nodes, weights = bound * nodes, bound * weights
    step = 1 / math.sqrt(looks)
    density = stats.norm.pdf(nodes, scale=step)
    kernel = stats.norm.pdf(nodes[:, None] - nodes[None], scale=step)
    for _ in range(looks - 1):
        density = kernel @ (weights * density)
    return 1 - float(weights @ density)


def cut(problems: int, blocks: int, number: int) -> slice:
    """The places of the problems of one benchmark that come in block `number`, from 0."""
    return slice(problems * number // blocks, problems * (number + 1) // blocks)


def in_order(differences: Floats, orders: Sequence[Ints], costs: Floats, looks: int) -> tuple[Seen, NDArray[np.int64]]:
    """Stored differences [settings, problems] as a sweep would see them, and the places of its problems.

    `orders` are the places of each benchmark's problems in the order in which they come.
    """
    pieces = [(order[cut(len(order), looks, n)], b, n) for n in range(looks) for b, order in enumerate(orders)]
    places = np.concatenate([piece for piece, _, _ in pieces])
    strata, block = (np.repeat([piece[k] for piece in pieces], [len(piece[0]) for piece in pieces]) for k in (1, 2))
    return Seen(differences[:, places], strata, block, [len(order) for order in orders], looks, costs), places


def replay(
    differences: Floats, orders: Sequence[Ints], costs: Floats, margin: float, looks: int
) -> tuple[Decision, NDArray[np.int64]]:
    """A whole sweep on stored differences: the last decision, and the number of problems that each setting took."""
    seen, _ = in_order(differences, orders, costs, looks)
    state = decide(seen, margin)
    return state, np.searchsorted(seen.block, state.blocks)
