"""Files of answers, and the verdict on them in twenty lines of numpy, which share nothing with the package."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def write_answers(path: Path, tasks: Mapping[str, Floats], **columns: Any) -> Path:
    """Scores [problems, samples] by task as a file, CSV or JSON lines by its suffix; further columns are constants."""
    rows = [
        {"benchmark": task, "problem": f"p{problem}", "sample": sample, "score": float(score), **columns}
        for task, scores in tasks.items()
        for (problem, sample), score in np.ndenumerate(scores)
    ]
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def numpy_limit(values: Floats, level: float, draws: int = 200_000) -> float:
    """The upper limit of the mean of values in [-1, 1]: the quantile of their mean and a 1 under Dirichlet weights."""
    generator = np.random.default_rng(5)
    levels, counts = np.unique(np.append(values, 1.0), return_counts=True)
    # The weights of equal values add up: Dirichlet weights are gamma variables over their sum.
    gammas = generator.gamma(counts, size=(draws, len(levels)))
    means = gammas @ levels / gammas.sum(1)
    return float(np.quantile(means, 1 - level))


def numpy_verdict(before: Floats, after: Floats, margin: float, unit: str) -> tuple[str, float, float]:
    """The verdict on one task, with its lower and upper limit; `unit` is `pair` or `problem`."""
    losses = before - after
    values = losses.ravel() if unit == "pair" else losses.mean(1)
    high = numpy_limit(values, 0.05)
    low = -numpy_limit(-values, 0.05)
    verdict = "cannot tell"
    if high <= margin:
        verdict = "keeps"
    elif low > margin:
        verdict = "loses"
    return verdict, low, high
