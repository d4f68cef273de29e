"""The figure of runs and CSV maps: heatmaps of a metric, a cost or differences; line charts of runs with one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, Map, MapName
from kvatlas.figures import curves as line_charts
from kvatlas.figures.heatmap import plot
from kvatlas.figures.panels import (
    Frame,
    cost_change_panels,
    cost_panels,
    data_csv,
    difference_panels,
    metric_panels,
)
from kvatlas.figures.style import Look, check_figure, save
from kvatlas.report.map_differences import compare
from kvatlas.report.map_source import MapSource
from kvatlas.report.result import of_policy
from kvatlas.results.csv_maps import PUBLISHED
from kvatlas.stats.bare_maps import verdicts_of_maps
from kvatlas.stats.maps import curves_of_run, mean_maps
from kvatlas.stats.metrics import COSTS
from kvatlas.stats.run_analysis import RunAnalysis, joined, with_regions
from kvatlas.stats.run_data import LOSE_AT_MOST, RunData, margin_of
from kvatlas.stats.verdicts import Verdict


def plot_sources(
    sources: Sequence[str | Path],
    out: Path,
    *,
    metric: str | None = None,
    mean: bool = False,
    shared: bool | None = None,
    policy: str | None = None,
    against: str | None = None,
    frame: Frame = Frame.MARGIN,
    look: Look | None = None,
    partial: bool = False,
    fix: Mapping[str, Any] | None = None,
    lose_at_most: float | None = None,
) -> list[Path]:
    """Draw runs and CSV maps to `out` and return what was written: the figure, and its numbers as CSV.

    `metric` may be a cost; without one it is pass@1. `mean` draws means over benchmarks, side by side on one colour
    scale; `shared` says how far scales go (`figures.heatmap.plot`); `against` draws differences to a baseline, a
    policy, a model, or the maps of another run or CSV file; `frame` says which cells are framed. KvatlasError for what
    cannot be drawn.
    """
    check_figure(out)
    if lose_at_most is not None:
        margin_of({"lose_at_most": lose_at_most})
    cost = metric if metric in COSTS else None
    graded = None if cost else metric or "pass@1"

    given = [MapSource.open(source, graded, partial, fix, lose_at_most) for source in sources]
    runs = _runs(given)
    if any(run.is_line for run in runs):
        if len(sources) > 1:
            raise KvatlasError("A run with fewer than two axes is drawn as a line chart, alone; name one run.")
        for option in ("--mean" if mean else "", f"--against {against}" if against else ""):
            if option:
                raise KvatlasError(
                    f"{option} draws maps, and a run with fewer than two axes is a line chart; leave it out."
                )
        return _line_chart(runs[0], out, cost, policy, look)
    if cost or against:
        shown = _maps(given)
        if against:
            is_source = Path(against).exists() or against.startswith(PUBLISHED)
            other = MapSource.open(against, graded, partial, fix, lose_at_most) if is_source else None
            compared = compare(shown, runs, against, other)
            compared = replace(compared, maps=of_policy(compared.maps, policy))
            compared = compared.of_means() if mean else compared
            panels = (
                cost_change_panels(compared.maps, cost, compared.against)
                if cost
                else difference_panels(compared.maps, compared.differences, compared.against)
            )
        else:
            shown = of_policy(shown, policy)
            panels = cost_panels(mean_maps(shown) if mean else shown, cost or "")
        return save(plot(panels, shared=shared, one_bar=mean, look=look), out, data=data_csv(panels), look=look)
    framed = _framed(given, policy, mean, frame)
    unlike = next((map_ for map_ in framed if metric and map_.metric != metric), None)
    if unlike is not None:
        raise KvatlasError(f"The map of {unlike.model} on {unlike.benchmark} shows {unlike.metric} and no {metric!r}.")
    return save(plot(metric_panels(framed, frame), shared=shared, one_bar=mean, look=look), out, framed, look=look)


def _framed(given: Sequence[MapSource], policy: str | None, mean: bool, frame: Frame) -> list[Map]:
    """The maps to draw, with the regions that are framed."""
    single = of_policy(_maps(given), policy)
    shown = mean_maps(single) if mean else single
    if frame is Frame.NONE:
        return shown
    runs = _runs(given)
    margin = runs[0].margin if runs else LOSE_AT_MOST / 100
    return with_regions(shown, _verdicts(runs, single, len(given)), margin)


def _maps(given: Sequence[MapSource]) -> list[Map]:
    return [map_ for source in given for map_ in source.maps]


def _runs(given: Sequence[MapSource]) -> list[RunData]:
    return [source.run for source in given if source.run is not None]


def _verdicts(runs: Sequence[RunData], maps: Sequence[Map], sources: int) -> dict[MapName, Verdict]:
    """From the traces of runs, and by the bound where there are CSV maps."""
    by_map = verdicts_of_maps(maps) if len(runs) < sources else {}
    for analysis in joined([RunAnalysis(run) for run in runs]):
        by_map |= analysis.verdicts
    return by_map


def _line_chart(run: RunData, out: Path, cost: str | None, policy: str | None, look: Look | None) -> list[Path]:
    curves = curves_of_run(run)
    if not curves:
        raise KvatlasError("No setting of this run has a value on the axis that is left, so there is no line to draw.")
    chosen = [curve for curve in curves if policy in (None, curve.policy)]
    if not chosen:
        there = ", ".join(dict.fromkeys(curve.policy for curve in curves))
        raise KvatlasError(f"There is no curve of the policy {policy!r}; there are: {there}.")
    figure = line_charts.line_figure(chosen, cost=cost, look=look)
    return save(figure, out, data=line_charts.data_csv(chosen, cost), look=look)
