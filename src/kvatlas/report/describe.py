"""From runs and CSV maps to a description: what is read, compared and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map
from kvatlas.report.words import describe
from kvatlas.results import Store
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.cells import Gathered, gather
from kvatlas.stats.choice import Choice, choices
from kvatlas.stats.comparisons import Comparison, comparisons
from kvatlas.stats.estimates import with_binomial_bounds
from kvatlas.stats.grid import Axes, map_axes
from kvatlas.stats.judgement import judge
from kvatlas.stats.maps import maps_of_cells
from kvatlas.stats.validity import findings
from kvatlas.stats.verdicts import Name, Verdict, verdicts


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
    runs: dict[Axes, list[Gathered]] = {}
    compared: list[Comparison] = []
    found: dict[Name, Verdict] = {}
    chosen: list[Choice] = []
    notes: list[str] = []
    gathered: list[Gathered] = []
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


def _belongs(cell: Gathered, policy: str) -> bool:
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
