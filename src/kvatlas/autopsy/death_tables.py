"""The kinds of death of the answers that settings lose, of all runs of a result, as data and as a table."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvatlas.autopsy.cell_deaths import CellDeaths, count_deaths, lost_traces
from kvatlas.autopsy.kinds_of_death import Death
from kvatlas.report.description import markdown_table
from kvatlas.report.materials import RunMaterials
from kvatlas.stats.run_data import short_names
from kvatlas.text import interval_text, model_name, percent_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvatlas.report.result import Result


def deaths_of(result: Result) -> list[CellDeaths]:
    """Return the deaths of the cells of all runs; the texts of all lost answers are read."""
    cells: list[CellDeaths] = []
    for run in result.runs:
        with run.store() as store:
            materials = RunMaterials.from_manifest(run.manifest)
            cells += count_deaths(lost_traces(store, materials.pieces))
    policy = result.options.policy
    return [cell for cell in cells if policy is None or cell.setting.is_of(policy)]


def deaths_table(cells: Sequence[CellDeaths]) -> str:
    """Return a Markdown section: for each cell its lost answers, and the share of each kind with its interval."""
    if not cells:
        return "# Lost answers\n\nNo setting lost an answer that the full cache has.\n"
    present = set(chain.from_iterable(cell.shares for cell in cells))
    kinds = [kind for kind in Death if kind in present]
    names = short_names(cell.setting for cell in cells)
    rows = []
    for cell in cells:
        shares = [_share_text(cell, kind) for kind in kinds]
        rows.append([model_name(cell.model), cell.benchmark, names[cell.setting.id], str(cell.lost), *shares])
    header = ["Model", "Benchmark", "Setting", "Lost", *(kind.value for kind in kinds)]
    return f"# Lost answers\n\nHow they died, % of the lost (95 % interval):\n\n{markdown_table(header, rows)}\n"


def _share_text(cell: CellDeaths, kind: Death) -> str:
    share = cell.shares.get(kind)
    return "–" if share is None else f"{percent_text(share.value)} ({interval_text(share)})"
