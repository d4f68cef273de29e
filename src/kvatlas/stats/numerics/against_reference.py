"""Many settings against a reference: what each loses, and which are proven to lose at most a margin.

A loss is the reference's grade minus the setting's, on the same problems and samples, in [-1, 1]: positive where the
setting is worse. `units` say what it is claimed for: problems for problems like these, traces for these problems.

**Kept.** A setting is proven to lose at most the margin where its one-sided upper limit (`bounded`) is at most the
margin, and so are those of all settings before it in its sequence. Sequences are orders that no data decide, from the
dearest setting down, so the first false claim of a sequence is a single test (fixed sequence). The sequences share the
level of 5 %: the chance of any false claim in any of them is at most 5 %. A setting that cannot be tested ends its
sequence.

**Any margin.** `joint_limit` is the upper limit at 5 % shared among all settings: a margin that is chosen after seeing
the data, such as that of the setting with the smallest limit, is proven by it.

**Broken.** A setting is proven to lose more than the margin by Holm's test over all settings, with 2.5 % of its own, so
that its 95 % interval always lies beyond the margin.

Source: Maurer, Hothorn and Lehmacher (1995), in Biometrie in der chemisch-pharmazeutischen Industrie 6:3-18 (fixed
sequence); Piaggio et al. (2012), JAMA 308:2594-2604 (non-inferiority); Holm (1979).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Contrast, Floats, Ints, Z
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.numerics.multiple import holm
from kvatlas.stats.numerics.units import Units, units_of_problems


@dataclass(frozen=True)
class Loss(Contrast):
    """The mean loss of one setting in [-1, 1], with its 95 % interval, and the p-value of "it loses nothing".

    `limit` is the one-sided upper limit at the level of the setting's sequence: it decides, the interval decides
    nothing. `joint_limit` is that for all settings together. `is_kept`: proven to lose at most the margin; `is_broken`:
    proven to lose more.
    """

    limit: float = 1.0
    joint_limit: float = 1.0
    is_kept: bool = False
    is_broken: bool = False


def losses(differences: Floats, strata: Ints, margin: float, sequences: Sequence[Sequence[int]]) -> list[Loss | None]:
    """Return the loss of each setting; None where it shares no problem of a benchmark with the reference.

    `differences` [settings, problems] are a setting's mean grade on a problem **minus the reference's**, NaN where one
    of the two was not asked for it. Each setting is in one of the `sequences`, which hold rows of `differences`;
    `margin` is in (0, 1).
    """
    return losses_of_units(units_of_problems(-differences, strata), margin, sequences)


def losses_of_units(
    lost: Units,
    margin: float,
    sequences: Sequence[Sequence[int]],
    look: Look = ONE_LOOK,
    untested: Collection[int] = (),
) -> list[Loss | None]:
    """Return the loss of each row of losses; else as `losses`. Of `untested` rows nothing is proven."""
    z = look.quantile(len(sequences))
    joint_z = look.quantile(len(lost.means))
    found: list[Loss | None] = [None for _ in lost.means]

    # The p-value of "it loses at most the margin"; 1 where nothing is known.
    p_broken = np.ones(len(found))
    contrasts = lost.contrasts(Z, look.widening)
    for group in lost.groups():
        limits = group.upper_limit(z).tolist()
        joint_limits = group.upper_limit(joint_z).tolist()
        p_broken[group.rows] = special.ndtr(-group.score(margin) / look.widening)
        for row, limit, joint in zip(group.rows, limits, joint_limits, strict=True):
            contrast = contrasts[row]
            assert contrast is not None
            found[row] = Loss(**vars(contrast), limit=limit, joint_limit=joint)
    p_broken[list(untested)] = 1.0
    for sequence in sequences:
        # The first setting that is not proven ends its sequence.
        for row in sequence:
            loss = found[row]
            if loss is None or row in untested or loss.limit > margin:
                break
            found[row] = replace(loss, is_kept=True)
    for row, adjusted in enumerate(holm(p_broken.tolist())):
        loss = found[row]
        if loss is not None and adjusted <= LEVEL / 2:
            found[row] = replace(loss, is_broken=True)
    return found
