"""The output of `kvatlas demo`: figures, maps as CSV and the report in its folder, maps in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import Map
from kvatlas.figures import style
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.pairwise import pairwise_figure, save_pairwise
from kvatlas.figures.style import save
from kvatlas.report.app.page import write_report
from kvatlas.results.export import write_maps
from kvatlas.stats.run_analysis import RunAnalysis
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import pairs_of, systems_of
from kvatlas.text import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Kinds of files of each figure.
FIGURES = ("png", "svg", "pdf")
#: Characters of an interval such as `25.7–100.0`.
_WIDE = 10


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
    for model, policy in dict.fromkeys((map_.model, map_.policy) for map_ in maps):
        series = [map_ for map_ in maps if (map_.model, map_.policy) == (model, policy)]
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


def print_maps(maps: Sequence[Map], console: Console) -> None:
    """Print maps on one colour scale, the largest vertical value on top, with baselines and notes below.

    Cells have their 95 % intervals where the console has room for them; an empty cell is a dash.
    """
    from rich.text import Text

    low, high = style.scale(maps)
    for map_ in maps:
        console.print(_table(map_, console.width, low, high))
        for text, interval in style.baseline_texts(map_.baselines):
            console.print(Text(visible(f"  baseline: {text}{f' ({interval})' if interval else ''}")), soft_wrap=True)
        for note in map_.remarks:
            console.print(Text(visible(f"  {note}"), style="bold red" if note.is_warning else ""), soft_wrap=True)


def _table(map_: Map, width: int, low: float, high: float) -> Table:
    """A map as a table for a console of so many columns, coloured on the scale from low to high."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    (vertical, rows), (horizontal, columns) = map_.axes
    known = any(style.interval(cell.estimate) for cell in map_.cells.values())
    intervals = known and width >= len(style.label(vertical)) + 5 + (_WIDE + 3) * len(columns)
    wide = _WIDE if intervals else 5
    title = " | ".join(part for part in (style.model(map_.model), map_.benchmark, map_.policy) if part)
    metric = style.label(map_.metric)
    table = Table(
        title=Text(visible(f"{title}: {metric} in percent{' with its 95 % interval' if intervals else ''}")),
        caption=Text(f"{style.label(horizontal)} →"),
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        title_style="bold",
    )
    table.add_column(Text(f"{style.label(vertical)} ↑ "), justify="right", no_wrap=True)
    for column in columns:
        table.add_column(Text(visible(str(column))), justify="center", no_wrap=True)
    for row in reversed(rows):
        texts = [Text(visible(f"{row} "))]
        for column in columns:
            cell = map_.cells.get((row, column))
            if cell is None:
                texts.append(Text(f" {'–':^{wide}} ", style="dim"))
                continue
            text = f" {style.percent(cell.estimate.value):^{wide}} "
            text += f"\n {style.interval(cell.estimate):^{wide}} " if intervals else ""
            ground = style.colour(100 * cell.estimate.value, low, high)
            texts.append(Text(text, style=f"{style.ON_COLOUR} on {ground}"))
        table.add_row(*texts)
    return table
