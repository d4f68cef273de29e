"""`kvatlas compare`: do two maps agree, which of them fits a published mean, do two runs hold the same tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.core import CellCoord, KvatlasError, Map, percent
from kvatlas.report.description import markdown_table
from kvatlas.results import Store
from kvatlas.results.manifest import changed_problems
from kvatlas.text import counted, fixed, signed

#: Half a unit of the last digit of maps in percent with one decimal, as a share, and the rounding of floats.
ROUNDING = 0.0005 + 1e-9
#: Problems that a sentence names before it only counts them.
_NAMED = 5


class _CommonCell(NamedTuple):
    """A cell that two maps have in common, with both values."""

    map: Map
    coord: CellCoord
    first: float
    second: float

    @property
    def distance(self) -> float:
        """The difference of the values, as a share."""
        return abs(self.first - self.second)

    def to_dict(self) -> dict[str, Any]:
        """Return the place of the cell and both values in percent."""
        axes = [name for name, _ in self.map.axes]
        return {
            "model": self.map.model,
            "benchmark": self.map.benchmark,
            **dict(zip(axes, self.coord, strict=True)),
            "first": percent(self.first),
            "second": percent(self.second),
        }


def compare_maps(given: Mapping[str, Sequence[Map]], means: Sequence[Map] | None = None) -> dict[str, Any]:
    """Compare two sets of maps by name, cell by cell, and each with mean maps: the document of `compare --json`.

    Maps meet by model, benchmark and metric, and by policy where both name it. Returns `agree`, `common` cells,
    `conflicts` with both values, the `largest` difference; `mean`: by name how many cells of the means over benchmarks
    fit, and `right`, the one set that fits in all of them. Percent scale, unknown values null. Raises KvatlasError
    where there is no cell in common.
    """
    (first, first_maps), (second, second_maps) = given.items()
    common: list[_CommonCell] = []
    for map_, other in product(first_maps, second_maps):
        if _subject_of(map_) == _subject_of(other) and _same_policy(map_, other):
            for coord, cell in map_.cells.items():
                if coord in other.cells:
                    values = (cell.estimate.value, other.cells[coord].estimate.value)
                    common.append(_CommonCell(map_, coord, *values))
    if not common:
        raise KvatlasError(
            "The maps have no cell in common; they need a model, a benchmark, and values of both axes that both have."
        )

    conflicts = [cell.to_dict() for cell in common if cell.distance > ROUNDING]
    fits = {} if means is None else {name: _fit_to_means(maps, means) for name, maps in given.items()}
    whole = [name for name, fit in fits.items() if fit["fitting"] == fit["checked"]]
    return {
        "first": first,
        "second": second,
        "agree": not conflicts,
        "common": len(common),
        "conflicts": conflicts,
        "largest": percent(max(cell.distance for cell in common)),
        "tolerance": percent(ROUNDING),
        "mean": fits or None,
        "right": whole[0] if len(whole) == 1 < len(fits) else None,
    }


def _subject_of(map_: Map) -> tuple[str, ...]:
    return map_.model, map_.benchmark, map_.metric, map_.axes[0][0], map_.axes[1][0]


def _same_policy(map_: Map, other: Map) -> bool:
    return not map_.policy or not other.policy or map_.policy == other.policy


def _fit_to_means(maps: Sequence[Map], means: Sequence[Map]) -> dict[str, Any]:
    """Compare the means over benchmarks of `maps` with given mean maps, cell by cell, models apart.

    A cell counts where all the benchmarks that the mean is over have it. A mean that says `mean of N` is only compared
    with the mean of N benchmarks.
    """
    distances: list[float] = []
    for mean in means:
        averaged = [map_ for map_ in maps if map_.model == mean.model and _same_policy(map_, mean)]
        if not averaged or (mean.is_mean and mean.averaged != len(averaged)):
            continue
        for coord, cell in mean.cells.items():
            values = [map_.cells[coord].estimate.value for map_ in averaged if coord in map_.cells]
            if len(values) == len(averaged):
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
    whose tokens differ its name and its problems. Models are compared by the name that the spec gives them. Raises
    KvatlasError for runs that mean different problems by the same name.
    """
    before = _problem_digests(first)
    now = _problem_digests(second)
    for benchmark in before.keys() & now.keys():
        changed = changed_problems(benchmark, before[benchmark], {**before[benchmark], **now[benchmark]})
        if changed:
            raise KvatlasError(f"The runs have other contents of {changed}; compare runs of the same problems.")

    first_digests = _token_digests(first)
    second_digests = _token_digests(second)

    common = first_digests.keys() & second_digests.keys()
    differing: dict[str, set[str]] = {}
    for name in common:
        if first_digests[name] != second_digests[name]:
            model, benchmark, setting, problem, _ = name
            differing.setdefault(f"{model} {benchmark} {setting}", set()).add(problem)

    only = [len(first_digests) - len(common), len(second_digests) - len(common)]
    return {
        "first": str(first),
        "second": str(second),
        "same": not differing and only == [0, 0],
        "common": len(common),
        "only": only,
        "differing": [{"cell": cell, "problems": sorted(problems)} for cell, problems in sorted(differing.items())],
    }


def _problem_digests(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Return the digests of a run's problems by benchmark and name."""
    with Store.open(folder) as store:
        return store.manifest().contents


def _token_digests(folder: Path) -> dict[tuple[Any, ...], str]:
    """Return a digest of the tokens of each trace of a run."""
    digests = {}
    with Store.open(folder) as store:
        for _, trace in store.traces(texts=False):
            name = (trace.model, trace.benchmark, trace.setting, trace.problem, trace.sample)
            digests[name] = trace.token_digest
    return digests


def runs_as_text(compared: Mapping[str, Any]) -> str:
    """Return the comparison of two runs as sentences."""
    lines = []
    if not compared["common"]:
        lines.append("No trace is in both: the runs share no model, benchmark and setting with the same problems.")
    elif not compared["differing"]:
        lines.append(f"All {compared['common']:,} common traces hold the same tokens.")
    for cell in compared["differing"]:
        problems = ", ".join(cell["problems"][:_NAMED])
        if len(cell["problems"]) > _NAMED:
            problems += " ..."
        lines.append(f"- {cell['cell']}: other tokens on {counted(len(cell['problems']), 'problem')} ({problems})")

    for name, count in zip((compared["first"], compared["second"]), compared["only"], strict=True):
        if count:
            lines.append(f"{count:,} traces are in {name} alone.")
    return "\n".join(lines) + "\n"


def maps_as_text(compared: Mapping[str, Any]) -> str:
    """Return the comparison of maps as sentences, with a table of the conflicting cells."""
    conflicts = compared["conflicts"]
    if conflicts:
        lines = [
            f"The maps conflict in {len(conflicts)} of {compared['common']} common cells, by up to "
            f"{compared['largest']:.1f} points; A is {compared['first']}, B is {compared['second']}."
        ]
    else:
        lines = [f"The maps agree: no two of their {compared['common']} common cells differ by more than 0.05 points."]

    # Which of the maps fit the published mean; nothing without one.
    fits = compared["mean"] or {}
    for name, fit in fits.items():
        distance = f"largest distance {fit['largest']:.2f} points"
        lines.append(f"{name} fits the mean in {fit['fitting']} of {fit['checked']} cells ({distance}).")
    if compared["right"]:
        wrong = compared["second"] if compared["right"] == compared["first"] else compared["first"]
        lines.append(f"So {compared['right']} is right and {wrong} is not: 1 of 2 agrees with the mean everywhere.")
    elif fits:
        whole = sum(fit["fitting"] == fit["checked"] for fit in fits.values())
        lines.append(f"The mean does not tell which of the 2 is right: {whole} of them fit it in every cell.")

    if conflicts:
        rows = []
        for conflict in conflicts:
            *names, first, second = conflict.values()
            rows.append([*map(str, names), fixed(first), fixed(second), signed(first - second, minus="-")])
        lines += ["", markdown_table([*list(conflicts[0])[:-2], "A", "B", "A - B"], rows)]
    return "\n".join(lines) + "\n"
