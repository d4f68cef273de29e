"""What a screen of all problems is worth beside decoding few of them: three corrections of a mean loss.

    python bench/control_variate.py --out bench/results/control_variate.json

A loss is known of `decoded` of 240 problems, what a screen kept of the answer of all. `informed` is how much the screen
says. `plain` is the interval of the decoded problems alone. `ppi` corrects their mean by the screen's with the weight
of least variance and has Student's interval (Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453); `bounded` has the
limits of bounded_mean around the same residuals; `strata` weighs quarters of the problems by their screen equally, with
the limits of bounded_mean. For each: coverage of 95 % intervals, and `worth`, by how many times fewer problems give
the width of `plain`. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from keeping import keep
from kvatlas.stats.estimates.bounded_mean import Floats, Z, interval

PROBLEMS = 240
#: Parameters of the Beta distribution of kept shares, and the share of problems lost whatever was kept.
KINDS = {"even": ((2.0, 1.0), 0.0), "saturated": ((4.0, 0.5), 0.0), "rare collapse": ((30.0, 1.0), 0.03)}
Limits = tuple[Floats, Floats]


def plain(values: Floats, seen: Floats, screened: Floats) -> Limits:
    return interval(values, -1.0, 1.0)


def _weight(values: Floats, seen: Floats) -> Floats:
    """[rounds, 1]: the screen's weight of least variance."""
    off = seen - seen.mean(1, keepdims=True)
    return np.asarray((off * values).sum(1, keepdims=True) / np.maximum((off**2).sum(1, keepdims=True), 1e-12))


def ppi(values: Floats, seen: Floats, screened: Floats) -> Limits:
    count, weight = values.shape[1], _weight(values, seen)
    value = values.mean(1) + weight[:, 0] * (screened.mean(1) - seen.mean(1))
    left = (values - weight * seen).var(1, ddof=1) * (count - 1) / (count - 2) / count
    more = weight[:, 0] ** 2 * screened.var(1, ddof=1) / PROBLEMS
    half = stats.t.ppf(0.975, count - 2) * np.sqrt(left + more)
    return value - half, value + half


def bounded(values: Floats, seen: Floats, screened: Floats) -> Limits:
    weight, centre = _weight(values, seen), screened.mean(1, keepdims=True)
    residuals, ends = values - weight * (seen - centre), -weight * (screened - centre)
    low, high = interval(residuals, -1 + ends.min(1), 1 + ends.max(1))
    return _wider(residuals.mean(1), low, high, weight[:, 0] * screened.std(1, ddof=1))


def strata(values: Floats, seen: Floats, screened: Floats) -> Limits:
    edges = np.quantile(screened, (0.25, 0.5, 0.75), axis=1).T
    quarter = (seen[:, :, None] > edges[:, None]).sum(2)
    result = np.empty((len(values), 4))
    for row, (own, of) in enumerate(zip(values, quarter, strict=True)):
        means = np.array([own[of == stratum].mean() for stratum in np.unique(of)])
        result[row] = (
            means.mean(),
            *map(float, interval(own, -1.0, 1.0, strata=np.unique(of, return_inverse=True)[1])),
            means.std(),
        )
    return _wider(*result.T)


def _wider(value: Floats, low: Floats, high: Floats, spread: Floats) -> Limits:
    """Limits that also allow for the spread of what the screen explains over all problems."""
    more = Z * spread / np.sqrt(PROBLEMS)
    return value - np.hypot(value - low, more), value + np.hypot(high - value, more)


METHODS = (plain, ppi, bounded, strata)


def measured(kind: str, decoded: int, informed: float, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    shape, collapse = KINDS[kind]
    truth = -(1 - (1 - collapse) * shape[0] / sum(shape))
    kept = rng.beta(*shape, (rounds, PROBLEMS))
    lost = (rng.random(kept.shape) > kept) | (rng.random(kept.shape) < collapse)
    screened = informed * kept + (1 - informed) * rng.random(kept.shape)
    results = [method(-lost[:, :decoded].astype(float), screened[:, :decoded], screened) for method in METHODS]
    usual = (results[0][1] - results[0][0]).mean()
    row: dict[str, Any] = {"kind": kind, "decoded": decoded, "informed": informed}
    for method, (low, high) in zip(METHODS, results, strict=True):
        covered, worth = ((low <= truth) & (truth <= high)).mean(), (usual / (high - low).mean()) ** 2
        row[method.__name__] = {"coverage": round(float(covered), 4), "worth": round(float(worth), 3)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path, help="keep the document in this file too")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    cases = itertools.product(KINDS, (40, 80), (0.0, 0.95))
    rows = [measured(*case, options.rounds, rng) for case in cases]
    keep({"bench": "control_variate", "problems": PROBLEMS, "rounds": options.rounds, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
