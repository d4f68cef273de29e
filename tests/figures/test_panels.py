"""Costs, differences and plateaus as panels, read back from the figures that show them."""

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Setting
from kvatlas.figures import style
from kvatlas.figures.heatmap import DIFFER, border, map_figure, plot
from kvatlas.figures.panels import (
    Against,
    Frame,
    cost_change_panels,
    cost_of,
    cost_panels,
    data_csv,
    difference_panels,
    metric_panels,
)
from kvatlas.figures.style import Look, save
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.bare_maps import verdicts_of_maps
from kvatlas.stats.intervals import with_binomial_bounds
from kvatlas.stats.losses import paired_difference
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.pairs import differences_of_run, differences_of_runs
from kvatlas.stats.run_analysis import with_regions
from kvatlas.stats.run_data import RunData
from tests.stats.synthetic import grid, manifest, traces

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def llama():
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))


@pytest.fixture(scope="module")
def run():
    plan = manifest(grid("dynts"))
    stored = list(traces(plan, lambda setting: 0.9 if setting.values.get("ratio", 1) > 0.2 else 0.2))
    return plan, stored, maps_of_run(RunData(plan, stored))


def texts(figure, folder):
    path, *_ = save(figure, folder / "figure.svg")
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def test_ticks_of_equal_costs_are_the_costs(run, tmp_path):
    result = texts(plot(cost_panels(run[2], "seconds")), tmp_path)
    # All took 0.1 s; nothing stands over the bar that would have to be added to its ticks.
    assert not [text for text in result if "e" in text and text[0].isdecimal()]
    assert "0.1000" in result


def test_a_plateau_is_framed_and_said(llama, tmp_path):
    map_ = llama[0]
    plateau = {(2000, 0.3), (1000, 0.2), (2000, 0.2)}
    figure = map_figure([replace(map_, plateau=frozenset(plateau))])
    frames = [lines for lines in figure.axes[0].collections if lines.get_gid() == "plateau"]
    assert len(frames) == 2
    # Columns 1 and 2 of rows 1 and 2 (from below), without the one cell that is not on it.
    expected = {
        ((1, 1), (1, 2)), ((2, 1), (2, 2)), ((1, 1), (2, 1)),
        ((1, 2), (1, 3)), ((3, 2), (3, 3)), ((2, 2), (3, 2)), ((1, 3), (2, 3)), ((2, 3), (3, 3)),
    }  # fmt: skip
    by_name = {tuple(tuple(map(int, point)) for point in line) for line in frames[0].get_segments()}
    assert by_name == expected
    dimmed = {patch.get_xy() for patch in figure.axes[0].patches if patch.get_gid() == "dimmed"}
    assert dimmed == {(x, y) for x in range(5) for y in range(4)} - {(1, 1), (1, 2), (2, 2)}
    assert "Outlined: statistically tied with the best; others are dimmed." in " ".join(texts(figure, tmp_path))


def test_a_border_goes_round_holes_and_islands():
    assert len(border({(0, 0)})) == 4
    assert len(border({(0, 0), (1, 0)})) == 6
    ring = {(x, y) for x in range(3) for y in range(3)} - {(1, 1)}
    # A hole has no frame, or it would look like a winner.
    assert len(border(ring)) == 12
    assert border(set()) == []


def test_where_nothing_is_shown_worse_a_sentence_stands_for_the_frame(llama, tmp_path):
    maps = with_regions(llama, verdicts_of_maps(llama), 0.03)
    figure = map_figure(maps)
    assert not [c for axes in figure.axes for c in axes.collections if c.get_gid() == "plateau"]
    assert "All cells are statistically tied with the best." in texts(figure, tmp_path)
    said = "all cells are statistically tied with the best"
    assert all(said in [note.text for note in metric_panel.notes] for metric_panel in metric_panels(maps))


def test_cells_in_which_policies_cannot_differ_have_a_corner(run, tmp_path):
    """20 prompt tokens fill the places of ratio 0.1, and those of 0.3 under the widest window."""
    item = run[2][0]
    part = replace(item.cells[32, 0.3].audit, none=0.25, no_choice=0.25)
    cells = {**item.cells, (32, 0.3): replace(item.cells[32, 0.3], audit=part)}
    (panel,) = metric_panels([replace(item, cells=cells)])
    assert panel.cornered == {(8, 0.1): 1.0, (16, 0.1): 1.0, (32, 0.1): 1.0, (32, 0.3): 0.25}
    figure = plot([panel])
    corners = [mark for mark in figure.axes[0].collections if mark.get_gid() == "no-choice"]
    assert sorted(len(mark.get_facecolor()) > 0 for mark in corners) == [False, True, True, True]
    assert "Corner: policies have nothing to choose" in " ".join(texts(figure, tmp_path))
    whole = replace(panel, cornered={})
    assert not [mark for mark in plot([whole]).axes[0].collections if mark.get_gid() == "no-choice"]


def test_a_map_that_can_show_nothing_says_so(run, tmp_path):
    plan, stored, _ = run
    flat = [(key, replace(trace, usage=replace(trace.usage, compressions=0))) for key, trace in stored]
    words = "VACUOUS: none of the 216 traces under a KV budget was compressed"
    for panels in (
        metric_panels(maps_of_run(RunData(plan, flat))),
        cost_panels(maps_of_run(RunData(plan, flat)), "mean_kv_tokens"),
    ):
        assert all(panel.notes[0].text == words for panel in panels)
    assert words in " ".join(texts(plot(panels), tmp_path))


def test_the_highest_cells_are_bold(llama):
    (axes, *_) = map_figure([llama[0]]).axes
    assert {t.get_text() for t in axes.texts if t.get_fontweight() == "bold"} == {"49.3"}


def test_cost_maps_show_every_cost_of_a_run(run, tmp_path):
    _, _, maps = run
    for name, shown in (
        ("mean_kv_tokens", "60"),
        ("peak_kv_tokens", "96"),
        ("output_tokens", "100"),
        ("seconds", "0.1"),
    ):
        result = texts(plot(cost_panels(maps, name)), tmp_path)
        assert result.count(shown) + result.count("61") >= 18, name
        assert cost_of(name, "").label in " ".join(result)
        assert cost_of(name, "").about in " ".join(result)
    truncated = cost_panels(maps, "truncated")
    wanted = {str(cell.truncated) for map_ in maps for cell in map_.cells.values()}
    assert {shown.text for item in truncated for shown in item.cells.values()} == wanted


def test_kv_memory_reckons_with_the_model():
    cell = Cell(Setting.of("p"), Estimate(0.5, None, None, None, None), mean_kv_tokens=1024.0)
    map_ = Map("embedded:tiny-llama", "B", "pass@1", "p", (("a", (1,)), ("b", (1,))), {(1, 1): cell})
    from kvatlas import models

    (panel,) = cost_panels([map_], "kv_memory")
    assert panel.cells[1, 1].value == pytest.approx(models.find("embedded:tiny-llama").kv_bytes_per_token / 1024)


def test_costs_against_a_baseline_are_changes_in_percent(run):
    _, _, maps = run
    half = {"full": replace(maps[0].baselines["full"], mean_kv_tokens=121.0)}
    (panel,) = cost_change_panels([replace(maps[0], baselines=half)], "mean_kv_tokens", Against("full"))
    assert {shown.text for shown in panel.cells.values()} == {"−50"}
    assert panel.centred
    assert panel.label == "KV Tokens against full (%)"


def test_differences_are_paired_and_bold_where_their_interval_excludes_0(run, tmp_path):
    plan, stored, maps = run
    result = differences_of_run(RunData(plan, stored), "full")
    assert set(result) == {("tiny", name, "dynts") for name in ("CHAIN6", "CHAIN8", "mean of 2")}
    panels = difference_panels([*maps, *mean_maps(maps)], result, Against("full"))
    assert len(panels) == 3
    for panel in panels:
        for coord, shown in panel.cells.items():
            contrast = result[*panel.map.name][coord]
            assert shown.value == pytest.approx(100 * contrast.value)
            assert shown.bold == shown.text.endswith("*") == (contrast.p < 0.05)
    assert any(shown.bold for panel in panels for shown in panel.cells.values())
    said = texts(plot(panels[:2]), tmp_path)
    assert "Pass@1 minus full" in said
    assert "minus that of full, in points, paired" in " ".join(said)
    # The difference is that of the maps' own values where all traces are there.
    for panel, whole in zip(panels, maps, strict=False):
        base = whole.baselines["full"].estimate.value
        assert panel.cells[8, 0.1].value == pytest.approx(100 * (whole.cells[8, 0.1].estimate.value - base))


def test_the_scale_of_differences_has_0_in_its_middle(run):
    plan, stored, maps = run
    figure = plot(difference_panels(maps, differences_of_run(RunData(plan, stored), "full"), Against("full")))
    for bar in (axes for axes in figure.axes if axes.get_ylabel() == "Pass@1 minus full"):
        low, high = bar.get_ylim()
        assert low == pytest.approx(-high)


def test_differences_hold_over_all_cells_together(run):
    """A cell's interval is wider than alone, and so is that of the mean over benchmarks."""
    plan, stored, _ = run
    whole = RunData(plan, stored)
    result = differences_of_run(whole, "full")
    cells = {(cell.expected.benchmark, cell.expected.setting): cell for cell in whole.cells}
    full = {name: cells[name, Setting.of("full")].compared() for name in ("CHAIN6", "CHAIN8")}
    own = {
        name: next(
            cell.compared()
            for (benchmark, setting), cell in cells.items()
            if benchmark == name and setting.policy != "full" and cell.coord(whole.axes) == (8, 0.3)
        )
        for name in full
    }
    alone = {name: paired_difference(own[name], full[name]) for name in full}
    for name in full:
        contrast = result["tiny", name, "dynts"][8, 0.3]
        assert contrast.value == pytest.approx(alone[name].value)
        assert contrast.low < alone[name].low
        assert contrast.high > alone[name].high
        assert contrast.p >= alone[name].p
    mean = result["tiny", "mean of 2", "dynts"][8, 0.3]
    assert mean.value == pytest.approx((alone["CHAIN6"].value + alone["CHAIN8"].value) / 2)
    assert mean.high - mean.low < min(
        result["tiny", name, "dynts"][8, 0.3].high - result["tiny", name, "dynts"][8, 0.3].low for name in full
    )


def test_policies_are_compared_cell_by_cell():
    plan = manifest(grid("dynts", "random"), problems=20)
    stored = list(traces(plan, lambda setting: {"dynts": 0.9, "random": 0.2}.get(setting.policy, 0.9)))
    whole = RunData(plan, stored)
    result = differences_of_runs(whole, whole, lambda name: name._replace(policy="random"))
    assert {name.policy for name in result} == {"dynts"}
    maps = {item.name: item for item in maps_of_run(whole)}
    for name in (name for name in maps if name.policy == "dynts"):
        other = maps[name._replace(policy="random")]
        for coord, cell in maps[name].cells.items():
            contrast = result[name][coord]
            assert contrast.value == pytest.approx(cell.estimate.value - other.cells[coord].estimate.value)
            assert contrast.p < 0.05
    assert result["tiny", "mean of 2", "dynts"][8, 0.1].low > 0
    assert differences_of_runs(whole, RunData(plan, stored, fix={}), lambda name: name._replace(model="x")) == {}


def test_cells_without_a_pair_are_left_out():
    plan = manifest(grid("dynts"), problems=2, samples=1)
    stored = [(key, t) for key, t in traces(plan) if (t.setting.policy == "full") == (t.problem == "p0")]
    assert all(
        not cells for name, cells in differences_of_run(RunData(plan, stored), "full").items() if name[1] != "mean of 2"
    )
    assert differences_of_run(RunData(plan, stored), "none") == {}


def test_csv_maps_have_plain_differences(llama):
    base = {"full": Cell(Setting.of("full"), Estimate(0.4, None, None, 30, 5))}
    (panel,) = difference_panels([replace(llama[0], baselines=base)], {}, Against("full"))
    assert panel.cells[2000, 0.3].text == "+9.3"
    assert panel.cells[2000, 0.3].small == ""
    assert "not paired" in " ".join(panel.about)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda maps: cost_panels(maps, "watts"), "Unknown cost 'watts'; valid are: mean_kv_tokens"),
        (lambda maps: cost_panels(maps, "seconds"), "R1-Llama on AIME24 does not tell seconds"),
        (lambda maps: difference_panels(maps, {}, Against("full")), "no baseline 'full'; its baselines are: none"),
        (
            lambda maps: cost_change_panels([_costly(maps[0])], "mean_kv_tokens", Against("full")),
            "has no mean_kv_tokens to compare with",
        ),
    ],
)
def test_what_is_not_there_is_said(llama, make, sentence):
    with pytest.raises(KvatlasError, match=sentence):
        make(llama)


def _costly(item):
    cells = {coord: replace(cell, mean_kv_tokens=5.0) for coord, cell in item.cells.items()}
    return replace(item, cells=cells, baselines={"full": Cell(Setting.of("full"), Estimate(1, None, None, 1, 1))})


def test_the_data_of_a_panel_is_what_it_prints(run):
    _, _, maps = run
    plateau = frozenset({(8, 0.1)})
    panels = metric_panels([replace(map_, plateau=plateau if map_.benchmark == "CHAIN6" else None) for map_ in maps])
    rows = list(csv.DictReader(io.StringIO(data_csv(panels))))
    assert len(rows) == 18
    assert list(rows[0]) == [
        "model", "benchmark", "policy", "local_window", "ratio", "shows", "value", "text", "small", "outlined",
    ]  # fmt: skip
    assert [row["outlined"] for row in rows].count("1") == 1
    for row in rows:
        shown = next(p for p in panels if p.map.benchmark == row["benchmark"]).cells[
            int(row["local_window"]), float(row["ratio"])
        ]
        assert (row["text"], row["small"]) == (shown.text, shown.small)


@pytest.mark.parametrize(("columns", "inches"), [(1, 3.35), (2, 7.0)])
def test_figures_fill_the_columns_of_a_paper(llama, tmp_path, columns, inches):
    look = Look(columns)
    for figure in (map_figure(llama, look=look), map_figure(mean_maps(llama), one_bar=True, look=look)):
        assert figure.get_figwidth() == pytest.approx(inches)
        width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes:
            for text in (*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label):
                box = text.get_window_extent()
                if text.get_text():
                    scale = 72 / figure.dpi
                    assert box.x0 * scale >= -1, text.get_text()
                    assert box.x1 * scale <= width + 1, text.get_text()
                    assert box.y1 * scale <= height + 1, text.get_text()


def test_texts_stay_inside_their_cells(llama):
    for look in (Look(), Look(1), Look(2)):
        figure = map_figure(llama, look=look)
        FigureCanvasAgg(figure).draw()
        for axes in (a for a in figure.axes if a.get_title()):
            wide = axes.get_window_extent().width / 5
            for text in axes.texts[1:]:
                assert text.get_window_extent().width <= wide, (look, text.get_text())


def test_intervals_that_would_be_unreadable_are_in_the_data_instead(tmp_path):
    columns = tuple(n / 20 for n in range(1, 13))
    cells = {(w, r): Cell(Setting.of("p"), Estimate(0.5, 0.4, 0.6, 30, 1)) for w in range(1, 13) for r in columns}
    map_ = Map("m", "b", "pass@1", "p", (("local_window", tuple(range(1, 13))), ("ratio", columns)), cells)
    narrow = texts(map_figure([map_], look=Look(1)), tmp_path)
    assert narrow.count("50.0") >= 144
    assert "40.0–60.0" not in narrow
    assert "Intervals are in the data next to the figure." in " ".join(narrow)
    assert texts(map_figure([map_]), tmp_path).count("40.0–60.0") == 144


def test_forty_benchmarks_make_a_figure(llama, tmp_path):
    small = {coord: cell for coord, cell in llama[0].cells.items() if coord[0] < 2000 and coord[1] < 0.3}
    map_ = replace(llama[0], cells=small, axes=(("local_window", (500, 1000)), ("ratio", (0.1, 0.2))))
    figure = map_figure([replace(map_, benchmark=f"B {n} 'x' 数") for n in range(40)])
    assert len({round(axes.get_position().x0, 4) for axes in figure.axes if axes.get_title()}) == 7
    path, _ = save(figure, tmp_path / "forty.png", [llama[0]])
    assert path.stat().st_size > 100_000


def test_unlike_scales_are_said_in_the_colour_of_warnings(llama):
    for look in (Look(), Look(dark=True)):
        figure = map_figure(llama, look=look)
        (line,) = [text for text in figure.legends[0].get_texts() if text.get_text() == DIFFER.text]
        assert to_hex(line.get_color()) == look.colours.warning
    shared = map_figure(llama, shared=True).legends[0].get_texts()
    assert not [text for text in shared if text.get_text() == DIFFER.text]


def test_dark_figures_have_light_text_on_a_dark_ground(llama, tmp_path):
    look = Look(dark=True)
    figure = map_figure(llama, look=look)
    (path,) = save(figure, tmp_path / "dark.svg")
    assert look.colours.ground in path.read_text()
    assert figure.axes[0].title.get_color() == look.colours.ink
    assert figure.axes[0].xaxis.label.get_color() == look.colours.ink


@pytest.mark.parametrize("colours", [style.VALUES, style.COSTS, style.DIFFERENCES])
def test_text_is_readable_on_every_colour(colours):
    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for step in range(201):
        background = style.colour(step, 0, 200, colours)
        dark, bright = sorted((light(background), light(style.text_on(background))))
        assert (bright + 0.05) / (dark + 0.05) >= 4.0, background


def test_signs():
    assert [style.signed(v) for v in (-3.21, 0.0, 0.04, -0.04, 12.0)] == ["−3.2", "0.0", "0.0", "0.0", "+12.0"]
    assert style.signed(-38.4, 0) == "−38"
    assert style.signed(-0.0004, 3) == "0.000"


def test_the_margin_is_framed_before_the_plateau(llama):
    map_ = replace(llama[0], plateau=frozenset({(500, 0.1)}), keeps=frozenset({(2000, 0.3)}), margin=0.03)
    (panel,) = metric_panels([map_])
    assert panel.outlined == {(2000, 0.3)}
    assert "Outlined: shown to lose at most 3 points against the full cache; others are dimmed." in panel.about
    assert metric_panels([map_], Frame.PLATEAU)[0].outlined == {(500, 0.1)}
    assert not metric_panels([map_], Frame.NONE)[0].outlined
    (empty,) = metric_panels([replace(map_, keeps=frozenset())])
    assert "no cell is shown to lose at most 3 points against the full cache" in [note.text for note in empty.notes]


def test_halves_go_away_from_0_as_on_the_page():
    assert [style.fixed(v) for v in (51.25, 51.35, -6.25, 0.05, 100.0)] == ["51.3", "51.4", "-6.3", "0.1", "100.0"]
    assert style.percent(0.5125) == "51.3"
    assert style.percent(0.2875) == "28.8"


def test_the_page_mixes_between_the_steps_of_the_same_map():
    assert style.steps(style.VALUES)[0] == "#ffffd9"
    for colours in (style.VALUES, style.COSTS, style.DIFFERENCES):
        steps = style.steps(colours)
        ends = [style.colour(i, 0, len(steps) - 1, colours) for i in (0, len(steps) - 1)]
        assert ends == [steps[0], steps[-1]]
