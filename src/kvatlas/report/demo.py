"""What `kvatlas demo` leaves in its folder: figures, the maps as CSV, the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvatlas.core import Map
from kvatlas.figures.heatmap import means_figure, save, series_figure
from kvatlas.figures.pairwise import pairwise_figure, save_pairwise
from kvatlas.report.page import write_report
from kvatlas.results.export import write_maps
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.stats.pairs.pairwise import pairs_of
from kvatlas.stats.pairs.systems import systems_of
from kvatlas.stats.run_analysis import RunAnalysis

#: Kinds of files of each figure.
FIGURES = ("png", "svg", "pdf")


def first_look(folder: Path) -> Path:
    """Draw the mean maps of what is finished; returns the picture."""
    means = RunAnalysis(RunData.open(folder)).means
    return save(means_figure(means), folder / "means.png", means)[0]


def write_demo(folder: Path) -> tuple[RunAnalysis, list[Path]]:
    """Draw the figures and write `maps.csv` and `report.html`; returns what the run says and the figures."""
    run = RunData.open(folder)
    analysis = RunAnalysis(run)
    maps, means = analysis.maps, analysis.means
    written = []
    for model, policy in dict.fromkeys((map_.model, map_.policy) for map_ in maps):
        series = [map_ for map_ in maps if (map_.model, map_.policy) == (model, policy)]
        figure = series_figure(series)
        for suffix in FIGURES:
            written += save(figure, folder / f"{model.rpartition(':')[2]}-{policy}.{suffix}", series)[:1]
    figure = means_figure(means)
    for suffix in FIGURES:
        written += save(figure, folder / f"means.{suffix}", means)[:1]
    shown = _full_and_best(means)
    systems = [system for system in systems_of([run]) if (system.model, system.setting.id) in shown]
    figure = pairwise_figure(systems, pairs_of(systems), "progress")
    for suffix in FIGURES:
        written += save_pairwise(figure, folder / f"progress-pairs.{suffix}", systems, "progress")[:1]
    write_maps(maps, folder / "maps.csv")
    write_report(analysis, folder / "report.html")
    return analysis, written


def _full_and_best(means: Sequence[Map]) -> set[tuple[str, str]]:
    """(model, setting) of each model's full cache and of the best cell of its first policy's means."""
    first = {mean.model: mean for mean in reversed(means)}
    best = {model: mean.cells[mean.best] for model, mean in first.items()}
    full = {model: mean.baselines["full"] for model, mean in first.items() if "full" in mean.baselines}
    return {(model, cell.setting.id) for part in (full, best) for model, cell in part.items()}
