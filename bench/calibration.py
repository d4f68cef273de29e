"""Do the statistics keep their promises? Coverage, test sizes and adaptive sweeps on maps whose truth is known.

    python bench/calibration.py [--quick] [--out FILE]

Problems have success chances drawn from a spread (Beta or one value), samples are drawn from these; cells of a map are
alike as settings that share the beginning of a trace are (a normal copula with correlation `likeness` to the power of
the distance on the grid). Prints one JSON document; bench/results/calibration.json holds a whole run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import anytime
from kvatlas.stats.estimates.at_k import bayes_at_n
from kvatlas.stats.estimates.pass_at_1 import Z, cautious_interval, clustered_interval, conditional_interval
from kvatlas.stats.inference import resampling, sequential
from kvatlas.stats.inference.resampling import sign_flip_p
from kvatlas.stats.pairs.paired import difference_interval

PROBLEMS = (30, 40, 198)
SAMPLES = (1, 2, 4, 5, 16, 64)
#: Spreads of difficulty (Beta parameters) as on real benchmarks: U-shaped, hard, easy, even.
LIKE_BENCHMARKS = ((0.3, 0.3), (0.6, 2.0), (2.0, 0.3), (0.3, 1.2), (1.0, 1.0))
#: Hard ones: nearly all wrong, nearly all right, all problems alike.
EXTREME: tuple[tuple[float, ...], ...] = ((0.1, 3.0), (3.0, 0.15), (0.98,), (0.5,))
Floats = np.ndarray[Any, np.dtype[np.float64]]


def chances(spread: Sequence[float], shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Floats, float]:
    if len(spread) == 1:
        return np.full(shape, spread[0]), spread[0]
    return rng.beta(*spread, shape), spread[0] / sum(spread)


def share(hits: Any) -> float:
    return round(float(np.mean(hits)), 4)


def intervals(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for spread in (*LIKE_BENCHMARKS, *EXTREME):
        for problems in PROBLEMS:
            for samples in SAMPLES:
                chance, truth = chances(spread, (rounds, problems), rng)
                means = rng.binomial(samples, chance) / samples
                within = means * (1 - means) / (samples - 1) if samples > 1 else np.full(means.shape, np.nan)
                low, high = clustered_interval(means, samples)
                given_low, given_high = conditional_interval(means, within, samples)
                given = chance.mean(1)
                rows.append(
                    {
                        "spread": spread,
                        "like_benchmarks": spread in LIKE_BENCHMARKS,
                        "problems": problems,
                        "samples": samples,
                        "clustered": share((low <= truth + 1e-12) & (truth - 1e-12 <= high)),
                        "clustered_width": share(high - low),
                        "conditional": share((given_low <= given + 1e-12) & (given - 1e-12 <= given_high)),
                        "conditional_width": share(given_high - given_low),
                        "normal": normal_coverage(means, truth),
                    }
                )
    return rows


def normal_coverage(means: Floats, truth: float) -> float:
    """What the usual mean plus or minus 1.96 standard errors, clustered, covers."""
    half = Z * means.std(1, ddof=1) / np.sqrt(means.shape[1])
    return share(np.abs(means.mean(1) - truth) <= half)


def pass_at_k(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for spread in LIKE_BENCHMARKS:
        for problems, (samples, k) in itertools.product(PROBLEMS, ((8, 4), (16, 4), (64, 4), (64, 16))):
            truth = float(np.mean(1 - (1 - chances(spread, (400_000,), rng)[0]) ** k))
            chance, _ = chances(spread, (rounds, problems), rng)
            wrong = samples - rng.binomial(samples, chance)
            steps = np.array([(wrong - i) / (samples - i) for i in range(k)])
            values = 1 - np.prod(np.maximum(steps, 0), axis=0)
            low, high = cautious_interval(values, samples // k)
            rows.append(
                {
                    "spread": spread,
                    "problems": problems,
                    "samples": samples,
                    "k": k,
                    "coverage": share((low <= truth) & (truth <= high)),
                }
            )
    return rows


def means_over_benchmarks(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    spreads, sizes = ((0.5, 0.6), (0.3, 0.8), (2.0, 0.3), (0.6, 0.7)), (30, 30, 40, 198)
    for samples in (1, 5, 16):
        value, truth, below, above = 0.0, 0.0, 0.0, 0.0
        for spread, problems in zip(spreads, sizes, strict=True):
            chance, mean = chances(spread, (rounds, problems), rng)
            means = rng.binomial(samples, chance) / samples
            low, high = clustered_interval(means, samples)
            centre = means.mean(1)
            value, truth = value + centre / 4, truth + mean / 4
            below, above = below + (centre - low) ** 2, above + (high - centre) ** 2
        hit = (value - np.sqrt(below) / 4 <= truth) & (truth <= value + np.sqrt(above) / 4)
        rows.append({"problems": sizes, "samples": samples, "coverage": share(hit)})
    return rows


def bayes(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for samples in (1, 5, 64):
        hits = []
        for _ in range(max(rounds // 20, 50)):
            chance, _ = chances((0.3, 0.3), (30,), rng)
            right = rng.binomial(samples, chance)
            found = bayes_at_n({str(i): [1.0] * r + [0.0] * (samples - r) for i, r in enumerate(right)})
            hits.append((found.low or 0) <= chance.mean() <= (found.high or 1))
        rows.append({"spread": (0.3, 0.3), "problems": 30, "samples": samples, "coverage_given_problems": share(hits)})
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


def shuffled_p(means: Floats, rng: np.random.Generator, flips: int) -> float:
    """The usual permutation test, cells shuffled within problems: shown for comparison."""
    deviations = means - means.mean(1, keepdims=True)
    observed = (deviations.sum(0) ** 2).sum()
    chance = [(rng.permuted(deviations, axis=1).sum(0) ** 2).sum() for _ in range(flips)]
    return float((1 + sum(c >= observed - 1e-9 for c in chance)) / (1 + flips))


def omnibus(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for problems, samples in ((30, 1), (30, 5), (60, 1), (198, 5)):
        for likeness in (0.0, 0.6, 0.9):
            root, flipped, shuffled = alike((4, 5), likeness), [], []
            for number in range(rounds):
                means = grades(np.full(20, 0.45), problems, samples, root, rng)
                strata = np.zeros(problems, int)
                flipped.append(resampling.omnibus(means, strata, flips=499, seed=number % 16).p <= 0.05)
                if number < rounds // 8:
                    shuffled.append(shuffled_p(means, rng, 99) <= 0.05)
            row = {"problems": problems, "samples": samples, "likeness": likeness, "rounds": rounds}
            rows.append(row | {"size": share(flipped), "size_shuffled": share(shuffled)})
    return rows


def plateau(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rising = 0.4 + 0.02 * np.arange(20)
    step = np.where(np.arange(20) == 7, 0.6, 0.45)
    rows = []
    for name, truth in (("flat", np.full(20, 0.45)), ("rising", rising), ("one better", step)):
        for problems, samples in ((30, 5), (60, 1), (198, 5)):
            for likeness in (0.0, 0.6):
                root, best = alike((4, 5), likeness), int(truth.argmax())
                held, ungated, size, worst = [], [], [], []
                for number in range(rounds):
                    means, strata = grades(truth, problems, samples, root, rng), np.zeros(problems, int)
                    found = resampling.plateau(means, strata, flips=499, seed=number % 16)
                    held.append(found.member[best])
                    ungated.append(found.p[best] >= 0.05)
                    size.append(found.member.sum())
                    worst.append(truth.max() - truth[best - 1] <= found.may_lose[best - 1] + 1e-12)
                rows.append(
                    {
                        "truth": name, "problems": problems, "samples": samples, "likeness": likeness, "rounds": rounds,
                        "best_on_plateau": share(held), "without_gate": share(ungated),
                        "cells_on_plateau": round(float(np.mean(size)), 2), "may_lose_holds": share(worst),
                    }
                )  # fmt: skip
    return rows


def pairs(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for problems, samples in ((30, 1), (30, 5), (60, 1), (198, 5)):
        root, covered, rejected = alike((1, 2), 0.6), [], []
        for number in range(rounds):
            means = grades(np.array([0.5, 0.5]), problems, samples, root, rng)
            differences = means[:, 0] - means[:, 1]
            low, high = difference_interval(differences)
            covered.append(low <= 0 <= high)
            rejected.append(sign_flip_p(differences, flips=499, seed=number) <= 0.05)
        rows.append({"problems": problems, "samples": samples, "coverage": share(covered), "size": share(rejected)})
    return rows


def blocks_of(maps: Sequence[Floats], count: int) -> list[sequential.Block]:
    cut = []
    for number in range(count):
        parts = [one[len(one) * number // count : len(one) * (number + 1) // count] for one in maps]
        strata = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        cut.append(sequential.Block(np.concatenate(parts), strata))
    return cut


def adaptive_once(maps: Sequence[Floats], cost: Floats) -> dict[str, Any]:
    """One adaptive sweep against the full grid on the same traces."""
    blocks = blocks_of(maps, 20)
    cells, problems = maps[0].shape[1], sum(len(one) for one in maps)
    active, spent, seen, state = np.ones(cells, bool), 0, 0, sequential.race([], cells)
    for number, block in enumerate(blocks, 1):
        spent += len(block.strata) * int(active.sum())
        seen += len(block.strata)
        state = sequential.race(blocks[:number], cells, problems - seen)
        active = state.active
        if state.hopeless:
            break
    strata = np.repeat(np.arange(len(maps)), [len(one) for one in maps])
    whole = resampling.plateau(np.concatenate(maps), strata, flips=999)
    chosen, wanted = (int(np.flatnonzero(member)[cost[member].argmin()]) for member in (active, whole.member))
    took = blocks[: state.blocks[0]]
    low, high = anytime.mean_interval(
        np.concatenate([block.means[:, 0] for block in took]), np.concatenate([block.strata for block in took])
    )
    return {
        "tokens": spent / (problems * cells), "active": active, "full": whole.member, "same": chosen == wanted,
        "leader_on_full_plateau": whole.member[state.leader], "chosen": chosen, "wanted": wanted,
        "interval": (low, high),
    }  # fmt: skip


def adaptive(rounds: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    published = read_maps("published:dynts_r1_llama")
    values = np.array([[cell.estimate.value for cell in one.cells.values()] for one in published])
    centre = values.mean(1, keepdims=True)
    kept = np.array([window + ratio * (5000 - window) for window, ratio in published[0].cells])
    steep = np.clip(0.95 - 0.12 * np.arange(4)[:, None] - 0.55 * np.exp(-(np.arange(20) % 5) / 1.2), 0.03, 0.97)
    poor = np.concatenate([steep, steep * 0.55, steep * 0.25], axis=1)
    scenes = [
        ("published, no true differences", centre + 0 * values, (30, 30, 40, 198), 5, kept),
        ("published, half of each peak true", centre + 0.5 * (values - centre), (30, 30, 40, 198), 5, kept),
        ("published, every peak true", values, (30, 30, 40, 198), 5, kept),
        ("three policies as on the embedded model", poor, (60,) * 4, 1, np.tile(kept, 3)),
    ]
    rows = []
    for name, truth, sizes, samples, cost in scenes:
        for likeness in (0.0, 0.7):
            root = np.kron(np.eye(truth.shape[1] // 20), alike((4, 5), likeness))
            best, first = truth.mean(0).argmax(), truth.mean(0)[0]
            runs, before = [], None
            again = []
            for _ in range(rounds):
                maps = [grades(row, size, samples, root, rng) for row, size in zip(truth, sizes, strict=True)]
                runs.append(adaptive_once(maps, cost))
                if before is not None:
                    again.append(before["wanted"] == runs[-1]["wanted"])
                before = runs[-1]
            rows.append(
                {
                    "map": name, "likeness": likeness, "problems": sizes, "samples": samples, "rounds": rounds,
                    "tokens_of_full_grid": share([run["tokens"] for run in runs]),
                    "best_kept": share([run["active"][best] for run in runs]),
                    "best_on_full_plateau": share([run["full"][best] for run in runs]),
                    "plateau_cells": round(float(np.mean([run["active"].sum() for run in runs])), 2),
                    "full_plateau_cells": round(float(np.mean([run["full"].sum() for run in runs])), 2),
                    "same_choice_as_full_grid": share([run["same"] for run in runs]),
                    "leader_on_full_plateau": share([run["leader_on_full_plateau"] for run in runs]),
                    "same_choice_of_two_full_grids": share(again),
                    "interval_of_first_cell_covers": share(
                        [run["interval"][0] <= first <= run["interval"][1] for run in runs]
                    ),
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[part.__name__ for part, _ in PARTS], help="one part alone")
    parser.add_argument("--out", type=Path, help="also write the document to this file")
    options = parser.parse_args()
    document: dict[str, Any] = {"bench": "calibration", "seed": options.seed, "quick": options.quick}
    for part, rounds in PARTS:
        if options.only in (None, part.__name__):
            began = time.monotonic()
            rng = np.random.default_rng([options.seed, len(part.__name__)])
            document[part.__name__] = part(max(rounds // 10, 40) if options.quick else rounds, rng)
            document.setdefault("seconds", {})[part.__name__] = round(time.monotonic() - began, 1)
    text = json.dumps(document)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text.replace("}, {", "},\n  {") + "\n", "utf-8")
    print(text)


Part = Callable[[int, np.random.Generator], list[dict[str, Any]]]
#: Each part with its rounds.
PARTS: tuple[tuple[Part, int], ...] = (
    (intervals, 10_000),
    (pass_at_k, 10_000),
    (means_over_benchmarks, 10_000),
    (bayes, 10_000),
    (pairs, 4_000),
    (omnibus, 6_000),
    (plateau, 1_000),
    (adaptive, 300),
)

if __name__ == "__main__":
    main()
