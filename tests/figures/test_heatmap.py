"""Figures read back: texts from the SVG, scales from the axes, bytes from two runs."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind, Setting
from kvatlas.figures import style
from kvatlas.figures.heatmap import map_figure, plot
from kvatlas.figures.panels import metric_panels
from kvatlas.figures.style import save
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.intervals import with_binomial_bounds
from kvatlas.stats.maps import mean_maps

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def llama():
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))


@pytest.fixture(scope="module")
def means(llama):
    return [*mean_maps(llama), *mean_maps(with_binomial_bounds(read_maps("published:dynts_r1_qwen")))]


def _texts(figure, tmp_path):
    path, *_ = save(figure, tmp_path / "figure.svg")
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def _scales(figure):
    """The limits of the colour bars, which are the axes without cells."""
    return [tuple(round(v, 6) for v in axes.get_ylim()) for axes in figure.axes if axes.get_ylabel() == "Pass@1"]


def test_series_has_panels_labels_values_and_intervals(llama, tmp_path):
    texts = _texts(map_figure(llama), tmp_path)
    for item in llama:
        assert f"R1-Llama | {item.benchmark}" in texts
        for cell in item.cells.values():
            assert style.percent(cell.estimate.value) in texts
            assert style.interval(cell.estimate) in texts
    assert [texts.count(label) for label in ("Local Window Size", "Ratio", "Pass@1")] == [4, 4, 4]
    assert texts.count("49.3") == 2
    foot = " ".join(texts)
    assert "Policy: dynts. Pass@1 in percent, highest in bold. Small type: 95 % interval." in foot
    assert "Colour scales differ between panels." in foot
    assert "Only averages were published" in foot


def test_the_largest_window_is_on_top(llama):
    axes = map_figure(llama).axes[0]
    ticks = dict(zip((t.get_text() for t in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    assert ticks["3000"] > ticks["2000"] > ticks["1000"] > ticks["500"]
    bottom, top = axes.get_ylim()
    assert bottom < top
    position = {t.get_position(): t.get_text() for t in axes.texts}
    assert position[0.5, 3.62] == "41.3"


def test_scales_are_own_or_shared(llama, tmp_path):
    own = map_figure(llama, shared=False)
    assert len(set(_scales(own))) == 4
    assert _scales(own)[0] == (39.3, 49.3)
    shared = map_figure(llama, shared=True)
    low, high = _scales(shared)[0]
    assert (low, high) == (24.0, 89.0)
    assert "differ" not in " ".join(_texts(shared, tmp_path))


def test_colours_tell_no_difference_that_is_smaller_than_an_interval(llama):
    for item, (low, high) in zip(llama, _scales(map_figure(llama)), strict=True):
        widths = [cell.estimate.high - cell.estimate.low for cell in item.cells.values()]
        assert high - low == pytest.approx(100 * sum(widths) / len(widths), abs=1e-4)
        values = [100 * cell.estimate.value for cell in item.cells.values()]
        assert low <= min(values) <= max(values) <= high


def test_means_share_one_scale_and_one_bar(means, tmp_path):
    figure = plot(metric_panels(means), one_bar=True, shared=False)
    assert _scales(figure) == [(49.05, 56.35)]
    assert _scales(map_figure(means, one_bar=True))[0][0] < 49.05
    texts = _texts(figure, tmp_path)
    assert {"R1-Llama | mean of 4", "R1-Qwen | mean of 4"} <= set(texts)
    assert texts.count("Pass@1") == 1


def test_two_panels_stand_side_by_side_and_four_in_two_rows(llama):
    def rows(maps):
        return len({round(a.get_position().y0, 6) for a in map_figure(maps).axes})

    assert [rows(llama[:n]) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert map_figure(llama).get_figwidth() < 7.2


def test_baselines_notes_and_holes_are_on_the_face(llama, tmp_path):
    cells = dict(llama[0].cells)
    del cells[500, 0.1]
    full = Cell(Setting.of("full"), Estimate(0.97, 0.9, 0.99, 30, 5))
    map_ = replace(
        llama[0],
        cells=cells,
        baselines={"full": full, "window(local_window=500)": full},
        notes=(Note(NoteKind.PARTIAL, "PARTIAL: 3 of 40 traces are missing, in 1 cell"),),
    )
    texts = _texts(map_figure([map_, llama[1]]), tmp_path)
    assert "full 97.0 (90.0–99.0), window(local_window=500) 97.0 (90.0–99.0)" in " ".join(texts)
    assert any(t.startswith("PARTIAL: 3 of 40 traces are missing, in 1 cell (R1-Llama | AIME24)") for t in texts)
    assert "40.0" not in {t.get_text() for t in map_figure([map_]).axes[0].texts}


def test_several_policies_are_named_in_the_titles(llama, tmp_path):
    texts = _texts(map_figure([llama[0], replace(llama[0], policy="random")], one_bar=True), tmp_path)
    assert {"R1-Llama | AIME24 | dynts", "R1-Llama | AIME24 | random"} <= set(texts)


def test_odd_names_and_other_axes(tmp_path):
    cell = Cell(Setting.of("p"), Estimate(0.5, None, None, None, None))
    axes = (("kv_budget", (64, 96)), ("ratio_over", ("older", "$x$")))
    cells = {(row, column): cell for row in (64, 96) for column in ("older", "$x$")}
    odd = Map('数学 "one" $a_b$ <b>', "B" * 60, "progress", "", axes, cells)
    texts = _texts(map_figure([odd]), tmp_path)
    shown = "".join(map_figure([odd]).axes[0].get_title().split())
    assert shown == f'数学"one"$a_b$<b>|{"B" * 60}'
    assert {"KV Budget", "Ratio Over", "$x$", "50.0"} <= set(texts)
    assert "Progress Ratio" in " ".join(texts)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_equal_figures_give_equal_bytes(llama, tmp_path, suffix):
    first, two = (save(map_figure(llama), tmp_path / f"{name}{suffix}")[0].read_bytes() for name in "ab")
    assert first == two
    assert not re.search(rb"CreationDate|<dc:date>|dateTime", first)


def test_pdf_embeds_its_fonts(llama, tmp_path):
    (path,) = save(map_figure(llama), tmp_path / "f.pdf")
    assert b"/FontFile2" in path.read_bytes()
    assert b"/Type3" not in path.read_bytes()


def test_the_data_is_written_beside(llama, tmp_path):
    figure, data = save(map_figure(llama), tmp_path / "new" / "f.PNG", llama)
    assert figure.stat().st_size > 10_000
    assert data.name == "f.data.csv"
    again = read_maps(data)
    assert [item.benchmark for item in again] == [item.benchmark for item in llama]
    assert again[0].cells[2000, 0.3].estimate.value == pytest.approx(0.493)


def test_faults_are_named(llama, tmp_path):
    with pytest.raises(KvatlasError, match=r"'f.jpg'; the name must end in .png, .svg, .pdf"):
        save(map_figure(llama), tmp_path / "f.jpg")
    with pytest.raises(KvatlasError, match="no map to draw"):
        map_figure([])
    with pytest.raises(KvatlasError, match="R1-Llama on AIME24 has no cells"):
        map_figure([replace(llama[0], cells={})], one_bar=True)
    with pytest.raises(KvatlasError, match="same metric"):
        map_figure([llama[0], replace(llama[0], metric="progress")], one_bar=True)


def test_colours_run_from_end_to_end_and_text_stays_readable():
    assert style.colour(0, 0, 10) == style.steps(style.VALUES)[0]
    assert style.colour(10, 0, 10) == style.steps(style.VALUES)[-1]
    assert style.colour(99, 0, 10) == style.steps(style.VALUES)[-1]
    for step in range(101):
        background = style.colour(step, 0, 100)
        assert _contrast(background, style.text_on(background)) >= 4.0


def _contrast(first, other):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_map_of_equal_cells_has_a_scale():
    cell = Cell(Setting.of("p"), Estimate(1.0, 0.9, 1.0, 30, 1))
    flat = Map("m", "b", "pass@1", "p", (("a", (1, 2)), ("b", (1, 2))), {(1, 1): cell})
    assert style.scale([flat]) == (99.0, 100.0)
    map_figure([flat])


def test_several_policies_stand_in_one_row_per_benchmark(llama):
    maps = [replace(item, policy=policy) for item in llama for policy in ("dynts", "random", "window")]
    figure = map_figure(maps)
    titles = {}
    for axes in figure.axes:
        titles.setdefault(round(axes.get_position().y0, 6), set()).add(axes.get_title())
    assert {
        "R1-Llama | AIME24 | dynts",
        "R1-Llama | AIME24 | random",
        "R1-Llama | AIME24 | window",
        "",
    } in titles.values()
    assert len(titles) == 4
