"""A run as statistics look at it: its cells, its axes, and which cells belong to one map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, MapName, Setting, Trace
from kvatlas.results import Manifest, Store, TraceColumns
from kvatlas.stats.metrics import usual_metric
from kvatlas.stats.table import CellTraces, TraceTable
from kvatlas.text import spelled

Axes = tuple[str, str]
#: The cells of one map-to-be.
Groups = dict[MapName, list[CellTraces]]


def map_axes(manifest: Manifest, fix: Mapping[str, Any] | None = None) -> Axes:
    """The (vertical, horizontal) axes: the two parameters that the run varies and `fix` does not hold.

    Raises KvatlasError if there are more or fewer, or if `fix` names an axis or value that is not there.
    """
    fixed, values = dict(fix or {}), dict(manifest.axes)
    for name, value in fixed.items():
        if value not in values.get(name, ()):
            there = "; ".join(f"{axis}: {', '.join(map(str, known))}" for axis, known in values.items())
            raise KvatlasError(f"{name} cannot be fixed to {value!r}; the run has: {there or 'no axes'}.")
    names = varied(manifest, fixed)
    if len(names) != 2:
        more = f"; fix all but two, for example {names[-1]}={values[names[-1]][0]}" if len(names) > 2 else ""
        raise KvatlasError(
            f"A map needs two axes with at least two values each; this run varies {', '.join(names) or 'none'}{more}."
        )
    return names[0], names[1]


def varied(manifest: Manifest, fix: Mapping[str, Any]) -> list[str]:
    """The parameters that a run varies and `fix` does not hold to one value."""
    return [name for name, values in manifest.axes if len(set(values)) > 1 and name not in fix]


def grid_groups(cells: Iterable[CellTraces], axes: Axes, fix: Mapping[str, Any] | None = None) -> Groups:
    """The cells of the grid by map, without baselines and policies with a single value on an axis.

    A policy with several values of another parameter gives several groups, with that parameter in the label.
    """
    variants: dict[tuple[str, str], list[Setting]] = {}
    by_rest: dict[tuple[str, str, str], tuple[Setting, list[CellTraces]]] = {}
    for cell in cells:
        values = cell.setting.on_axes
        on_grid = not cell.baseline and all(axis in values for axis in axes)
        if not on_grid or any(values.get(name, value) != value for name, value in (fix or {}).items()):
            continue
        rest = Setting.of(cell.setting.policy, **{n: value for n, value in cell.setting.parameters if n not in axes})
        key = (cell.model, cell.benchmark, rest.id)
        by_rest.setdefault(key, (rest, []))[1].append(cell)
        known = variants.setdefault((cell.model, rest.policy), [])
        if rest not in known:
            known.append(rest)
    return {
        MapName(model, benchmark, short_names(variants[model, rest.policy])[rest.id]): group
        for (model, benchmark, _), (rest, group) in by_rest.items()
        if all(len({cell.setting.on_axes[axis] for cell in group}) > 1 for axis in axes)
    }


def short_names(settings: Iterable[Setting]) -> dict[str, str]:
    """Settings by id, each with its policy and those parameters alone in which the policy's settings differ."""
    by_policy: dict[str, dict[str, Setting]] = {}
    for setting in settings:
        by_policy.setdefault(setting.policy, {})[setting.id] = setting
    names: dict[str, str] = {}
    for policy, group in by_policy.items():
        every = {name for setting in group.values() for name in setting.values}
        differing = {name for name in every if len({repr(one.values.get(name)) for one in group.values()}) > 1}
        for identity, setting in group.items():
            values = {name: value for name, value in setting.values.items() if name in differing}
            names[identity] = str(Setting.of(policy, **values))
    return names


#: Points that a setting may lose against the full cache, where nothing else is asked for.
LOSE_AT_MOST = 3.0


@dataclass(frozen=True)
class RunData:
    """A run's promises and traces, and how to look at them.

    `traces` are the run's table, or columns or `(run key, trace)` pairs that become one. With `partial` missing traces
    are no error. `fix` holds axes beyond two to one value each. `chosen` are the cells instead of all. `lose_at_most`
    is the margin against the full cache in points; the sweep's own where None.
    """

    manifest: Manifest
    traces: TraceTable | TraceColumns | Iterable[tuple[str, Trace]] = ()
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
        """The run in a folder; without a metric with its usual one. KvatlasError for a folder without a run."""
        with Store.open(Path(folder)) as store:
            table = TraceTable.load(store)
        manifest = table.manifest
        fixed = {name: axis_value(manifest, name, value) for name, value in (fix or {}).items()}
        return cls(manifest, table, metric or usual_metric(manifest), partial, fixed, None, Path(folder), lose_at_most)

    def __post_init__(self) -> None:
        if not isinstance(self.traces, TraceTable):
            object.__setattr__(self, "traces", TraceTable.of(self.manifest, self.traces))

    @property
    def table(self) -> TraceTable:
        """The promised traces."""
        assert isinstance(self.traces, TraceTable)
        return self.traces

    def store(self) -> Store:
        """The store with the whole traces; KvatlasError if the run is not from a folder."""
        if self.folder is None:
            raise KvatlasError("This shows traces, so it needs a run that is stored in a folder.")
        return Store.open(self.folder)

    @cached_property
    def cells(self) -> Sequence[CellTraces]:
        """The promised cells with their traces; KvatlasError for a metric that the run does not have."""
        return self.table.cells(self.metric) if self.chosen is None else self.chosen

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
        """The loss against the full cache that a setting may have, in (0, 1)."""
        return margin_of(self.manifest.spec if self.lose_at_most is None else {"lose_at_most": self.lose_at_most})

    @property
    def is_line(self) -> bool:
        """True if the run varies fewer than two parameters, so that it has curves and no maps."""
        return len(varied(self.manifest, self.fix)) < 2

    def fits(self, cell: CellTraces) -> bool:
        """Return whether the cell has the values that `fix` holds."""
        values = cell.setting.values
        return all(values.get(name, value) == value for name, value in self.fix.items())

    def with_cells(self, cells: Sequence[CellTraces]) -> RunData:
        """The same, of these cells alone; they may come from other runs with the same axes."""
        return replace(self, chosen=cells)


def margin_of(spec: Mapping[str, Any]) -> float:
    """The margin in (0, 1) of a spec, 3 points by default. Raises KvatlasError for a value out of range."""
    points = spec.get("lose_at_most", LOSE_AT_MOST)
    if not isinstance(points, int | float) or not 0 < points < 100:
        raise KvatlasError(f"lose_at_most is a number of points above 0 and below 100; {points} was given.")
    return float(points) / 100


def axis_value(manifest: Manifest, name: str, value: Any) -> Any:
    """Return a value of an axis as the run has it, from how a command line writes it."""
    if not isinstance(value, str) or value in dict(manifest.axes).get(name, ()):
        return value
    return spelled(value)
