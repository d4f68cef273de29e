"""Lines: a metric along the one axis of a sweep, and success and progress against difficulty with fitted decays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.figures import colours, style
from kvatlas.figures.panels import Unit, cost_of
from kvatlas.figures.style import FigureOptions, Margins, line_axes, settle, sheet, text_width, wrapped, write_above
from kvatlas.stats.decay import PUBLISHED_L0, DepthCurve, depth_curve, says
from kvatlas.stats.maps import POLICY
from kvatlas.stats.numerics.decay import Decay
from kvatlas.stats.systems import ModelSetting
from kvatlas.text import axis_label, fixed, guarded, model_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a panel with its margins where there is room.
_PANEL_WIDTH = 3.4
#: Inches of a panel's height, at least.
_PANEL_HEIGHT = 1.6
#: Inches of the values left of a panel and below it.
_LEFT = 0.36
_TICKS = 0.27
#: Inches of the names of lines, at most.
_NAMES = 1.15
#: Values on an axis that are all named, at most.
_NAMED_VALUES = 8
DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
    "n": "Definitions n of the chain",
}


class _End(NamedTuple):
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

    With the name of a `cost` its values are plotted, without a band, in place of the metric.
    An axis whose values are text, such as the policies, gets points with bars instead of lines. All curves have the
    same axis and the same metric.
    """
    options = options or FigureOptions()
    first = curves[0]
    policies = list(dict.fromkeys(chain.from_iterable(map(points, curves))))
    measure = _measure(curves, cost)
    axis = axis_label(first.axes[1][0] or POLICY)
    models = list(dict.fromkeys(model_name(curve.model) for curve in curves))
    title = f"{measure.label} by {axis}"
    if len(models) == 1:
        title = f"{options.named(models[0])}: {title}"
    about = [f"{options.named(measure.label)} in {measure.unit.name}"]
    if first.baselines:
        about.append("dashed: baselines")
    if options.intervals is not False and not cost:
        about.append("bands and bars: 95 % intervals")
    with options.applied():
        figure, panels, room = _panels(
            options,
            [_panel_name(curve, len(models) > 1, options) for curve in curves],
            [options.named(name) for name in (*policies, *first.baselines)],
            options.named(axis),
            title=title,
            about=about,
            notes=list(chain.from_iterable(curve.notes for curve in curves)),
        )
        for panel, curve in zip(panels, curves, strict=True):
            ends = _draw_curves(panel, curve, policies, measure, options)
            _write_names(panel, ends, room)
        settle(figure, options)
        return figure


def _measure(curves: Sequence[Map], cost: str | None) -> _Measure:
    """Return the metric of curves in percent, or a cost in the unit of its largest value."""
    first = curves[0]
    if cost is None:
        return _Measure(axis_label(first.metric), Unit("%"))
    known_cost = cost_of(cost, first.model)
    values = []
    for curve in curves:
        values += [_point(curve, cell, cost).value for cell in (*curve.cells.values(), *curve.baselines.values())]
    return _Measure(known_cost.label, known_cost.unit(values), cost)


def _panel_name(curve: Map, with_model: bool, options: FigureOptions) -> str:
    names = [curve.benchmark]
    if with_model:
        names.insert(0, model_name(curve.model))
    return ", ".join(map(options.named, names))


def _panels(
    options: FigureOptions, titles: Sequence[str], names: Sequence[str], label: str, **words: Any
) -> tuple[Figure, list[Axes], float]:
    """Return panels with titles, a label below, and room for the names of lines at their right; and that room."""
    across = style.panels_in_row(len(titles), _most_in_row(len(titles), options))
    width = options.width or min(across * _PANEL_WIDTH, options.widest)
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
    size = (width, max(_PANEL_HEIGHT, names_height))
    figure, panels = sheet(options, size, len(titles), across, margins, **words)
    for panel, lines in zip(panels, title_lines, strict=True):
        write_above(panel, lines)
        panel.set_xlabel("\n".join(label_lines), labelpad=2, fontsize=style.NAME_TYPE)
    return figure, panels, room


def _most_in_row(count: int, options: FigureOptions) -> int:
    if options.columns == 1:
        return 1
    return 2 if count <= 8 else 3


def _write_names(panel: Axes, ends: Sequence[_End], room: float) -> None:
    """Write the names of lines right of a panel at the heights of their ends, moved apart where they would overlap."""
    panel_height = panel.get_position().height * panel.figure.get_figheight()  # type: ignore[union-attr]
    low, top = panel.get_ylim()
    placed = []
    for end in ends:
        place = (end.height - low) / (top - low) * panel_height
        placed.append((place, wrapped(end.name, room), end.colour))
    placed.sort()
    heights = [len(lines) * style.SMALL_TYPE * style.LINE for _, lines, _ in placed]
    middles = _apart([place for place, _, _ in placed], heights, panel_height)
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


def _apart(places: Sequence[float], heights: Sequence[float], top: float) -> list[float]:
    """Return the middles of boxes near their places, from the lowest up: none overlaps, and none is above the top."""
    middles = []
    floor = 0.0
    for place, height in zip(places, heights, strict=True):
        middles.append(max(place, floor + height / 2))
        floor = middles[-1] + height / 2
    ceiling = top
    for index in reversed(range(len(middles))):
        middles[index] = min(middles[index], ceiling - heights[index] / 2)
        ceiling = middles[index] - heights[index] / 2
    return middles


def _point(curve: Map, cell: Cell, cost: str | None) -> _Point:
    """Return a cell's value with its interval; raises KvatlasError for an unknown cost."""
    if cost is None:
        estimate = cell.estimate
        low = None if estimate.low is None else 100 * estimate.low
        high = None if estimate.high is None else 100 * estimate.high
        return _Point(100 * estimate.value, low, high)
    value = cost_of(cost, curve.model).of(cell)
    if value is None:
        raise KvatlasError(
            f"The setting {cell.setting} of {curve.model} on {curve.benchmark} does not tell its {cost}."
        )
    return _Point(value)


def _draw_curves(
    axes: Axes, map_: Map, policies: Sequence[str], measure: _Measure, options: FigureOptions
) -> list[_End]:
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
        colour = options.colours.lines[index % len(colours.LINES)]
        last = _draw_curve(axes, x, line_points, measure.unit, _Stroke(policy, index, as_text), options)
        if policy:
            ends.append(_End(last, options.named(policy), colour))
    for index, (name, cell) in enumerate(map_.baselines.items()):
        height = _point(map_, cell, measure.cost).value / measure.unit.size
        axes.axhline(height, color=options.colours.soft, lw=1, ls=("--", ":", "-.")[index % 3])
        ends.append(_End(height, options.named(name), options.colours.soft))
    line_axes(axes, options, "y")
    _write_values(axes, places, as_text)
    return ends


class _Stroke(NamedTuple):
    """The drawing of a curve: its name, the number of its colour, and if it is points with bars instead of a line."""

    name: str
    order: int
    as_points: bool


def _draw_curve(
    axes: Axes, x: Sequence[float], line: Sequence[_Point], unit: Unit, stroke: _Stroke, options: FigureOptions
) -> float:
    """Draw a curve with its intervals and return the height of its last point."""
    colour = options.colours.lines[stroke.order % len(colours.LINES)]
    marker = colours.MARKERS[stroke.order % len(colours.MARKERS)]
    if options.intervals is False:
        line = [_Point(point.value) for point in line]
    # An interval that is not known has no width.
    y = np.array([point.value for point in line]) / unit.size
    low = np.array([point.value if point.low is None else point.low for point in line]) / unit.size
    high = np.array([point.value if point.high is None else point.high for point in line]) / unit.size
    if stroke.as_points:
        axes.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, ms=4, lw=1, capsize=2)
    else:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, y, color=colour, marker=marker, ms=3.5, lw=1.4, label=stroke.name)
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
    """Yield the policy, the value of the axis and the cell of each point, the baselines after each line."""
    for policy, line in points(curve).items():
        for value, cell in line.items():
            yield policy, value, cell
        for name, cell in curve.baselines.items():
            yield name, "", cell


# -- difficulty --------------------------------------------------------------------------------------------------------


def depth_figure(
    success: Sequence[ModelSetting],
    progress: Sequence[ModelSetting],
    names: Sequence[str],
    *,
    by: str = "L",
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> tuple[Figure, list[DepthCurve]]:
    """Return success and progress against difficulty, and the success curves.

    Against L, success comes with the fit exp(-L / L0), and with the published decays as grey lines.
    """
    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; expected {', '.join(DIFFICULTIES)}.")
    most = len(colours.LINES)
    if len(success) > most:
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {most} can be plotted.")
    options = options or FigureOptions()
    by_depth = by == "L"
    curves = [depth_curve(system, by, decay=by_depth) for system in success]
    short = [options.named(name) for name in names]
    labels = [_decay_label(name, curve) for name, curve in zip(short, curves, strict=True)]
    published = dict(PUBLISHED_L0) if by_depth else {}
    grey = [f"{name} {depth}" for name, depth in published.items()]
    with options.applied():
        figure, panels, room = _panels(
            options,
            [options.named("Pass@1"), options.named("Progress ratio")],
            [*labels, *grey],
            options.named(DIFFICULTIES[by]),
            title=_depth_title(by, labels),
            about=_depth_about(by_depth, options),
            notes=[*notes, *_left_out_note(success, by)],
        )
        ends = _draw_depth(panels[0], curves, labels, options)
        ends += _draw_published(panels[0], published, options)
        _write_names(panels[0], ends, room)
        progress_curves = [depth_curve(system, by) for system in progress]
        _write_names(panels[1], _draw_depth(panels[1], progress_curves, short, options), room)
        settle(figure, options)
    return figure, curves


def _decay_label(name: str, curve: DepthCurve) -> str:
    return f"{name}: L0 {depth_text(curve.decay)}" if curve.decay else name


def _left_out_note(systems: Sequence[ModelSetting], by: str) -> list[Note]:
    """Return a note that names the benchmarks of which the difficulty is unknown."""
    unknown: dict[str, None] = {}
    for system in systems:
        unknown |= dict.fromkeys(key[0] for key in system.outcomes if not says(system, key, by))
    if not unknown:
        return []
    return [Note(NoteKind.LEFT_OUT, f"{', '.join(unknown)} left out: the {by} of their problems is unknown")]


def _depth_title(by: str, labels: Sequence[str]) -> str:
    if by == "L" and len(labels) <= 2:
        return f"Success falls to 37 % after L0 actions: {', '.join(labels).replace(': L0', '')}"
    return f"Success and progress by {DIFFICULTIES[by].partition(' (')[0]}"


def _depth_about(by_depth: bool, options: FigureOptions) -> list[str]:
    about = ["points: means over problems"]
    if by_depth:
        about = ["points: means over problems, in bins of about equally many"]
    if options.intervals is not False:
        about.append("bars: 95 % intervals")
    if by_depth:
        about.append("lines: exp(-L / L0), in brackets the 95 % interval of L0")
        about.append("grey: published L0 (B = 2, N = 0)")
    return about


def _draw_depth(panel: Axes, curves: Sequence[DepthCurve], names: Sequence[str], options: FigureOptions) -> list[_End]:
    """Draw the curves of a panel; return where each line ends."""
    from matplotlib.ticker import MaxNLocator

    left, right = _level_limits(curves)
    width = right - left or 1.0
    smooth = _smooth_levels(left, right)
    ends = []
    for index, (curve, name) in enumerate(zip(curves, names, strict=True)):
        colour = options.colours.lines[index]
        height = curve.points[-1][1].value
        if curve.decay:
            panel.plot(smooth, curve.decay(smooth), color=colour, lw=1.1, alpha=0.8, zorder=2)
            height = float(curve.decay(smooth[-1:])[0])
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (index - (len(curves) - 1) / 2) * 0.02 * width
        _draw_estimates(panel, curve, index, shift, options)
        ends.append(_End(height, name, colour))
    line_axes(panel, options)
    panel.set_xlim(left - 0.06 * width, right + 0.06 * width)
    panel.set(ylim=(0, 1.03), yticks=(0, 0.2, 0.4, 0.6, 0.8, 1))
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=right > 1, steps=[1, 2, 5, 10]))
    return ends


def _level_limits(curves: Sequence[DepthCurve]) -> tuple[float, float]:
    """Return the smallest and the largest difficulty."""
    levels: list[float] = []
    for curve in curves:
        levels += [level for level, _ in curve.points]
    return min(levels), max(levels)


def _smooth_levels(left: float, right: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the difficulties at which lines are drawn; decays are defined above 0."""
    margin = 0.06 * (right - left or 1.0)
    return np.linspace(max(left - margin, 1e-6), right + margin, 200)


def _draw_estimates(panel: Axes, curve: DepthCurve, index: int, shift: float, options: FigureOptions) -> None:
    """Draw the points of a curve with their intervals, joined where there is no fitted line."""
    estimates: list[Estimate] = [estimate for _, estimate in curve.points]
    low = [estimate.value - (estimate.low or 0.0) for estimate in estimates]
    high = [(1.0 if estimate.high is None else estimate.high) - estimate.value for estimate in estimates]
    panel.errorbar(
        [level + shift for level, _ in curve.points],
        [estimate.value for estimate in estimates],
        yerr=None if options.intervals is False else [low, high],
        color=options.colours.lines[index],
        marker=colours.MARKERS[index],
        markersize=3.6,
        linewidth=0.9,
        linestyle="none" if curve.decay else "-",
        elinewidth=0.8,
        capsize=1.5,
        zorder=3,
    )


def _draw_published(panel: Axes, published: Mapping[str, float], options: FigureOptions) -> list[_End]:
    """Draw published decays over the width of a panel; return where each line ends."""
    smooth = np.linspace(max(panel.get_xlim()[0], 1e-6), panel.get_xlim()[1], 200)
    ends = []
    for name, depth in published.items():
        line = np.exp(-smooth / depth)
        panel.plot(smooth, line, color=options.colours.published, linewidth=0.8, zorder=1)
        ends.append(_End(float(line[-1]), f"{name} {depth}", options.colours.soft))
    return ends


def depth_text(decay: Decay) -> str:
    """Return a depth as `40.2 (36.1–45.0)`, in whole numbers from 100 on, with ∞ where no decay is seen."""
    return f"{_depth(decay.depth)} ({_depth(decay.low)}–{_depth(decay.high)})"


def _depth(depth: float) -> str:
    if math.isinf(depth):
        return "∞"
    return f"{depth:,.0f}" if depth >= 100 else fixed(depth)
