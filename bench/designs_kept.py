"""Designs that are kept back: methods are run on them once, when nothing about the methods is changed any more.

They have the interfaces of designs.py, other parameters, and structures that do not appear there (those of
design_kept_kinds.py). Never tune on them.
"""

from __future__ import annotations

from design_kept_kinds import (
    Agreeing,
    AgreeingSamples,
    AlikeOnSome,
    CreditMaps,
    CreditSequences,
    DisjointCells,
    DisjointFates,
    Field,
    LengthTrunk,
    Mirror,
    MissingSamples,
    OneCell,
    OwnFates,
    ParetoPrices,
    PartialCredit,
    ProbitDepths,
    RunToLimit,
    SamplesAgree,
    ShallowAgree,
    Staircase,
    StoppedSweep,
    UnequalSamples,
    WholeProblems,
    random_loss,
    shrink,
)
from design_kinds import Depths, Maps, Policies, Prices, Sequences, TwoSettings
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

__all__ = ["KEPT"]

STEEP = beta(0.04, 3)
BRIM = beta(0.97, 2)
VALLEY = beta(0.4, 0.4)
LADDER = two_points(0.35, 0.85, 0.15)
THREE_KINDS = beta(0.7, 1.5)
SURE = point(1.0)

UNLIKE_PAIR = (12, 60)
TINY_PAIR = (8, 8)
SIX = (10, 10, 10, 10, 10, 10)
FIVE = (30, 30, 30, 30, 198)
WIDEST = (15, 500)


def bare(problems: int, seen: int = 0, level: float = 0.05) -> Change:
    """Return a collapse of the share that `seen` collapses make hardest at this level."""
    return collapse(limit_share(problems, seen, level))


def nearly_offset(share: float, gain: float) -> Change:
    """Return a collapse of a share of problems while all others gain this share of what is left."""
    return Change(((share, 0.0, 0.0), (1 - share, 1 - gain, gain)))


TWO_SETTINGS = {
    "equal, steep, n 40, k 1": TwoSettings((40,), 1, 0.0, STEEP),
    "equal, brim, n 500, k 2": TwoSettings((500,), 2, 0.7, BRIM),
    "equal, point .03, n 30, k 5": TwoSettings((30,), 5, 0.9, point(0.03)),
    "equal, point .99, n 150, k 1": TwoSettings((150,), 1, 0.0, point(0.99)),
    "equal, valley, n 10, k 4": TwoSettings((10,), 4, 0.7, VALLEY),
    "equal, opposite numbers, n 30, k 1": TwoSettings((30,), 1, -0.9, VALLEY),
    "equal, opposite numbers, easy 8 + 8": TwoSettings(TINY_PAIR, 4, -1.0, point(0.9)),
    "equal, samples agree, n 30, k 16": AgreeingSamples((30,), 16, 0.7, VALLEY),
    "equal, samples agree, n 100, k 64": AgreeingSamples((100,), 64, 0.0, point(0.05), agreement=0.3),
    "equal, unequal samples, n 40": UnequalSamples((40,), 8, 0.7, STEEP),
    "equal, alike on nine in ten, n 60": AlikeOnSome((60,), 5, 0.9, VALLEY),
    "equal, alike on nearly all, n 240": AlikeOnSome((240,), 16, 0.98, point(0.5)),
    "equal, credit, n 15": PartialCredit((15,), 1, 0.0, THREE_KINDS),
    "unseen, n 20": TwoSettings((20,), 16, 1.0, SURE, bare(20)),
    "unseen, n 150": TwoSettings((150,), 3, 0.9, SURE, bare(150)),
    "unseen at 2.5 %, n 40": TwoSettings((40,), 5, 0.9, SURE, bare(40, 0, 0.025)),
    "unseen at 2.5 %, n 500": TwoSettings((500,), 1, 0.7, SURE, bare(500, 0, 0.025)),
    "two seen, n 80": TwoSettings((80,), 8, 1.0, SURE, bare(80, 2)),
    "one seen at 2.5 %, n 30": TwoSettings((30,), 32, 1.0, SURE, bare(30, 1, 0.025)),
    "six seen, n 300": TwoSettings((300,), 5, 0.9, SURE, bare(300, 6)),
    "unseen, others gain for certain, n 60": PartialCredit(
        (60,), 1, 1.0, point(0.9), nearly_offset(limit_share(60), 1.0), credit=1.0
    ),
    "one seen, others gain for certain, n 40": PartialCredit(
        (40,), 1, 1.0, point(0.7), nearly_offset(limit_share(40, 1), 0.2), credit=1.0
    ),
    "unseen, others gain at k 64, n 100": TwoSettings((100,), 64, 0.9, point(0.95), nearly_offset(0.0298, 0.5)),
    "2 % collapse, ladder, n 80": TwoSettings((80,), 5, 0.7, LADDER, collapse(0.055)),
    "4 % collapse, samples agree, n 60": AgreeingSamples((60,), 5, 0.9, THREE_KINDS, collapse(0.04)),
    "4 % collapse, alike on most, n 40": AlikeOnSome((40,), 4, 0.9, BRIM, collapse(0.04)),
    "few lose nearly all, n 60": TwoSettings((60,), 16, 0.9, SURE, random_loss(0.04)),
    "few lose nearly all, n 240": TwoSettings((240,), 5, 0.9, BRIM, random_loss(0.02, 0.02)),
    "losses of all sizes, n 120": TwoSettings((120,), 64, 0.9, SURE, random_loss(0.05, 0.2)),
    "few lose, credit, n 99": PartialCredit((99,), 2, 0.9, SURE, random_loss(0.03, 0.03)),
    "shrink, valley, n 30": TwoSettings((30,), 16, 0.7, VALLEY, shrink(0.6, VALLEY.mean)),
    "shrink, steep, n 60": TwoSettings((60,), 8, 0.7, STEEP, shrink(0.3, STEEP.mean)),
    "offset by gains, .95, n 40": TwoSettings((40,), 32, 0.9, point(0.95), collapse_and_gain(0.02, 0.95)),
    "offset by gains, .7, n 100": TwoSettings((100,), 8, 0.7, point(0.7), collapse_and_gain(0.04, 0.7)),
    "rescue of 2, n 80": TwoSettings((80,), 5, 0.9, point(0.0), exchange(0.0, limit_share(80, 1))),
    "5 lost, 2 gained, n 150": TwoSettings((150,), 3, 1.0, two_points(0.7, 1.0, 0.0), exchange(0.05, 0.02)),
    "unseen in 12 of 12 + 60": TwoSettings(UNLIKE_PAIR, 5, 0.9, SURE, (bare(12), SAME)),
    "unseen in 12, loss in 60": TwoSettings(UNLIKE_PAIR, 5, 0.9, SURE, (bare(12), Change(((0.1, 0.75, 0.0),)))),
    "unseen in 15 of 15 + 500": TwoSettings(WIDEST, 2, 0.9, SURE, (bare(15), SAME)),
    "unseen in six of 10": TwoSettings(SIX, 4, 1.0, SURE, bare(60)),
    "one seen in 8 + 8": TwoSettings(TINY_PAIR, 5, 1.0, SURE, bare(16, 1)),
    "unseen in four of 30, not in 198": TwoSettings(FIVE, 4, 0.9, SURE, (*[bare(120)] * 4, SAME)),
    "offset between 15 and 500": TwoSettings(WIDEST, 8, 0.7, point(0.5), (collapse(0.2), nearly_offset(0.0, 0.2))),
}

LAST_ROWS = Groups(ROWS, (0.5, 0.5), (1.0, 0.3))

MAPS = {
    "independent, .05, 3 x 3, n 25": Maps((3, 3), (25,), 1, point(0.05)),
    "independent, brim, n 40, k 2": Maps((5, 4), (40,), 2, BRIM),
    "independent, .99, n 600": Maps((4, 5), (600,), 1, point(0.99)),
    "alike .5, steep, n 80": Maps((2, 10), (80,), 1, STEEP, Copies(0.5)),
    "alike .9, valley, n 20, k 16": Maps((1, 5), (20,), 16, VALLEY, Copies(0.9)),
    "alike, n 200, k 2, 12 + 60": Maps((4, 5), UNLIKE_PAIR, 2, (STEEP, BRIM), Copies(0.7)),
    "same columns, .94, n 40": Maps((5, 4), (40,), 1, point(0.94), Copies(0.0, 0.0, 1.0)),
    "same columns, few uncertain, n 200": Maps((3, 6), (200,), 1, two_points(0.03, 0.5, 0.0), Copies(0.0, 0.0, 1.0)),
    "same columns, six of 10": Maps((4, 5), SIX, 1, point(0.9), Copies(0.0, 0.0, 1.0)),
    "nearly same rows, ladder": Maps((5, 2), (50,), 2, LADDER, Copies(0.05, 0.9)),
    "agreeing samples, alike, n 30, k 16": Maps((4, 5), (30,), 16, VALLEY, Agreeing(Copies(0.7))),
    "agreeing samples, same columns, .95": Maps((4, 5), (60,), 4, point(0.95), Agreeing(Copies(0.0, 0.0, 1.0), 1.0)),
    "credit, alike, n 20, k 1": CreditMaps((3, 3), (20,), 1, point(0.05), Copies(0.7)),
    "staircase, alike, n 60": Staircase((4, 5), (60,), 1, point(0.9), Copies(0.7)),
    "staircase, same columns, steep": Staircase((4, 5), (100,), 1, STEEP, Copies(0.0, 0.0, 1.0)),
    "length trunk, .5, n 40, k 1": Maps((4, 5), (40,), 1, point(0.5), LengthTrunk()),
    "length trunk, .94, n 60, k 1": Maps((4, 5), (60,), 1, point(0.94), LengthTrunk()),
    "length trunk, branches, .97, n 100": Maps((4, 5), (100,), 1, point(0.97), LengthTrunk(0.5, 0.9)),
    "length trunk, steep, n 30, k 4": Maps((5, 4), (30,), 4, STEEP, LengthTrunk(1.0, 0.5)),
    "length trunk, valley, n 300, k 2": Maps((2, 10), (300,), 2, VALLEY, LengthTrunk()),
    "length trunk, 12 + 60": Maps((4, 5), UNLIKE_PAIR, 1, (point(0.1), point(0.95)), LengthTrunk()),
    "length trunk, 15 + 500": Maps((4, 5), WIDEST, 1, (point(0.9), BRIM), LengthTrunk()),
    "length trunk, agreeing, n 40, k 8": Maps((4, 5), (40,), 8, point(0.9), Agreeing(LengthTrunk())),
    "field, .95, n 50": Maps((4, 5), (50,), 1, point(0.95), Field()),
    "field, far, .04, 10 levels": Maps((1, 10), (60,), 1, point(0.04), Field(10.0)),
    "field, valley, five benchmarks": Maps((4, 5), FIVE, 2, VALLEY, Field(5.0)),
    "mirror, .9, n 40": Maps((4, 5), (40,), 1, point(0.9), Mirror()),
    "mirror, .5, 10 levels, n 20": Maps((1, 10), (20,), 1, point(0.5), Mirror(1.0)),
    "one cell unlike, .9, n 30, k 4": Maps((4, 5), (30,), 4, point(0.9), OneCell()),
    "one cell unlike, .05, n 100, k 8": Maps((2, 5), (100,), 8, point(0.05), OneCell(9)),
    "one cell unlike, 12 + 60": Maps((3, 3), UNLIKE_PAIR, 2, point(0.8), OneCell(4)),
    "trunk, .9, n 20": Maps((5, 4), (20,), 1, point(0.9), Trunk(0.8)),
    "trunk, brim, n 80, k 2": Maps((3, 6), (80,), 2, BRIM, Trunk()),
    "one level unlike, .03, 2 x 10": Maps((2, 10), (80,), 1, point(0.03), Groups(COLUMNS, (0.9, 0.1), (1.0, 1.0))),
    "rows in halves, ladder": Maps((4, 5), (40,), 2, LADDER, LAST_ROWS),
    "noisier level, .95, n 25, k 8": Maps((4, 5), (25,), 8, point(0.95), Noisy(COLUMNS, 2, 0.9, True)),
    "noisier level, 8 + 8": Maps((4, 5), TINY_PAIR, 4, VALLEY, Noisy(COLUMNS, 4, 0.5, True)),
    "chain .95, .9, n 40": Maps((2, 10), (40,), 1, point(0.9), Chain(COLUMNS, 0.95)),
    "column loses 10, length trunk": Maps((4, 5), (60,), 2, point(0.6), LengthTrunk(), (((None, 0), loss(0.1, 0.6)),)),
    "column loses 6, field, n 200": Maps((4, 5), (200,), 2, VALLEY, Field(), (((None, 2), loss(0.06, 0.4)),)),
    "few of a row lose nearly all": Maps((4, 5), (80,), 4, BRIM, Copies(0.9), (((0, None), random_loss(0.1, 0.1)),)),
    "one cell loses all, n 40": Maps((3, 3), (40,), 2, point(0.8), Copies(0.9), (((2, 2), collapse(1.0)),)),
    "both axes and a cell": Maps(
        (4, 5),
        (80,),
        2,
        VALLEY,
        LengthTrunk(),
        (((0, None), loss(0.08, 0.4)), ((None, 4), loss(0.05, 0.4)), ((3, 0), collapse(0.2))),
    ),
    "rows matter, columns a field": Maps((4, 5), (60,), 1, point(0.7), Field(), (((0, None), loss(0.4, 0.7)),)),
    "rows collapse, columns same": Maps(
        (4, 5), (40,), 1, point(0.95), Copies(0.0, 0.0, 1.0), (((3, None), collapse(0.3)),)
    ),
    "column shrinks, n 30, k 16": Maps(
        (4, 5), (30,), 16, VALLEY, Copies(0.7), (((None, 0), shrink(0.3, VALLEY.mean)),)
    ),
    "column collapses and gains, n 80, k 8": Maps(
        (2, 5), (80,), 8, point(0.8), Copies(0.9), (((None, 4), collapse_and_gain(0.05, 0.8)),)
    ),
    "staircase, a row loses": Staircase((4, 5), (60,), 2, point(0.7), Copies(0.7), (((0, None), loss(0.3, 0.7)),)),
}

BEYOND_2 = collapse(0.0201)
BEYOND_4 = collapse(0.0401)
BEYOND_6 = collapse(0.0601)
BEYOND_10 = collapse(0.1001)
UNORDERED = (BEYOND_4, SAME, collapse(0.2), SAME, SAME, BEYOND_6, shrink(0.5, 0.7), BEYOND_4, SAME)

SEQUENCES = {
    "all harmless, 3, n 150": Sequences((150,), 2, 0.02, BRIM, (SAME,) * 3, Copies(0.9)),
    "all harmless, 30, length trunk": Sequences((80,), 4, 0.05, VALLEY, (SAME,) * 30, LengthTrunk()),
    "all shrink, two policies": Sequences((100,), 4, 0.05, THREE_KINDS, (shrink(0.5, 0.7),) * 12, Copies(0.8), 2),
    "a third harmless, n 75": Sequences((75,), 8, 0.04, SURE, (SAME,) * 3 + (BEYOND_4,) * 6, Copies(1.0)),
    "all beyond, 40, n 149": Sequences((149,), 2, 0.02, SURE, (BEYOND_2,) * 40, Copies(1.0)),
    "all beyond, 10, n 29": Sequences((29,), 32, 0.1, SURE, (BEYOND_10,) * 10, Copies(1.0)),
    "all beyond, two policies, n 91": Sequences((91,), 5, 0.04, SURE, (BEYOND_4,) * 30, Copies(1.0), 2),
    "two seen, n 103": Sequences((103,), 4, 0.06, SURE, (BEYOND_6,) * 6, Copies(1.0)),
    "disjoint collapses, n 49": DisjointFates((49,), 5, 0.06, SURE, (BEYOND_6,) * 16, Copies(1.0)),
    "disjoint collapses, two policies, n 92": DisjointFates((92,), 5, 0.04, SURE, (BEYOND_4,) * 24, Copies(1.0), 2),
    "disjoint, credit, n 60": CreditSequences((60,), 3, 0.05, SURE, (collapse(0.0502),) * 12, Copies(1.0)),
    "few lose nearly all, n 60": Sequences((60,), 16, 0.05, SURE, (random_loss(0.0501, 0.02),) * 10, Copies(1.0)),
    "few lose together, n 240": Sequences(
        (240,), 4, 0.02, SURE, (random_loss(0.0201),) * 20, Copies(1.0), shared_fate=True
    ),
    "unordered, n 80": Sequences((80,), 4, 0.04, THREE_KINDS, UNORDERED, LengthTrunk()),
    "unordered, five benchmarks": Sequences(FIVE, 2, 0.03, THREE_KINDS, UNORDERED * 2, Copies(0.9), 2),
    "beyond in 12 of 12 + 60": Sequences(
        UNLIKE_PAIR, 5, limit_share(12) / 2.01, SURE, (bare(12),) * 10, Copies(1.0), only=0
    ),
    "stopped, beyond, n 120": StoppedSweep((120,), 5, 0.05, SURE, (BEYOND_6,) * 8, Copies(1.0)),
    "stopped, unordered, 15 + 500": StoppedSweep(WIDEST, 4, 0.1, THREE_KINDS, UNORDERED, Copies(0.9), last=0.3),
    "missing half, n 118": Sequences((118,), 4, 0.05, SURE, (collapse(0.0501),) * 9, Copies(1.0), missing=0.5),
}

NEAR = (3, 4, 5, 6, 8)
FAR = tuple(range(5, 101, 5))
UNEVEN = (1, 2, 30, 60, 90)

DEPTHS = {
    "probit .9, n 15, k 8": ProbitDepths(15, 8, 10, FAR, 0.9),
    "probit .5, n 50, k 16": ProbitDepths(50, 16, 25, FAR, 0.5),
    "probit .7, L0 2, n 40": ProbitDepths(40, 4, 2, NEAR, 0.7),
    "whole problems .5, n 12, k 4": WholeProblems(12, 4, 5, NEAR, 0.5),
    "whole problems .8, n 30, k 16": WholeProblems(30, 16, 12, FAR, 0.8),
    "whole problems .3, n 80, k 5": WholeProblems(80, 5, 4, FAR, 0.3),
    "shallow agree, n 24, k 8": ShallowAgree(24, 8, 6, NEAR),
    "shallow agree, n 60, k 16": ShallowAgree(60, 16, 10, FAR),
    "shallow agree, uneven, n 50": ShallowAgree(50, 5, 4, UNEVEN, cycle=True),
    "missing samples, n 40": MissingSamples(40, 8, 15, FAR, 0.6),
    "missing samples, beta, n 100": MissingSamples(100, 4, 5, NEAR, 0.4, "beta"),
    "copies, n 14, k 2": Depths(14, 2, 4, NEAR, 0.9),
    "beta .9, n 25, k 4": Depths(25, 4, 150, FAR, 0.9, "beta"),
    "independent, uneven, n 35, k 1": Depths(35, 1, 3, UNEVEN),
    "independent, n 90, k 2, L0 100": Depths(90, 2, 100, FAR),
    "one depth, n 20, k 5": Depths(20, 5, 7, (10,), 0.8),
}

PRICES = {
    "Pareto, hard, n 40": ParetoPrices((40,), 1, beta(0.1, 1)),
    "Pareto 2.1, half, n 100, k 3": ParetoPrices((100,), 3, VALLEY, loss(0.03, 0.4), exponent=2.1),
    "Pareto 2.1, not paired, n 24": ParetoPrices((24,), 2, beta(0.3, 1), paired=False, exponent=2.1),
    "Pareto, 12 + 60": ParetoPrices(UNLIKE_PAIR, 2, (beta(0.3, 1), beta(0.7, 2)), exponent=3.0),
    "limit, hard, n 30": RunToLimit((30,), 1, beta(0.08, 1), wrong=3.0),
    "limit, easy, n 50": RunToLimit((50,), 1, BRIM, collapse(0.05), wrong=6.0),
    "limit 30 times, n 80, k 4": RunToLimit((80,), 4, beta(0.6, 1), loss(0.05, 0.6), wrong=2.0, limit=30.0),
    "limit, five benchmarks": RunToLimit(FIVE, 1, beta(0.3, 1), wrong=3.0, scales=(1.0, 5.0)),
    "samples agree, hard, n 40, k 5": SamplesAgree((40,), 5, beta(0.12, 3)),
    "samples agree, n 200, k 4": SamplesAgree((200,), 4, beta(0.03, 5), loss(0.003, 0.03)),
    "few lose, n 60": Prices((60,), 3, beta(0.8, 2), random_loss(0.05), hard=2.0),
    "3 % right, n 100": Prices((100,), 1, beta(0.03, 1.5), wrong=1.5, hard=1.0),
    "3 % right, n 400, k 2": Prices((400,), 2, point(0.03), problem_noise=1.4),
    "25 % right, n 24, k 2": Prices((24,), 2, beta(0.25, 0.6), loss(0.04, 0.25), likeness=0.0),
    "85 % right, n 500": Prices((500,), 1, beta(0.85, 2), loss(0.02, 0.85), problem_noise=1.3),
    "dear and hard 15 + cheap 500": Prices(WIDEST, 2, (beta(0.15, 1), beta(0.85, 2)), scales=(50.0, 1.0)),
    "cheap and hard 12 + dear 60": Prices(UNLIKE_PAIR, 1, (beta(0.2, 1), beta(0.8, 2)), scales=(1.0, 20.0)),
    "collapse and gain, n 40, k 5": Prices((40,), 5, point(0.3), collapse_and_gain(0.2, 0.3), ratio=0.9),
}

POLICIES = {
    "equal, length trunk, n 40": Policies((40,), 12, 2, VALLEY, structure=LengthTrunk()),
    "equal, length trunk, .95, n 80": Policies((80,), 30, 1, point(0.95), structure=LengthTrunk(1.0, 0.8)),
    "equal, agreeing, n 30": Policies((30,), 8, 8, STEEP, structure=Agreeing(Copies(0.8), 1.0)),
    "equal, 15 + 500": Policies(WIDEST, 16, 1, (STEEP, BRIM), last_cell=0.3),
    "equal, five benchmarks": Policies(FIVE, 9, 2, LADDER),
    "shrink, n 30": Policies((30,), 25, 2, VALLEY, shrink(0.5, VALLEY.mean)),
    "shrink, 12 + 60": Policies(UNLIKE_PAIR, 16, 2, VALLEY, shrink(0.4, VALLEY.mean)),
    "own collapses, n 40": OwnFates((40,), 16, 1, BRIM, collapse(0.05)),
    "own collapses, some cells, n 100": OwnFates((100,), 36, 1, SURE, bare(100, 1), Copies(1.0), cells_changed=6),
    "disjoint collapses, n 30": DisjointCells((30,), 10, 1, SURE, collapse(0.02), Copies(1.0)),
    "disjoint, six of 10": DisjointCells(SIX, 5, 4, THREE_KINDS, collapse(0.06)),
    "few lose nearly all, n 80": Policies((80,), 18, 1, SURE, random_loss(0.04, 0.02), Copies(1.0)),
    "one seen, n 50": Policies((50,), 15, 1, SURE, bare(50, 1, 0.025), Copies(1.0)),
    "unseen in 12, n 12 + 60": Policies(UNLIKE_PAIR, 30, 1, SURE, (bare(12, 0, 0.025), SAME), Copies(1.0)),
    "collapse and gain .95, n 100": Policies((100,), 24, 2, point(0.95), collapse_and_gain(0.02, 0.95)),
    "3 points lost, field, n 200": Policies((200,), 12, 2, VALLEY, loss(0.03, 0.4), Field(6.0)),
    "exchanged, 8 + 8": Policies(TINY_PAIR, 10, 2, LADDER, exchange(0.15, 0.15)),
}

KEPT = {
    "two settings": TWO_SETTINGS,
    "maps": MAPS,
    "sequences": SEQUENCES,
    "depths": DEPTHS,
    "prices": PRICES,
    "policies": POLICIES,
}
