"""Deciding early which settings lose at most a margin: a group-sequential design on blocks of problems, on arrays.

After each block of problems every setting that is still open is looked at. Its loss against the full cache has limits
at the quantile that the look allows: with equal blocks, O'Brien and Fleming's boundaries c / sqrt(share of problems
seen) spend almost nothing on early looks. Whatever is decided at a look for whatever reason, the limits of all looks
of all settings hold together with 95 %, so a setting that breaks the margin is ever shown to keep it with at most 2.5
%.

Source: O'Brien and Fleming (1979), Biometrics 35:549-556; Jennison and Turnbull (1989), J. Royal Statistical Society B
51:305-361 (repeated confidence intervals); Sidak (1967), JASA 62:626-633 (any correlation between settings).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from kvatlas.stats.estimates.bounded_mean import LEVEL, Floats, Ints, interval
from kvatlas.stats.inference.resampling import weights

#: A setting is given up where it would be shown at the last look with less than this chance, were its value true.
HOPELESS = 0.005
#: No setting is given up before this share of the problems is seen.
PATIENCE = 0.2


@dataclass(frozen=True)
class Look:
    """The problems up to a look: `differences` [settings, problems] to the full cache, NaN where a setting has left.

    `strata` [problems] numbers benchmarks from 0, `share` is that of all problems, `costs` [settings] what each costs.
    """

    differences: Floats
    strata: Ints
    share: float
    costs: Floats


@dataclass(frozen=True)
class Decision:
    """Where the settings stand, [settings] each: losses with limits that hold at any look, and what is decided.

    `shown`: at most the margin is lost; `broken`: more; `hopeless`: given up; `open`: to be given the next block.
    `recommended` is the cheapest setting that is shown, None where there is none yet.
    """

    value: Floats
    low: Floats
    high: Floats
    shown: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    hopeless: NDArray[np.bool_]
    open: NDArray[np.bool_]
    recommended: int | None


def begin(settings: int) -> Decision:
    """Before the first look: nothing is known and every setting is open."""
    nothing = np.zeros(settings, bool)
    return Decision(
        np.full(settings, math.nan),
        np.full(settings, -1.0),
        np.ones(settings),
        nothing,
        nothing,
        nothing,
        ~nothing,
        None,
    )


def look(before: Decision, seen: Look, margin: float, looks: int) -> Decision:
    """What the problems up to one of `looks` equally spaced looks decide about the settings that were open."""
    open_ = before.open
    value, low, high = before.value.copy(), before.low.copy(), before.high.copy()
    final = last_quantile(len(open_), looks)
    quantile = final / math.sqrt(seen.share)
    held = seen.differences[open_]
    least, most = interval(held, -1.0, 1.0, quantile, seen.strata)
    value[open_], low[open_], high[open_] = -(held @ weights(seen.strata)), -most, -least
    shown = before.shown | (open_ & (high <= margin))
    broken = before.broken | (open_ & (low > margin))
    hopeless = before.hopeless | (
        open_ & ~shown & ~broken & (_chance(value, high, quantile, seen, final, margin) < HOPELESS)
    )
    if seen.share < PATIENCE:
        hopeless = before.hopeless
    recommended = int(np.where(shown, seen.costs, np.inf).argmin()) if shown.any() else None
    left = open_ & ~shown & ~broken & ~hopeless
    if recommended is not None:
        left &= seen.costs < seen.costs[recommended]
    return Decision(value, low, high, shown, broken, hopeless, left, recommended)


def _chance(value: Floats, high: Floats, quantile: float, seen: Look, final: float, margin: float) -> Floats:
    """The chance that a setting is shown at the last look, were its value so far the true one."""
    error = (high - value) / quantile
    at_last = error * math.sqrt(seen.share)
    left = 1 - seen.share
    if left < 1e-9:
        return np.zeros(len(value))
    # The mean over all problems is the one so far plus what the problems left can add.
    spread = at_last * math.sqrt(left)
    return np.asarray(stats.norm.cdf((margin - value - final * at_last) / np.maximum(spread, 1e-9)), float)


@lru_cache(maxsize=64)
def last_quantile(settings: int, looks: int, level: float = LEVEL) -> float:
    """The quantile c of the last look; that of a look after a share t of all problems is c / sqrt(t)."""
    each = 1 - (1 - level) ** (1 / settings)
    return float(optimize.brentq(lambda c: _crossing(c, looks) - each, 1.0, 8.0, xtol=1e-6))


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


def replay(
    differences: Floats, orders: Sequence[Ints], costs: Floats, margin: float, looks: int
) -> tuple[Decision, NDArray[np.int64]]:
    """A whole sweep on stored differences [settings, problems]: the last decision, and the problems each setting took.

    `orders` are the places of each benchmark's problems in the order in which they come.
    """
    state, took = begin(len(differences)), np.zeros(len(differences), np.int64)
    for number in range(looks):
        places = [order[: cut(len(order), looks, number).stop] for order in orders]
        new = sum(len(order[cut(len(order), looks, number)]) for order in orders)
        took += new * state.open
        every = np.concatenate(places)
        strata = np.repeat(np.arange(len(places)), [len(one) for one in places])
        share = (number + 1) / looks
        state = look(state, Look(differences[:, every], strata, share, costs), margin, looks)
        if not state.open.any():
            break
    return state, took
