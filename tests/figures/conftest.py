"""The published maps of R1-Llama, and the texts of a figure."""

import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from kvatlas.core import Cell, Estimate, Map, Setting
from kvatlas.figures.style import save
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.estimates import with_binomial_bounds


@pytest.fixture(scope="session")
def llama() -> list[Map]:
    return with_binomial_bounds(read_maps("published:dynts_r1_llama"))


def dense(size: int) -> Map:
    """A map of many cells."""
    columns = tuple(n / 100 for n in range(1, size + 1))
    cells = {
        (w, r): Cell(Setting.from_parameters("p"), Estimate(0.5, 0.4, 0.6, 30, 1))
        for w in range(1, size + 1)
        for r in columns
    }
    return Map("m", "b", "pass@1", "p", (("local_window", tuple(range(1, size + 1))), ("ratio", columns)), cells)


def texts(figure: Figure, folder: Path) -> list[str]:
    """Return the texts in an SVG of the figure."""
    path, *_ = save(figure, folder / "figure.svg")
    root = ElementTree.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def pixels(path):
    """Return the colours of a picture [height, width, 3]; skip the test without a program that draws its kind."""
    if path.suffix == ".png":
        return imread(path)[..., :3]
    command = ["rsvg-convert", path, "-z", "3", "-o", path.with_suffix(".view.png")]
    written = path.with_suffix(".view.png")
    if path.suffix == ".pdf":
        command = ["pdftoppm", "-png", "-singlefile", "-r", "216", path, path.with_suffix(".view")]
    elif shutil.which("rsvg-convert") is None:
        return svg_in_a_browser(path, written)
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run(list(map(str, command)), check=True)
    return imread(written)[..., :3]


def svg_in_a_browser(path, written):
    """Draw an SVG at three pixels for each point by Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("neither rsvg-convert nor chromium is installed")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', path.read_text()).groups())
    page = path.with_suffix(".html")
    page.write_text(f'<body style="margin:0"><img src="{path.name}" width="{3 * width}" height="{3 * height}">')
    size = f"--window-size={round(3 * width)},{round(3 * height) + 200}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size, f"--screenshot={written}"]
    subprocess.run([chromium, *options, page.as_uri()], check=True, capture_output=True, timeout=60)
    return imread(written)[: round(3 * height), : round(3 * width), :3]


def faults(figure: Figure) -> list[str]:
    """Texts that overlap another one, leave the canvas, or are struck by a line, by more than a point."""
    figure.set_dpi(72)
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]
    wide, high = figure.bbox.width + 1, figure.bbox.height + 1
    out = [text for text, box in boxes if box.x0 < -1 or box.y0 < -1 or box.x1 > wide or box.y1 > high]
    found = [f"{text!r} leaves the canvas" for text in out]
    for number, (text, box) in enumerate(boxes):
        for other, its in boxes[number + 1 :]:
            across = min(box.x1, its.x1) - max(box.x0, its.x0)
            if across > 1 and min(box.y1, its.y1) - max(box.y0, its.y0) > 1:
                found.append(f"{text!r} overlaps {other!r}")
    return [*found, *struck_texts(figure)]


def struck_texts(figure: Figure) -> list[str]:
    """Texts that a line of a panel runs through, or a mark stands on; those with a ground of their own hide it."""
    found = []
    for axes in figure.axes:
        grids = [axis.get_gridlines() for axis in (axes.xaxis, axes.yaxis) if axis.get_tick_params().get("gridOn")]
        lines = {line: line.get_zorder() for line in axes.lines if line.get_zorder() >= BEHIND_CELLS}
        # Grids are drawn below everything else.
        lines |= dict.fromkeys(chain.from_iterable(grids), 0.0)
        for text in axes.texts:
            box = text.get_window_extent()
            # A point of the box is white around the letters; lines end at the edge of the panel.
            inner = Bbox.from_extents(box.x0 + 1.5, box.y0 + 1.5, box.x1 - 1.5, box.y1 - 1.5)
            inside = Bbox.intersection(inner, axes.bbox)
            if inside is None or min(inside.width, inside.height) <= 0 or not text.get_text().strip():
                continue
            for line, order in lines.items():
                hides = text.get_bbox_patch() is not None and text.get_zorder() > order
                if not hides and is_on(line, inside):
                    found.append(f"{text.get_text()!r} is struck by a line")
    return found


#: Lines of a lower order are behind the cells of a panel, and their numbers.
BEHIND_CELLS = 0.6


def is_on(line: Line2D, box: Bbox) -> bool:
    """Return True if a line runs through a box, or one of its marks stands in it."""
    path = line.get_transform().transform_path(line.get_path())
    if line.get_linestyle() not in ("None", "") and path.intersects_bbox(box, filled=False):
        return True
    radius = line.get_markersize() / 2 if line.get_marker() not in ("None", "", None) else None
    if radius is None:
        return False
    return any(
        box.x0 - radius < x < box.x1 + radius and box.y0 - radius < y < box.y1 + radius for x, y in path.vertices
    )
