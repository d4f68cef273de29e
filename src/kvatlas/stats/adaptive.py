"""Deciding early which settings lose at most a margin: a group-sequential design on blocks of problems, on arrays.

At a look after a share t of the blocks the limits are those at the quantile c / sqrt(t) (O'Brien and Fleming). The
limits of all looks of all settings hold together with 95 %, whatever is decided for whatever reason. So it is free
which settings come next: a setting waits while cheaper ones are likely to be shown.

Source: O'Brien and Fleming (1979), Biometrics 35:549-556; Jennison and Turnbull (1989), J. Royal Statistical Society B
51:305-361 (repeated confidence intervals); Sidak (1967), JASA 62:626-633 (any correlation between settings);
Spiegelhalter, Freedman and Blackburn (1986), Controlled Clinical Trials 7:8-17 (predictive chance).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvatlas.core import Map, MapName, Note, NoteKind, grouped
from kvatlas.results.manifest import Manifest
from kvatlas.stats.choice import Choice, choice_of
from kvatlas.stats.inference import weights
from kvatlas.stats.intervals import LEVEL, Floats, Ints, groups, interval
from kvatlas.stats.losses import SettingLoss
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.table import CellTraces, select
from kvatlas.stats.verdicts import Basis, Verdict, is_full

Flags = NDArray[np.bool_]
#: A setting is given up where the chance that its last look shows it is less than this.
HOPELESS = 0.05
#: A setting waits while so many of the cheaper ones are to be expected to be shown.
ENOUGH = 0.8


@dataclass(frozen=True)
class Seen:
    """The traces so far: `differences` [settings, problems] to the full cache, NaN where not yet.

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

    `shown`: at most the margin is lost; `broken`: more; `hopeless`: given up; `open`: none of these, and cheaper than
    `recommended`, the cheapest setting that is shown. `blocks` were seen of each, `goal` are to be next, and `chance`
    is that of being shown by all problems.
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

    def losses(self, settings: Sequence[str]) -> dict[str, SettingLoss]:
        """Return the loss of each of the settings, as named, that was looked at, with limits that hold at any look."""
        columns = (column.tolist() for column in (self.value, self.low, self.high, self.shown, self.broken))
        rows = zip(settings, zip(*columns, strict=True), strict=True)
        return {setting: SettingLoss(*row) for setting, row in rows if not math.isnan(row[0])}


def begin(settings: int) -> Decision:
    """Before the first look: nothing is known and every setting comes next."""
    none, every = np.zeros(settings, bool), np.ones(settings, bool)
    unknown, ones = np.full(settings, math.nan), np.ones(settings)
    return Decision(unknown, -ones, ones, ones, none.astype(int), every.astype(int), none, none, none, every, None)


def look(before: Decision, seen: Seen, margin: float) -> Decision:
    """Return the decision from the blocks up to the `goal` of each setting."""
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
    # One block at a time; a setting that waited takes twice what it had, until it has as many as others.
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


def complete(state: Decision, seen: Seen) -> bool:
    """True if the settings that come next have all of their blocks."""
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
    return np.asarray(special.ndtr((margin - limit) / np.maximum(spread, 1e-9)), float)


@lru_cache(maxsize=64)
def last_quantile(settings: int, looks: int) -> float:
    """The quantile c of the last look; that of a look after a share t of all problems is c / sqrt(t)."""
    from scipy import optimize

    per_setting = 1 - (1 - LEVEL) ** (1 / settings)
    return float(optimize.brentq(lambda c: _crossing(c, looks) - per_setting, 1.0, 8.0, xtol=1e-6))


def _crossing(bound: float, looks: int) -> float:
    """The chance that a Brownian motion leaves -bound to bound at one of `looks` equally spaced times up to 1."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    nodes, weights = bound * nodes, bound * weights
    apart, step = nodes[:, None] - nodes[None], 1 / math.sqrt(looks)
    density, kernel = (np.exp(-((x / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi)) for x in (nodes, apart))
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
    *_, state = decisions(seen, margin)
    return state, np.searchsorted(seen.block, state.blocks)


NO_PAIRS = Note(
    NoteKind.LEFT_OUT,
    "0 paired comparisons: in an adaptive sweep the problems that two settings share depend on their outcomes",
)


def known(
    cells: Sequence[CellTraces], orders: Mapping[str, Sequence[str]], sizes: Mapping[str, int], blocks: int
) -> tuple[tuple[str, ...], Seen]:
    """One model's grid settings by id, and the differences on problems with all samples of setting and full cache.

    `orders` are the problems of each benchmark as they come, `sizes` how many in all. A setting costs the tokens that
    it kept on the first block, so that a later look does not change an earlier decision.
    """
    problems = {name: (*order, *("",) * (sizes[name] - len(order))) for name, order in orders.items()}
    by_setting = grouped(select(cells, baseline=False), lambda cell: cell.setting.id)
    full = _means([cell for cell in cells if is_full(cell)], problems)
    own = np.reshape([_means(cells, problems) for cells in by_setting.values()], (-1, len(full)))
    first = {name: every[cut(len(every), blocks, 0)] for name, every in problems.items()}
    costs = np.array([_kept(cells, first) for cells in by_setting.values()])
    places = np.split(np.arange(len(full)), np.cumsum([sizes[name] for name in orders])[:-1])
    return tuple(by_setting), in_order(own - full, places, costs, blocks)[0]


def _means(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> Floats:
    """The mean grade of each benchmark's problems; NaN unless all of its samples are known."""
    known = {cell.benchmark: cell.in_order(cell.grades.mean(1), problems[cell.benchmark]) for cell in cells}
    return np.concatenate([known.get(name, np.full(len(own), math.nan)) for name, own in problems.items()])


def _kept(cells: Iterable[CellTraces], problems: Mapping[str, Sequence[str]]) -> float:
    """The mean KV tokens of a setting on some problems; infinite where it has none of them."""
    tokens = [cell.in_order(cell.traces["mean_kv_tokens"], problems[cell.benchmark]).ravel() for cell in cells]
    kept = [number for own in tokens for number in own.tolist() if not math.isnan(number)]
    return math.fsum(kept) / len(kept) if kept else math.inf


#: By model the ids of an adaptive sweep's grid settings, and the last decision on them.
Standings = Mapping[str, tuple[Sequence[str], Decision]]


def standings(manifest: Manifest, cells: Sequence[CellTraces], margin: float) -> Standings:
    """The state of each model of an adaptive run."""
    sizes, blocks = manifest.allocation["problems"], manifest.allocation["blocks"]
    by_benchmark = grouped((cell.expected for cell in cells), lambda cell: cell.benchmark)
    orders = {name: max((cell.problems for cell in own), key=len) for name, own in by_benchmark.items()}
    found = {}
    for model, own in grouped(cells, lambda cell: cell.model).items():
        settings, seen = known(own, orders, sizes, blocks)
        *_, last = decisions(seen, margin)
        found[model] = settings, last
    return found


def adaptive_verdicts(by_model: Standings, maps: Sequence[Map]) -> dict[MapName, Verdict]:
    """The verdict of each mean map, or only map, of an adaptive run: losses against the full cache and nothing else."""
    parts = {(map_.model, map_.policy): map_ for map_ in (*maps, *mean_maps(maps)) if map_.model in by_model}
    by_map: dict[MapName, Verdict] = {}
    for mean in parts.values():
        settings, decision = by_model[mean.model]
        coords = {cell.setting.id: coord for coord, cell in mean.cells.items()}
        values = [cell.estimate.value for cell in mean.cells.values()]
        text = (
            f"adaptive: of {len(settings)} settings of all policies, {int(decision.shown.sum())} are proven to lose at "
            f"most the margin and {int(decision.broken.sum())} to lose more"
        )
        by_map[mean.name] = Verdict(
            Basis.GROUP_SEQUENTIAL,
            spread=float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            notes=(Note(NoteKind.ADAPTIVE, text),),
            losses={coords[setting]: loss for setting, loss in decision.losses(settings).items() if setting in coords},
        )
    return by_map


def adaptive_choices(by_model: Standings, cells: Sequence[CellTraces], margin: float) -> list[Choice]:
    """The choice for each model of an adaptive run; the costs of the first block decide which setting keeps least."""
    made = []
    for model, (settings, decision) in by_model.items():
        among = [] if decision.recommended is None else [settings[decision.recommended]]
        grid = select(cells, model=model, baseline=False)
        made.append(choice_of(model, grid, decision.losses(settings), margin, among=among))
    return made
