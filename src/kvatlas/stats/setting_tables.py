"""The settings of a run without maps as a table for each model: values, costs, and losses against the full cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvatlas.core import Cell, Note, NoteKind, grouped, mean_of
from kvatlas.stats.maps import check_complete, mean_cell, run_notes
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.run_data import RunData, short_names
from kvatlas.stats.table import CellTraces


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
    return [
        _table_of_model(model, run.metric, of_model, losses.get(model, {}), notes)
        for model, of_model in grouped(measured, lambda cell: cell.model).items()
    ]


def _table_of_model(
    model: str,
    metric: str,
    cells: Sequence[CellTraces],
    losses: Mapping[str, Difference],
    notes: Sequence[Note],
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
    table_notes = list(notes)
    if left_out:
        text = f"settings without traces of every benchmark are left out: {', '.join(left_out)}"
        table_notes.append(Note(NoteKind.LEFT_OUT, text))
    benchmark = benchmarks[0] if len(benchmarks) == 1 else mean_of(len(benchmarks))
    return SettingTable(model, benchmark, metric, tuple(rows), tuple(dict.fromkeys(table_notes)))


def _rank(row: SettingRow) -> tuple[float, float]:
    """Return a key that puts the highest value first, of equal ones the one that keeps the fewest tokens."""
    kept = row.cell.number("mean_kv_tokens")
    return -row.cell.estimate.value, math.inf if kept is None else kept
