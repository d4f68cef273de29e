"""Where maps come from: a run, or a CSV map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.core import Map
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import with_binomial_bounds
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.run_data import RunData


@dataclass(frozen=True)
class MapSource:
    """A run whose maps are made when they are asked for, or the maps that a file held."""

    run: RunData | None = None
    read: Sequence[Map] = ()

    @classmethod
    def open(
        cls,
        source: str | Path,
        metric: str | None = None,
        partial: bool = False,
        fix: Mapping[str, Any] | None = None,
        lose_at_most: float | None = None,
    ) -> MapSource:
        """Open a run's folder (as `RunData.open`), a CSV map or `published:NAME`."""
        if Path(source).is_dir():
            return cls(RunData.open(source, metric, partial, fix, lose_at_most))
        return cls(read=with_binomial_bounds(read_maps(source, partial)))

    @cached_property
    def maps(self) -> list[Map]:
        """The maps, those of a file with the intervals of the binomial bound."""
        return list(self.read) if self.run is None else maps_of_run(self.run)
