"""The figure of runs and CSV maps: heatmaps of a metric, a cost or differences; line charts of runs with one axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, MapName, Note, NoteKind
from kvatlas.figures import curves as line_charts
from kvatlas.figures import style
from kvatlas.figures.heatmap import plot
from kvatlas.figures.panels import Compared, cost_panels, data_csv, difference_panels, metric_panels
from kvatlas.figures.style import Look, check_figure, save
from kvatlas.report.result import Source, bare_maps, of_policy, open_source
from kvatlas.results.csv_maps import PUBLISHED, published_names, read_maps
from kvatlas.stats.csv_tests import verdicts_of_maps
from kvatlas.stats.maps import POLICY, curves_of_run, mean_maps
from kvatlas.stats.metrics import COSTS
from kvatlas.stats.pairs import differences_of_run, differences_of_runs
from kvatlas.stats.run_analysis import RunAnalysis, group_by_axes, with_regions
from kvatlas.stats.run_data import RunData, margin_from_points


def plot_sources(
    sources: Sequence[str | Path],
    out: Path,
    *,
    metric: str | None = None,
    mean: bool = False,
    shared: bool | None = None,
    policy: str | None = None,
    against: str | None = None,
    look: Look | None = None,
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    lose_at_most: float | None = None,
) -> list[Path]:
    """Draw runs and CSV maps to `out` and return what was written: the figure, and its numbers as CSV.

    `metric` may be a cost; without one it is pass@1. `mean` draws means over benchmarks, side by side on one colour
    scale; `shared` says how far scales go (`figures.heatmap.plot`); `against` draws differences to a baseline, a
    policy, a model, or the maps of another run or CSV file. KvatlasError for what cannot be drawn.
    """
    check_figure(out)
    margin = margin_from_points(lose_at_most)
    cost = metric if metric in COSTS else None
    graded = None if cost else metric or "pass@1"

    given = [open_source(source, graded, partial, fix, lose_at_most) for source in sources]
    analyses = [source for source in given if isinstance(source, RunAnalysis)]
    runs = [analysis.run for analysis in analyses]
    if any(run.is_line for run in runs):
        if len(sources) > 1:
            raise KvatlasError("A run with fewer than two axes is drawn as a line chart, alone; name one run.")
        if mean or against:
            option = "--mean" if mean else f"--against {against}"
            raise KvatlasError(
                f"{option} draws maps, and a run with fewer than two axes is a line chart; leave it out."
            )
        return _line_chart(runs[0], out, cost, policy, look)
    if cost and against:
        raise KvatlasError("--against draws differences of a metric, and --metric names a cost; leave one of them out.")
    maps = [map_ for source in given for map_ in bare_maps(source)]
    if against:
        is_source = Path(against).exists() or against.startswith(PUBLISHED)
        other = open_source(against, graded, partial, fix, lose_at_most) if is_source else None
        compared = compare(maps, runs, against, other)
        compared = replace(compared, maps=of_policy(compared.maps, policy))
        panels = difference_panels(_of_means(compared) if mean else compared)
        return save(plot(panels, shared=shared, one_bar=mean, look=look), out, data=data_csv(panels))
    single = of_policy(maps, policy)
    framed = mean_maps(single) if mean else single
    if cost:
        panels = cost_panels(framed, cost)
        return save(plot(panels, shared=shared, one_bar=mean, look=look), out, data=data_csv(panels))
    verdicts = verdicts_of_maps(single) if len(runs) < len(given) else {}
    for analysis in group_by_axes(analyses):
        verdicts |= analysis.verdicts
    framed = with_regions(framed, verdicts, runs[0].margin if runs else margin)
    if mean:
        framed = _with_rounding(framed, sources)
    unlike = next((map_ for map_ in framed if metric and map_.metric != metric), None)
    if unlike is not None:
        raise KvatlasError(f"The map of {unlike.model} on {unlike.benchmark} shows {unlike.metric} and no {metric!r}.")
    return save(plot(metric_panels(framed), shared=shared, one_bar=mean, look=look), out, framed)


def _with_rounding(means: Sequence[Map], sources: Sequence[str | Path]) -> list[Map]:
    """The means with a note on how many cells differ from the published means of the same maps by rounding."""
    names = [f"{source}_mean" for source in map(str, sources) if source.startswith(PUBLISHED)]
    published = {
        map_.model: map_
        for name in names
        if name.removeprefix(PUBLISHED) in published_names()
        for map_ in read_maps(name)
    }
    pairs = [
        (cell.estimate.value, published[mean.model].cells[coord].estimate.value)
        for mean in means
        for coord, cell in mean.cells.items()
        if mean.model in published
    ]
    count = sum(style.percent(own) != style.percent(other) for own, other in pairs)
    if not count:
        return list(means)
    text = (
        f"in {count} of {len(pairs)} cells the published mean differs by 0.1, since the benchmarks' values are rounded"
    )
    return [replace(mean, notes=(*mean.notes, Note(NoteKind.GRANULARITY, text))) for mean in means]


def _line_chart(run: RunData, out: Path, cost: str | None, policy: str | None, look: Look | None) -> list[Path]:
    curves = curves_of_run(run)
    if not curves:
        raise KvatlasError("No setting of this run has a value on the axis that is left, so there is no line to draw.")
    policies = dict.fromkeys(name for curve in curves for name in line_charts.points(curve))
    if policy is not None and policy not in policies:
        raise KvatlasError(f"There is no curve of the policy {policy!r}; there are: {', '.join(policies)}.")
    if policy:
        own = [curve for curve in curves if policy in line_charts.points(curve)]
        curves = [replace(curve, axes=((POLICY, (policy,)), curve.axes[1])) for curve in own]
    figure = line_charts.line_figure(curves, cost=cost, look=look)
    return save(figure, out, data=line_charts.data_csv(curves, cost))


# -- differences -------------------------------------------------------------------------------------------------------


def _of_means(compared: Compared) -> Compared:
    """The same comparison for means over benchmarks."""
    others = [
        replace(compared.others[map_.name], model=map_.model, benchmark=map_.benchmark, policy=map_.policy)
        for map_ in compared.maps
    ]
    means = {mean.name: mean for mean in mean_maps(others)}
    return replace(compared, maps=mean_maps(compared.maps), others=means)


def compare(maps: Sequence[Map], runs: Sequence[RunData], against: str, other: Source | None) -> Compared:
    """Maps against a baseline, a policy, a model, or the maps of the `other` source.

    Raises KvatlasError where nothing has that name, and where no map can be compared with it.
    """
    if other is not None:
        other_runs = [other.run] if isinstance(other, RunAnalysis) else []
        return _compared(maps, Path(against).name, bare_maps(other), lambda name: name, runs, other_runs)
    if any(against in map_.baselines for map_ in maps):
        paired = {name: cells for run in runs for name, cells in differences_of_run(run, against).items()}
        return Compared(maps, against, {map_.name: _everywhere(map_, against) for map_ in maps}, paired)
    if any(against == map_.policy for map_ in maps):
        rest = [map_ for map_ in maps if map_.policy != against]
        return _compared(rest, against, maps, lambda name: name._replace(policy=against), runs, runs)
    models = dict.fromkeys(map_.model for map_ in maps)
    model = next((name for name in models if against in (name, style.model(name))), None)
    if model is not None:
        rest, full = [map_ for map_ in maps if map_.model != model], model
        return _compared(rest, style.model(full), maps, lambda name: name._replace(model=full), runs, runs)
    named = dict.fromkeys(
        [*(name for map_ in maps for name in map_.baselines), *(map_.policy for map_ in maps), *models]
    )
    raise KvatlasError(
        f"There is no baseline, policy or model {against!r} to compare with, and no such run or CSV map; there are: "
        f"{', '.join(filter(None, named))}."
    )


def _everywhere(map_: Map, baseline: str) -> Map:
    """A map with its baseline in all cells; raises KvatlasError where it has none of that name."""
    if baseline not in map_.baselines:
        known = ", ".join(map_.baselines) or "none"
        raise KvatlasError(
            f"The map of {map_.model} on {map_.benchmark} has no baseline {baseline!r}; its baselines are: {known}."
        )
    return replace(map_, cells=dict.fromkeys(map_.cells, map_.baselines[baseline]))


def _compared(
    maps: Sequence[Map],
    name: str,
    theirs: Sequence[Map],
    partner: Callable[[MapName], MapName],
    runs: Sequence[RunData],
    other_runs: Sequence[RunData],
) -> Compared:
    by_name = {(map_.name, *(axis for axis, _ in map_.axes)): map_ for map_ in theirs}
    meets = {map_.name: (partner(map_.name), *(axis for axis, _ in map_.axes)) for map_ in maps}
    others = {name: by_name[other] for name, other in meets.items() if other in by_name}
    if not others:
        raise KvatlasError(f"No map has the model, benchmark, policy and axes of a map of {name} to be compared with.")
    paired = [differences_of_runs(run, other, partner) for run in runs for other in other_runs]
    contrasts = {name: cells for part in paired for name, cells in part.items()}
    return Compared([map_ for map_ in maps if map_.name in others], name, others, contrasts)
