"""What the app's page shows of a run: the report's data, without its traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.core import KvatlasError, Map
from kvatlas.figures import style
from kvatlas.report.page_json import Cells, page_json
from kvatlas.report.verdicts import cards
from kvatlas.results.manifest import Manifest
from kvatlas.stats.maps import curves_of_run, flat_maps, maps_of_run, mean_maps
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData, short_names


@dataclass(frozen=True)
class Table:
    """The cells of a model and a benchmark, by number, and the problems and samples of each."""

    model: str
    benchmark: str
    problems: tuple[str, ...]
    samples: int
    rows: tuple[int, ...]


def quick(run: RunData, tables: Sequence[Table]) -> dict[str, Any]:
    """The maps of the traces that are there, without any test; why there is none in `obstacle`."""
    cells = _cells(run)
    maps, obstacle = _maps(run)
    data = page_json(maps, mean_maps(maps), {}, {}, cells) if maps else _empty(run, cells)
    return _document(data, tables) | {"obstacle": obstacle}


def analysed(run: RunData, tables: Sequence[Table]) -> dict[str, Any]:
    """The maps of a run that is finished, with their tests and what to choose."""
    analysis = RunAnalysis(run)
    try:
        maps = [] if run.is_line else analysis.maps
    except KvatlasError:
        maps = []
    if not maps:
        return quick(run, tables)
    cells = _cells(run)
    data = page_json(maps, analysis.means, analysis.verdicts, analysis.differences, cells)
    document = {"cards": cards(analysis, cells), "findings": [finding.text for finding in analysis.findings]}
    return _document(data | document, tables)


def _cells(run: RunData) -> Cells:
    return Cells(short_names(cell.setting for cell in run.manifest.expected), run.manifest.expected)


def _maps(run: RunData) -> tuple[list[Map], str | None]:
    try:
        return (flat_maps(curves_of_run(run)) if run.is_line else maps_of_run(run)), None
    except KvatlasError as error:
        return [], str(error)


def _empty(run: RunData, cells: Cells) -> dict[str, Any]:
    return {"metric": style.label(run.metric), "maps": [], "fronts": [], "cells": cells.documents}


def _document(data: dict[str, Any], tables: Sequence[Table]) -> dict[str, Any]:
    outcomes = [
        {
            "model": table.model,
            "short": style.model(table.model),
            "benchmark": table.benchmark,
            "problems": table.problems,
            "samples": table.samples,
            "rows": [{"cell": number} for number in table.rows],
        }
        for table in tables
    ]
    return {"cards": [], "findings": [], "obstacle": None, **data, "outcomes": outcomes}


def counts(manifest: Manifest) -> dict[str, Any]:
    """What a run is about."""
    expected = manifest.expected
    return {
        "models": [style.model(name) for name in dict.fromkeys(cell.model for cell in expected)],
        "benchmarks": list(dict.fromkeys(cell.benchmark for cell in expected)),
        "settings": len({cell.setting.id for cell in expected}),
    }
