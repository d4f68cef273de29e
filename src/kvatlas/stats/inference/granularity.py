"""Can the printed values of a bare map come from its numbers of problems and samples? (Brown and Heathers 2017, GRIM.)

Pass@1 over n problems with k samples each is a multiple of 1 / (n k): 43.7 percent is no multiple of 1 / 150.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kvatlas.core import Map, Note, NoteKind

#: Samples a problem up to which a map without them is tried.
MOST_SAMPLES = 64


def possible(value: str, traces: int) -> bool:
    """Return True if a printed percentage such as "43.7" is the rounded or cut share of a whole number of `traces`."""
    printed, unit = Fraction(value), Fraction(1, 10 ** len(value.partition(".")[2]))
    right = int(printed * traces / 100)
    return any(printed - unit / 2 <= Fraction(100 * count, traces) < printed + unit for count in (right, right + 1))


def implied_samples(values: Sequence[str], problems: int) -> int | None:
    """Return the smallest number of samples that can give every value; None if arbitrary values would often pass, too.

    Each distinct value is possible with the share of the printed numbers that are; all of them with less than 1 %.
    """
    fit = (k for k in range(1, MOST_SAMPLES + 1) if all(possible(value, problems * k) for value in values))
    samples = next(fit, None)
    places = max(len(value.partition(".")[2]) for value in values)
    # A count of traces makes at most two neighbouring printed numbers possible.
    share = 1.0 if samples is None else min(1.0, 1.5 * problems * samples / 10 ** (places + 2))
    return samples if share ** len(set(values)) < 0.01 else None


def check_granularity(map_: Map) -> Map:
    """Return a bare map with its number of samples where that follows from its values, or with a note of impossible
    ones."""
    estimates = [cell.estimate for cell in map_.cells.values()]
    counts = {(estimate.problems, estimate.samples) for estimate in estimates}
    (problems, samples), *others = counts
    if others or problems is None or map_.is_mean:
        return map_
    numbers = [round(100 * estimate.value, 6) for estimate in estimates]
    places = max(len(f"{number:.10g}".partition(".")[2]) for number in numbers)
    values = [f"{number:.{places}f}" for number in numbers]
    if samples is not None:
        wrong = dict.fromkeys(value for value in values if not possible(value, problems * samples))
        text = f"{problems} problems with {samples} samples cannot give {', '.join(wrong)}" if wrong else ""
    else:
        samples = implied_samples(values, problems)
        text = f"{samples} samples a problem follow from the printed values" if samples else ""
    filled = {
        coord: replace(cell, estimate=replace(cell.estimate, samples=samples)) for coord, cell in map_.cells.items()
    }
    return replace(map_, cells=filled, notes=(*map_.notes, Note(NoteKind.GRANULARITY, text))) if text else map_
