"""Lines: a metric along the one axis of a sweep, and success and progress against difficulty with fitted decays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Cell, Estimate, KvatlasError, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.panels import cost_of
from kvatlas.figures.style import Look, canvas, line_axes, settle, title, wrapped
from kvatlas.stats.decay import PUBLISHED_L0, Decay, DepthCurve, depth_curve, says
from kvatlas.stats.maps import POLICY, Curve
from kvatlas.stats.systems import ModelSetting
from kvatlas.text import guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a panel of a sweep.
_PANEL = (3.1, 2.1)
DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
    "n": "Definitions n of the chain",
}
#: Of the fit with amplitude 1, and of the one with a free amplitude.
_DASHES: tuple[Any, ...] = ("-", (0, (3, 2)))
#: Where a logarithmic axis may begin. A point below is an arrow down from its upper limit.
_LEASTS = (0.3, 0.1, 0.03, 0.01)


def line_figure(curves: Sequence[Curve], *, cost: str | None = None, look: Look | None = None) -> Figure:
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
    metric = f"{style.label(curves[0].metric)} in percent{' with 95 % intervals' if look.intervals else ''}."
    about = cost_of(cost, curves[0].model).about if cost else metric
    foot = look.foot(dict.fromkeys(note for curve in curves for note in curve.notes), [about], size[0])
    with look.applied():
        figure, panels = canvas(size, count, across, foot)
        for axes, group, (text, points) in zip(panels, groups.values(), titles, strict=True):
            _lines(axes, group, policies, cost, look)
            axes.set_title(text, fontsize=points)
        handles, labels = panels[0].get_legend_handles_labels()
        if labels:
            figure.legend(
                handles, labels, loc="outside upper center", ncols=min(len(labels), across_legend), fontsize=6.5,
                frameon=False, handlelength=1.8, columnspacing=1.2, borderpad=0.2,
            )  # fmt: skip
        settle(figure, look)
        return figure


def _known(curve: Curve, cell: Cell, cost: str | None) -> tuple[float, float | None, float | None]:
    """A cell's value with its interval: the metric in percent, or a cost, which has none."""
    if cost is None:
        low, high = (None if end is None else 100 * end for end in (cell.estimate.low, cell.estimate.high))
        return 100 * cell.estimate.value, low, high
    value = cost_of(cost, curve.model).of(cell)
    if value is None:
        raise KvatlasError(
            f"The setting {cell.setting} of {curve.model} on {curve.benchmark} does not tell its {cost}."
        )
    return value, None, None


def _lines(axes: Axes, group: Sequence[Curve], policies: Sequence[str], cost: str | None, look: Look) -> None:
    first, soft = group[0], look.colours.soft
    values = list(dict.fromkeys(value for curve in group for value, _ in curve.points))
    as_text = first.axis == POLICY or not all(isinstance(value, int | float) for value in values)
    positions: dict[Any, float] = {value: float(at if as_text else value) for at, value in enumerate(values)}
    for curve in group:
        number = policies.index(curve.policy)
        colour, marker = look.colours.lines[number % len(style.LINES)], style.MARKERS[number % len(style.MARKERS)]
        # Points of several policies over one value stand side by side.
        shift = (number - (len(policies) - 1) / 2) * 0.16 if as_text else 0.0
        x = [positions[value] + shift for value, _ in curve.points]
        known = [_known(curve, cell, cost) for _, cell in curve.points]
        y = np.array([value for value, _, _ in known])
        # An interval that is not known has no width.
        low = np.array([value if end is None or not look.intervals else end for value, end, _ in known])
        high = np.array([value if end is None or not look.intervals else end for value, _, end in known])
        label = look.named(curve.policy) if curve.policy else None
        if as_text:
            axes.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, ms=4, lw=1, capsize=2, label=label)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=colour, marker=marker, ms=3.5, lw=1.4, label=label)
    for number, (name, cell) in enumerate(first.baselines.items()):
        dashes, value = ("--", ":", "-.")[number % 3], _known(first, cell, cost)[0]
        axes.axhline(value, color=soft, lw=1, ls=dashes, label=f"{look.named(name)} (baseline)")
    line_axes(axes, look, "y")
    metric = cost_of(cost, first.model).label if cost else style.label(first.metric)
    axes.set_ylabel(look.named(metric), labelpad=3)
    axes.set_xlabel(look.named(style.label(first.axis)), labelpad=2)
    if as_text:
        turned = max(len(str(value)) for value in values) * len(values) > 40
        axes.set_xticks(list(positions.values()), [str(value) for value in values])
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(values) - 0.4)
    elif len(values) <= 8:
        ticks = sorted(positions.values())
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])


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
            numbers = ["" if number is None else round(number, 4) for number in _known(curve, cell, cost)]
            names = map(guarded, (curve.model, curve.benchmark, policy, value, cost or curve.metric))
            rows.append([*names, *numbers, cell.estimate.problems, cell.estimate.samples])
    return style.rows_csv(rows)


def depth_figure(
    success: Sequence[ModelSetting],
    progress: Sequence[ModelSetting],
    names: Sequence[str],
    *,
    by: str = "L",
    published: bool = True,
    notes: Sequence[Note] = (),
    look: Look | None = None,
) -> tuple[Figure, list[DepthCurve]]:
    """Success above, progress below; left on a linear, right on a logarithmic axis. Returns the success curves, too.

    Against L, success comes with both fits, and with the published decays as grey lines if `published`.
    """
    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; expected {', '.join(DIFFICULTIES)}.")
    most = len(style.LINES)
    if len(success) > most:
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {most} can be plotted.")
    look = look or Look()
    depth = by == "L"
    curves = [depth_curve(system, by, decay=depth) for system in success]
    rows = {"Pass@1": curves, "Progress ratio": [depth_curve(system, by) for system in progress]}
    silent = dict.fromkeys(key[0] for system in success for key in system.outcomes if not says(system, key, by))
    if silent:
        notes = [*notes, Note(NoteKind.LEFT_OUT, f"{', '.join(silent)} left out: no {by} of its problems is known")]
    points = f"Points: means over problems{' with 95 % intervals clustered by problem' if look.intervals else ''}"
    about = [f"{points}, in bins of about equally many problems." if depth else f"{points}."]
    if depth:
        fits = "Lines: P(L) = A exp(-L / L0), maximum likelihood on single outcomes; in brackets the 95 % interval"
        about.append(f"{fits} of L0.")
    across = look.across(4, 1 if look.columns == 1 else 2)
    wide = look.widest
    with look.applied():
        handles = list(_legend([look.named(name) for name in names], curves, published and depth, look))
        in_row = min(len(handles), max(1, int(wide / 2.1)))
        down = math.ceil(len(handles) / in_row)
        lines = [handle.get_label().count("\n") + 1.4 for handle in handles]
        legend = 0.115 * max(sum(lines[n : n + down]) for n in range(0, len(lines), down))
        size = (wide, math.ceil(4 / across) * max(1.7, 0.62 * wide / across) + legend)
        figure, panels = canvas(size, 4, across, look.foot(notes, about, wide))
        for number, panel in enumerate(panels):
            metric, logarithmic = list(rows)[number // 2], number % 2 == 1
            _depth_panel(panel, rows[metric], look, logarithmic, published and number < 2 and depth)
            panel.set_xlabel(look.named(DIFFICULTIES[by]) if number >= 4 - across else "", labelpad=2, fontsize=7.5)
            name = f"{look.named(metric)}{', logarithmic' if logarithmic else ''}"
            panel.set_ylabel(name, labelpad=3, fontsize=7.5)
        figure.legend(
            handles=handles, loc="outside upper left", fontsize=6.5, ncols=in_row, frameon=False, handlelength=1.6,
            labelspacing=0.5, columnspacing=1.2,
        )  # fmt: skip
        settle(figure, look)
    return figure, curves


def _depth_panel(panel: Axes, curves: Sequence[DepthCurve], look: Look, logarithmic: bool, published: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    levels = [level for curve in curves for level, _ in curve.points]
    left, right = min(levels), max(levels)
    width = right - left or 1.0
    lowest = min(estimate.low or 0.0 for curve in curves for _, estimate in curve.points)
    # The beginning of a logarithmic axis, or 0.
    least = next((least for least in _LEASTS if least <= lowest), _LEASTS[-1]) if logarithmic else 0.0
    smooth = np.linspace(max(left - 0.06 * width, 1e-6), right + 0.06 * width, 200)
    for depth in PUBLISHED_L0.values() if published else ():
        panel.plot(smooth, np.exp(-smooth / depth), color=look.colours.published, linewidth=0.8, zorder=1)
    for number, curve in enumerate(curves):
        colour = look.colours.lines[number]
        for decay, dashes in zip(curve.decays, _DASHES, strict=False):
            panel.plot(smooth, decay(smooth), color=colour, lw=1.0, ls=dashes, alpha=0.8, zorder=2)
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (number - (len(curves) - 1) / 2) * 0.008 * width
        _points(panel, [(level + shift, e) for level, e in curve.points], bool(curve.decays), number, least, look)
    line_axes(panel, look)
    panel.set_xlim(left - 0.06 * width, right + 0.06 * width)
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(7, integer=right > 1, steps=[1, 2, 5, 10]))
    panel.set_ylim(0, 1.03)
    if logarithmic:
        panel.set_yscale("log")
        panel.set_ylim(least, 1.1)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if tick >= least]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()


def _points(
    panel: Axes, points: Sequence[tuple[float, Estimate]], fits: bool, number: int, least: float, look: Look
) -> None:
    """Means with their intervals, joined where no decay is."""
    colour = look.colours.lines[number]
    above = [(level, e) for level, e in points if e.value >= least]
    low = [e.value - max(e.low or 0.0, least / 10) for _, e in above]
    high = [(1.0 if e.high is None else e.high) - e.value for _, e in above]
    panel.errorbar(
        [level for level, _ in above], [e.value for _, e in above], yerr=[low, high] if look.intervals else None,
        color=colour, marker=style.MARKERS[number], markersize=3.6, linewidth=0.9, linestyle="none" if fits else "-",
        elinewidth=0.8, capsize=1.5, zorder=3,
    )  # fmt: skip
    for level, estimate in points:
        if estimate.value < least and estimate.high is not None and estimate.high > least:
            arrow = {"arrowstyle": "->", "color": colour, "linewidth": 0.8}
            end = (level, max(estimate.high * 0.6, least))
            panel.annotate("", end, (level, estimate.high), arrowprops=arrow)


def _legend(names: Sequence[str], curves: Sequence[DepthCurve], published: bool, look: Look) -> Iterator[Any]:
    from matplotlib.lines import Line2D

    for number, (name, curve, marker) in enumerate(zip(names, curves, style.MARKERS, strict=False)):
        lines = wrapped(name, 1.7)
        if curve.decays:
            one, free = curve.decays
            lines += [f"L0 {depth_text(one)}", f"A = {style.fixed(free.amplitude, 2)}: L0 {depth_text(free)}"]
        colour = look.colours.lines[number]
        yield Line2D([], [], color=colour, marker=marker, markersize=3.6, label="\n".join(lines))
    if any(curve.decays for curve in curves):
        for dashes, text in zip(_DASHES, ("fit, amplitude 1", "fit, free amplitude A"), strict=True):
            yield Line2D([], [], color=look.colours.soft, linewidth=1.0, linestyle=dashes, label=text)
    if published:
        depths = "\n".join(f"   {name} {depth}" for name, depth in PUBLISHED_L0.items())
        text = f"published L0 (B = 2, N = 0),\nfrom above:\n{depths}"
        yield Line2D([], [], color=look.colours.published, label=text)


def depth_text(decay: Decay) -> str:
    """`40.2 (36.1–45.0)`, with ∞ where no decay is seen."""
    value, low, high = ("∞" if math.isinf(d) else style.fixed(d) for d in (decay.depth, decay.low, decay.high))
    return f"{value} ({low}–{high})"
