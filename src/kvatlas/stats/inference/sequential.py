"""Always-valid inference while samples come in: which settings are shown worse than the best, and means in between.

Problems come in blocks, in an order that was drawn before anything was decoded, so they are independent draws of the
problems like these. A bettor stakes against "setting j is the best": on each problem the wealth is multiplied by
1 + stake * (grade of a rival - grade of j). If j is the best this is a fair or a losing game whatever the bettor does
with what was seen before, so the wealth is an e-value at every moment, and it ever reaches 100 with at most 1 %
(Ville 1939). One may look after every block, stop for any reason, and resume. The other 4 % are for one test of
fixed size when every problem is in, which finds what bets of modest growth leave open. Together the best setting is
ever dropped with at most 5 %.

Source: Waudby-Smith and Ramdas (2024), J. Royal Statistical Society B 86:1-27 (betting); Ramdas et al. (2023),
Statistical Science 38:576-601 (e-processes, Ville's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from kvatlas.stats.estimates.anytime import STAKES, benchmark_means, stake_shares
from kvatlas.stats.estimates.pass_at_1 import LEVEL, Floats, Ints
from kvatlas.stats.inference.resampling import difference_errors

#: The part of the error of 5 % that is spent on dropping settings early; the rest is for the final test.
EARLY = 0.01
#: No case against a setting is given up before this share of the full grid is spent, nor while finishing the run would
#: leave it below the second share.
PATIENCE, CHEAP = 0.2, 1 / 3


@dataclass(frozen=True)
class Block:
    """Problems that came in together: `means` [problems, settings], NaN for settings that were dropped before.

    `strata` [problems] numbers their benchmarks from 0; every benchmark is in every block.
    """

    means: Floats
    strata: Ints


@dataclass(frozen=True)
class Race:
    """Where things stand after some blocks.

    `log_e` [settings] is the largest log e-value so far against "this setting is the best"; `active` [settings] are
    not dropped; `blocks` [settings] counts the blocks that each took part in; `values` [settings] are means over
    benchmarks so far. `hopeless`: no active setting but the leader is likely to be dropped by the blocks that are left.
    """

    log_e: Floats
    active: NDArray[np.bool_]
    blocks: Ints
    values: Floats
    hopeless: bool

    @property
    def leader(self) -> int:
        """The active setting with the highest value."""
        return int(np.where(self.active, self.values, -1.0).argmax())


def race(blocks: Sequence[Block], settings: int, left: int = 0) -> Race:
    """Replay blocks in order and drop what is shown worse after each. `left`: problems that are still to come.

    The rival of a setting is the active one with the highest mean so far; it is fixed before a problem is seen. With
    nothing left the final test is made. Stakes weigh problems so that benchmarks count equally: with factors
    1 + stake * a_i * d_i and weights a_i that sum to the same for every benchmark, the expected product is at most
    exp(stake * sum of a_i E d_i) <= 1 where j is the best in the mean over benchmarks.
    """
    active = np.ones(settings, bool)
    counted = np.zeros(settings, int)
    totals = np.zeros(settings)
    wealth = np.zeros((settings, len(STAKES)))
    log_e = np.zeros(settings)
    values = np.zeros(settings)
    bets: list[Floats] = []
    for block in blocks:
        counted[active] += 1
        for piece in _pieces(block):
            bets.append(_bets(piece, active, totals))
            wealth += np.log1p(np.asarray(STAKES) * bets[-1][:, :, None]).sum(0)
            totals = totals + np.where(active, benchmark_means(np.where(active, piece.means, 0.0), piece.strata), 0.0)
        now = special.logsumexp(wealth, axis=1) - math.log(len(STAKES))
        log_e = np.where(active, np.maximum(log_e, now), log_e)
        values = np.where(active, _so_far(blocks[: counted.max()], active), values)
        out = active & (log_e >= -math.log(EARLY))
        out[int(np.where(active, values, -1.0).argmax())] = False
        active = active & ~out
    if not blocks:
        return Race(log_e, active, counted, values, False)
    if left <= 0:
        active = active & ~_worse_at_last(blocks, active, values, LEVEL - EARLY)
        return Race(log_e, active, counted, values, True)
    problems = np.array([len(block.strata) for block in blocks])
    full = (problems.sum() + left) * settings
    spent = sum(float(problems[:count].sum()) for count in counted) / full
    dear = spent >= PATIENCE and spent + left * active.sum() / full > CHEAP
    return Race(log_e, active, counted, values, bool(active.sum() < 2 or (dear and _hopeless(bets, active, left))))


def _pieces(block: Block) -> list[Block]:
    """The block in its order, in pieces as small as still hold every benchmark: the bettor learns after each."""
    rows = [np.flatnonzero(block.strata == stratum) for stratum in range(int(block.strata.max()) + 1)]
    count = min(len(own) for own in rows)
    cuts = [
        np.concatenate([own[len(own) * n // count : len(own) * (n + 1) // count] for own in rows]) for n in range(count)
    ]
    return [Block(block.means[cut], block.strata[cut]) for cut in cuts]


def _bets(piece: Block, active: NDArray[np.bool_], totals: Floats) -> Floats:
    """[problems, settings]: what a stake of 1 against each active setting wins on each problem, at least -1.

    The rival is the active setting that was highest before, for itself the next; at first all others together.
    """
    grades = np.where(active, piece.means, 0.0)
    standing = np.where(active, totals, -np.inf)
    if not totals.any():
        others = np.maximum(active.sum() - 1, 1)
        rivals = (grades.sum(1, keepdims=True) - grades) / others
    else:
        leader = int(standing.argmax())
        rivals = np.repeat(grades[:, [leader]], len(active), axis=1)
        standing[leader] = -np.inf
        if np.isfinite(standing.max()):
            rivals[:, leader] = grades[:, int(standing.argmax())]
    return np.asarray(np.where(active, stake_shares(piece.strata)[:, None] * (rivals - grades), 0.0), float)


def _worse_at_last(
    blocks: Sequence[Block], active: NDArray[np.bool_], values: Floats, level: float
) -> NDArray[np.bool_]:
    """Active settings that all problems together show worse than another: the largest paired t over active rivals.

    Its critical value is that of as many rivals as there were at first, as if settings were independent: settings that
    are more alike, or fewer, reach it more rarely (Slepian 1962), so having dropped some does no harm.
    """
    strata = np.concatenate([block.strata for block in blocks])
    places = np.flatnonzero(active)
    means = np.concatenate([block.means for block in blocks])[:, places]
    errors = difference_errors(means, strata)
    gaps = values[places][None, :] - values[places][:, None]
    freedom = max(len(strata) - int(strata.max()) - 1, 1)
    largest = np.where(gaps > 1e-12, gaps / np.maximum(errors, 1e-9), 0.0).max(1, initial=0.0)
    worse = np.zeros(len(active), bool)
    worse[places] = largest > float(stats.t.ppf(stats.norm.cdf(largest_of(len(active) - 1, level)), freedom))
    return worse


@lru_cache(maxsize=64)
def largest_of(rivals: int, level: float) -> float:
    """The value that the largest of `rivals` standardised differences to one setting exceeds with this chance.

    All settings are independent and normal: the differences have correlation 1/2 (Dunnett 1955, JASA 50:1096-1121).
    """

    def exceeds(bar: float) -> float:
        nodes, node_weights = np.polynomial.hermite_e.hermegauss(80)
        below = stats.norm.cdf(math.sqrt(2) * bar + nodes) ** rivals
        return 1 - float(node_weights @ below) / math.sqrt(2 * math.pi)

    return float(optimize.brentq(lambda bar: exceeds(bar) - level, 0.0, 10.0)) if rivals > 0 else math.inf


def _so_far(blocks: Sequence[Block], active: NDArray[np.bool_]) -> Floats:
    means = np.where(active, np.concatenate([block.means for block in blocks]), 0.0)
    return benchmark_means(means, np.concatenate([block.strata for block in blocks]))


def _hopeless(bets: Sequence[Floats], active: NDArray[np.bool_], left: int) -> bool:
    """Whether no active setting can be expected to be dropped by the problems that are left.

    What the bets won so far was won without foresight, so it predicts the t values of the final test, shrunk towards 0
    by as much as their mean square over settings is luck (James and Stein 1961).
    """
    won = np.concatenate(bets)
    done = len(won) / (len(won) + left)
    now = won.mean(0) / np.maximum(won.std(0), 1e-9) * math.sqrt(len(won))
    square = float((now[active] ** 2).mean())
    at_last = now / math.sqrt(done) * max(0.0, 1 - 1 / max(square, 1e-9))
    return not bool((at_last >= largest_of(len(active) - 1, LEVEL - EARLY))[active].any())
