"""The density of problems over the values of two systems: the pairwise figure of seqBench as published.

Half of the problems have the value 0 or 1. A Gaussian kernel estimate loses half of the mass of a problem at an
edge to the values beyond, so each problem also counts as its mirror images at 0 and 1 (Silverman 1986, 2.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvatlas.figures import style
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.systems import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Inches right of a row for the colour bar with its texts.
BAR_ROOM = 0.62
_BAR_GAP = 0.1
_BAR_WIDTH = 0.08
#: From yellow at few problems to dark purple at many.
_PALETTE = "viridis_r"
#: Values at which the density is estimated, along each axis.
_GRID = 101
#: Contours, as shares of the highest density of a panel, closer where there is little, since half of the problems
#: stand in a corner or two. What is below the lowest is left empty.
_LEVELS = np.linspace(0.1, 1, 13) ** 2
#: The bandwidth along each axis, at least: the values of a system may hardly vary.
_LEAST_WIDTH = 0.03
_TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)


def draw_densities(panels: Sequence[Axes], pairs: Sequence[Pair], across: int, options: FigureOptions) -> None:
    """Draw the problems of each pair as dots on filled contours of their density, and a bar right of each row."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    palette = colormaps[_PALETTE]
    places = np.linspace(0, 1, _GRID)
    for index, (panel, pair) in enumerate(zip(panels, pairs, strict=True)):
        # A bar whose norm is used anew loses its texts.
        norm = BoundaryNorm(_LEVELS, palette.N)
        density = reflected_density(pair.x, pair.y, places)
        panel.contourf(places, places, density / density.max(), _LEVELS, cmap=palette, norm=norm)
        dot = options.colours.soft
        panel.plot(pair.x, pair.y, "o", color=dot, alpha=0.35, ms=2, mew=0, clip_on=False, zorder=3)
        draw_parity(panel, (0, 1), options)
        panel.set(xlim=(0, 1), ylim=(0, 1), xticks=_TICKS, yticks=_TICKS)
        panel.set(xticklabels=map(str, _TICKS), yticklabels=map(str, _TICKS))
        panel.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE - 0.5)
        is_last_in_row = (index + 1) % across == 0 or index + 1 == len(panels)
        if not is_last_in_row:
            continue

        # A colour bar right of the row.
        figure = panel.figure
        box = panel.get_position()
        width = figure.get_figwidth()  # type: ignore[union-attr]
        axes = figure.add_axes((box.x1 + _BAR_GAP / width, box.y0, _BAR_WIDTH / width, box.height))
        bar = figure.colorbar(ScalarMappable(norm, palette), cax=axes)
        bar.set_ticks([_LEVELS[0], 1], labels=["low", "high"])
        bar.minorticks_off()
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE - 0.5)
        bar.set_label("density of problems", fontsize=style.SMALL_TYPE, labelpad=1)


def reflected_density(x: Floats, y: Floats, places: Floats) -> Floats:
    """Return [places, places] (rows: y) the density of points in the unit square, reflected at its edges."""
    # The rule of Scott (1992) for two dimensions.
    shrink = len(x) ** (-1 / 6)
    kernels_x = _mirrored_kernels(x, places, max(shrink * float(np.std(x)), _LEAST_WIDTH))
    kernels_y = _mirrored_kernels(y, places, max(shrink * float(np.std(y)), _LEAST_WIDTH))
    density: Floats = kernels_y.T @ kernels_x / len(x)
    return density


def _mirrored_kernels(values: Floats, places: Floats, width: float) -> Floats:
    """Return [values, places] the density of each value with its mirror images."""
    kernels = np.zeros((len(values), len(places)))
    for images in (values, -values, 2 - values):
        distance = (places[None] - images[:, None]) / width
        kernels += np.exp(-0.5 * distance**2) / (width * np.sqrt(2 * np.pi))
    return kernels


def draw_parity(panel: Axes, ends: tuple[float, float], options: FigureOptions, order: float = 3.5) -> None:
    """Draw the line of equal values at this place in the order of drawing."""
    soft = options.colours.soft
    panel.plot(ends, ends, linestyle=(0, (4, 3)), color=soft, linewidth=0.8, zorder=order)
