"""Lines: a metric along the one axis of a sweep, a panel for each model and benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import Cell, KvatlasError, Map, grouped
from kvatlas.figures import colours, style
from kvatlas.figures.panels import Unit, cost_of
from kvatlas.figures.style import FigureOptions, Margins, line_axes, settle, sheet, text_width, wrapped, write_above
from kvatlas.stats.estimates import common
from kvatlas.stats.maps import POLICY
from kvatlas.text import axis_label, counted, guarded, model_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a panel with its margins where there is room.
_PANEL_WIDTH = 3.4
#: Inches of a panel's height, and of one on a full page.
_PANEL_HEIGHT = 1.6
_LEAST_HEIGHT = 0.7
#: Inches of the values left of a panel and below it.
_LEFT = 0.36
_TICKS = 0.27
#: Inches of the names of lines, at most.
_NAMES = 1.15
#: Inches of a figure with fewer panels in a row.
_NARROW = 5.0
#: Values on an axis that are all named, at most.
_NAMED_VALUES = 8
#: Letters of all names of settings below a panel, at most.
_NAMED_LETTERS = 90
#: Inches of a row of a setting.
_SETTING_ROW = 0.15


class End(NamedTuple):
    """The height at which a line ends, with its name and its colour."""

    height: float
    name: str
    colour: str


class _Point(NamedTuple):
    """A value with its interval: of a metric in percent, or of a cost, which has no interval."""

    value: float
    low: float | None = None
    high: float | None = None


class _Measure(NamedTuple):
    """The metric of curves, or a cost in place of it, with its unit."""

    label: str
    unit: Unit
    cost: str | None = None


def points(curve: Map) -> dict[str, dict[Any, Cell]]:
    """Return the cells of each policy's line by the values of the axis; without an axis all settings as one line."""
    (_, names), (axis, values) = curve.axes
    lines: dict[str, dict[Any, Cell]] = {}
    for name in names:
        for value in values:
            if not axis:
                lines.setdefault("", {})[name] = curve.cells[name, value]
            elif (name, value) in curve.cells:
                lines.setdefault(name, {})[value] = curve.cells[name, value]
    return lines


def line_figure(curves: Sequence[Map], *, cost: str | None = None, options: FigureOptions | None = None) -> Figure:
    """Return one panel for each map of curves, a line with its 95 % band for each policy, baselines as dashed lines.

    With the name of a `cost` its values are plotted, without a band, in place of the metric. An axis whose values are
    text, such as the policies, gets points with bars instead of lines. All panels have one vertical axis from 0. All
    curves have the same axis and the same metric.
    """
    options = options or FigureOptions()
    first = curves[0]
    if not first.axes[1][0] and _names_are_long(first):
        return settings_figure(curves, cost=cost, options=options)
    policies = list(dict.fromkeys(chain.from_iterable(map(points, curves))))
    measure = _measure(curves, cost)
    axis = axis_label(first.axes[1][0] or POLICY)
    with options.applied():
        figure, panels, room = line_panels(
            options,
            _panel_names(curves, options),
            [options.named(name) for name in (*policies, *first.baselines)],
            options.named(axis),
            title=_title(curves, policies, f"{measure.label} by {axis}", options),
            about=_about(curves, measure, options),
            notes=list(chain.from_iterable(curve.notes for curve in curves)),
        )
        top = _top(curves, measure)
        for panel, curve in zip(panels, curves, strict=True):
            panel.set_ylim(0, top)
            panel.set_yticks(style.round_values(0, top))
            ends = _draw_curves(panel, curve, policies, measure, options)
            write_names(panel, ends, room)
        settle(figure, options)
        return figure


def _names_are_long(curve: Map) -> bool:
    """Return whether the names of settings have no room below a panel."""
    names = list(map(str, curve.axes[0][1]))
    return len(names) * max(map(len, names)) > _NAMED_LETTERS


def settings_figure(curves: Sequence[Map], *, cost: str | None = None, options: FigureOptions | None = None) -> Figure:
    """Return one panel for each map of settings without an axis: a row for each setting, its value with the interval.

    Rows stand in the order of the run, and their names left of the first panel of a row.
    """
    options = options or FigureOptions()
    measure = _measure(curves, cost)
    with options.applied():
        across = _settings_across(curves, options)
        rows = [_settings_of(curves[start : start + across]) for start in range(0, len(curves), across)]
        figure, panels = _setting_panels(curves, rows, across, measure, options)
        top = _top(curves, measure)
        most = max(map(len, rows))
        for index, (panel, curve) in enumerate(zip(panels, curves, strict=True)):
            settings = rows[index // across]
            line_axes(panel, options, "both")
            panel.set(xlim=(0, top), ylim=(most - 0.4, -0.6), xticks=style.round_values(0, top), yticks=[])
            for (setting, _), cell in curve.cells.items():
                point = _point(curve, cell, measure.cost)
                _draw_setting(panel, settings.index(setting), point, measure.unit, options)
        settle(figure, options)
        return figure


def _settings_of(curves: Sequence[Map]) -> list[Any]:
    """Return the settings of a row of panels."""
    return list(dict.fromkeys(chain.from_iterable(curve.axes[0][1] for curve in curves)))


def _settings_across(curves: Sequence[Map], options: FigureOptions) -> int:
    """Return the number of panels in a row; models with settings of their own have rows of their own."""
    most = 1 if options.widest < _NARROW else 3
    across = style.panels_in_row(len(curves), most)
    if len({curve.axes[0] for curve in curves}) == 1:
        return across
    by_model = grouped(curves, lambda curve: curve.model)
    counts = {len(of_model) for of_model in by_model.values()}
    return counts.pop() if len(counts) == 1 and max(counts) <= most else 1


def _setting_panels(
    curves: Sequence[Map], settings: Sequence[Sequence[Any]], across: int, measure: _Measure, options: FigureOptions
) -> tuple[Figure, list[Axes]]:
    """Return panels of a line for each setting, with the names of settings left of each row of panels."""
    width = options.inches or style.WIDTHS[2]
    every_setting = list(dict.fromkeys(chain.from_iterable(settings)))
    names = {setting: options.named(str(setting)) for setting in every_setting}
    room = min(max(map(text_width, names.values())) + 0.1, 0.5 * width)
    lines = {setting: wrapped(name, room - 0.08) for setting, name in names.items()}
    most_lines = max(map(len, lines.values()))
    line_height = max(_SETTING_ROW, most_lines * style.SMALL_TYPE * style.LINE)
    margins = Margins(room + 0.08, 0.12, 0.14, 0, 0)
    inner = margins.inner(width, across)
    ink = options.colours.ink
    titles = [style.text_lines(name, inner, style.NAME_TYPE, ink, "bold") for name in _panel_names(curves, options)]
    margins = margins._replace(above=max(map(style.height_of, titles)) + 0.1, below=_TICKS)
    figure, panels = sheet(
        options,
        (width, line_height * max(map(len, settings))),
        len(curves),
        across,
        margins,
        title=_title(curves, (), f"{measure.label} of {len(names)} settings", options),
        about=_about(curves, measure, options),
        notes=list(chain.from_iterable(curve.notes for curve in curves)),
    )
    for panel, of_panel in zip(panels, titles, strict=True):
        write_above(panel, of_panel)
    for panel, of_row in zip(panels[::across], settings, strict=True):
        _write_settings(panel, [lines[setting] for setting in of_row])
    return figure, panels


def _write_settings(panel: Axes, names: Sequence[Sequence[str]]) -> None:
    """Write the names of settings left of a panel."""
    for place, lines in enumerate(names):
        panel.annotate(
            "\n".join(lines),
            (0, place),
            (-4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=style.SMALL_TYPE,
            linespacing=1.1,
        )


def _draw_setting(panel: Axes, row: int, point: _Point, unit: Unit, options: FigureOptions) -> None:
    """Draw the value of a setting in its row, with its interval."""
    colour = options.colours.lines[0]
    value = point.value / unit.size
    panel.plot(value, row, "o", color=colour, ms=3.5)
    if point.low is not None and point.high is not None and options.intervals is not False:
        panel.plot((point.low / unit.size, point.high / unit.size), (row, row), color=colour, lw=1)


def _title(curves: Sequence[Map], policies: Sequence[str], text: str, options: FigureOptions) -> str:
    """Return the title: what is drawn, after the only model and the only policy."""
    models = list(dict.fromkeys(curve.model for curve in curves))
    subject = []
    if len(models) == 1:
        subject.append(options.named(model_name(models[0])))
    if curves[0].axes[1][0] and len(policies) == 1:
        subject.append(options.named(policies[0]))
    return f"{' under '.join(subject)}: {text}" if subject else text


def _about(curves: Sequence[Map], measure: _Measure, options: FigureOptions) -> list[str]:
    """Return the clauses about all panels: the measure, the only benchmark, the problems, and the marks."""
    first = curves[0]
    about = [f"{options.named(measure.label)} in {measure.unit.name}"]
    benchmarks = dict.fromkeys(curve.benchmark for curve in curves)
    if len(benchmarks) == 1 and len(curves) > 1:
        about.append(options.named(first.benchmark))
    problems = common([_problems(curve) for curve in curves])
    if problems is not None:
        about.append(counted(problems, "problem"))
    if first.baselines:
        about.append("dashed: baselines")
    if options.intervals is not False and measure.cost is None:
        about.append("bands and bars: 95 % intervals")
    return about


def _problems(curve: Map) -> int | None:
    return common([cell.estimate.problems for cell in curve.cells.values()])


def _top(curves: Sequence[Map], measure: _Measure) -> float:
    """Return the upper end of the vertical axis, a little above the highest value or limit."""
    highest = []
    for curve in curves:
        for cell in (*curve.cells.values(), *curve.baselines.values()):
            point = _point(curve, cell, measure.cost)
            highest.append(point.value if point.high is None else point.high)
    return 1.05 * max(highest) / measure.unit.size or 1.0


def _measure(curves: Sequence[Map], cost: str | None) -> _Measure:
    """Return the metric of curves in percent, or a cost in the unit of its largest value."""
    first = curves[0]
    if cost is None:
        return _Measure(axis_label(first.metric), Unit("%"))
    known_cost = cost_of(cost)
    values = []
    for curve in curves:
        values += [_point(curve, cell, cost).value for cell in (*curve.cells.values(), *curve.baselines.values())]
    return _Measure(known_cost.label, known_cost.unit(values), cost)


def _panel_names(curves: Sequence[Map], options: FigureOptions) -> list[str]:
    """Return what differs between panels, of one panel the benchmark, with the problems where their number differs."""
    is_one_model = len({curve.model for curve in curves}) == 1
    is_one_benchmark = len({curve.benchmark for curve in curves}) == 1 and len(curves) > 1
    problems = [_problems(curve) for curve in curves]
    names = []
    for curve, count in zip(curves, problems, strict=True):
        parts = []
        if not is_one_model:
            parts.append(options.named(model_name(curve.model)))
        if not is_one_benchmark:
            parts.append(options.named(curve.benchmark))
        if count is not None and common(problems) is None:
            parts.append(f"n {count}")
        names.append(", ".join(parts))
    return names


def line_panels(
    options: FigureOptions, titles: Sequence[str], names: Sequence[str], label: str, **words: Any
) -> tuple[Figure, list[Axes], float]:
    """Return panels with titles, a label below, and room for the names of lines at their right; and that room.

    They are as high as a page allows.
    """
    across = style.panels_in_row(len(titles), _most_in_row(len(titles), options))
    width = options.inches or min(across * _PANEL_WIDTH, options.widest)
    room = min(_NAMES, max(map(text_width, names)) + 0.03)
    margins = Margins(_LEFT, room + 0.12, room + 0.12 + _LEFT, 0, 0)
    inner = margins.inner(width, across)
    title_lines = [style.text_lines(title, inner, style.NAME_TYPE, options.colours.ink, "bold") for title in titles]
    label_lines = wrapped(label, inner, style.NAME_TYPE)
    line = style.NAME_TYPE * style.LINE
    margins = margins._replace(
        above=0.1 + max(map(len, title_lines)) * line,
        below=_TICKS + len(label_lines) * line,
    )
    names_height = sum(len(wrapped(name, room)) for name in names) * style.SMALL_TYPE * style.LINE
    rows = math.ceil(len(titles) / across)
    fitting = (style.PAGE_HEIGHT - 0.6) / rows - margins.above - margins.below
    high = max(min(_PANEL_HEIGHT, fitting), _LEAST_HEIGHT, names_height)
    figure, panels = sheet(options, (width, high), len(titles), across, margins, **words)
    for panel, lines in zip(panels, title_lines, strict=True):
        write_above(panel, lines)
        panel.set_xlabel("\n".join(label_lines), labelpad=2, fontsize=style.NAME_TYPE)
    return figure, panels, room


def _most_in_row(count: int, options: FigureOptions) -> int:
    if options.widest < _NARROW:
        return 1 if count <= 3 else 2
    return 2 if count <= 8 else 3


def write_names(panel: Axes, ends: Sequence[End], room: float) -> None:
    """Write the names of lines right of a panel at the heights of their ends, moved apart where they would overlap."""
    panel_height = panel.get_position().height * panel.figure.get_figheight()  # type: ignore[union-attr]
    low, top = panel.get_ylim()
    placed = []
    for end in ends:
        place = (end.height - low) / (top - low) * panel_height
        placed.append((place, wrapped(end.name, room), end.colour))
    placed.sort()
    heights = [len(lines) * style.SMALL_TYPE * style.LINE for _, lines, _ in placed]
    middles = style.apart([place for place, _, _ in placed], heights, panel_height)
    for (_, lines, colour), middle in zip(placed, middles, strict=True):
        panel.annotate(
            "\n".join(lines),
            (1, middle / panel_height),
            (5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=style.SMALL_TYPE,
            color=colour,
            linespacing=1.1,
        )


def _point(curve: Map, cell: Cell, cost: str | None) -> _Point:
    """Return a cell's value with its interval; raises KvatlasError for an unknown cost."""
    if cost is None:
        estimate = cell.estimate
        low = None if estimate.low is None else 100 * estimate.low
        high = None if estimate.high is None else 100 * estimate.high
        return _Point(100 * estimate.value, low, high)
    value = cost_of(cost).of(cell)
    if value is None:
        raise KvatlasError(
            f"The setting {cell.setting} of {curve.model} on {curve.benchmark} does not tell its {cost}."
        )
    return _Point(value)


def _draw_curves(
    axes: Axes, map_: Map, policies: Sequence[str], measure: _Measure, options: FigureOptions
) -> list[End]:
    """Draw the curves of a panel and their baselines; return where each ends."""
    values = map_.axes[1][1] if map_.axes[1][0] else map_.axes[0][1]
    as_text = not all(isinstance(value, int | float) for value in values)
    places: dict[Any, float] = {}
    for index, value in enumerate(values):
        places[value] = float(index if as_text else value)
    ends = []
    for policy, line in points(map_).items():
        index = policies.index(policy)
        # Points of several policies over one value stand side by side.
        shift = (index - (len(policies) - 1) / 2) * 0.16 if as_text else 0.0
        x = [places[value] + shift for value in line]
        line_points = [_point(map_, cell, measure.cost) for cell in line.values()]
        stroke = _Stroke.of(policies, index, as_text, options)
        last = _draw_curve(axes, x, line_points, measure.unit, stroke, options)
        if policy:
            ends.append(End(last, options.named(policy), stroke.colour))
    for index, (name, cell) in enumerate(map_.baselines.items()):
        height = _point(map_, cell, measure.cost).value / measure.unit.size
        axes.axhline(height, color=options.colours.soft, lw=1, ls=("--", ":", "-.")[index % 3])
        ends.append(End(height, options.named(name), options.colours.soft))
    line_axes(axes, options, "y")
    _write_values(axes, places, as_text)
    return ends


class _Stroke(NamedTuple):
    """The drawing of a curve: its colour and marker, and if it is points with bars instead of a line."""

    colour: str
    marker: str
    as_points: bool

    @classmethod
    def of(cls, names: Sequence[str], order: int, as_points: bool, options: FigureOptions) -> _Stroke:
        """Return the stroke of a curve: that of its policy, or by its order where curves are of one policy."""
        policies = [name.partition("(")[0] for name in names]
        colour = marker = order
        if all(policies) and len(set(policies)) == len(policies):
            colour, marker = colours.identity(policies[order])
        lines = options.colours.lines
        return cls(lines[colour % len(lines)], colours.MARKERS[marker % len(colours.MARKERS)], as_points)


def _draw_curve(
    axes: Axes, x: Sequence[float], line: Sequence[_Point], unit: Unit, stroke: _Stroke, options: FigureOptions
) -> float:
    """Draw a curve with its intervals and return the height of its last point."""
    if options.intervals is False:
        line = [_Point(point.value) for point in line]
    # An interval that is not known has no width.
    y = np.array([point.value for point in line]) / unit.size
    low = np.array([point.value if point.low is None else point.low for point in line]) / unit.size
    high = np.array([point.value if point.high is None else point.high for point in line]) / unit.size
    if stroke.as_points:
        axes.errorbar(x, y, (y - low, high - y), fmt=stroke.marker, color=stroke.colour, ms=4, lw=1, capsize=2)
    else:
        axes.fill_between(x, low, high, color=stroke.colour, alpha=0.15, linewidth=0)
        axes.plot(x, y, color=stroke.colour, marker=stroke.marker, ms=3.5, lw=1.4)
    return float(y[-1])


def _write_values(axes: Axes, places: Mapping[Any, float], as_text: bool) -> None:
    """Write the values of the horizontal axis: all texts, turned where they are long, and numbers if they are few."""
    if as_text:
        texts = [str(value) for value in places]
        turned = max(map(len, texts)) * len(texts) > 40
        axes.set_xticks(list(places.values()), texts)
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(texts) - 0.4)
    elif len(places) <= _NAMED_VALUES:
        ticks = sorted(places.values())
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])


def data_csv(curves: Sequence[Map], cost: str | None = None) -> str:
    """Return the numbers of the curves (in percent, or of a cost), one row per point.

    Baselines have no value of the axis.
    """
    axis = curves[0].axes[1][0] or "setting"
    rows: list[list[Any]] = [
        ["model", "benchmark", "policy", axis, "metric", "value", "low", "high", "problems", "samples"]
    ]
    for curve in curves:
        for policy, value, cell in _rows(curve):
            names = map(guarded, (curve.model, curve.benchmark, policy, value, cost or curve.metric))
            numbers = ["" if limit is None else round(limit, 4) for limit in _point(curve, cell, cost)]
            rows.append([*names, *numbers, cell.estimate.problems, cell.estimate.samples])
    return style.rows_csv(rows)


def _rows(curve: Map) -> Iterator[tuple[str, Any, Cell]]:
    """Yield the policy, the value of the axis and the cell of each point, the baselines last."""
    for policy, line in points(curve).items():
        for value, cell in line.items():
            yield policy, value, cell
    for name, cell in curve.baselines.items():
        yield name, "", cell
