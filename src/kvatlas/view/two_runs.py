"""Two runs on the same problems and samples."""

from __future__ import annotations

import json
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.report.description_json import percent
from kvatlas.results.manifest import Expected
from kvatlas.stats.estimates.cells import aligned
from kvatlas.stats.pairs.paired import paired_difference
from kvatlas.view.run_view import RunView


def two_runs(first: RunView, second: RunView) -> dict[str, Any]:
    """The first run's maps with, for each cell, second minus first in points.

    `pairs` are [cell of the first, cell of the second, difference, low, high, traces that only the first has right,
    those that only the second has]. Cells belong together by model, benchmark and setting; where the runs have no
    model in common, by benchmark and setting.
    """
    pairs: list[list[Any]] = []
    for cell, other in _same(first, second):
        ours, theirs = first.cells[cell], second.cells[other]
        try:
            contrast = paired_difference(theirs.compared(), ours.compared())
        except KvatlasError:
            continue
        only = _only_one(first, cell, second, other)
        pairs.append([cell, other, percent(contrast.value), percent(contrast.low), percent(contrast.high), *only])
    document = json.loads(first.document)
    for pair in pairs:
        document["cells"][pair[0]]["difference"] = pair[2:5]
    shown = {pair[0] for pair in pairs}
    maps = [map_ for map_ in document["maps"] if shown & {n for row in map_["cells"] for n in row}]
    return {"first": first.name, "second": second.name, "pairs": pairs, "run": {**document, "maps": maps}}


def _same(first: RunView, second: RunView) -> list[tuple[int, int]]:
    for with_model in (True, False):
        names = {_name(cell, with_model): n for n, cell in enumerate(second.manifest.expected)}
        ours = ((n, _name(cell, with_model)) for n, cell in enumerate(first.manifest.expected))
        if both := [(n, names[name]) for n, name in ours if name in names]:
            return both
    return []


def _name(expected: Expected, with_model: bool) -> tuple[str, ...]:
    return (*([expected.model] if with_model else []), expected.benchmark, expected.setting.id)


def _only_one(first: RunView, cell: int, second: RunView, other: int) -> tuple[int, int]:
    """How many samples only one of the cells has right, of those that both have."""
    _, values = aligned([first.cells[cell], second.cells[other]])
    ours, theirs = values[:, 0], values[:, 1]
    return int((ours > theirs).sum()), int((theirs > ours).sum())
