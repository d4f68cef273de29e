"""Maps by the tokens that stay after a compression: what is filled, crossed out and named, seen in the picture."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from kvatlas.core import Cell, KvatlasError, Map
from kvatlas.figures.by_memory import MemoryMap, memory_csv, memory_figure
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.style import FigureOptions
from kvatlas.report.map_figure import MapOptions, plot_sources
from kvatlas.report.view_options import ReadOptions
from kvatlas.stats.maps import mean_map
from kvatlas.stats.windows_at_memory import EqualMemory
from tests.figures.conftest import dense, texts

pytestmark = pytest.mark.newest


def with_memory(map_: Map) -> EqualMemory:
    """Outcomes of 200 problems that follow the values of a map, of which one is far below those that keep less."""
    rng = np.random.default_rng(0)
    coords = tuple(map_.cells)
    chances = np.array([0.2 if coord == (3000, 0.5) else map_.cells[coord].estimate.value for coord in coords])
    values = (rng.random((200, 1)) < chances).astype(float)
    windows = map_.axes[0][1]
    return EqualMemory(
        coords,
        values,
        np.zeros(200, int),
        np.array([cell.stays_tokens for cell in map_.cells.values()], float),
        np.array([windows.index(window) for window, _ in coords]),
        windows,
        ("local_window", "ratio"),
        {},
    )


def _is_near(cell: Cell, other: Cell) -> bool:
    assert cell.stays_tokens is not None
    assert other.stays_tokens is not None
    tokens = abs(other.stays_tokens - cell.stays_tokens)
    return tokens < 60 and abs(other.estimate.value - cell.estimate.value) < 0.004


@pytest.mark.parametrize("options", [FigureOptions(), FigureOptions(1), FigureOptions(dark=True)])
def test_front_cells_are_filled_and_those_proven_off_it_crossed_out(llama: list[Map], options: FigureOptions) -> None:
    mean = mean_map(llama)
    memory = with_memory(mean)
    figure = memory_figure([mean], [memory], options=options)
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(300)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    (panel,) = figure.axes
    one = MemoryMap(mean, memory)
    assert one.proven_off == [(3000, 0.5)]
    ground = to_rgb(options.colours.ground)
    for window, line in one.lines.items():
        colour = to_rgb(options.colours.lines[mean.axes[0][1].index(window)])
        for coord, cell in line:
            if coord in one.proven_off:
                continue
            x, y = panel.transData.transform((cell.stays_tokens, 100 * cell.estimate.value))
            found = picture[picture.shape[0] - 1 - round(float(y)), round(float(x))]
            expected = colour if coord in one.front else ground
            others = [other for place, other in mean.cells.items() if place != coord]
            # The markers of two windows may lie on each other.
            if not any(_is_near(cell, other) for other in others):
                assert np.allclose(found, expected, atol=0.02), coord
    (cross,) = [line for line in panel.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == [mean.cells[3000, 0.5].stays_tokens]


@pytest.mark.parametrize("options", [FigureOptions(), FigureOptions(1), FigureOptions(2)])
def test_names_of_windows_meet_no_other_text_and_stay_in_the_panel(llama: list[Map], options: FigureOptions) -> None:
    maps = [*llama, mean_map(llama)]
    figure = memory_figure(maps, [None] * len(maps), options=options)
    FigureCanvasAgg(figure).draw()
    for panel in figure.axes:
        boxes = [text.get_window_extent() for text in panel.texts if text.get_text().startswith("window ")]
        assert len(boxes) == 4
        edge = panel.get_window_extent().expanded(1.02, 1.02)
        assert all(edge.contains(box.x0, box.y0) and edge.contains(box.x1, box.y1) for box in boxes)
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_an_axis_is_as_high_as_an_interval_so_that_noise_looks_like_it(llama: list[Map]) -> None:
    mean = mean_map(llama)
    (panel,) = memory_figure([mean], [None]).axes
    bottom, top = panel.get_ylim()
    estimate = mean.cells[500, 0.1].estimate
    assert estimate.low is not None
    assert estimate.high is not None
    assert top - bottom > 100 * (estimate.high - estimate.low)


def test_the_data_has_every_cell_with_its_tokens(llama: list[Map]) -> None:
    header, first, *others = memory_csv(llama, [None] * 4).splitlines()
    assert header.endswith("local_window,ratio,stays_tokens,pass@1,low,high,front,proven_off")
    assert len(others) == 79
    assert first.startswith("R1-Llama,AIME24,dynts,500,0.1,950.0,")


def test_maps_without_windows_or_tokens_are_refused(llama: list[Map], tmp_path: Path) -> None:
    with pytest.raises(KvatlasError, match="--by-memory: expected maps over local_window whose tokens"):
        memory_figure([dense(3)], [None])
    budgets = replace(llama[0], axes=(("kv_budget", llama[0].axes[0][1]), llama[0].axes[1]))
    with pytest.raises(KvatlasError, match="--by-memory"):
        memory_figure([budgets], [None])
    source = ["published:dynts_r1_llama"]
    for show, option in (
        (MapOptions(by_memory=True, against="published:dynts_r1_qwen"), "--against"),
        (MapOptions(by_memory=True, mean=True), "--mean"),
        (MapOptions(by_memory=True, loss_by_memory=True), "--loss-by-memory"),
        (MapOptions(by_memory=True, figure=FigureOptions(kept=True)), "--look kept=true"),
    ):
        with pytest.raises(KvatlasError, match=option):
            plot_sources(source, tmp_path / "figure.png", show=show)
    options = ReadOptions(metric="peak_kv_tokens")
    with pytest.raises(KvatlasError, match="--metric peak_kv_tokens"):
        plot_sources(source, tmp_path / "figure.png", options, MapOptions(by_memory=True))


def test_small_numbers_in_cells_are_the_tokens_that_stay(llama: list[Map], tmp_path: Path) -> None:
    found = texts(map_figure(llama[:1], options=FigureOptions(kept=True)), tmp_path)
    assert {"950", "1,400", "4,000"} <= set(found)
    assert "small type: tokens after a compression" in " ".join(found)
    assert "4,000" not in texts(map_figure(llama[:1]), tmp_path)
    with pytest.raises(KvatlasError, match="known of no cell"):
        map_figure([dense(3)], options=FigureOptions(kept=True))
    with pytest.raises(KvatlasError, match="leave one out"):
        FigureOptions(kept=True, intervals=True)
