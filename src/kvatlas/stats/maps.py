"""Maps of a run, their means over benchmarks, and curves of runs that vary one parameter or none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import attrgetter
from typing import Any, TypeVar

from kvatlas.core import BudgetAudit, Cell, KvatlasError, Map, MapName, Note, NoteKind, grouped, mean_of
from kvatlas.results.csv_maps import ascending
from kvatlas.stats.estimates import mean_over_benchmarks
from kvatlas.stats.run_data import RunData, short_names
from kvatlas.stats.table import CellTraces, missing, select
from kvatlas.stats.validity import together, validity

#: Versions that decide which tokens are drawn.
DECIDE = ("kvatlas", "torch", "transformers")

T = TypeVar("T")

LOOKED_EARLY = Note(
    NoteKind.INTERVAL,
    "Intervals and tests allow for a single look at the end; those of an adaptive sweep hold at any look",
)
SCREEN_NOTE = Note(
    NoteKind.SCREEN, "SCREEN: settings read the full cache's traces and decoded nothing; this is not Pass@1"
)


def with_means(maps: Mapping[MapName, T]) -> dict[MapName, list[T]]:
    """Return each map with its own value alone, then each mean over benchmarks with the values of its maps."""
    by_policy = grouped(maps, lambda name: (name.model, name.policy))
    found = {name: [value] for name, value in maps.items()}
    for (model, policy), names in by_policy.items():
        if len(names) > 1:
            found[MapName(model, mean_of(len(names)), policy)] = [maps[name] for name in names]
    return found


def maps_of_run(run: RunData) -> list[Map]:
    """One map for each model, benchmark and policy that varies both axes, in the manifest's order.

    Raises KvatlasError if the run does not have two axes, or if traces are missing and it is not `partial`. Cells
    without any trace are left out.
    """
    if not run.groups:
        raise KvatlasError(f"No policy of this run has two or more values of both {run.axes[0]} and {run.axes[1]}.")
    baselines = select(run.cells, baseline=True)
    shown = [cell for group in run.groups.values() for cell in group]
    check_complete(shown + baselines, run.partial)
    check_measured(shown, run.metric, run.partial)
    return [
        _map(name, run, group, select(baselines, model=name.model, benchmark=name.benchmark))
        for name, group in run.groups.items()
        if any(cell.measured for cell in group)
    ]


def check_complete(cells: Sequence[CellTraces], partial: bool, what: str = "map") -> None:
    """Raise KvatlasError where traces are missing, unless `partial`, and where all are."""
    traces, promised, among = missing(cells)
    if traces == promised:
        raise KvatlasError(f"The run has none of its {promised} traces yet, so there is no {what} to draw.")
    if traces and not partial:
        raise KvatlasError(
            f"{traces} of {promised} traces are missing, in {among} of {len(cells)} cells; the missing ones are often "
            "the hardest problems, so finish the sweep, or draw what is there with --partial."
        )


def partial_note(cells: Sequence[CellTraces]) -> tuple[Note, ...]:
    """A note where traces are missing."""
    traces, promised, among = missing(cells)
    if not traces:
        return ()
    text = f"PARTIAL: {traces} of {promised} traces are missing, in {among} {'cell' if among == 1 else 'cells'}"
    return (Note(NoteKind.PARTIAL, text), LOOKED_EARLY)


def mixed_note(cells: Sequence[CellTraces]) -> tuple[Note, ...]:
    """A warning where the traces were decoded by several versions of what decides their tokens."""
    kinds = Counter[str]()
    for cell in cells:
        kinds.update(cell.made_with)
    versions = {text: json.loads(text or "{}") for text in kinds}
    differing = [name for name in DECIDE if len({version.get(name) for version in versions.values()}) > 1]
    if not differing:
        return ()
    counts = Counter[str]()
    for text, count in kinds.items():
        counts[", ".join(f"{name} {versions[text].get(name, 'unknown')}" for name in differing)] += count
    listed = "; ".join(f"{count:,} traces by {text}" for text, count in sorted(counts.items()))
    return (Note(NoteKind.MIXED, f"MIXED: {listed}"),)


def check_measured(cells: Sequence[CellTraces], metric: str, partial: bool) -> None:
    """Raise KvatlasError where the metric is known of no trace of a benchmark, so that its map would be missing."""
    unknown = [cell for cell in cells if cell.stored and not cell.measured]
    if unknown and (not partial or len(unknown) == len(cells)):
        first = unknown[0]
        raise KvatlasError(
            f"{metric} is unknown of all {first.stored} traces of {first.model} on {first.benchmark}: none of them has "
            "an answer; choose another metric, or leave them out with --partial."
        )


def unmeasured_notes(cells: Sequence[CellTraces], metric: str) -> tuple[Note, ...]:
    """A note where the metric is unknown of some traces: of the same in all cells, which read the same ones."""
    most = max(cells, key=lambda cell: cell.unmeasured)
    if not most.unmeasured:
        return ()
    about = f"{most.unmeasured} of {most.stored} traces of {most.benchmark}"
    return (Note(NoteKind.UNMEASURED, f"{about} have no answer and are left out of {metric}"),)


def _map(name: MapName, run: RunData, group: Sequence[CellTraces], baselines: Sequence[CellTraces]) -> Map:
    by_coord = {cell.coord(run.axes): cell for cell in group}
    rows, columns = ascending(row for row, _ in by_coord), ascending(column for _, column in by_coord)
    coords = [(r, c) for r in rows for c in columns if (r, c) in by_coord and by_coord[r, c].measured]
    return Map(
        name.model,
        name.benchmark,
        run.metric,
        name.policy,
        ((run.axes[0], rows), (run.axes[1], columns)),
        {coord: by_coord[coord].cell for coord in coords},
        _named(cell for cell in baselines if cell.measured),
        tuple(_notes(run, group, baselines)),
        validity(group),
    )


def _named(cells: Iterable[CellTraces]) -> dict[str, Cell]:
    """Cells by the short names of their settings."""
    by_id = {cell.setting.id: cell for cell in cells}
    names = short_names(cell.setting for cell in by_id.values())
    return {names[setting]: cell.cell for setting, cell in by_id.items()}


def _notes(run: RunData, group: Sequence[CellTraces], baselines: Sequence[CellTraces]) -> Iterator[Note]:
    for name, value in run.fix.items():
        yield Note(NoteKind.FIXED, f"{name}={value}")
    # The terms of the budget: values beside the published rule that all cells share.
    for name in ("budget_over", "every", "every_from"):
        values = {cell.setting.values.get(name) for cell in group}
        if len(values) == 1 and values != {None} and name not in run.fix:
            yield Note(NoteKind.FIXED, f"{name}={values.pop()}")
    yield from partial_note((*group, *baselines))
    yield from mixed_note((*group, *baselines))
    if any(cell.adaptive for cell in group):
        problems = [len(cell.place) for cell in group]
        yield Note(
            NoteKind.ADAPTIVE,
            f"adaptive: cells have {min(problems)} to {max(problems)} problems, as many as the choice took; "
            "intervals are those of a fixed number of problems",
        )
    if any(cell.screened for cell in group):
        yield SCREEN_NOTE
    yield from unmeasured_notes(group, run.metric)


def mean_map(maps: Sequence[Map]) -> Map:
    """The mean of one model's and policy's maps over their benchmarks, cell by cell, named `mean of N`.

    Cells and baselines that not all maps have are left out, and the notes say so. Raises KvatlasError for maps of
    unlike model, policy, metric or axes, and for a benchmark that comes twice.
    """
    if not maps:
        raise KvatlasError("A mean map needs at least one map; none was given.")
    first = maps[0]
    for noun in ("model", "policy", "metric", "axes"):
        for other in maps[1:]:
            if getattr(other, noun) != getattr(first, noun):
                raise KvatlasError(
                    f"A mean needs maps of equal {noun}; those of {first.benchmark} and {other.benchmark} differ."
                )
    if len({map_.benchmark for map_ in maps}) < len(maps):
        raise KvatlasError(f"A mean counts every benchmark once; given were {', '.join(m.benchmark for m in maps)}.")
    cells, baselines = _means([map_.cells for map_ in maps]), _means([map_.baselines for map_ in maps])
    partial = Note(NoteKind.PARTIAL, "PARTIAL: some of the averaged maps lack traces")
    notes = dict.fromkeys(partial if n.kind is NoteKind.PARTIAL else n for map_ in maps for n in map_.notes)
    if any(len(map_.cells) > len(cells) for map_ in maps):
        notes[Note(NoteKind.LEFT_OUT, "cells that not every benchmark has are left out")] = None
    return Map(
        first.model,
        mean_of(len(maps)),
        first.metric,
        first.policy,
        first.axes,
        cells,
        baselines,
        tuple(notes),
        together([map_.validity for map_ in maps]),
        averaged=len(maps),
    )


def _means(parts: Sequence[Mapping[T, Cell]]) -> dict[T, Cell]:
    """The mean of each cell that all parts have."""
    return {key: mean_cell([part[key] for part in parts]) for key in parts[0] if all(key in part for part in parts)}


def mean_maps(maps: Sequence[Map]) -> list[Map]:
    """The mean map of every model, policy and metric that has two or more benchmarks, else the mean that was given."""
    names = attrgetter("model", "policy", "metric")
    given = grouped((map_ for map_ in maps if map_.is_mean), names)
    single = grouped((map_ for map_ in maps if not map_.is_mean), names)
    made = {name: mean_map(group) for name, group in single.items() if len(group) > 1}
    return list((made | {name: means[0] for name, means in given.items() if name not in made}).values())


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """One setting over several benchmarks; costs are known where all of them know theirs."""
    audits = [cell.audit for cell in cells if cell.audit is not None]
    shares = {name: sum(getattr(own, name) for own in audits) / len(cells) for name in ("median", "none", "no_choice")}
    problems, worst = sum(own.problems for own in audits), min((own.worst for own in audits), default=0)
    rules: dict[Callable[..., Any], tuple[str, ...]] = {
        max: ("peak_kv_tokens", "peak_kv_bytes"),
        sum: ("truncated", "unmeasured"),
        _mean: ("mean_kv_tokens", "mean_kv_bytes", "output_tokens_mean", "seconds_mean"),
    }
    costs: dict[str, Any] = {
        name: rule(values)
        for rule, names in rules.items()
        for name in names
        if None not in (values := [getattr(cell, name) for cell in cells])
    }
    return Cell(
        cells[0].setting,
        mean_over_benchmarks([cell.estimate for cell in cells]),
        audit=BudgetAudit(problems=problems, worst=worst, **shares) if len(audits) == len(cells) else None,
        **costs,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


#: The vertical axis of a map of curves.
POLICY = "policy"


def curves_of_run(run: RunData) -> list[Map]:
    """One map for each model and benchmark of a run with one axis: a row for each policy, a curve over its values.

    Without an axis the settings are the rows of a single column. Raises KvatlasError as `maps_of_run` does, and for a
    run that varies two parameters or more.
    """
    if not run.is_line:
        raise KvatlasError(f"A curve has one axis and this run varies {len(run.varied)} ({', '.join(run.varied)}).")
    cells = [cell for cell in run.cells if run.fits(cell)]
    check_complete(cells, run.partial, "curve")
    check_measured(cells, run.metric, run.partial)
    notes = partial_note(cells) + mixed_note(cells) + (SCREEN_NOTE,) * run.manifest.screened
    axis = next(iter(run.varied), "")
    measured = [cell for cell in cells if cell.measured]
    on_axis = [cell for cell in measured if not axis or (not cell.baseline and axis in cell.setting.on_axes)]
    curves = []
    for (model, benchmark), group in grouped(on_axis, lambda cell: (cell.model, cell.benchmark)).items():
        policies = grouped(group, lambda cell: cell.setting.policy if axis else "")
        reasons = [checked.reason for own in policies.values() if (checked := validity(own)) is not None]
        vacuous = [Note(NoteKind.VACUOUS, f"VACUOUS: {reason}") for reason in reasons if reason]
        unmeasured = [note for own in policies.values() for note in unmeasured_notes(own, run.metric)]
        if axis:
            at = {(cell.setting.policy, cell.setting.on_axes[axis]): cell for cell in group}
            values = ascending(value for _, value in at)
            points = {coord: at[coord].cell for coord in product(policies, values) if coord in at}
            beside = _named(select(measured, model=model, benchmark=benchmark, baseline=True))
            axes = ((POLICY, tuple(policies)), (axis, values))
        else:
            points, beside = {(name, run.metric): cell for name, cell in _named(group).items()}, {}
            axes = ((POLICY, tuple(name for name, _ in points)), ("", (run.metric,)))
        every = tuple(dict.fromkeys((*vacuous, *notes, *unmeasured)))
        curves.append(Map(model, benchmark, run.metric, "", axes, points, beside, every))
    return curves
