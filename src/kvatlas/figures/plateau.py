"""The frame around a plateau: the border of a set of cells, readable on every colour."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Segment = tuple[tuple[int, int], tuple[int, int]]


def border(cells: Collection[tuple[int, int]]) -> list[Segment]:
    """The outer border of cells (x, y) of size 1: its sides, without those around holes."""
    from scipy.ndimage import binary_fill_holes

    size = max((max(cell) for cell in cells), default=0) + 3
    inside = np.zeros((size, size), bool)
    for x, y in cells:
        inside[x + 1, y + 1] = True
    inside = np.asarray(binary_fill_holes(inside), bool)
    upright = [((x, y - 1), (x, y)) for x, y in np.argwhere(np.diff(inside, axis=0)).tolist()]
    return upright + [((x - 1, y), (x, y)) for x, y in np.argwhere(np.diff(inside, axis=1)).tolist()]


def frame(axes: Axes, cells: Collection[tuple[int, int]]) -> None:
    """The border of cells: a dark line in a light one, so that one of them stands out on any colour."""
    from matplotlib.collections import LineCollection

    for colour, width in (("#ffffff", 2.6), ("#111111", 1.3)) if cells else ():
        lines = LineCollection(border(cells), colors=colour, linewidths=width, capstyle="projecting", clip_on=False)
        lines.set(gid="plateau", zorder=2)
        axes.add_collection(lines, autolim=False)
