"""Titles of figures: they state what tests prove, in which direction, and nothing else."""

import csv
import re
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from kvatlas.core import Cell, Estimate, Map, Note, NoteKind, Setting
from kvatlas.figures.heatmap import map_figure, plot
from kvatlas.figures.panels import loss_panels, metric_panels, panels_title
from kvatlas.figures.style import FigureOptions
from kvatlas.report.map_figure import MapOptions, losses_of_means, metric_figure, plot_sources
from kvatlas.report.result import open_result
from kvatlas.report.sentences import effect_title, short_headline
from kvatlas.report.sources import ReadOptions
from kvatlas.stats.choice import choices
from kvatlas.stats.losses import losses_of
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.pairs import Comparison
from kvatlas.stats.run_data import RunData
from tests.figures.conftest import faults
from tests.stats.synthetic import grid, manifest, run_of, traces
from tests.stored import store_run


def title_with(llama: list[Map], good: int, bad: int) -> str:
    """The finding of a map with so many cells that are proven to keep the margin, and to lose more."""
    coords = list(llama[0].cells)
    keeps = frozenset(coords[:good])
    breaks = frozenset(coords[len(coords) - bad :])
    map_ = replace(llama[0], keeps=keeps, keeps_like=keeps, breaks=breaks, breaks_like=breaks, margin=0.03)
    return panels_title(metric_panels([map_]))


def test_losses_are_counted_on_both_sides_of_the_margin(llama: list[Map]) -> None:
    within = "proven within 3 points of full"
    assert title_with(llama, 20, 0) == f"all 20 settings are {within}"
    assert title_with(llama, 0, 20) == "all 20 settings lose more than 3 points, proven"
    assert title_with(llama, 9, 4) == f"9 of 20 settings are {within}, 4 beyond"
    assert title_with(llama, 1, 0) == f"1 of 20 settings is {within}"
    lost = "2 of 20 settings are proven to lose more than 3 points, none within"
    assert title_with(llama, 0, 2) == lost
    assert title_with(llama, 0, 0) == f"no setting is {within}, and none beyond"


def compared(model: str, value: float, p_holm: float) -> Comparison:
    difference = Difference(value, value - 0.03, value + 0.03, 0.001, p_holm, problems=10, pairs=10)
    return Comparison(model, "2 benchmarks", "pass@1", "dynts", "random", 4, difference)


def words_of(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_rows_and_columns_of_a_grid_are_named_once(llama: list[Map]) -> None:
    full = Cell(Setting.from_parameters("full"), Estimate(0.6, 0.5, 0.7, 30, 5))
    maps = []
    for model in ("A", "B"):
        maps += [
            replace(llama[0], model=model, policy=policy, baselines={"full": full}) for policy in ("dynts", "random")
        ]
    figure = plot(metric_panels(maps), one_bar=True, options=FigureOptions(2))
    words = words_of(figure)
    assert [words.count(name) for name in ("A", "B", "dynts", "random", "Ratio")] == [1, 1, 1, 1, 2]
    # The full cache is a tick of the bar that stands beside both rows.
    assert words.count("full 60") == 1
    assert faults(figure) == []


@pytest.fixture(scope="module")
def run() -> RunData:
    plan = manifest(grid("dynts", "random"), problems=40)
    chances = {"dynts": 0.85, "random": 0.3, "full": 0.9}
    return run_of(plan, list(traces(plan, lambda setting: chances[setting.policy])))


def test_means_show_points_lost_with_colours_beyond_the_margin(tmp_path) -> None:
    chances = {0.1: 0.1, 0.2: 0.6}

    def chance(setting: Setting) -> float:
        return chances.get(setting.values.get("ratio", 1), 1.0)

    folder = store_run(tmp_path / "run", manifest(grid("dynts", "random"), problems=30), chance)
    result = open_result([folder])
    losses = losses_of_means(result)
    maps = [one.map for one in result.means]
    panels = loss_panels(maps, losses)
    for dark in (False, True):
        look = FigureOptions(dark=dark)
        figure = metric_figure(result, maps, MapOptions(mean=True, figure=look), losses)
        assert faults(figure) == []
        for axes, panel in zip(figure.axes, panels, strict=True):
            mesh = axes.collections[0]
            shades = {to_hex(shade) for shade in mesh.to_rgba(mesh.get_array()).reshape(-1, 4)}
            assert look.colours.within_margin in shades
            assert len(shades) > 2
            texts_of_cells = [text.get_text() for text in axes.texts if text.get_transform() == axes.transData]
            assert texts_of_cells == [cell.text for cell in panel.cells.values()]
        title = figure.texts[0].get_text()
        assert len(title.split()) <= 16
        assert "0 = full 100 %" in words_of(figure)

    out = tmp_path / "means.svg"
    plot_sources([folder], out, show=MapOptions(mean=True))
    assert "Pass@1 lost against the full cache in points" in out.read_text()
    rows = list(csv.DictReader(out.with_suffix(".data.csv").open()))
    for panel in panels:
        of_panel = [row for row in rows if row["policy"] == panel.map.policy and row["ratio"]]
        assert all(float(row["loses"]) == pytest.approx(100 - float(row["pass_at_1"])) for row in of_panel)
    plot_sources([folder], out, ReadOptions(metric="pass@1"), MapOptions(mean=True))
    assert "Pass@1 in %" in out.read_text()


def test_short_headlines_have_16_words_and_claim_no_more_than_is_proven(run: RunData) -> None:
    (choice,) = choices(run, losses_of(run))
    assert choice.losses is not None
    settings = list(choice.settings.values())
    proven = {id_: replace(loss, is_kept=True, claims={}) for id_, loss in choice.losses.items()}
    cell = next(cell.cell for cell in run.cells if cell.setting == settings[0])
    saving = replace(choice.savings[settings[0].id], memory=0.45)
    savings = {settings[0].id: saving}
    keeps = replace(choice, losses=proven, by_memory=cell, vacuous=None, savings=savings)
    fails = {id_: replace(loss, is_kept=False, is_broken=False) for id_, loss in choice.losses.items()}
    open_ = replace(choice, model="other", losses=fails, by_memory=None, vacuous=None)
    assert short_headline([keeps], []) == "dynts saves 55 % of KV memory, proven to lose at most 3 points"
    assert short_headline([keeps, open_], []) == "On tiny alone, dynts is proven to lose at most 3 points"
    assert short_headline([open_], []).startswith("No setting is proven to stay within 3 points of the full cache")
    assert short_headline([], [compared("A", 0.09, 0.01)]) == "dynts is 9.0 points above random"


def test_an_effect_of_an_axis_is_the_title_where_no_margin_is_tested() -> None:
    """As `describe` finds it over the published maps; a single map shows no effect."""
    result = open_result([f"published:dynts_r1_{model}" for model in ("llama", "qwen")])
    found = [effect for effect in result.effects if effect.is_found]
    title = effect_title(result.effects)
    assert [(effect.axis, effect.strongest[1], effect.maps) for effect in found] == [("ratio", 0.1, 8)]
    assert title == "Ratio 0.1 is 1.5 points below the rest in 8 of 8 maps (p 0.016)"
    assert len(title.split()) <= 16
    assert effect_title([replace(effect, adjusted_p=0.2) for effect in result.effects]) == ""

    # The title leaves out the only policy, which stands among the words below it.
    figure = metric_figure(result, [one.map for one in result.maps], MapOptions(), {})
    assert figure.texts[0].get_text() == title
    assert "; dynts, KV budget 5000;" in " ".join(text.get_text() for text in figure.texts)


def test_effects_of_runs_are_titles_that_say_in_how_many_maps_they_are_proven(tmp_path) -> None:
    plan = manifest([one for one in grid("dynts", "random") if one.policy != "full"], problems=60)
    chances = {0.1: 0.2}
    folder = store_run(tmp_path / "run", plan, lambda setting: chances.get(setting.values.get("ratio", 1), 0.9))
    title = effect_title(open_result([folder]).effects)
    assert title.startswith("Ratio 0.1 is ")
    assert title.endswith("points below the rest, proven in 2 of 2 maps")
    assert len(title.split()) <= 16


def test_rows_have_the_finding_as_their_title(tmp_path) -> None:
    chances = {"full": 0.99, "dynts": 0.99, "random": 0.3}
    plan = manifest(grid("dynts", "random"), problems=60)
    folder = store_run(tmp_path / "run", plan, lambda setting: chances[setting.policy])
    out = tmp_path / "line.svg"
    plot_sources([folder], out, ReadOptions(metric=None, lose_at_most=40, fix={"ratio": 0.3}))
    assert "proven to lose at most 40 points" in out.read_text()
    plot_sources([folder], out, ReadOptions(metric=None, lose_at_most=40, fix={"ratio": 0.3}, policy="random"))
    # Of a control alone nothing is claimed.
    title = " ".join(re.findall(r"font-size: 9px[^>]*>([^<]*)", out.read_text()))
    assert title == "Points of Pass@1 lost against the full cache"


def test_warnings_of_one_kind_stand_together_with_their_panels(llama: list[Map]) -> None:
    def partial(count: int) -> tuple[Note, ...]:
        return (Note(NoteKind.PARTIAL, f"PARTIAL: {count} of 20 cells are missing"),)

    maps = [replace(llama[0], policy=name, notes=partial(n)) for n, name in enumerate(("a", "b"), 1)]
    figure = map_figure([*maps, replace(llama[0], policy="c")])
    words = " ".join(text.get_text() for text in figure.texts)
    assert words.count("PARTIAL") == 1
    assert "1 of 20 cells are missing (R1-Llama AIME24 a); 2 of 20 cells are missing (R1-Llama AIME24 b)" in words
