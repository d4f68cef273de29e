"""Line charts of sweeps with one axis: a metric along it with bands, a line for each policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.core import Cell, KvatlasError
from kvatlas.figures import style
from kvatlas.figures.look import FootLine, Look
from kvatlas.figures.panels import cost_of, cost_of_cell
from kvatlas.stats.estimates.curves import POLICY, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (3.1, 2.1)
_MARKERS = "osD^vPX*"


def curve_figure(curves: Sequence[Curve], *, cost: str | None = None, look: Look | None = None) -> Figure:
    """One panel for each model and benchmark, a line with its 95 % band for each policy, baselines as dashed lines.

    With the name of a `cost` its values are drawn, without a band, in place of the metric.
    An axis whose values are words, such as the policies, gets points with bars instead of lines. Raises KvatlasError
    for no curves, and for curves along unlike axes or of unlike metrics.
    """
    look = look or Look()
    if not curves:
        raise KvatlasError("There is no curve to draw.")
    if len({(one.axis, one.metric) for one in curves}) > 1:
        raise KvatlasError("Curves in one figure need the same axis and the same metric.")
    groups: dict[tuple[str, str], list[Curve]] = {}
    for one in curves:
        groups.setdefault((one.model, one.benchmark), []).append(one)
    names = list(dict.fromkeys(one.policy for one in curves))
    with look.applied():
        foot = _foot(curves, cost)
        figure, panels = _canvas(len(groups), curves, foot, look)
        for axes, ((model, benchmark), group) in zip(panels, groups.items(), strict=True):
            _draw(axes, group, names, cost, look)
            axes.set_title(f"{style.model(model)} | {benchmark}", fontsize=9)
        _legend(figure, panels[0], len(foot), look)
        return figure


def _canvas(count: int, curves: Sequence[Curve], lines: Sequence[FootLine], look: Look) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = 1 if look.columns == 1 else min(count, 2 if count <= 8 else math.ceil(math.sqrt(count)))
    if look.columns == 2:
        across = min(across, 3)
    down = math.ceil(count / across)
    width = look.width or across * _PANEL[0]
    keys = len({one.policy for one in curves}) + len(curves[0].baselines)
    legend = 0.15 * math.ceil(keys / max(1, int(width / 0.85))) + 0.08
    height = down * _PANEL[1] + 0.1 + 0.13 * len(lines) + legend
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panels = []
    for index in range(count):
        left = index % across * width / across + 0.5
        bottom = height - (index // across + 1) * _PANEL[1] + 0.42
        box = (left / width, bottom / height, (width / across - 0.62) / width, (_PANEL[1] - 0.68) / height)
        panels.append(figure.add_axes(box))
    for index, line in enumerate(reversed(lines)):
        colour = look.warning if line.warning else look.soft
        figure.text(0.12 / width, (0.06 + index * 0.13) / height, line.text, fontsize=6.5, color=colour)
    return figure, panels


def _legend(figure: Figure, panel: Axes, lines: int, look: Look) -> None:
    """Above the foot, beside no line: bands fill the panels."""
    handles, labels = panel.get_legend_handles_labels()
    if labels:
        bottom = (0.1 + 0.13 * lines) / figure.get_figheight()
        across = max(1, min(len(labels), int(figure.get_figwidth() / 0.85)))
        figure.legend(
            handles, labels, loc="lower center", bbox_to_anchor=(0.5, bottom), ncols=across, fontsize=6.5,
            frameon=False, labelcolor=look.ink, handlelength=1.8, columnspacing=1.2,
        )  # fmt: skip


def _foot(curves: Sequence[Curve], cost: str | None) -> list[FootLine]:
    notes = dict.fromkeys(note for one in curves for note in one.notes)
    metric = f"{style.label(curves[0].metric)} in percent with 95 % intervals."
    about = cost_of(cost, curves[0].model).about if cost else metric
    return [*(FootLine(note.text, note.is_warning) for note in notes), FootLine(about)]


def _values(curve: Curve, cell: Cell, cost: str | None) -> tuple[float, float | None, float | None]:
    """What is drawn of a cell, with its interval: the metric in percent, or a cost, which has none."""
    if cost:
        return cost_of_cell(cost, curve.model, curve.benchmark, cell), None, None
    low, high = (None if end is None else 100 * end for end in (cell.estimate.low, cell.estimate.high))
    return 100 * cell.estimate.value, low, high


def _draw(axes: Axes, group: Sequence[Curve], names: Sequence[str], cost: str | None, look: Look) -> None:
    words = [value for one in group for value, _ in one.points]
    worded = group[0].axis == POLICY or not all(isinstance(value, int | float) for value in words)
    places: dict[Any, float] = {v: float(i) for i, v in enumerate(dict.fromkeys(words))} if worded else {}
    for one in group:
        number = names.index(one.policy)
        colour = style.LINES[number % len(style.LINES)]
        colour = "#ffffff" if look.dark and colour == "#000000" else colour
        # Points of several policies over one word stand side by side.
        shift = (number - (len(names) - 1) / 2) * 0.16 if worded else 0.0
        x = [places[value] + shift if worded else float(value) for value, _ in one.points]
        drawn = [_values(one, cell, cost) for _, cell in one.points]
        y = [value for value, _, _ in drawn]
        low = [_or(low, value) for value, low, _ in drawn]
        high = [_or(high, value) for value, _, high in drawn]
        mark = _MARKERS[number % len(_MARKERS)]
        label = one.policy or None
        if worded:
            errors = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            axes.errorbar(x, y, errors, fmt=mark, color=colour, ms=4, lw=1, capsize=2, label=label)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=colour, marker=mark, ms=3.5, lw=1.4, label=label)
    for number, (name, cell) in enumerate(group[0].baselines.items()):
        style_of = ("--", ":", "-.")[number % 3]
        axes.axhline(_values(group[0], cell, cost)[0], color=look.soft, lw=1, ls=style_of, label=f"{name} (baseline)")
    axes.set_ylabel(cost_of(cost, group[0].model).label if cost else style.label(group[0].metric), labelpad=3)
    _ticks(axes, group, places, look)


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _ticks(axes: Axes, group: Sequence[Curve], places: dict[Any, float], look: Look) -> None:
    if places:
        longest = max(len(str(value)) for value in places)
        turned = longest * len(places) > 40
        axes.set_xticks(list(places.values()), [str(value) for value in places])
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(places) - 0.4)
    else:
        values = sorted({float(value) for one in group for value, _ in one.points})
        if len(values) <= 8:
            axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.tick_params(labelsize=7, length=2, width=0.5)
    axes.set_xlabel(style.label(group[0].axis), labelpad=2)
    axes.grid(axis="y", linewidth=0.4, color=look.soft, alpha=0.35)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def data_csv(curves: Sequence[Curve], cost: str | None = None) -> str:
    """The numbers of the curves (in percent, or of a cost), one row per point; baselines have no value of the axis."""
    import csv
    import io

    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    axis = "setting" if curves[0].axis == POLICY else curves[0].axis
    writer.writerow(["model", "benchmark", "policy", axis, "metric", "value", "low", "high", "problems", "samples"])
    for one in curves:
        points = [(one.policy, value, cell) for value, cell in one.points]
        points += [(name, "", cell) for name, cell in one.baselines.items()]
        for policy, value, cell in points:
            e = cell.estimate
            numbers = ["" if number is None else round(number, 4) for number in _values(one, cell, cost)]
            shown = cost or one.metric
            writer.writerow([one.model, one.benchmark, policy, value, shown, *numbers, e.problems, e.samples])
    return file.getvalue()
