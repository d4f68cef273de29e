"""Shared parts of all figures: options, type that is legible and neither overlaps nor leaves, numbers as text."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvatlas import text
from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.figures import colours
from kvatlas.figures.heatmap import map_figure, plot
from kvatlas.figures.loss_cost import cost_figure
from kvatlas.figures.pairwise import pairwise_figure
from kvatlas.figures.panels import metric_panels
from kvatlas.figures.setting_rows import answer_figure
from kvatlas.figures.style import LEAST_TYPE, WIDTHS, FigureOptions, save
from kvatlas.report.result import Result
from kvatlas.stats.costs import CostRatio, cost_ratios
from kvatlas.stats.systems import pairs_of
from kvatlas.text import fixed, model_name, percent_text, signed
from tests.figures.conftest import dense, faults
from tests.stats.synthetic import grid, manifest, run_of, system, traces

POLICIES = ("dynts", "random", "window", "h2o")
SYSTEMS = [
    system(
        name,
        Setting.from_parameters("dynts", local_window=500, ratio=0.3),
        [round((n * (own + 2) % 11) / 10, 1) for n in range(40)],
        [5 + n // 4 for n in range(40)],
    )
    for own, name in enumerate(("R1-Llama", "R1-Llama-of-a-long-name", "R1-Qwen", "gpt-4o-mini"))
]


@cache
def answered(problems: int = 60) -> Result:
    """A result of two models whose settings are proven within the margin, beyond it, and not decided."""
    plan = manifest(grid("dynts", "random"), models=("tiny", "other"), problems=problems)

    def chance(setting: Setting) -> float:
        if setting.policy == "random":
            return 0.2
        return {0.1: 0.5, 0.2: 0.93}.get(setting.values.get("ratio", 1), 1.0)

    return Result((run_of(plan, list(traces(plan, chance)), lose_at_most=8),))


def costs_of(result: Result, cost: str = "memory") -> dict[str, dict[str, CostRatio]]:
    return {choice.model: cost_ratios(result.runs[0], choice.model, cost, choice.settings) for choice in result.choices}


def figures(look: FigureOptions, llama, count: int = 3) -> dict[str, Callable[[], Figure]]:
    """Every kind of figure, drawn when called; pairs of so many systems."""
    progress = SYSTEMS[:count]
    policies = [replace(llama[0], policy=policy) for policy in POLICIES]
    return {
        "series": lambda: map_figure(llama[:2], options=look),
        "policies": lambda: plot(metric_panels(policies), one_bar=True, options=look),
        "dense": lambda: map_figure([dense(12)], options=look),
        "forest": lambda: answer_figure(answered().choices, "pass@1", options=look),
        "nothing proven": lambda: answer_figure(answered(6).choices, "pass@1", options=look),
        "cost": lambda: cost_figure(answered().choices, "memory", costs_of(answered()), "pass@1", options=look),
        "pairs": lambda: pairwise_figure(progress, pairs_of(progress), "progress", options=look),
    }


@pytest.mark.parametrize(("panels", "baselines"), [(1, 6), (3, 0), (5, 1), (8, 6)])
def test_maps_have_no_overlaps(llama: list[Map], panels: int, baselines: int) -> None:
    names = ("full", "window(local_window=500)", "streaming", "random", "h2o(kv_budget=5000)", "snapkv")[:baselines]
    beside = dict.fromkeys(names, Cell(Setting.from_parameters("full"), Estimate(0.97, 0.9, 0.99, 30, 5)))
    # Two rows say as much about texts as four.
    low = [
        replace(
            map_,
            model=model,
            axes=(("local_window", (500, 1000)), map_.axes[1]),
            cells={coord: cell for coord, cell in map_.cells.items() if coord[0] < 2000},
            baselines=beside,
        )
        for model in ("R1-Llama", "R1-Qwen")
        for map_ in llama
    ]
    for look in (FigureOptions(1), FigureOptions(2, intervals=True)):
        assert faults(map_figure(low[:panels], options=look)) == [], look


def test_names_of_narrow_columns_stand_apart(llama: list[Map]) -> None:
    wide = tuple(n / 10_000 for n in range(1001, 1021))
    cells = {(row, column): llama[0].cells[500, 0.1] for row in (1, 2) for column in wide}
    narrow = replace(llama[0], axes=(("local_window", (1, 2)), ("ratio", wide)), cells=cells)
    assert faults(map_figure([narrow], options=FigureOptions(2))) == []


@pytest.mark.parametrize(
    ("look", "count"),
    [
        (FigureOptions(), 3),
        (FigureOptions(1, dark=True), 4),
        pytest.param(FigureOptions(2), 2, marks=pytest.mark.deep),
    ],
)
def test_type_has_5_points_on_paper_and_a_contrast_of_4_5_to_its_ground(look: FigureOptions, count: int, llama):
    for kind, drawn in figures(look, llama, count).items():
        figure = drawn()
        inches = figure.get_figwidth()
        assert inches == pytest.approx(look.width) if look.width else inches <= WIDTHS[2], kind
        assert kind not in ("pairs", "forest", "nothing proven") or faults(figure) == [], kind
        # Places the texts, and makes those of the ticks.
        FigureCanvasAgg(figure)
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        small = {text.get_text() for text in texts if text.get_fontsize() < LEAST_TYPE}
        assert (kind, small) == (kind, set())
        # Text that stands on the figure's ground, see WCAG 2.2, 1.4.3.
        parts = [(axes.title, axes.xaxis.label, axes.yaxis.label) for axes in figure.axes]
        parts += [(*axes.get_xticklabels(), *axes.get_yticklabels()) for axes in figure.axes]
        around = [*figure.texts, *itertools.chain(*parts)]
        pale = {text.get_text() for text in around if contrast(text.get_color(), look.colours.ground) < 4.5}
        assert (kind, pale - {""}) == (kind, set())


def contrast(text: str, other: str) -> float:
    channels = np.array([to_rgb(text), to_rgb(other)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ (0.2126, 0.7152, 0.0722))
    return float((high + 0.05) / (low + 0.05))


def test_all_figures_take_the_same_options(tmp_path: Path, llama):
    look = FigureOptions(dark=True, intervals=False)
    made = figures(look, llama)
    for kind in ("series", "pairs"):
        figure = made[kind]()
        path, *_ = save(figure, tmp_path / "f.svg")
        svg = path.read_text()
        assert look.colours.ground in svg, kind
        assert "95 % intervals" not in svg, kind
        shown = {text.get_text() for text in figure.findobj(Text)}
        assert not any(re.search(r"\(\S+ to |±", text) for text in shown), kind


def test_labels_stand_for_names(llama):
    look = FigureOptions(labels={"AIME24": "AIME 2024", "Ratio": "Share kept", "R1-Llama": "Llama 8B"})
    figure = map_figure(llama[:1], options=look)
    assert figure.axes[0].get_xlabel() == "Share kept"
    words = [text.get_text() for text in figure.findobj(Text)]
    assert "AIME 2024" in words
    assert any(word.startswith("Llama 8B under dynts") for word in words)
    with pytest.raises(KvatlasError, match=r"--look columns\): expected 1 or 2, got 3"):
        FigureOptions(3)


@pytest.mark.parametrize("name", ["kv_budget", "KV budget"])
def test_a_parameter_has_one_name_on_axes_and_in_notes(name: str, llama):
    across, (_, budgets) = llama[0].axes
    map_ = replace(llama[0], axes=(across, ("kv_budget", budgets)))
    notes = [
        Note(NoteKind.FIXED, "kv_budget=64"),
        Note(NoteKind.RECOMMENDED, "nearest: dynts(kv_budget=64, ratio=0.5)"),
    ]
    figure = plot(metric_panels([map_]), notes=notes, options=FigureOptions(labels={name: "Cache"}))
    assert figure.axes[0].get_xlabel() == "Cache"
    words = " ".join(words_of(figure))
    assert "; Cache 64" in words
    assert "Nearest: dynts, Cache 64, ratio 0.5." in words
    assert "KV budget 64" not in words
    with pytest.raises(KvatlasError, match=r"does not show the name 'kv_bits'.* KV budget"):
        map_figure([map_], options=FigureOptions(labels={"kv_bits": "Bits"}))


def test_other_words_for_a_parameter_are_those_of_axes_and_notes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "LABELS", {"kv_dtype": "type of keys"})
    assert text.axis_label("kv_dtype") == "Type of keys"
    assert text.in_words("served(kv_dtype=fp8)") == "served, type of keys fp8"


def words_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_a_title_is_replaced_or_left_out(llama):
    found = words_of(map_figure(llama))
    assert found[-1] != "Mine"
    title = next(word for word in found if word.startswith("R1-Llama under dynts"))
    mine = words_of(map_figure(llama, options=FigureOptions(title="Mine")))
    assert "Mine" in mine
    assert title not in mine
    without = words_of(map_figure(llama, options=FigureOptions(title="")))
    assert set(without) == set(found) - {title}


@pytest.mark.parametrize("width", [2.5, pytest.param(3.3, marks=pytest.mark.deep), 9.0])
def test_a_width_in_inches_is_kept(llama, width: float):
    for kind, drawn in figures(FigureOptions(width=width), llama).items():
        assert drawn().get_figwidth() == pytest.approx(width), kind


def test_a_font_is_that_of_all_texts(llama):
    for kind, drawn in figures(FigureOptions(font="DejaVu Serif"), llama).items():
        families = {text.get_fontfamily()[0] for text in drawn().findobj(Text) if text.get_text()}
        assert (kind, families) == (kind, {"DejaVu Serif"})


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ({"font": "No Such Font"}, "--look font: expected the name of an installed font, got 'No Such Font'"),
        ({"width": 0.5}, "--look width: expected 2 to 40 inches, got 0.5"),
        ({"width": 3.0, "columns": 1}, "--look columns and --look width are both given"),
    ],
)
def test_a_look_that_no_figure_has_is_refused(look, message: str):
    with pytest.raises(KvatlasError, match=message):
        FigureOptions(**look)


def test_figures_of_one_column_fit_a_page(llama):
    many = [replace(map_, model=model) for model in ("A", "B", "C", "D") for map_ in llama]
    assert map_figure(many, options=FigureOptions(1)).get_figheight() < 10
    pairs = pairwise_figure(SYSTEMS, pairs_of(SYSTEMS), "progress", options=FigureOptions(1))
    assert pairs.get_figheight() < 10
    assert faults(pairs) == []
    # Letters stand for the names, which are told once.
    told = next(word for word in words_of(pairs) if word.startswith("A: "))
    assert "B: R1-Llama-of-a-long-name" in " ".join(words_of(pairs))
    assert told.startswith("A: R1-Llama")


def test_values_are_written_as_on_the_page() -> None:
    names = ["embedded:tiny-llama", "hf:/models/R1-Llama/", "R1-Qwen", "openai:gpt", "hf:"]
    assert [model_name(name) for name in names] == ["tiny-llama", "R1-Llama", "R1-Qwen", "openai:gpt", "hf:"]
    assert [signed(v) for v in (-3.21, 0.0, 0.04, -0.04, 12.0)] == ["−3.2", "0.0", "0.0", "0.0", "+12.0"]
    assert (signed(-38.4, 0), signed(-0.0004, 3)) == ("−38", "0.000")
    assert [fixed(v) for v in (51.25, 51.35, -6.25, 0.05, 100.0)] == ["51.3", "51.4", "-6.3", "0.1", "100.0"]
    assert (percent_text(0.5125), percent_text(0.2875)) == ("51.3", "28.8")


def test_a_widened_scale_stays_among_percentages() -> None:
    assert colours.scale_limits([100.0, 99.8]) == (99.0, 100.0)
    assert colours.scale_limits([0.0]) == (0.0, 1.0)
    assert colours.scale_limits([50.0]) == (49.5, 50.5)
    assert colours.scale_limits([2000.0]) == (1999.5, 2000.5)
    assert colours.scale_limits([100.0, 90.0]) == (90.0, 100.0)


@pytest.mark.parametrize("palette", colours.SCALES)
def test_black_type_is_readable_on_every_colour_and_the_page_mixes_the_same(palette: str) -> None:
    for share in np.linspace(0, 1, 201):
        background = to_hex(colours.colour_map(palette)(share))
        assert contrast(background, colours.ON_COLOUR) >= 4.5, background
    steps = colours.colour_steps(palette)
    assert [to_hex(colours.colour_map(palette)(end)) for end in (0.0, 1.0)] == [steps[0], steps[-1]]
