"""Which map each map is compared with, and the paired differences where there are traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.core import CellCoord, KvatlasError, Map, MapName
from kvatlas.figures import style
from kvatlas.figures.panels import Against
from kvatlas.report.map_source import MapSource
from kvatlas.stats.inference import Contrast
from kvatlas.stats.maps import mean_map, mean_maps
from kvatlas.stats.pairs import Differences, differences_of_run, differences_of_runs
from kvatlas.stats.run_data import RunData


@dataclass(frozen=True)
class Compared:
    """The maps that are compared, what with, and the differences that are paired."""

    maps: Sequence[Map]
    against: Against
    differences: Differences

    def of_means(self) -> Compared:
        """The same for means over benchmarks."""
        by_policy: dict[tuple[str, str], list[Map]] = {}
        for map_ in self.maps if self.against.others else ():
            by_policy.setdefault((map_.model, map_.policy), []).append(map_)
        others = {
            MapName.of_mean(model, len(group), policy): mean_map([self.against.others[map_.name] for map_ in group])
            for (model, policy), group in by_policy.items()
            if len(group) > 1
        }
        against = Against(self.against.name, {**self.against.others, **others})
        return Compared(mean_maps(self.maps), against, self.differences)


def compare(maps: Sequence[Map], runs: Sequence[RunData], against: str, other: MapSource | None) -> Compared:
    """Maps against a baseline, a policy, a model, or the maps of the `other` source.

    Raises KvatlasError where nothing has that name, and where no map can be compared with it.
    """
    if other is not None:
        return _compared(
            maps, Path(against).name, other.maps, lambda name: name, runs, [other.run] if other.run else []
        )
    if any(against in map_.baselines for map_ in maps):
        paired = {name: cells for run in runs for name, cells in differences_of_run(run, against).items()}
        return Compared(maps, Against(against), paired)
    if any(against == map_.policy for map_ in maps):
        rest = [map_ for map_ in maps if map_.policy != against]
        return _compared(rest, against, maps, lambda name: name._replace(policy=against), runs, runs)
    models = dict.fromkeys(map_.model for map_ in maps)
    model = next((name for name in models if against in (name, style.model(name))), None)
    if model is not None:
        rest, full = [map_ for map_ in maps if map_.model != model], model
        return _compared(rest, style.model(full), maps, lambda name: name._replace(model=full), runs, runs)
    named = dict.fromkeys(
        [*(name for map_ in maps for name in map_.baselines), *(map_.policy for map_ in maps), *models]
    )
    raise KvatlasError(
        f"There is no baseline, policy or model {against!r} to compare with, and no such run or CSV map; there are: "
        f"{', '.join(filter(None, named))}."
    )


def _compared(
    maps: Sequence[Map],
    name: str,
    theirs: Sequence[Map],
    partner: Callable[[MapName], MapName],
    runs: Sequence[RunData],
    other_runs: Sequence[RunData],
) -> Compared:
    by_name = {(map_.name, *(axis for axis, _ in map_.axes)): map_ for map_ in theirs}
    others = {}
    for map_ in maps:
        other = by_name.get((partner(map_.name), *(axis for axis, _ in map_.axes)))
        if other is not None:
            others[map_.name] = other
    if not others:
        raise KvatlasError(f"No map has the model, benchmark, policy and axes of a map of {name} to be compared with.")
    contrasts: dict[MapName, Mapping[CellCoord, Contrast]] = {}
    for run in runs:
        for other_run in other_runs:
            contrasts |= differences_of_runs(run, other_run, partner)
    return Compared([map_ for map_ in maps if map_.name in others], Against(name, others), contrasts)
