"""The colours of all figures, on a light and on a dark ground, and the limits of their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.colors import LinearSegmentedColormap


class ColourScale(NamedTuple):
    """A colour map of matplotlib, and the part of it that is pale: black type has a contrast of 4.5 or more on it."""

    name: str
    start: float
    end: float


#: The colour scales of figures and pages, by what they show: maps of ColorBrewer (Brewer 2003), in perceptual order and
#: safe for the colour-blind. A column of costs names its scale (`kvatlas.columns.Column.scale`).
SCALES: Mapping[str, ColourScale] = {
    "values": ColourScale("YlGnBu", 0.0, 0.62),
    "costs": ColourScale("YlOrBr", 0.0, 0.62),
    "counts": ColourScale("Blues", 0.05, 0.68),
    # Low is red.
    "differences": ColourScale("RdBu", 0.22, 0.78),
    "losses": ColourScale("RdBu_r", 0.57, 0.78),
    # Losses of which nothing is proven.
    "noise": ColourScale("Greys", 0.06, 0.4),
}
VALUES = "values"
COUNTS = "counts"
DIFFERENCES = "differences"
LOSSES = "losses"
NOISE = "noise"
#: The colour of text on any of them.
ON_COLOUR = "#111111"
#: The ring of the recommended cell, on a cell of any colour, and the halo around it.
RING = ("#003f8f", "#ffffff")


class Palette(NamedTuple):
    """Colours of a figure on a light or on a dark ground."""

    ground: str
    ink: str
    #: Lesser text.
    soft: str
    #: Text that must not be missed.
    warning: str
    #: A missing cell and its hatching.
    missing: tuple[str, str]
    #: Losses within the margin, below all colours of `LOSSES`.
    within_margin: str
    #: The marks of settings by their states (`kvatlas.figures.marks`), and what is recommended.
    states: Mapping[str, str]
    picked: str
    #: The band of losses within the margin, and the part of an axis that is drawn closer, behind marks.
    band: str
    closer: str


LIGHT = Palette(
    "#ffffff", "#111111", "#555555", "#a11a1a", ("#eeeeee", "#bbbbbb"), "#e9f1f5",
    {"within": "#00694f", "open": "#5f5f5f", "untested": "#5f5f5f", "beyond": "#b2331a"},
    "#003f8f", "#e3f1ec", "#f2f2f2",
)  # fmt: skip
DARK = Palette(
    "#12161b", "#e3e8ee", "#aab4bf", "#ff9b90", ("#1b2027", "#47505a"), "#83a5b8",
    {"within": "#4fd1a5", "open": "#aab4bf", "untested": "#aab4bf", "beyond": "#ff8a70"},
    "#8ab4ff", "#17312a", "#20262d",
)  # fmt: skip


def scale_limits(values: Sequence[float], centred: bool = False, least: float = 1.0) -> tuple[float, float]:
    """Return the smallest and the largest value, `least` apart at least.

    A scale that is widened stays within 0 to 100 where the values do: there are no percentages beyond. A `centred` one
    holds 0, and reaches as far below it as above it where no value is `least` away from it.
    """
    low = min(values, default=0.0)
    high = max(values, default=100.0)
    if centred:
        if max(abs(low), abs(high)) < least:
            return -least, least
        return min(low, 0.0), max(high, 0.0)
    if high - low >= least:
        return low, high
    start = (low + high - least) / 2
    if low >= 0 and high <= 100:
        start = min(max(start, 0.0), 100 - least)
    return start, start + least


@cache
def colour_steps(scale: str) -> list[str]:
    """Return the nine colours, as `#rrggbb`, between which one of `SCALES` mixes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    name, start, end = SCALES[scale]
    return [to_hex(colormaps[name](start + (end - start) * step / 8)) for step in range(9)]


@cache
def colour_map(scale: str) -> LinearSegmentedColormap:
    """Return one of `SCALES` for matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(scale, colour_steps(scale))
