"""Line charts of sweeps with one axis: a metric along it with bands, a line for each policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Cell, KvatlasError
from kvatlas.figures import style
from kvatlas.figures.look import Foot, Look, canvas, rows_csv, settle, title
from kvatlas.figures.panels import cost_of, cost_of_cell
from kvatlas.stats.maps import POLICY, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (3.1, 2.1)


def curve_figure(curves: Sequence[Curve], *, cost: str | None = None, look: Look | None = None) -> Figure:
    """One panel for each model and benchmark, a line with its 95 % band for each policy, baselines as dashed lines.

    With the name of a `cost` its values are plotted, without a band, in place of the metric.
    An axis whose values are text, such as the policies, gets points with bars instead of lines. Raises KvatlasError
    for no curves, and for curves along unlike axes or of unlike metrics.
    """
    look = look or Look()
    if not curves:
        raise KvatlasError("There is no curve to draw.")
    if len({(curve.axis, curve.metric) for curve in curves}) > 1:
        raise KvatlasError("Curves in one figure need the same axis and the same metric.")
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.model, curve.benchmark), []).append(curve)
    policies = list(dict.fromkeys(curve.policy for curve in curves))
    count = len(groups)
    across = look.across(count, 1 if look.columns == 1 else 2 if count <= 8 else 3)
    wide = (look.width or min(across * _PANEL[0], look.widest)) / across
    names = [" | ".join(map(look.named, (style.model(model), benchmark))) for model, benchmark in groups]
    titles = [title(name, wide - 0.2) for name in names]
    over = 0.13 * max(text.count("\n") for text, _ in titles)
    across_legend = max(1, int(across * wide / 0.85))
    legend = 0.15 * math.ceil((len(policies) + len(curves[0].baselines)) / across_legend)
    size = (across * wide, math.ceil(count / across) * (_PANEL[1] + over) + legend)
    with look.applied():
        figure, panels = canvas(size, count, across, _foot(curves, cost, size[0], look))
        for axes, group, (text, points) in zip(panels, groups.values(), titles, strict=True):
            _plot(axes, group, policies, cost, look)
            axes.set_title(text, fontsize=points)
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:
            figure.legend(
                handles, labels, loc="outside upper center", ncols=min(len(labels), across_legend), fontsize=6.5,
                frameon=False, handlelength=1.8, columnspacing=1.2, borderpad=0.2,
            )  # fmt: skip
        settle(figure, look)
        return figure


def _foot(curves: Sequence[Curve], cost: str | None, inches: float, look: Look) -> Foot:
    notes = dict.fromkeys(note for curve in curves for note in curve.notes)
    metric = f"{style.label(curves[0].metric)} in percent{' with 95 % intervals' if look.intervals else ''}."
    return look.foot(notes, [cost_of(cost, curves[0].model).about if cost else metric], inches)


def _known(curve: Curve, cell: Cell, cost: str | None) -> tuple[float, float | None, float | None]:
    """What is shown of a cell, with its interval: the metric in percent, or a cost, which has none."""
    if cost:
        return cost_of_cell(cost, curve.model, curve.benchmark, cell), None, None
    low, high = (None if end is None else 100 * end for end in (cell.estimate.low, cell.estimate.high))
    return 100 * cell.estimate.value, low, high


def _values(curve: Curve, cell: Cell, cost: str | None) -> tuple[float, float, float]:
    """The same as numbers: an interval that is not known has no width."""
    value, low, high = _known(curve, cell, cost)
    return value, value if low is None else low, value if high is None else high


def _plot(axes: Axes, group: Sequence[Curve], policies: Sequence[str], cost: str | None, look: Look) -> None:
    values = [value for curve in group for value, _ in curve.points]
    as_text = group[0].axis == POLICY or not all(isinstance(value, int | float) for value in values)
    positions: dict[Any, float] = {v: float(i) for i, v in enumerate(dict.fromkeys(values))} if as_text else {}
    for curve in group:
        number = policies.index(curve.policy)
        colour = look.lines[number % len(look.lines)]
        # Points of several policies over one value stand side by side.
        shift = (number - (len(policies) - 1) / 2) * 0.16 if as_text else 0.0
        x = [positions[value] + shift if as_text else float(value) for value, _ in curve.points]
        y, low, high = (
            np.array(numbers) for numbers in zip(*(_values(curve, c, cost) for _, c in curve.points), strict=True)
        )
        low, high = (low, high) if look.intervals else (y, y)
        marker = style.MARKERS[number % len(style.MARKERS)]
        label = look.named(curve.policy) if curve.policy else None
        if as_text:
            axes.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, ms=4, lw=1, capsize=2, label=label)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=colour, marker=marker, ms=3.5, lw=1.4, label=label)
    for number, (name, cell) in enumerate(group[0].baselines.items()):
        dashes = ("--", ":", "-.")[number % 3]
        axes.axhline(
            _values(group[0], cell, cost)[0], color=look.soft, lw=1, ls=dashes, label=f"{look.named(name)} (baseline)"
        )
    shown = cost_of(cost, group[0].model).label if cost else style.label(group[0].metric)
    axes.set_ylabel(look.named(shown), labelpad=3)
    _ticks(axes, group, positions, look)


def _ticks(axes: Axes, group: Sequence[Curve], positions: dict[Any, float], look: Look) -> None:
    axes.tick_params(labelsize=7, length=2, width=0.5)
    if positions:
        turned = max(len(str(value)) for value in positions) * len(positions) > 40
        axes.set_xticks(list(positions.values()), [str(value) for value in positions])
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(positions) - 0.4)
    else:
        values = sorted({float(value) for curve in group for value, _ in curve.points})
        if len(values) <= 8:
            axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xlabel(look.named(style.label(group[0].axis)), labelpad=2)
    axes.grid(axis="y", linewidth=0.4, color=look.soft, alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)


def data_csv(curves: Sequence[Curve], cost: str | None = None) -> str:
    """The numbers of the curves (in percent, or of a cost), one row per point; baselines have no value of the axis."""
    axis = "setting" if curves[0].axis == POLICY else curves[0].axis
    rows: list[list[Any]] = [
        ["model", "benchmark", "policy", axis, "metric", "value", "low", "high", "problems", "samples"]
    ]
    for curve in curves:
        points = [(curve.policy, value, cell) for value, cell in curve.points]
        points += [(name, "", cell) for name, cell in curve.baselines.items()]
        for policy, value, cell in points:
            known = _known(curve, cell, cost)
            numbers = ["" if number is None else round(number, 4) for number in known]
            shown = [curve.model, curve.benchmark, policy, value, cost or curve.metric]
            rows.append([*shown, *numbers, cell.estimate.problems, cell.estimate.samples])
    return rows_csv(rows)
