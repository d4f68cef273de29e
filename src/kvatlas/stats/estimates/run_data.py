"""A run as statistics look at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Trace
from kvatlas.results import Manifest, Store, TraceColumns
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import Axes, Groups, grid_groups, map_axes, varied
from kvatlas.stats.estimates.metrics import usual_metric
from kvatlas.text import spelled

#: Points that a setting may lose against the full cache, where nothing else is asked for.
LOSE_AT_MOST = 3.0


@dataclass(frozen=True)
class RunData:
    """What a run promised, its traces, and how they are looked at.

    `traces` are columns, or `(run key, trace)` pairs that become columns; `metric` is any that the run has
    (`stats.estimates.metrics`). With `partial` missing traces are noted and no error. `fix` holds axes beyond two to
    one value each. `chosen` are the cells to look at instead of all of the run's. `folder` is where the run is stored.
    `lose_at_most` points against the full cache are asked for; the sweep's own where None.
    """

    manifest: Manifest
    traces: TraceColumns | Iterable[tuple[str, Trace]] = ()
    metric: str = "pass@1"
    partial: bool = False
    fix: Mapping[str, Any] = field(default_factory=dict)
    chosen: Sequence[CellTraces] | None = None
    folder: Path | None = None
    lose_at_most: float | None = None

    @classmethod
    def open(
        cls,
        folder: str | Path,
        metric: str | None = "pass@1",
        partial: bool = False,
        fix: Mapping[str, Any] | None = None,
        lose_at_most: float | None = None,
    ) -> RunData:
        """The run in a folder; without a metric with the one that it usually shows.

        A text in `fix` is read as the axis has it: `fix={"ratio": "0.3"}`. KvatlasError for a folder without a run.
        """
        with Store.open(Path(folder)) as store:
            manifest, traces = store.manifest(), store.columns()
        fixed = {name: _axis_value(manifest, name, value) for name, value in (fix or {}).items()}
        return cls(manifest, traces, metric or usual_metric(manifest), partial, fixed, None, Path(folder), lose_at_most)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traces", TraceColumns.of(self.traces))

    @property
    def columns(self) -> TraceColumns:
        """The traces."""
        return TraceColumns.of(self.traces)

    def store(self) -> Store:
        """The store with the whole traces; KvatlasError where the run is not from a folder."""
        if self.folder is None:
            raise KvatlasError("This shows traces, so it needs a run that is stored in a folder.")
        return Store.open(self.folder)

    @cached_property
    def cells(self) -> Sequence[CellTraces]:
        """The promised cells with their traces; KvatlasError for a metric that the run does not have."""
        return gather(self.manifest, self.columns, self.metric) if self.chosen is None else self.chosen

    @cached_property
    def axes(self) -> Axes:
        """The names of the vertical and the horizontal axis; KvatlasError unless two are left."""
        return map_axes(self.manifest, self.fix)

    @cached_property
    def groups(self) -> Groups:
        """The cells of each map."""
        return grid_groups(self.cells, self.axes, self.fix)

    @property
    def margin(self) -> float:
        """What a setting may lose against the full cache, in (0, 1)."""
        return margin_of(self.manifest.spec if self.lose_at_most is None else {"lose_at_most": self.lose_at_most})

    @property
    def is_line(self) -> bool:
        """Whether the run varies fewer than two parameters, so that it has curves and no maps."""
        return len(varied(self.manifest, self.fix)) < 2

    def fits(self, cell: CellTraces) -> bool:
        """Whether the cell has the values that `fix` holds."""
        values = cell.expected.setting.values
        return all(values.get(name, value) == value for name, value in self.fix.items())

    def with_cells(self, cells: Sequence[CellTraces]) -> RunData:
        """The same, of these cells alone; they may come from other runs with the same axes."""
        return replace(self, chosen=cells)


def margin_of(spec: Mapping[str, Any]) -> float:
    """The margin in (0, 1) of a spec, 3 points where it has none; KvatlasError for one that is none."""
    points = spec.get("lose_at_most", LOSE_AT_MOST)
    if not isinstance(points, int | float) or not 0 < points < 100:
        raise KvatlasError(f"lose_at_most is a number of points above 0 and below 100; {points} was given.")
    return float(points) / 100


def _axis_value(manifest: Manifest, name: str, value: Any) -> Any:
    if not isinstance(value, str) or value in dict(manifest.axes).get(name, ()):
        return value
    return spelled(value)
