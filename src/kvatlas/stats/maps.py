"""Maps of a run, their means over benchmarks, and curves and tables of runs that vary one parameter or none."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from operator import attrgetter
from typing import Any, TypeVar

from kvatlas.columns import cell_columns
from kvatlas.core import Cell, KvatlasError, Map, MapName, Note, NoteKind, ascending, differing, grouped, mean_of
from kvatlas.stats.estimates import mean_over_benchmarks
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.run_data import RunData, short_names, shown_policies, without
from kvatlas.stats.table import CellTraces, missing, select
from kvatlas.stats.validity import merge_validity, validity_of

#: Versions that decide which tokens are drawn.
DECIDE = ("kvatlas", "torch", "transformers")

T = TypeVar("T")

LOOKED_EARLY = Note(NoteKind.INTERVAL, "Intervals and tests allow for a single look at the end")


def maps_of_run(run: RunData) -> list[Map]:
    """Return one map for each model, benchmark and policy that varies both axes, in the manifest's order.

    Raises KvatlasError if the run does not have two axes, or if traces are missing and it is not `partial`. Cells
    without any trace are left out.
    """
    groups = run.groups
    if not run.has_maps:
        raise KvatlasError(f"No policy of this run has two or more values of both {run.axes[0]} and {run.axes[1]}.")
    baselines = select(run.cells, baseline=True)
    shown = list(chain.from_iterable(groups.values()))
    check_complete(shown + baselines, run.partial)

    maps = []
    for name, group in groups.items():
        if any(cell.measured for cell in group):
            maps.append(_map_of_group(name, run, group, select(baselines, model=name.model, benchmark=name.benchmark)))
    return maps


def check_complete(cells: Sequence[CellTraces], partial: bool, what: str = "map") -> None:
    """Raise KvatlasError where traces are missing, unless `partial`, and where all are."""
    traces, promised, among = missing(cells)
    if traces == promised:
        raise KvatlasError(f"The run has none of its {promised} traces yet, so there is no {what} to draw.")
    if traces and not partial:
        raise KvatlasError(
            f"{traces} of {promised} traces are missing, in {among} of {len(cells)} cells; the missing ones are often "
            "the hardest problems, so finish the sweep, or draw what is there with --partial."
        )


def partial_note(cells: Sequence[CellTraces], subject: str = "traces", has_looks: bool = False) -> tuple[Note, ...]:
    """Return a note if traces are missing, and without declared looks one on intervals; the `subject` says whose."""
    traces, promised, among = missing(cells)
    if not traces:
        return ()
    text = f"PARTIAL: {traces} of {promised} {subject} are missing, in {among} {'cell' if among == 1 else 'cells'}"
    return (Note(NoteKind.PARTIAL, text), *(() if has_looks else (LOOKED_EARLY,)))


def mixed_note(cells: Sequence[CellTraces]) -> tuple[Note, ...]:
    """Return a warning if the traces were decoded by several versions of what decides their tokens."""
    traces_by = sum((cell.made_with for cell in cells), Counter[str]())
    versions = {text: json.loads(text or "{}") for text in traces_by}
    unlike = set(differing(versions.values()))
    names = [name for name in DECIDE if name in unlike]
    if not names:
        return ()

    # Versions that differ in other packages count as one.
    counts = Counter[str]()
    for text, count in traces_by.items():
        counts[", ".join(f"{name} {versions[text].get(name, 'unknown')}" for name in names)] += count
    listed = "; ".join(f"{count:,} traces by {text}" for text, count in sorted(counts.items()))
    return (Note(NoteKind.MIXED, f"MIXED: {listed}"),)


def _map_of_group(name: MapName, run: RunData, group: Sequence[CellTraces], baselines: Sequence[CellTraces]) -> Map:
    """Return the map of the cells of a group."""
    by_coord = {cell.coord(run.axes): cell for cell in group}
    rows = _levels_in_order(run, run.axes[0], [row for row, _ in by_coord])
    columns = _levels_in_order(run, run.axes[1], [column for _, column in by_coord])
    measured = [coord for coord in product(rows, columns) if coord in by_coord and by_coord[coord].measured]

    # Notes on fixed values, missing traces, and versions.
    notes = [Note(NoteKind.FIXED, f"{axis}={value}") for axis, value in run.fix.items()]
    for term in ("budget_over", "every", "every_from"):
        # Terms of the budget beside the published rule that all cells of the map share.
        values = {cell.setting.values.get(term) for cell in group}
        if len(values) == 1 and values != {None} and term not in run.fix:
            notes.append(Note(NoteKind.FIXED, f"{term}={values.pop()}"))
    shown = (*group, *baselines)
    notes += [*partial_note(shown, "traces of a map", run.look.share is not None), *mixed_note(shown)]
    notes += _off_map_notes(run, name)

    return Map(
        name.model,
        name.benchmark,
        run.metric,
        name.policy,
        ((run.axes[0], rows), (run.axes[1], columns)),
        {coord: by_coord[coord].cell for coord in measured},
        _by_short_name(cell for cell in baselines if cell.measured),
        tuple(notes),
        validity_of(group),
        claim=run.claim,
        is_control=all(cell.is_control for cell in group),
    )


def _levels_in_order(run: RunData, axis: str, used: Sequence[Any]) -> tuple[Any, ...]:
    """Return the levels of an axis that are used, numbers in ascending order and words in that of the spec."""
    return ascending(level for level in (*dict(run.manifest.axes).get(axis, ()), *used) if level in used)


def _by_short_name(cells: Iterable[CellTraces]) -> dict[str, Cell]:
    """Return cells by the short names of their settings."""
    by_id = {cell.setting.id: cell for cell in cells}
    names = short_names(cell.setting for cell in by_id.values())
    return {names[setting]: cell.cell for setting, cell in by_id.items()}


def _off_map_notes(run: RunData, name: MapName) -> list[Note]:
    """Return a note on the settings of a map's model and benchmark that no map shows, and how they can be shown."""
    cells = select(run.off_maps, model=name.model, benchmark=name.benchmark)
    if not cells:
        return []
    settings = "1 setting" if len(cells) == 1 else f"{len(cells):,} settings"
    shown = shown_policies(cell.setting.policy for cell in run.cells)
    policies = ", ".join(dict.fromkeys(shown[cell.setting.policy] for cell in cells))

    # An axis of which the settings like the first one have a single value.
    alike = [cell for cell in cells if run.without_axes(cell) == run.without_axes(cells[0])]
    for axis in run.axes:
        values = {cell.all_values.get(axis) for cell in alike}
        if len(values) == 1:
            break
    (value,) = values
    if value is None:
        # A setting without the parameter stands beside those of any value.
        value = dict(run.manifest.axes)[axis][0]
    text = f"{settings} of {policies} on no map, with fewer than two values of {run.axes[0]} or {run.axes[1]}: "
    return [Note(NoteKind.LEFT_OUT, f"{text}--fix {axis}={value} shows such settings")]


def mean_map(maps: Sequence[Map]) -> Map:
    """Return the mean of one model's and policy's maps over their benchmarks, cell by cell, named `mean of N`.

    Cells and baselines that not all maps have are left out, and the notes say so. Raises KvatlasError for maps of
    unlike model, policy, metric or axes, and for a benchmark that comes twice.
    """
    first = maps[0]
    for noun, other in product(("model", "policy", "metric", "axes"), maps[1:]):
        if getattr(other, noun) != getattr(first, noun):
            raise KvatlasError(
                f"A mean needs maps of equal {noun}; those of {first.benchmark} and {other.benchmark} differ."
            )
    benchmarks = [map_.benchmark for map_ in maps]
    if len(set(benchmarks)) < len(benchmarks):
        raise KvatlasError(f"A mean counts every benchmark once; given were {', '.join(benchmarks)}.")

    cells = _mean_cells([map_.cells for map_ in maps])
    notes: dict[Note, None] = {}
    for note in chain.from_iterable(map_.notes for map_ in maps):
        # The maps lack different traces, so the mean gives no numbers.
        if note.kind is NoteKind.PARTIAL:
            note = Note(NoteKind.PARTIAL, "PARTIAL: some of the averaged maps lack traces")
        notes[note] = None
    if any(len(map_.cells) > len(cells) for map_ in maps):
        notes[Note(NoteKind.LEFT_OUT, "cells that not every benchmark has are left out")] = None
    return Map(
        first.model,
        mean_of(len(maps)),
        first.metric,
        first.policy,
        first.axes,
        cells,
        _mean_cells([map_.baselines for map_ in maps]),
        tuple(notes),
        merge_validity([map_.validity for map_ in maps]),
        averaged=len(maps),
        claim=first.claim,
        is_control=first.is_control,
    )


def _mean_cells(benchmarks: Sequence[Mapping[T, Cell]]) -> dict[T, Cell]:
    """Return the mean of each cell that all benchmarks have."""
    means = {}
    for key in benchmarks[0]:
        cells = [of_benchmark[key] for of_benchmark in benchmarks if key in of_benchmark]
        if len(cells) == len(benchmarks):
            means[key] = mean_cell(cells)
    return means


def mean_maps(maps: Sequence[Map]) -> list[Map]:
    """Return the mean map of every model, policy and metric with two or more benchmarks, else the mean that is given.

    The means over several benchmarks come first.
    """
    names = attrgetter("model", "policy", "metric")
    single = grouped((map_ for map_ in maps if not map_.is_mean), names)
    means = {name: mean_map(group) for name, group in single.items() if len(group) > 1}
    for map_ in maps:
        if map_.is_mean:
            means.setdefault(names(map_), map_)
    return list(means.values())


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """Return the mean of the cells of one setting over several benchmarks.

    A number is known if it is known of all of them.
    """
    columns = [column for column in cell_columns(cells[0].measures) if column.key in cells[0].numbers]
    numbers = {column.key: column.over_benchmarks(cells) for column in columns}
    return Cell(cells[0].setting, mean_over_benchmarks([cell.estimate for cell in cells]), numbers, cells[0].measures)


#: The vertical axis of a map of curves.
POLICY = "policy"


def curves_of_run(run: RunData) -> list[Map]:
    """Return one map for each model and benchmark of a run without maps: a curve over its axis for each policy.

    Policies are the rows. Without an axis that a policy varies alone the settings are the rows of a single column.
    Raises KvatlasError as `maps_of_run` does, and for a run that has maps.
    """
    if run.has_maps:
        raise KvatlasError(f"A curve has one axis and this run varies {len(run.varied)} ({', '.join(run.varied)}).")
    cells = [cell for cell in run.cells if run.fits(cell)]
    check_complete(cells, run.partial, "curve")
    notes = run_notes(run, cells)
    measured = [cell for cell in cells if cell.measured]
    if len(run.varied) != 1:
        groups = grouped(measured, lambda cell: (cell.model, cell.benchmark))
        return [_single_column(group, notes) for group in groups.values()]

    # Settings without the parameter are the same at each of its values, as baselines are.
    axis = run.varied[0]
    on_axis = [cell for cell in measured if not cell.baseline and axis in cell.all_values]
    constant = [cell for cell in measured if cell.baseline or axis not in cell.all_values]
    line_settings = [without(cell, (axis,)) for cell in on_axis]
    names = short_names([*line_settings, *(cell.setting for cell in constant)])

    curves = []
    for (model, benchmark), group in grouped(on_axis, lambda cell: (cell.model, cell.benchmark)).items():
        lines = grouped(group, lambda cell: names[without(cell, (axis,)).id])
        by_coord = {(names[without(cell, (axis,)).id], cell.all_values[axis]): cell for cell in group}
        values = _levels_in_order(run, axis, [value for _, value in by_coord])
        beside_grid = select(constant, model=model, benchmark=benchmark)
        curve = Map(
            model,
            benchmark,
            run.metric,
            "",
            ((POLICY, tuple(lines)), (axis, values)),
            {coord: by_coord[coord].cell for coord in product(lines, values) if coord in by_coord},
            {names[cell.setting.id]: cell.cell for cell in beside_grid},
            _notes_of_curves(list(lines.values()), notes),
        )
        curves.append(curve)
    return curves


def run_notes(run: RunData, cells: Sequence[CellTraces]) -> list[Note]:
    """Return the notes on fixed values, missing traces and versions of these cells of a run."""
    notes = [Note(NoteKind.FIXED, f"{name}={value}") for name, value in run.fix.items()]
    notes += [*partial_note(cells, has_looks=run.look.share is not None), *mixed_note(cells)]
    return notes


def _single_column(group: Sequence[CellTraces], notes: Sequence[Note]) -> Map:
    """Return the settings of a model on a benchmark as the rows of a single column."""
    first = group[0]
    by_name = _by_short_name(group)
    axes = ((POLICY, tuple(by_name)), ("", (first.metric,)))
    points = {(name, first.metric): cell for name, cell in by_name.items()}
    return Map(first.model, first.benchmark, first.metric, "", axes, points, notes=_notes_of_curves([group], notes))


def _notes_of_curves(curves: Sequence[Sequence[CellTraces]], notes: Sequence[Note]) -> tuple[Note, ...]:
    """Return the notes of the run behind those of its curves: what cannot be compared."""
    warnings = [checked.warnings for checked in map(validity_of, curves) if checked is not None]
    return tuple(dict.fromkeys((*chain.from_iterable(warnings), *notes)))


# -- tables of settings ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SettingRow:
    """A setting under its short `name`: the mean over benchmarks, the cell on each, and what it loses.

    `loss` is that against the full cache; None for the full cache itself, and in a run without one.
    """

    name: str
    cell: Cell
    by_benchmark: Mapping[str, Cell]
    loss: Difference | None = None


@dataclass(frozen=True)
class SettingTable:
    """The settings of a model, the highest first; of equal ones the one that keeps the fewest tokens first.

    `benchmark` is the only one, or `mean of N`. Settings that lack a benchmark are left out, and `notes` say so.
    """

    model: str
    benchmark: str
    metric: str
    rows: tuple[SettingRow, ...]
    notes: tuple[Note, ...] = ()

    @property
    def benchmarks(self) -> list[str]:
        """The benchmarks of the table."""
        return list(self.rows[0].by_benchmark) if self.rows else []


def setting_tables(run: RunData, losses: Mapping[str, Mapping[str, Difference]]) -> list[SettingTable]:
    """Return the table of each model of a run without maps; `losses` by model and setting id.

    Raises KvatlasError if traces are missing and the run is not `partial`.
    """
    cells = [cell for cell in run.cells if run.fits(cell)]
    check_complete(cells, run.partial, "table")
    measured = [cell for cell in cells if cell.measured]
    notes = run_notes(run, cells)
    by_model = grouped(measured, lambda cell: cell.model)
    return [_table_of_model(group, losses.get(model, {}), notes) for model, group in by_model.items()]


def _table_of_model(
    cells: Sequence[CellTraces], losses: Mapping[str, Difference], notes: Sequence[Note]
) -> SettingTable:
    names = short_names(cell.setting for cell in cells)
    benchmarks = list(dict.fromkeys(cell.benchmark for cell in cells))

    rows = []
    left_out = []
    for setting, of_setting in grouped(cells, lambda cell: cell.setting.id).items():
        # A mean over fewer benchmarks cannot stand beside the others.
        if len(of_setting) < len(benchmarks):
            left_out.append(names[setting])
            continue
        by_benchmark = {cell.benchmark: cell.cell for cell in of_setting}
        mean = mean_cell(list(by_benchmark.values()))
        rows.append(SettingRow(names[setting], mean, by_benchmark, losses.get(setting)))

    rows.sort(key=_rank)
    if left_out:
        text = f"settings without traces of every benchmark are left out: {', '.join(left_out)}"
        notes = [*notes, Note(NoteKind.LEFT_OUT, text)]
    benchmark = benchmarks[0] if len(benchmarks) == 1 else mean_of(len(benchmarks))
    return SettingTable(cells[0].model, benchmark, cells[0].metric, tuple(rows), tuple(dict.fromkeys(notes)))


def _rank(row: SettingRow) -> tuple[float, float]:
    """Return a key that puts the highest value first, of equal ones the one that keeps the fewest tokens."""
    kept = row.cell.number("mean_kv_tokens")
    return -row.cell.estimate.value, math.inf if kept is None else kept
