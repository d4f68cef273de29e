"""What a map can say: evidence of any difference, the plateau of the best, effects of the axes, what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvatlas.core import Map
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.grid import Axes, grid_groups
from kvatlas.stats.estimates.maps import MEAN_OF
from kvatlas.stats.estimates.pass_at_1 import Floats
from kvatlas.stats.inference import resampling
from kvatlas.stats.inference.resampling import Contrast, Ints, Need, Plateau, Test

#: A cell of a map: its values on the two axes.
CellCoord = tuple[Any, Any]
#: A map's name: model, benchmark (or `mean of N`), policy.
Name = tuple[str, str, str]
_TIE = 1e-9


@dataclass(frozen=True)
class Effect:
    """The main effect of one axis: each level against the mean of all, and the trend from the lowest to the highest.

    `trend` is the rise of the least-squares line over the levels, None where they have no order.
    """

    axis: str
    levels: tuple[tuple[Any, Contrast], ...]
    trend: Contrast | None


@dataclass(frozen=True)
class Verdict:
    """What one map says. Shares in [0, 1]; `method` says whether it rests on traces, on a bound or on e-values.

    `peaks` are the cells with the highest value and `peak_share` how often one of them would be the highest with other
    problems (other samples, for a bound). `spread` is the standard deviation over cells, `noise` what chance alone
    would give. `plateau` holds the cells not shown worse than the best, `may_lose` by how much a cell may be below the
    best with 95 % confidence. `need` is what it takes to tell the peak from the `lowest` cell. What an adaptive sweep
    leaves open is None or empty.
    """

    peaks: tuple[CellCoord, ...]
    lowest: CellCoord
    omnibus: Test
    plateau: tuple[CellCoord, ...]
    p_best: Mapping[CellCoord, float]
    may_lose: Mapping[CellCoord, float]
    effects: tuple[Effect, ...]
    peak_share: float | None
    spread: float
    noise: float | None
    need: Need
    method: str
    notes: tuple[str, ...] = ()

    @property
    def evidence(self) -> bool:
        """Whether there is evidence of any difference between the cells, at 5 %."""
        return self.omnibus.p < resampling.LEVEL


@dataclass(frozen=True)
class Table:
    """Cells side by side on the problems and samples that all of them have.

    `grades` is [problems, cells, samples], NaN where a problem has fewer samples; `strata` numbers the benchmark of
    each problem; `left_out` counts problems that not every cell has.
    """

    places: tuple[Hashable, ...]
    grades: Floats
    strata: Ints
    left_out: int = 0
    means: Floats = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "means", np.nanmean(self.grades, axis=2))


TRACES = "paired by problem on all traces"


def table(benchmarks: Sequence[Sequence[CellTraces]], place: Callable[[CellTraces], Hashable]) -> Table | None:
    """The cells of one or more benchmarks, by `place`; places that not all benchmarks have are left out.

    None where no problem has a sample that all cells have.
    """
    compared = [{place(cell): cell.compared() for cell in cells if cell.measured} for cells in benchmarks]
    places = [one for one in compared[0] if all(one in others for others in compared[1:])] if compared else []
    rows: list[list[list[float]]] = []
    strata: list[int] = []
    left_out = 0
    for number, cells in enumerate(compared):
        held = [cells[one] for one in places]
        problems = list(dict.fromkeys(problem for outcomes in held for problem in outcomes))
        for problem in problems:
            each = [outcomes.get(problem, {}) for outcomes in held]
            shared = sorted(set(each[0]).intersection(*each[1:]))
            if shared:
                rows.append([[outcomes[sample] for sample in shared] for outcomes in each])
                strata.append(number)
            left_out += not shared
    if not rows or len(set(strata)) < len(compared):
        return None
    samples = max(len(row[0]) for row in rows)
    grades = np.full((len(rows), len(places), samples), math.nan)
    for index, row in enumerate(rows):
        grades[index, :, : len(row[0])] = row
    return Table(tuple(places), grades, np.array(strata), left_out)


def verdicts(cells: Sequence[CellTraces], axes: Axes, fix: Mapping[str, Any] | None = None) -> dict[Name, Verdict]:
    """The verdict of each map of gathered cells, of one run or of several, and of the mean over benchmarks.

    They are found by (model, benchmark or `mean of N`, policy). Maps without a problem that all their cells have are
    missing. Cells of adaptive sweeps are passed over: `stats.adaptive` speaks for them.
    """
    found: dict[Name, Verdict] = {}
    together: dict[tuple[str, str], list[list[CellTraces]]] = {}

    def place(cell: CellTraces) -> Hashable:
        values = cell.expected.setting.values
        return values[axes[0]], values[axes[1]]

    for name, group in grid_groups([cell for cell in cells if not cell.adaptive], axes, fix).items():
        together.setdefault((name[0], name[2]), []).append(group)
        held = table([group], place)
        if held is not None:
            found[name] = verdict(held, axes)
    for (model, policy), groups in together.items():
        held = table(groups, place) if len(groups) > 1 else None
        if held is not None:
            found[model, f"{MEAN_OF}{len(groups)}", policy] = verdict(held, axes)
    return found


def verdict(held: Table, axes: Axes) -> Verdict:
    """The verdict on a table whose places are pairs of values of the two `axes`."""
    places: list[CellCoord] = [(place[0], place[1]) for place in held.places if isinstance(place, tuple)]
    values = resampling.weights(held.strata) @ held.means
    test = resampling.omnibus(held.means, held.strata)
    best = resampling.plateau(held.means, held.strata)
    shares = resampling.peak_shares(held.means, held.strata)
    high, low = int(values.argmax()), int(values.argmin())
    whole = held.grades if not np.isnan(held.grades).any() else held.means[:, :, None]
    left = (f"{held.left_out} problems that not every cell has are left out of the tests",) if held.left_out else ()
    return assembled(
        places,
        values,
        test,
        best,
        effects(places, axes, lambda coefficients: resampling.contrast(held.means, held.strata, coefficients)),
        shares,
        resampling.need(whole[:, high], whole[:, low], held.strata),
        TRACES,
        left,
    )


def assembled(
    places: Sequence[CellCoord],
    values: Floats,
    test: Test,
    best: Plateau,
    main_effects: tuple[Effect, ...],
    shares: Floats,
    needed: Need,
    method: str,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """A verdict from its parts; `values`, `shares` and the arrays of `best` are in the order of `places`."""
    peaks = values >= values.max() - _TIE
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Verdict(
        peaks=tuple(place for place, is_peak in zip(places, peaks, strict=True) if is_peak),
        lowest=places[int(values.argmin())],
        omnibus=test,
        plateau=tuple(place for place, member in zip(places, best.member, strict=True) if member),
        p_best={place: float(p) for place, p in zip(places, best.p, strict=True)},
        may_lose={place: float(lost) for place, lost in zip(places, best.may_lose, strict=True)},
        effects=main_effects,
        peak_share=float(shares[peaks].sum()),
        spread=spread,
        noise=spread / math.sqrt(test.statistic) if test.statistic > 0 else 0.0,
        need=needed,
        method=method,
        notes=notes,
    )


def effects(places: Sequence[CellCoord], axes: Axes, measure: Callable[[Floats], Contrast]) -> tuple[Effect, ...]:
    """The main effects of both axes; `measure` gives the contrast of coefficients over cells.

    An axis counts where every one of its levels meets every level of the other, so that effects are not mixed.
    """
    levels = [list(dict.fromkeys(place[side] for place in places)) for side in (0, 1)]
    if len(places) < len(levels[0]) * len(levels[1]):
        return ()
    found = []
    for side, axis in enumerate(axes):
        ordered = all(isinstance(level, int | float) for level in levels[side])
        ranks = sorted(levels[side]) if ordered else levels[side]
        if len(ranks) < 2:
            continue
        of_cell = [ranks.index(place[side]) for place in places]
        each = tuple((level, measure(resampling.level_effect(of_cell, rank))) for rank, level in enumerate(ranks))
        trend = measure(resampling.slope(of_cell, len(ranks))) if ordered else None
        found.append(Effect(axis, each, trend))
    return tuple(found)


def name_of(one: Map) -> Name:
    """The name under which a map's verdict is found."""
    return one.model, one.benchmark, one.policy
