"""The data of a report page: cells, maps, fronts, outcomes by problem. Percent scale, as describe has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.core import Cell, CellCoord, Map, MapName, Setting, Status, percent, rounded
from kvatlas.figures import style
from kvatlas.figures.panels import framed
from kvatlas.results.manifest import Expected
from kvatlas.results.records import STATUS
from kvatlas.stats.inference import Contrast
from kvatlas.stats.pairs import Differences
from kvatlas.stats.run_data import RunData
from kvatlas.stats.table import CellTraces
from kvatlas.stats.verdicts import Verdict

#: What a trace came to, in one letter: right, wrong, truncated, no answer.
RIGHT, WRONG, TRUNCATED, NO_ANSWER, MISSING = "rwtn."


class Cells:
    """The cells of a page, numbered: maps, fronts, outcomes and traces name them by number.

    The `promised` ones come first in their order, with no numbers of their own until a map shows them.
    """

    def __init__(self, short: Mapping[str, str], promised: Iterable[Expected] = ()) -> None:
        self.short = short
        self.numbers: dict[tuple[str, str, str], int] = {}
        self.documents: list[dict[str, Any]] = []
        self._empty: set[int] = set()
        for expected in promised:
            self._empty.add(len(self.documents))
            self._put((expected.model, expected.benchmark, expected.setting.id), _unknown(expected.setting))

    def number(self, map_: Map, cell: Cell, difference: Contrast | None = None) -> int:
        """The number of a cell of a map, or of one of its baselines, which is added when it is new."""
        key = (map_.model, map_.benchmark, cell.setting.id)
        if key not in self.numbers:
            self._put(key, _cell(cell, difference))
        elif self.numbers[key] in self._empty:
            self._empty.remove(self.numbers[key])
            self.documents[self.numbers[key]] |= _cell(cell, difference)
        return self.numbers[key]

    def _put(self, key: tuple[str, str, str], document: dict[str, Any]) -> None:
        model, benchmark, setting = key
        self.numbers[key] = len(self.documents)
        named = {"model": model, "benchmark": benchmark, "short": self.short.get(setting, document["name"])}
        self.documents.append(document | named)


def _unknown(setting: Setting) -> dict[str, Any]:
    names = ("value", "low", "high", "problems", "samples", "kept", "peak", "output", "seconds", "audit", "truncated")
    return {"name": str(setting), "policy": setting.policy, **dict.fromkeys((*names, "difference"))}


def _cell(cell: Cell, difference: Contrast | None) -> dict[str, Any]:
    estimate = cell.estimate
    traces = (estimate.problems or 0) * (estimate.samples or 0)
    return {
        "name": str(cell.setting),
        "policy": cell.setting.policy,
        "value": percent(estimate.value),
        "low": percent(estimate.low),
        "high": percent(estimate.high),
        "problems": estimate.problems,
        "samples": estimate.samples,
        "kept": rounded(cell.mean_kv_tokens, 1),
        "peak": cell.peak_kv_tokens,
        "output": rounded(cell.output_tokens_mean, 1),
        "seconds": rounded(cell.seconds_mean, 4),
        "audit": cell.audit.to_dict() if cell.audit else None,
        "truncated": percent(cell.truncated / traces) if cell.truncated is not None and traces else cell.truncated,
        "difference": None
        if difference is None
        else [percent(difference.value), percent(difference.low), percent(difference.high)],
    }


def page_json(
    maps: Sequence[Map],
    means: Sequence[Map],
    verdicts: Mapping[MapName, Verdict],
    differences: Differences,
    cells: Cells,
) -> dict[str, Any]:
    """The page's data without outcomes and traces; `cells` is filled, so that these can name theirs."""
    shown = [*means, *maps]
    return {
        "metric": style.label(maps[0].metric),
        "maps": [_map(map_, verdicts.get(map_.name), differences.get(map_.name, {}), cells) for map_ in shown],
        "fronts": _fronts(shown, cells),
        "cells": cells.documents,
    }


def _map(map_: Map, verdict: Verdict | None, differences: Mapping[CellCoord, Contrast], cells: Cells) -> dict[str, Any]:
    (vertical, rows), (horizontal, columns) = map_.axes
    region, about = framed(map_)
    return {
        "model": map_.model,
        "short": style.model(map_.model),
        "benchmark": map_.benchmark,
        "policy": map_.policy,
        "vertical": style.label(vertical),
        "horizontal": style.label(horizontal),
        "rows": [str(value) for value in reversed(rows)],
        "columns": [str(value) for value in columns],
        "cells": [
            [
                cells.number(map_, map_.cells[row, column], differences.get((row, column)))
                if (row, column) in map_.cells
                else None
                for column in columns
            ]
            for row in reversed(rows)
        ],
        "framed": [[int((row, column) in region) for column in columns] for row in reversed(rows)],
        "frame": about,
        "evidence": verdict.evidence if verdict else None,
        "beside": [cells.number(map_, cell) for cell in map_.baselines.values()],
        "notes": [{"text": note.text, "warning": note.is_warning} for note in map_.notes],
        "vacuous": map_.validity.reason if map_.validity else None,
    }


def _fronts(shown: Sequence[Map], cells: Cells) -> list[dict[str, Any]]:
    """For each model and benchmark all its cells, and which of them are on the fronts of value against cost."""
    groups: dict[tuple[str, str], dict[int, Cell]] = {}
    for map_ in shown:
        group = groups.setdefault((map_.model, map_.benchmark), {})
        for cell in (*map_.cells.values(), *map_.baselines.values()):
            group[cells.number(map_, cell)] = cell
    return [
        {
            "model": model,
            "benchmark": benchmark,
            "cells": list(group),
            "kept": front({n: (c.mean_kv_tokens, c.estimate.value) for n, c in group.items()}),
            "seconds": front({n: (c.seconds_mean, c.estimate.value) for n, c in group.items()}),
        }
        for (model, benchmark), group in groups.items()
    ]


def front(points: Mapping[int, tuple[float | None, float]]) -> list[int]:
    """The points (cost, value) that no other beats in one and matches in the other, the cheapest first."""
    known = sorted((cost, -value, number) for number, (cost, value) in points.items() if cost is not None)
    best_first: list[int] = []
    best = -1.0
    for _, minus, number in known:
        if -minus > best + 1e-12:
            best = -minus
            best_first.append(number)
    return best_first


def marks(cell: CellTraces, problems: Sequence[str]) -> str:
    """What the traces of a cell came to, one letter for each problem and sample, samples side by side."""
    status, correct = cell.traces["status"], cell.traces["correct"] > 0
    letters = np.where(status == STATUS[Status.TRUNCATED], TRUNCATED, np.where(status > 0, NO_ANSWER, MISSING))
    letters = np.where(status == STATUS[Status.OK], np.where(correct, RIGHT, WRONG), letters)
    return "".join(in_order(cell, letters, problems, MISSING))


def in_order(cell: CellTraces, table: NDArray[Any], problems: Sequence[str], missing: Any) -> list[Any]:
    """A table [problem, sample] of a cell in the order of these problems, samples side by side."""
    rows = np.vstack([table, np.full(cell.expected.samples, missing)])
    ordered: list[Any] = rows[[cell.place.get(problem, -1) for problem in problems]].ravel().tolist()
    return ordered


def outcomes(run: RunData, maps: Sequence[Map], cells: Cells) -> list[dict[str, Any]]:
    """By model and benchmark: for each shown cell one letter for each problem and sample, samples side by side."""
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    for map_ in maps:
        tables.setdefault((map_.model, map_.benchmark), {"model": map_.model, "benchmark": map_.benchmark, "rows": []})
    for cell in run.cells:
        expected = cell.expected
        number = cells.numbers.get((expected.model, expected.benchmark, expected.setting.id))
        table = tables.get((expected.model, expected.benchmark))
        if number is None or table is None:
            continue
        table.update(problems=list(expected.problems), samples=expected.samples)
        table["rows"].append({"cell": number, "marks": marks(cell, expected.problems)})
    return [table for table in tables.values() if table["rows"]]
