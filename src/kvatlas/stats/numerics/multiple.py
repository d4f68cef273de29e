"""P-values adjusted for several claims."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvatlas.stats.numerics.arrays import Floats


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: the chance of any false claim among those at most 0.05 is at most 0.05.

    Source: Holm (1979), Scandinavian Journal of Statistics 6:65-70.
    """
    adjusted = list(p)
    so_far = 0.0
    for rank, index in enumerate(np.argsort(p, kind="stable").tolist()):
        so_far = max(so_far, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = so_far
    return adjusted


def benjamini_hochberg(p: Sequence[float]) -> Floats:
    """Return adjusted p-values: of the claims at most 0.05, the expected share of false ones is at most 0.05.

    Source: Benjamini and Hochberg (1995), J. Royal Statistical Society B 57:289-300. scipy has this too, in a module
    whose import takes a second.
    """
    order = np.argsort(p)[::-1]
    raised = np.array(p)[order] * len(p) / np.arange(len(p), 0, -1)
    adjusted = np.minimum.accumulate(np.minimum(raised, 1.0))
    return np.asarray(adjusted[np.argsort(order)], float)
