"""Values of settings without a map: a row for each value of a single axis, or for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import Cell, KvatlasError, Map
from kvatlas.figures import style
from kvatlas.figures.forest import Row, RowPanel, forest_figure
from kvatlas.figures.loss_axis import LossSpan
from kvatlas.figures.panels import CostUnit, cost_of, problem_count
from kvatlas.figures.style import FigureOptions
from kvatlas.stats.estimates import common
from kvatlas.stats.maps import POLICY
from kvatlas.text import axis_label, counted, guarded, model_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _CurveMeasure(NamedTuple):
    """The metric of settings, or a cost in place of it, with its unit."""

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


def curve_figure(
    curves: Sequence[Map], *, cost: str | None = None, title: str = "", options: FigureOptions | None = None
) -> Figure:
    """Return one panel for each map of curves: a row for each value with its 95 % interval, baselines below.

    With the name of a `cost` its values are drawn, without intervals, in place of the metric. All curves have the same
    axis and the same metric. The `title` is a finding about them; without one it says what is drawn.
    """
    options = options or FigureOptions()
    first = curves[0]
    measure = _measure_of(curves, cost)
    policies = list(dict.fromkeys(chain.from_iterable(map(cells_of_lines, curves))))
    axis = first.axes[1][0]
    panels = [
        RowPanel(name, _headings(first, policies), _rows(curve, policies, measure, options))
        for curve, name in zip(curves, _curve_names(curves, options), strict=True)
    ]
    what = f"{measure.label} by {axis_label(axis)}" if axis else f"{measure.label} of {len(panels[0].rows)} settings"
    return forest_figure(
        panels,
        f"{options.named(measure.label)}, {measure.unit.name}".removesuffix(", "),
        title=title or ": ".join(filter(None, [" under ".join(_subject(curves, policies, options)), what])),
        about=_about_curves(curves, policies, measure, title, options),
        notes=list(chain.from_iterable(curve.notes for curve in curves)),
        options=options,
    )


def _headings(curve: Map, policies: Sequence[str]) -> tuple[str, ...]:
    """Return the headings of the names of rows: the axis, after the policy where there are several."""
    axis = curve.axes[1][0]
    if not axis:
        return ("setting",)
    return (*([POLICY] if len(policies) > 1 or curve.baselines else []), axis_label(axis))


def _rows(curve: Map, policies: Sequence[str], measure: _CurveMeasure, options: FigureOptions) -> list[Row]:
    """Return the rows of a curve, then those of its baselines."""
    columns = len(_headings(curve, policies))
    named: list[tuple[tuple[str, ...], Cell]] = []
    for policy, line in cells_of_lines(curve).items():
        for value, cell in line.items():
            value_text = options.named(style.tick_text(value)) if columns == 2 else options.named(str(value))
            named.append(((options.named(policy), value_text)[-columns:], cell))
    for name, cell in curve.baselines.items():
        named.append(((options.named(name), *[""] * (columns - 1)), cell))

    rows = []
    for texts, cell in named:
        numbers = [None if one is None else one / measure.unit.size for one in _curve_point(curve, cell, measure.cost)]
        assert numbers[0] is not None
        rows.append(Row(texts, LossSpan(numbers[0], *numbers[1:])))
    return rows


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

    if options.intervals is not False and measure.cost is None:
        about.append("lines: 95 % intervals")
    return about


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


def _curve_point(curve: Map, cell: Cell, cost: str | None) -> LossSpan:
    """Return a cell's value with its interval; raises KvatlasError for an unknown cost."""
    if cost is None:
        estimate = cell.estimate
        low = None if estimate.low is None else 100 * estimate.low
        high = None if estimate.high is None else 100 * estimate.high
        return LossSpan(100 * estimate.value, low, high)
    value = cost_of(cost, [curve]).of(cell)
    if value is None:
        raise KvatlasError(
            f"The setting {cell.setting} of {curve.model} on {curve.benchmark} does not tell its {cost}."
        )
    return LossSpan(value)


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
