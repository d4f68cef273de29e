"""Lines: a metric along the one axis of a sweep, a panel for each model and benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import Cell, KvatlasError, Map, grouped
from kvatlas.figures import colours, style
from kvatlas.figures.panels import CostUnit, cost_of, problem_count
from kvatlas.figures.style import (
    FigureOptions,
    Margins,
    finish_texts,
    line_axes,
    text_width,
    wrapped,
)
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
#: Percent of which the beginning of an axis is a multiple.
_STEP = 5
#: Inches of a row of a setting.
_SETTING_ROW = 0.15


class _LineEnd(NamedTuple):
    """The height at which a line ends, with its name and its colour."""

    height: float
    name: str
    colour: str


class _CurvePoint(NamedTuple):
    """A value with its interval: of a metric in percent, or of a cost, which has no interval."""

    value: float
    low: float | None = None
    high: float | None = None


class _CurveMeasure(NamedTuple):
    """The metric of curves, or a cost in place of it, with its unit."""

    label: str
    unit: CostUnit
    cost: str | None = None


def cells_of_lines(curve: Map) -> dict[str, dict[Any, Cell]]:
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


def line_figure(
    curves: Sequence[Map], *, cost: str | None = None, title: str = "", options: FigureOptions | None = None
) -> Figure:
    """Return one panel for each map of curves, a line with its 95 % band for each policy, baselines as dashed lines.

    With the name of a `cost` its values are plotted, without a band, in place of the metric. An axis whose values are
    text, such as the policies, gets points with bars instead of lines. All panels have one vertical axis, from 0 unless
    all values and limits of a metric lie in its upper half. All curves have the same axis and the same metric. The
    `title` is a finding about them; without one it says what is drawn.
    """
    options = options or FigureOptions()
    first = curves[0]
    measure = _measure_of(curves, cost)
    names = list(map(str, first.axes[0][1]))
    if not first.axes[1][0] and len(names) * max(map(len, names)) > _NAMED_LETTERS:
        # The names of settings have no room below a panel.
        return _settings_figure(curves, measure, title, options)
    policies = list(dict.fromkeys(chain.from_iterable(map(cells_of_lines, curves))))
    axis = axis_label(first.axes[1][0] or POLICY)

    with options.applied():
        figure, panels, room = _line_panels(
            options,
            _curve_names(curves, options),
            [options.named(name) for name in (*policies, *first.baselines)],
            options.named(axis),
            title=title or _curves_title(curves, policies, f"{measure.label} by {axis}", options),
            about=_about_curves(curves, policies, measure, title, options),
            notes=list(chain.from_iterable(curve.notes for curve in curves)),
        )
        bottom, top = _ends(curves, measure)
        for panel, curve in zip(panels, curves, strict=True):
            panel.set_ylim(bottom, top)
            panel.set_yticks(style.round_values(bottom, top))
            _write_names(panel, _draw_curves(panel, curve, policies, measure, options), room)
        finish_texts(figure, options)
        return figure


def _settings_figure(curves: Sequence[Map], measure: _CurveMeasure, title: str, options: FigureOptions) -> Figure:
    """Return one panel for each map of settings without an axis: a row for each setting, its value with the interval.

    Rows stand in the order of the run, and their names left of the first panel of a row.
    """
    with options.applied():
        # Models with settings of their own have rows of panels of their own.
        most = 1 if options.widest < _NARROW else 3
        across = style.panels_in_row(len(curves), most)
        if len({curve.axes[0] for curve in curves}) > 1:
            by_model = grouped(curves, lambda curve: curve.model)
            counts = {len(of_model) for of_model in by_model.values()}
            across = counts.pop() if len(counts) == 1 and max(counts) <= most else 1
        rows: list[list[Any]] = []
        for start in range(0, len(curves), across):
            in_row = chain.from_iterable(curve.axes[0][1] for curve in curves[start : start + across])
            rows.append(list(dict.fromkeys(in_row)))

        # The names of settings, in lines, left of each row of panels.
        width = options.inches or style.WIDTHS[2]
        names = {setting: options.named(str(setting)) for setting in dict.fromkeys(chain.from_iterable(rows))}
        room = min(max(map(text_width, names.values())) + 0.1, 0.5 * width)
        lines = {setting: wrapped(name, room - 0.08) for setting, name in names.items()}
        line_height = max(_SETTING_ROW, max(map(len, lines.values())) * style.SMALL_TYPE * style.LINE)
        most_settings = max(map(len, rows))
        high = line_height * most_settings
        figure, panels = style.named_panels(
            options,
            _curve_names(curves, options),
            width,
            across,
            Margins(room + 0.08, 0.12, 0.14, 0.1, _TICKS),
            (high, high),
            title=title or _curves_title(curves, (), f"{measure.label} of {len(names)} settings", options),
            about=_about_curves(curves, (), measure, title, options),
            notes=list(chain.from_iterable(curve.notes for curve in curves)),
        )
        for panel, settings in zip(panels[::across], rows, strict=True):
            for place, setting in enumerate(settings):
                panel.annotate(
                    "\n".join(lines[setting]),
                    (0, place),
                    (-4, 0),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    fontsize=style.SMALL_TYPE,
                    linespacing=1.1,
                )

        # The value of each setting in its row, with its interval.
        bottom, top = _ends(curves, measure)
        size = measure.unit.size
        colour = options.colours.lines[0]
        for index, (panel, curve) in enumerate(zip(panels, curves, strict=True)):
            settings = rows[index // across]
            line_axes(panel, options, "both")
            ticks = style.round_values(bottom, top)
            panel.set(xlim=(bottom, top), ylim=(most_settings - 0.4, -0.6), xticks=ticks, yticks=[])
            for (setting, _), cell in curve.cells.items():
                point = _curve_point(curve, cell, measure.cost)
                row = settings.index(setting)
                panel.plot(point.value / size, row, "o", color=colour, ms=3.5)
                if point.low is not None and point.high is not None and options.intervals is not False:
                    panel.plot((point.low / size, point.high / size), (row, row), color=colour, lw=1)
        finish_texts(figure, options)
        return figure


def _curves_title(curves: Sequence[Map], policies: Sequence[str], text: str, options: FigureOptions) -> str:
    """Return the title: what is drawn, after the only model and the only policy."""
    subject = " under ".join(_subject(curves, policies, options))
    return f"{subject}: {text}" if subject else text


def _subject(curves: Sequence[Map], policies: Sequence[str], options: FigureOptions) -> list[str]:
    """Return the only model and the only policy of curves."""
    models = list(dict.fromkeys(curve.model for curve in curves))
    subject = []
    if len(models) == 1:
        subject.append(options.named(model_name(models[0])))
    if curves[0].axes[1][0] and len(policies) == 1:
        subject.append(options.named(policies[0]))
    return subject


def _about_curves(
    curves: Sequence[Map], policies: Sequence[str], measure: _CurveMeasure, title: str, options: FigureOptions
) -> list[str]:
    """Return the clauses about all panels: the measure, what they share, the problems, and the marks.

    A finding as the `title` does not name the only model and policy.
    """
    first = curves[0]
    about = [f"{options.named(measure.label)} in {measure.unit.name}"]
    if title:
        about += _subject(curves, policies, options)
    benchmarks = dict.fromkeys(curve.benchmark for curve in curves)
    if len(benchmarks) == 1 and len(curves) > 1:
        about.append(options.named(first.benchmark))
    problems = common([problem_count(curve) for curve in curves])
    if problems is not None:
        about.append(counted(problems, "problem"))

    if first.baselines:
        about.append("dashed: baselines")
    if options.intervals is not False and measure.cost is None:
        has_lines = bool(first.axes[1][0]) and all(isinstance(value, int | float) for value in first.axes[1][1])
        about.append(f"{'bands' if has_lines else 'bars'}: 95 % intervals")
    return about


def _ends(curves: Sequence[Map], measure: _CurveMeasure) -> tuple[float, float]:
    """Return the ends of the axis of values, a little above the highest value or limit.

    It begins at 0, or at a round value below those of a metric that all lie in the upper half.
    """
    lowest = []
    highest = []
    for curve in curves:
        # A map may have cells of policies that are not drawn.
        drawn = [line.values() for line in cells_of_lines(curve).values()]
        for cell in (*chain.from_iterable(drawn), *curve.baselines.values()):
            point = _curve_point(curve, cell, measure.cost)
            lowest.append(point.value if point.low is None else point.low)
            highest.append(point.value if point.high is None else point.high)
    top = max(highest) / measure.unit.size or 1.0
    least = min(lowest)
    if measure.cost is not None or least < top / 2:
        return 0.0, 1.05 * top
    bottom = _STEP * math.floor((least - 0.1 * (top - least)) / _STEP)
    return bottom, top + 0.08 * (top - bottom)


def _measure_of(curves: Sequence[Map], cost: str | None) -> _CurveMeasure:
    """Return the metric of curves in percent, or a cost in the unit of its largest value."""
    first = curves[0]
    if cost is None:
        return _CurveMeasure(axis_label(first.metric), CostUnit("%"))
    known_cost = cost_of(cost, curves)
    values = []
    for curve in curves:
        values += [_curve_point(curve, cell, cost).value for cell in (*curve.cells.values(), *curve.baselines.values())]
    return _CurveMeasure(known_cost.column.title, known_cost.unit(values), cost)


def _curve_names(curves: Sequence[Map], options: FigureOptions) -> list[str]:
    """Return what differs between panels, of one panel the benchmark, with the problems where their number differs."""
    is_one_model = len({curve.model for curve in curves}) == 1
    is_one_benchmark = len({curve.benchmark for curve in curves}) == 1 and len(curves) > 1
    problems = [problem_count(curve) for curve in curves]

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


def _line_panels(
    options: FigureOptions, titles: Sequence[str], names: Sequence[str], label: str, **words: Any
) -> tuple[Figure, list[Axes], float]:
    """Return panels with titles, a label below, and room for the names of lines at their right; and that room.

    They are as high as a page allows.
    """
    count = len(titles)
    most = 2 if count <= 8 else 3
    if options.widest < _NARROW:
        most = 1 if count <= 3 else 2
    across = style.panels_in_row(count, most)

    width = options.inches or min(across * _PANEL_WIDTH, options.widest)
    room = min(_NAMES, max(map(text_width, names)) + 0.03)
    margins = Margins(_LEFT, room + 0.12, room + 0.12 + _LEFT, 0.1, 0)
    label_lines = wrapped(label, margins.inner(width, across), style.NAME_TYPE)
    margins = margins._replace(below=_TICKS + len(label_lines) * style.NAME_TYPE * style.LINE)

    names_height = sum(len(wrapped(name, room)) for name in names) * style.SMALL_TYPE * style.LINE
    heights = (max(_LEAST_HEIGHT, names_height), _PANEL_HEIGHT)
    figure, panels = style.named_panels(options, titles, width, across, margins, heights, **words)
    for panel in panels:
        panel.set_xlabel("\n".join(label_lines), labelpad=2, fontsize=style.NAME_TYPE)
    return figure, panels, room


def _write_names(panel: Axes, ends: Sequence[_LineEnd], room: float) -> None:
    """Write the names of lines right of a panel at the heights of their ends, moved apart where they would overlap."""
    panel_height = panel.get_position().height * panel.figure.get_figheight()  # type: ignore[union-attr]
    low, top = panel.get_ylim()
    placed = []
    for end in ends:
        place = (end.height - low) / (top - low) * panel_height
        placed.append((place, wrapped(end.name, room), end.colour))
    placed.sort()

    heights = [len(lines) * style.SMALL_TYPE * style.LINE for _, lines, _ in placed]
    middles = style.move_apart([place for place, _, _ in placed], heights, panel_height)

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


def _curve_point(curve: Map, cell: Cell, cost: str | None) -> _CurvePoint:
    """Return a cell's value with its interval; raises KvatlasError for an unknown cost."""
    if cost is None:
        estimate = cell.estimate
        low = None if estimate.low is None else 100 * estimate.low
        high = None if estimate.high is None else 100 * estimate.high
        return _CurvePoint(100 * estimate.value, low, high)
    value = cost_of(cost, [curve]).of(cell)
    if value is None:
        raise KvatlasError(
            f"The setting {cell.setting} of {curve.model} on {curve.benchmark} does not tell its {cost}."
        )
    return _CurvePoint(value)


def _draw_curves(
    axes: Axes, map_: Map, policies: Sequence[str], measure: _CurveMeasure, options: FigureOptions
) -> list[_LineEnd]:
    """Draw the curves of a panel and their baselines; return where each ends."""
    values = map_.axes[1][1] if map_.axes[1][0] else map_.axes[0][1]
    as_text = not all(isinstance(value, int | float) for value in values)
    places: dict[Any, float] = {}
    for index, value in enumerate(values):
        places[value] = float(index if as_text else value)
    ends = []
    for policy, line in cells_of_lines(map_).items():
        index = policies.index(policy)
        # Points of several policies over one value stand side by side.
        shift = (index - (len(policies) - 1) / 2) * 0.16 if as_text else 0.0
        x = [places[value] + shift for value in line]
        line_points = [_curve_point(map_, cell, measure.cost) for cell in line.values()]
        colour, marker = _colour_and_marker(policies, index, options)
        last = _draw_curve(axes, x, line_points, (colour, marker), as_text, measure, options)
        if policy:
            ends.append(_LineEnd(last, options.named(policy), colour))
    for index, (name, cell) in enumerate(map_.baselines.items()):
        height = _curve_point(map_, cell, measure.cost).value / measure.unit.size
        axes.axhline(height, color=options.colours.soft, lw=1, ls=("--", ":", "-.")[index % 3])
        ends.append(_LineEnd(height, options.named(name), options.colours.soft))
    line_axes(axes, options, "y")

    # The values of the axis: all texts, turned where they are long, and numbers if they are few.
    if as_text:
        texts = [str(value) for value in places]
        turned = max(map(len, texts)) * len(texts) > 40
        axes.set_xticks(list(places.values()), texts)
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(texts) - 0.4)
    elif len(places) <= _NAMED_VALUES:
        ticks = sorted(places.values())
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    return ends


def _colour_and_marker(names: Sequence[str], order: int, options: FigureOptions) -> tuple[str, str]:
    """Return the colour and the marker of a curve: those of its policy, or by its order where curves are of one."""
    policies = [name.partition("(")[0] for name in names]
    colour = marker = order
    if all(policies) and len(set(policies)) == len(policies):
        colour, marker = colours.policy_identity(policies[order])
    lines = options.colours.lines
    return lines[colour % len(lines)], colours.MARKERS[marker % len(colours.MARKERS)]


def _draw_curve(
    axes: Axes,
    x: Sequence[float],
    line: Sequence[_CurvePoint],
    stroke: tuple[str, str],
    as_points: bool,
    measure: _CurveMeasure,
    options: FigureOptions,
) -> float:
    """Draw a curve with its intervals, as a line or as points with bars; return the height of its last point."""
    if options.intervals is False:
        line = [_CurvePoint(point.value) for point in line]
    # An interval that is not known has no width.
    size = measure.unit.size
    y = np.array([point.value for point in line]) / size
    low = np.array([point.value if point.low is None else point.low for point in line]) / size
    high = np.array([point.value if point.high is None else point.high for point in line]) / size

    colour, marker = stroke
    if as_points:
        axes.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, ms=4, lw=1, capsize=2)
    else:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, y, color=colour, marker=marker, ms=3.5, lw=1.4)
    return float(y[-1])


def curves_csv(curves: Sequence[Map], cost: str | None = None) -> str:
    """Return the numbers of the curves (in percent, or of a cost), one row per point.

    Baselines come last and have no value of the axis.
    """
    axis = curves[0].axes[1][0] or "setting"
    rows: list[list[Any]] = [
        ["model", "benchmark", "policy", axis, "metric", "value", "low", "high", "problems", "samples"]
    ]

    for curve in curves:
        cells: list[tuple[str, Any, Cell]] = []
        for policy, line in cells_of_lines(curve).items():
            cells += [(policy, value, cell) for value, cell in line.items()]
        cells += [(name, "", cell) for name, cell in curve.baselines.items()]
        for policy, value, cell in cells:
            names = map(guarded, (curve.model, curve.benchmark, policy, value, cost or curve.metric))
            numbers = ["" if limit is None else round(limit, 4) for limit in _curve_point(curve, cell, cost)]
            rows.append([*names, *numbers, cell.estimate.problems, cell.estimate.samples])
    return style.rows_csv(rows)
