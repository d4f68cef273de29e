"""Texts of figures over a grid of panels and looks: none overlap, none leave the canvas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvatlas.core import Cell, Estimate, Map, Setting
from kvatlas.figures.curves import depth_figure, line_figure
from kvatlas.figures.heatmap import map_figure
from kvatlas.figures.pairwise import names_of, pairwise_figure
from kvatlas.figures.style import Look
from kvatlas.stats.maps import curves_of_run
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import ModelSetting, pairs_of
from tests.stats.synthetic import grid, manifest, traces

BASELINES = ("full", "window(local_window=500)", "streaming", "random", "h2o(kv_budget=5000)", "snapkv")


def faults(figure: Figure) -> list[str]:
    """Texts that overlap another one, or leave the canvas, by more than a point."""
    figure.set_dpi(72)
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(
            lambda item: isinstance(item, Text) and item.get_visible() and item.get_text().strip()
        )
    ]
    wide, high = figure.bbox.width + 1, figure.bbox.height + 1
    found = [
        f"{text!r} leaves the canvas"
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > wide or box.y1 > high
    ]
    for number, (text, box) in enumerate(boxes):
        for other, its in boxes[number + 1 :]:
            across = min(box.x1, its.x1) - max(box.x0, its.x0)
            if across > 1 and min(box.y1, its.y1) - max(box.y0, its.y0) > 1:
                found.append(f"{text!r} overlaps {other!r}")
    return found


def maps(llama: list[Map], panels: int, baselines: int) -> list[Map]:
    beside = {name: Cell(Setting.of("full"), Estimate(0.97, 0.9, 0.99, 30, 5)) for name in BASELINES[:baselines]}
    # Two rows say as much about texts as four.
    low = [
        replace(
            map_,
            axes=(("local_window", (500, 1000)), map_.axes[1]),
            cells={coord: cell for coord, cell in map_.cells.items() if coord[0] < 2000},
        )
        for map_ in llama
    ]
    models = [replace(map_, model=model) for model in ("R1-Llama", "R1-Qwen") for map_ in low]
    return [replace(map_, baselines=beside) for map_ in models[:panels]]


@pytest.mark.parametrize(("panels", "baselines"), [(1, 6), (3, 0), (5, 1), (8, 6)])
def test_maps_have_no_overlaps(llama, panels: int, baselines: int) -> None:
    for look in (Look(1), Look(2, intervals=True)):
        assert faults(map_figure(maps(llama, panels, baselines), look=look)) == [], look


def test_names_of_narrow_columns_stand_apart(llama) -> None:
    wide = tuple(n / 10_000 for n in range(1001, 1021))
    cells = {(row, column): llama[0].cells[500, 0.1] for row in (1, 2) for column in wide}
    narrow = replace(llama[0], axes=(("local_window", (1, 2)), ("ratio", wide)), cells=cells)
    assert faults(map_figure([narrow], look=Look(2))) == []


def test_lines_pairs_and_depths_have_no_overlaps() -> None:
    plan = manifest(grid("dynts", "random", "window", "h2o"), problems=4)
    curves = curves_of_run(RunData(plan, list(traces(plan)), fix={"local_window": 16}))
    names = ["R1-Llama", "R1-Llama-of-a-long-name", "R1-Qwen", "gpt-4o-mini"]
    systems = [
        ModelSetting(
            name,
            Setting.of("dynts", local_window=500, ratio=0.3),
            {("B", str(n)): {0: round((n * (own + 2) % 11) / 10, 1)} for n in range(40)},
            {("B", str(n)): {"L": 5 + n // 4} for n in range(40)},
        )
        for own, name in enumerate(names)
    ]
    for look, count in ((Look(1), 4), (Look(2), 2), (Look(dark=True), 3)):
        own = systems[:count]
        assert faults(line_figure(curves, look=look)) == [], look
        assert faults(pairwise_figure(own, pairs_of(own), "progress", look=look)) == [], (look, count)
        success = [
            replace(one, outcomes={key: {0: float(v[0] > 0.4)} for key, v in one.outcomes.items()}) for one in own
        ]
        assert faults(depth_figure(success, own, names_of(own), look=look)[0]) == [], (look, count)
