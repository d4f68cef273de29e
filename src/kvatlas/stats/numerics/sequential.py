"""Deciding early which settings lose at most a margin: a group-sequential design on blocks of problems.

At a look after a share t of the blocks the limits are those at the quantile c / sqrt(t) (O'Brien and Fleming). The
limits of all looks of all settings hold together with 95 %, whatever is decided for whatever reason. So it is free
which settings come next: a setting waits while cheaper ones are likely to be proven.

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
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Flags, Floats, Ints, problems_by_benchmark, strata_of_sizes, weights
from kvatlas.stats.numerics.bounded import interval, upper_limit

#: A setting is given up where the chance that its last look proves it is less than this.
HOPELESS = 0.05
#: A setting waits while so many of the cheaper ones are to be expected to be proven.
ENOUGH = 0.8


@dataclass(frozen=True)
class TracesSoFar:
    """The traces so far: `differences` [settings, problems] to the full cache, NaN for problems yet to come.

    Problems stand in the order in which they come; `strata` and `block` [problems] number their benchmarks and blocks
    from 0. `sizes` are the problems of each benchmark in all, `looks` the number of blocks, `costs` those of settings.
    """

    differences: Floats
    strata: Ints
    block: Ints
    sizes: Sequence[int]
    looks: int
    costs: Floats


@dataclass(frozen=True)
class Decision:
    """State of the settings, [settings] each: losses with limits that hold at any look, and what is decided.

    `kept`: at most the margin is lost; `broken`: more; `hopeless`: given up; `open`: none of these, and cheaper than
    `recommended`, the cheapest setting that is kept. `blocks` were seen of each, `goal` are to be next, and `chance`
    is that of being kept by all problems.
    """

    value: Floats
    low: Floats
    high: Floats
    chance: Floats
    blocks: Ints
    goal: Ints
    kept: Flags
    broken: Flags
    hopeless: Flags
    open: Flags
    recommended: int | None

    @property
    def next(self) -> Flags:
        """The settings that come next."""
        return self.goal > self.blocks


def begin(settings: int) -> Decision:
    """Return the state before the first look: nothing is known and every setting comes next."""
    none = np.zeros(settings, bool)
    every = np.ones(settings, bool)
    unknown = np.full(settings, math.nan)
    ones = np.ones(settings)
    return Decision(unknown, -ones, ones, ones, none.astype(int), every.astype(int), none, none, none, every, None)


def take_look(before: Decision, traces: TracesSoFar, margin: float) -> Decision:
    """Return the decision from the blocks up to the `goal` of each setting."""
    blocks = before.goal
    value = before.value.copy()
    low = before.low.copy()
    high = before.high.copy()
    chance = before.chance.copy()

    final = last_quantile(len(blocks), traces.looks)
    for count in np.unique(blocks[before.next]):
        rows = before.next & (blocks == count)
        is_seen = traces.block < count
        share = count / traces.looks
        lost = -traces.differences[rows][:, is_seen]
        strata = traces.strata[is_seen]
        low[rows], high[rows] = interval(lost, -1.0, 1.0, final / math.sqrt(share), strata)
        value[rows] = lost @ weights(strata)
        chance[rows] = _chance(lost, strata, traces.sizes, final, share, margin)

    kept = before.kept | (high <= margin)
    broken = before.broken | (low > margin)
    hopeless = before.hopeless | (~kept & ~broken & (chance < HOPELESS))
    open_ = ~kept & ~broken & ~hopeless
    recommended = None
    if kept.any():
        recommended = int(np.where(kept, traces.costs, np.inf).argmin())
        open_ &= traces.costs < traces.costs[recommended]

    goal = _next_goal(blocks, open_, chance, traces.costs)
    return Decision(value, low, high, chance, blocks, goal, kept, broken, hopeless, open_, recommended)


def _next_goal(blocks: Ints, open_: Flags, chance: Floats, costs: Floats) -> Ints:
    """Return the blocks that each setting is to have next: of open ones, unless cheaper ones are likely to be kept."""
    by_cost = np.argsort(costs, kind="stable")
    expected = np.where(open_, chance, 0.0)[by_cost]
    cheaper = np.empty(len(blocks))
    cheaper[by_cost] = np.cumsum(expected) - expected
    # One block at a time; a setting that waited takes twice what it had, until it has as many as others.
    more = np.clip(np.minimum(blocks, blocks.max() - blocks), 1, None)
    return np.asarray(blocks + more * (open_ & (cheaper < ENOUGH)))


def decisions(traces: TracesSoFar, margin: float) -> Iterator[Decision]:
    """Yield look after look, as far as the problems go; first the state before any."""
    state = begin(len(traces.differences))
    yield state
    while state.next.any() and is_complete(state, traces):
        state = take_look(state, traces, margin)
        yield state


def is_complete(state: Decision, traces: TracesSoFar) -> bool:
    """Return whether the settings that come next have all of their blocks."""
    return not bool(np.isnan(traces.differences[traces.block < state.goal[:, None]]).any())


def _chance(lost: Floats, strata: Ints, sizes: Sequence[int], final: float, share: float, margin: float) -> Floats:
    """Return the predictive chance that the last look keeps a setting, if the remaining problems are like these."""
    if share > 1 - 1e-9:
        return np.zeros(len(lost))
    # The problems so far, repeated evenly up to the size of each benchmark.
    repeated = []
    for problems, size in zip(problems_by_benchmark(strata), sizes, strict=True):
        repeated.append(problems[np.arange(size) * len(problems) // size])
    expected_losses = lost[:, np.concatenate(repeated)]

    all_strata = strata_of_sizes(sizes)
    limit = upper_limit(expected_losses, -1.0, 1.0, final, all_strata)
    error = (limit - expected_losses @ weights(all_strata)) / final
    spread = error * math.sqrt(1 / share - 1)
    return np.asarray(special.ndtr((margin - limit) / np.maximum(spread, 1e-9)), float)


@lru_cache(maxsize=64)
def last_quantile(settings: int, looks: int) -> float:
    """Return the quantile c of the last look; that of a look after a share t of all problems is c / sqrt(t)."""
    from scipy import optimize

    per_setting = 1 - (1 - LEVEL) ** (1 / settings)
    return float(optimize.brentq(lambda c: _chance_to_leave(c, looks) - per_setting, 1.0, 8.0, xtol=1e-6))


def _chance_to_leave(bound: float, looks: int) -> float:
    """Return the chance that a Brownian motion leaves -bound to bound at one of `looks` equal steps up to time 1."""
    nodes, quadrature = np.polynomial.legendre.leggauss(200)
    nodes = bound * nodes
    quadrature = bound * quadrature
    step = 1 / math.sqrt(looks)
    density = _normal_density(nodes, step)
    kernel = _normal_density(nodes[:, None] - nodes[None], step)
    for _ in range(looks - 1):
        density = kernel @ (quadrature * density)
    return 1 - float(quadrature @ density)


def _normal_density(x: Floats, deviation: float) -> Floats:
    return np.asarray(np.exp(-((x / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi)), float)


def block_slice(problems: int, blocks: int, block: int) -> slice:
    """Return which problems of one benchmark, in the order in which they come, are those of a block, counted from 0."""
    return slice(problems * block // blocks, problems * (block + 1) // blocks)


def in_order(differences: Floats, orders: Sequence[Ints], costs: Floats, looks: int) -> tuple[TracesSoFar, Ints]:
    """Return stored differences [settings, problems] as a sweep would see them, and the indices of its problems.

    `orders` are the indices of each benchmark's problems in the order in which they come. A sweep takes a block of
    every benchmark before the next block of any.
    """
    problems: list[Ints] = []
    strata: list[Ints] = []
    blocks: list[Ints] = []
    for block in range(looks):
        for stratum, order in enumerate(orders):
            in_block = order[block_slice(len(order), looks, block)]
            problems.append(in_block)
            strata.append(np.full(len(in_block), stratum))
            blocks.append(np.full(len(in_block), block))

    sizes = [len(order) for order in orders]
    order_of_all = np.concatenate(problems)
    traces = TracesSoFar(
        differences[:, order_of_all], np.concatenate(strata), np.concatenate(blocks), sizes, looks, costs
    )
    return traces, order_of_all


def replay(
    differences: Floats, orders: Sequence[Ints], costs: Floats, margin: float, looks: int
) -> tuple[Decision, Ints]:
    """Return the last decision of a whole sweep on stored differences, and the problems that each setting took."""
    traces, _ = in_order(differences, orders, costs, looks)
    *_, state = decisions(traces, margin)
    return state, np.searchsorted(traces.block, state.blocks)
