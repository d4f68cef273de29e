"""The power of a plan: claims that so many problems can prove, before anything is decoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import Claim, KvatlasError
from kvatlas.stats.numerics import planning
from kvatlas.stats.numerics.arrays import LEVEL

#: The share of problems on which one setting is right and the other wrong, with one sample each: near settings and far
#: ones on the demo's grid.
DISCORDANCE = (0.05, 0.2)


#: Shares of pairs of traces that differ, for which a plan counts samples.
DIFFERING = (0.05, 0.15, 0.3)


@dataclass(frozen=True)
class Provable:
    """The claims that benchmarks of so many `problems`, sampled `samples` times, prove where a setting loses nothing.

    `sizes` are the units of problems like these: problems, or their clusters. For problems like these `smallest` is the
    smallest loss that can be proven on the mean over benchmarks, in (0, 1), whatever the number of samples, `needed`
    are the sizes in the same proportions that prove the `margin`, and no valid test has a power above `bound` there. On
    these problems `smallest_here` can be proven, and `samples_needed` prove the margin where so many of the pairs
    differ. The 5 % of a claim are shared among its `chains`, which have so many settings each (`kvatlas.stats.orders`).
    """

    sizes: tuple[int, ...]
    problems: tuple[int, ...]
    margin: float
    chains: Mapping[Claim, tuple[int, ...]]
    samples: int
    smallest: float
    needed: tuple[int, ...]
    bound: float
    smallest_here: float
    samples_needed: Mapping[float, int | None]

    @property
    def is_enough(self) -> bool:
        """Return whether these sizes can prove the margin at all, for problems like these."""
        return self.smallest <= self.margin

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, in points."""
        return {
            "problems": list(self.problems),
            "units": list(self.sizes),
            "margin": round(100 * self.margin, 4),
            "chains": {claim.value: list(lengths) for claim, lengths in self.chains.items()},
            "samples": self.samples,
            "smallest_margin": round(100 * self.smallest, 4),
            "problems_needed": list(self.needed),
            "most_power": round(self.bound, 4),
            "smallest_margin_on_these_problems": round(100 * self.smallest_here, 4),
            "samples_needed": [
                {"differing": share, "samples": samples} for share, samples in self.samples_needed.items()
            ],
        }


def provable(
    sizes: Sequence[int],
    margin: float,
    orders: Mapping[Claim, Sequence[Sequence[str]]],
    samples: int = 1,
    problems: Sequence[int] | None = None,
) -> Provable:
    """Return what benchmarks of these sizes can prove of a loss of at most the margin in (0, 1).

    `orders` are the chains of settings by claim, without which there is one setting. `problems` are the problems of the
    benchmarks, where clusters of them are the units of `sizes`.
    """
    chains = {claim: tuple(map(len, orders.get(claim) or [[""]])) for claim in Claim}
    count = len(chains[Claim.LIKE])
    count_here = len(chains[Claim.THESE])
    problems = tuple(sizes if problems is None else problems)
    smallest = planning.provable_margin(sizes, count)
    equivalent = len(sizes) ** 2 / sum(1 / size for size in sizes)
    return Provable(
        tuple(sizes),
        problems,
        margin,
        chains,
        samples,
        smallest,
        tuple(planning.provable_sizes(sizes, margin, count)),
        planning.power_bound(round(equivalent), margin, level=LEVEL / count),
        planning.provable_margin([size * samples for size in problems], count_here),
        {share: planning.needed_samples(problems, share, 0.0, margin, count_here) for share in DIFFERING},
    )


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
            "problems": planning.problems_for(points / 100, share),
            "own_problems": equivalent,
            "own_points": round(100 * planning.detectable(equivalent, share), 4),
        }
        for share in DISCORDANCE
    ]
