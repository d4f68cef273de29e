"""Maps of a run, and their means over benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvatlas.core import BudgetAudit, Cell, KvatlasError, Map, Trace
from kvatlas.results.csv_maps import ascending
from kvatlas.results.manifest import Manifest
from kvatlas.stats.estimates.at_k import BAYES_NOTE
from kvatlas.stats.estimates.cells import CellTraces, gather
from kvatlas.stats.estimates.grid import Axes, grid_groups, map_axes, short_names
from kvatlas.stats.estimates.pass_at_1 import mean_over_benchmarks
from kvatlas.stats.estimates.validity import together, validity

T = TypeVar("T")

SCREEN_NOTE = "SCREEN: settings read the full cache's traces and decoded nothing; this is not Pass@1"


def maps_of_run(
    manifest: Manifest,
    traces: Iterable[tuple[str, Trace]],
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
) -> list[Map]:
    """One map for each model, benchmark and policy that varies both axes, in the manifest's order.

    `traces` are a store's `(run key, trace)` pairs, texts not needed; `metric` is `pass@1` or `progress`; `fix` holds
    axes beyond two to one value each. Raises KvatlasError if the run does not have two axes, or if traces are
    missing; with `partial` the maps say so in their notes instead, and cells without any trace are left out.
    """
    return maps_of_cells(gather(manifest, traces, metric), map_axes(manifest, fix), metric, partial, fix)


def maps_of_cells(
    cells: Sequence[CellTraces],
    axes: Axes,
    metric: str = "pass@1",
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
) -> list[Map]:
    """As `maps_of_run`, from cells that were gathered already."""
    groups = grid_groups(cells, axes, fix)
    if not groups:
        raise KvatlasError(f"No policy of this run has two or more values of both {axes[0]} and {axes[1]}.")
    beside: dict[tuple[str, str], list[CellTraces]] = {}
    for cell in cells:
        if cell.expected.baseline:
            beside.setdefault((cell.expected.model, cell.expected.benchmark), []).append(cell)
    shown = [cell for group in groups.values() for cell in group]
    _check_complete(shown + [cell for group in beside.values() for cell in group], partial)
    check_measured(shown, metric, partial)
    fixed = tuple(f"{name}={value}" for name, value in (fix or {}).items())
    return [
        _map((model, benchmark, policy), metric, axes, group, beside.get((model, benchmark), []), fixed)
        for (model, benchmark, policy), group in groups.items()
        if any(cell.measured for cell in group)
    ]


def _check_complete(cells: Sequence[CellTraces], partial: bool) -> None:
    promised = sum(cell.promised for cell in cells)
    missing = promised - sum(cell.found for cell in cells)
    if missing == promised:
        raise KvatlasError(f"The run has none of its {promised} traces yet, so there is no map to draw.")
    if missing and not partial:
        holes = sum(cell.found < cell.promised for cell in cells)
        raise KvatlasError(
            f"{missing} of {promised} traces are missing, in {holes} of {len(cells)} cells; the missing ones are often "
            "the hardest problems, so finish the sweep, or draw what is there with --partial."
        )


def check_measured(cells: Sequence[CellTraces], metric: str, partial: bool) -> None:
    """Raise KvatlasError where the metric is known of no trace of a benchmark, so that its map would be missing."""
    unknown = [cell for cell in cells if cell.found and not cell.measured]
    if unknown and (not partial or len(unknown) == len(cells)):
        first = unknown[0]
        raise KvatlasError(
            f"{metric} is unknown of all {first.found} traces of {first.expected.model} on {first.expected.benchmark}: "
            "none of them has an answer; choose another metric, or leave them out with --partial."
        )


def unmeasured_notes(cells: Sequence[CellTraces], metric: str) -> tuple[str, ...]:
    """A note where the metric is unknown of some traces: of the same in all cells, which read the same ones."""
    most = max(cells, key=lambda cell: len(cell.unmeasured))
    if not most.unmeasured:
        return ()
    about = f"{len(most.unmeasured)} of {most.found} traces of {most.expected.benchmark}"
    return (f"{about} have no answer and are left out of {metric}",)


def _map(
    name: tuple[str, str, str],
    metric: str,
    axes: Axes,
    group: Sequence[CellTraces],
    beside: Sequence[CellTraces],
    notes: tuple[str, ...],
) -> Map:
    model, benchmark, policy = name
    missing = sum(cell.promised - cell.found for cell in (*group, *beside))
    if missing:
        promised = sum(cell.promised for cell in (*group, *beside))
        holes = sum(cell.found < cell.promised for cell in (*group, *beside))
        cells = "1 cell" if holes == 1 else f"{holes} cells"
        notes = (*notes, f"PARTIAL: {missing} of {promised} traces are missing, in {cells}")
    if any(cell.adaptive for cell in group):
        notes = (*notes, _adaptive_note([len(cell.expected.problems) for cell in group]))
    if any(cell.screened for cell in group):
        notes = (*notes, SCREEN_NOTE)
    notes = (*notes, *unmeasured_notes(group, metric))
    if any(cell.rule is not None and cell.rule.kind == "bayes" for cell in group):
        notes = (*notes, BAYES_NOTE)
    vertical, horizontal = axes
    places = {
        (cell.expected.setting.values[vertical], cell.expected.setting.values[horizontal]): cell for cell in group
    }
    rows, columns = ascending(row for row, _ in places), ascending(column for _, column in places)
    found = {(r, c): places[r, c].cell() for r in rows for c in columns if (r, c) in places and places[r, c].measured}
    names = short_names(cell.expected.setting for cell in beside)
    baselines = {names[cell.expected.setting.id]: cell.cell() for cell in beside if cell.measured}
    both = ((vertical, rows), (horizontal, columns))
    return Map(model, benchmark, metric, policy, both, found, baselines, notes, validity(group))


def _adaptive_note(problems: Sequence[int]) -> str:
    return (
        f"adaptive: cells have {min(problems)} to {max(problems)} problems, those with few were shown worse early; "
        "intervals hold for any reason to stop"
    )


def mean_map(maps: Sequence[Map]) -> Map:
    """The mean of one model's and policy's maps over their benchmarks, cell by cell, named `mean of N`.

    Kept and output tokens are averaged, truncated traces summed, the peak is the largest. Cells and baselines that
    not all maps have are left out, and the notes say so. Raises KvatlasError for maps of unlike model, policy, metric
    or axes, and for a benchmark that comes twice.
    """
    if not maps:
        raise KvatlasError("A mean map needs at least one map; none was given.")
    first = maps[0]
    for other in maps[1:]:
        for noun, mine, theirs in (
            ("model", first.model, other.model),
            ("policy", first.policy, other.policy),
            ("metric", first.metric, other.metric),
        ):
            if mine != theirs:
                raise KvatlasError(f"A mean is over benchmarks of one {noun}; {mine!r} and {theirs!r} were given.")
        if other.axes != first.axes:
            raise KvatlasError(
                f"A mean needs equal axes; {first.benchmark} has {_axes_text(first)} and "
                f"{other.benchmark} has {_axes_text(other)}."
            )
    if len({one.benchmark for one in maps}) < len(maps):
        raise KvatlasError(f"A mean counts every benchmark once; given were {', '.join(m.benchmark for m in maps)}.")
    cells = {place: mean_cell([one.cells[place] for one in maps]) for place in _common([m.cells for m in maps])}
    baselines = {
        name: mean_cell([one.baselines[name] for one in maps]) for name in _common([m.baselines for m in maps])
    }
    notes = list(dict.fromkeys(note if "PARTIAL" not in note else _PARTIAL_MEAN for m in maps for note in m.notes))
    if any(len(one.cells) > len(cells) for one in maps):
        notes.append("cells that not every benchmark has are left out")
    name = f"{MEAN_OF}{len(maps)}"
    checked = together([one.validity for one in maps])
    return Map(first.model, name, first.metric, first.policy, first.axes, cells, baselines, tuple(notes), checked)


MEAN_OF = "mean of "
_PARTIAL_MEAN = "PARTIAL: some of the averaged maps lack traces"


def mean_maps(maps: Sequence[Map]) -> list[Map]:
    """The mean map of every model, policy and metric that has two or more benchmarks.

    A map that is a mean already (a CSV map of `mean of N`) does not count as a benchmark; it stands for its model
    where there is no other.
    """
    groups: dict[tuple[str, str, str], list[Map]] = {}
    given: dict[tuple[str, str, str], Map] = {}
    for one in maps:
        name = one.model, one.policy, one.metric
        if one.benchmark.startswith(MEAN_OF):
            given.setdefault(name, one)
        else:
            groups.setdefault(name, []).append(one)
    made = {name: mean_map(group) for name, group in groups.items() if len(group) > 1}
    return list((made | {name: one for name, one in given.items() if name not in made}).values())


def _common(mappings: Sequence[Mapping[T, Cell]]) -> list[T]:
    return [key for key in mappings[0] if all(key in other for other in mappings[1:])]


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """One setting over several benchmarks; costs are known where all of them know theirs."""
    kept = [cell.mean_kv_tokens for cell in cells if cell.mean_kv_tokens is not None]
    output = [cell.output_tokens_mean for cell in cells if cell.output_tokens_mean is not None]
    peaks = [cell.peak_kv_tokens for cell in cells if cell.peak_kv_tokens is not None]
    truncated = [cell.truncated for cell in cells if cell.truncated is not None]
    seconds = [cell.seconds_mean for cell in cells if cell.seconds_mean is not None]
    unmeasured = [cell.unmeasured for cell in cells if cell.unmeasured is not None]
    count = len(cells)
    return Cell(
        cells[0].setting,
        mean_over_benchmarks([cell.estimate for cell in cells]),
        mean_kv_tokens=sum(kept) / count if len(kept) == count else None,
        peak_kv_tokens=max(peaks) if len(peaks) == count else None,
        output_tokens_mean=sum(output) / count if len(output) == count else None,
        truncated=sum(truncated) if len(truncated) == count else None,
        seconds_mean=sum(seconds) / count if len(seconds) == count else None,
        unmeasured=sum(unmeasured) if len(unmeasured) == count else None,
        audit=_mean_audit([cell.audit for cell in cells if cell.audit is not None], count),
    )


def _mean_audit(audits: Sequence[BudgetAudit], count: int) -> BudgetAudit | None:
    if len(audits) < count:
        return None
    return BudgetAudit(
        sum(audit.problems for audit in audits),
        sum(audit.median for audit in audits) / count,
        min(audit.worst for audit in audits),
        sum(audit.none for audit in audits) / count,
        sum(audit.no_choice for audit in audits) / count,
    )


def _axes_text(one: Map) -> str:
    return ", ".join(f"{name} {'/'.join(str(value) for value in values)}" for name, values in one.axes)
