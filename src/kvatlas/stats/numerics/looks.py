"""Looks at the samples of a run before all of them are there.

Sampling until something is proven errs in 8 to 15 % of runs. At a declared look after a share t of the samples
limits lie at the quantile c / sqrt(t) (O'Brien and Fleming): with at most five looks, c = 1.75 in place of 1.645 lets
those of all looks hold together. For smaller levels the same factor is on the safe side. That the limits of pairs of
traces keep their level so is simulated, not proven. A run that was extended without declared looks has no such plan:
its j-th extension is tested at .05 / 2 ** j, so that a false claim at any look has a chance of at most 10 %.

Source: O'Brien and Fleming (1979), Biometrics 35:549-556.
"""

import math
from dataclasses import dataclass

from kvatlas.stats.numerics.arrays import LEVEL, normal_quantile

#: The quantile at the last of five looks, for 5 % on one side.
_LAST_QUANTILE = 1.75


@dataclass(frozen=True)
class Look:
    """A look at a run after a `share` of the declared samples, or after so many undeclared `extensions`.

    Tests read the first `samples` of each problem; all of them for None.
    """

    share: float | None = None
    extensions: int = 0
    samples: int | None = None

    @property
    def widening(self) -> float:
        """The factor by which limits lie farther from the value than without looks, at the same level."""
        if self.share is not None:
            return _LAST_QUANTILE / normal_quantile(LEVEL) / math.sqrt(self.share)
        return normal_quantile(LEVEL / 2 / 2**self.extensions) / normal_quantile(LEVEL / 2)

    def quantile(self, parts: int) -> float:
        """Return the normal quantile of a one-sided limit, where so many tests share the level of 5 %."""
        if self.share is not None:
            return normal_quantile(LEVEL / max(parts, 1)) * self.widening
        return normal_quantile(LEVEL / 2**self.extensions / max(parts, 1))


#: The only look at a run whose samples were not added later.
ONE_LOOK = Look()
