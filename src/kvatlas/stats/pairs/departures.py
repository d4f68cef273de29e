"""Does an endpoint write other tokens than its cell from the first compression on, more than its numerics explain?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Nats between two tokens beyond which numerics do not decide, but for a few tokens in thousands.
NEAR = 0.5


@dataclass(frozen=True)
class Departures:
    """How an answer departs from what the cell would have written: (before, after) the first compression.

    `tokens` were compared on either side, at `near` of them the cell's two likeliest tokens are near one another, so
    that numerics may decide, `other` are not the cell's likeliest, `far` of these beyond what numerics decide. `gap` is
    the largest difference in nats between the likeliest token and the one that was written.
    """

    tokens: tuple[int, ...]
    near: tuple[int, ...]
    other: tuple[int, ...]
    far: tuple[int, ...]
    gap: tuple[float, ...]


def departure_p(answers: Sequence[Departures]) -> float:
    """How often the largest gap of so many answers would lie behind the first compression, were it nothing to them.

    What precedes the compression is the control: there both see all tokens, and what differs is numerics. Numerics know
    of no compression, so an answer that departs has its largest gap behind it with the share of its near ties there
    (drawn towards the share of all by one tie). Answers are independent: their number is Poisson binomial, exactly.
    """
    before, after = (sum(answer.near[side] for answer in answers) for side in (0, 1))
    pooled = (after + 1) / (before + after + 2)
    chances = np.ones(1)
    behind = 0
    for answer in answers:
        if not any(answer.gap):
            continue
        share = (answer.near[1] + pooled) / (sum(answer.near) + 1)
        chances = np.convolve(chances, [1 - share, share])
        behind += answer.gap[1] > answer.gap[0]
    return min(1.0, float(chances[behind:].sum()))


def most_unseen(answers: int, error: float = 0.05) -> float:
    """The largest share of problems that could depart where none of so many does, with that chance of being wrong."""
    return 1 - float(error ** (1 / answers))
