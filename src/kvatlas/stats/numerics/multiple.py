"""P-values adjusted for several claims."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
