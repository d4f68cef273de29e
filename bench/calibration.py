"""Do the limits keep their promises? Exact errors, and simulations of one setting with known truth.

    python bench/calibration.py [--quick] [--only PART ...] [--rounds N] [--seed N] [--out FILE]

Prints one JSON document: each part has rows, and the `worst` row by each of its measures. With `--out` the parts are
kept in that file too, under "final"; bench/results/calibration.json holds whole runs, and other parts, which programs
of commit 2219da46 measured. Whole runs are judged by chain_errors.py.
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
from kvatlas.stats.numerics.arrays import LEVEL, normal_quantile, weights
from kvatlas.stats.numerics.bounded import upper_limit

MARGIN = 0.03
Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Job:
    """The number of rounds of each design, and the seed."""

    rounds: int
    seed: int

    def each(self, designs: Mapping[str, Any]) -> Iterator[tuple[str, Any, np.random.Generator]]:
        """Yield the name of each design, the design, and random numbers of its own."""
        for name, design in designs.items():
            yield name, design, self.random(name)

    def random(self, name: str) -> np.random.Generator:
        """Return random numbers that depend on the seed and the name alone."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


def share(hits: Any) -> float:
    return float(np.mean(hits))


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


# -- the document ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the document: its rounds, and the measures of which the highest is the worst."""

    rows: Callable[[Job], Rows]
    rounds: int
    highest: tuple[str, ...] = ()

    def worst(self, rows: Sequence[Row]) -> dict[str, Row]:
        """Return the worst value of each measure with the name of its design."""
        found = {}
        for measure in self.highest:
            row = max(rows, key=itemgetter(measure))
            found[f"highest {measure}"] = {"value": row[measure], "design": row["design"]}
        return found


PARTS = {
    "exact": Part(exact, 1, highest=("over_level", "error")),
    "claims": Part(claims, 2_000),
    "traces": Part(traces, 1, highest=("over_level", "error")),
    "traces_of_three_values": Part(traces_of_three_values, 6_000, highest=("error",)),
    "recommendation": Part(recommendation, 1, highest=("error",)),
    "scan": Part(scan, 1_500, highest=("error",)),
}


def main() -> None:
    only = {"nargs": "*", "choices": list(PARTS), "default": list(PARTS)}
    options = arguments(__doc__, quick=False, seed=0, rounds=int, only=only)
    document = {}
    for name in options.only:
        part = PARTS[name]
        rounds = options.rounds or (max(part.rounds // 30, 20) if options.quick else part.rounds)
        job = Job(rounds, options.seed)
        began = time.process_time()
        rows = list(part.rows(job))
        seconds = time.process_time() - began
        document[name] = rounded({"rounds": rounds, "seconds": seconds, "worst": part.worst(rows), "rows": rows})
        if options.out is not None:
            keep({name: document[name]}, options.out)
    print(json.dumps(document))


def rounded(value: Any) -> Any:
    """Round all numbers of a document to 4 digits after the point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def keep(document: Mapping[str, Any], path: Path) -> None:
    """Put the parts in place of those in a file; each row has a line."""
    stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
    stored.setdefault("final", {}).update(document)
    path.write_text(json.dumps(stored).replace('{"design"', '\n{"design"') + "\n", "utf-8")


if __name__ == "__main__":
    main()
