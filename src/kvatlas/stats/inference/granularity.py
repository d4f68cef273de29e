"""Which numbers of problems and samples can give the printed values of a map: a test of its granularity.

Pass@1 over n problems with k samples each is a multiple of 1 / (n k), so a value printed to a tenth of a point can be
impossible: 43.7 percent is no multiple of 1 / 150, as 65 and 66 right traces of 150 print as 43.3 and 44.0.

Source: Brown and Heathers (2017), The GRIM test, Social Psychological and Personality Science 8:363-369.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from kvatlas.core import Cell, Map, Note, NoteKind

#: Samples a problem up to which a map is tried.
MOST_SAMPLES = 64


def possible(value: str, traces: int) -> bool:
    """Whether a printed percentage, such as "43.7", is the rounded share of a whole number of `traces`.

    Both ways of rounding a half count as right, and so does a value that is cut off after its last place.
    """
    printed = Fraction(value)
    unit = Fraction(1, 10 ** len(value.partition(".")[2]))
    right = int(printed * traces / 100)
    return any(printed - unit / 2 <= Fraction(100 * count, traces) < printed + unit for count in (right, right + 1))


def impossible(values: Sequence[str], problems: int, samples: int) -> tuple[str, ...]:
    """The printed values that `problems` times `samples` traces cannot give, in their order."""
    return tuple(value for value in values if not possible(value, problems * samples))


def samples_of(values: Sequence[str], problems: int) -> tuple[int, ...]:
    """The numbers of samples a problem, up to 64, that can give every printed value.

    They tell something only where few numbers remain: with many traces every value is possible. An empty answer says
    that no such number can, so the values are means of unlike things or hold a misprint.
    """
    return tuple(k for k in range(1, MOST_SAMPLES + 1) if not impossible(values, problems, k))


def implied_samples(values: Sequence[str], problems: int) -> int | None:
    """The smallest possible number of samples, where values of no meaning would hardly all be possible with it.

    The chance of that is below 1 %: each distinct value is possible with the share of the printed numbers that are.
    Multiples of the answer are possible, too. None where nothing follows.
    """
    counts = samples_of(values, problems)
    if not counts:
        return None
    places = max(len(value.partition(".")[2]) for value in values)
    # A count of traces makes at most two neighbouring printed numbers possible.
    share = min(1.0, 1.5 * problems * counts[0] / 10 ** (places + 2))
    return counts[0] if share ** len(set(values)) < 0.01 else None


def with_granularity(maps: Sequence[Map]) -> list[Map]:
    """Bare maps with the number of samples that follows from their values where it is not known, and notes: that it was
    derived, or which values the numbers of problems and samples cannot give."""
    return [_checked(map_) for map_ in maps]


def _checked(map_: Map) -> Map:
    cells = list(map_.cells.values())
    problems, samples = (
        counts.pop() if len(counts) == 1 else None
        for counts in ({cell.estimate.problems for cell in cells}, {cell.estimate.samples for cell in cells})
    )
    if problems is None or map_.is_mean:
        return map_
    values = printed(map_)
    if samples is None:
        derived = implied_samples(values, problems)
        if derived is None:
            return map_
        text = f"{derived} samples a problem follow from the printed values"
        filled = {coord: _with_samples(cell, derived) for coord, cell in map_.cells.items()}
        return replace(map_, cells=filled, notes=(*map_.notes, Note(NoteKind.GRANULARITY, text)))
    wrong = impossible(values, problems, samples)
    if not wrong:
        return map_
    text = f"{problems} problems with {samples} samples cannot give {', '.join(dict.fromkeys(wrong))}"
    return replace(map_, notes=(*map_.notes, Note(NoteKind.GRANULARITY, text)))


def printed(map_: Map) -> list[str]:
    """The values of a map in percent, with as many places as the finest of them has."""
    values = [round(100 * cell.estimate.value, 6) for cell in map_.cells.values()]
    places = max(len(f"{value:.10g}".partition(".")[2]) for value in values)
    return [f"{value:.{places}f}" for value in values]


def _with_samples(cell: Cell, samples: int) -> Cell:
    return replace(cell, estimate=replace(cell.estimate, samples=samples))
