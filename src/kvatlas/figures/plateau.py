"""The frame around a plateau: the border of a set of cells, readable on every colour."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Segment = tuple[tuple[float, float], tuple[float, float]]


def border(cells: Collection[tuple[int, int]]) -> list[Segment]:
    """The sides of cells (x, y) of size 1 whose neighbour is not among them."""
    sides = []
    for x, y in sorted(cells):
        for (dx, dy), side in (
            ((-1, 0), ((x, y), (x, y + 1))),
            ((1, 0), ((x + 1, y), (x + 1, y + 1))),
            ((0, -1), ((x, y), (x + 1, y))),
            ((0, 1), ((x, y + 1), (x + 1, y + 1))),
        ):
            if (x + dx, y + dy) not in cells:
                sides.append(side)
    return [((float(a), float(b)), (float(c), float(d))) for (a, b), (c, d) in sides]


def frame(axes: Axes, cells: Collection[tuple[int, int]]) -> None:
    """Draw the border of cells: a dark line in a light one, so that one of them stands out on any colour."""
    from matplotlib.collections import LineCollection

    segments = border(cells)
    if not segments:
        return
    for colour, width in (("#ffffff", 2.6), ("#111111", 1.3)):
        lines = LineCollection(segments, colors=colour, linewidths=width, capstyle="projecting", clip_on=False)
        lines.set_gid("plateau")
        axes.add_collection(lines, autolim=False)
