"""Shared parts of all figures: their options, the smallest type on paper, numbers as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvatlas.core import SERVED, KvatlasError, Setting
from kvatlas.figures import style
from kvatlas.figures.curves import depth_figure, line_figure
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.pairwise import names_of, pairwise_figure
from kvatlas.figures.style import LEAST_TYPE, WIDTHS, Look, save
from kvatlas.stats.maps import curves_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import pairs_of, systems_of
from tests.figures.conftest import dense
from tests.stats.synthetic import grid, manifest, traces
from tests.wanderers import maze_run

FULL = Setting.of("full")


@pytest.fixture(scope="module")
def mazes(tmp_path_factory):
    solvers = {("A", FULL): 0.01, ("A", Setting.of("window", ratio=0.1)): 0.15, ("C", SERVED): 0.08}
    return RunData.open(maze_run(tmp_path_factory.mktemp("look"), solvers, problems=30))


@pytest.fixture(scope="module")
def line():
    plan = manifest(grid("dynts", "random"), problems=4)
    return curves_of_run(RunData(plan, list(traces(plan)), fix={"local_window": 16}))


def figures(look: Look, llama, mazes, line) -> dict[str, Callable[[], Figure]]:
    """Every kind of figure, drawn when called."""
    success, progress = systems_of([mazes], "pass@1"), systems_of([mazes], "progress")
    policies = [replace(llama[0], policy=policy) for policy in ("dynts", "random", "window", "h2o")]
    return {
        "series": lambda: map_figure(llama[:2], look=look),
        "policies": lambda: map_figure(policies, one_bar=True, look=look),
        "dense": lambda: map_figure([dense(12)], look=look),
        "line": lambda: line_figure(line, look=look),
        "curves": lambda: depth_figure(success, progress, names_of(success), look=look)[0],
        "pairs": lambda: pairwise_figure(progress, pairs_of(progress), "progress", look=look),
    }


@pytest.mark.parametrize("look", [Look(), Look(1, dark=True)], ids=["own width", "one column"])
def test_type_has_5_points_on_paper_and_a_contrast_of_4_5_to_its_ground(look, llama, mazes, line):
    for kind, drawn in figures(look, llama, mazes, line).items():
        figure = drawn()
        inches = figure.get_figwidth()
        assert inches == pytest.approx(look.width) if look.width else inches <= WIDTHS[2], kind
        FigureCanvasAgg(figure).draw()
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        small = {text.get_text() for text in texts if text.get_fontsize() < LEAST_TYPE}
        assert (kind, small) == (kind, set())
        # WCAG 2.2, 1.4.3.
        pale = {text.get_text() for text in _around(figure) if contrast(text.get_color(), look.colours.ground) < 4.5}
        assert (kind, pale - {""}) == (kind, set())


def _around(figure: Figure) -> list[Text]:
    """The text that stands on the figure's ground."""
    texts = list(figure.texts)
    texts += [text for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    return texts + [tick for axes in figure.axes for tick in (*axes.get_xticklabels(), *axes.get_yticklabels())]


def contrast(text: str, other: str) -> float:
    lights = sorted(np.dot((0.2126, 0.7152, 0.0722), _linear(np.array(to_rgb(colour)))) for colour in (text, other))
    return float((lights[1] + 0.05) / (lights[0] + 0.05))


def _linear(channels):
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def test_all_figures_take_the_same_options(tmp_path: Path, llama, mazes, line):
    look = Look(dark=True, intervals=False)
    made = figures(look, llama, mazes, line)
    for kind in ("series", "line", "curves", "pairs"):
        figure = made[kind]()
        path, *_ = save(figure, tmp_path / "f.svg")
        svg = path.read_text()
        assert look.colours.ground in svg, kind
        assert "95 % intervals" not in svg, kind
        shown = {text.get_text() for text in figure.findobj(Text)}
        assert not any(" to +" in text or "±" in text for text in shown), kind


def test_labels_stand_for_names(llama):
    look = Look(labels={"AIME24": "AIME 2024", "Ratio": "Share kept", "R1-Llama": "Llama 8B"})
    figure = map_figure(llama[:1], look=look)
    assert figure.axes[0].get_xlabel() == "Share kept"
    words = [text.get_text() for text in figure.findobj(Text)]
    assert "AIME 2024" in words
    assert any(word.startswith("Llama 8B under dynts") for word in words)
    with pytest.raises(KvatlasError, match="--look columns: expected 1 or 2, got 3"):
        Look(3)


def test_values_are_written_as_on_the_page() -> None:
    names = ["embedded:tiny-llama", "hf:/models/R1-Llama/", "R1-Qwen", "openai:gpt", "hf:"]
    assert [style.model(name) for name in names] == ["tiny-llama", "R1-Llama", "R1-Qwen", "openai:gpt", "hf:"]
    assert [style.signed(v) for v in (-3.21, 0.0, 0.04, -0.04, 12.0)] == ["−3.2", "0.0", "0.0", "0.0", "+12.0"]
    assert (style.signed(-38.4, 0), style.signed(-0.0004, 3)) == ("−38", "0.000")
    assert [style.fixed(v) for v in (51.25, 51.35, -6.25, 0.05, 100.0)] == ["51.3", "51.4", "-6.3", "0.1", "100.0"]
    assert (style.percent(0.5125), style.percent(0.2875)) == ("51.3", "28.8")


def test_a_widened_scale_stays_among_percentages() -> None:
    assert style.span([100.0, 99.8]) == (99.0, 100.0)
    assert style.span([0.0]) == (0.0, 1.0)
    assert style.span([50.0]) == (49.5, 50.5)
    assert style.span([2000.0]) == (1999.5, 2000.5)
    assert style.span([100.0, 90.0]) == (90.0, 100.0)


@pytest.mark.parametrize("colours", [style.VALUES, style.COSTS, style.COUNTS, style.DIFFERENCES])
def test_black_type_is_readable_on_every_colour_and_the_page_mixes_the_same(colours: str) -> None:
    for share in np.linspace(0, 1, 201):
        background = to_hex(style.colour_map(colours)(share))
        assert contrast(background, style.ON_COLOUR) >= 4.5, background
    steps = style.steps(colours)
    assert [to_hex(style.colour_map(colours)(end)) for end in (0.0, 1.0)] == [steps[0], steps[-1]]
