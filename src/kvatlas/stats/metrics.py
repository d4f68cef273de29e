"""Metrics of a run: what each trace is graded by, and pass@k over the samples of a problem."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvatlas.core import Estimate, KvatlasError
from kvatlas.results.manifest import Manifest
from kvatlas.stats.intervals import Floats, from_problem_means

#: What every trace is graded by, in [0, 1]. Truncated and answerless traces are not correct. Beside these: pass@K, and
#: what the run's benchmarks measure themselves.
METRICS = ("pass@1", "progress")
#: What maps of a screen show of each setting and trace (sweeps/screen.py).
SCREENED = ("unchanged", "agreed", "top1", "likeness", "answer_kept")
#: What settings cost, which `map` draws (figures/panels.py).
COSTS = ("mean_kv_tokens", "peak_kv_tokens", "kv_memory", "seconds", "output_tokens", "truncated")


def usual_metric(manifest: Manifest) -> str:
    """Return the metric that maps of a run show by default."""
    return SCREENED[0] if manifest.screened else "pass@1"


def k_of(metric: str) -> int | None:
    """The K of `pass@K`; None for any other name, `pass@1` included."""
    match = re.fullmatch(r"pass@([1-9]\d{0,5})", metric)
    return None if match is None or metric == "pass@1" else int(match[1])


def pass_at_k(grades: Mapping[Any, Sequence[float]], k: int) -> Floats:
    """[problems]: the share of the subsets of k samples of each problem that hold a right one, unbiased for pass@k.

    Source: Chen et al. (2021), arXiv 2107.03374, section 2.1, equation 1. Raises KvatlasError where a problem has fewer
    than k samples.
    """
    fewest = min((len(samples) for samples in grades.values()), default=0)
    if fewest < k:
        raise KvatlasError(f"pass@{k} needs {k} samples of every problem; the fewest that one has is {fewest}.")
    counts = [(len(samples), round(math.fsum(samples))) for samples in grades.values()]
    return np.array([1 - math.comb(samples - right, k) / math.comb(samples, k) for samples, right in counts])


def estimate_at_k(grades: Mapping[str, Sequence[float]], k: int) -> Estimate:
    """Pass@k with its interval; KvatlasError where a problem has fewer than k samples."""
    # A mean over subsets of k samples varies at most like the mean over the disjoint ones (Hoeffding 1963).
    groups = [len(samples) // k for samples in grades.values()]
    counts = {len(samples) for samples in grades.values()}
    samples = counts.pop() if len(counts) == 1 else None
    return replace(from_problem_means(pass_at_k(grades, k), groups), samples=samples)
