"""Forests: a row for each setting, what it saves at the left, what it loses with its interval beside the margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvatlas.core import Note
from kvatlas.figures import marks, style
from kvatlas.figures.marks import CONTROL, KeyEntry, State
from kvatlas.figures.style import FigureOptions, Line, Margins, finish_texts, make_panels, text_width, wrapped
from kvatlas.stats.numerics.arrays import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvatlas.figures.colours import Palette


# -- the axis of losses ------------------------------------------------------------------------------------------------

#: The share of a panel that the closer part of its axis takes.
_CLOSER_SHARE = 0.2
#: Inches between two ticks.
_TICK_STEP = 0.22


class LossSpan(NamedTuple):
    """A loss in points, with the ends of its interval where they are known."""

    value: float
    low: float | None = None
    high: float | None = None


def tick_number(value: float) -> str:
    """Return a value as it stands on an axis, with a true minus."""
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class LossAxis:
    """The axis of losses: from `low` to `high`, and so many times closer beyond `turn`."""

    low: float
    turn: float
    high: float
    closer: float = 1.0

    @classmethod
    def of(cls, spans: Sequence[LossSpan], margin: float | None, others: Sequence[float] = ()) -> LossAxis:
        """Return the axis of losses and `others` without intervals: closer beyond those near the margin, if any."""
        lows = [span.value if span.low is None else span.low for span in spans]
        highs = [span.value if span.high is None else span.high for span in spans]
        reach = max([*highs, *others])
        if margin is None:
            room = 0.04 * (max(highs) - min(lows)) or 1.0
            return cls(min(lows) - room, max(highs) + room, max(highs) + room)

        low = min(-0.6 * margin, *(value - 0.1 * margin for value in lows))
        near = [high for span, high in zip(spans, highs, strict=True) if span.value <= 2 * margin]
        turn = 1.05 * max([2 * margin, *near])
        if reach <= 2.5 * turn:
            high = max(1.3 * margin, 1.03 * reach)
            return cls(low, high, high)
        high = 1.03 * reach
        width = (turn - low) * _CLOSER_SHARE / (1 - _CLOSER_SHARE)
        return cls(low, turn, high, (high - turn) / width)

    @property
    def words(self) -> str:
        """A clause that says where the axis is closer, if it is."""
        words = f"beyond {self.turn:.0f} points the axis is {self.closer:.0f} times closer (grey)"
        return words if self.closer > 1 else ""

    def forward(self, values: Floats) -> Floats:
        """Return the places of losses on paper."""
        values = np.asarray(values, float)
        return np.where(values <= self.turn, values, self.turn + (values - self.turn) / self.closer)

    def inverse(self, places: Floats) -> Floats:
        """Return the losses at places on paper."""
        places = np.asarray(places, float)
        return np.where(places <= self.turn, places, self.turn + (places - self.turn) * self.closer)

    def place(self, value: float) -> float:
        """Return the place of a loss on paper, from 0 to 1."""
        low, here, high = self.forward(np.array([self.low, value, self.high]))
        return float((here - low) / (high - low))

    def ticks(self, inches: float) -> list[float]:
        """Return round values, no two of them nearer than a step."""
        beyond = style.round_values(self.turn, self.high) if self.closer > 1 else []
        found: list[float] = []
        # The last value beyond the turn goes before those between.
        for value in [*style.round_values(self.low, self.turn), *reversed(beyond)]:
            if all(inches * abs(self.place(value) - self.place(other)) > _TICK_STEP for other in found):
                found.append(value)
        return sorted(found)


def draw_margin(
    axes: Axes, axis: LossAxis, margin: float, is_proven: bool, palette: Palette, is_vertical: bool = False
) -> str:
    """Draw the line of the margin with the reference at 0 and the closer part, and return the colour of the margin.

    Where a setting `is_proven` to stay within the margin it has a band. An axis that `is_vertical` has losses downward.
    """
    line = axes.axhline if is_vertical else axes.axvline
    span = axes.axhspan if is_vertical else axes.axvspan
    colour = palette.states[State.WITHIN] if is_proven else palette.soft
    if is_proven:
        span(axis.low, margin, color=palette.band, linewidth=0, zorder=0)
    line(margin, color=colour, linewidth=1.1, zorder=1, gid="margin")
    line(0, color=palette.ink, linewidth=0.6, zorder=1)
    if axis.closer > 1:
        span(axis.turn, axis.high, color=palette.closer, linewidth=0, zorder=0)
    return colour


# -- rows --------------------------------------------------------------------------------------------------------------

#: Inches of a row, of the values below a panel, and between columns of names.
_ROW = 0.19
_BELOW = 0.36
_GAP = 0.1
#: Inches of the marks of a panel at least, beside another one.
_LEAST_WIDTH = 1.7
#: Inches of a panel's marks where there is room.
_MOST_WIDTH = 3.6
#: The share of a figure's width that a column of names takes at most.
_NAMES = 0.4


@dataclass(frozen=True)
class Row:
    """A row of a forest: a text for each column, what is lost in points with its interval, and the state.

    Without a state it is a difference, filled where it `is_proven` to be one. `control` is what the control of the same
    parameters loses, `note` a remark beside the interval. The `picked` row has the box, the `nearest` one is bold.
    """

    names: tuple[str, ...]
    loss: LossSpan
    state: State | None = None
    control: float | None = None
    note: str = ""
    is_picked: bool = False
    is_nearest: bool = False
    is_proven: bool = False


@dataclass(frozen=True)
class RowPanel:
    """A panel of rows under its name and `facts`; the columns of names have headings, the margin is in points."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Row]
    margin: float | None = None
    facts: str = ""


def forest_figure(
    panels: Sequence[RowPanel],
    label: str,
    *,
    reference: str = "full",
    control: str = "",
    key: Sequence[KeyEntry] = (),
    title: str = "",
    about: Sequence[str] = (),
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return panels of rows on one axis of a label; `key` explains their marks, `control` names the grey ticks."""
    options = options or FigureOptions()
    with options.applied():
        # Columns are as wide as their widest value; long names break.
        columns = [_column_widths(panel, options) for panel in panels]
        names_width = max(sum(widths) + _GAP * len(widths) for widths in columns)
        least = names_width + 0.2 + _LEAST_WIDTH
        across = max(style.panels_in_row(len(panels), 3, lambda count: options.widest / count >= least), 1)
        width = options.inches or min(across * (names_width + _MOST_WIDTH), options.widest)
        left = style.EDGE + names_width + 0.04
        room = names_width + _LEAST_WIDTH
        texts = [_lines_above(panel, widths, room, options) for panel, widths in zip(panels, columns, strict=True)]
        headings = max(map(style.height_of, chain.from_iterable(of_panel for _, of_panel in texts)))
        above = max(style.height_of(names) for names, _ in texts) + headings + 0.08
        margins = Margins(left, 0.12, names_width + 0.22, above, _BELOW)
        lines = []
        for panel, widths in zip(panels, columns, strict=True):
            lines += [_lines_of(row, widths) for row in panel.rows]
        row_height = max(_ROW, (max(lines) + 0.3) * style.SMALL_TYPE * style.LINE)
        # Of many rows the type is as small as it may be, so that they fit a page.
        most_rows = max(len(panel.rows) for panel in panels)
        if most_rows * row_height > style.PAGE_HEIGHT:
            row_height = max(style.LEAST_TYPE * style.LINE, style.PAGE_HEIGHT / most_rows)
        rows = list(chain.from_iterable(panel.rows for panel in panels))
        controls = [row.control for row in rows if row.control is not None]
        axis = LossAxis.of([row.loss for row in rows], panels[0].margin, controls)
        figure, grid = make_panels(
            options,
            (width, row_height * most_rows),
            len(panels),
            across,
            margins,
            title=title,
            about=[*about, axis.words],
            notes=notes,
            key=key,
        )
        for axes, panel, widths, (names, of_panel) in zip(grid, panels, columns, texts, strict=True):
            _draw_panel(axes, panel, axis, widths, (reference, control), options)
            style.write_above(axes, names, (-72 * names_width, 72 * headings + 6))
            for x, column in zip(_ends_of_columns(widths), of_panel, strict=True):
                style.write_above(axes, column, (72 * x, 4), "right")
            axes.set_xlabel(options.named(label), fontsize=style.NAME_TYPE, labelpad=2)
        finish_texts(figure, options)
        return figure


def _column_widths(panel: RowPanel, options: FigureOptions) -> list[float]:
    """Return the inches of the columns of names; a heading takes two lines where its values are narrow."""
    widths = []
    for column, heading in enumerate(panel.columns):
        values = [text_width(row.names[column], bold=True) for row in panel.rows]
        name = options.named(heading)
        words = [text_width(word) for word in name.split()]
        # A heading has two lines or so.
        widths.append(min(max([*values, *words, 0.72 * text_width(name)]), _NAMES * options.widest))
    return widths


def _ends_of_columns(widths: Sequence[float]) -> list[float]:
    """Return the right ends of columns of names in inches from the panel, which is right of them."""
    steps = [-0.06, *(-(width + _GAP) for width in reversed(widths[1:]))]
    return list(accumulate(steps))[::-1]


def _lines_above(
    panel: RowPanel, widths: Sequence[float], room: float, options: FigureOptions
) -> tuple[list[Line], list[list[Line]]]:
    """Return the name of a panel with its facts, for a width in inches, and the heading of each column, in lines."""
    soft = options.colours.soft
    names = style.text_lines(options.named(panel.name), room, style.NAME_TYPE, options.colours.ink, "bold")
    names += style.text_lines(options.in_words(panel.facts), room, style.SMALL_TYPE, soft)
    headings = []
    for heading, width in zip(panel.columns, widths, strict=True):
        headings.append(style.text_lines(options.named(heading), width, style.SMALL_TYPE, soft))
    return names, headings


def _lines_of(row: Row, widths: Sequence[float]) -> int:
    """Return the number of lines of the names of a row."""
    return max((len(wrapped(name, width, bold=True)) for name, width in zip(row.names, widths, strict=True)), default=1)


def _draw_panel(
    axes: Axes,
    panel: RowPanel,
    axis: LossAxis,
    widths: Sequence[float],
    sides: tuple[str, str],
    options: FigureOptions,
) -> None:
    """Draw the rows of a panel, the first one on top, with the margin, and the names left of it.

    `sides` name the reference at 0 and the control.
    """
    palette = options.colours
    inches, high = axes.get_position().size * axes.figure.get_size_inches()  # type: ignore[union-attr]
    size = min(style.SMALL_TYPE, high / len(panel.rows) / style.LINE)
    axes.set_xscale("function", functions=(axis.forward, axis.inverse))
    axes.set(xlim=(axis.low, axis.high), ylim=(len(panel.rows) - 0.5, -0.5), yticks=[])
    axes.minorticks_off()
    ticks = axis.ticks(inches)
    axes.set_xticks(ticks, list(map(tick_number, ticks)))
    axes.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE)
    axes.spines[["top", "left", "right"]].set_visible(False)

    heads = []
    if panel.margin is not None:
        is_proven = any(row.state is State.WITHIN for row in panel.rows)
        colour = draw_margin(axes, axis, panel.margin, is_proven, palette)
        heads = [(0.0, options.named(sides[0]), palette.ink), (panel.margin, f"margin {panel.margin:g}", colour)]
    else:
        axes.axvline(0, color=palette.ink, linewidth=0.6, zorder=1)
    if axis.closer > 1 and any(row.control is not None for row in panel.rows):
        heads.append(((axis.turn + axis.high) / 2, sides[1], palette.soft))
    _write_heads(axes, heads, axis, inches)

    for place, row in enumerate(panel.rows):
        _draw_row(axes, row, place, options)
        _write_names(axes, row, place, widths, size, options)


def _write_heads(axes: Axes, heads: Sequence[tuple[float, str, str]], axis: LossAxis, inches: float) -> None:
    """Write what lines stand for above a panel; two that are near each other stand at either side."""
    sides = ["center"] * len(heads)
    if len(heads) > 1:
        gap = inches * (axis.place(heads[1][0]) - axis.place(heads[0][0]))
        if gap < (text_width(heads[0][1]) + text_width(heads[1][1])) / 2 + 0.06:
            sides[:2] = ["right", "left"]
    for (value, text, colour), side in zip(heads, sides, strict=True):
        axes.annotate(
            text, (value, 1), (0, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            ha=side, va="baseline", fontsize=style.SMALL_TYPE, color=colour,
        )  # fmt: skip


def _draw_row(axes: Axes, row: Row, place: int, options: FigureOptions) -> None:
    """Draw the mark of a row with its interval, its control and its note."""
    palette = options.colours
    ends = None
    value, low, high = row.loss
    if low is not None and high is not None and options.intervals is not False:
        ends = (low, high)
    if row.state is not None:
        marks.draw_setting(axes, (value, place), row.state, palette, horizontal=ends)
    else:
        axes.plot(ends or (), (place, place) if ends else (), color=palette.ink, linewidth=1.0, zorder=3)
        face = palette.ink if row.is_proven else palette.ground
        axes.plot(value, place, "o", color=palette.ink, mfc=face, markersize=6, markeredgewidth=1.2, zorder=4)
    if row.control is not None:
        marks.add_mark(axes, (row.control, place), CONTROL, palette, 6.5)
    if row.note:
        axes.annotate(
            row.note, (value if high is None else high, place), (4, 0), textcoords="offset points",
            va="center", fontsize=style.LEAST_TYPE + 0.5, color=palette.soft,
            bbox={"facecolor": palette.ground, "edgecolor": "none", "pad": 0.6}, zorder=3.5,
        )  # fmt: skip


def _write_names(
    axes: Axes, row: Row, place: int, widths: Sequence[float], size: float, options: FigureOptions
) -> None:
    """Write the names of a row in type of a size left of its panel; a box is around the picked row and its mark."""
    from matplotlib.patches import Rectangle

    palette = options.colours
    is_bold = row.is_picked or row.is_nearest
    if row.is_picked:
        inches = axes.get_position().width * axes.figure.get_figwidth()  # type: ignore[union-attr]
        start = (-sum(widths) - _GAP * len(widths) - 0.02) / inches
        box = Rectangle(
            (start, place - 0.46), 1 - start, 0.92, transform=axes.get_yaxis_transform(), fill=False,
            edgecolor=palette.picked, linewidth=1.4, clip_on=False, zorder=6, gid="picked",
        )  # fmt: skip
        axes.add_patch(box)
    for name, width, x in zip(row.names, widths, _ends_of_columns(widths), strict=True):
        axes.annotate(
            "\n".join(wrapped(name, width, bold=True)), (0, place), (72 * x, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="center", fontsize=size, linespacing=1.1,
            fontweight="bold" if is_bold else "normal", color=palette.picked if row.is_picked else palette.ink,
        )  # fmt: skip
