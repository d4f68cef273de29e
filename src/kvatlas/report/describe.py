"""From runs and CSV maps to a description: what is read, compared and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, MapName, Note
from kvatlas.report.description import Description, describe
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.bare_maps import check_granularity
from kvatlas.stats.choice import Choice
from kvatlas.stats.intervals import with_binomial_bounds
from kvatlas.stats.maps import maps_of_run
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import Axes, RunData, margin_of
from kvatlas.stats.table import CellTraces
from kvatlas.stats.validity import findings
from kvatlas.stats.verdicts import Verdict


def describe_sources(
    sources: Sequence[str | Path | RunAnalysis],
    *,
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    policy: str | None = None,
    problems: int | None = None,
    samples: int | None = None,
    lose_at_most: float | None = None,
) -> Description:
    """The description of runs (or their folders), CSV maps and `published:NAME`.

    Runs with the same axes are compared with each other as one. `policy` keeps that policy's maps and comparisons;
    `problems` and `samples` are those of CSV maps that do not tell. `lose_at_most` points against the
    full cache are asked for. KvatlasError for what cannot be read or shown.
    """
    if lose_at_most is not None:
        margin_of({"lose_at_most": lose_at_most})
    maps: list[Map] = []
    notes: list[Note] = []
    runs: list[RunAnalysis] = []
    for source in sources:
        if isinstance(source, RunAnalysis) or Path(source).is_dir():
            if not isinstance(source, RunAnalysis):
                source = RunAnalysis(RunData.open(source, metric, partial, fix, lose_at_most))
            runs.append(source)
            maps += maps_of_run(source.run)
        else:
            maps += with_binomial_bounds(
                [check_granularity(map_) for map_ in read_maps(source, partial, problems, samples)]
            )
    kept = of_policy(maps, policy)
    _check_distinct(kept)
    compared: list[Comparison] = []
    verdicts: dict[MapName, Verdict] = {}
    choices: list[Choice] = []
    for whole in joined(runs):
        every = policy is None or whole.is_adaptive
        analysis = whole if every else whole.part(_of_policy(whole.run.cells, policy))
        verdicts |= analysis.verdicts
        choices += analysis.choices
        notes += analysis.notes
        compared += whole.comparisons
    if policy is not None:
        compared = [comparison for comparison in compared if policy in comparison.first or policy in comparison.second]
    limits = findings([cell for run in runs for cell in _of_policy(run.run.cells, policy)])
    distinct = list(dict.fromkeys(notes))
    return describe(kept, compared, notes=distinct, verdicts=verdicts, choices=choices, findings=limits)


def of_policy(maps: Sequence[Map], policy: str | None) -> list[Map]:
    """The maps of a policy, all of them without one; KvatlasError if there is none."""
    kept = [map_ for map_ in maps if policy is None or map_.policy == policy]
    if not kept:
        there = ", ".join(dict.fromkeys(map_.policy or "none named" for map_ in maps))
        raise KvatlasError(f"There is no map of the policy {policy!r}; there are: {there}.")
    return kept


def joined(runs: Sequence[RunAnalysis]) -> list[RunAnalysis]:
    """Adaptive runs as they are, others with the same axes as one."""
    by_axes: dict[Axes, list[RunAnalysis]] = {}
    for run in runs:
        if not run.is_adaptive:
            by_axes.setdefault(run.run.axes, []).append(run)
    whole = [run for run in runs if run.is_adaptive]
    for first, *others in by_axes.values():
        cells = [cell for run in (first, *others) for cell in run.run.cells]
        whole.append(RunAnalysis(first.run.with_cells(cells)) if others else first)
    return whole


def _of_policy(cells: Sequence[CellTraces], policy: str | None) -> list[CellTraces]:
    named = (policy or "").partition("(")[0]
    return [cell for cell in cells if policy is None or cell.expected.baseline or cell.expected.setting.policy == named]


def _check_distinct(maps: Sequence[Map]) -> None:
    seen: set[MapName] = set()
    for map_ in maps:
        if map_.name in seen:
            shown = " | ".join(filter(None, map_.name))
            raise KvatlasError(
                f"The map {shown} was given twice; compare two readings of one map with `kvatlas check`."
            )
        seen.add(map_.name)
