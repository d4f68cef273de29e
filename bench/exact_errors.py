"""Exact errors of limits and recommendations, and a search for three-point distributions on which limits err.

A loss is 1 on problems that collapse and -gain on all others. A limit errs where it lies below the true loss, so the
hardest true loss lies just above one of the limits that can come out. Part of calibration.py.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from kvatlas.stats.numerics.against_reference import losses_of_units
from kvatlas.stats.numerics.arrays import LEVEL, Floats, normal_quantile, strata_of_sizes
from kvatlas.stats.numerics.bounded import upper_limit
from kvatlas.stats.numerics.units import units_of_traces

Row = dict[str, Any]

PROBLEMS = (8, 12, 20, 30, 40, 60, 90, 120, 240, 600)
LEVELS = (0.05, 0.025, 0.0125)
GAINS = (0.0, 0.03, 0.1, 0.5, 1.0)
MARGINS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
#: Numbers of sequences of settings, one for each policy.
SEQUENCES = (1, 2, 3)
#: Sizes of benchmarks with the largest numbers of collapsed problems that are looked at in each.
SIZES = {
    (30, 30): (30, 30),
    (8, 198): (8, 60),
    (12, 60): (12, 45),
    (20, 40): (20, 35),
    (30, 30, 40, 198): (9, 6, 6, 9),
}
#: Ratios of the collapsing shares of benchmarks, and true losses for each, that are looked at.
_DIRECTIONS = 150
_TRUE_LOSSES = 60
#: How far beyond a limit or margin a true loss lies.
_BEYOND = 1e-9


def limit_errors(problems: Sequence[int] = PROBLEMS, levels: Sequence[float] = LEVELS) -> Iterator[Row]:
    """Yield for each size of one benchmark and each level the largest chance that a limit errs."""
    for size, level in itertools.product(problems, levels):
        rows = [_limit_error(size, level, gain) for gain in GAINS]
        yield max(rows, key=lambda row: row["error"])


def _limit_error(size: int, level: float, gain: float) -> Row:
    collapsed = np.arange(size)
    lost = np.where(np.arange(size) < collapsed[:, None], 1.0, -gain)
    limits = upper_limit(lost, -1.0, 1.0, normal_quantile(level))
    shares = np.clip((limits + gain) / (1 + gain) + _BEYOND, 0, 1)
    errors = stats.binom.cdf(collapsed, size, shares)
    worst = int(errors.argmax())
    error = float(errors[worst])
    return {
        "design": f"{size} problems, level {level}",
        "error": error,
        "over_level": error - level,
        "gain": gain,
        "collapsed": worst,
        "true_loss": float(limits[worst]),
    }


def limit_errors_over_benchmarks(
    benchmarks: Sequence[tuple[int, ...]] = tuple(SIZES), levels: Sequence[float] = LEVELS, seed: int = 0
) -> Iterator[Row]:
    """Yield the same for several benchmarks, whose collapsing shares and gains may differ."""
    for sizes, level in itertools.product(benchmarks, levels):
        count = len(sizes)
        gains = [np.full(count, gain) for gain in (0.0, 0.1, 1.0)]
        gains += [np.where(np.arange(count) == place, 0.5, 0.0) for place in (0, count - 1)]
        rows = [_limit_error_over_benchmarks(sizes, level, gain, seed) for gain in gains]
        yield max(rows, key=lambda row: row["error"])


def _limit_error_over_benchmarks(sizes: tuple[int, ...], level: float, gains: Floats, seed: int) -> Row:
    most = SIZES[sizes]
    collapsed = np.array(list(itertools.product(*[range(count + 1) for count in most])))
    parts = []
    for place, size in enumerate(sizes):
        parts.append(np.where(np.arange(size) < collapsed[:, place, None], 1.0, -gains[place]))
    limits = upper_limit(np.concatenate(parts, 1), -1.0, 1.0, normal_quantile(level), strata_of_sizes(sizes))
    order = np.argsort(limits)
    collapsed = collapsed[order]
    limits = limits[order]
    # Most of them among the lower limits: where outcomes beyond those looked at matter, errors come out too small.
    chosen = np.unique((np.linspace(0, 1, _TRUE_LOSSES) ** 2 * (len(limits) - 1)).astype(int))
    true_losses = limits[chosen] + _BEYOND
    lower = np.searchsorted(limits, true_losses - _BEYOND / 2)
    best: Row = {"error": -1.0}
    for direction in _directions(len(sizes), seed):
        scale = (true_losses + gains.mean()) / (direction * (1 + gains)).mean()
        shares = np.clip(scale[:, None] * direction, 0, 1)
        is_possible = scale * direction.max() <= 1
        chances = np.ones((len(chosen), len(limits)))
        for place, size in enumerate(sizes):
            counts = np.arange(most[place] + 1)
            by_count = stats.binom.pmf(counts, size, shares[:, place, None])
            chances *= by_count[:, collapsed[:, place]]
        errors = np.cumsum(chances, 1)[np.arange(len(chosen)), lower - 1] * is_possible
        worst = int(errors.argmax())
        if errors[worst] > best["error"]:
            best = {
                "design": f"{' + '.join(map(str, sizes))} problems, level {level}",
                "error": float(errors[worst]),
                "over_level": float(errors[worst]) - level,
                "gain": gains.tolist(),
                "shares": shares[worst].tolist(),
                "true_loss": float(true_losses[worst]),
            }
    return best


def trace_limit_errors(traces: Sequence[int] = (16, 30, 60, 120)) -> Iterator[Row]:
    """Yield for each number of pairs of traces the largest chance that a limit of their mean errs.

    A pair is lost with a chance that two kinds of problems share or not: alike ones, half of them sure to be kept, and
    in between. The sum of the two binomial numbers decides the limit.
    """
    for count in traces:
        lost = np.arange(count)
        values = np.where(np.arange(count) < lost[:, None], 1.0, 0.0)
        limits = upper_limit(values, -1.0, 1.0, normal_quantile(LEVEL))
        best: Row = {"error": -1.0}
        for first_kind in sorted({1, count // 10, count // 4, count // 2}):
            for likeness in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
                errors = [
                    _error_of_two_kinds(count, first_kind, likeness, *pair) for pair in enumerate(limits.tolist())
                ]
                worst = int(np.argmax(errors))
                if errors[worst] > best["error"]:
                    best = {
                        "design": f"{count} pairs of traces, level {LEVEL}",
                        "error": errors[worst],
                        "over_level": errors[worst] - LEVEL,
                        "first_kind": first_kind,
                        "likeness": likeness,
                    }
        yield best


def _error_of_two_kinds(count: int, first_kind: int, likeness: float, lost: int, limit: float) -> float:
    """Return the chance of at most so many lost pairs where the mean chance lies just above the limit.

    Pairs of the first kind are lost with `likeness` times the chance of the others.
    """
    second_kind = count - first_kind
    chance = (limit + _BEYOND) * count / (second_kind + likeness * first_kind)
    if chance > 1:
        return 0.0
    of_first = stats.binom.pmf(np.arange(first_kind + 1), first_kind, likeness * chance)
    of_second = stats.binom.cdf(lost - np.arange(first_kind + 1), second_kind, chance)
    return float(of_first @ of_second)


def _directions(benchmarks: int, seed: int) -> Iterator[Floats]:
    """Yield ratios of the shares of benchmarks: each alone, all alike, and random ones."""
    yield from np.eye(benchmarks)
    yield np.ones(benchmarks)
    rng = np.random.default_rng(seed)
    yield from rng.dirichlet(np.full(benchmarks, 0.5), _DIRECTIONS)


def recommendation_errors(margins: Sequence[float] = MARGINS, sequences: Sequence[int] = SEQUENCES) -> Iterator[Row]:
    """Yield for each margin and number of sequences the worst exact chance that a setting just beyond it is kept."""
    for margin, count in itertools.product(margins, sequences):
        sizes = {*PROBLEMS, *_just_enough(margin, count)}
        pairs = itertools.product(sorted(sizes), GAINS)
        rows = [_recommendation_error(size, margin, gain, count) for size, gain in pairs]
        yield max(rows, key=lambda row: row["error"])


def _just_enough(margin: float, sequences: int) -> list[int]:
    """Return the numbers of problems that only just prove the margin with 0 and with a few collapsed problems."""
    sizes = []
    for collapsed in (0, 1, 2, 5):
        enough = collapsed + 1
        while stats.beta.ppf(1 - LEVEL / sequences, collapsed + 1, enough - collapsed) > margin:
            enough += 1
        sizes += [enough, enough + 1]
    return sizes


def _recommendation_error(size: int, margin: float, gain: float, sequences: int) -> Row:
    """Return the worst case, in which settings of other sequences collapse on problems of their own."""

    def is_not_kept(collapsed: int) -> bool:
        differences = np.full((sequences, size), gain)
        differences[:, :collapsed] = -1
        traces = -differences[..., None]
        lost = units_of_traces(traces, np.ones(traces.shape, bool), np.zeros(size, int), by_trace=True)
        first, *_ = losses_of_units(lost, margin, [[row] for row in range(sequences)])
        return first is None or not first.is_kept

    # Too few problems prove nothing, whatever they lose.
    first_not_kept = 0 if is_not_kept(0) else bisect_left(range(size), True, lo=1, key=is_not_kept)
    share = (margin + _BEYOND + gain) / (1 + gain)
    error = sequences * float(stats.binom.cdf(first_not_kept - 1, size, share))
    return {
        "design": f"margin {margin}, {sequences} sequences",
        "error": error,
        "problems": size,
        "gain": gain,
        "collapsed": first_not_kept - 1,
    }


def scan(designs: int, rng: np.random.Generator) -> Iterator[Row]:
    """Yield errors of limits at 5 % on random three-point distributions of losses in quarters, one or two benchmarks.

    Where few runs find an error near the level, many others say how often it is.
    """
    choices = [(12,), (30,), (60,), (8, 40), (12, 30), (30, 30), (8, 100)]
    for number in range(designs):
        sizes = choices[rng.integers(len(choices))]
        parts = [_random_losses(size, rng) for size in sizes]
        error = _scanned_error(sizes, parts, 1_500, rng)
        if error > 0.8 * LEVEL:
            error = _scanned_error(sizes, parts, 20_000, rng)
        described = [{"values": values.tolist(), "chances": chances.tolist()} for values, chances in parts]
        name = f"random {number}, {' + '.join(map(str, sizes))} problems"
        yield {"design": name, "error": error, "parts": described}


def _random_losses(size: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return three losses and their chances; one is so rare that it may be absent."""
    values = rng.choice(np.arange(-4, 5) / 4, 3, replace=False)
    if rng.random() < 0.7:
        values = np.sort(values)[::-1]
    rare = rng.choice([0.7, 1.5, 3.0]) / size
    other = 0.3 * rng.random()
    chances = np.array([rare, other, max(1 - rare - other, 0.01)])
    return values, chances / chances.sum()


def _scanned_error(
    sizes: Sequence[int], parts: Sequence[tuple[Floats, Floats]], runs: int, rng: np.random.Generator
) -> float:
    drawn = [rng.choice(values, (runs, size), p=chances) for size, (values, chances) in zip(sizes, parts, strict=True)]
    limits = upper_limit(np.concatenate(drawn, 1), -1.0, 1.0, normal_quantile(LEVEL), strata_of_sizes(sizes))
    truth = np.mean([values @ chances for values, chances in parts])
    return float((limits < truth - _BEYOND).mean())
