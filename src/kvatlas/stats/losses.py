"""One setting against another: paired differences, non-inferiority of many settings, equivalence of an endpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from scipy import special

from kvatlas.core import KvatlasError
from kvatlas.stats.inference import POWER, Contrast, mean_contrast, weights
from kvatlas.stats.intervals import LEVEL, Floats, Ints, correlations, imagined_ends, interval, simultaneous_quantile
from kvatlas.stats.table import ProblemKey

#: Grades by problem and sample.
Outcomes = Mapping[ProblemKey, Mapping[int, float]]


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over benchmarks of the mean over problems of (first - second); `pairs` are samples that both have."""

    problems: int = 0
    pairs: int = 0


def paired_difference(first: Outcomes, second: Outcomes) -> Difference:
    """Compare two settings: `first[benchmark, problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    Problems are the independent units; benchmarks weigh equally, and so do the problems of one. Raises KvatlasError
    where the two have no pair in common.
    """
    differences, strata, pairs = _paired(first, second)
    grades = np.concatenate(pairs)
    means = float(grades[:, 0].mean()), float(grades[:, 1].mean())
    contrast = mean_contrast(differences, strata, samples=min(map(len, pairs)), means=means)
    return Difference(**vars(contrast), problems=len(differences), pairs=len(grades))


def _paired(first: Outcomes, second: Outcomes) -> tuple[Floats, Ints, list[Floats]]:
    """[problems] each: the mean of first - second, the number of the benchmark, and the grades [samples, 2] of both."""
    pairs = {p: [(own[n], second[p][n]) for n in own if n in second[p]] for p, own in first.items() if p in second}
    grades = {problem: np.array(own, float) for problem, own in pairs.items() if own}
    if not grades:
        raise KvatlasError("The two have no problem and sample in common, so there is nothing to compare.")
    differences = np.array([own[:, 0].mean() - own[:, 1].mean() for own in grades.values()])
    return differences, strata_of(grades), list(grades.values())


def strata_of(problems: Iterable[ProblemKey]) -> Ints:
    """[problems]: the number, from 0, of each problem's benchmark."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(benchmark, len(numbers)) for benchmark, _ in problems])


# -- many settings against the full cache ------------------------------------------------------------------------------
#
# `differences` are [settings, problems]: a setting's mean grade on a problem minus the full cache's, in [-1, 1], on the
# same samples; NaN where one of the two is missing. `strata` [problems] numbers benchmarks from 0; benchmarks weigh
# equally. Losses are positive where a setting is worse.


@dataclass(frozen=True)
class SettingLoss:
    """The loss of one setting against the full cache, in [-1, 1], with its 95 % limits.

    `shown`: it loses at most the margin; `broken`: it loses more. `needed` problems in all would prove it with a power
    of 0.8 at the observed loss, and `needed_range` at the ends of its 80 % interval; None where no number would.
    """

    value: float
    low: float
    high: float
    shown: bool
    broken: bool
    needed: int | None = None
    needed_range: tuple[int | None, int | None] = (None, None)


def losses(
    differences: Floats,
    strata: Ints,
    margin: float,
    *,
    reference: float = 0.5,
    samples: int = 1,
    chains: Sequence[Sequence[int]] = (),
) -> list[SettingLoss | None]:
    """Return the loss of each setting with 95 % limits, and whether it is proven to be at most the `margin` in (0, 1).

    The limits hold for all settings together (max-t). A setting is shown to keep the margin where its upper limit does;
    or, along one of the `chains` (settings from the dearest down, an order that no data decide), where its own upper
    limit and those of all dearer ones do. The chains share 2.5 %, so that both ways together err in at most 5 % of
    cases. None where a setting shares no problem of a benchmark with the full cache. `reference` is the full cache's
    mean and `samples` the number of samples a problem (`imagined_ends`).

    Source: Hothorn, Bretz and Westfall (2008), Biometrical Journal 50:346-363 (max-t); Maurer, Hothorn and Lehmacher
    (1995) (fixed sequence); Piaggio et al. (2012), JAMA 308:2594-2604 (non-inferiority).
    """
    joint = simultaneous_quantile(correlations(differences, strata), LEVEL)
    own = float(-special.ndtri(LEVEL / 2 / max(len(chains), 1)))
    made: list[SettingLoss | None] = [None] * len(differences)
    single = np.full(len(differences), math.inf)
    counts = (~np.isnan(differences)).sum(1).tolist()
    # Settings with the same problems are taken together.
    patterns, pattern_of = np.unique(~np.isnan(differences), axis=0, return_inverse=True)
    for number, known in enumerate(patterns):
        rows, on = np.flatnonzero(pattern_of.ravel() == number), strata[known]
        if len(np.unique(on)) < len(np.unique(strata)):
            continue
        values = differences[rows][:, known]
        bottom, top, unseen = imagined_ends(values, -reference, 1 - reference, samples)
        least, most = interval(values, bottom, top, joint, on, unseen)
        single[rows] = -interval(values, bottom, top, own, on, unseen)[0]
        for place, row in enumerate(rows.tolist()):
            value, low, high = -float(values[place] @ weights(on)), -float(most[place]), -float(least[place])
            need = Need.of(-values[place], on, joint, -float(bottom[place]), unseen)
            error = NEAR_80 * need.deviation / math.sqrt(len(on))
            reach = need.problems(value - error, margin), need.problems(value + error, margin)
            needed = len(on) if high <= margin else need.problems(value, margin)
            made[row] = SettingLoss(value, low, high, high <= margin, low > margin, needed, reach)
    for chain in chains:
        for row in chain:
            loss = made[row]
            if loss is None or min(single[row], loss.high) > margin:
                break
            made[row] = replace(loss, shown=True, needed=counts[row], high=min(margin, loss.high))
    return made


#: The normal quantile of an 80 % interval.
NEAR_80 = float(special.ndtri(0.9))


@dataclass(frozen=True)
class Need:
    """The upper limit of a loss with n problems: quantile * deviation / root n + excess / n, at least least / n.

    `excess` is the part of the imagined problem and of the skewness of rare losses.
    """

    quantile: float
    deviation: float
    excess: float
    least: float

    @classmethod
    def of(cls, values: Floats, strata: Ints, quantile: float, end: float, weight: float) -> Need:
        """Measure the losses `values` [problems] of a pilot whose imagined problem loses `end` and has this weight."""
        sizes = np.bincount(strata)
        centred = values - (np.bincount(strata, values) / sizes)[strata]
        variance = float((centred**2).mean())
        skew = float((centred**3).mean()) / variance if variance > 1e-12 else 0.0
        excess = weight * end * quantile + max(skew, 0.0) * (quantile**2 - 1) / 6
        # Each benchmark's own variance; infinite if it has a single problem.
        squares = np.bincount(strata, centred**2) / (sizes - 1).clip(1) / sizes
        error = math.sqrt(squares.sum()) / len(sizes) if sizes.min() > 1 else math.inf
        least = end * float(special.gammaincinv(weight, float(special.ndtr(quantile))))
        return cls(quantile, error * math.sqrt(len(values)), excess, least)

    def problems(self, loss: float, margin: float) -> int | None:
        """Return the problems that would show `loss` to be at most the `margin` with a power of 0.8; None for none."""
        room = margin - loss
        if room <= 1e-9 or not math.isfinite(self.deviation):
            return None
        spread = (self.quantile + POWER) * self.deviation
        # room = spread / root + excess / root^2, solved for the root of the number.
        root = (spread + math.sqrt(spread**2 + 4 * room * self.excess)) / (2 * room)
        return math.ceil(max(root**2, self.least / room))


class Equivalence(StrEnum):
    """The interval of a loss against the margin on both sides."""

    EQUIVALENT = "equivalent"
    WORSE = "worse"
    BETTER = "better"
    UNDECIDED = "not decided"


@dataclass(frozen=True)
class Verification:
    """The loss of an endpoint against a reference, in [-1, 1], with its 95 % interval.

    `needed` problems in all would decide it with a power of 0.8 at the observed loss; None if decided or undecidable.
    """

    loss: SettingLoss
    standing: Equivalence
    problems: int
    needed: int | None


def verified(reference: Outcomes, served: Outcomes, margin: float) -> Verification:
    """Compare grades [problem][sample] on the problems and samples of both; benchmarks weigh equally.

    The interval is that of non-inferiority (`losses`). Raises KvatlasError where there is no problem in common.
    """
    differences, strata, _ = _paired(reference, served)
    loss, gain = (losses(sign * differences[None], strata, margin)[0] for sign in (-1, 1))
    assert loss is not None
    assert gain is not None
    if loss.broken:
        standing = Equivalence.WORSE
    elif gain.broken:
        standing = Equivalence.BETTER
    else:
        standing = Equivalence.EQUIVALENT if loss.shown and gain.shown else Equivalence.UNDECIDED
    needs = [side.needed for side in (loss, gain) if not side.shown]
    open_ = standing is Equivalence.UNDECIDED and None not in needs
    return Verification(loss, standing, len(strata), max(filter(None, needs), default=None) if open_ else None)


def length_shift(reference: Outcomes, served: Outcomes) -> Contrast:
    """The mean change of output lengths (given as shares of the most new tokens), with the p-value of none."""
    differences, strata, _ = _paired(reference, served)
    return mean_contrast(-differences, strata)


#: Nats between two tokens beyond which numerics do not decide, but for a few tokens in thousands.
NEAR = 0.5


@dataclass(frozen=True)
class Departures:
    """Departures of an answer from the cell's own text: (before, after) the first compression.

    Of the compared `tokens` `near` have two likeliest tokens near one another, so that numerics may decide, `other` are
    not the cell's likeliest, `far` of these beyond numerics. `gap` is the largest difference in nats to the likeliest.
    """

    tokens: tuple[int, ...]
    near: tuple[int, ...]
    other: tuple[int, ...]
    far: tuple[int, ...]
    gap: tuple[float, ...]


def departure_p(answers: Sequence[Departures]) -> float:
    """Return the p-value of "compression has no effect" from the number of answers whose largest gap lies behind it.

    By numerics alone an answer that departs has its largest gap behind the compression with the share of its near ties
    there (drawn towards the share of all by one tie). Answers are independent: their number is Poisson binomial.
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
