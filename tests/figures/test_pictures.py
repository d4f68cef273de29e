"""Figures as pictures: marks, colour bars and published forms, seen in the pixels of PNG, SVG and PDF."""

import importlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from kvatlas.core import Cell, CellCoord, Claim, Estimate, Map, Setting
from kvatlas.figures import colours
from kvatlas.figures.heatmap import map_figure, plot
from kvatlas.figures.pairwise import pairwise_figure
from kvatlas.figures.panels import ComparedMaps, difference_panels, loss_panels, metric_panels
from kvatlas.figures.setting_rows import against_figure
from kvatlas.figures.style import FigureOptions, save
from kvatlas.report import map_figure as map_figures
from kvatlas.report.map_figure import MapOptions, plot_sources
from kvatlas.report.sources import ReadOptions
from kvatlas.results.csv_maps import read_maps
from kvatlas.stats.maps import mean_maps
from kvatlas.stats.numerics.arrays import Difference
from kvatlas.stats.pairs import against_policy
from kvatlas.stats.run_data import RunData
from kvatlas.stats.systems import pairs_of, systems_of
from tests.figures.conftest import dense, faults, pixels
from tests.figures.test_curves_and_pairs import FULL, WINDOW
from tests.stats.synthetic import grid, manifest
from tests.stats.test_against import arena
from tests.stored import maze_run, store_run

pytestmark = pytest.mark.newest

DOCS = Path(__file__).parents[2] / "docs"
FORMATS = [".png", ".svg", ".pdf"]
#: PNG, and the other formats in `make deep`.
PNG_OF_ALL = [".png", *(pytest.param(suffix, marks=pytest.mark.deep) for suffix in FORMATS[1:])]


def pictures_of(names: Sequence[str]) -> list[Any]:
    """Return figures with their formats: the first in each, the others as PNG, and in `make deep` all in each."""
    cases = []
    for name in names:
        for suffix in FORMATS:
            is_deep = name != names[0] and suffix != ".png"
            cases.append(pytest.param(name, suffix, marks=[pytest.mark.deep] if is_deep else []))
    return cases


def kinds(llama: list[Map]) -> dict[str, tuple[list[Map], FigureOptions]]:
    """Six kinds of figures of maps, by their names: the maps, of which the first has the region, and the look."""
    models = [replace(map_, model=model) for model in ("R1-Llama", "R1-Qwen") for map_ in llama[:2]]
    return {
        "one": (llama[:1], FigureOptions()),
        "row": (llama[:3], FigureOptions()),
        "grid": (models, FigureOptions()),
        "narrow": (llama[:2], FigureOptions(1)),
        "dark": (llama[:1], FigureOptions(dark=True)),
        "dense": ([dense(12)], FigureOptions()),
    }


class Place:
    """The pixels of a panel's cells in a picture."""

    def __init__(self, axes, map_: Map, shape: tuple[int, ...]) -> None:
        self.box = axes.get_position()
        self.map = map_
        self.height = shape[0]
        self.width = shape[1]

    def of(self, coord, x: float, y: float) -> tuple[int, int]:
        """The pixel (row, column) at a place of a cell, from its lower left corner."""
        (_, rows), (_, columns) = self.map.axes
        across = self.box.x0 + self.box.width * (columns.index(coord[1]) + x) / len(columns)
        up = self.box.y0 + self.box.height * (rows.index(coord[0]) + y) / len(rows)
        return round((1 - up) * self.height), round(across * self.width)


def marks_of(axes) -> dict[tuple[float, float], str]:
    """Return the states of the marks of a panel by their cells (column, row), the numbers counted from 0."""
    found = {}
    for mark in axes.collections:
        if (mark.get_gid() or "").startswith("mark-"):
            ((x, y),) = mark.get_offsets()
            found[int(x), int(y)] = mark.get_gid().removeprefix("mark-")
    return found


def states_drawn(axes, map_: Map) -> dict[CellCoord, str]:
    """Return the states of the marks of a map's panel by its cells."""
    (_, rows), (_, columns) = map_.axes
    return {(rows[y], columns[x]): state for (x, y), state in marks_of(axes).items()}


@pytest.mark.parametrize(("kind", "suffix"), pictures_of(["one", "row", "grid", "narrow", "dark", "dense"]))
def test_proven_cells_have_a_filled_mark_in_their_corner(
    llama: list[Map], tmp_path: Path, suffix: str, kind: str
) -> None:
    maps, look = kinds(llama)[kind]
    (_, rows), (_, columns) = maps[0].axes
    region = frozenset({(rows[1], columns[1]), (rows[1], columns[2]), (rows[2], columns[1])})
    # As many cells of each state, so that words and key are the same, and the marks alone differ.
    other = frozenset({(rows[0], columns[0]), (rows[0], columns[1]), (rows[1], columns[1])})
    pictures = []
    for keeps in (region, other):
        panels = metric_panels([replace(maps[0], keeps=keeps, keeps_like=keeps, margin=0.03), *maps[1:]])
        figure = plot([replace(panel, about=()) for panel in panels], options=look)
        path, *_ = save(figure, tmp_path / f"{len(pictures)}{suffix}")
        pictures.append(pixels(path))
    place = Place(figure.axes[0], maps[0], pictures[0].shape)
    changed = np.abs(pictures[0] - pictures[1]).max(2) > 0.2
    for coord in maps[0].cells:
        top, left = place.of(coord, 0.4, 1)
        bottom, right = place.of(coord, 1, 0.4)
        assert changed[top:bottom, left:right].any() == (coord in region ^ other), (kind, coord)
    # Nothing outside the corners changes.
    for coord in region:
        y, x = place.of(coord, 0, 0.4)
        bottom, right = place.of(coord, 0.3, 0)
        assert not changed[y:bottom, x:right].any()


@pytest.mark.parametrize("dark", [False, True])
def test_cells_that_are_worse_than_the_best_have_a_cross_and_others_no_mark(llama, dark: bool) -> None:
    tied = frozenset(list(llama[0].cells)[3:])
    maps = [replace(llama[0], plateau=tied), replace(llama[1], plateau=frozenset(llama[1].cells))]
    figure = map_figure(maps, options=FigureOptions(dark=dark))
    assert states_drawn(figure.axes[0], maps[0]) == dict.fromkeys(llama[0].cells.keys() - tied, "beyond")
    assert marks_of(figure.axes[1]) == {}
    assert "proven worse than the best" in [text.get_text() for text in figure.texts]


def test_marks_are_those_of_the_claim_of_the_run(llama) -> None:
    like = frozenset(list(llama[0].cells)[:4])
    both = replace(llama[0], keeps=frozenset(llama[0].cells), keeps_like=like, margin=0.03)
    for claim, kept in ((Claim.LIKE, like), (Claim.THESE, frozenset(llama[0].cells))):
        figure = map_figure([replace(both, claim=claim)])
        drawn = states_drawn(figure.axes[0], both)
        assert {coord for coord, state in drawn.items() if state == "within"} == kept
        words = [text.get_text() for text in figure.texts]
        of_claim = "proven within 3 points" + (" on these problems" if claim is Claim.THESE else "")
        assert of_claim in words


def test_the_key_names_no_mark_that_no_cell_has(llama) -> None:
    nothing = replace(llama[0], keeps=frozenset(), breaks=frozenset(), margin=0.03)
    words = " ".join(text.get_text() for text in map_figure([nothing]).texts)
    assert "not decided" in words
    assert "proven beyond" not in words
    assert "not tested" not in words
    fits = map_figure([replace(nothing, fits=frozenset(list(llama[0].cells)[:1]))])
    assert "fits, not tested" in [text.get_text() for text in fits.texts]
    assert sorted(marks_of(fits.axes[0]).values())[-1] == "untested"


def marked_kinds(llama: list[Map]) -> dict[str, tuple[list[Map], bool, FigureOptions]]:
    """Kinds of maps with marks, by their names: the maps, whether they show losses, and the look.

    By turns a corner, all but one, all cells and none are proven.
    """
    coords = list(llama[0].cells)
    full = Cell(Setting.from_parameters("full"), Estimate(0.62, 0.5, 0.7, 30, 5))
    regions = [frozenset(coords[:7]), frozenset(coords) - {coords[7]}, frozenset(coords), frozenset[CellCoord]()]
    maps = []
    for index, map_ in enumerate([*llama, *llama]):
        keeps = regions[index % 4]
        policy = "dynts" if index < 4 else "random"
        marked = replace(map_, keeps=keeps, keeps_like=keeps, breaks=(broken := frozenset({coords[-1]}) - keeps))
        marked = replace(marked, breaks_like=broken, margin=0.05)
        maps.append(replace(marked, policy=policy, baselines={"full": full}))
    return {
        "one": (maps[:1], False, FigureOptions()),
        "four in a row": (maps[:4], False, FigureOptions()),
        "policies of four benchmarks": (maps, False, FigureOptions(2)),
        "one column": (maps[:2], False, FigureOptions(1)),
        "losses": ([maps[0], replace(maps[0], policy="random")], True, FigureOptions()),
        "losses in one column": (maps[:2], True, FigureOptions(1)),
    }


@pytest.mark.parametrize("dark", [False, True])
def test_every_kind_of_map_marks_its_cells_and_labels_its_bars(llama: list[Map], dark: bool) -> None:
    for kind, (maps, has_losses, options) in marked_kinds(llama).items():
        panels = metric_panels(maps)
        if has_losses:
            losses = {}
            for map_ in maps:
                assert map_.full is not None
                of_map = {}
                for coord, cell in map_.cells.items():
                    lost = map_.full.estimate.value - cell.estimate.value
                    of_map[coord] = Difference(lost, lost - 0.05, lost + 0.05)
                losses[map_.name] = of_map
            panels = loss_panels(maps, losses)
        figure = plot(panels, one_bar=has_losses, shared=has_losses, options=replace(options, dark=dark))
        assert faults(figure) == [], kind
        labels = []
        for axes, panel in zip(figure.axes, panels, strict=True):
            map_ = panel.map
            expected = {}
            for coord in map_.cells:
                is_broken = coord in (map_.breaks or frozenset())
                expected[coord] = (
                    "within" if coord in (map_.keeps or frozenset()) else "beyond" if is_broken else "open"
                )
            assert states_drawn(axes, map_) == expected, (kind, map_.name)
            labels += [text.get_text() for text in axes.texts if text.get_transform() == axes.transAxes]

        # The ends of bars are the lowest and the highest cells, as these are printed; losses begin at the full cache.
        scales = [panels] if has_losses else [[panel] for panel in panels]
        for sharing in scales:
            cells = sorted(chain.from_iterable(panel.cells.values() for panel in sharing))
            ends = {"0 = full 62 %", cells[-1].text} if has_losses else {cells[0].text, cells[-1].text}
            assert ends <= set(labels), (kind, ends, labels)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_bar_has_the_colours_of_its_cells(llama: list[Map], tmp_path: Path, suffix: str) -> None:
    figure = plot(metric_panels(llama[:1]), shared=False)
    path, *_ = save(figure, tmp_path / f"bar{suffix}")
    picture = pixels(path)
    axes = figure.axes[0]
    box = axes.get_position()
    (bar,) = [item for item in axes.collections if item.get_transform() != axes.collections[0].get_transform()]
    corners = bar.get_paths()[0].vertices
    middle = (corners[:, 0].min() + corners[:, 0].max()) / 2
    column = round((box.x0 + box.width * middle) * picture.shape[1])
    palette = colours.colour_map(colours.VALUES)
    for height in (0.02, 0.31, 0.5, 0.77, 0.98):
        row = round((1 - box.y0 - box.height * height) * picture.shape[0])
        assert picture[row, column] == pytest.approx(palette(height)[:3], abs=0.025), height


def close(picture, colour, tolerance: float = 0.03):
    """Return which pixels have a colour."""
    return np.abs(picture - np.array(to_rgb(colour))).max(2) < tolerance


def plain(name: str) -> list[Map]:
    return read_maps(f"published:{name}")


def published(name: str) -> tuple[list[Map], list[str]]:
    """Return the maps of a published figure and the names of its panels."""
    if name == "means":
        maps = mean_maps([*plain("dynts_r1_llama"), *plain("dynts_r1_qwen")])
        return maps, ["R1-Llama | mean of 4 benchmarks", "R1-Qwen | mean of 4 benchmarks"]
    model = {"dynts_r1_llama": "R1-Llama", "dynts_r1_qwen": "R1-Qwen"}[name]
    return plain(name), [f"{model} | {benchmark}" for benchmark in ("AIME24", "AIME25", "AMC23", "GPQA_D")]


@pytest.mark.parametrize(("name", "suffix"), pictures_of(["means", "dynts_r1_llama", "dynts_r1_qwen"]))
def test_published_maps_are_drawn_as_published(tmp_path: Path, name: str, suffix: str) -> None:
    shown, names = published(name)
    figure = map_figure(shown, options=FigureOptions(2, plain=True))
    path, *_ = save(figure, tmp_path / f"plain{suffix}")
    picture = pixels(path)
    panels = figure.axes
    texts = [[text.get_text() for text in axes.texts] for axes in panels]
    assert [of_panel.count("Pass@1") for of_panel in texts] == [1] * len(shown)
    assert [name for name, of_panel in zip(names, texts, strict=True) if name in of_panel] == names
    # No sentence stands outside the panels.
    assert [text.get_text() for text in figure.texts] == []
    for axes, map_ in zip(panels, shown, strict=True):
        place = Place(axes, map_, picture.shape)
        values = {coord: cell.estimate.value for coord, cell in map_.cells.items()}
        low, high = min(values.values()), max(values.values())
        palette = colours.colour_map(colours.VALUES)
        for coord, value in values.items():
            y, x = place.of(coord, 0.08, 0.15)
            expected = palette((value - low) / (high - low))[:3]
            assert picture[y, x] == pytest.approx(expected, abs=0.03), (map_.benchmark, coord)


@pytest.fixture(scope="module")
def mazes(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    solvers = {("A", FULL): 0.01, ("A", WINDOW): 0.15, ("B", FULL): 0.04, ("C", FULL): 0.08}
    return RunData.open(maze_run(tmp_path_factory.mktemp("mazes"), solvers, problems=60))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two policies, random far below."""
    chances = {"dynts": 0.9, "random": 0.3, "full": 0.95}
    plan = manifest(grid("dynts", "random"), problems=20)
    return store_run(tmp_path_factory.mktemp("kinds") / "run", plan, lambda setting: chances[setting.policy])


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_texts_of_every_other_kind_of_figure_stand_apart(
    mazes: RunData, stored: Path, llama: list[Map], dark: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Figures of runs as `kvatlas map` draws them, of pairs, and of arenas; marks have tests of their own."""
    look = FigureOptions(dark=dark)
    drawn = []
    monkeypatch.setattr(map_figures, "save", lambda figure, out, data: drawn.append(figure) or [out])
    fixed_axis = ReadOptions(metric=None, fix={"ratio": 0.3})
    for options, show in (
        (ReadOptions(metric="mean_kv_tokens"), MapOptions()),
        (ReadOptions(metric="pass@1"), MapOptions(mean=True)),
        (ReadOptions(metric=None), MapOptions(against="full")),
        (ReadOptions(metric=None), MapOptions(mean=True, against="random")),
        (fixed_axis, MapOptions()),
    ):
        plot_sources([stored], tmp_path / "figure.png", options, replace(show, figure=look))
    assert len(drawn) == 5

    run = arena({"random": 0.5, "rkv": 0.95, "window": 0.5})
    drawn.append(against_figure(against_policy(run, "random"), options=look))
    drawn.append(map_figure(llama, options=replace(look, plain=True)))
    systems = systems_of([mazes])
    pairs = pairs_of(systems)
    drawn.append(pairwise_figure(systems, pairs, "progress", options=look))
    for number, figure in enumerate(drawn):
        assert faults(figure) == [], (number, [text.get_text() for text in figure.texts[:1]])


@pytest.mark.parametrize("name", ["gallery-llama", "gallery-qwen", "gallery-plain", "gallery-means"])
def test_captions_of_the_gallery_say_what_the_figures_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of published maps; `make example` writes those of the demo, too."""
    monkeypatch.syspath_prepend(str(DOCS))
    pictures = importlib.import_module("pictures")
    guide = (DOCS / "figures.md").read_text("utf-8")
    drawn = pictures.caption(pictures.commands("runs/demo")[name])
    assert f"![{drawn}](images/{name}.png)" in guide


def test_commands_of_the_gallery_are_those_of_its_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pictures = importlib.import_module("pictures")
    guide = (DOCS / "figures.md").read_text("utf-8")
    gallery = [shlex.split(line) for line in guide.splitlines() if line.startswith("kvatlas ")]
    shown = [
        frozenset(words[1 : words.index("--out")]) - {"--look", "columns=2"} for words in gallery if "--out" in words
    ]
    for name, words in pictures.commands("runs/demo").items():
        assert frozenset(words) - {"--look"} in shown, name


@pytest.mark.parametrize("dark", [False, True])
def test_differences_to_the_full_cache_are_marked_and_their_bar_fits_them(llama, tmp_path: Path, dark: bool) -> None:
    palette = colours.DARK if dark else colours.LIGHT
    coords = list(llama[0].cells)
    full = Cell(Setting.from_parameters("full"), Estimate(0.5, 0.4, 0.6, 30, 5))
    keeps = frozenset(coords[:7])
    map_ = replace(
        llama[0], keeps=keeps, keeps_like=keeps, breaks=frozenset(coords[-1:]), breaks_like=frozenset(coords[-1:]),
        margin=0.05, baselines={"full": full},
    )  # fmt: skip
    other = replace(map_, cells=dict.fromkeys(coords, full))
    (panel,) = difference_panels(ComparedMaps([map_], "full", {map_.name: other}, {}))
    figure = plot([panel], options=FigureOptions(dark=dark))
    assert faults(figure) == []
    path, *_ = save(figure, tmp_path / "differences.png")
    picture = pixels(path)
    (axes,) = figure.axes
    place = Place(axes, map_, picture.shape)
    drawn = states_drawn(axes, map_)
    assert {coord for coord, state in drawn.items() if state == "within"} == keeps
    assert [coord for coord, state in drawn.items() if state == "beyond"] == coords[-1:]

    # The bar ends at the lowest difference as its cell prints it, and names the margin and the full cache.
    cells = sorted(panel.cells.values())
    labels = [text.get_text() for text in axes.texts if text.get_transform() == axes.transAxes]
    assert set(labels) == {cells[0].text, "−5 margin", "0 = full 50.0"}
    # Within the margin all cells have one colour; beyond it a larger loss has a stronger one.
    shades = {}
    for coord, cell in panel.cells.items():
        y, x = place.of(coord, 0.1, 0.12)
        shades[cell.value] = picture[y, x]
    for value, shade in shades.items():
        is_quiet = bool(close(shade[None, None], palette.within_margin).all())
        assert is_quiet is (value >= -5), value
    beyond = [shades[value] for value in sorted(shades) if value < -5]
    greens = [shade[1] for shade in beyond]
    assert greens == sorted(greens)
    assert greens[-1] - greens[0] > 0.1


def test_one_bar_stands_beside_rows_that_share_it(llama: list[Map]) -> None:
    figure = plot(
        metric_panels([replace(llama[0], policy=policy) for policy in ("a", "b", "c", "d", "e")]), shared=True
    )
    bars = []
    for axes in figure.axes:
        strips = [item for item in axes.collections if item.get_transform() == axes.transAxes]
        bars += [(axes, strip.get_datalim(axes.transAxes)) for strip in strips]
    ((axes, box),) = bars
    lowest = min(other.get_position().y0 for other in figure.axes)
    height = axes.get_position().height
    assert axes.get_position().y0 + box.y0 * height == pytest.approx(lowest, abs=1e-6)
    # Every panel without one below it has its own values.
    last = [panel for panel in figure.axes if len(panel.get_xticks())]
    assert len(last) == len(figure.axes)
    assert faults(figure) == []
