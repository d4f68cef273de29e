"""`kvatlas compare`: do two maps agree, which of them fits a published mean, do two runs hold the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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


class _Meeting(NamedTuple):
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
    meetings = list(_meetings(first_maps, second_maps))
    if not meetings:
        raise KvatlasError(
            "The maps have no cell in common; they need a model, a benchmark, and values of both axes that both have."
        )
    conflicts = [meeting.to_dict() for meeting in meetings if meeting.distance > ROUNDING]
    fits = {} if means is None else {name: _fit(maps, means) for name, maps in given.items()}
    whole = [name for name, fit in fits.items() if fit["fitting"] == fit["checked"]]
    return {
        "first": first,
        "second": second,
        "agree": not conflicts,
        "common": len(meetings),
        "conflicts": conflicts,
        "largest": percent(max(meeting.distance for meeting in meetings)),
        "tolerance": percent(ROUNDING),
        "mean": fits or None,
        "right": whole[0] if len(whole) == 1 < len(fits) else None,
    }


def _meetings(maps: Sequence[Map], others: Sequence[Map]) -> Iterator[_Meeting]:
    """Yield the cells that maps have in common with maps of the same model, benchmark, metric, axes and policy."""
    for map_, other in product(maps, others):
        if _measure(map_) != _measure(other) or not _same_policy(map_, other):
            continue
        for coord, cell in map_.cells.items():
            if coord in other.cells:
                yield _Meeting(map_, coord, cell.estimate.value, other.cells[coord].estimate.value)


def _measure(map_: Map) -> tuple[str, ...]:
    return map_.model, map_.benchmark, map_.metric, map_.axes[0][0], map_.axes[1][0]


def _same_policy(map_: Map, other: Map) -> bool:
    return not map_.policy or not other.policy or map_.policy == other.policy


def _fit(maps: Sequence[Map], means: Sequence[Map]) -> dict[str, Any]:
    """Compare the means over benchmarks of `maps` with given mean maps, cell by cell, models apart."""
    distances: list[float] = []
    for mean in means:
        distances += _distances(maps, mean)
    if not distances:
        raise KvatlasError(
            "The maps and the mean map have no cell to compare; the mean must be of the same model, over as many "
            "benchmarks as the maps have, and at values of both axes that all of them have."
        )
    fitting = sum(distance <= ROUNDING for distance in distances)
    return {"checked": len(distances), "fitting": fitting, "largest": percent(max(distances))}


def _distances(maps: Sequence[Map], mean: Map) -> Iterator[float]:
    """Yield how far the mean over the maps of a model lies from a given mean, by cell.

    A cell counts where all the benchmarks that the mean is over have it. A mean that says `mean of N` is only compared
    with the mean of N benchmarks.
    """
    averaged = [map_ for map_ in maps if map_.model == mean.model and _same_policy(map_, mean)]
    if not averaged or (mean.is_mean and mean.averaged != len(averaged)):
        return
    for coord, cell in mean.cells.items():
        values = [map_.cells[coord].estimate.value for map_ in averaged if coord in map_.cells]
        if len(values) == len(averaged):
            yield abs(math.fsum(values) / len(values) - cell.estimate.value)


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare the tokens of two runs, trace by trace: the document of `compare RUN RUN --json`.

    Returns `same`, the number of `common` traces, how many one run alone has (`only`), and `differing`: for each cell
    whose tokens differ its name and its problems. Models are compared by the name that the spec gives them. Raises
    KvatlasError for runs that mean different problems by the same name.
    """
    _check_contents(first, second)
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


def _check_contents(first: Path, second: Path) -> None:
    """Raise KvatlasError if a problem that both runs name has another content in the second."""
    before = _contents(first)
    now = _contents(second)
    for benchmark in before.keys() & now.keys():
        changed = changed_problems(benchmark, before[benchmark], {**before[benchmark], **now[benchmark]})
        if changed:
            raise KvatlasError(f"The runs have other contents of {changed}; compare runs of the same problems.")


def _contents(folder: Path) -> Mapping[str, Mapping[str, str]]:
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
    lines = [_agreement(compared), *_fit_sentences(compared)]
    if conflicts:
        rows = []
        for conflict in conflicts:
            *names, first, second = conflict.values()
            rows.append([*map(str, names), fixed(first), fixed(second), signed(first - second, minus="-")])
        lines += ["", markdown_table([*list(conflicts[0])[:-2], "A", "B", "A - B"], rows)]
    return "\n".join(lines) + "\n"


def _agreement(compared: Mapping[str, Any]) -> str:
    """Say if the maps agree, and by how much they conflict."""
    if not compared["conflicts"]:
        return f"The maps agree: no two of their {compared['common']} common cells differ by more than 0.05 points."
    return (
        f"The maps conflict in {len(compared['conflicts'])} of {compared['common']} common cells, by up to "
        f"{compared['largest']:.1f} points; A is {compared['first']}, B is {compared['second']}."
    )


def _fit_sentences(compared: Mapping[str, Any]) -> list[str]:
    """Say which of the maps fit the published mean; nothing without one."""
    fits = compared["mean"] or {}
    lines = []
    for name, fit in fits.items():
        distance = f"largest distance {fit['largest']:.2f} points"
        lines.append(f"{name} fits the mean in {fit['fitting']} of {fit['checked']} cells ({distance}).")
    if compared["right"]:
        wrong = compared["second"] if compared["right"] == compared["first"] else compared["first"]
        lines.append(f"So {compared['right']} is right and {wrong} is not: 1 of 2 agrees with the mean everywhere.")
    elif fits:
        whole = sum(fit["fitting"] == fit["checked"] for fit in fits.values())
        lines.append(f"The mean does not tell which of the 2 is right: {whole} of them fit it in every cell.")
    return lines
