"""The layout of heatmaps: panels in a row, sizes of cells and type, margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kvatlas.core import KvatlasError
from kvatlas.figures import style
from kvatlas.figures.arrangement import Arrangement
from kvatlas.figures.panels import Baseline, Panel
from kvatlas.figures.style import FigureOptions, Line, Margins, font_size, text_width, wrapped
from kvatlas.text import axis_label

#: Inches of a cell's width where there is room.
_CELL_WIDTH = 0.44
#: Inches of a panel's width where there is room, at least.
_PANEL_WIDTH = 1.6
#: Inches of a row of cells, of one whose cells have a second line, and of one where a page is full.
_ROW_HEIGHT = 0.25
_TALL_ROW_HEIGHT = 0.34
_LEAST_ROW_HEIGHT = 0.13
#: Inches of all rows, at least.
_PANEL_HEIGHT = 0.8
#: Points of a value, of an interval, and of an axis' label at most.
_VALUE_TYPE = 8.0
_INTERVAL_TYPE = 5.6
LABEL_TYPE = 7.0
#: Panels whose grid may become a series, at most.
_MOST_WITHOUT_GRID = 16
#: Inches between panels.
_GAP = 0.12
#: Inches from a panel to its colour bar, and of the bar.
BAR_GAP = 0.06
BAR_WIDTH = 0.07


class Tick(NamedTuple):
    """A value on a colour bar with its text, and the baseline that it is of."""

    value: float
    text: str
    baseline: Baseline | None = None


class HeatmapLayout(NamedTuple):
    """Panels in a row; inches of the figure's width and of a panel's height.

    Points are those of the vertical axis' label, of values and of intervals, 0 for none. Panels of a row are `joined`
    if they share the vertical axis, those of a column `joined_below` if they share the horizontal one. They have
    `one_bar` at the end of each row, or one each. `above` has the lines over each panel.
    """

    arrangement: Arrangement
    across: int
    width: float
    high: float
    margins: Margins
    joined: bool
    joined_below: bool
    one_bar: bool
    label: float
    value: float
    interval: float
    above: Sequence[Sequence[Line]] = ()

    @property
    def inner(self) -> float:
        """Inches of a panel's width."""
        return self.margins.inner(self.width, self.across)

    def with_lines_above(self, above: Sequence[Sequence[Line]], options: FigureOptions) -> HeatmapLayout:
        """Return the layout with lines over the panels, and rows that fit a page with them."""
        panels = self.arrangement.panels
        # In a grid the first row has the names of columns, too.
        first = 0.0
        lines_above = max(map(style.height_of, above)) + 0.1
        if self.arrangement.is_grid:
            top = lines_above
            lines_above = max(map(style.height_of, above[self.across :]), default=0.0) + 0.1
            first = max(top - lines_above, 0.0)

        # The values and the label below a panel; joined panels have them once, below the last row.
        labels = [options.named(axis_label(panel.map.axes[1][0])) for panel in panels]
        label_lines = max(len(wrapped(text, self.inner, LABEL_TYPE)) for text in labels)
        below = 0.12 + LABEL_TYPE / 72 + label_lines * LABEL_TYPE * style.LINE
        last = 0.0
        if self.joined_below:
            last = below
            below = 0.0
        margins = self.margins._replace(above=lines_above, below=below, first=first, last=last)

        # All rows of panels fit a page, where their cells stay legible.
        most_rows = max(len(panel.map.axes[0][1]) for panel in panels)
        room = style.PAGE_HEIGHT - 0.6 - margins.first - margins.last
        fitting = room / math.ceil(len(panels) / self.across) - margins.above - margins.below
        least = _LEAST_ROW_HEIGHT * most_rows * (2 if self.interval else 1)
        high = min(self.high, max(fitting, least))

        size = min(self.value, 72 * 0.62 * high / most_rows)
        value = size if size >= style.LEAST_TYPE else min(self.value, style.LEAST_TYPE)
        label = max(style.LEAST_TYPE, font_size(label_room(high), _vertical_labels(panels, options), self.label))
        return self._replace(margins=margins, above=above, high=high, value=value, label=label)


def heatmap_layout(
    arrangement: Arrangement,
    ticks: Sequence[Sequence[Tick]],
    one_scale: bool,
    options: FigureOptions,
) -> HeatmapLayout:
    """Return the layout with as many panels in a row as leave numbers legible; rows of a grid stay whole.

    A grid that is too wide becomes a series of panels under their whole names. Raises KvatlasError if there is no room
    for intervals that were asked for, and for a large grid that is too wide.
    """
    if arrangement.is_grid:
        sizes = _PanelSizes(arrangement, ticks, one_scale, options)
        if sizes.fits(arrangement.columns):
            return sizes.layout(arrangement.columns)
        if len(arrangement.panels) > _MOST_WITHOUT_GRID:
            raise KvatlasError(
                f"{len(arrangement.panels)} maps have no room on one figure in rows of {arrangement.columns}. Draw "
                "the means of benchmarks (--mean), or one policy at a time (--policy NAME)."
            )
        arrangement = arrangement.without_grid(options)
    sizes = _PanelSizes(arrangement, ticks, one_scale, options)

    # Rows begin with the same policy, if there are several.
    count = len(arrangement.panels)
    most = 4 if count <= 8 else math.ceil(math.sqrt(count))
    policies = len({panel.map.policy for panel in arrangement.panels})
    if policies > 1:
        whole_rows = [size for size in range(policies, most + 1, policies) if count % size == 0]
        most = whole_rows[-1] if whole_rows else most

    across = style.panels_in_row(count, most, sizes.fits)
    if across:
        return sizes.layout(across)
    if sizes.intervals:
        raise KvatlasError("--look intervals=true: the cells are too narrow for a second number; leave it out.")
    # A panel alone, without numbers.
    return sizes.layout(1)._replace(value=0.0, interval=0.0)


class _PanelSizes:
    """The sizes of an arrangement's panels and texts, which depend on the number of panels in a row."""

    def __init__(
        self,
        arrangement: Arrangement,
        ticks: Sequence[Sequence[Tick]],
        one_scale: bool,
        options: FigureOptions,
    ) -> None:
        self.arrangement = arrangement
        self.options = options
        panels = arrangement.panels
        cells = list(chain.from_iterable(panel.cells.values() for panel in panels))
        self.columns = max(len(panel.map.axes[1][1]) for panel in panels)
        self.values = [cell.text for cell in cells]
        self.intervals = [cell.small for cell in cells if cell.small] if options.intervals else []

        row_height = _TALL_ROW_HEIGHT if self.intervals else _ROW_HEIGHT
        self.high = max(row_height * max(len(panel.map.axes[0][1]) for panel in panels), _PANEL_HEIGHT)
        labels = _vertical_labels(panels, options)
        self.label = max(style.LEAST_TYPE, font_size(label_room(self.high), labels, LABEL_TYPE))
        self.joined = len({panel.map.axes[0] for panel in panels}) == 1

        # One bar can have the baselines of a row as its ticks, if they are the same in all of its panels.
        self.one_bar = one_scale
        across = arrangement.columns if arrangement.is_grid else len(panels)
        for start in range(0, len(panels), across):
            on_bars = {panel.baselines for panel in panels[start : start + across] if not panel.centred}
            self.one_bar = self.one_bar and len(on_bars) <= 1
        self.margins = self._side_margins(labels, ticks)

    def _side_margins(self, labels: Sequence[str], ticks: Sequence[Sequence[Tick]]) -> Margins:
        """Return the margins at the sides of panels."""
        # Left: the name of the row, the label of the axis, its values.
        label_lines = max(len(wrapped(text, label_room(self.high), self.label)) for text in labels)
        rows = chain.from_iterable(panel.map.axes[0][1] for panel in self.arrangement.panels)
        row_ticks = max(text_width(style.tick_text(row), LABEL_TYPE) for row in rows)
        axis = label_lines * self.label * style.LINE + 0.04 + row_ticks + 0.06
        left = style.EDGE + axis
        name_lines = max((len(row_name_lines(name, self.high)) for name in self.arrangement.rows), default=0)
        if name_lines:
            left += name_lines * style.NAME_TYPE * style.LINE + 0.06

        # Right: the colour bar with its texts.
        bar = BAR_GAP + BAR_WIDTH + 0.055 + max(text_width(tick.text) for tick in chain.from_iterable(ticks))
        if self.options.plain:
            bar += style.SMALL_TYPE * style.LINE + 0.04
        right = style.EDGE + bar

        between = _GAP
        if not self.joined:
            between += style.EDGE + axis
        if not self.one_bar:
            between += bar
        return Margins(left, right, between, 0, 0)

    def type_sizes(self, across: int, width: float) -> tuple[float, float]:
        """Return the points of values and of intervals."""
        cell_width = self.margins.inner(width, across) / self.columns
        value_size = font_size(cell_width, self.values, _VALUE_TYPE, bold=True)
        return value_size, font_size(cell_width, self.intervals, _INTERVAL_TYPE)

    def fits(self, across: int) -> bool:
        """Return whether numbers are legible with so many panels in a row."""
        return min(self.type_sizes(across, self.options.widest)) >= style.LEAST_TYPE

    def layout(self, across: int) -> HeatmapLayout:
        """Return the layout with so many panels in a row."""
        # The width of a figure that has all the room that it needs.
        panels = self.arrangement.panels
        margins = self.margins
        panel_width = max(_CELL_WIDTH * self.columns, _PANEL_WIDTH)
        natural = margins.left + margins.right + across * panel_width + (across - 1) * margins.between
        width = self.options.inches or min(max(natural, style.WIDTHS[1]), self.options.widest)

        value, interval = self.type_sizes(across, width)
        return HeatmapLayout(
            self.arrangement,
            across,
            width,
            self.high,
            margins,
            self.joined,
            # A panel over an empty place has its own values below it.
            len({panel.map.axes[1] for panel in panels}) == 1 and len(panels) % across == 0,
            self.one_bar,
            self.label,
            value,
            interval if self.intervals else 0.0,
        )


def label_room(high: float) -> float:
    """Return the room for the label of the vertical axis: it may stand out a little beyond a low panel."""
    return max(high, _PANEL_HEIGHT)


def row_name_lines(name: str, high: float) -> list[str]:
    """Return the lines of the name of a row of panels of this height."""
    return wrapped(name, max(high, 0.6), style.NAME_TYPE, bold=True)


def _vertical_labels(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    return [options.named(axis_label(panel.map.axes[0][0])) for panel in panels]
