"""Runs that vary one parameter, or nothing but the policy: a metric along one axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvatlas.core import Cell, KvatlasError, Trace
from kvatlas.results.csv_maps import ascending
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import short_names
from kvatlas.stats.estimates.maps import SCREEN_NOTE, check_measured, unmeasured_notes
from kvatlas.stats.estimates.validity import vacuous_sentence, validity

POLICY = "policy"


@dataclass(frozen=True)
class Curve:
    """A metric along `axis` for one model, benchmark and policy: cells by the axis' values, ascending.

    Where a run varies no parameter the axis is `policy` and the values are settings in words; `policy` is then empty.
    """

    model: str
    benchmark: str
    metric: str
    policy: str
    axis: str
    points: tuple[tuple[Any, Cell], ...]
    baselines: Mapping[str, Cell] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def one_axis(manifest: Manifest, fix: Mapping[str, Any] | None = None) -> bool:
    """Whether a run varies fewer than two parameters, so that it has curves and no maps."""
    return len(_varied(manifest, fix)) < 2


def _varied(manifest: Manifest, fix: Mapping[str, Any] | None) -> list[str]:
    return [name for name, held in manifest.axes if len(set(held)) > 1 and name not in (fix or {})]


def curves_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
) -> list[Curve]:
    """One curve for each model, benchmark and policy, in the manifest's order.

    Raises KvatlasError as `maps_of_run` does for an unknown metric and for missing traces (noted if `partial`), and
    for a run that varies two parameters or more.
    """
    varied = _varied(manifest, fix)
    if len(varied) > 1:
        raise KvatlasError(f"A curve has one axis and this run varies {len(varied)} ({', '.join(varied)}).")
    cells = [cell for cell in gather(manifest, traces, metric) if _fits(cell, fix)]
    missing = sum(cell.promised - cell.found for cell in cells)
    promised = sum(cell.promised for cell in cells)
    if missing == promised:
        raise KvatlasError(f"The run has none of its {promised} traces yet, so there is nothing to draw.")
    if missing and not partial:
        raise KvatlasError(
            f"{missing} of {promised} traces are missing; finish the sweep, or draw what is there with --partial."
        )
    notes: tuple[str, ...] = (f"PARTIAL: {missing} of {promised} traces are missing",) if missing else ()
    if manifest.screened:
        notes = (*notes, SCREEN_NOTE)
    check_measured(cells, metric, partial)
    there = [cell for cell in cells if cell.measured]
    groups: dict[tuple[str, str, str], list[CellTraces]] = {}
    for cell in there:
        along = bool(varied) and not cell.expected.baseline and varied[0] in cell.expected.setting.values
        if along or not varied:
            policy = cell.expected.setting.policy if varied else ""
            groups.setdefault((cell.expected.model, cell.expected.benchmark, policy), []).append(cell)
    axis = varied[0] if varied else POLICY
    return [
        Curve(
            model,
            benchmark,
            metric,
            policy,
            axis,
            _points(group, varied),
            _beside(there, (model, benchmark), varied),
            (*_vacuous(group), *notes, *unmeasured_notes(group, metric)),
        )
        for (model, benchmark, policy), group in groups.items()
    ]


def _vacuous(group: Sequence[CellTraces]) -> tuple[str, ...]:
    checked = validity(group)
    reason = vacuous_sentence(checked) if checked is not None else None
    return (f"VACUOUS: {reason}",) if reason else ()


def _fits(cell: CellTraces, fix: Mapping[str, Any] | None) -> bool:
    values = cell.expected.setting.values
    return all(values.get(name, value) == value for name, value in (fix or {}).items())


def _points(group: Sequence[CellTraces], varied: Sequence[str]) -> tuple[tuple[Any, Cell], ...]:
    if not varied:
        names = short_names(cell.expected.setting for cell in group)
        return tuple((names[cell.expected.setting.id], cell.cell()) for cell in group)
    by_value = {cell.expected.setting.values[varied[0]]: cell for cell in group}
    return tuple((value, by_value[value].cell()) for value in ascending(by_value))


def _beside(cells: Sequence[CellTraces], name: tuple[str, str], varied: Sequence[str]) -> dict[str, Cell]:
    beside = [cell for cell in cells if varied and cell.expected.baseline and _name(cell) == name]
    names = short_names(cell.expected.setting for cell in beside)
    return {names[cell.expected.setting.id]: cell.cell() for cell in beside}


def _name(cell: CellTraces) -> tuple[str, str]:
    return cell.expected.model, cell.expected.benchmark
