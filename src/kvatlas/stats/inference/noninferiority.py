"""Which settings lose at most a margin against the full cache, over all settings at once, on arrays.

`differences` are [settings, problems]: a setting's mean grade on a problem minus the full cache's, in [-1, 1], on the
same samples. `strata` [problems] numbers benchmarks from 0; benchmarks weigh equally. Losses are positive where a
setting is worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.stats.estimates.bounded_mean import LEVEL, Floats, Ints, correlations, interval, simultaneous_quantile
from kvatlas.stats.inference.resampling import POWER, weights


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
    setting has the limits of `bounded_mean`, which hold under skew and rare collapse. A setting that breaks the margin
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
class Loss:
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


def losses_by_name(names: Sequence[str], differences: Floats, strata: Ints, margin: float) -> dict[str, Loss]:
    """`losses` by setting."""
    loss = losses(differences, strata, margin)
    needed = problems_to_show(loss, differences.shape[1], margin)
    columns = zip(names, loss.value, loss.low, loss.high, loss.shown, loss.broken, needed, strict=True)
    return {
        name: Loss(float(value), float(low), float(high), bool(shown), bool(broken), int(count) or None)
        for name, value, low, high, shown, broken, count in columns
    }
