"""The power of a plan: claims that so many problems can prove, before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.stats.numerics.planning import detectable, problems_for, provable_margin, provable_sizes

#: The share of problems on which one setting is right and the other wrong, with one sample each: near settings and far
#: ones on the demo's grid.
DISCORDANCE = (0.05, 0.2)


@dataclass(frozen=True)
class Provable:
    """The claims that benchmarks of these `sizes` prove where a setting loses nothing at all.

    `smallest` is the smallest loss that can be proven on the mean over benchmarks, in (0, 1), whatever the number of
    samples; `needed` are the sizes in the same proportions that prove the `margin`. The 5 % are shared among so many
    `policies`, each of which is tested in an order of its own.
    """

    sizes: tuple[int, ...]
    margin: float
    policies: int
    smallest: float
    needed: tuple[int, ...]

    @property
    def is_enough(self) -> bool:
        """Return whether these sizes can prove the margin at all."""
        return self.smallest <= self.margin

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, in points."""
        return {
            "problems": list(self.sizes),
            "margin": round(100 * self.margin, 4),
            "policies": self.policies,
            "smallest_margin": round(100 * self.smallest, 4),
            "problems_needed": list(self.needed),
        }


def provable(sizes: Sequence[int], margin: float, policies: int) -> Provable:
    """Return what benchmarks of these sizes can prove of a loss of at most the margin in (0, 1)."""
    count = max(policies, 1)
    needed = tuple(provable_sizes(sizes, margin, count))
    return Provable(tuple(sizes), margin, count, provable_margin(sizes, count), needed)


def designs(sizes: Sequence[int], points: float) -> list[dict[str, Any]]:
    """Return for each discordance the problems that show `points`, and the points that benchmarks of `sizes` show.

    Raises KvatlasError for points out of range.
    """
    if not 0 < points < 100:
        raise KvatlasError(f"A difference to detect lies between 0 and 100 points; {points:g} was given.")
    # Benchmarks weigh equally, so small ones decide.
    equivalent = round(len(sizes) ** 2 / sum(1 / size for size in sizes))
    return [
        {
            "points": points,
            "discordance": share,
            "problems": problems_for(points / 100, share),
            "own_problems": equivalent,
            "own_points": round(100 * detectable(equivalent, share), 4),
        }
        for share in DISCORDANCE
    ]
