"""Measure how often `kvatlas gate` errs, and how often it can tell, on designs with a known loss, through files.

    python bench/gate_errors.py --out bench/results/gate_errors.json

Each round writes two files of answers and reads the verdict of `kvatlas.gate`. The designs are those on which limits
of losses were found wanting: a share of the problems collapses altogether, kinds of problems that gain and lose, small
tasks beside large ones, answers that fail here and there. `loss` is the true mean loss of the claim: of the population
for problems like these, of the drawn problems for these problems. A verdict is wrong if it is "keeps" and the loss is
above the margin, or "loses" and it is not.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvatlas
from common import arguments, keep

MARGIN = 0.05
Chances = Callable[[np.random.Generator, int], tuple[Any, Any]]


def collapse(share: float, easy: float = 0.6) -> Chances:
    """A share of the problems is always right before and never after; the others do not change."""

    def draw(generator: np.random.Generator, problems: int) -> tuple[Any, Any]:
        kind = generator.random(problems)
        before = np.where(kind < easy, 1.0, 0.0)
        return before, np.where(kind < share, 0.0, before)

    return draw


def soft(share: float) -> Chances:
    """As audit/differences.py: right in 95 or 5 % of samples; a share of the easy ones falls to 2 %."""

    def draw(generator: np.random.Generator, problems: int) -> tuple[Any, Any]:
        kind = generator.random(problems)
        before = np.where(kind < 0.6, 0.95, 0.05)
        return before, np.where(kind < share, 0.02, before)

    return draw


def lose_and_gain(share: float, net: float) -> Chances:
    """Whole problems are gained and lost, more of them lost by `net`."""

    def draw(generator: np.random.Generator, problems: int) -> tuple[Any, Any]:
        kind = generator.random(problems)
        before = np.where(kind < 0.5 + share / 2, 1.0, 0.0)
        after = np.where(kind < share + net, 0.0, before)
        return before, np.where(kind > 1 - share, 1.0, after)

    return draw


def everywhere(loss: float) -> Chances:
    """All problems are right in 80 % of samples before, and in less after."""
    return lambda _, problems: (np.full(problems, 0.8), np.full(problems, 0.8 - loss))


#: Name, chances of right answers, sizes of the tasks, samples, and the loss of the population.
DESIGNS: list[tuple[str, Chances, tuple[int, ...], int, float]] = [
    ("collapse just above the margin", collapse(0.0501), (60,), 1, 0.0501),
    ("collapse just above the margin", collapse(0.0501), (60,), 5, 0.0501),
    ("collapse just above the margin", collapse(0.0501), (240,), 1, 0.0501),
    ("collapse just above the margin, two tasks", collapse(0.0501), (30, 60), 4, 0.0501),
    ("collapse just above the margin, unlike tasks", collapse(0.0501), (8, 198), 1, 0.0501),
    ("soft collapse just above the margin", soft(0.05392), (120,), 5, 0.05015),
    ("whole problems lost and gained", lose_and_gain(0.05, 0.0501), (120,), 1, 0.0501),
    ("a little everywhere, just above the margin", everywhere(0.0501), (60,), 8, 0.0501),
    ("a little everywhere, just above the margin", everywhere(0.0501), (30, 30), 4, 0.0501),
    ("just below the margin", everywhere(0.0499), (60,), 8, 0.0499),
    ("collapse just below the margin", collapse(0.0499), (120,), 1, 0.0499),
    ("nothing lost", everywhere(0.0), (60,), 1, 0.0),
    ("nothing lost", everywhere(0.0), (60,), 8, 0.0),
    ("nothing lost", everywhere(0.0), (400,), 1, 0.0),
    ("nothing lost, two tasks", everywhere(0.0), (60, 60), 8, 0.0),
    ("twelve points lost", everywhere(0.12), (60,), 8, 0.12),
    ("twelve points lost", everywhere(0.12), (400,), 1, 0.12),
]


def write(path: Path, tasks: list[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["benchmark", "problem", "sample", "correct", "side"])
        for task, right in enumerate(tasks):
            for (problem, sample), value in np.ndenumerate(right):
                writer.writerow([f"task{task}", f"p{problem}", sample, int(value), path.stem])


def verdict(generator: np.random.Generator, chances: Chances, sizes: tuple[int, ...], samples: int, claim: str,
            folder: Path) -> tuple[str, float]:  # fmt: skip
    """One comparison: its verdict, and the true loss of these very problems."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    losses = []
    for size in sizes:
        drawn = chances(generator, size)
        losses.append(float(np.mean(drawn[0] - drawn[1])))
        for side, chance in zip(sides, drawn, strict=True):
            side.append(generator.random((size, samples)) < np.asarray(chance)[:, None])
    paths = [folder / "before.csv", folder / "after.csv"]
    for path, side in zip(paths, sides, strict=True):
        write(path, side)
    result = kvatlas.gate(*paths, lose_at_most=100 * MARGIN, claim=claim)
    return result.verdict, float(np.mean(losses))


def measure(rounds: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for name, chances, sizes, samples, population in DESIGNS:
        for claim in ("these_problems", "problems_like_these"):
            generator = np.random.default_rng(seed)
            counts: Counter[str] = Counter()
            wrong = 0
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(rounds):
                    said, of_problems = verdict(generator, chances, sizes, samples, claim, Path(folder))
                    loss = of_problems if claim == "these_problems" else population
                    counts[said] += 1
                    wrong += (said == "keeps" and loss > MARGIN) or (said == "loses" and loss <= MARGIN)
            row = {"design": name, "problems": list(sizes), "samples": samples, "claim": claim, "loss": population}
            row |= {word: counts[word] / rounds for word in ("keeps", "loses", "cannot tell")}
            rows.append({**row, "wrong": wrong / rounds})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure all designs."""
    options = arguments(__doc__, rounds=120, seed=1)
    designs = measure(options.rounds, options.seed)
    most_wrong = max(row["wrong"] for row in designs)
    keep(options, program="gate_errors", margin=100 * MARGIN, designs=designs, most_wrong=most_wrong)


if __name__ == "__main__":
    main()
