"""Errors and power of limits where the full cache is sampled more often than the settings.

A unit is a trace of a setting against the mean of some traces of the full cache of its own. Each limit errs where it
lies below the true loss; 5 % are promised. Of few units the error is an exact sum over all outcomes, of more a
simulation. The designs were written before the code that pairs such traces.

    python bench/full_samples.py --out bench/results/full_samples.json
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from common import arguments, keep
from kvatlas.stats.numerics.arrays import LEVEL, normal_quantile
from kvatlas.stats.numerics.bounded import upper_limit
from kvatlas.stats.paired import folded_samples

Row = dict[str, Any]
#: Traces of the full cache for each trace of a setting.
TIMES = (1, 2, 4)
#: A true loss lies this far beyond a limit.
_BEYOND = 1e-9


def exact_errors(
    units: tuple[int, ...] = (8, 12, 16, 24), chances: tuple[float, ...] = (1.0, 0.97, 0.8, 0.5)
) -> Iterator[Row]:
    """Yield the largest exact chance that a limit errs, by number of units and chance of the full cache.

    All units are alike: two traces of the full cache and one of the setting, whose chance puts the true loss just above
    one of the limits that can come out.
    """
    values = np.array([1.0, 0.5, 0.0, -0.5, -1.0])
    for count, full in itertools.product(units, chances):
        outcomes = [
            (first, second, third, fourth, count - first - second - third - fourth)
            for first in range(count + 1)
            for second in range(count + 1 - first)
            for third in range(count + 1 - first - second)
            for fourth in range(count + 1 - first - second - third)
        ]
        numbers = np.array(outcomes)
        rows = np.array([np.repeat(values, row) for row in outcomes])
        limits = upper_limit(rows, -1.0, 1.0, normal_quantile(LEVEL))
        orders = [math.lgamma(count + 1) - sum(math.lgamma(number + 1) for number in row) for row in outcomes]
        worst: Row = {"error": -1.0}
        for loss in np.unique(np.round(limits, 6)):
            chance = full - loss - _BEYOND
            if not 0 <= chance <= 1:
                continue
            right = np.array([full**2, 2 * full * (1 - full), (1 - full) ** 2])
            of_value = np.zeros(5)
            of_value[:3] += right * (1 - chance)
            of_value[2:] += right * chance
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.where(numbers > 0, numbers * np.log(of_value), 0.0).sum(1)
            error = float(np.exp(logs + orders)[limits < loss].sum())
            if error > worst["error"]:
                design = f"{count} units, full cache right in {100 * full:g} %"
                worst = {"design": design, "error": error, "true_loss": float(loss)}
        yield worst


def designs() -> Iterator[tuple[str, np.ndarray, int, str]]:
    """Yield name, chances [full cache and setting, problems], samples, and the coupling of random numbers."""
    loss = 0.03
    for problems, samples in ((60, 4), (30, 16), (100, 1)):
        size = f"{problems} x {samples}"
        alike = np.full(problems, 1.0)
        half = np.full(problems, 0.5)
        yield f"full cache always right, {size}", np.stack([alike, alike - loss]), samples, "independent"
        yield (
            f"full cache at .97, {size}",
            np.stack([alike - 0.03, alike - 0.03 - loss]),
            samples,
            "independent",
        )
        for coupling in ("independent", "common", "opposite"):
            yield f"full cache at .5, {coupling}, {size}", np.stack([half, half - loss]), samples, coupling
        kinds = np.where(np.arange(problems) < problems // 10, 10 * loss, 0.0)
        yield f"a tenth loses all of it, {size}", np.stack([alike, 1 - kinds]), samples, "independent"
        mixed = np.where(np.arange(problems) < problems // 2, 1.0, 0.5)
        lost = np.where(np.arange(problems) < problems // 2, 2 * loss, 0.0)
        yield f"sure problems lose, {size}", np.stack([mixed, mixed - lost]), samples, "independent"
        gains = np.where(np.arange(problems) % 2, 0.3, -0.3 + 2 * loss)
        yield (
            f"half gain, half lose, {size}",
            np.stack([half + 0.1, half + 0.1 - gains]),
            samples,
            "independent",
        )


def simulated(rounds: int, seed: int) -> Iterator[Row]:
    """Yield the share of rounds in which a limit lies below the true loss, and the power at no loss and margin 5."""
    for number, (name, chances, samples, coupling) in enumerate(designs()):
        loss = float((chances[0] - chances[1]).mean())
        for times in (*TIMES, 1.5):
            full_samples = math.floor(samples * times)
            if full_samples == samples and times != 1:
                continue
            rng = np.random.default_rng([seed, number, full_samples])
            errors = 0
            for start in range(0, rounds, 250):
                count = min(250, rounds - start)
                lost = _lost(rng, chances, samples, full_samples, coupling, count)
                limits = upper_limit(lost.reshape(count, -1), -1.0, 1.0, normal_quantile(LEVEL))
                errors += int((limits < loss - _BEYOND).sum())
            share = errors / rounds
            error = math.sqrt(max(share, 1 / rounds) * (1 - share) / rounds)
            design = f"{name}, {full_samples} of the full cache"
            yield {"design": design, "times": full_samples / samples, "error": share, "standard_error": error}


def powers(rounds: int, seed: int) -> Iterator[Row]:
    """Yield the chance to prove a setting that loses nothing, where draws are independent and where most are common."""
    for problems, samples, margin in ((30, 16, 0.03), (60, 4, 0.05), (60, 16, 0.03), (240, 1, 0.05)):
        for coupling in ("independent", "common"):
            chances = np.tile(np.random.default_rng(seed).random(problems), (2, 1))
            row: Row = {"design": f"{problems} x {samples}, margin {100 * margin:g}, {coupling}"}
            for times in TIMES:
                rng = np.random.default_rng([seed, problems, samples, times])
                lost = _lost(rng, chances, samples, samples * times, coupling, rounds)
                limits = upper_limit(lost.reshape(rounds, -1), -1.0, 1.0, normal_quantile(LEVEL))
                row[f"power_{times}"] = float((limits <= margin).mean())
            yield row


def _lost(
    rng: np.random.Generator, chances: np.ndarray, samples: int, full_samples: int, coupling: str, rounds: int
) -> np.ndarray:
    """Return the losses [rounds, problems, samples] of the units.

    With common random numbers 6 in 10 traces of the setting equal the full cache's of the same sample.
    """
    problems = chances.shape[1]
    of_full = rng.random((rounds, problems, full_samples))
    of_setting = rng.random((rounds, problems, samples))
    if coupling == "common":
        of_setting = np.where(rng.random(of_setting.shape) < 0.6, of_full[..., :samples], of_setting)
    if coupling == "opposite":
        of_setting = 1 - of_full[..., :samples]
    full = (of_full < chances[0][:, None]).astype(float)
    setting = (of_setting < chances[1][:, None]).astype(float)
    return folded_samples(full, samples) - setting


def main() -> None:
    """Write the errors and the powers."""
    options = arguments(__doc__, rounds=4000, seed=0)
    keep(
        options,
        rounds=options.rounds,
        exact=list(exact_errors()),
        simulated=list(simulated(options.rounds, options.seed)),
        power=list(powers(options.rounds // 4, options.seed)),
    )


if __name__ == "__main__":
    main()
