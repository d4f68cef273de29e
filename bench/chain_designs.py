"""Designs that judge marks, recommendations and the gate, chosen from the guides before their author read any code.

A design says how the answers of the full cache and of each setting arise, so that the truth is known. Losses are in
margins: ABOVE is just above the margin (a proof that it is kept is wrong), BELOW just below it (a proof that it is
broken is wrong).

    problems       of each benchmark; all benchmarks weigh the same
    difficulty     the chances of the full cache: "sure" 1, "half" .5, "even" Beta(1, 1), "easy" Beta(8, 1),
                   "hard" Beta(.4, 2), "two" 0 on 3 of 10 problems and 1 on the others, "weak" .04
    shape          "spread": each problem loses the same share of its chance; "collapse": whole problems are lost, by
                   chance; "part": a share of the problems loses, the others nothing; "mixed": one problem in ten is
                   gained whole, three in ten lose
    overlap        which problems collapse under several settings: "same" (nested), "apart" (never two), "own"
    common         share of traces of a setting that use the random number of the full cache's trace
    between        the other traces: "shared" by all settings, "own", or "opposite" (every second setting has 1 - u)
    fixed          the problems are the same in all rounds, their chances quantiles: the worst for these problems
    copies         share of the problems of each benchmark whose samples are one text; all of the loss lies on them
    clusters       problems that share everything
    missing        share of the pairs that is missing, lost ones first
    shapes         of single policies, where they differ
    mixed_windows  the first windows whose shape is "mixed"; the others are "spread"
    losses         of each policy: a row for each window, its settings from the largest ratio to the smallest
"""

from dataclasses import dataclass, field

ABOVE = 1 + 1e-7
BELOW = 1 - 1e-7

RATIOS = (0.7, 0.5, 0.3, 0.1)
WINDOWS = (16, 32, 64, 128)


@dataclass(frozen=True)
class MapDesign:
    """A run of a grid, and the promise that it tests."""

    name: str
    promise: str
    losses: dict[str, tuple[tuple[float, ...], ...]]
    problems: dict[str, int]
    samples: int
    margin: float
    difficulty: str = "even"
    shape: str = "spread"
    overlap: str = "own"
    part: float = 1.0
    common: float = 0.0
    between: str = "own"
    fixed: bool = False
    copies: dict[str, float] = field(default_factory=dict)
    clusters: int = 1
    missing: float = 0.0
    full_samples: int | None = None
    looks: tuple[int, ...] = ()
    extensions: tuple[int, ...] = ()
    controls: tuple[str, ...] | None = None
    models: int = 1
    served: str = ""
    tolerated: float = 0.05
    shapes: dict[str, str] = field(default_factory=dict)
    mixed_windows: int = 99


def rows(windows: int, *row: float) -> tuple[tuple[float, ...], ...]:
    """Return the same row of losses for each window."""
    return (row,) * windows


MAPS = [
    MapDesign(
        "nothing_lost",
        "no `!`, no effect, no pair where nothing differs; the power to prove",
        {"dynts": rows(2, 0, 0, 0, 0)},
        {"A": 60},
        4,
        5,
        common=0.5,
    ),
    MapDesign(
        "all_collapse_apart",
        "`**` where every setting of four chains loses other whole problems",
        {"dynts": rows(4, ABOVE, ABOVE, ABOVE)},
        {"A": 100},
        1,
        5,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
    ),
    MapDesign(
        "all_spread_fixed",
        "`*` where every trace of every setting may fail",
        {"dynts": rows(4, ABOVE, ABOVE)},
        {"A": 30},
        8,
        3,
        difficulty="sure",
        fixed=True,
    ),
    MapDesign(
        "share_handed_on",
        "one chain that is always proven hands its share on to three at the margin",
        {"dynts": ((0, 0, 0), *rows(3, ABOVE, ABOVE, ABOVE))},
        {"A": 100},
        1,
        5,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
        common=1.0,
    ),
    MapDesign(
        "shares_handed_on_to_one",
        "three chains that are always proven hand their shares on to the last, at the margin",
        {"dynts": (*rows(3, 0, 0), (ABOVE, ABOVE))},
        {"A": 90},
        1,
        5,
        difficulty="sure",
        shape="collapse",
        overlap="own",
        common=1.0,
    ),
    MapDesign(
        "last_cell_at_margin",
        "all before are always proven, the cheapest of each window loses at the margin",
        {"dynts": rows(2, 0, 0, 0, ABOVE)},
        {"A": 150},
        1,
        4,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
        common=1.0,
    ),
    MapDesign(
        "bad_first_cell",
        "losses are not monotone: the dearest of each window loses four margins, all others nothing",
        {"dynts": rows(2, 4, 0, 0, 0)},
        {"A": 80},
        4,
        5,
        common=0.5,
    ),
    MapDesign(
        "valley",
        "the middle of each window loses at the margin, the dearest and the cheapest nothing",
        {"dynts": rows(3, 0, ABOVE, 0)},
        {"A": 40},
        6,
        4,
        difficulty="easy",
        common=0.6,
        between="shared",
        fixed=True,
    ),
    MapDesign(
        "copies_10",
        "samples of one problem in ten are copies, and the loss lies on these",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 60},
        8,
        3,
        difficulty="sure",
        copies={"A": 0.1},
        fixed=True,
    ),
    MapDesign(
        "copies_48",
        "the same with copies of 48 % of the problems, just under a half",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 60},
        8,
        3,
        difficulty="sure",
        copies={"A": 0.48},
        fixed=True,
    ),
    MapDesign(
        "copies_98",
        "the same with copies of 59 of 60 problems",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 60},
        8,
        5,
        difficulty="sure",
        copies={"A": 0.98},
        fixed=True,
    ),
    MapDesign(
        "copies_of_the_small_benchmark",
        "a fifth of all problems are copies: all of the small benchmark, which weighs a half and loses",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 10, "B": 40},
        8,
        5,
        difficulty="sure",
        copies={"A": 1.0},
        fixed=True,
    ),
    MapDesign(
        "clusters",
        "`**` where problems come in 40 named clusters of three alike, and whole clusters are lost",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 120},
        1,
        8,
        difficulty="sure",
        shape="collapse",
        clusters=3,
    ),
    MapDesign(
        "unlike_benchmarks",
        "20 and 200 hard problems weigh the same; a third of them loses",
        {"dynts": rows(2, ABOVE, ABOVE, ABOVE)},
        {"A": 20, "B": 200},
        2,
        5,
        difficulty="hard",
        shape="part",
        part=1 / 3,
        common=0.4,
        between="shared",
    ),
    MapDesign(
        "unlike_benchmarks_collapse",
        "20 and 200 problems, each right with the full cache; whole problems are lost",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 20, "B": 200},
        1,
        12,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
    ),
    MapDesign(
        "gains_beside_losses",
        "a tenth of the problems is gained, three tenths lose more",
        {"dynts": rows(2, ABOVE, ABOVE, ABOVE)},
        {"A": 120},
        2,
        5,
        difficulty="even",
        shape="mixed",
    ),
    MapDesign(
        "controls_by_default",
        "`random` and `window` beside `dynts` have no share: marks of dynts at the margin, no control is recommended",
        {"dynts": rows(2, ABOVE, ABOVE), "random": rows(2, 0, 0), "window": ((0, 0), (0, 0))},
        {"A": 100},
        1,
        5,
        difficulty="sure",
        shape="collapse",
    ),
    MapDesign(
        "declared_control",
        "a declared control that loses just less than the margin must get `!` in at most 5 % together with the others",
        {"dynts": rows(2, BELOW, BELOW), "rkv": rows(2, BELOW, BELOW)},
        {"A": 40},
        6,
        5,
        difficulty="half",
        between="own",
        fixed=True,
        controls=("rkv",),
    ),
    MapDesign(
        "three_policies",
        "three policies of two windows, each setting loses other problems",
        {"dynts": rows(2, ABOVE, ABOVE), "rkv": rows(2, ABOVE, ABOVE), "h2o": rows(2, ABOVE, ABOVE)},
        {"A": 150},
        1,
        4,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
    ),
    MapDesign(
        "full_8_of_2",
        "eight samples of the full cache beside two of each setting, problems of every chance",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 40},
        2,
        6,
        difficulty="even",
        fixed=True,
        full_samples=8,
    ),
    MapDesign(
        "full_16_of_4_sure",
        "sixteen samples of a full cache that is always right beside four of each setting",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 30},
        4,
        4,
        difficulty="sure",
        fixed=True,
        full_samples=16,
    ),
    MapDesign(
        "looks",
        "read after 1, 2, 4 and 8 samples as declared: any wrong mark at any of them",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 30},
        8,
        5,
        difficulty="sure",
        fixed=True,
        looks=(1, 2, 4, 8),
    ),
    MapDesign(
        "extensions",
        "read after 2, 3 and 4 samples without a declaration: any wrong mark at any of them",
        {"dynts": rows(1, ABOVE, ABOVE)},
        {"A": 40},
        4,
        4,
        difficulty="sure",
        fixed=True,
        extensions=(2, 3, 4),
        tolerated=0.10,
    ),
    MapDesign(
        "missing_lost_pairs",
        "4 % of the pairs are missing, lost ones first",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 60},
        4,
        6,
        difficulty="sure",
        fixed=True,
        missing=0.04,
    ),
    MapDesign(
        "weak_full_cache",
        "the full cache solves 4 % and the settings nothing, at a margin of 5: nothing may be proven",
        {"dynts": rows(2, 0.8, 0.8)},
        {"A": 100},
        4,
        5,
        difficulty="weak",
        fixed=True,
    ),
    MapDesign(
        "two_models",
        "two models: any wrong mark of one of them",
        {"dynts": rows(2, ABOVE, ABOVE)},
        {"A": 90},
        1,
        5,
        difficulty="sure",
        shape="collapse",
        overlap="apart",
        models=2,
    ),
    MapDesign(
        "noisy_level",
        "all settings lose nothing in the mean, one window's answers are noisier: no effect, no `!`",
        {"dynts": rows(3, 0, 0, 0)},
        {"A": 60},
        2,
        5,
        difficulty="two",
        shape="mixed",
        common=0.9,
        between="shared",
        mixed_windows=1,
    ),
    MapDesign(
        "only_memory_matters",
        "the loss follows the tokens that stay: no window may be proven better at equal memory",
        {"dynts": ((0.2, 0.6, 1.5, 3.0), (0.15, 0.55, 1.4, 2.8), (0.1, 0.45, 1.2, 2.4), (0.0, 0.3, 0.8, 1.8))},
        {"A": 200},
        1,
        10,
        difficulty="easy",
        shape="part",
        part=0.8,
        common=0.3,
    ),
    MapDesign(
        "rare_collapse_of_one_policy",
        "two policies of equal mean, one spreads its loss, the other loses whole problems: their difference covers 0",
        {"dynts": rows(2, 0.8, 0.8), "rkv": rows(2, 0.8, 0.8)},
        {"A": 50},
        1,
        5,
        difficulty="sure",
        shape="collapse",
        overlap="same",
        shapes={"dynts": "spread"},
    ),
    MapDesign(
        "served_each",
        "Holm over four served settings, two at the margin and two that lose nothing",
        {"served": ((0, ABOVE, 0, ABOVE),)},
        {"A": 80},
        4,
        3,
        difficulty="sure",
        fixed=True,
        served="each",
    ),
    MapDesign(
        "served_in_order",
        "served settings from gentle to harsh, the first two lose nothing, the last two at the margin",
        {"served": ((0, 0, ABOVE, ABOVE),)},
        {"A": 80},
        4,
        3,
        difficulty="sure",
        common=0.5,
        fixed=True,
        served="in_order",
    ),
    MapDesign(
        "many_problems_nested",
        "500 problems, rare collapses that grow from ratio to ratio on the same problems, the boundary in each window",
        {"dynts": rows(3, 0.5, 0.8, ABOVE, 1.5)},
        {"A": 500},
        1,
        3,
        difficulty="easy",
        shape="collapse",
        overlap="same",
        common=0.7,
        between="shared",
    ),
    MapDesign(
        "few_problems",
        "20 problems, one window: at a margin of 14 points nothing lost is proven by chance",
        {"dynts": rows(1, ABOVE, ABOVE, ABOVE)},
        {"A": 20},
        1,
        14,
        difficulty="sure",
        shape="collapse",
        overlap="same",
    ),
    MapDesign(
        "opposite_settings",
        "settings that fail on opposite random numbers, skewed chances, three chains",
        {"dynts": rows(3, ABOVE, ABOVE)},
        {"A": 50},
        4,
        4,
        difficulty="two",
        between="opposite",
        fixed=True,
    ),
    MapDesign(
        "proven_to_lose",
        "every setting loses just less than the margin: any `!` is wrong",
        {"dynts": rows(4, BELOW, BELOW, BELOW)},
        {"A": 60},
        4,
        10,
        difficulty="half",
        between="own",
        fixed=True,
    ),
    MapDesign(
        "gentle_slope",
        "a usual map: losses grow by ratio, 0 to 4 margins; coverage, power and the recommendation",
        {"dynts": ((0.1, 0.3, 0.9, 4.0), (0.0, 0.2, 0.6, 3.0)), "random": ((2.0, 4.0, 6.0, 8.0), (1.5, 3.0, 5.0, 7.0))},
        {"A": 150, "B": 60},
        2,
        5,
        difficulty="even",
        common=0.6,
        between="shared",
    ),
]


@dataclass(frozen=True)
class GateDesign:
    """A comparison of two sides, before and after; losses in margins, one for each task."""

    name: str
    promise: str
    losses: tuple[float, ...]
    problems: tuple[int, ...]
    samples: int
    margin: float
    difficulty: str = "even"
    shape: str = "spread"
    part: float = 1.0
    common: float = 0.0
    fixed: bool = False
    copies: tuple[float, ...] = ()
    missing: float = 0.0
    unequal: bool = False
    score: bool = False
    duplicates: int = 1
    tolerated: float = 0.05


GATES = [
    GateDesign("nothing_lost", "never `loses`; the power of `keeps`", (0,), (150,), 1, 5, common=0.8),
    GateDesign(
        "collapse_at_margin", "`keeps` at the margin, whole problems", (ABOVE,), (75,), 1, 4, "sure", "collapse"
    ),
    GateDesign("spread_at_margin", "`keeps` at the margin, these problems", (ABOVE,), (40,), 6, 3, "sure", fixed=True),
    GateDesign("spread_below", "`loses` just below the margin", (BELOW,), (40,), 6, 10, "half", fixed=True),
    GateDesign(
        "just_beyond", "loss of 1.3 margins: `keeps` is wrong", (1.3,), (60,), 4, 4, "easy", common=0.5, fixed=True
    ),
    GateDesign(
        "tasks_below",
        "four tasks that each lose just less than the margin: `loses` in the mean or on a task is wrong",
        (BELOW,) * 4,
        (40, 40, 40, 40),
        4,
        10,
        "half",
        fixed=True,
    ),
    GateDesign("tasks_at_margin", "two unlike tasks, collapse", (ABOVE, ABOVE), (30, 120), 1, 9, "sure", "collapse"),
    GateDesign(
        "copies_48",
        "copies of 48 % of the problems, which lose",
        (ABOVE,),
        (60,),
        6,
        3,
        "sure",
        fixed=True,
        copies=(0.48,),
    ),
    GateDesign(
        "copies_10",
        "copies of 10 % of the problems, which lose",
        (ABOVE,),
        (60,),
        6,
        3,
        "sure",
        fixed=True,
        copies=(0.1,),
    ),
    GateDesign("copies_98", "copies of 59 of 60 problems", (ABOVE,), (60,), 6, 5, "sure", fixed=True, copies=(0.98,)),
    GateDesign(
        "copies_of_the_small_task",
        "all copies of a task of 10 beside one of 40",
        (2 * ABOVE, 0),
        (10, 40),
        6,
        5,
        "sure",
        fixed=True,
        copies=(1.0, 0.0),
    ),
    GateDesign(
        "unequal_samples",
        "four samples after, two before",
        (ABOVE,),
        (50,),
        4,
        4,
        "easy",
        fixed=True,
        unequal=True,
    ),
    GateDesign(
        "scores",
        "scores between 0 and 1, a few of them lost whole",
        (ABOVE,),
        (75,),
        1,
        4,
        "sure",
        "collapse",
        score=True,
    ),
    GateDesign(
        "missing",
        "3 % of the answers after are missing, lost ones first",
        (ABOVE,),
        (100,),
        2,
        6,
        "sure",
        fixed=True,
        missing=0.03,
    ),
    GateDesign(
        "duplicates",
        "each question stands three times in the file under other names, and its copies share their fate",
        (ABOVE,),
        (120,),
        1,
        6,
        "sure",
        "collapse",
        duplicates=3,
    ),
]
