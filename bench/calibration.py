"""Do the statistics keep their promises? Exact errors, and simulations on designs with known truth.

    python bench/calibration.py [--quick] [--final] [--only PART ...] [--designs N] [--rounds N] [--out FILE]
    python bench/calibration.py --final --only sequences --design "all beyond, 10, n 29" --rounds 6000 --seed 1

Designs are those of designs.py; `--final` takes those of designs_kept.py, which are run once, when nothing about the
methods is changed any more. Prints one JSON document: each part has rows, and the `worst` row by each of its measures.
A measure of a promise is a share of rounds. With `--out` the parts are kept in that file too, under "tuning" or
"final": bench/results/calibration.json holds whole runs. `--designs` and `--rounds` make a run as small as you like.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import exact_errors
from common import arguments
from design_kinds import Maps, Sequences, TwoSettings
from design_parts import COLUMNS, SAME, Change, Copies, Difficulty, Trunk, beta, collapse, loss, two_points
from designs import TUNING
from designs_kept import KEPT
from kvatlas.core import Estimate
from kvatlas.stats.estimates import from_problem_means, mean_over_benchmarks
from kvatlas.stats.metrics import Rule
from kvatlas.stats.numerics.arrays import LEVEL, Floats, normal_quantile, weights
from kvatlas.stats.numerics.averages import permute_benchmarks
from kvatlas.stats.numerics.bounded import interval, upper_limit
from kvatlas.stats.numerics.planning import needed_problems, scaled_sizes
from simulations import (
    DRAWS,
    Row,
    share,
    simulate_depths,
    simulate_differences,
    simulate_maps,
    simulate_prices,
    simulate_sequences,
)

MARGIN = 0.03
Rows = Iterator[Row]


@dataclass(frozen=True)
class Job:
    """The designs of a run by kind, how often each is drawn, and the seed."""

    designs: Mapping[str, Mapping[str, Any]]
    rounds: int
    seed: int
    most_designs: int | None = None
    #: The name of the only design.
    design: str = ""

    def of_kind(self, kind: str) -> Iterator[tuple[str, Any, np.random.Generator]]:
        """Yield the name of each design of a kind, the design, and random numbers of its own."""
        yield from self.each(self.designs[kind])

    def each(self, designs: Mapping[str, Any]) -> Iterator[tuple[str, Any, np.random.Generator]]:
        """Yield the same of these designs."""
        for name in list(designs)[: self.most_designs]:
            if self.design not in ("", name):
                continue
            yield name, designs[name], self.random(name)

    def random(self, name: str) -> np.random.Generator:
        """Return random numbers that depend on the seed and the name alone."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


# -- exact -------------------------------------------------------------------------------------------------------------


def exact(job: Job) -> Rows:
    yield from exact_errors.limit_errors()
    yield from exact_errors.limit_errors_over_benchmarks(seed=job.seed)


#: Sizes of the benchmarks and samples of runs in which nothing is lost in the mean.
LOSSLESS = {
    "30 x 16": ((30,), 16),
    "60 x 16": ((60,), 16),
    "30 + 30 x 5": ((30, 30), 5),
    "99 x 1": ((99,), 1),
    "240 x 1": ((240,), 1),
    "400 x 1": ((400,), 1),
}
#: The share of traces that are never compressed, and so equal the full cache's.
UNCOMPRESSED = 0.6


def claims(job: Job) -> Rows:
    """Return how often one setting is proven to keep the margin, by each claim, by a paired t, and at most.

    The full cache solves problems with chances that are uniform in [0, 1], a compressed trace with the same chance.
    Limits for problems like these are those of version 0.1. `bound` is what no valid test for problems like these
    exceeds (docs/statistics.md).
    """
    z = normal_quantile(LEVEL)
    for name, (sizes, samples), rng in job.each(LOSSLESS):
        count = sum(sizes)
        strata = np.repeat(np.arange(len(sizes)), sizes)
        chances = rng.random((job.rounds, count, 1))
        full = rng.random((job.rounds, count, samples)) < chances
        again = rng.random((job.rounds, count, samples)) < chances
        is_compressed = rng.random((job.rounds, count, samples)) >= UNCOMPRESSED
        lost = np.where(is_compressed, full.astype(float) - again, 0.0)
        of_problems = lost.mean(2)
        by_trace = upper_limit(lost.reshape(job.rounds, -1), -1.0, 1.0, z, np.repeat(strata, samples))
        by_problem = upper_limit(of_problems, -1.0, 1.0, z, strata)
        errors = of_problems.std(1, ddof=1) / np.sqrt(count)
        paired_t = of_problems.mean(1) + stats.t.ppf(1 - LEVEL, count - 1) * errors
        yield {
            "design": name,
            "these_problems": share(by_trace <= MARGIN),
            "problems_like_these": share(by_problem <= MARGIN),
            "paired_t": share(paired_t <= MARGIN),
            "bound": min(1.0, LEVEL * (1 - MARGIN) ** -count),
        }


def traces(job: Job) -> Rows:
    """Return exact errors of limits whose units are traces, of problems of two kinds."""
    yield from exact_errors.trace_limit_errors()


def traces_of_three_values(job: Job) -> Rows:
    """Return how often limits by traces err on the same problems, which lose and gain with unlike chances."""
    for name, (sizes, samples, kinds), rng in job.each(TRACE_DESIGNS):
        strata = np.repeat(np.arange(len(sizes)), np.array(sizes) * samples)
        chances = np.concatenate([kinds[np.arange(size) % len(kinds)] for size in sizes])
        of_traces = np.repeat(chances, samples, axis=0)
        truth = float(weights(strata) @ (of_traces[:, 0] - of_traces[:, 1]))
        drawn = rng.random((job.rounds, len(of_traces)))
        lost = (drawn < of_traces[:, 0]).astype(float) - (drawn > 1 - of_traces[:, 1])
        limits = upper_limit(lost, -1.0, 1.0, normal_quantile(LEVEL), strata)
        yield {"design": name, "true_loss": truth, "error": share(limits < truth - 1e-9)}


#: Sizes of benchmarks, samples, and the chances of kinds of problems to lose and to gain a pair, in turn.
TRACE_DESIGNS = {
    "30 x 16, 3 % lost everywhere": ((30,), 16, np.array([[0.03, 0.0]])),
    "30 x 16, one kind of ten is lost in half": ((30,), 16, np.array([[0.5, 0.0]] + 9 * [[0.0, 0.0]])),
    "30 x 4, gains beside losses": ((30,), 4, np.array([[0.15, 0.02], [0.02, 0.1]])),
    "30 + 30 x 5, gains beside losses": ((30, 30), 5, np.array([[0.2, 0.0], [0.0, 0.14]])),
    "8 + 198 x 2, rare losses": ((8, 198), 2, np.array([[0.06, 0.0]] + 3 * [[0.0, 0.0]])),
    "30 + 30 + 40 + 198 x 4, mixed": ((30, 30, 40, 198), 4, np.array([[0.1, 0.0], [0.03, 0.03], [0.0, 0.02]])),
}


def recommendation(job: Job) -> Rows:
    yield from exact_errors.recommendation_errors()


def scan(job: Job) -> Rows:
    """Return the ten random distributions on which the limits err most often."""
    rows = list(exact_errors.scan(job.rounds, job.random("scan")))
    for row in sorted(rows, key=lambda row: -row["error"])[:10]:
        yield row | {"searched": len(rows)}


# -- designs -----------------------------------------------------------------------------------------------------------


def of_kind(kind: str, simulate: Callable[[Any, np.random.Generator, int], Row]) -> Callable[[Job], Rows]:
    """Return a part that simulates all designs of a kind."""

    def rows(job: Job) -> Rows:
        for name, design, rng in job.of_kind(kind):
            yield {"design": name, **simulate(design, rng, job.rounds)}

    return rows


# -- numbers of problems -----------------------------------------------------------------------------------------------

EASY_CHANCE = 0.95
HARD_CHANCE = 0.1
EASY_AND_HARD = two_points(0.6, EASY_CHANCE, HARD_CHANCE)
PILOTS = 61
#: Pilots: sizes, samples, and the shares of easy problems that collapse and of hard ones that are rescued.
PILOT_DESIGNS = (
    ((60,), 5, 0.03, 0.02),
    ((30, 30), 5, 0.01, 0.01),
    ((60, 60, 60, 60), 1, 0.02, 0.015),
    ((8, 30, 198), 5, 0.02, 0.02),
    ((30, 30, 40, 198), 5, 0.02, 0.02),
    ((12, 198), 1, 0.02, 0.02),
)


def needed(job: Job) -> Rows:
    """Say numbers of problems from pilots, at the true loss; try the median by fresh runs of that size."""
    designs = {f"{plus(sizes)} problems, k {rest[0]}": (sizes, *rest) for sizes, *rest in PILOT_DESIGNS}
    for name, (sizes, samples, lost, gained), rng in job.each(designs):
        design = TwoSettings(sizes, samples, 0.7, EASY_AND_HARD, exchange_of_two_kinds(lost, gained))
        pilots = lost_in(design, rng, PILOTS)
        said = [needed_problems(pilot, design.strata, -design.truth, MARGIN) for pilot in pilots]
        median = float(np.median([np.inf if number is None else number for number in said]))
        row = {"design": name, "true_loss": -design.truth, "pilots_without_answer": said.count(None)}
        if np.isfinite(median):
            fresh = TwoSettings(
                tuple(scaled_sizes(sizes, median / sum(sizes))), samples, 0.7, EASY_AND_HARD, design.change
            )
            limits = upper_limit(lost_in(fresh, rng, job.rounds), -1.0, 1.0, normal_quantile(LEVEL), fresh.strata)
            row |= {"said": round(median), "power": share(limits <= MARGIN)}
        yield row


def exchange_of_two_kinds(lost: float, gained: float) -> Change:
    """Return a change by which shares of easy problems fall to 1 - EASY_CHANCE and of hard ones rise to EASY_CHANCE."""
    slope = (1 - EASY_CHANCE - HARD_CHANCE) / (EASY_CHANCE - HARD_CHANCE)
    return Change(((lost, slope, HARD_CHANCE * (1 - slope)), (gained, 0.0, EASY_CHANCE)))


def lost_in(design: TwoSettings, rng: np.random.Generator, rounds: int) -> Floats:
    first, second = design.draw(rng, rounds)
    return first - second


def plus(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


# -- values of one setting ---------------------------------------------------------------------------------------------

PROBLEMS = (8, 30, 60, 198)
SAMPLES = (1, 4, 16)
#: Samples, and k of pass@k.
SAMPLES_AND_K = ((8, 4), (64, 16))


def difficulties(job: Job) -> dict[str, Difficulty]:
    """Return the distributions of difficulty of all designs of maps and of two settings, by a description."""
    found = {}
    for design in [*job.designs["maps"].values(), *job.designs["two settings"].values()]:
        parts = design.difficulty if isinstance(design.difficulty, tuple) else (design.difficulty,)
        for difficulty in parts:
            kinds = [f"{weight:g} of Beta({mean:g}, {spread:g})" for weight, mean, spread in difficulty.parts]
            found[", ".join(kinds)] = difficulty
    return found


def pass_at_1(job: Job) -> Rows:
    """Return for each difficulty the numbers of problems and samples of the lowest coverage."""
    for name, difficulty, rng in job.each(difficulties(job)):
        rows = []
        for problems in PROBLEMS:
            for samples in SAMPLES:
                means = rng.binomial(samples, difficulty.draw(rng, (job.rounds, problems))) / samples
                row = {"design": name, "problems": problems, "samples": samples}
                rows.append(row | {"coverage": covered(means, difficulty.mean)})
        yield min(rows, key=lambda row: row["coverage"])


def covered(values: Floats, truth: float) -> float:
    low, high = interval(values)
    return share((low <= truth + 1e-9) & (truth - 1e-9 <= high))


def pass_at_k(job: Job) -> Rows:
    for name, difficulty, rng in job.each(difficulties(job)):
        rows = []
        for samples, k in SAMPLES_AND_K:
            truth = share(1 - (1 - difficulty.draw(rng, (400_000,))) ** k)
            grades = [[1.0] * right + [0.0] * (samples - right) for right in range(samples + 1)]
            by_right = Rule("pass", k).values(grades, grades)
            for problems in PROBLEMS:
                right = rng.binomial(samples, difficulty.draw(rng, (job.rounds, problems)))
                row = {"design": name, "problems": problems, "samples": samples, "k": k}
                rows.append(row | {"coverage": covered(by_right[right], truth)})
        yield min(rows, key=lambda row: row["coverage"])


def means_over_benchmarks(job: Job) -> Rows:
    """Return coverage of means over benchmarks of unlike sizes and difficulties."""
    known = list(difficulties(job).values())
    for sizes in ((8, 198), (30, 30), (8, 30, 198), (30, 30, 40, 198), (60, 60, 60, 60)):
        for start in range(0, len(known), 2):
            mixed = [known[(start + place) % len(known)] for place in range(len(sizes))]
            name = f"{plus(sizes)}, difficulties from {start}"
            rng = job.random(name)
            benchmarks = [drawn_estimates(*part, rng, job.rounds) for part in zip(mixed, sizes, strict=True)]
            means = [mean_over_benchmarks(estimates) for estimates in zip(*benchmarks, strict=True)]
            truth = np.mean([difficulty.mean for difficulty in mixed])
            yield {"design": name, "coverage": share([mean.low <= truth <= mean.high for mean in means])}


def drawn_estimates(difficulty: Difficulty, size: int, rng: np.random.Generator, rounds: int) -> list[Estimate]:
    """Draw one sample of each problem of a benchmark, so many times."""
    grades = rng.binomial(1, difficulty.draw(rng, (rounds, size))).astype(float)
    rows = zip(grades, *interval(grades), strict=True)
    return [from_problem_means(means, [1] * size, low, high) for means, low, high in rows]


# -- maps of which only averages are known -----------------------------------------------------------------------------


def permutation(job: Job) -> Rows:
    """Return how often an axis that does nothing has an effect on 4 and on 8 maps of averages."""
    for name, design, rng in job.of_kind("maps"):
        is_whole = len(design.rows) == np.prod(design.shape)
        if COLUMNS not in design.null or not is_whole:
            continue
        for count in (4, 8):
            found = []
            for number in range(job.rounds):
                cells = [weights(design.strata) @ design.draw(rng) for _ in range(count)]
                # Maps are printed with a digit behind the percent.
                values = np.round(np.array(cells), 3).reshape(count, *design.shape)
                effects, _ = permute_benchmarks(values, draws=DRAWS, seed=number)
                found.append(min(effect.p for effect in effects) <= LEVEL)
            kind = "exchangeable" if COLUMNS in design.exchangeable else "unlike"
            yield {"design": f"{count} maps: {name}", f"false_alarm_{kind}": share(found)}


# -- power -------------------------------------------------------------------------------------------------------------

U_SHAPED = beta(0.5, 0.6)
STRUCTURES = {
    "independent": Copies(),
    "70 % alike": Copies(0.7),
    "columns alike": Copies(0.0, 0.0, 0.9),
    "rows alike": Copies(0.0, 0.9),
    "trunk": Trunk(),
}
MEASURES_OF_MAPS = ("omnibus", "power", "coverage", "contradictions")
MEASURES_OF_SEQUENCES = ("recommended", "kept_but_breaks")
HARMLESS_FIRST = (SAME,) * 8 + (collapse(0.1),) * 12


def power(job: Job) -> Rows:
    """Return how often one level of five that loses is found, and a setting recommended where 8 of 20 lose nothing."""
    for problems, points in ((60, 0.067), (240, 0.028)):
        for name, structure, rng in job.each(STRUCTURES):
            change = ((None, 0), loss(points, U_SHAPED.mean))
            design = Maps((4, 5), (problems,), 5, U_SHAPED, structure, (change,))
            row = simulate_maps(design, rng, job.rounds)
            title = f"{problems} x 5, a column loses {100 * points:g} points, {name}"
            yield {"design": title, **{key: row[key] for key in MEASURES_OF_MAPS}}
    for sizes, samples in (((30, 30), 5), ((240,), 1), ((240,), 5), ((30, 30, 40, 198), 5)):
        for name, structure in STRUCTURES.items():
            design = Sequences(sizes, samples, MARGIN, EASY_AND_HARD, HARMLESS_FIRST, structure)
            title = f"{plus(sizes)} x {samples}, 8 of 20 lose nothing, {name}"
            row = simulate_sequences(design, job.random(title), job.rounds)
            yield {"design": title, **{key: row[key] for key in MEASURES_OF_SEQUENCES}}


# -- the document ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the document: its rounds, and the measures of which the lowest or highest is the worst."""

    rows: Callable[[Job], Rows]
    rounds: int
    lowest: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()

    def worst(self, rows: Sequence[Row]) -> dict[str, Row]:
        """Return the worst value of each measure with the name of its design."""
        found = {}
        for kind, pick, measures in (("lowest", min, self.lowest), ("highest", max, self.highest)):
            for measure in measures:
                known = [row for row in rows if row.get(measure) is not None]
                if known:
                    row = pick(known, key=itemgetter(measure))
                    found[f"{kind} {measure}"] = {"value": row[measure], "design": row["design"]}
        return found


FALSE_ALARMS = ("false_alarm_exchangeable", "false_alarm_trunk", "false_alarm_unlike")
WRONG_MARKS = ("kept_but_breaks", "broken_but_keeps")
ONE_SIDED = ("truth_above", "truth_below", "width_over_normal", "contradictions")
PARTS = {
    "exact": Part(exact, 1, highest=("over_level", "error")),
    "claims": Part(claims, 2_000),
    "traces": Part(traces, 1, highest=("over_level", "error")),
    "traces_of_three_values": Part(traces_of_three_values, 6_000, highest=("error",)),
    "recommendation": Part(recommendation, 1, highest=("error",)),
    "scan": Part(scan, 1_500, highest=("error",)),
    "two_settings": Part(of_kind("two settings", simulate_differences), 6_000, ("coverage",), ONE_SIDED),
    "policies": Part(of_kind("policies", simulate_differences), 3_000, ("coverage",), ONE_SIDED),
    "maps": Part(of_kind("maps", simulate_maps), 400, ("coverage", "power"), (*FALSE_ALARMS, "contradictions")),
    "sequences": Part(of_kind("sequences", simulate_sequences), 300, highest=WRONG_MARKS),
    "depths": Part(of_kind("depths", simulate_depths), 1_000, ("coverage",), ("without_end",)),
    "prices": Part(of_kind("prices", simulate_prices), 1_000, ("coverage", "nothing_false_said"), ("too_few_to_say",)),
    "needed": Part(needed, 600, ("power",), ("power",)),
    "pass_at_1": Part(pass_at_1, 3_000, ("coverage",)),
    "pass_at_k": Part(pass_at_k, 3_000, ("coverage",)),
    "means_over_benchmarks": Part(means_over_benchmarks, 1_000, ("coverage",)),
    "permutation": Part(permutation, 200, highest=("false_alarm_exchangeable", "false_alarm_unlike")),
    "power": Part(power, 100, ("power",), ("kept_but_breaks",)),
}


def main() -> None:
    only = {"nargs": "*", "choices": list(PARTS), "default": list(PARTS)}
    options = arguments(__doc__, quick=False, final=False, seed=0, designs=int, design="", rounds=int, only=only)
    document = {}
    for name in options.only:
        part = PARTS[name]
        rounds = options.rounds or (max(part.rounds // 30, 20) if options.quick else part.rounds)
        job = Job(KEPT if options.final else TUNING, rounds, options.seed, options.designs, options.design)
        began = time.process_time()
        rows = list(part.rows(job))
        seconds = time.process_time() - began
        document[name] = rounded({"rounds": rounds, "seconds": seconds, "worst": part.worst(rows), "rows": rows})
        if options.out is not None:
            keep({name: document[name]}, options.out, "final" if options.final else "tuning")
    print(json.dumps(document))


def rounded(value: Any) -> Any:
    """Round all numbers of a document to 4 digits after the point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def keep(document: Mapping[str, Any], path: Path, kind: str) -> None:
    """Put the parts in place of those in a file; each row has a line."""
    stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
    stored.setdefault(kind, {}).update(document)
    path.write_text(json.dumps(stored).replace('{"design"', '\n{"design"') + "\n", "utf-8")


if __name__ == "__main__":
    main()
