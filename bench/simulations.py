"""Simulated runs of designs with known truth, and what the statistics say of them. Part of calibration.py.

Each function draws a design so many times and returns shares of rounds: `coverage` of true values by limits, what is
found or marked, and how often that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from design_kept_kinds import LengthTrunk
from design_kinds import Depths, Maps, Policies, Prices, Sequences, TwoSettings
from design_parts import COLUMNS, ROWS, Trunk
from kvatlas.stats.map_tests import levels_of
from kvatlas.stats.numerics.against_reference import losses
from kvatlas.stats.numerics.arrays import LEVEL, Contrast, Flags, Floats, Ints, Z, problems_by_benchmark, standard_error
from kvatlas.stats.numerics.bounded import mean_differences
from kvatlas.stats.numerics.decay import fit_decay
from kvatlas.stats.numerics.levels import average_levels, level_contrasts_of, level_units, permute_levels
from kvatlas.stats.numerics.ratios import cost_ratio, share_ratio

Row = dict[str, Any]
#: The name of an axis, its levels, and the number of each cell's level.
Axis = tuple[str, list[Any], list[int]]

#: Random orders of levels in each test; the methods take more.
DRAWS = 199
#: Differences in the last digits: the side on which a limit lies that touches a truth or 0 is not known.
TINY = 1e-9


def share(hits: Any) -> float:
    return float(np.mean(hits))


# -- two settings, two policies ----------------------------------------------------------------------------------------


def simulate_differences(design: TwoSettings | Policies, rng: np.random.Generator, rounds: int) -> Row:
    first, second = design.draw(rng, rounds)
    differences = second - first
    contrasts = mean_differences(differences, design.strata)
    low = np.array([contrast.low for contrast in contrasts])
    high = np.array([contrast.high for contrast in contrasts])
    is_proven = np.array([contrast.p <= LEVEL for contrast in contrasts])
    truth = design.truth
    truth_below = share(low > truth + TINY)
    truth_above = share(high < truth - TINY)
    errors = standard_error(differences, design.strata)
    has_error = errors > 0
    width_over_normal = None
    if has_error.any():
        width_over_normal = float((high - low)[has_error].mean() / (2 * Z * errors[has_error]).mean())
    # The limits are found to about seven digits.
    excludes_0 = (low > 1e-7) | (high < -1e-7)
    includes_0 = (low < -1e-7) & (high > 1e-7)
    return {
        "truth": truth,
        "coverage": 1 - truth_above - truth_below,
        "truth_above": truth_above,
        "truth_below": truth_below,
        "proven": share(is_proven),
        "width_over_normal": width_over_normal,
        "contradictions": int((is_proven & includes_0).sum() + (~is_proven & excludes_0).sum()),
    }


# -- maps --------------------------------------------------------------------------------------------------------------


def simulate_maps(design: Maps, rng: np.random.Generator, rounds: int) -> Row:
    """Return what is found, how often that is a false alarm, and how often the limits of all levels of an axis hold."""
    places = list(zip(design.rows.tolist(), design.columns.tolist(), strict=True))
    axes = levels_of(places, (ROWS, COLUMNS))
    p_values = []
    tests: list[dict[str, list[Contrast]]] = []
    for number in range(rounds):
        p, by_axis = tests_of_map(design.draw(rng), design.strata, axes, number)
        p_values.append(p)
        tests.append(by_axis)
    row: Row = {"omnibus": share([p <= LEVEL for p in p_values])}
    for axis, _, level_of_cell in axes:
        truth = level_effects(design.truth, level_of_cell)
        row[axis] = {
            "found": share([proven_levels(by_axis[axis]) > 0 for by_axis in tests]),
            "coverage": share([covers_all(by_axis[axis], truth) for by_axis in tests]),
        }
    found = {axis: row[axis]["found"] for axis, _, _ in axes}
    every_test = [test for by_axis in tests for test in by_axis.values()]
    return {
        **row,
        **false_alarms(design, row["omnibus"], found),
        "power": min((found[axis] for axis in found if axis not in design.equal_means), default=None),
        "coverage": min((row[axis]["coverage"] for axis in found), default=None),
        "proven_levels": sum(map(proven_levels, every_test)),
        "contradictions": sum(map(contradictions, every_test)),
    }


def false_alarms(design: Maps, omnibus: float, found: Mapping[str, float]) -> dict[str, float | None]:
    """Return the largest share of false alarms, by the likeness of levels that are equal on every problem.

    Where levels could be exchanged it may be 5 %. Where they are unlike in another way than their means, the test says
    so rightly, but as the effect of an axis it misleads.
    """
    unlike = "trunk" if isinstance(design.structure, Trunk | LengthTrunk) else "unlike"
    shares: dict[str, list[float]] = {"exchangeable": [], "trunk": [], "unlike": []}
    for axis in design.null & found.keys():
        shares["exchangeable" if axis in design.exchangeable else unlike].append(found[axis])
    if not design.changes:
        shares["exchangeable" if design.exchangeable == design.axes else unlike].append(omnibus)
    return {f"false_alarm_{kind}": max(of_kind, default=None) for kind, of_kind in shares.items()}


def tests_of_map(
    means: Floats, strata: Ints, axes: Sequence[Axis], seed: int
) -> tuple[float, dict[str, list[Contrast]]]:
    """Return the p-value of "the settings are exchangeable" and the levels' contrasts, as `map_tests` has them.

    Tests of few random orders have seeds of their own: with the same orders in all rounds their errors would not
    average out.
    """
    p_values = [permute_levels(average_levels(means, levels), strata, DRAWS, seed).p for _, _, levels in axes]
    promised = np.ones((len(means), 1), bool)
    contrasts = {}
    for axis, _, levels in axes:
        units = level_units(means[:, :, None], promised, strata, levels, by_trace=False)
        contrasts[axis] = level_contrasts_of(units)
    if not any(len(names) == means.shape[1] for _, names, _ in axes):
        p_values.append(permute_levels(means, strata, DRAWS, seed).p)
    return min(1.0, len(p_values) * min(p_values)), contrasts


def level_effects(cells: Floats, level_of_cell: Sequence[int]) -> Floats:
    """Return the mean of each level minus the mean of the others."""
    levels = average_levels(cells[None], level_of_cell)[0]
    return (levels - levels.mean()) * len(levels) / (len(levels) - 1)


def covers_all(contrasts: Sequence[Contrast], truth: Floats) -> bool:
    pairs = zip(contrasts, truth.tolist(), strict=True)
    return all(contrast.low - TINY <= effect <= contrast.high + TINY for contrast, effect in pairs)


def proven_levels(contrasts: Sequence[Contrast]) -> int:
    return sum(contrast.p <= LEVEL for contrast in contrasts)


def contradictions(contrasts: Sequence[Contrast]) -> int:
    """Return the number of levels whose p-value is at most 5 % while the limits cover 0, or the other way round."""
    count = 0
    for contrast in contrasts:
        if contrast.p <= LEVEL:
            count += contrast.low <= 0 <= contrast.high
        else:
            count += contrast.low > TINY or contrast.high < -TINY
    return count


# -- sequences ---------------------------------------------------------------------------------------------------------


def simulate_sequences(design: Sequences, rng: np.random.Generator, rounds: int) -> Row:
    """Return how often a family has any wrong mark, and any recommendation."""
    breaks = design.truth > design.margin + 1e-12
    orders = [np.flatnonzero(design.policy == policy).tolist() for policy in range(design.policies)]
    marks = []
    for _ in range(rounds):
        differences = design.draw(rng)
        kept, broken = marks_of_grid(differences, design, orders)
        marks.append(judged(kept, broken, breaks))
    return {"possible": not all(breaks[order[0]] for order in orders), **shares_of(marks)}


def marks_of_grid(differences: Floats, design: Sequences, orders: Sequence[Sequence[int]]) -> tuple[Flags, Flags]:
    """Return the settings that are marked kept, and those that are marked broken."""
    found = losses(differences, design.strata, design.margin, orders)
    kept = np.array([loss is not None and loss.is_kept for loss in found])
    broken = np.array([loss is not None and loss.is_broken for loss in found])
    return kept, broken


def shares_of(marks: Sequence[tuple[bool, bool, bool]]) -> Row:
    """Return the shares of rounds with each of the marks that `judged` returns."""
    names = ("kept_but_breaks", "broken_but_keeps", "recommended")
    return dict(zip(names, np.mean(marks, 0).tolist(), strict=True))


def judged(kept: Flags, broken: Flags, breaks: Flags) -> tuple[bool, bool, bool]:
    """Return whether any setting that breaks the margin is marked kept, any that keeps it broken, and any kept."""
    return bool((kept & breaks).any()), bool((broken & ~breaks).any()), bool(kept.any())


# -- depths, prices ----------------------------------------------------------------------------------------------------


def simulate_depths(design: Depths, rng: np.random.Generator, rounds: int) -> Row:
    fits = []
    for _ in range(rounds):
        grades, depth = design.draw(rng)
        samples = (~np.isnan(grades)).sum(1)
        fits.append(fit_decay(depth, np.nansum(grades, 1), samples.astype(float)))
    return {
        "coverage": share([fit.low <= design.truth <= fit.high for fit in fits]),
        "without_end": share([fit.low == 0 or fit.high == np.inf for fit in fits]),
    }


def simulate_prices(design: Prices, rng: np.random.Generator, rounds: int) -> Row:
    """Return the coverage of the intervals that are given; where there are too few right answers, nothing is said."""
    holds = []
    for _ in range(rounds):
        drawn = design.draw(rng)
        parts = [drawn[:, problems] for problems in problems_by_benchmark(design.strata)]
        shares = share_ratio([right for _, right, _, _ in parts], [right for _, _, _, right in parts])
        if shares is None:
            continue
        ratio = cost_ratio([(cost, base_cost) for cost, _, base_cost, _ in parts], shares)
        if ratio.low > 0 and ratio.high < np.inf:
            holds.append(ratio.low <= design.truth <= ratio.high)
    return {
        "coverage": share(holds) if holds else None,
        "too_few_to_say": 1 - len(holds) / rounds,
        "nothing_false_said": 1 - holds.count(False) / rounds,
    }
