"""The output of `kvatlas demo`: figures, maps as CSV and the report in its folder."""

from collections.abc import Sequence
from pathlib import Path

from kvatlas.core import grouped
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.setting_rows import answer_csv, answer_figure
from kvatlas.figures.style import save
from kvatlas.report.app.page import write_report
from kvatlas.report.map_figure import MapOptions, losses_of_means, metric_figure
from kvatlas.report.result import Result, open_result
from kvatlas.report.sentences import short_headline
from kvatlas.results.export import write_maps
from kvatlas.text import model_name

#: Kinds of files of each figure.
FIGURES = ("png", "svg", "pdf")


def first_look(folder: Path) -> list[Path]:
    """Draw what is finished, as PNG alone, and return the pictures."""
    return _draw_figures(open_result([folder]), folder, ("png",))


def write_demo(folder: Path) -> tuple[Result, list[Path]]:
    """Draw the figures and write `maps.csv` and `report.html`; return what the run says and the figures."""
    result = open_result([folder])
    written = _draw_figures(result, folder, FIGURES)
    write_maps([one.map for one in result.maps], folder / "maps.csv")
    write_report(result, folder / "report.html")
    return result, written


def _draw_figures(result: Result, folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Draw the settings in rows, their maps side by side, then a figure for each model and policy but controls."""
    title = short_headline(result.choices, result.comparisons)
    figure = answer_figure(result.choices, result.opened_runs[0].metric, title=title)
    written = [save(figure, folder / f"answer.{suffix}", data=answer_csv(result.choices))[0] for suffix in suffixes]

    means = [one.map for one in result.means]
    figure = metric_figure(result, means, MapOptions(mean=True), losses_of_means(result))
    written += [save(figure, folder / f"means.{suffix}", means)[0] for suffix in suffixes]
    maps = [one.map for one in result.maps if not one.map.is_control]
    for (model, policy), series in grouped(maps, lambda map_: (map_.model, map_.policy)).items():
        figure = map_figure(series)
        name = f"{model_name(model)}-{policy}"
        written += [save(figure, folder / f"{name}.{suffix}", series)[0] for suffix in suffixes]
    return written
