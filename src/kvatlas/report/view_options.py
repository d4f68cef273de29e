"""The options under which runs and CSV maps are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvatlas.core import Claim, Map
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import with_binomial_bounds
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData, margin_from_points

#: An opened run, or the maps of a file.
Source = RunData | list[Map]


@dataclass(frozen=True)
class ReadOptions:
    """The options under which runs and CSV maps are read.

    Args:
        metric: `pass@1`, `progress`, `pass@K`, `maj@K` or a metric of the benchmark; a run's usual one if None.
        partial: missing traces and cells are noted on maps instead of raising an error.
        fix: axes that are held to one value, which may be written as text.
        policy: the maps and comparisons of this policy alone.
        lose_at_most: the margin in points against the full cache; the run's own if None. KvatlasError out of (0, 100).
        problems: the problems of CSV maps without such a column.
        samples: the samples of CSV maps without such a column.
        claim: what the numbers speak of, in place of the claim that the spec decided. For CSV maps `these_problems`
            declares that the samples were drawn independently.
    """

    metric: str | None = "pass@1"
    partial: bool = False
    fix: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    lose_at_most: float | None = None
    problems: int | None = None
    samples: int | None = None
    claim: Claim | None = None

    def __post_init__(self) -> None:
        margin_from_points(self.lose_at_most)

    @property
    def margin(self) -> float:
        """The margin of maps without a run, in (0, 1)."""
        return margin_from_points(self.lose_at_most)

    def open_run(self, folder: str | Path) -> RunData:
        """Return the run in a folder. Raises KvatlasError for a folder without a run."""
        return RunData.open(folder, self.metric, self.partial, self.fix, self.lose_at_most, self.claim)

    def open_source(self, source: str | Path) -> Source:
        """Return a run, or the maps of a CSV file or of `published:NAME` with intervals of the binomial bound."""
        if Path(source).is_dir():
            return self.open_run(source)
        maps = read_maps(source, self.partial, self.problems, self.samples)
        return with_binomial_bounds(maps, self.claim or Claim.LIKE)


def bare_maps(source: Source) -> list[Map]:
    """Return the maps of a source, without regions."""
    return maps_of_run(source) if isinstance(source, RunData) else source
