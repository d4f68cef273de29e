"""Maps as figures, read back: texts from the SVG, scales from the axes, bytes from two runs."""

import csv
import io
import re
from dataclasses import replace
from itertools import chain, product

import pytest

from kvatlas.core import Cell, Claim, Estimate, KvatlasError, Note, NoteKind, Setting
from kvatlas.figures.heatmap import map_figure, plot
from kvatlas.figures.marks import KeyEntry, State
from kvatlas.figures.panels import cost_of, cost_panels, difference_panels, metric_panels, panels_csv, panels_title
from kvatlas.figures.style import FigureOptions, save
from kvatlas.report.evidence import with_regions
from kvatlas.report.map_figure import maps_against
from kvatlas.report.result import Result
from kvatlas.report.sentences import recommended_words
from kvatlas.results.csv_maps import read_maps
from kvatlas.results.export import marked_csv, write_maps
from kvatlas.stats.choice import with_recommended
from kvatlas.stats.csv_tests import bound_tests_of_maps
from kvatlas.stats.estimates import with_binomial_bounds
from kvatlas.stats.maps import maps_of_run, mean_maps
from kvatlas.stats.pairs import difference_of_cells, differences_of_run, differences_of_runs
from kvatlas.text import fixed, interval_text, percent_text
from tests.figures.conftest import dense, texts
from tests.stats.synthetic import grid, manifest, run_of, traces

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def means(llama):
    return [*mean_maps(llama), *mean_maps(with_binomial_bounds(read_maps("published:dynts_r1_qwen")))]


@pytest.fixture(scope="module")
def run():
    plan = manifest(grid("dynts"))
    return run_of(plan, traces(plan, lambda setting: 0.9 if setting.values.get("ratio", 1) > 0.2 else 0.2))


@pytest.fixture(scope="module")
def maps(run):
    return maps_of_run(run)


def _scales(figure):
    """The limits of the colours of panels."""
    return [tuple(round(v, 6) for v in axes.collections[0].get_clim()) for axes in figure.axes]


def test_series_has_its_finding_panels_labels_and_values(llama, tmp_path):
    words = texts(map_figure(with_regions(llama, bound_tests_of_maps(llama), 0.03)), tmp_path)
    assert "R1-Llama under dynts, KV budget 5000: no cell is shown to be better than another of its map" in words
    assert sum("R1-Llama" in word for word in words) == 1
    for item in llama:
        assert item.benchmark in words
        for cell in item.cells.values():
            assert percent_text(cell.estimate.value, 0) in words
            assert interval_text(cell.estimate) not in words
    assert [words.count(label) for label in ("Local Window Size", "Ratio")] == [1, 4]
    assert "n 30, ± 19" in words
    assert "each panel has its own colour scale" in " ".join(words)
    assert "Only averages are known" in " ".join(words)
    words = texts(map_figure(llama, options=FigureOptions(intervals=True)), tmp_path)
    assert all(interval_text(cell.estimate) in words for item in llama for cell in item.cells.values())
    assert not [word for word in words if "±" in word]


def test_the_largest_window_is_on_top_and_the_highest_cells_are_bold(llama):
    axes = map_figure(llama).axes[0]
    assert {t.get_text() for t in axes.texts if t.get_fontweight() == "bold"} == {"AIME24", "49"}
    ticks = dict(zip((t.get_text() for t in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    assert ticks["3000"] > ticks["2000"] > ticks["1000"] > ticks["500"]
    bottom, top = axes.get_ylim()
    assert bottom < top
    position = {t.get_position(): t.get_text() for t in axes.texts}
    assert position[0.5, 3.5] == "41"


def test_scales_are_own_or_shared_and_no_narrower_than_an_interval(llama, means, tmp_path):
    assert _scales(plot(metric_panels(llama), shared=False))[0] == (39.3, 49.3)
    shared = plot(metric_panels(llama), shared=True)
    assert set(_scales(shared)) == {(24.0, 89.0)}
    assert "own colour scale" not in " ".join(texts(shared, tmp_path))
    for item, (low, high) in zip(llama, _scales(map_figure(llama)), strict=True):
        widths = [cell.estimate.high - cell.estimate.low for cell in item.cells.values()]
        assert high - low == pytest.approx(100 * sum(widths) / len(widths), abs=1e-4)
        values = [100 * cell.estimate.value for cell in item.cells.values()]
        assert low <= min(values) <= max(values) <= high
    figure = plot(metric_panels(means), one_bar=True, shared=False)
    assert _scales(figure) == [(49.05, 56.35)] * 2
    assert _scales(plot(metric_panels(means), one_bar=True))[0][0] < 49.05
    words = texts(figure, tmp_path)
    assert {"R1-Llama", "R1-Qwen"} <= set(words)
    assert "mean of 4 benchmarks" in " ".join(words)


def test_four_panels_stand_in_a_row_of_a_page_and_more_in_even_rows(llama):
    def rows(maps):
        figure = map_figure(maps)
        assert figure.get_figwidth() <= 7
        return [len({round(a.get_position().x0, 6) for a in figure.axes})]

    assert [rows([*llama, *llama][:n]) for n in (1, 2, 3, 4, 5, 8)] == [[1], [2], [3], [4], [3], [4]]


def test_baselines_notes_and_holes_are_on_the_face(llama, tmp_path):
    cells = dict(llama[0].cells)
    del cells[500, 0.1]
    full = Cell(Setting.from_parameters("full"), Estimate(0.97, 0.9, 0.99, 30, 5))
    map_ = replace(
        llama[0],
        cells=cells,
        baselines={"full": full, "window(local_window=500)": full},
        notes=(Note(NoteKind.PARTIAL, "PARTIAL: 3 of 40 traces are missing, in 1 cell"),),
    )
    words = texts(map_figure([map_, llama[1]]), tmp_path)
    # A short name is a tick of the bar.
    assert {"window, local window 500: 97", "full 97"} <= set(words)
    assert "30 problems" in " ".join(words)
    assert "PARTIAL: 3 of 40 traces are missing, in 1 cell (R1-Llama AIME24 dynts)" in words
    assert "40" not in {t.get_text() for t in map_figure([map_]).axes[0].texts}


def test_baselines_that_all_panels_share_are_told_once_and_by_their_parameters(llama, tmp_path):
    cell = Cell(Setting.from_parameters("full"), Estimate(0.97, 0.9, 0.99, 30, 5))
    names = ("random(ratio=0.3)", "h2o(ratio=0.3)", "random(ratio=0.5)")
    maps = [replace(map_, baselines=dict.fromkeys(names, cell)) for map_ in llama[:2]]
    words = " ".join(texts(map_figure(maps, options=FigureOptions(2)), tmp_path))
    assert words.count("ratio 0.3: random 97, h2o 97; random, ratio 0.5: 97") == 1
    named = FigureOptions(2, labels={"h2o(ratio=0.3)": "Heavy hitters"})
    words = " ".join(texts(map_figure(maps, options=named), tmp_path))
    assert "random, ratio 0.3: 97; Heavy hitters 97; random, ratio 0.5: 97" in words


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_equal_figures_give_equal_bytes(llama, tmp_path, suffix):
    with pytest.raises(KvatlasError, match=r"'f.jpg'; the name must end in .png, .svg, .pdf"):
        save(map_figure(llama), tmp_path / "f.jpg")
    first, two = (save(map_figure(llama), tmp_path / f"{name}{suffix}")[0].read_bytes() for name in "ab")
    assert first == two
    assert not re.search(rb"CreationDate|<dc:date>|dateTime", first)
    # A PDF embeds its fonts.
    assert suffix != ".pdf" or (b"/FontFile2" in first and b"/Type3" not in first)


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda maps: map_figure([]), "no map to draw"),
        (lambda maps: map_figure([replace(maps[0], cells={})]), "R1-Llama on AIME24 has no cells"),
        (lambda maps: plot(metric_panels([maps[0], replace(maps[0], metric="progress")]), one_bar=True), "same metric"),
        (lambda maps: cost_panels(maps, "watts"), "Unknown cost 'watts'; expected: mean_kv_tokens"),
        (lambda maps: cost_panels(maps, "seconds"), "R1-Llama on AIME24 does not tell seconds"),
    ],
)
def test_faults_are_named(llama, draw, sentence):
    with pytest.raises(KvatlasError, match=sentence):
        draw(llama)


def test_a_map_that_can_show_nothing_says_so(tmp_path):
    plan = manifest(grid("dynts"))
    flat = [(key, replace(trace, usage=replace(trace.usage, compressions=0))) for key, trace in traces(plan)]
    words, maps = (
        "Can show no loss: none of the 216 traces under a KV budget was compressed",
        maps_of_run(run_of(plan, flat)),
    )
    for panels in (metric_panels(maps), cost_panels(maps, "mean_kv_tokens")):
        assert all(panel.map.remarks[0].text == words for panel in panels)
    assert words in " ".join(texts(plot(panels), tmp_path))


def test_cost_maps_show_every_cost_of_a_run(maps, tmp_path):
    costs = {"mean_kv_tokens": "60", "peak_kv_tokens": "96", "output_tokens": "100", "seconds": "100"}
    for name, shown in costs.items():
        result = texts(plot(cost_panels(maps, name)), tmp_path)
        assert result.count(shown) + result.count("61") >= 18, name
        assert cost_of(name, maps).title[1:] in " ".join(result)
    truncated = cost_panels(maps, "truncated")
    wanted = set()
    for cell in chain.from_iterable(map_.cells.values() for map_ in maps):
        wanted.add(fixed(100 * cell.number("truncated") / (cell.estimate.problems * cell.estimate.samples), 0))
    assert {shown.text for item in truncated for shown in item.cells.values()} == wanted
    # A figure has one unit; all of the run took 0.1 s.
    slow = replace(maps[0], cells={c: replace(cell, numbers={"seconds": 4.0}) for c, cell in maps[0].cells.items()})
    assert {cell.text for cell in cost_panels([maps[1], slow], "seconds")[0].cells.values()} == {"0.10"}


def test_kv_memory_is_drawn_of_a_run_and_of_its_csv_map(tmp_path):
    plan = manifest(grid("dynts"))
    plan = replace(plan, expected=tuple(replace(cell, kv_bytes=(1024, 0)) for cell in plan.expected))
    of_run = maps_of_run(run_of(plan, traces(plan)))
    write_maps(of_run, tmp_path / "m.csv")
    for found in (of_run, read_maps(tmp_path / "m.csv")):
        panel, *_ = cost_panels(found, "kv_memory")
        tokens = found[0].cells[8, 0.1].number("mean_kv_tokens")
        assert panel.cells[8, 0.1].value == pytest.approx(tokens, abs=1e-3)
        assert (panel.unit, panel.cells[8, 0.1].text) == ("in KiB", f"{tokens:.1f}")


def test_differences_are_paired_and_bold_where_their_interval_excludes_0(run, maps, tmp_path):
    result = differences_of_run(run, "full")
    assert set(result) == {("tiny", name, "dynts") for name in ("CHAIN6", "CHAIN8", "mean of 2")}
    against_full = maps_against([*maps, *mean_maps(maps)], [], "full", None)
    panels = difference_panels(replace(against_full, differences=result))
    assert len(panels) == 3
    for panel in panels:
        for coord, shown in panel.cells.items():
            contrast = result[*panel.map.name][coord]
            assert shown.value == pytest.approx(100 * contrast.value)
            assert shown.bold == (contrast.p_holm <= 0.05)
    assert any(shown.bold for panel in panels for shown in panel.cells.values())
    figure = plot(panels[:2])
    ((low, high),) = set(_scales(figure))
    assert low == pytest.approx(-high)
    said = texts(figure, tmp_path)
    assert "cells are proven to lie below the full cache, none above" in " ".join(said)
    assert "Pass@1 minus full in points" in " ".join(said)
    assert "paired by problem; bold: a difference is proven" in " ".join(said)
    # The difference is that of the maps' own values where all traces are there.
    for panel, whole in zip(panels, maps, strict=False):
        base = whole.baselines["full"].estimate.value
        assert panel.cells[8, 0.1].value == pytest.approx(100 * (whole.cells[8, 0.1].estimate.value - base))


def test_a_difference_has_one_interval_wherever_it_stands(run):
    """On the map as alone; marks allow for all cells of the map."""
    together = {name[1]: cells[8, 0.3] for name, cells in differences_of_run(run, "full").items()}
    mean = together.pop("mean of 2")
    values = []
    for benchmark, contrast in together.items():
        cells = [cell for cell in run.cells if cell.expected.benchmark == benchmark]
        (own,) = [cell for cell in cells if not cell.expected.baseline and cell.coord(run.axes) == (8, 0.3)]
        (full,) = [cell for cell in cells if cell.expected.baseline]
        alone = difference_of_cells(run, [(own, full)])
        assert alone is not None
        assert contrast.value == pytest.approx(alone.value)
        assert (contrast.low, contrast.high) == pytest.approx((alone.low, alone.high))
        assert contrast.p == pytest.approx(alone.p)
        assert contrast.p_holm >= contrast.p
        assert mean.high - mean.low < contrast.high - contrast.low
        values.append(alone.value)
    assert mean.value == pytest.approx(sum(values) / 2)


def test_policies_are_compared_cell_by_cell():
    plan = manifest(grid("dynts", "random"), problems=20)
    stored = list(traces(plan, lambda setting: {"dynts": 0.9, "random": 0.2}.get(setting.policy, 0.9)))
    whole = run_of(plan, stored)
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
    assert differences_of_runs(whole, run_of(plan, stored, fix={}), lambda name: name._replace(model="x")) == {}


def test_the_data_of_a_panel_is_what_it_prints(maps):
    kept = frozenset({(8, 0.1)})
    panels = metric_panels([replace(map_, keeps=kept if map_.benchmark == "CHAIN6" else None) for map_ in maps])
    rows = list(csv.DictReader(io.StringIO(panels_csv(panels))))
    assert len(rows) == 18
    assert list(rows[0]) == [
        "model", "benchmark", "policy", "local_window", "ratio", "shows", "value", "text", "small", "proven",
        "loses_more", "recommended",
    ]  # fmt: skip
    assert [row["proven"] for row in rows].count("1") == 1
    for row in rows:
        shown = next(p for p in panels if p.map.benchmark == row["benchmark"]).cells[
            int(row["local_window"]), float(row["ratio"])
        ]
        assert (row["text"], row["small"]) == (shown.text, shown.small)


def test_numbers_that_would_not_be_legible_are_in_the_data_alone(tmp_path):
    assert texts(map_figure([dense(16)]), tmp_path).count("50") >= 256
    with pytest.raises(KvatlasError, match="--look intervals=true: the cells are too narrow"):
        map_figure([dense(30)], options=FigureOptions(intervals=True))
    words = texts(map_figure([dense(60)]), tmp_path)
    assert words.count("50") <= 1
    assert "The numbers are in the data next to the figure." in words


def test_cells_that_are_proven_to_lose_more_are_marked(llama, tmp_path):
    """The title counts them, so the picture shows which they are."""
    broken = frozenset({(500, 0.1)})
    map_ = replace(llama[0], keeps=frozenset(), breaks=broken, breaks_like=broken, margin=0.03)
    (panel,) = metric_panels([map_])
    assert panels_title([panel]).startswith("1 of 20 settings is proven to lose more than 3 points")
    assert {coord for coord, state in panel.states.items() if state is State.BEYOND} == broken
    assert "proven beyond 3 points" in texts(map_figure([map_]), tmp_path)
    rows = list(csv.DictReader(io.StringIO(panels_csv([panel]))))
    assert [(row["local_window"], row["ratio"]) for row in rows if row["loses_more"] == "1"] == [("500", "0.1")]
    words = texts(map_figure([map_], options=FigureOptions(plain=True)), tmp_path)
    assert not any("proven" in word for word in words)


def test_the_margin_is_marked_before_the_plateau(llama):
    kept = frozenset({(2000, 0.3)})
    map_ = replace(llama[0], plateau=frozenset({(500, 0.1)}), keeps=kept, margin=0.03, claim=Claim.THESE)
    (panel,) = metric_panels([map_])
    assert {coord for coord, state in panel.states.items() if state is State.WITHIN} == kept
    assert KeyEntry(State.WITHIN, "proven within 3 points on these problems") in panel.key
    assert panels_title([panel]) == "1 of 20 settings is proven within 3 points on these problems"
    (like,) = metric_panels([replace(map_, keeps_like=kept, claim=Claim.LIKE)])
    assert KeyEntry(State.WITHIN, "proven within 3 points") in like.key
    assert panels_title([like]) == "1 of 20 settings is proven within 3 points of full"
    (empty,) = metric_panels([replace(map_, keeps=frozenset(), claim=Claim.LIKE)])
    assert panels_title([empty]) == "no setting is proven within 3 points of full, and none beyond"
    every = replace(map_, keeps=frozenset(map_.cells))
    assert panels_title(metric_panels([every])).startswith("all 20 settings are proven")


def test_the_panels_of_a_benchmark_share_a_scale_and_a_grid_has_one_bar_a_column(llama):
    lower = {coord: replace(cell, estimate=Estimate(0.1, 0.05, 0.2, 30, 1)) for coord, cell in llama[0].cells.items()}
    maps = [*llama[:2], replace(llama[0], policy="random", cells=lower), replace(llama[1], policy="random")]
    figure = map_figure(maps)
    shown = [axes.collections[0].get_clim() for axes in figure.axes]
    assert shown[0] == shown[2] != shown[1] == shown[3]

    def is_label(axes, text):
        return text.get_text() == "10" and text.get_transform() == axes.transAxes

    bars = [axes for axes in figure.axes if any(is_label(axes, text) for text in axes.texts)]
    assert bars == figure.axes[:2]
    assert "each benchmark has its own colour scale" in " ".join(text.get_text() for text in figure.texts)
    own = [axes.collections[0].get_clim() for axes in plot(metric_panels(maps), shared=False).axes]
    assert own[0] != own[2]


def test_numbers_on_bars_are_rounded_as_in_cells_and_stand_at_their_values(llama):
    (map_,) = [item for item in llama if item.benchmark == "AMC23"]
    value = Estimate(0.885, 0.8, 0.95, 40, 5)
    at = map_.best
    cells = {coord: cell for coord, cell in map_.cells.items() if cell.estimate.value < 0.885}
    map_ = replace(map_, cells={**cells, at: replace(map_.cells[at], estimate=value)})
    axes = plot(metric_panels([map_]), shared=False).axes[0]
    on_bar = [text for text in axes.texts if text.get_transform() == axes.transAxes]
    places = [text.get_position()[1] for text in on_bar]
    assert places == pytest.approx([0, 1])
    assert on_bar[1].get_text() == "89"
    assert "89" in [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]


def test_a_grid_of_more_panels_than_a_figure_holds_is_refused_with_advice(llama):
    maps = []
    for model, policy in product("AB", ("dynts", "random")):
        maps += [replace(llama[0], model=model, policy=policy, benchmark=f"B{number}") for number in range(8)]
    with pytest.raises(KvatlasError, match=r"32 maps have no room .* \(--mean\), or one policy at a time"):
        map_figure(maps)


def test_the_recommended_cell_is_ringed_and_named(run, tmp_path):
    result = Result((run,))
    (choice,) = result.choices
    setting = next(iter(choice.settings.values()))
    cell = next(
        cell for cell in chain.from_iterable(one.map.cells.values() for one in result.means) if cell.setting == setting
    )
    choice = replace(choice, by_memory=cell, vacuous=None)
    maps = with_recommended([one.map for one in (*result.means, *result.maps)], [choice])
    ringed = [map_.cells[map_.recommended].setting for map_ in maps if map_.recommended is not None]
    assert ringed == [setting] * 3
    assert recommended_words(choice).startswith("tiny: dynts(local_window=8, ratio=0.1) ")
    figure = map_figure(maps)
    rings = [len({patch.get_gid() for patch in axes.patches} & {"ringed"}) for axes in figure.axes]
    assert sum(rings) == 3
    # The ring is that of the mean, marks are of each benchmark.
    assert "recommended for the mean of 2 benchmarks" in [text.get_text() for text in figure.texts]
    path = tmp_path / "marked.csv"
    path.write_text(marked_csv(maps), "utf-8")
    rows = list(csv.DictReader(path.open()))
    marked = [(row["policy"], row["local_window"], row["ratio"]) for row in rows if row["recommended"] == "1"]
    assert marked == [("dynts", "8", "0.1")] * 3
    proven = sum(len(map_.keeps) for map_ in maps)
    losing = sum(len(map_.breaks) for map_ in maps)
    assert sum(row["proven"] == "1" for row in rows) == proven
    assert sum(row["loses_more"] == "1" for row in rows) == losing
    # It is a CSV map still.
    assert len(read_maps(path)) >= 2
