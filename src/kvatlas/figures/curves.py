"""Lines: a metric along the one axis of a sweep, and success and progress against difficulty with fitted decays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Cell, Estimate, KvatlasError, Map, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.panels import Unit, cost_of
from kvatlas.figures.style import LINE, Look, Margins, line_axes, settle, sheet, text_width, wrapped, write_above
from kvatlas.stats.decay import PUBLISHED_L0, DepthCurve, depth_curve, says
from kvatlas.stats.maps import POLICY
from kvatlas.stats.numerics.decay import Decay
from kvatlas.stats.systems import ModelSetting
from kvatlas.text import guarded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches: of a panel with its margins where there is room, of its least height, left of it, of the values below it, and
#: of the names of its lines at most.
_WIDE, _HIGH, _LEFT, _TICKS, _NAMES = 3.4, 1.6, 0.36, 0.27, 1.15
DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
    "n": "Definitions n of the chain",
}
#: The height at which a line ends, its name in lines, and its colour.
_End = tuple[float, Sequence[str], str]


def points(curve: Map) -> dict[str, dict[Any, Cell]]:
    """The cells of each policy's line by the values of the axis; without an axis those of all settings as one line."""
    (_, names), (axis, values) = curve.axes
    if not axis:
        return {"": {name: curve.cells[name, value] for name in names for value in values}}
    return {
        name: {value: curve.cells[name, value] for value in values if (name, value) in curve.cells} for name in names
    }


def line_figure(curves: Sequence[Map], *, cost: str | None = None, look: Look | None = None) -> Figure:
    """One panel for each map of curves, a line with its 95 % band for each policy, baselines as dashed lines.

    With the name of a `cost` its values are plotted, without a band, in place of the metric.
    An axis whose values are text, such as the policies, gets points with bars instead of lines. All curves have the
    same axis and the same metric.
    """
    look, first = look or Look(), curves[0]
    policies, unit = list(dict.fromkeys(name for curve in curves for name in points(curve))), Unit("%")
    metric, axis = style.label(first.metric), style.label(first.axes[1][0] or POLICY)
    if cost:
        lines = [(curve, line) for curve in curves for line in (*points(curve).values(), curve.baselines)]
        cells = [(curve, cell) for curve, line in lines for cell in line.values()]
        unit = cost_of(cost, first.model).unit(_known(curve, cell, cost)[0] for curve, cell in cells)
        metric = cost_of(cost, first.model).label
    models = list(dict.fromkeys(style.model(curve.model) for curve in curves))
    subject = f"{look.named(models[0])}: " if len(models) == 1 else ""
    about = [f"{look.named(metric)} in {unit.name}", "dashed: baselines" if first.baselines else ""]
    about += ["bands and bars: 95 % intervals"] if look.intervals is not False and not cost else []
    with look.applied():
        figure, panels, room = _panels(
            look,
            [
                ", ".join(map(look.named, (style.model(curve.model), curve.benchmark)[len(models) == 1 :]))
                for curve in curves
            ],
            [look.named(name) for name in (*policies, *first.baselines)],
            look.named(axis),
            title=f"{subject}{metric} by {axis}",
            about=about,
            notes=[note for curve in curves for note in curve.notes],
        )
        for axes, curve in zip(panels, curves, strict=True):
            ends = _lines(axes, curve, policies, cost, unit, look)
            _write_names(axes, [(y, wrapped(name, room), colour) for y, name, colour in ends])
        settle(figure, look)
        return figure


def _panels(
    look: Look, titles: Sequence[str], names: Sequence[str], label: str, **words: Any
) -> tuple[Figure, list[Axes], float]:
    """Panels with titles, a label below, and room for the names of lines at their right; the inches of that room."""
    count = len(titles)
    across = style.across(count, 1 if look.columns == 1 else 2 if count <= 8 else 3)
    width, room = look.width or min(across * _WIDE, look.widest), min(_NAMES, max(map(text_width, names)) + 0.03)
    margins = Margins(_LEFT, room + 0.12, room + 0.12 + _LEFT, 0, 0)
    inner = margins.inner(width, across)
    lines = [style.lines(title, inner, style.NAME_TYPE, look.colours.ink, "bold") for title in titles]
    under = wrapped(label, inner, style.NAME_TYPE)
    margins = margins._replace(
        above=0.1 + max(map(len, lines)) * style.NAME_TYPE * LINE,
        below=_TICKS + len(under) * style.NAME_TYPE * LINE,
    )
    high = max(_HIGH, sum(len(wrapped(name, room)) for name in names) * style.SMALL_TYPE * LINE)
    figure, panels = sheet(look, (width, high), count, across, margins, **words)
    for panel, title in zip(panels, lines, strict=True):
        write_above(panel, title)
        panel.set_xlabel("\n".join(under), labelpad=2, fontsize=style.NAME_TYPE)
    return figure, panels, room


def _write_names(panel: Axes, ends: Sequence[_End]) -> None:
    """Write the names of lines right of a panel at the heights of their ends, moved apart where they would overlap."""
    high = panel.get_position().height * panel.figure.get_figheight()  # type: ignore[union-attr]
    low, top = panel.get_ylim()
    placed = sorted(((end - low) / (top - low) * high, lines, colour) for end, lines, colour in ends)
    tall = [len(lines) * style.SMALL_TYPE * LINE for _, lines, _ in placed]
    # Middles, from the lowest up and then, from the top, down again.
    middles, floor = [], 0.0
    for (end, _, _), own in zip(placed, tall, strict=True):
        middles.append(max(end, floor + own / 2))
        floor = middles[-1] + own / 2
    ceiling = high
    for number in reversed(range(len(placed))):
        middles[number] = min(middles[number], ceiling - tall[number] / 2)
        ceiling = middles[number] - tall[number] / 2
    for (_, lines, colour), middle in zip(placed, middles, strict=True):
        panel.annotate(
            "\n".join(lines), (1, middle / high), (5, 0), xycoords="axes fraction", textcoords="offset points",
            va="center", ha="left", fontsize=style.SMALL_TYPE, color=colour, linespacing=1.1,
        )  # fmt: skip


def _known(curve: Map, cell: Cell, cost: str | None) -> tuple[float, float | None, float | None]:
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


def _lines(
    axes: Axes, map_: Map, policies: Sequence[str], cost: str | None, unit: Unit, look: Look
) -> list[tuple[float, str, str]]:
    """Draw the curves of a panel and their baselines; return where each ends, with its name and its colour."""
    lines, soft, ends = points(map_), look.colours.soft, []
    values = map_.axes[1][1] if map_.axes[1][0] else map_.axes[0][1]
    as_text = not all(isinstance(value, int | float) for value in values)
    positions: dict[Any, float] = {value: float(at if as_text else value) for at, value in enumerate(values)}
    for policy, line in lines.items():
        number = policies.index(policy)
        colour, marker = look.colours.lines[number % len(style.LINES)], style.MARKERS[number % len(style.MARKERS)]
        # Points of several policies over one value stand side by side.
        shift = (number - (len(policies) - 1) / 2) * 0.16 if as_text else 0.0
        x = [positions[value] + shift for value in line]
        known = [_known(map_, cell, cost) for cell in line.values()]
        y = np.array([value for value, _, _ in known]) / unit.size
        # An interval that is not known has no width.
        low, high = (
            np.array([own[0] if own[end] is None or look.intervals is False else own[end] for own in known]) / unit.size
            for end in (1, 2)
        )
        if as_text:
            axes.errorbar(x, y, (y - low, high - y), fmt=marker, color=colour, ms=4, lw=1, capsize=2)
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(x, y, color=colour, marker=marker, ms=3.5, lw=1.4, label=policy)
        if policy:
            ends.append((float(y[-1]), look.named(policy), colour))
    for number, (name, cell) in enumerate(map_.baselines.items()):
        value = _known(map_, cell, cost)[0] / unit.size
        axes.axhline(value, color=soft, lw=1, ls=("--", ":", "-.")[number % 3])
        ends.append((value, look.named(name), soft))
    line_axes(axes, look, "y")
    if as_text:
        turned = max(len(str(value)) for value in values) * len(values) > 40
        axes.set_xticks(list(positions.values()), [str(value) for value in values])
        axes.tick_params(axis="x", labelrotation=30 if turned else 0, labelsize=5.5 if turned else 7)
        axes.set_xlim(-0.6, len(values) - 0.4)
    elif len(values) <= 8:
        ticks = sorted(positions.values())
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    return ends


def data_csv(curves: Sequence[Map], cost: str | None = None) -> str:
    """The numbers of the curves (in percent, or of a cost), one row per point; baselines have no value of the axis."""
    axis = curves[0].axes[1][0] or "setting"
    rows: list[list[Any]] = [
        ["model", "benchmark", "policy", axis, "metric", "value", "low", "high", "problems", "samples"]
    ]
    for curve, policy, line in ((map_, *line) for map_ in curves for line in points(map_).items()):
        cells = [(policy, value, cell) for value, cell in line.items()]
        cells += [(name, "", cell) for name, cell in curve.baselines.items()]
        for name, value, cell in cells:
            numbers = ["" if number is None else round(number, 4) for number in _known(curve, cell, cost)]
            names = map(guarded, (curve.model, curve.benchmark, name, value, cost or curve.metric))
            rows.append([*names, *numbers, cell.estimate.problems, cell.estimate.samples])
    return style.rows_csv(rows)


def depth_figure(
    success: Sequence[ModelSetting],
    progress: Sequence[ModelSetting],
    names: Sequence[str],
    *,
    by: str = "L",
    notes: Sequence[Note] = (),
    look: Look | None = None,
) -> tuple[Figure, list[DepthCurve]]:
    """Success and progress against difficulty; returns the success curves, too.

    Against L, success comes with the fit exp(-L / L0), and with the published decays as grey lines.
    """
    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; expected {', '.join(DIFFICULTIES)}.")
    most = len(style.LINES)
    if len(success) > most:
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {most} can be plotted.")
    look, depth = look or Look(), by == "L"
    curves = [depth_curve(system, by, decay=depth) for system in success]
    silent = dict.fromkeys(key[0] for system in success for key in system.outcomes if not says(system, key, by))
    if silent:
        text = f"{', '.join(silent)} left out: the {by} of their problems is unknown"
        notes = [*notes, Note(NoteKind.LEFT_OUT, text)]
    about = [f"points: means over problems{', in bins of about equally many' if depth else ''}"]
    about += ["bars: 95 % intervals"] if look.intervals is not False else []
    about += ["lines: exp(-L / L0), in brackets the 95 % interval of L0"] if depth else []
    short = [look.named(name) for name in names]
    labels = [
        f"{name}: L0 {depth_text(curve.decay)}" if curve.decay else name
        for name, curve in zip(short, curves, strict=True)
    ]
    grey = [f"{name} {depth}" for name, depth in PUBLISHED_L0.items()] if depth else []
    title = f"Success and progress by {DIFFICULTIES[by].partition(' (')[0]}"
    if depth and len(curves) <= 2:
        title = f"Success falls to 37 % after L0 actions: {', '.join(labels).replace(': L0', '')}"
    with look.applied():
        figure, panels, room = _panels(
            look, [look.named("Pass@1"), look.named("Progress ratio")], [*labels, *grey], look.named(DIFFICULTIES[by]),
            title=title, about=[*about, *(["grey: published L0 (B = 2, N = 0)"] if grey else [])], notes=notes,
        )  # fmt: skip
        by_panel = ((curves, labels, bool(grey)), ([depth_curve(system, by) for system in progress], short, False))
        for panel, (own, texts, with_published) in zip(panels, by_panel, strict=True):
            ends = _depth_panel(panel, own, look, with_published)
            lines = [wrapped(text, room) for text in (*texts, *(grey if with_published else ()))]
            _write_names(panel, [(end, line, colour) for (end, colour), line in zip(ends, lines, strict=True)])
        settle(figure, look)
    return figure, curves


def _depth_panel(panel: Axes, curves: Sequence[DepthCurve], look: Look, published: bool) -> list[tuple[float, str]]:
    """Draw a panel; return where each line ends, and its colour, those of published decays last."""
    from matplotlib.ticker import MaxNLocator

    levels = [level for curve in curves for level, _ in curve.points]
    left, right = min(levels), max(levels)
    width = right - left or 1.0
    smooth = np.linspace(max(left - 0.06 * width, 1e-6), right + 0.06 * width, 200)
    ends = []
    for number, curve in enumerate(curves):
        colour = look.colours.lines[number]
        if curve.decay:
            panel.plot(smooth, curve.decay(smooth), color=colour, lw=1.1, alpha=0.8, zorder=2)
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (number - (len(curves) - 1) / 2) * 0.02 * width
        estimates: list[Estimate] = [estimate for _, estimate in curve.points]
        low = [e.value - (e.low or 0.0) for e in estimates]
        high = [(1.0 if e.high is None else e.high) - e.value for e in estimates]
        panel.errorbar(
            [level + shift for level, _ in curve.points], [e.value for e in estimates],
            yerr=None if look.intervals is False else [low, high], color=colour, marker=style.MARKERS[number],
            markersize=3.6, linewidth=0.9, linestyle="none" if curve.decay else "-", elinewidth=0.8, capsize=1.5,
            zorder=3,
        )  # fmt: skip
        ends.append((float(curve.decay(smooth[-1:])[0]) if curve.decay else estimates[-1].value, colour))
    for depth in PUBLISHED_L0.values() if published else ():
        line = np.exp(-smooth / depth)
        panel.plot(smooth, line, color=look.colours.published, linewidth=0.8, zorder=1)
        ends.append((float(line[-1]), look.colours.soft))
    line_axes(panel, look)
    panel.set_xlim(left - 0.06 * width, right + 0.06 * width)
    panel.set(ylim=(0, 1.03), yticks=(0, 0.2, 0.4, 0.6, 0.8, 1))
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=right > 1, steps=[1, 2, 5, 10]))
    return ends


def depth_text(decay: Decay) -> str:
    """`40.2 (36.1–45.0)`, in whole numbers from 100 on, with ∞ where no decay is seen."""
    ends = decay.depth, decay.low, decay.high
    value, low, high = ("∞" if math.isinf(end) else f"{end:,.0f}" if end >= 100 else style.fixed(end) for end in ends)
    return f"{value} ({low}–{high})"
