"""The output of `kvatlas demo`: figures, maps as CSV and the report in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvatlas.core import Map, grouped
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.pairwise import pairwise_figure, save_pairwise
from kvatlas.figures.style import save
from kvatlas.report.app.page import write_report
from kvatlas.results.export import write_maps
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import pairs_of, systems_of

#: Kinds of files of each figure.
FIGURES = ("png", "svg", "pdf")


def first_look(folder: Path) -> list[Path]:
    """Draw what is finished, as PNG alone; returns the pictures."""
    return _maps(RunAnalysis(RunData.open(folder)), folder, ("png",))


def write_demo(folder: Path) -> tuple[RunAnalysis, list[Path]]:
    """Draw the figures and write `maps.csv` and `report.html`; returns what the run says and the figures."""
    run = RunData.open(folder)
    analysis = RunAnalysis(run)
    written = _maps(analysis, folder, FIGURES)
    names = _full_and_best(analysis.means)
    systems = [system for system in systems_of([run]) if (system.model, system.setting.id) in names]
    figure = pairwise_figure(systems, pairs_of(systems), "progress")
    for suffix in FIGURES:
        written += save_pairwise(figure, folder / f"progress-pairs.{suffix}", systems, "progress")[:1]
    write_maps(analysis.maps, folder / "maps.csv")
    write_report(analysis, folder / "report.html")
    return analysis, written


def _maps(analysis: RunAnalysis, folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The means side by side, then a figure for each model and policy; as files of each kind."""
    maps, written = analysis.maps, []
    figures = [(map_figure(analysis.means, one_bar=True), "means", analysis.means)]
    for (model, policy), series in grouped(maps, lambda map_: (map_.model, map_.policy)).items():
        figures.append((map_figure(series), f"{model.rpartition(':')[2]}-{policy}", series))
    for figure, name, own in figures:
        for suffix in suffixes:
            written += save(figure, folder / f"{name}.{suffix}", own)[:1]
    return written


def _full_and_best(means: Sequence[Map]) -> set[tuple[str, str]]:
    """(model, setting) of each model's full cache and of the best cell of its first policy's means."""
    first = {mean.model: mean for mean in reversed(means)}
    best = {model: mean.cells[mean.best] for model, mean in first.items()}
    full = {model: mean.baselines["full"] for model, mean in first.items() if "full" in mean.baselines}
    return {(model, cell.setting.id) for part in (full, best) for model, cell in part.items()}
