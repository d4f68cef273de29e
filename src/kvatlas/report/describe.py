"""From runs and CSV maps to a description: what is read, compared and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map
from kvatlas.report.description import describe
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import Axes, map_axes
from kvatlas.stats.estimates.maps import maps_of_cells
from kvatlas.stats.estimates.pass_at_1 import with_binomial_bounds
from kvatlas.stats.estimates.validity import findings
from kvatlas.stats.inference.choice import Choice, choices
from kvatlas.stats.inference.map_tests import Name, Verdict, verdicts
from kvatlas.stats.pairs.comparisons import Comparison, comparisons
from kvatlas.stats.run_analysis import judge


def describe_sources(
    sources: Sequence[str],
    *,
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    policy: str | None = None,
    problems: int | None = None,
    samples: int | None = None,
) -> dict[str, Any]:
    """The document of `kvatlas describe --json` for folders of runs, CSV maps and `published:NAME`.

    Runs with the same axes are compared with each other as one. `policy` keeps that policy's maps and comparisons;
    `problems` and `samples` hold for CSV maps that do not tell. Raises KvatlasError for what cannot be read or shown.
    """
    maps: list[Map] = []
    runs: dict[Axes, list[CellTraces]] = {}
    compared: list[Comparison] = []
    found: dict[Name, Verdict] = {}
    chosen: list[Choice] = []
    notes: list[str] = []
    gathered: list[CellTraces] = []
    for source in sources:
        if not Path(source).is_dir():
            maps += with_binomial_bounds(read_maps(source, partial, problems, samples))
            continue
        with Store.open(Path(source)) as store:
            manifest = store.manifest()
            cells = gather(manifest, store.traces(texts=False), metric)
        gathered += cells
        axes = map_axes(manifest, fix)
        drawn = maps_of_cells(cells, axes, metric, partial, fix)
        maps += drawn
        if manifest.allocation:
            judged = judge(manifest, cells, drawn, axes, metric, fix)
            found |= judged.verdicts
            chosen += judged.choices
            notes += judged.notes
        else:
            runs.setdefault(axes, []).extend(cells)
    kept = [one for one in maps if policy is None or one.policy == policy]
    if not kept:
        there = ", ".join(dict.fromkeys(one.policy or "none named" for one in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {there}.")
    _check_distinct(kept)
    for axes, cells in runs.items():
        shown = [cell for cell in cells if policy is None or _belongs(cell, policy)]
        compared += comparisons(cells, axes, metric, fix)
        found |= verdicts(shown, axes, fix)
        chosen += choices(shown, axes, fix)
    if policy is not None:
        compared = [one for one in compared if policy in one.first or policy in one.second]
    limits = findings([cell for cell in gathered if policy is None or _belongs(cell, policy)])
    return describe(kept, compared, notes=list(dict.fromkeys(notes)), verdicts=found, choices=chosen, findings=limits)


def _belongs(cell: CellTraces, policy: str) -> bool:
    return cell.expected.baseline or cell.expected.setting.policy == policy.partition("(")[0]


def _check_distinct(maps: Sequence[Map]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for one in maps:
        name = one.model, one.benchmark, one.policy
        if name in seen:
            shown = " | ".join(filter(None, name))
            raise KvatlasError(
                f"The map {shown} was given twice; compare two readings of one map with `kvatlas check`."
            )
        seen.add(name)
