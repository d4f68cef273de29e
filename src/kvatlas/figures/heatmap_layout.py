"""The layout of heatmaps: what differs between panels names rows and columns, sizes of cells and type, margins."""

import math
from collections.abc import Sequence
from itertools import chain, product
from typing import NamedTuple

from kvatlas.core import KvatlasError
from kvatlas.figures import style
from kvatlas.figures.panels import Baseline, Panel
from kvatlas.figures.style import FigureOptions, Line, Margins, font_size, text_width, wrapped
from kvatlas.stats.estimates import common, problem_count
from kvatlas.text import axis_label, counted, model_name

# -- arrangement -------------------------------------------------------------------------------------------------------


class PanelName(NamedTuple):
    """The fields of a panel's name."""

    model: str
    benchmark: str
    policy: str
    measure: str


class Arrangement(NamedTuple):
    """Panels in their order on the figure, with the words around them.

    `rows` are the names of rows, empty where each panel has its whole name in `names`; in a grid each of `names` is
    that of a column, and stands above the first row. `subject` and `about` are for all panels.
    """

    panels: Sequence[Panel]
    names: Sequence[str]
    rows: Sequence[str]
    subject: str
    about: Sequence[str]

    @property
    def is_grid(self) -> bool:
        """Return whether rows and columns are named once."""
        return bool(self.rows)

    @property
    def columns(self) -> int:
        """The number of panels in a row of a grid."""
        return len(self.panels) // len(self.rows)


def arranged(panels: Sequence[Panel], options: FigureOptions) -> Arrangement:
    """Return panels in rows and columns where they fill these, else in their own order."""
    by_panel = [name_of(panel) for panel in panels]
    differing = _differing_fields(by_panel)
    first = by_panel[0]

    # The model, the policy and the KV budget that all panels have, for the title.
    shared = [field for field in ("model", "policy") if getattr(first, field) and field not in differing]
    subject = " under ".join(options.named(getattr(first, field)) for field in shared)
    cells = chain.from_iterable(panel.map.cells.values() for panel in panels)
    budgets = {cell.setting.values.get("kv_budget") for cell in cells} - {None}
    if len(budgets) == 1 and "KV budget" not in subject:
        subject = ", ".join(filter(None, [subject, f"KV budget {budgets.pop()}"]))

    # The clauses about all panels: the measure, the benchmark, the problems.
    about = ["units as named"]
    if "measure" not in differing:
        about = [f"{options.named(first.measure)} {panels[0].unit}"]
    if differing and "benchmark" not in differing:
        about.append(options.named(first.benchmark))
    problems = common([problem_count(panel.map) for panel in panels])
    if problems is not None:
        about.append(counted(problems, "problem"))

    if options.plain:
        # As papers have them, `R1-Llama | AIME24`, with the policy where that differs.
        fields = ["model", "benchmark", *(field for field in ("policy", "measure") if field in differing)]
        names = [_joined_name(name, fields, options, " | ") for name in by_panel]
        return Arrangement(panels, names, (), subject, about)
    series = Arrangement(panels, _names_that_differ(panels, options), (), subject, about)

    # A grid, where panels fill its rows and columns. The first field that differs names columns; models never do.
    column_fields = [field for field in differing if field != "model"][:1]
    row_fields = [field for field in differing if field not in column_fields]
    if not column_fields or not row_fields:
        return series
    places = {}
    for panel, name in zip(panels, by_panel, strict=True):
        places[_joined_name(name, row_fields, options), _joined_name(name, column_fields, options)] = panel
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    in_rows = [places[place] for place in product(rows, columns) if place in places]
    if not len(in_rows) == len(rows) * len(columns) == len(panels):
        return series
    return series._replace(panels=in_rows, names=columns * len(rows), rows=rows)


def name_of(panel: Panel) -> PanelName:
    """Return model, benchmark, policy and measure of a panel."""
    benchmark = f"{panel.map.benchmark} benchmarks" if panel.map.is_mean else panel.map.benchmark
    return PanelName(model_name(panel.map.model), benchmark, panel.map.policy_words, panel.label)


def _differing_fields(names: Sequence[PanelName]) -> list[str]:
    """Return the fields in which names differ."""
    by_field = zip(PanelName._fields, zip(*names, strict=True), strict=True)
    return [field for field, values in by_field if len(set(values)) > 1]


def _joined_name(name: PanelName, fields: Sequence[str], options: FigureOptions, between: str = ", ") -> str:
    return between.join(options.named(getattr(name, field)) for field in fields if getattr(name, field))


def _names_that_differ(panels: Sequence[Panel], options: FigureOptions) -> list[str]:
    """Return the name of each panel: what differs, and of one panel the benchmark."""
    by_panel = [name_of(panel) for panel in panels]
    differing = _differing_fields(by_panel)
    return [_joined_name(name, differing or ["benchmark"], options) for name in by_panel]


# -- sizes -------------------------------------------------------------------------------------------------------------

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
_BAR_GAP = 0.06
_BAR_WIDTH = 0.07


class Tick(NamedTuple):
    """A value on a colour bar with its text, and the baseline that it is of."""

    value: float
    text: str
    baseline: Baseline | None = None


class HeatmapLayout:
    """The sizes of panels in rows and of their texts: inches of figure, panels and margins, points of type.

    Panels of a row are `joined` if they share the vertical axis, those of a column `joined_below` if they share the
    horizontal one. They have `one_bar` at the end of each row, or one each. Points are those of the vertical axis'
    `label`, of a `value` and of an `interval`, 0 for none. `above` has the lines over each panel. Raises KvatlasError
    if there is no room for intervals that were asked for, and for a large grid that is too wide.
    """

    value = 0.0
    interval = 0.0
    above: Sequence[Sequence[Line]] = ()

    def __init__(
        self,
        arrangement: Arrangement,
        scales: Sequence[tuple[float, float]],
        ticks: Sequence[Sequence[Tick]],
        options: FigureOptions,
    ) -> None:
        self.arrangement = arrangement
        self.panels = arrangement.panels
        self.scales = scales
        self.options = options
        cells = list(chain.from_iterable(panel.cells.values() for panel in self.panels))
        self.columns = max(len(panel.map.axes[1][1]) for panel in self.panels)
        self.most_rows = max(len(panel.map.axes[0][1]) for panel in self.panels)
        self.values = [cell.text for cell in cells]
        self.intervals = [cell.small for cell in cells if cell.small] if options.intervals else []

        row_height = _TALL_ROW_HEIGHT if self.intervals else _ROW_HEIGHT
        self.high = max(row_height * self.most_rows, _PANEL_HEIGHT)
        self.labels = [options.named(axis_label(panel.map.axes[0][0])) for panel in self.panels]
        self.label = self._label_type(LABEL_TYPE)
        self.joined = len({panel.map.axes[0] for panel in self.panels}) == 1
        self._set_sides(ticks)
        self.across = self._panels_in_row(ticks)
        # A panel over an empty place has its own values below it.
        is_full = len(self.panels) % self.across == 0
        self.joined_below = is_full and len({panel.map.axes[1] for panel in self.panels}) == 1

        # The figure is as wide as it needs, or as the options say.
        panel_width = max(_CELL_WIDTH * self.columns, _PANEL_WIDTH)
        between = (self.across - 1) * self.margins.between
        natural = self.margins.left + self.margins.right + self.across * panel_width + between
        self.width = options.inches or min(max(natural, style.WIDTHS[1]), options.widest)
        if self.fits(self.across):
            self.value, interval = self.type_sizes(self.across, self.width)
            self.interval = interval if self.intervals else 0.0

    @property
    def has_one_scale(self) -> bool:
        """Return whether all panels have the same colour scale."""
        return len(set(self.scales)) == 1

    @property
    def has_column_bars(self) -> bool:
        """Return whether the panels of each column of a grid have one scale, and its bar."""
        if not self.arrangement.is_grid or self.one_bar:
            return False
        return all(scale == self.scales[index % self.across] for index, scale in enumerate(self.scales))

    @property
    def inner(self) -> float:
        """Inches of a panel's width."""
        return self.margins.inner(self.width, self.across)

    @property
    def bar_sides(self) -> tuple[float, float]:
        """The sides of the colour bar right of a panel, in widths of the panel."""
        left = 1 + _BAR_GAP / self.inner
        return left, left + _BAR_WIDTH / self.inner

    @property
    def label_room(self) -> float:
        """The room for the label of the vertical axis: it may stand out a little beyond a low panel."""
        return max(self.high, _PANEL_HEIGHT)

    def row_name_lines(self, name: str) -> list[str]:
        """Return the lines of the name of a row of panels."""
        return wrapped(name, max(self.high, 0.6), style.NAME_TYPE, bold=True)

    def _label_type(self, largest: float) -> float:
        """Return the points of the vertical axis' label."""
        return max(style.LEAST_TYPE, font_size(self.label_room, self.labels, largest))

    def _fits_one_bar(self) -> bool:
        """Return whether one bar can stand for a row: if the baselines on it are the same in all panels of the row."""
        across = self.arrangement.columns if self.arrangement.is_grid else len(self.panels)
        for start in range(0, len(self.panels), across):
            on_bars = {panel.baselines for panel in self.panels[start : start + across] if not panel.centred}
            if len(on_bars) > 1:
                return False
        return self.has_one_scale and not self.options.plain

    def _set_sides(self, ticks: Sequence[Sequence[Tick]]) -> None:
        """Have the bars and the margins at the sides of panels that their arrangement needs."""
        self.one_bar = self._fits_one_bar()
        # Left: the name of the row, the label of the axis, its values.
        label_lines = max(len(wrapped(text, self.label_room, self.label)) for text in self.labels)
        rows = chain.from_iterable(panel.map.axes[0][1] for panel in self.panels)
        row_ticks = max(text_width(style.tick_text(row), LABEL_TYPE) for row in rows)
        axis = label_lines * self.label * style.LINE + 0.04 + row_ticks + 0.06
        left = style.EDGE + axis
        name_lines = max((len(self.row_name_lines(name)) for name in self.arrangement.rows), default=0)
        if name_lines:
            left += name_lines * style.NAME_TYPE * style.LINE + 0.06

        # Right: the colour bar with its texts.
        bar = _BAR_GAP + _BAR_WIDTH + 0.055 + max(text_width(tick.text) for tick in chain.from_iterable(ticks))
        if self.options.plain:
            bar += style.SMALL_TYPE * style.LINE + 0.04

        between = _GAP
        if not self.joined:
            between += style.EDGE + axis
        if not self.one_bar:
            between += bar
        self.margins = Margins(left, style.EDGE + bar, between, 0, 0)

    def type_sizes(self, across: int, width: float) -> tuple[float, float]:
        """Return the points of values and of intervals."""
        cell_width = self.margins.inner(width, across) / self.columns
        value_size = font_size(cell_width, self.values, _VALUE_TYPE, bold=True)
        return value_size, font_size(cell_width, self.intervals, _INTERVAL_TYPE)

    def fits(self, across: int) -> bool:
        """Return whether numbers are legible with so many panels in a row."""
        return min(self.type_sizes(across, self.options.widest)) >= style.LEAST_TYPE

    def _panels_in_row(self, ticks: Sequence[Sequence[Tick]]) -> int:
        """Return as many panels in a row as leave numbers legible; rows of a grid stay whole.

        A grid that is too wide becomes a series of panels under their whole names.
        """
        count = len(self.panels)
        if self.arrangement.is_grid:
            columns = self.arrangement.columns
            if self.fits(columns):
                return columns
            if count > _MOST_WITHOUT_GRID:
                raise KvatlasError(
                    f"{count} maps have no room on one figure in rows of {columns}. Draw "
                    "the means of benchmarks (--mean), or one policy at a time (--policy NAME)."
                )
            names = _names_that_differ(self.panels, self.options)
            self.arrangement = self.arrangement._replace(names=names, rows=())
            self._set_sides(ticks)

        # Rows begin with the same policy, if there are several.
        most = 4 if count <= 8 else math.ceil(math.sqrt(count))
        policies = len({panel.map.policy for panel in self.panels})
        if policies > 1:
            whole_rows = [size for size in range(policies, most + 1, policies) if count % size == 0]
            most = whole_rows[-1] if whole_rows else most

        across = style.panels_in_row(count, most, self.fits)
        if not across and self.intervals:
            raise KvatlasError("--look intervals=true: the cells are too narrow for a second number; leave it out.")
        # A panel alone has no numbers where they do not fit.
        return across or 1

    def set_above(self, above: Sequence[Sequence[Line]]) -> None:
        """Have lines over the panels, and rows that fit a page with them."""
        self.above = above
        # In a grid the first row has the names of columns, too.
        first = 0.0
        lines_above = max(map(style.height_of, above)) + 0.1
        if self.arrangement.is_grid:
            top = lines_above
            lines_above = max(map(style.height_of, above[self.across :]), default=0.0) + 0.1
            first = max(top - lines_above, 0.0)

        # The values and the label below a panel; joined panels have them once, below the last row.
        labels = [self.options.named(axis_label(panel.map.axes[1][0])) for panel in self.panels]
        label_lines = max(len(wrapped(text, self.inner, LABEL_TYPE)) for text in labels)
        below = 0.12 + LABEL_TYPE / 72 + label_lines * LABEL_TYPE * style.LINE
        last = 0.0
        if self.joined_below:
            last = below
            below = 0.0
        self.margins = self.margins._replace(above=lines_above, below=below, first=first, last=last)

        # All rows of panels fit a page, where their cells stay legible.
        room = style.PAGE_HEIGHT - 0.6 - first - last
        fitting = room / math.ceil(len(self.panels) / self.across) - lines_above - below
        least = _LEAST_ROW_HEIGHT * self.most_rows * (2 if self.interval else 1)
        self.high = min(self.high, max(fitting, least))
        self.label = self._label_type(self.label)
        size = min(self.value, 72 * 0.62 * self.high / self.most_rows)
        self.value = size if size >= style.LEAST_TYPE else min(self.value, style.LEAST_TYPE)
