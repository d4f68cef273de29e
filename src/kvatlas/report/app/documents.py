"""The app's documents of maps and cells: percent scale, as in `kvatlas describe --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvatlas.core import Cell, CellCoord, Map, Setting, Status, percent, rounded
from kvatlas.figures import style
from kvatlas.figures.panels import framed
from kvatlas.report.text import recommendation
from kvatlas.results import Expected
from kvatlas.results.records import STATUS
from kvatlas.stats.choice import Choice
from kvatlas.stats.maps import curves_of_run, mean_maps
from kvatlas.stats.numerics.arrays import Contrast
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import short_names
from kvatlas.stats.table import CellTraces
from kvatlas.stats.validity import findings
from kvatlas.stats.verdicts import Verdict

Json = dict[str, Any]
#: The outcome of a trace in one letter: right, wrong, truncated, no answer, missing.
RIGHT, WRONG, TRUNCATED, NO_ANSWER, MISSING = "rwtn."
_NUMBERS = ("value", "low", "high", "problems", "samples", "kept", "peak", "output", "seconds", "audit", "truncated")


class Cells:
    """The numbered cells of a run: the promised ones in the manifest's order, then those of means over benchmarks.

    Cells that no map shows have null in place of each number.
    """

    def __init__(self, promised: Sequence[Expected]) -> None:
        self.short = short_names(expected.setting for expected in promised)
        self.numbers: dict[tuple[str, str, str], int] = {}
        self.documents: list[Json] = []
        for expected in promised:
            self._add(expected.model, expected.benchmark, expected.setting)

    def _add(self, model: str, benchmark: str, setting: Setting) -> int:
        number = self.numbers[model, benchmark, setting.id] = len(self.documents)
        names = {"name": str(setting), "policy": setting.policy, "model": model, "benchmark": benchmark}
        short = self.short.get(setting.id, str(setting))
        self.documents.append({**names, "short": short, **dict.fromkeys((*_NUMBERS, "difference"))})
        return number

    def number(self, map_: Map, cell: Cell, difference: Contrast | None = None) -> int:
        """Return the number of a cell of a map, or of one of its baselines, and note its values."""
        number = self.numbers.get((map_.model, map_.benchmark, cell.setting.id))
        if number is None:
            number = self._add(map_.model, map_.benchmark, cell.setting)
        if self.documents[number]["value"] is None:
            self.documents[number] |= _values(cell, difference)
        return number


def _values(cell: Cell, difference: Contrast | None) -> Json:
    known, truncated = cell.to_dict(), cell.truncated
    traces = (cell.estimate.problems or 0) * (cell.estimate.samples or 0)
    return {
        **{name: known[name] for name in ("value", "low", "high", "problems", "samples", "audit")},
        "kept": rounded(cell.mean_kv_tokens, 1),
        "peak": known["peak_kv_tokens"],
        "output": rounded(cell.output_tokens_mean, 1),
        "seconds": known["seconds_mean"],
        "truncated": percent(truncated / traces) if truncated is not None and traces else truncated,
        "difference": None if difference is None else _interval(difference),
    }


def _interval(contrast: Any) -> list[float | None]:
    return [percent(contrast.value), percent(contrast.low), percent(contrast.high)]


def maps_of(analysis: RunAnalysis, tested: bool = True) -> list[Map]:
    """Return the maps of a run, or its curves as maps of one row; `tested` maps have regions.

    Raises KvatlasError as `maps_of_run` does.
    """
    if analysis.run.is_line:
        return curves_of_run(analysis.run)
    return analysis.maps if tested else analysis.untested_maps


def run_document(analysis: RunAnalysis, maps: Sequence[Map], tested: bool) -> Json:
    """Return maps, cells and fronts; with `tested` also tests, what to choose, and what limits the run."""
    compared = tested and not analysis.run.is_line
    means = analysis.means if compared else mean_maps(maps)
    verdicts = analysis.verdicts if compared else {}
    differences = analysis.differences if compared else {}
    every, cells = [*means, *maps], Cells(analysis.run.manifest.expected)
    return {
        "metric": style.label(maps[0].metric if maps else analysis.run.metric),
        "maps": [_map(map_, verdicts.get(map_.name), differences.get(map_.name, {}), cells) for map_ in every],
        "fronts": _fronts(every, cells),
        "cards": [_card(choice, every, cells) for choice in analysis.choices] if compared else [],
        "findings": [finding.text for finding in findings(analysis.run.cells)] if tested else [],
        "cells": cells.documents,
    }


def _map(map_: Map, verdict: Verdict | None, differences: Mapping[CellCoord, Contrast], cells: Cells) -> Json:
    (vertical, rows), (horizontal, columns) = map_.axes
    rows = tuple(reversed(rows))
    region, about = framed(map_)

    def number(coord: CellCoord) -> int | None:
        cell = map_.cells.get(coord)
        return None if cell is None else cells.number(map_, cell, differences.get(coord))

    return {
        "model": map_.model,
        "short": style.model(map_.model),
        "benchmark": map_.benchmark,
        "policy": map_.policy,
        "vertical": style.label(vertical),
        "horizontal": style.label(horizontal),
        "rows": [str(value) for value in rows],
        "columns": [str(value) for value in columns],
        "cells": [[number((row, column)) for column in columns] for row in rows],
        "framed": [[int((row, column) in region) for column in columns] for row in rows],
        "frame": about,
        "evidence": verdict.evidence if verdict else None,
        "beside": [cells.number(map_, cell) for cell in map_.baselines.values()],
        "notes": [{"text": note.text, "warning": note.is_warning} for note in map_.notes],
        "vacuous": map_.validity.reason if map_.validity else None,
    }


def _fronts(maps: Sequence[Map], cells: Cells) -> list[Json]:
    """For each model and benchmark its cells, and those on the fronts of value against each cost."""
    groups: dict[tuple[str, str], dict[int, Cell]] = {}
    for map_ in maps:
        group = groups.setdefault((map_.model, map_.benchmark), {})
        for cell in (*map_.cells.values(), *map_.baselines.values()):
            group[cells.number(map_, cell)] = cell
    return [
        {
            "model": model,
            "benchmark": benchmark,
            "cells": list(group),
            "kept": front({n: (cell.mean_kv_tokens, cell.estimate.value) for n, cell in group.items()}),
            "seconds": front({n: (cell.seconds_mean, cell.estimate.value) for n, cell in group.items()}),
        }
        for (model, benchmark), group in groups.items()
    ]


def front(points: Mapping[int, tuple[float | None, float]]) -> list[int]:
    """Return the points (cost, value) that no other beats in one and matches in the other, the cheapest first."""
    known = sorted((cost, -value, number) for number, (cost, value) in points.items() if cost is not None)
    cheapest_first: list[int] = []
    best = -1.0
    for _, minus, number in known:
        if -minus > best + 1e-12:
            best = -minus
            cheapest_first.append(number)
    return cheapest_first


def _card(choice: Choice, every: Sequence[Map], cells: Cells) -> Json:
    """Return the chosen setting of a model (`shown`), else the one proven to lose least, and the words about it.

    `saved` is the percent of the full cache's mean KV memory that the setting saves; `loss` is in points, with its
    95 % interval, and `limit` the upper limit that decides. `compressed` of its `traces` were compressed.
    """
    maps = [map_ for map_ in every if (map_.model, map_.benchmark) == (choice.model, choice.benchmark)]
    chosen = choice.by_memory if choice.shown is not False else None
    cell = chosen
    if cell is None and choice.safest is not None and choice.vacuous is None:
        safest, _ = choice.safest
        cell = next((cell for map_ in maps for cell in map_.cells.values() if cell.setting == safest), None)
    loss = (choice.losses or {}).get(cell.setting.id) if cell is not None else None
    return {
        "model": style.model(choice.model),
        "benchmark": choice.benchmark,
        "shown": chosen is not None,
        "cell": None if cell is None else cells.numbers.get((choice.model, choice.benchmark, cell.setting.id)),
        "saved": None if choice.saving is None else rounded(100 * (1 - choice.saving.memory), 1),
        "loss": None if loss is None else _interval(loss),
        "limit": None if loss is None else percent(loss.limit if loss.is_kept else loss.joint_limit),
        "compressed": None if loss is None else loss.compressed,
        "traces": None if loss is None else loss.traces,
        "margin": percent(choice.margin),
        "words": recommendation(choice),
    }


def marks(cell: CellTraces, problems: Sequence[str]) -> str:
    """Return the outcomes of a cell, one letter for each problem and sample, samples side by side."""
    status, correct = cell.traces["status"], cell.traces["correct"] > 0
    letters = np.where(status == STATUS[Status.TRUNCATED], TRUNCATED, np.where(status > 0, NO_ANSWER, MISSING))
    letters = np.where(status == STATUS[Status.OK], np.where(correct, RIGHT, WRONG), letters)
    return "".join(cell.in_order(letters, problems, MISSING).ravel().tolist())
