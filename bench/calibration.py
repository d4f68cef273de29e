"""Do the statistics keep their promises? Coverage, sizes of tests, recommendations and adaptive sweeps on known truths.

    python bench/calibration.py [--quick] [--final] [--out FILE]

Problems have success chances of the kinds below, samples are drawn from these. A third of the kinds is kept back: the
constants of the methods were chosen on the others, and `--final` uses the `KEPT` ones and no others. Cells of a map are
alike as settings that share the beginning of a trace are (a normal copula with correlation `likeness` to the power of
the distance on the grid). Prints one JSON document;
bench/results/calibration.json holds a whole `--final` run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvatlas.stats.intervals import (
    UNSEEN,
    Z,
    correlations,
    imagined_ends,
    interval,
    p_value,
    score,
    simultaneous_quantile,
)
from scipy import stats

from common import arguments
from kvatlas.stats import inference
from kvatlas.stats.adaptive import replay
from kvatlas.stats.csv_tests import axis_effect
from kvatlas.stats.decay import fit
from kvatlas.stats.losses import Need, losses

Floats = np.ndarray[Any, np.dtype[np.float64]]
#: A chance, or the parameters of a Beta distribution of chances.
Chance = float | tuple[float, float]


#: Problems that come with a share; the chance of the first setting, and of the second.
Kind = tuple[float, Chance, Chance | None]


@dataclass(frozen=True)
class Spread:
    """A mixture of kinds. Chances of two settings on one problem are drawn with the same quantile."""

    name: str
    kinds: Sequence[Kind]

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Floats, Floats]:
        """The chances of both settings."""
        which = rng.choice(len(self.kinds), size=shape, p=[kind[0] for kind in self.kinds])
        first, second = np.zeros(shape), np.zeros(shape)
        for number, (_, chance, other) in enumerate(self.kinds):
            own = which == number
            first[own] = _drawn(chance, int(own.sum()), rng)
            second[own] = first[own] if other is None else _drawn(other, int(own.sum()), rng)
        return first, second

    def means(self) -> tuple[float, float]:
        """The means of both settings over problems."""
        first = sum(share * _mean(chance) for share, chance, _ in self.kinds)
        return first, sum(share * _mean(chance if other is None else other) for share, chance, other in self.kinds)


def _drawn(chance: Chance, count: int, rng: np.random.Generator) -> Floats:
    return rng.beta(*chance, count) if isinstance(chance, tuple) else np.full(count, chance)


def _mean(chance: Chance) -> float:
    return chance[0] / sum(chance) if isinstance(chance, tuple) else chance


def _one(name: str, *kinds: tuple[float, Chance]) -> Spread:
    return Spread(name, [(share, chance, None) for share, chance in kinds])


def _two(name: str, *kinds: Kind) -> Spread:
    return Spread(name, kinds)


#: Difficulty under one setting.
SINGLE = (
    _one("U-shaped", (1, (0.3, 0.3))), _one("hard", (1, (0.6, 2.0))), _one("easy", (1, (2.0, 0.3))),
    _one("even", (1, (1.0, 1.0))), _one("nearly all right", (1, (3.0, 0.15))), _one("all alike at 0.98", (1, 0.98)),
    _one("all alike at 0.5", (1, 0.5)), _one("5 % collapse", (0.95, 0.995), (0.05, 0.1)),
    _one("2 % collapse", (0.98, 1.0), (0.02, 0.0)), _one("rarely right", (0.97, 0.0), (0.03, 0.9)),
)  # fmt: skip
SINGLE_KEPT = (
    _one("harder", (1, (0.3, 1.2))), _one("nearly all wrong", (1, (0.1, 3.0))),
    _one("3 % collapse", (0.97, 0.99), (0.03, 0.0)), _one("saturated with a tail", (0.9, 0.98), (0.1, (1.0, 1.0))),
    _one("all alike at 0.995", (1, 0.995)),
)  # fmt: skip
#: Two settings; the second is the one that may lose.
PAIRS = (
    _two("equal, U-shaped", (1, (0.3, 0.3), (0.3, 0.3))), _two("the same chances", (0.5, 0.9, 0.9), (0.5, 0.3, 0.3)),
    _two("3 % collapse", (0.97, 0.95, 0.95), (0.03, 0.95, 0.0)),
    _two("equal means, 3 % collapse", (0.97, 0.90, 0.93), (0.03, 0.97, 0.0)),
    _two("saturated", (0.99, 0.999, 0.999), (0.01, 0.9, 0.2)), _two("4 points for all", (1, 0.6, 0.56)),
    _two("6 % collapse on hard problems", (0.5, 0.1, 0.1), (0.44, 0.9, 0.9), (0.06, 0.9, 0.05)),
    _two("2 % collapse of easy problems", (0.98, (3.0, 0.3), (3.0, 0.3)), (0.02, 0.95, 0.0)),
    _two("even, the same", (1, (1.0, 1.0), (1.0, 1.0))),
    _two("equal means, 5 % gain", (0.95, 0.80, 0.76), (0.05, 0.05, 0.81)), _two("a cliff", (0.8, 0.98, 0.97), (0.2,
    0.9, 0.1)),
)  # fmt: skip
PAIRS_KEPT = (
    _two("3 % collapse, U-shaped", (0.97, (0.5, 0.5), (0.5, 0.5)), (0.03, 0.9, 0.0)),
    _two("4 % gain of hard problems", (0.96, (0.5, 2.0), (0.5, 2.0)), (0.04, 0.0, 0.8)),
    _two("some lose, some gain", (0.5, 0.7, 0.64), (0.5, 0.3, 0.33)),
    _two("the same, easy", (1, (4.0, 0.8), (4.0, 0.8))),
)  # fmt: skip
#: What the settings of a map lose: on which share of problems an answer is lost and gained, setting by setting.
LOSSES = {
    "like the demo": (np.r_[np.linspace(0.005, 0.06, 12), np.linspace(0.08, 0.7, 28)], np.full(40, 0.02)),
    "flat, just beyond the margin": (np.full(20, 0.0501), np.full(20, 0.02)),
    "collapse, just beyond the margin": (np.full(20, 0.0301), np.zeros(20)),
    "little lost": (np.full(20, 0.015), np.full(20, 0.012)),
    "half of them harmless": (np.repeat([0.01, 0.06], 10), np.full(20, 0.008)),
}
LOSSES_KEPT = {
    "cliffs": (np.where(np.arange(20) % 2 == 0, 0.0351, 0.3), np.full(20, 0.005)),
    "nothing lost": (np.full(20, 0.01), np.full(20, 0.01)),
    "a step, in no order of cost": (np.where(np.arange(30) * 7 % 30 < 8, 0.012, 0.12), np.full(30, 0.01)),
}

PROBLEMS = (30, 60, 200, 500)
SAMPLES = (1, 5, 16, 64)
MARGIN = 0.03
Rows = list[dict[str, Any]]
Part = Callable[[int, np.random.Generator, bool], Rows]


def share(hits: Any) -> float:
    return round(float(np.mean(hits)), 4)


def pass_at_1(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    rows = []
    for spread, problems, samples in itertools.product(SINGLE_KEPT if final else SINGLE, PROBLEMS, SAMPLES):
        chance, _ = spread.draw((rounds, problems), rng)
        truth = spread.means()[0]
        means = rng.binomial(samples, chance) / samples
        result = score(means, truth)
        low, high = interval(means[: rounds // 10])
        row = {"spread": spread.name, "problems": problems, "samples": samples, "coverage": share(np.abs(result) <= Z)}
        rows.append(row | {"width": share(high - low)})
    return rows


def pairs(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Differences of two settings that share none or most of their random numbers; width over that of BCa."""
    rows = []
    kinds = PAIRS_KEPT if final else PAIRS
    for spread, problems, samples, alike in itertools.product(kinds, PROBLEMS, SAMPLES, (0.0, 0.7)):
        first, second = _means(spread, (rounds, problems), samples, rng, alike)
        truth, values, mean = spread.means()[1] - spread.means()[0], second - first, first.mean(1)
        low, high, unseen = imagined_ends(values, -mean, 1 - mean, samples)
        result = score(values, truth, low, high, unseen=unseen)
        row = {"spread": spread.name, "problems": problems, "samples": samples, "alike": alike}
        row |= {"difference": round(truth, 4), "coverage": share(np.abs(result) <= Z)}
        row["size"] = share(p_value(result) <= 0.05)
        if samples == 5 and problems <= 60 and truth == 0:
            few = values[:40]
            bottom, top = interval(few, low[:40], high[:40], unseen=unseen)
            row["width_over_bca"] = share((top - bottom).mean() / np.mean([_bca(one, rng) for one in few]))
        rows.append(row)
    return rows


def _bca(values: Floats, rng: np.random.Generator) -> float:
    """The width of the bias-corrected and accelerated bootstrap interval of a mean."""
    if not np.ptp(values):
        return 0.0
    result = stats.bootstrap((values,), np.mean, n_resamples=999, method="BCa", rng=rng)
    return float(np.ptp(result.confidence_interval))


def means_over_benchmarks(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Four benchmarks of unlike sizes and kinds: values of one setting, and differences of two."""
    rows = []
    single, double = (SINGLE_KEPT, PAIRS_KEPT) if final else (SINGLE, PAIRS)
    for sizes, samples in itertools.product(((60,) * 4, (30, 30, 40, 198)), (1, 5, 16)):
        strata = np.repeat(np.arange(4), sizes)
        for start in range(0, len(single), 2):
            of = [single[(start + n) % len(single)] for n in range(4)]
            two = [double[(start + n) % len(double)] for n in range(4)]
            values = np.concatenate(
                [_means(s, (rounds, n), samples, rng)[0] for s, n in zip(of, sizes, strict=True)], 1
            )
            both = [_means(s, (rounds, n), samples, rng) for s, n in zip(two, sizes, strict=True)]
            differences = np.concatenate([b - a for a, b in both], 1)
            truth = np.mean([s.means()[0] for s in of])
            lost = np.mean([s.means()[1] - s.means()[0] for s in two])
            rows.append(
                {
                    "spreads": [s.name for s in of], "pairs": [s.name for s in two], "problems": sizes, "samples":
                    samples, "coverage": share(np.abs(score(values, truth, strata=strata)) <= Z),
                    "coverage_of_differences": share(np.abs(_score(differences, lost, both, samples, strata)) <= Z),
                }
            )  # fmt: skip
    return rows


def _score(
    differences: Floats, mean: float, both: Sequence[tuple[Floats, Floats]], samples: int, strata: Any
) -> Floats:
    level = np.mean([first.mean(1) for first, _ in both], axis=0)
    low, high, unseen = imagined_ends(differences, -level, 1 - level, samples)
    return score(differences, mean, low, high, strata, unseen)


def _means(
    spread: Spread, shape: tuple[int, int], samples: int, rng: np.random.Generator, alike: float = 0.0
) -> tuple[Floats, Floats]:
    """The means of two settings, of whose random numbers the share `alike` is the same."""
    chances = spread.draw(shape, rng)
    noise = rng.random((*shape, samples))
    own = np.where(rng.random(noise.shape) < alike, noise, rng.random(noise.shape))
    first, second = ((u < chance[..., None]).mean(2) for u, chance in zip((noise, own), chances, strict=True))
    return first, second


def pass_at_k(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    rows = []
    for spread in SINGLE_KEPT if final else SINGLE[:5]:
        for problems, (samples, k) in itertools.product((30, 198), ((8, 4), (64, 16))):
            truth = float(np.mean(1 - (1 - spread.draw((400_000,), rng)[0]) ** k))
            wrong = samples - rng.binomial(samples, spread.draw((rounds, problems), rng)[0])
            values = 1 - np.prod([np.maximum(wrong - i, 0) / (samples - i) for i in range(k)], axis=0)
            row = {"spread": spread.name, "problems": problems, "samples": samples, "k": k}
            rows.append(row | {"coverage": share(np.abs(score(values, truth)) <= Z)})
    return rows


def alike(shape: tuple[int, int], likeness: float) -> Floats:
    """Root of the correlation matrix of the cells of a grid."""
    places = [(row, column) for row in range(shape[0]) for column in range(shape[1])]
    if likeness == 0:
        return np.eye(len(places))
    apart = np.array([[abs(a - c) + abs(b - d) for c, d in places] for a, b in places])
    return np.linalg.cholesky(likeness**apart + 1e-9 * np.eye(len(places)))


def grades(truth: Floats, problems: int, samples: int, root: Floats, rng: np.random.Generator) -> Floats:
    """[problems, cells] means of a map whose cells have the mean `truth`; difficulty is spread with deviation 2."""
    threshold = stats.norm.ppf(truth) * np.sqrt(5.0)
    chance = stats.norm.cdf(threshold + 2.0 * rng.standard_normal((problems, 1)))
    noise = stats.norm.cdf(rng.standard_normal((problems, samples, len(truth))) @ root.T)
    return (noise < chance[:, None, :]).mean(1)


def collapsing(problems: int, rng: np.random.Generator) -> Floats:
    """[problems, 20] of equal means: the first cell fails on some problems, the others lose a little on each."""
    means = 1 - 0.9 * 0.03 * rng.uniform(0.5, 1.5, (problems, 20))
    means[:, 0] = np.where(rng.random(problems) < 0.03, 0.1, 1.0)
    return means


def maps(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Maps of 20 cells that are the same, or collapse with equal means: how often a difference is found."""
    rows = []
    level = 0.8 if final else 0.45
    for problems, samples, likeness in (
        (30, 1, 0.0), (30, 1, 0.6), (30, 5, 0.6), (30, 5, None), (60, 5, 0.9), (60, 1, None), (200, 1, 0.6)
    ):  # fmt: skip
        root, strata = alike((4, 5), likeness or 0.0), np.zeros(problems, int)
        result, effects = [], []
        for _ in range(rounds):
            means = (
                collapsing(problems, rng)
                if likeness is None
                else grades(np.full(20, level), problems, samples, root, rng)
            )
            result.append(inference.omnibus(means, strata, LEVELS).p <= 0.05)
            effects += [inference.flip_p(means, strata, item).min() <= 0.05 for item in (LEVELS[:4], LEVELS[4:])]
        row = {"problems": problems, "samples": samples, "likeness": likeness, "collapse": likeness is None}
        # Where one setting alone collapses the settings are not the same: what is found there is no error.
        sizes = {"found": share(result), "effects_found": share(effects), "rounds": rounds}
        rows.append(row | sizes)
    return rows


#: The levels of both axes of a map of 4 by 5 cells.
LEVELS = np.array(
    [
        inference.level_effect(of.tolist(), n)
        for of in (np.arange(20) // 5, np.arange(20) % 5)
        for n in range(of.max() + 1)
    ]
)


def power(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Maps of which one level of an axis loses: how often a difference is found, and the level among the effects."""
    rows = []
    for problems, lost, likeness in itertools.product((60, 240), (0.028, 0.067), (0.3, 0.8) if final else (0.0, 0.6)):
        truth = np.where(np.arange(20) % 5 == 0, 0.5 - lost, 0.5)
        root, strata = alike((4, 5), likeness), np.zeros(problems, int)
        drawn = [grades(truth, problems, 5, root, rng) for _ in range(rounds)]
        found = share([inference.omnibus(means, strata, LEVELS).p <= 0.05 for means in drawn])
        effect = share([inference.flip_p(means, strata, LEVELS[4:])[0] <= 0.05 for means in drawn])
        row = {"problems": problems, "samples": 5, "lost": lost, "likeness": likeness, "rounds": rounds}
        rows.append(row | {"difference_found": found, "level_found": effect})
    return rows


def missing(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Traces that are missing at random: do the limits of all settings still hold together?"""
    rows = []
    for lost, samples in itertools.product((0.01, 0.05, 0.1), (1, 5)):
        hold, width = [], []
        for _ in range(rounds):
            chance = rng.beta(0.3, 0.3, (1, 240, 1)) if final else rng.beta(1.0, 1.0, (1, 240, 1))
            drawn = (rng.random((21, 240, samples)) < chance).astype(float)
            differences = drawn[1:] - drawn[:1]
            differences[rng.random(differences.shape) < lost] = np.nan
            counts = (~np.isnan(differences)).sum(2)
            means = np.where(counts > 0, np.nansum(differences, 2) / np.maximum(counts, 1), np.nan)
            reference = float(drawn[0].mean())
            found = losses(means, np.repeat(np.arange(4), 60), MARGIN, reference=reference, samples=samples)
            hold.append(all(loss is not None and loss.low <= 0 <= loss.high for loss in found))
            width += [loss.high - loss.low for loss in found if loss is not None]
        row = {"missing": lost, "samples": samples, "rounds": rounds}
        rows.append(row | {"all_intervals_hold": share(hold), "width": share(width)})
    return rows


def needed(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """The power of as many problems as a pilot says, were its loss the true one."""
    rows = []
    for pilot, (lost, gained), settings in itertools.product(
        (100, 240, 600), ((0.02, 0.01), (0.08, 0.06)) if final else ((0.015, 0.01), (0.02, 0.0), (0.05, 0.04)), (1, 20)
    ):
        lose, gain, powers, counts = np.full(settings, lost), np.full(settings, gained), [], []
        for _ in range(max(rounds // 20, 5)):
            strata = np.arange(pilot) % 4
            seen = _differences(lose, gain, pilot, 0.6, rng)
            quantile = simultaneous_quantile(correlations(seen, strata))
            count = Need.of(-seen[0], strata, quantile, 1.0, UNSEEN).problems(lost - gained, MARGIN)
            if count is None or not seen[0].any():
                continue
            strata = np.arange(count) % 4
            drawn = np.concatenate([_differences(lose[:1], gain[:1], count, 0.6, rng) for _ in range(20)])
            powers += (-interval(drawn, -1.0, 1.0, quantile, strata)[0] <= MARGIN).tolist()
            counts.append(count)
        row = {"pilot": pilot, "lost": lost, "gained": gained, "settings": settings}
        rows.append(row | {"needed": round(float(np.mean(counts))), "power": share(powers)})
    return rows


def recommendation(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Whole grids and adaptive sweeps on the same traces: is a setting recommended that breaks the margin?"""
    rows = []
    for name, (lost, gained) in (LOSSES_KEPT if final else LOSSES).items():
        true, costs = lost - gained, np.arange(len(lost))[::-1].astype(float)
        for problems, likeness in ((240, 0.0), (240, 0.6), (600, 0.6)):
            runs = [_recommended(lost, gained, true, costs, problems, likeness, rng) for _ in range(rounds)]
            decided = [run for run in runs if run["adaptive"] is not None]
            rows.append(
                {
                    "map": name, "problems": problems, "likeness": likeness, "rounds": rounds,
                    "recommended": share([run["full"] is not None for run in runs]),
                    "breaks_the_margin": share([run["full_breaks"] for run in runs]),
                    "all_intervals_hold": share([run["covers"] for run in runs]),
                    "adaptive_recommended": share([run["adaptive"] is not None for run in runs]),
                    "adaptive_breaks_the_margin": share([run["adaptive_breaks"] for run in runs]),
                    "adaptive_share_of_traces": share([run["share"] for run in runs]),
                    "share_where_decided": share([run["share"] for run in decided]) if decided else None,
                    "same_as_full_grid": share([run["full"] == run["adaptive"] for run in runs]),
                }
            )  # fmt: skip
    return rows


def _differences(lost: Floats, gained: Floats, problems: int, likeness: float, rng: np.random.Generator) -> Floats:
    """[settings, problems]: -1 where an answer is lost, 1 where one is gained."""
    shared = np.sqrt(likeness) * rng.standard_normal((1, problems))
    position = stats.norm.cdf(shared + np.sqrt(1 - likeness) * rng.standard_normal((len(lost), problems)))
    return np.where(position < lost[:, None], -1.0, np.where(position > 1 - gained[:, None], 1.0, 0.0))


def _recommended(
    lost: Floats, gained: Floats, true: Floats, costs: Floats, problems: int, likeness: float, rng: np.random.Generator
) -> dict[str, Any]:
    differences = _differences(lost, gained, problems, likeness, rng)
    strata = np.repeat(np.arange(4), problems // 4)
    result = losses(differences, strata, MARGIN, chains=[np.argsort(-costs).tolist()])
    shown, low, high = (np.array([getattr(loss, name) for loss in result]) for name in ("shown", "low", "high"))
    full = int(np.where(shown, costs, np.inf).argmin()) if shown.any() else None
    orders = [np.flatnonzero(strata == stratum) for stratum in range(4)]
    end, took = replay(differences, orders, costs, MARGIN, 20)
    breaks = true > MARGIN + 1e-9
    return {
        "full": full, "full_breaks": full is not None and breaks[full],
        "covers": bool(((low <= true) & (true <= high)).all()),
        "adaptive": end.recommended, "adaptive_breaks": end.recommended is not None and breaks[end.recommended],
        "share": took.sum() / (problems * len(lost)),
    }  # fmt: skip


def permutation(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """Bare maps without an effect of the last axis; the other axis has one."""
    rows = []
    for count, likeness in itertools.product((1, 4, 8), (0.0, 0.6)):
        root = alike((4, 5), likeness)
        p = []
        for number in range(rounds):
            noise = (rng.standard_normal((count, 20)) @ root.T).reshape(count, 4, 5) + rng.normal(0, 3, (count, 4, 1))
            if final:
                noise = np.round(noise * 5) / 5
            p.append(min(level.p for level in axis_effect(noise, draws=400, seed=number)[0]) <= 0.05)
        rows.append({"maps": count, "likeness": likeness, "rounds": rounds, "size": share(p)})
    return rows


def decays(rounds: int, rng: np.random.Generator, final: bool) -> Rows:
    """L0 = 40 of few problems with five samples that are alike, at depths up to 80 and 200."""
    rows = []
    for problems, likeness, deepest in itertools.product((12, 20), (0.3, 0.8), (80, 200)):
        covered = []
        for _ in range(rounds):
            depth = rng.integers(1, deepest + 1, problems)
            chance, alpha = np.exp(-depth / 40), 1 / likeness - 1
            hits = rng.binomial(5, rng.beta(chance * alpha, (1 - chance) * alpha))
            outcomes = {place: [1.0] * hit + [0.0] * (5 - hit) for place, hit in enumerate(hits)}
            found = fit(outcomes, dict(enumerate(depth)))
            covered.append(found.low <= 40 <= found.high)
        row = {"problems": problems, "likeness": likeness, "deepest": deepest}
        rows.append(row | {"rounds": rounds, "coverage": share(covered)})
    return rows


#: Each part with its rounds.
PARTS: tuple[tuple[Part, int], ...] = (
    (pass_at_1, 1_500), (pairs, 600), (means_over_benchmarks, 1_000), (pass_at_k, 2_000),
    (maps, 400), (power, 100), (recommendation, 60), (missing, 100), (needed, 200), (permutation, 400), (decays, 200),
)  # fmt: skip


def main() -> None:
    options = arguments(
        __doc__, quick=False, final=False, seed=0, only={"choices": [part.__name__ for part, _ in PARTS]}
    )
    document: dict[str, Any] = {"bench": "calibration", "seed": options.seed, "quick": options.quick}
    for part, rounds in PARTS:
        if options.only in (None, part.__name__):
            began = time.monotonic()
            rng = np.random.default_rng([options.seed, options.final, len(part.__name__)])
            document[part.__name__] = part(max(rounds // 10, 20) if options.quick else rounds, rng, options.final)
            document.setdefault("seconds", {})[part.__name__] = round(time.monotonic() - began, 1)
    if options.out is not None:
        stored = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
        part = stored.setdefault("final" if options.final else "tuned", {})
        part.update({**document, "seconds": {**part.get("seconds", {}), **document["seconds"]}})
        options.out.write_text(json.dumps(stored).replace("}, {", "},\n  {") + "\n", "utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
