"""Is what is served what was measured: equivalence within a margin, problem by problem, and lengths beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.bounded_mean import Floats, Ints
from kvatlas.stats.inference.noninferiority import Loss, losses_by_name
from kvatlas.stats.inference.resampling import Contrast, mean_contrast
from kvatlas.stats.pairs.paired import problem_differences
from kvatlas.stats.pairs.systems import ProblemKey

Outcomes = Mapping[ProblemKey, Mapping[int, float]]


class Standing(StrEnum):
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

    loss: Loss
    standing: Standing
    problems: int
    needed: int | None


def verified(reference: Outcomes, served: Outcomes, margin: float) -> Verification:
    """Compare grades [problem][sample] on the problems and samples of both; benchmarks weigh equally.

    The interval is that of non-inferiority (`noninferiority.losses`), so each side errs with at most 2.5 %. Raises
    KvatlasError where there is no problem in common.
    """
    differences, strata = _differences(reference, served)
    (loss,) = losses_by_name(("",), -differences[None], strata, margin).values()
    (gain,) = losses_by_name(("",), differences[None], strata, margin).values()
    if loss.broken:
        standing = Standing.WORSE
    elif gain.broken:
        standing = Standing.BETTER
    else:
        standing = Standing.EQUIVALENT if loss.shown and gain.shown else Standing.UNDECIDED
    needs = [side.needed for side in (loss, gain) if not side.shown]
    open_ = standing is Standing.UNDECIDED and None not in needs
    return Verification(loss, standing, len(strata), max(filter(None, needs), default=None) if open_ else None)


def length_shift(reference: Outcomes, served: Outcomes) -> Contrast:
    """The mean change of output lengths (given as shares of the most new tokens), with the p-value of none."""
    differences, strata = _differences(reference, served)
    return mean_contrast(-differences, strata)


def _differences(reference: Outcomes, served: Outcomes) -> tuple[Floats, Ints]:
    """[problems] each: reference minus served, and the number of the benchmark."""
    differences, strata, pairs = problem_differences(reference, served)
    if not pairs:
        raise KvatlasError("The endpoint and the run have no problem and sample in common, so nothing can be compared.")
    return differences, strata
