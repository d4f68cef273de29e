"""Many settings against a reference: what each loses, and which are proven to lose at most a margin.

A loss is the reference's grade minus the setting's, on the same problems and samples, in [-1, 1]: positive where the
setting is worse. `units` say what it is claimed for: problems for problems like these, traces for these problems.

**Kept.** A setting is proven to lose at most the margin where its one-sided upper limit (`bounded`) is at most the
margin, and so are those of all settings before it in its sequence. Sequences are orders that no data decide. They share
the level of 5 % equally; the share of a sequence that is proven to its end passes to the others. A setting that cannot
be tested ends its sequence.

The chance of any false claim is at most 5 %. Let k sequences hold a setting that loses more than the margin. Before the
first false claim none of these is proven to its end, so at least k share the level, and each tests at most at 5 % / k.
A false claim begins with the first such setting of one of them (fixed sequence), so k tests at 5 % / k each have to
hold. With one setting in each sequence this is Holm's procedure.

**Any margin.** `joint_limit` is the upper limit at 5 % shared among all settings of the sequences: a margin that is
chosen after seeing the data, such as that of the setting with the smallest limit, is proven by it.

**Controls** are settings in no sequence: nothing is claimed of them but that they are broken, so that they take no
share of the level. Their upper limits are 1.

**Broken.** A setting is proven to lose more than the margin by Holm's test over all settings, with 2.5 % of its own, so
that its 95 % interval always lies beyond the margin.

Source: Maurer, Hothorn and Lehmacher (1995), in Biometrie in der chemisch-pharmazeutischen Industrie 6:3-18 (fixed
sequence); Bretz et al. (2009), Statistics in Medicine 28:586-604 (shares that pass on); Piaggio et al. (2012), JAMA
308:2594-2604 (non-inferiority); Holm (1979)."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from scipy import special

from kvatlas.stats.numerics.arrays import LEVEL, Difference, Floats, Z, holm
from kvatlas.stats.numerics.looks import ONE_LOOK, Look
from kvatlas.stats.numerics.units import Units


def losses_of_units(
    lost: Units,
    margin: float,
    sequences: Sequence[Sequence[int]],
    look: Look = ONE_LOOK,
    untested: Collection[int] = (),
) -> list[Difference | None]:
    """Return the loss of each setting, a row of `lost`; None where it shares no problem with the reference.

    Each setting but the controls is in one of the `sequences`, which hold rows of `lost`; `margin` is in (0, 1). Of
    `untested` rows nothing is proven.
    """
    tested = list(chain.from_iterable(sequences))
    joint_limits = _upper_limits(lost, look.quantile(len(tested)))
    limits, kept = _tests(lost, margin, sequences, look, untested)
    found = lost.contrasts(Z, look.widening)
    for row in tested:
        loss = found[row]
        if loss is not None:
            joint_limit = float(joint_limits[row])
            found[row] = replace(loss, limit=float(limits[row]), joint_limit=joint_limit, is_kept=row in kept)

    # The p-value of "it loses at most the margin"; 1 where nothing is known.
    p_broken = np.ones(len(found))
    for group in lost.groups:
        p_broken[group.rows] = special.ndtr(-group.score(margin) / look.widening)
    p_broken[list(untested)] = 1.0
    for row, adjusted in enumerate(holm(p_broken.tolist())):
        loss = found[row]
        if loss is not None and adjusted <= LEVEL / 2:
            found[row] = replace(loss, is_broken=True)
    return found


def _tests(
    lost: Units, margin: float, sequences: Sequence[Sequence[int]], look: Look, untested: Collection[int]
) -> tuple[Floats, set[int]]:
    """Return the limits of all rows at the levels of their tests, and the rows that are proven to keep the margin."""
    limits = np.full(len(lost.means), math.nan)
    kept: set[int] = set()
    open_sequences = list(map(list, sequences))
    while open_sequences:
        current = _upper_limits(lost, look.quantile(len(open_sequences)))
        for sequence in open_sequences:
            limits[sequence] = current[sequence]
            # The first setting that is not proven ends its sequence.
            while sequence and sequence[0] not in untested and current[sequence[0]] <= margin:
                kept.add(sequence.pop(0))

        still_open = [sequence for sequence in open_sequences if sequence]
        if len(still_open) == len(open_sequences):
            break
        open_sequences = still_open
    return limits, kept


def _upper_limits(lost: Units, z: float) -> Floats:
    """Return the upper limits of all rows at a normal quantile; NaN where nothing is known."""
    limits = np.full(len(lost.means), math.nan)
    for group in lost.groups:
        limits[group.rows] = group.upper_limit(z)
    return limits
