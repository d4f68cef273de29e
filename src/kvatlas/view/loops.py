"""Whether a trace ends in a loop."""

from __future__ import annotations

from collections.abc import Sequence

#: The longest period that is looked for, how often it has to be there, and the fewest tokens of it.
PERIOD, TIMES, FEWEST = 128, 4, 48
#: Tokens at the end of a trace that `period` looks at.
TAIL = PERIOD * TIMES


def period(tokens: Sequence[int]) -> int | None:
    """The shortest period, up to `PERIOD` tokens, that the end of a trace repeats; None where it repeats none.

    The last `TIMES` periods are the same, and at least `FEWEST` tokens.
    """
    for length in range(1, PERIOD + 1):
        needed = max(TIMES * length, FEWEST)
        if len(tokens) < needed:
            return None
        end = tokens[len(tokens) - needed :]
        if end[length:] == end[:-length]:
            return length
    return None
