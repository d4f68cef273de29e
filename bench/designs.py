"""Designs with known truth on which the statistics of maps are judged.

A design says how a run could look: how difficult the problems are, what a setting changes, how alike settings are, how
many problems and samples there are. Problems are independent, grades lie in [0, 1], and benchmarks weigh equally
whatever their sizes. `TUNING` holds designs that methods may be tuned on, by kind; designs_kept.py holds others with
the same interfaces. The kinds are in design_kinds.py, their parts in design_parts.py.
"""

from __future__ import annotations

from design_kinds import ALL_ALIKE, Depths, Maps, Policies, Prices, Sequences, TwoSettings
from design_parts import (
    COLUMNS,
    ROWS,
    SAME,
    Chain,
    Change,
    Copies,
    Groups,
    Noisy,
    Trunk,
    beta,
    collapse,
    collapse_and_gain,
    exchange,
    limit_share,
    loss,
    point,
    two_points,
)

__all__ = ["TUNING", "Depths", "Maps", "Policies", "Prices", "Sequences", "TwoSettings"]

# Difficulties, by the share of right answers.
HARDEST = beta(0.03, 10)
HARD = beta(0.05, 6)
AIME = beta(0.1, 1)
U_SHAPED = beta(0.5, 0.6)
EASY = beta(0.95, 4)
SATURATED = beta(0.98, 10)
TWO_KINDS = two_points(0.6, 0.95, 0.05)
CERTAIN = two_points(0.6, 1.0, 0.0)
SOLVED = point(1.0)
HALF = point(0.5)

# Sizes of benchmarks.
PAIR = (30, 30)
SMALL_AND_LARGE = (8, 198)
THREE = (8, 30, 198)
FOUR = (30, 30, 40, 198)
ALIKE = (60, 60, 60, 60)

SAME_COLUMNS = Copies(0.0, 0.0, 1.0)
SAME_ROWS = Copies(0.0, 1.0)
ONE_UNLIKE = Groups(COLUMNS, (0.8, 0.2), (1.0, 0.0))
ONE_ROW_UNLIKE = Groups(ROWS, (0.75, 0.25), (1.0, 0.0))


def unseen(problems: int) -> Change:
    """Return a collapse that leaves no trace in just under 5 % of runs."""
    return collapse(limit_share(problems))


def only_first(change: Change, benchmarks: int) -> tuple[Change, ...]:
    return (change, *[SAME] * (benchmarks - 1))


def only_last(change: Change, benchmarks: int) -> tuple[Change, ...]:
    return (*[SAME] * (benchmarks - 1), change)


TWO_SETTINGS = {
    # Nothing differs.
    "equal, hardest, n 30, k 1": TwoSettings((30,), 1, 0.0, HARDEST),
    "equal, hard, n 60, k 1, alike": TwoSettings((60,), 1, 0.7, HARD),
    "equal, AIME, n 30, k 16": TwoSettings((30,), 16, 0.7, AIME),
    "equal, saturated, n 240, k 1": TwoSettings((240,), 1, 0.9, SATURATED),
    "equal, homogeneous .5, n 8, k 1": TwoSettings((8,), 1, 0.0, HALF),
    "equal, homogeneous .97, n 60, k 5": TwoSettings((60,), 5, 0.7, point(0.97)),
    "equal, same random numbers": TwoSettings((30,), 5, 1.0, U_SHAPED),
    "equal, few uncertain problems, k 64": TwoSettings((60,), 64, 0.0, two_points(0.05, 0.5, 1.0)),
    "equal, 8 + 198": TwoSettings(SMALL_AND_LARGE, 5, 0.7, U_SHAPED),
    "equal, hard 8 + easy 198": TwoSettings(SMALL_AND_LARGE, 1, 0.0, (HARD, EASY)),
    "equal, five of 12": TwoSettings((12, 12, 12, 12, 12), 4, 0.7, AIME),
    # Whole problems collapse.
    "unseen collapse, n 30": TwoSettings((30,), 5, 0.9, SOLVED, unseen(30)),
    "unseen collapse, n 60": TwoSettings((60,), 16, 0.9, SOLVED, unseen(60)),
    "unseen collapse, n 240": TwoSettings((240,), 5, 0.9, SOLVED, unseen(240)),
    "unseen collapse at 2.5 %, n 120": TwoSettings((120,), 4, 1.0, SOLVED, collapse(limit_share(120, 0, 0.025))),
    "one collapse seen, n 60": TwoSettings((60,), 5, 1.0, SOLVED, collapse(limit_share(60, 1))),
    "three collapses seen, n 600": TwoSettings((600,), 2, 1.0, SOLVED, collapse(limit_share(600, 3))),
    "1 % collapses, n 240": TwoSettings((240,), 5, 0.7, TWO_KINDS, collapse(0.01)),
    "3 % collapses, n 30, k 64": TwoSettings((30,), 64, 0.9, CERTAIN, collapse(0.05)),
    "3 % collapses, n 60, independent": TwoSettings((60,), 5, 0.0, CERTAIN, collapse(0.05)),
    "5 % collapses, n 120, U": TwoSettings((120,), 4, 0.7, U_SHAPED, collapse(0.05)),
    "soft collapse, n 30": TwoSettings((30,), 5, 0.9, two_points(0.6, 0.95, 0.05), collapse(0.06, 0.02)),
    "soft collapse to half, n 60, k 2": TwoSettings((60,), 2, 0.9, SOLVED, Change(((0.08, 0.5, 0.0),))),
    "collapse and soft collapse, n 60": TwoSettings(
        (60,), 4, 1.0, SOLVED, Change(((0.03, 0.0, 0.0), (0.1, 0.75, 0.0)))
    ),
    "12 % collapses, n 12": TwoSettings((12,), 5, 0.9, EASY, collapse(0.12)),
    "30 % collapses, n 8": TwoSettings((8,), 16, 0.9, SOLVED, unseen(8)),
    # Gains, alone or against collapse.
    "unseen rescue, n 60": TwoSettings((60,), 5, 0.9, point(0.0), Change(((limit_share(60), 0.0, 1.0),))),
    "collapse offset by gains .9, n 30": TwoSettings((30,), 4, 0.7, point(0.9), collapse_and_gain(0.03, 0.9)),
    "collapse offset by gains .9, n 60": TwoSettings((60,), 16, 0.9, point(0.9), collapse_and_gain(0.05, 0.9)),
    "collapse offset by gains .5, n 240": TwoSettings((240,), 16, 0.7, HALF, collapse_and_gain(0.02, 0.5)),
    "3 % lost and 3 % gained, n 60": TwoSettings((60,), 5, 1.0, TWO_KINDS, exchange(0.03, 0.03)),
    "3 % lost and 1 % gained, n 120": TwoSettings((120,), 1, 0.9, CERTAIN, exchange(0.03, 0.01)),
    # Losses that all problems share.
    "3 points lost, n 60": TwoSettings((60,), 5, 0.7, TWO_KINDS, loss(0.03, TWO_KINDS.mean)),
    "2 points lost, n 600, k 1": TwoSettings((600,), 1, 0.0, U_SHAPED, loss(0.02, U_SHAPED.mean)),
    "all problems lose a hair, n 60, k 64": TwoSettings((60,), 64, 0.9, EASY, loss(0.01, EASY.mean)),
    # Benchmarks of unlike sizes.
    "unseen collapse in 8 of 8 + 198": TwoSettings(SMALL_AND_LARGE, 5, 0.9, SOLVED, only_first(unseen(8), 2)),
    "unseen collapse in 198 of 8 + 198": TwoSettings(SMALL_AND_LARGE, 5, 0.9, SOLVED, only_last(unseen(198), 2)),
    "unseen collapse in 8 + 30 of 8 + 30 + 198": TwoSettings(
        THREE, 4, 1.0, SOLVED, (collapse(0.25), collapse(0.021), SAME)
    ),
    "unseen collapse in 30 + 30": TwoSettings(PAIR, 5, 0.9, SOLVED, unseen(60)),
    "unseen collapse in 30 + 30 of 30 + 30 + 40 + 198": TwoSettings(
        FOUR, 5, 1.0, SOLVED, (unseen(60), unseen(60), SAME, SAME)
    ),
    "3 % collapses, 30 + 30 + 40 + 198": TwoSettings(FOUR, 5, 0.9, CERTAIN, collapse(0.05)),
    "collapse in 12, gain in 60": TwoSettings((12, 60), 4, 0.7, HALF, (collapse(0.1), Change(((1.0, 0.9, 0.1),)))),
    "four of 60, 1 % collapses": TwoSettings(ALIKE, 2, 0.9, EASY, collapse(0.01)),
}

MAPS = {
    # All settings equal, levels exchangeable.
    "independent, .03, n 20, k 1": Maps((4, 5), (20,), 1, point(0.03)),
    "independent, .5, n 20, k 4": Maps((3, 3), (20,), 4, HALF),
    "independent, .99, n 240, k 1": Maps((2, 10), (240,), 1, point(0.99)),
    "independent, U, n 60, k 4": Maps((4, 5), (60,), 4, U_SHAPED),
    "independent, saturated, n 600, k 1": Maps((5, 2), (600,), 1, SATURATED),
    "alike, AIME, n 30, k 16": Maps((4, 5), (30,), 16, AIME, ALL_ALIKE),
    "alike, hardest, 10 levels, n 60, k 1": Maps((1, 10), (60,), 1, HARDEST, ALL_ALIKE),
    "alike .95, easy, n 100, k 5": Maps((4, 5), (100,), 5, EASY, Copies(0.95)),
    "same columns, .97, n 60, k 1": Maps((4, 5), (60,), 1, point(0.97), SAME_COLUMNS),
    "same columns, .05, 2 x 10, n 30, k 1": Maps((2, 10), (30,), 1, point(0.05), SAME_COLUMNS),
    "same columns, few uncertain, n 60": Maps((4, 5), (60,), 1, two_points(0.1, 0.8, 1.0), SAME_COLUMNS),
    "same rows, U, n 20, k 1": Maps((3, 3), (20,), 1, U_SHAPED, SAME_ROWS),
    "rows alike, columns more alike": Maps((4, 5), (60,), 4, U_SHAPED, Copies(0.0, 0.3, 0.6)),
    "rows more alike, .95, k 1": Maps((5, 2), (60,), 1, point(0.95), Copies(0.0, 0.85, 0.1)),
    "8 + 198 independent, hard and easy": Maps((4, 5), SMALL_AND_LARGE, 1, (HARD, EASY)),
    "8 + 198 same columns, .9": Maps((4, 5), SMALL_AND_LARGE, 1, point(0.9), SAME_COLUMNS),
    "30 + 30 + 40 + 198 same columns, .97": Maps((4, 5), FOUR, 1, point(0.97), SAME_COLUMNS),
    # All settings equal on every problem, levels unlike.
    "trunk, .5, n 60, k 1": Maps((4, 5), (60,), 1, HALF, Trunk()),
    "trunk, .95, n 60, k 1": Maps((4, 5), (60,), 1, point(0.95), Trunk()),
    "trunk, saturated, n 30, k 1": Maps((4, 5), (30,), 1, SATURATED, Trunk(longer_if_hard=False)),
    "trunk, AIME, n 30, k 4": Maps((4, 5), (30,), 4, AIME, Trunk()),
    "trunk by columns alone, .97, 10 levels": Maps((1, 10), (60,), 1, point(0.97), Trunk(0.0, False)),
    "trunk, U, n 240, k 4": Maps((2, 10), (240,), 4, U_SHAPED, Trunk(0.2)),
    "trunk, 8 + 198, hard and easy": Maps((4, 5), SMALL_AND_LARGE, 1, (HARD, EASY), Trunk()),
    "trunk, 30 + 30 + 40 + 198": Maps((4, 5), FOUR, 4, (AIME, AIME, U_SHAPED, EASY), Trunk()),
    "one level unlike, .95, n 60": Maps((4, 5), (60,), 1, point(0.95), ONE_UNLIKE),
    "one level unlike, .5, 10 levels, n 30": Maps((1, 10), (30,), 1, HALF, Groups(COLUMNS, (0.9, 0.1), (1.0, 0.0))),
    "one row unlike, hard, n 60, k 4": Maps((4, 5), (60,), 4, HARD, ONE_ROW_UNLIKE),
    "one level unlike, 8 + 30 + 198": Maps((4, 5), THREE, 1, point(0.95), ONE_UNLIKE),
    "one level alone alike, .9, n 30": Maps((1, 5), (30,), 1, point(0.9), Groups(COLUMNS, (0.8, 0.2), (0.0, 1.0))),
    "two halves, .06, n 60": Maps((1, 10), (60,), 1, point(0.06), Groups(COLUMNS, (0.5, 0.5), (1.0, 1.0))),
    "noisier level, .5, n 20, k 4": Maps((4, 5), (20,), 4, HALF, Noisy(COLUMNS, 4)),
    "noisier level in all rows, .9, n 30, k 4": Maps((4, 5), (30,), 4, point(0.9), Noisy(COLUMNS, 0, 0.7, True)),
    "noisier level in all rows, .1, n 60, k 16": Maps((4, 5), (60,), 16, point(0.1), Noisy(COLUMNS, 0, 0.0, True)),
    "noisier row, U, n 240, k 4": Maps((3, 3), (240,), 4, U_SHAPED, Noisy(ROWS, 2, 0.7, True)),
    "chain, .95, n 60, k 1": Maps((4, 5), (60,), 1, point(0.95), Chain(COLUMNS, 0.9)),
    "chain of rows, U, n 30, k 4": Maps((5, 2), (30,), 4, U_SHAPED, Chain(ROWS, 0.8)),
    "chain, hardest, 10 levels, n 100": Maps((1, 10), (100,), 1, HARDEST, Chain(COLUMNS, 0.8)),
    # Power, and effects where they are not looked for.
    "column loses 12 points, n 60, k 1": Maps((4, 5), (60,), 1, point(0.7), ALL_ALIKE, (((None, 0), loss(0.12, 0.7)),)),
    "column loses 5 points, n 240, k 4": Maps((4, 5), (240,), 4, U_SHAPED, ALL_ALIKE, (((None, 0), loss(0.05, 0.5)),)),
    "column loses 8 points, trunk, n 100": Maps((4, 5), (100,), 4, HALF, Trunk(), (((None, 0), loss(0.08, 0.5)),)),
    "row loses by 10 % collapse, n 60, k 4": Maps((4, 5), (60,), 4, EASY, ALL_ALIKE, (((0, None), collapse(0.1)),)),
    "one cell loses 30 points, n 60, k 4": Maps((4, 5), (60,), 4, HALF, ALL_ALIKE, (((0, 0), loss(0.3, 0.5)),)),
    "both axes matter, n 60, k 4": Maps(
        (4, 5), (60,), 4, U_SHAPED, ALL_ALIKE, (((0, None), loss(0.1, 0.5)), ((None, 0), loss(0.1, 0.5)))
    ),
    "rows matter, columns null, n 30, k 1": Maps((4, 5), (30,), 1, HALF, SAME_COLUMNS, (((0, None), loss(0.3, 0.5)),)),
    "columns matter, rows null, trunk": Maps((4, 5), (60,), 1, point(0.95), Trunk(), (((None, 0), loss(0.3, 0.95)),)),
    "column collapses and gains, n 30, k 4": Maps(
        (4, 5), (30,), 4, point(0.9), ALL_ALIKE, (((None, 0), collapse_and_gain(0.03, 0.9)),)
    ),
    "column loses in 8 + 198": Maps((4, 5), SMALL_AND_LARGE, 4, HALF, ALL_ALIKE, (((None, 4), loss(0.1, 0.5)),)),
}

HARMLESS = SAME
BEYOND_5 = collapse(0.0501)
BEYOND_3 = collapse(0.0301)
BEYOND_IN_8 = collapse(limit_share(8))
MIXED = (HARMLESS, BEYOND_5, HARMLESS, collapse(0.1), exchange(0.02, 0.02), BEYOND_5, HARMLESS, collapse(0.3))

SEQUENCES = {
    "all harmless, 8 settings, n 60": Sequences((60,), 4, 0.05, TWO_KINDS, (HARMLESS,) * 8),
    "all harmless, 40 settings, n 240, k 1": Sequences((240,), 1, 0.03, EASY, (HARMLESS,) * 40),
    "all harmless, two policies, strata": Sequences(FOUR, 4, 0.05, U_SHAPED, (HARMLESS,) * 20, Trunk(0.0), 2),
    "all alike to the full cache, n 99": Sequences((99,), 4, 0.03, U_SHAPED, (HARMLESS,) * 6, Copies(1.0)),
    "a third harmless, n 60": Sequences((60,), 5, 0.05, SOLVED, (HARMLESS,) * 4 + (BEYOND_5,) * 8),
    "a third harmless, trunk, n 240": Sequences(
        (240,), 4, 0.03, U_SHAPED, (HARMLESS,) * 7 + (loss(0.04, 0.5),) * 7 + (loss(0.15, 0.5),) * 7, Trunk(0.0)
    ),
    "all just beyond, 2 settings, n 60": Sequences((60,), 16, 0.05, SOLVED, (BEYOND_5,) * 2, Copies(1.0)),
    "all just beyond, 20 settings, n 60": Sequences((60,), 5, 0.05, SOLVED, (BEYOND_5,) * 20, Copies(1.0)),
    "all just beyond, 40 settings, n 123, two policies": Sequences(
        (123,), 4, 0.03, SOLVED, (BEYOND_3,) * 40, Copies(1.0), 2
    ),
    "all just beyond together, n 99": Sequences((99,), 5, 0.03, SOLVED, (BEYOND_3,) * 20, Copies(1.0), 1, True),
    "one collapse seen, n 94, margin 5": Sequences((94,), 5, 0.05, SOLVED, (BEYOND_5,) * 12, Copies(1.0)),
    "just beyond in 8 of 8 + 198": Sequences(
        SMALL_AND_LARGE, 5, limit_share(8) / 2.01, SOLVED, (BEYOND_IN_8,) * 8, Copies(1.0), only=0
    ),
    "just beyond in 30 + 30": Sequences(PAIR, 5, 0.05, SOLVED, (BEYOND_5,) * 8, Copies(1.0)),
    "mixed, not in order of cost, n 60": Sequences((60,), 5, 0.05, SOLVED, MIXED, Copies(1.0)),
    "mixed, two policies, n 240": Sequences((240,), 2, 0.03, CERTAIN, MIXED * 2, Copies(0.9), 2),
    "dearest loses, all others harmless": Sequences((120,), 4, 0.05, EASY, (BEYOND_5,) + (HARMLESS,) * 9),
    "collapse against gains": Sequences((60,), 4, 0.05, HALF, (exchange(0.16, 0.05),) * 10, Copies(0.9)),
    "one trace in ten missing, n 66": Sequences((66,), 4, 0.05, SOLVED, (BEYOND_5,) * 6, Copies(1.0), missing=0.1),
    "a third missing, strata": Sequences(THREE, 4, 0.1, CERTAIN, MIXED, Copies(0.7), missing=0.33),
}

SHALLOW = tuple(range(2, 11))
WIDE = tuple(range(4, 61))
DEEP = tuple(range(10, 121, 10))
FEW_SHALLOW = (2, *[40] * 9)

DEPTHS = {
    "n 12, k 5, L0 8, copies .8": Depths(12, 5, 8, WIDE, 0.8),
    "n 12, k 1, L0 3": Depths(12, 1, 3, SHALLOW),
    "n 12, k 16, L0 30, all samples agree": Depths(12, 16, 30, WIDE, 1.0),
    "n 20, k 5, L0 8, beta .5": Depths(20, 5, 8, WIDE, 0.5, "beta"),
    "n 20, k 1, L0 2": Depths(20, 1, 2, SHALLOW, 0.0, "copy", True),
    "n 30, k 16, L0 8, beta .8": Depths(30, 16, 8, WIDE, 0.8, "beta"),
    "n 30, k 4, L0 200, nearly all solved": Depths(30, 4, 200, SHALLOW, 0.5),
    "n 40, k 5, L0 3, few shallow": Depths(40, 5, 3, WIDE, 0.5),
    "n 40, k 8, L0 4, one in ten shallow": Depths(40, 8, 4, FEW_SHALLOW, 0.9),
    "n 60, k 4, L0 20, independent": Depths(60, 4, 20, WIDE),
    "n 60, k 16, L0 20, copies .3": Depths(60, 16, 20, DEEP, 0.3, "copy", True),
    "n 60, k 8, L0 200, beta .3": Depths(60, 8, 200, DEEP, 0.3, "beta"),
    "n 100, k 5, L0 3, beta .5": Depths(100, 5, 3, WIDE, 0.5, "beta"),
    "n 100, k 1, L0 60": Depths(100, 1, 60, DEEP),
    "n 100, k 16, L0 2, copies .95": Depths(100, 16, 2, SHALLOW, 0.95),
    "n 60, k 4, two depths": Depths(60, 4, 6, (3, 12), 0.7, "copy", True),
}

PRICES = {
    "hard, n 20, k 1": Prices((20,), 1, beta(0.1, 0.8), loss(0.02, 0.1)),
    "hardest, n 30, k 1": Prices((30,), 1, beta(0.05, 0.8), loss(0.005, 0.05)),
    "2 % right, n 240, k 1": Prices((240,), 1, beta(0.02, 2)),
    "2 % right, n 600, k 5, heavy": Prices((600,), 5, beta(0.02, 1), problem_noise=1.2),
    "5 % right, n 60, wrong costs 3 times": Prices((60,), 1, beta(0.05, 2), wrong=2.0),
    "10 % right, n 60, k 5, independent": Prices((60,), 5, AIME, loss(0.03, 0.1), likeness=0.0),
    "30 % right, n 30, k 1": Prices((30,), 1, beta(0.3, 0.8), loss(0.03, 0.3)),
    "half right, n 240, k 1": Prices((240,), 1, U_SHAPED, loss(0.025, 0.5)),
    "half right, n 20, k 5, very heavy": Prices((20,), 5, U_SHAPED, problem_noise=1.5, sample_noise=0.8),
    "90 % right, n 60, k 5": Prices((60,), 5, beta(0.9, 3), collapse(0.05), hard=3.0),
    "90 % right, n 30, rare wrong costs 10 times": Prices((30,), 1, beta(0.9, 3), wrong=9.0),
    "hard problems dear, n 60, k 4": Prices((60,), 4, beta(0.3, 1), loss(0.05, 0.3), hard=4.0, wrong=1.0),
    "dearer than the baseline, n 60": Prices((60,), 2, beta(0.2, 1), ratio=1.3),
    "identical but cheaper, n 30": Prices((30,), 4, AIME, ratio=0.5, likeness=1.0, sample_noise=0.0),
    "30 + 30": Prices(PAIR, 2, (beta(0.1, 1), beta(0.8, 2)), loss(0.02, 0.1)),
    "8 + 198, hard small": Prices(SMALL_AND_LARGE, 4, (beta(0.2, 1), beta(0.8, 2)), hard=1.0, scales=(3.0, 1.0)),
    "30 + 30 + 40 + 198": Prices(FOUR, 1, beta(0.15, 1), collapse(0.05), problem_noise=1.0),
    "costs not paired, n 60": Prices((60,), 1, beta(0.1, 1), paired=False, problem_noise=1.0),
}

POLICIES = {
    "equal, 5 cells, n 30": Policies((30,), 5, 1, U_SHAPED),
    "equal, 40 cells, n 60": Policies((60,), 40, 1, AIME, last_cell=0.2),
    "equal, saturated, n 240": Policies((240,), 20, 1, SATURATED, structure=Copies(0.3, 0.6)),
    "equal, trunk, n 60": Policies((60,), 20, 4, U_SHAPED, structure=Trunk(0.0)),
    "equal, unlike strata": Policies(FOUR, 20, 1, (AIME, AIME, U_SHAPED, EASY), last_cell=0.5),
    "equal, 8 + 198, hard and easy": Policies(SMALL_AND_LARGE, 20, 1, (HARD, EASY)),
    "2 points lost, four of 60": Policies(ALIKE, 20, 4, U_SHAPED, loss(0.02, 0.5)),
    "4 points lost, 30 + 30 + 40 + 198": Policies(FOUR, 20, 4, U_SHAPED, loss(0.04, 0.5)),
    "3 % collapses, n 30": Policies((30,), 20, 1, point(0.9), collapse(0.03), Copies(0.9)),
    "unseen collapse, n 60": Policies((60,), 20, 1, SOLVED, unseen(60), Copies(1.0)),
    "unseen collapse, n 240, half the cells": Policies(
        (240,), 20, 1, SOLVED, unseen(240), Copies(1.0), cells_changed=10
    ),
    "collapse against gains, n 30": Policies((30,), 20, 1, point(0.9), collapse_and_gain(0.03, 0.9)),
    "collapse against gains, n 60, 40 cells": Policies((60,), 40, 4, HALF, collapse_and_gain(0.05, 0.5)),
    "unseen collapse in 8 of 8 + 198": Policies(SMALL_AND_LARGE, 10, 1, SOLVED, only_first(unseen(8), 2), Copies(1.0)),
    "gain in 8, loss in 198, equal": Policies(
        SMALL_AND_LARGE, 20, 1, HALF, (Change(((1.0, 0.8, 0.2),)), loss(0.1, 0.5))
    ),
    "one cell collapses, n 60": Policies((60,), 5, 4, EASY, collapse(0.5), cells_changed=1),
    "lost and gained wholly, n 120": Policies((120,), 10, 1, TWO_KINDS, exchange(0.04, 0.04), Copies(0.9)),
}

TUNING = {
    "two settings": TWO_SETTINGS,
    "maps": MAPS,
    "sequences": SEQUENCES,
    "depths": DEPTHS,
    "prices": PRICES,
    "policies": POLICIES,
}
