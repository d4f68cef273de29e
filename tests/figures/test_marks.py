"""The key of marks: states, margin and pick are seen on both grounds, in grey and by the colour-blind."""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from kvatlas.figures import colours
from kvatlas.figures.loss_cost import cost_figure
from kvatlas.figures.marks import BOX, CONTROL, MARKS, RING, State, add_mark, key_of, page_marks, state_of
from kvatlas.figures.setting_rows import answer_figure
from kvatlas.figures.style import FigureOptions
from kvatlas.report.map_figure import MapOptions, losses_of_means, metric_figure
from kvatlas.stats.costs import CostRatio
from kvatlas.stats.numerics.arrays import Difference
from tests.figures.test_look import answered, contrast

#: What eyes without one of the three kinds of cones see of linear red, green and blue (Machado and others 2009).
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "grey": [[0.2126, 0.7152, 0.0722]] * 3,
}
DOTS = 200


def seen(picture: np.ndarray, eyes: str) -> np.ndarray:
    """Return a picture of sRGB values as these eyes see it."""
    linear = np.where(picture <= 0.04045, picture / 12.92, ((picture + 0.055) / 1.055) ** 2.4)
    shown = np.clip(linear @ np.array(BLIND[eyes]).T, 0, 1)
    return np.where(shown <= 0.0031308, shown * 12.92, 1.055 * shown ** (1 / 2.4) - 0.055)


def pixels_of(figure: Figure) -> np.ndarray:
    figure.set_dpi(DOTS)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255


@pytest.mark.parametrize("eyes", BLIND)
@pytest.mark.parametrize("dark", [False, True])
def test_marks_differ_by_their_shapes(dark: bool, eyes: str) -> None:
    palette = colours.DARK if dark else colours.LIGHT
    kinds = [*map(str, State), RING, BOX, CONTROL]
    figure = Figure((0.2 * len(kinds), 0.2), facecolor=palette.ground)
    for index, kind in enumerate(kinds):
        add_mark(figure, (0.2 * index + 0.1, 0.1), kind, palette, 8)
    picture = seen(pixels_of(figure), eyes)
    side = DOTS // 5
    ground = seen(np.array(to_rgb(palette.ground)), eyes)
    shapes = {}
    for index, kind in enumerate(kinds):
        crop = picture[:side, index * side : (index + 1) * side]
        # Any colour that differs from the ground counts the same.
        shapes[kind] = np.abs(crop - ground).max(2) > 0.25
        assert shapes[kind].mean() > 0.01, kind
    for one, other in itertools.combinations(kinds, 2):
        if {one, other} != {State.OPEN, RING}:
            # A ring is the hollow mark, of another size, and around another mark.
            assert (shapes[one] != shapes[other]).mean() > 0.015, (one, other)


def figures(dark: bool) -> Mapping[str, Figure]:
    look = FigureOptions(dark=dark)
    result = answered()
    means = [one.map for one in result.means]
    # Settings of unlike memory, so that no mark covers another.
    ratios = {}
    for choice in result.choices:
        ratios[choice.model] = {id_: CostRatio(0.9 - 0.04 * place) for place, id_ in enumerate(choice.settings)}
    return {
        "forest": answer_figure(result.choices, "pass@1", options=look),
        "cost": cost_figure(result.choices, "memory", ratios, "pass@1", options=look),
        "map": metric_figure(result, means, MapOptions(mean=True, figure=look), losses_of_means(result)),
    }


@pytest.mark.parametrize("dark", [False, True])
def test_states_margin_and_pick_are_seen_in_every_figure(dark: bool) -> None:
    palette = colours.DARK if dark else colours.LIGHT
    for kind, figure in figures(dark).items():
        picture = pixels_of(figure)
        height = picture.shape[0]
        crops: dict[str, list[np.ndarray]] = {}
        for axes in figure.axes:
            for mark in axes.collections:
                state = (mark.get_gid() or "").removeprefix("mark-")
                if state in set(State):
                    x, y = mark.get_offset_transform().transform(mark.get_offsets())[0]
                    row, column = round(height - y), round(x)
                    crops.setdefault(state, []).append(picture[row - 5 : row + 6, column - 5 : column + 6])
        assert crops.keys() >= {"within", "beyond"}, kind
        margins = [line for axes in figure.axes for line in axes.lines if line.get_gid() == "margin"]
        for eyes in BLIND:
            ground = seen(np.array(to_rgb(palette.ground)), eyes)
            for line in margins:
                assert np.abs(seen(np.array(to_rgb(line.get_color())), eyes) - ground).max() > 0.3, kind
            middles = {state: np.mean(seen(np.array(found), eyes), axis=0) for state, found in crops.items()}
            for one, other in itertools.combinations(middles, 2):
                assert np.abs(middles[one] - middles[other]).mean() > 0.03, (kind, eyes, one, other)
            picked = np.abs(seen(np.array(to_rgb(palette.picked)), eyes) - ground).max()
            assert picked > 0.3, eyes


def test_the_colours_of_states_are_read_on_their_ground() -> None:
    for palette in (colours.LIGHT, colours.DARK):
        for colour in (*palette.states.values(), palette.picked):
            assert contrast(colour, palette.ground) >= 4.5


def test_untested_settings_that_do_not_fit_are_open() -> None:
    def loss(limit: float, **proven: bool) -> Difference:
        return Difference(0.01, -0.01, limit, 0.5, limit=limit, **proven)

    assert state_of(loss(0.02, is_kept=True), 0.05) is State.WITHIN
    assert state_of(loss(0.2, is_broken=True), 0.05) is State.BEYOND
    assert [state_of(loss(limit), 0.05, True) for limit in (0.04, 0.06)] == [State.UNTESTED, State.OPEN]
    assert state_of(loss(0.04), 0.05) is State.OPEN


def test_the_key_has_the_states_that_are_drawn_and_pages_have_all() -> None:
    key = key_of({State.OPEN, State.WITHIN}, "5 points", "on these problems")
    assert [entry.words for entry in key] == ["proven within 5 points on these problems", "not decided"]
    assert page_marks().keys() == set(State)
    assert len({mark.sign for mark in MARKS.values()}) == len(MARKS)
