"""Metrics of a run: what each trace is graded by, and pass@k and maj@k over the samples of a problem."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvatlas.core import Estimate, KvatlasError
from kvatlas.stats.estimates import from_problem_means
from kvatlas.stats.numerics.arrays import Floats, Ints, means_of_clusters
from kvatlas.stats.numerics.bounded import interval

if TYPE_CHECKING:
    from kvatlas.results.manifest import Manifest

#: The vote of all right answers together: a grader takes them as equal however they are written.
RIGHT = "\0right"
#: What every trace is graded by, in [0, 1]. Truncated and answerless traces are not correct. Beside these: pass@K and
#: maj@K (`Rule`), and what the run's benchmarks measure themselves.
METRICS = ("pass@1", "progress")


def usual_metric(manifest: Manifest) -> str:
    """Return the metric that maps of a run show by default.

    Imported answers with graded scores (0.7) are neither right nor wrong: their scores are the metric, beside other
    answers the progress, which every trace has.
    """
    imported = manifest.provenance.get("imported", {})
    graded = {source["metric"] for source in imported.values() if source.get("metric")}
    if not graded:
        return "pass@1"
    metrics = {imported.get(f"{cell.model} {cell.benchmark}", {}).get("metric", "") for cell in manifest.expected}
    return graded.pop() if metrics == graded and len(graded) == 1 else "progress"


@dataclass(frozen=True)
class Rule:
    """A metric over several samples: `kind` is pass or maj, and `k` samples count."""

    kind: str
    k: int

    def values(self, grades: Sequence[Sequence[float]], votes: Sequence[Sequence[Hashable]]) -> Floats:
        """Return [problems]: the share of the subsets of k samples that hold a right one, or whose majority is right.

        Source: Chen et al. (2021), arXiv 2107.03374, section 2.1, equation 1. Raises KvatlasError where a problem has
        fewer than k samples.
        """
        k = self.k
        fewest = min((len(problem_grades) for problem_grades in grades), default=0)
        if fewest < k:
            raise KvatlasError(
                f"{self.kind}@{k} needs {k} samples of every problem; the fewest that one has is {fewest}."
            )
        if self.kind == "maj":
            return np.array([majority(samples, k) for samples in votes])

        values = []
        for problem_grades in grades:
            samples = len(problem_grades)
            right = round(math.fsum(problem_grades))
            # The share of the subsets of k samples that hold no right one, taken from 1.
            values.append(1 - math.comb(samples - right, k) / math.comb(samples, k))
        return np.array(values)

    def estimate(
        self, grades: Sequence[Sequence[float]], votes: Sequence[Sequence[Hashable]], clusters: Ints | None = None
    ) -> Estimate:
        """Return the metric with its interval, by clusters of problems if there are some.

        Raises KvatlasError where a problem has fewer than k samples.
        """
        means = means_of_clusters(self.values(grades, votes), clusters)
        samples = [len(problem_grades) for problem_grades in grades]
        return from_problem_means(means, samples, *interval(means))


def rule(metric: str) -> Rule | None:
    """Return the rule of `pass@K` or `maj@K`; None for any other name, `pass@1` included."""
    match = re.fullmatch(r"(pass|maj)@([1-9]\d{0,5})", metric)
    return None if match is None or metric == "pass@1" else Rule(match[1], int(match[2]))


def majority(votes: Sequence[Hashable], k: int) -> float:
    """Return the share of the subsets of k votes in which `RIGHT` has most votes; a tie among t answers counts 1 / t.

    A sample without an answer (None) has no vote; a subset without any vote is wrong. Subsets are counted by generating
    functions in two powers: the votes used, and the answers that are tied with the right one.

    Source: Wang et al. (2023), arXiv 2203.11171.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    right = counts.pop(RIGHT, 0)
    silent = sum(vote is None for vote in votes)

    won = 0.0
    # The right answer has `right_votes` in a subset, so no other one may have more.
    for right_votes in range(1, min(right, k) + 1):
        ways = {(0, 0): math.comb(right, right_votes)}
        for votes_of_answer in counts.values():
            most = min(votes_of_answer, right_votes)
            terms = [(used, math.comb(votes_of_answer, used), used == right_votes) for used in range(most + 1)]
            ways = _multiplied(ways, terms)
        ways = _multiplied(ways, [(used, math.comb(silent, used), False) for used in range(silent + 1)])
        won += sum(count / (ties + 1) for (used, ties), count in ways.items() if used == k - right_votes)
    return won / math.comb(len(votes), k)


def _multiplied(
    ways: Mapping[tuple[int, int], int], terms: Sequence[tuple[int, int, bool]]
) -> dict[tuple[int, int], int]:
    """Return the product of a generating function and another one of `terms`: votes, choices, and whether it ties."""
    product: Counter[tuple[int, int]] = Counter()
    for (used, ties), count in ways.items():
        for more, choices, is_tied in terms:
            product[used + more, ties + is_tied] += count * choices
    return dict(product)
