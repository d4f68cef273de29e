"""Do the texts of two decoders depart where compression explains it?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvatlas.stats.numerics.arrays import LEVEL

#: Nats between two tokens beyond which numerics do not decide, but for a few tokens in thousands.
NEAR = 0.5


@dataclass(frozen=True)
class Departures:
    """Departures of an answer from the cell's own text: [before, after] the first compression.

    Of the compared `tokens` `near` have two likeliest tokens near one another, so that numerics may decide, `other` are
    not the cell's likeliest, `far` of these beyond numerics. `gap` is the largest difference in nats to the likeliest.
    """

    tokens: list[int]
    near: list[int] = field(default_factory=lambda: [0, 0])
    other: list[int] = field(default_factory=lambda: [0, 0])
    far: list[int] = field(default_factory=lambda: [0, 0])
    gap: list[float] = field(default_factory=lambda: [0.0, 0.0])


def departure_p(answers: Sequence[Departures]) -> float:
    """Return the p-value of "compression has no effect" from the number of answers whose largest gap lies behind it.

    By numerics alone an answer that departs has its largest gap behind the compression with the share of its near ties
    there (drawn towards the share of all by one tie). Answers are independent: their number is Poisson binomial.
    """
    before = sum(answer.near[0] for answer in answers)
    after = sum(answer.near[1] for answer in answers)
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


def most_unseen(answers: int) -> float:
    """Return the largest share of problems that could depart where none of so many does; errs in 5 %."""
    return 1 - float(LEVEL ** (1 / answers))
