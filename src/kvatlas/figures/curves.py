"""Values of settings without a map: a row for each value of a single axis, or for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import TYPE_CHECKING, Any

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


def curve_figure(
    curves: Sequence[Map], *, cost: str | None = None, title: str = "", options: FigureOptions | None = None
) -> Figure:
    """Return one panel for each map of curves: a row for each value with its 95 % interval, baselines below.

    With the name of a `cost` its values are drawn, without intervals, in place of the metric. All curves have the same
    axis and the same metric. The `title` is a finding about them; without one it says what is drawn.
    """
    options = options or FigureOptions()
    label, unit = _label_and_unit(curves, cost)
    policies = list(dict.fromkeys(chain.from_iterable(curve.axes[0][1] for curve in curves)))
    axis = curves[0].axes[1][0]
    headings = _headings(curves, policies)
    panels = [
        RowPanel(name, headings, _rows(curve, len(headings), cost, unit, options))
        for curve, name in zip(curves, _curve_names(curves, options), strict=True)
    ]
    what = f"{label} by {axis_label(axis)}" if axis else f"{label} of {len(panels[0].rows)} settings"
    return forest_figure(
        panels,
        f"{options.named(label)}, {unit.name}".removesuffix(", "),
        title=title or ": ".join(filter(None, [" under ".join(_subject(curves, policies, options)), what])),
        about=_about_curves(curves, policies, f"{options.named(label)} in {unit.name}", cost, title, options),
        notes=list(chain.from_iterable(curve.notes for curve in curves)),
        options=options,
    )


def _settings_of(curve: Map) -> list[tuple[str, Any, Cell]]:
    """Return policy, value of the axis and cell of each setting, then of baselines, which have no value.

    Without an axis settings have their name in place of the value.
    """
    (_, names), (axis, values) = curve.axes
    found: list[tuple[str, Any, Cell]] = []
    for name, value in product(names, values):
        if (name, value) in curve.cells:
            cell = curve.cells[name, value]
            found.append((name, value, cell) if axis else ("", name, cell))
    return [*found, *((name, "", cell) for name, cell in curve.baselines.items())]


def _headings(curves: Sequence[Map], policies: Sequence[str]) -> tuple[str, ...]:
    """Return the headings of the names of rows: the axis, after the policy where there are several."""
    axis = curves[0].axes[1][0]
    if not axis:
        return ("setting",)
    has_policies = len(policies) > 1 or any(curve.baselines for curve in curves)
    return (POLICY, axis_label(axis)) if has_policies else (axis_label(axis),)


def _rows(curve: Map, columns: int, cost: str | None, unit: CostUnit, options: FigureOptions) -> list[Row]:
    """Return the rows of a curve, those of its baselines last."""
    rows = []
    for policy, value, cell in _settings_of(curve):
        text = str(value) if columns == 1 else style.tick_text(value)
        names = (options.named(policy), options.named(text) if text else "")
        numbers = [None if one is None else one / unit.size for one in _curve_point(curve, cell, cost)]
        assert numbers[0] is not None
        rows.append(Row(names[-columns:], LossSpan(numbers[0], *numbers[1:])))
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
    curves: Sequence[Map], policies: Sequence[str], measure: str, cost: str | None, title: str, options: FigureOptions
) -> list[str]:
    """Return the clauses about all panels: the measure, what they share, the problems, and the marks.

    A finding as the `title` does not name the only model and policy.
    """
    first = curves[0]
    about = [measure]
    if title:
        about += _subject(curves, policies, options)
    benchmarks = dict.fromkeys(curve.benchmark for curve in curves)
    if len(benchmarks) == 1 and len(curves) > 1:
        about.append(options.named(first.benchmark))
    problems = common([problem_count(curve) for curve in curves])
    if problems is not None:
        about.append(counted(problems, "problem"))

    if options.intervals is not False and cost is None:
        about.append("lines: 95 % intervals")
    return about


def _label_and_unit(curves: Sequence[Map], cost: str | None) -> tuple[str, CostUnit]:
    """Return the metric of curves in percent, or a cost in the unit of its largest value."""
    if cost is None:
        return axis_label(curves[0].metric), CostUnit("%")
    known_cost = cost_of(cost, curves)
    values = []
    for curve in curves:
        values += [_curve_point(curve, cell, cost).value for _, _, cell in _settings_of(curve)]
    return known_cost.column.title, known_cost.unit(values)


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
        for policy, value, cell in _settings_of(curve):
            names = map(guarded, (curve.model, curve.benchmark, policy, value, cost or curve.metric))
            numbers = ["" if limit is None else round(limit, 4) for limit in _curve_point(curve, cell, cost)]
            rows.append([*names, *numbers, cell.estimate.problems, cell.estimate.samples])
    return style.rows_csv(rows)
