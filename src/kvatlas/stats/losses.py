"""One setting against another: paired differences, non-inferiority of many settings, equivalence of an endpoint."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import KvatlasError
from kvatlas.stats.inference import POWER, Contrast, mean_contrast, weights
from kvatlas.stats.intervals import LEVEL, Floats, Ints, correlations, interval, simultaneous_quantile
from kvatlas.stats.table import ProblemKey

S = TypeVar("S", bound=Hashable)
Outcomes = Mapping[ProblemKey, Mapping[S, float]]


@dataclass(frozen=True)
class Difference(Contrast):
    """The mean over benchmarks of the mean over problems of (first - second), in [-1, 1].

    `problems` are those that both settings have, `pairs` the samples of both on which the difference rests.
    """

    problems: int = 0
    pairs: int = 0


def paired_difference(first: Outcomes[S], second: Outcomes[S]) -> Difference:
    """Compare two settings: `first[benchmark, problem][sample]` is a grade in [0, 1]; only pairs that both have count.

    A problem's difference is the mean over its pairs. Problems are the independent units; benchmarks weigh equally, as
    in mean maps, and so do the problems of one. Raises KvatlasError where the two have no pair in common.
    """
    differences, strata, pairs = problem_differences(first, second)
    if not pairs:
        raise KvatlasError("The two settings have no problem and sample in common, so there is nothing to compare.")
    contrast = mean_contrast(differences, strata)
    return Difference(contrast.value, contrast.low, contrast.high, contrast.p, len(differences), pairs)


def problem_differences(first: Outcomes[S], second: Outcomes[S]) -> tuple[Floats, Ints, int]:
    """[problems]: the mean of first - second over the samples of both, their strata, and how many such pairs."""
    differences: dict[ProblemKey, float] = {}
    pairs = 0
    for problem, samples in first.items():
        other = second.get(problem, {})
        shared = [sample for sample in samples if sample in other]
        if shared:
            differences[problem] = math.fsum(samples[s] - other[s] for s in shared) / len(shared)
            pairs += len(shared)
    return np.array(list(differences.values())), strata_of(differences), pairs


def strata_of(problems: Iterable[ProblemKey]) -> Ints:
    """[problems]: the number, from 0, of each problem's benchmark."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(benchmark, len(numbers)) for benchmark, _ in problems])


# -- many settings against the full cache ------------------------------------------------------------------------------
#
# `differences` are [settings, problems]: a setting's mean grade on a problem minus the full cache's, in [-1, 1], on the
# same samples. `strata` [problems] numbers benchmarks from 0; benchmarks weigh equally. Losses are positive where a
# setting is worse.


@dataclass(frozen=True)
class Losses:
    """What each setting loses against the full cache, [settings] each, in [-1, 1].

    `low` and `high` hold for all settings together with 95 %. `shown`: the setting loses at
    most the margin; `broken`: it loses more; neither: the data leave it open. `quantile` is the normal one behind the
    intervals.
    """

    value: Floats
    low: Floats
    high: Floats
    shown: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    quantile: float


def losses(differences: Floats, strata: Ints, margin: float) -> Losses:
    """The losses of all settings with simultaneous 95 % intervals, each side held against the `margin` in (0, 1).

    The quantile is that of the largest of as many normal differences as alike as the settings are (max-t); at it each
    setting has the limits of `interval`, which hold under skew and rare collapse. A setting that breaks the margin
    is shown to keep it with at most 2.5 %, over all settings.

    Source: Hothorn, Bretz and Westfall (2008), Biometrical Journal 50:346-363; Piaggio et al. (2012), JAMA
    308:2594-2604 (the two-sided 95 % interval for non-inferiority).
    """
    quantile = simultaneous_quantile(correlations(differences, strata), LEVEL)
    value = -(differences @ weights(strata))
    low, high = interval(differences, -1.0, 1.0, quantile, strata)
    return Losses(value, -high, -low, -low <= margin, -high > margin, quantile)


def problems_to_show(loss: Losses, problems: int, margin: float) -> NDArray[np.int64]:
    """[settings]: how many problems in all would show "at most the margin" with a power of 0.8, were the values true.

    0 where none would, as the setting is seen to lose the margin or more. The error is that of the interval, so what
    was not seen counts as it does there.
    """
    room = margin - loss.value
    error = (loss.high - loss.value) / loss.quantile * math.sqrt(problems)
    safe = np.where(room > 1e-9, room, 1.0)
    needed = np.ceil(((loss.quantile + POWER) * error / safe) ** 2)
    return np.asarray(np.where(loss.shown, problems, np.where(room > 1e-9, needed, 0)), np.int64)


@dataclass(frozen=True)
class SettingLoss:
    """What one setting loses against the full cache, in [-1, 1], with limits that hold over all settings.

    `shown`: at most the margin is lost; `broken`: more is. `needed` problems in all would show it, were the value true;
    None where none would.
    """

    value: float
    low: float
    high: float
    shown: bool
    broken: bool
    needed: int | None = None


def losses_by_name(names: Sequence[str], differences: Floats, strata: Ints, margin: float) -> dict[str, SettingLoss]:
    """`losses` by setting."""
    loss = losses(differences, strata, margin)
    needed = problems_to_show(loss, differences.shape[1], margin)
    columns = zip(names, loss.value, loss.low, loss.high, loss.shown, loss.broken, needed, strict=True)
    return {
        name: SettingLoss(float(value), float(low), float(high), bool(shown), bool(broken), int(count) or None)
        for name, value, low, high, shown, broken, count in columns
    }


class Equivalence(StrEnum):
    """What the interval of a loss says, held against the margin on both sides."""

    EQUIVALENT = "equivalent"
    WORSE = "worse"
    BETTER = "better"
    UNDECIDED = "not decided"


@dataclass(frozen=True)
class Verification:
    """What an endpoint loses against a reference, in [-1, 1], with its 95 % interval and what that says.

    `problems` are those of both; `needed` in all would decide it with a power of 0.8, were the loss what was seen; None
    where it is decided, and where none would.
    """

    loss: SettingLoss
    standing: Equivalence
    problems: int
    needed: int | None


def verified(reference: Outcomes[int], served: Outcomes[int], margin: float) -> Verification:
    """Compare grades [problem][sample] on the problems and samples of both; benchmarks weigh equally.

    The interval is that of non-inferiority (`losses`), so each side errs with at most 2.5 %. Raises
    KvatlasError where there is no problem in common.
    """
    differences, strata = _differences(reference, served)
    (loss,) = losses_by_name(("",), -differences[None], strata, margin).values()
    (gain,) = losses_by_name(("",), differences[None], strata, margin).values()
    if loss.broken:
        standing = Equivalence.WORSE
    elif gain.broken:
        standing = Equivalence.BETTER
    else:
        standing = Equivalence.EQUIVALENT if loss.shown and gain.shown else Equivalence.UNDECIDED
    needs = [side.needed for side in (loss, gain) if not side.shown]
    open_ = standing is Equivalence.UNDECIDED and None not in needs
    return Verification(loss, standing, len(strata), max(filter(None, needs), default=None) if open_ else None)


def length_shift(reference: Outcomes[int], served: Outcomes[int]) -> Contrast:
    """The mean change of output lengths (given as shares of the most new tokens), with the p-value of none."""
    differences, strata = _differences(reference, served)
    return mean_contrast(-differences, strata)


def _differences(reference: Outcomes[int], served: Outcomes[int]) -> tuple[Floats, Ints]:
    """[problems] each: reference minus served, and the number of the benchmark."""
    differences, strata, pairs = problem_differences(reference, served)
    if not pairs:
        raise KvatlasError("The endpoint and the run have no problem and sample in common, so nothing can be compared.")
    return differences, strata


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
