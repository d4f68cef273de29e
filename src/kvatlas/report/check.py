"""`kvatlas compare`: do two maps agree, which of them fits a published mean, do two runs hold the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, percent
from kvatlas.figures.style import fixed, signed
from kvatlas.report.text import table
from kvatlas.results import Store

#: Half a unit of the last digit of maps in percent with one decimal, as a share, and the rounding of floats.
ROUNDING = 0.0005 + 1e-9


def compare_maps(given: Mapping[str, Sequence[Map]], means: Sequence[Map] | None = None) -> dict[str, Any]:
    """Compare two sets of maps by name, cell by cell, and each with mean maps: the document of `compare --json`.

    Maps meet by model, benchmark and metric, and by policy where both name it. Returns `agree`, `common` cells,
    `conflicts` with both values, the `largest` difference; `mean`: by name how many cells of the means over benchmarks
    fit, and `right`, the one set that fits in all of them. Percent scale, unknown values null. Raises KvatlasError
    where there is no cell in common.
    """
    (first, mine), (second, theirs) = given.items()
    conflicts, distances = [], []
    for map_, other in product(mine, theirs):
        names = [[one.model, one.benchmark, one.metric, *(name for name, _ in one.axes)] for one in (map_, other)]
        if names[0] != names[1] or not _same_policy(map_, other):
            continue
        for coord, cell in map_.cells.items():
            if coord not in other.cells:
                continue
            values = cell.estimate.value, other.cells[coord].estimate.value
            distances.append(abs(values[0] - values[1]))
            if distances[-1] > ROUNDING:
                axes = dict(zip((name for name, _ in map_.axes), coord, strict=True))
                both = {"first": percent(values[0]), "second": percent(values[1])}
                conflicts.append({"model": map_.model, "benchmark": map_.benchmark, **axes, **both})
    if not distances:
        raise KvatlasError(
            "The maps have no cell in common; they need a model, a benchmark, and values of both axes that both have."
        )
    fits = {name: _fit(maps, means) for name, maps in given.items()} if means is not None else {}
    whole = [name for name, fit in fits.items() if fit["fitting"] == fit["checked"]]
    return {
        "first": first,
        "second": second,
        "agree": not conflicts,
        "common": len(distances),
        "conflicts": conflicts,
        "largest": percent(max(distances)),
        "tolerance": percent(ROUNDING),
        "mean": fits or None,
        "right": whole[0] if len(whole) == 1 < len(fits) else None,
    }


def _same_policy(map_: Map, other: Map) -> bool:
    return not map_.policy or not other.policy or map_.policy == other.policy


def _fit(maps: Sequence[Map], means: Sequence[Map]) -> dict[str, Any]:
    """Compare the means over benchmarks of `maps` with given mean maps, cell by cell, models apart.

    A cell counts where all the benchmarks that the mean is over have it. A mean that says `mean of N` is only compared
    with the mean of N benchmarks.
    """
    distances: list[float] = []
    for mean in means:
        parts = [map_ for map_ in maps if map_.model == mean.model and _same_policy(map_, mean)]
        if not parts or (mean.is_mean and mean.averaged != len(parts)):
            continue
        for coord, cell in mean.cells.items():
            values = [map_.cells[coord].estimate.value for map_ in parts if coord in map_.cells]
            if len(values) == len(parts):
                distances.append(abs(math.fsum(values) / len(values) - cell.estimate.value))
    if not distances:
        raise KvatlasError(
            "The maps and the mean map have no cell to compare; the mean must be of the same model, over as many "
            "benchmarks as the maps have, and at values of both axes that all of them have."
        )
    fitting = sum(distance <= ROUNDING for distance in distances)
    return {"checked": len(distances), "fitting": fitting, "largest": percent(max(distances))}


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare the tokens of two runs, trace by trace: the document of `compare RUN RUN --json`.

    Returns `same`, the number of `common` traces, how many one run alone has (`only`), and `differing`: for each cell
    whose tokens differ its name and its problems. Models are compared by the name that the spec gives them.
    """
    digests = []
    for folder in (first, second):
        with Store.open(folder) as store:
            digests.append(
                {
                    (t.model, t.benchmark, t.setting, t.problem, t.sample): t.written
                    for _, t in store.traces(texts=False)
                }
            )
    common = digests[0].keys() & digests[1].keys()
    differing: dict[str, set[str]] = {}
    for name in common:
        if digests[0][name] != digests[1][name]:
            model, benchmark, setting, problem, _ = name
            differing.setdefault(f"{model} {benchmark} {setting}", set()).add(problem)
    only = [len(own) - len(common) for own in digests]
    return {
        "first": str(first),
        "second": str(second),
        "same": not differing and only == [0, 0],
        "common": len(common),
        "only": only,
        "differing": [{"cell": cell, "problems": sorted(problems)} for cell, problems in sorted(differing.items())],
    }


def runs_as_text(compared: Mapping[str, Any]) -> str:
    """The comparison of two runs as sentences."""
    lines = []
    if not compared["differing"]:
        lines.append(f"All {compared['common']:,} common traces hold the same tokens.")
    for cell in compared["differing"]:
        problems = ", ".join(cell["problems"][:5]) + (" ..." if len(cell["problems"]) > 5 else "")
        lines.append(f"- {cell['cell']}: other tokens on {len(cell['problems'])} problems ({problems})")
    for name, count in zip((compared["first"], compared["second"]), compared["only"], strict=True):
        if count:
            lines.append(f"{count:,} traces are in {name} alone.")
    return "\n".join(lines) + "\n"


def maps_as_text(compared: Mapping[str, Any]) -> str:
    """The comparison of maps as sentences, with a table of the conflicting cells."""
    first, second, conflicts, fits = (compared[name] for name in ("first", "second", "conflicts", "mean"))
    lines = [f"The maps agree: no two of their {compared['common']} common cells differ by more than 0.05 points."]
    if conflicts:
        lines = [
            f"The maps conflict in {len(conflicts)} of {compared['common']} common cells, by up to "
            f"{compared['largest']:.1f} points; A is {first}, B is {second}."
        ]
    for name, fit in (fits or {}).items():
        distance = f"largest distance {fit['largest']:.2f} points"
        lines.append(f"{name} fits the mean in {fit['fitting']} of {fit['checked']} cells ({distance}).")
    if compared["right"]:
        wrong = second if compared["right"] == first else first
        lines.append(f"So {compared['right']} is right and {wrong} is not: 1 of 2 agrees with the mean everywhere.")
    elif fits:
        whole = sum(fit["fitting"] == fit["checked"] for fit in fits.values())
        lines.append(f"The mean does not tell which of the 2 is right: {whole} of them fit it in every cell.")
    if conflicts:
        rows = []
        for conflict in conflicts:
            *names, a, b = conflict.values()
            rows.append([*map(str, names), fixed(a), fixed(b), signed(a - b, minus="-")])
        lines += ["", table([*list(conflicts[0])[:-2], "A", "B", "A - B"], rows)]
    return "\n".join(lines) + "\n"
