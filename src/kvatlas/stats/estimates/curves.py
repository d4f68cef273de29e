"""Runs that vary one parameter, or nothing but the policy: a metric along one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvatlas.core import Cell, KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.results.csv_maps import ascending
from kvatlas.stats.estimates.cells import CellTraces
from kvatlas.stats.estimates.grid import short_names, varied
from kvatlas.stats.estimates.maps import (
    SCREEN_NOTE,
    check_complete,
    check_measured,
    mixed_note,
    partial_note,
    unmeasured_notes,
)
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.estimates.validity import validity

POLICY = "policy"


@dataclass(frozen=True)
class Curve:
    """A metric along `axis` for one model, benchmark and policy: cells by the axis' values, ascending.

    Where a run varies no parameter the axis is `policy` and the values are settings as text; `policy` is then empty.
    """

    model: str
    benchmark: str
    metric: str
    policy: str
    axis: str
    points: tuple[tuple[Any, Cell], ...]
    baselines: Mapping[str, Cell] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def curves_of_run(run: RunData) -> list[Curve]:
    """One curve for each model, benchmark and policy, in the manifest's order.

    Raises KvatlasError as `maps_of_run` does for an unknown metric and for missing traces (noted if the run is
    `partial`), and for a run that varies two parameters or more.
    """
    names = varied(run.manifest, run.fix)
    if not run.is_line:
        raise KvatlasError(f"A curve has one axis and this run varies {len(names)} ({', '.join(names)}).")
    cells = [cell for cell in run.cells if run.fits(cell)]
    check_complete(cells, run.partial, "curve")
    notes = partial_note(cells, counted=False) + mixed_note(cells)
    if run.manifest.screened:
        notes = (*notes, SCREEN_NOTE)
    check_measured(cells, run.metric, run.partial)
    measured = [cell for cell in cells if cell.measured]
    groups: dict[MapName, list[CellTraces]] = {}
    for cell in measured:
        along = bool(names) and not cell.expected.baseline and names[0] in cell.expected.setting.values
        if along or not names:
            policy = cell.expected.setting.policy if names else ""
            groups.setdefault(MapName(cell.expected.model, cell.expected.benchmark, policy), []).append(cell)
    return [
        Curve(
            *(name.model, name.benchmark, run.metric, name.policy),
            names[0] if names else POLICY,
            _points(group, names),
            _baselines(measured, name, names),
            (*_vacuous(group), *notes, *unmeasured_notes(group, run.metric)),
        )
        for name, group in groups.items()
    ]


def _vacuous(group: Sequence[CellTraces]) -> tuple[Note, ...]:
    checked = validity(group)
    return (Note(NoteKind.VACUOUS, f"VACUOUS: {checked.reason}"),) if checked is not None and checked.reason else ()


def _points(group: Sequence[CellTraces], varied: Sequence[str]) -> tuple[tuple[Any, Cell], ...]:
    if not varied:
        names = short_names(cell.expected.setting for cell in group)
        return tuple((names[cell.expected.setting.id], cell.cell()) for cell in group)
    by_value = {cell.expected.setting.values[varied[0]]: cell for cell in group}
    return tuple((value, by_value[value].cell()) for value in ascending(by_value))


def _baselines(cells: Sequence[CellTraces], name: MapName, varied_names: Sequence[str]) -> dict[str, Cell]:
    chosen = [
        cell
        for cell in cells
        if varied_names
        and cell.expected.baseline
        and (cell.expected.model, cell.expected.benchmark) == (name.model, name.benchmark)
    ]
    names = short_names(cell.expected.setting for cell in chosen)
    return {names[cell.expected.setting.id]: cell.cell() for cell in chosen}


def flat_maps(curves: Sequence[Curve]) -> list[Map]:
    """Curves as maps, a map for each model and benchmark: policies by the axis' values, or settings in one column."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.model, curve.benchmark), []).append(curve)
    maps = []
    for (model, benchmark), group in groups.items():
        first = group[0]
        if first.axis == POLICY:
            cells = {(value, first.metric): cell for value, cell in first.points}
            axes = ((POLICY, tuple(value for value, _ in first.points)), ("", (first.metric,)))
        else:
            cells = {(curve.policy, value): cell for curve in group for value, cell in curve.points}
            values = dict.fromkeys(value for curve in group for value, _ in curve.points)
            axes = ((POLICY, tuple(curve.policy for curve in group)), (first.axis, tuple(values)))
        maps.append(Map(model, benchmark, first.metric, "", axes, cells, first.baselines, first.notes))
    return maps
