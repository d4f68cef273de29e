"""Depth curves: success and progress against L, B, N or S, on a linear and a logarithmic axis, with fitted decays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Estimate, KvatlasError, Note
from kvatlas.figures.look import FootLine, Look
from kvatlas.stats.estimates.decay import PUBLISHED_L0, Decay, fit
from kvatlas.stats.estimates.pass_at_1 import pass_at_1
from kvatlas.stats.pairs.systems import ProblemKey, System

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
}
#: Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow that white paper swallows.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#7f7f7f")
_MARKERS = "osD^vP*X"
_BINS = 8
#: Where a logarithmic axis may begin. What lies below is drawn as an arrow down from its upper limit.
_LEASTS = (0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Curve:
    """One system's metric by difficulty: the mean difficulty of each bin with its estimate, and the fitted decays.

    `decays` are those with amplitude 1 and with a free one; none where the metric is not success or the difficulty
    not L.
    """

    points: tuple[tuple[float, Estimate], ...]
    decays: tuple[Decay, ...] = ()


def curve(system: System, by: str, *, decay: bool = False) -> Curve:
    """Estimates in up to 8 bins of equally many problems (for L), or at each value; KvatlasError if it is unknown."""
    levels = {place: system.about.get(place, {}).get(by) for place in system.outcomes}
    if any(level is None for level in levels.values()):
        place = next(place for place, level in levels.items() if level is None)
        raise KvatlasError(f"The benchmark {place[0]} does not say the {by} of its problems ({place[1]}).")
    known = {place: float(level) for place, level in levels.items() if level is not None}
    points = []
    for places in _bins(known):
        estimate = pass_at_1({str(place): list(system.outcomes[place].values()) for place in places})
        points.append((math.fsum(known[place] for place in places) / len(places), estimate))
    outcomes = {place: list(samples.values()) for place, samples in system.outcomes.items()}
    decays = tuple(fit(outcomes, known, free=free) for free in (False, True)) if decay else ()
    return Curve(tuple(points), decays)


def _bins(levels: Mapping[ProblemKey, float]) -> list[list[ProblemKey]]:
    """Problems with the same value together; where there are many values, in bins of about equal size."""
    by_level: dict[float, list[ProblemKey]] = {}
    for place, level in levels.items():
        by_level.setdefault(level, []).append(place)
    size = 0 if len(by_level) <= _BINS + 2 else len(levels) / _BINS
    bins: list[list[ProblemKey]] = []
    taken = 0
    for level in sorted(by_level):
        if not bins or taken >= size * len(bins):
            bins.append([])
        bins[-1] += by_level[level]
        taken += len(by_level[level])
    return bins


def curves_figure(
    success: Sequence[System],
    progress: Sequence[System],
    names: Sequence[str],
    *,
    by: str = "L",
    published: bool = True,
    notes: Sequence[Note] = (),
) -> tuple[Figure, list[Curve]]:
    """Success above, progress below; left on a linear, right on a logarithmic axis. Returns the success curves, too.

    Against L, success comes with both fits, and with the published decays as grey lines if `published`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; valid are {', '.join(DIFFICULTIES)}.")
    if len(success) > len(_COLOURS):
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {len(_COLOURS)} can be drawn.")
    found = [curve(system, by, decay=by == "L") for system in success]
    rows = (("Pass@1", found), ("Progress ratio", [curve(system, by) for system in progress]))
    foot = _foot(by, published, notes)
    under = 0.16 + 0.135 * len(foot)
    side = 2.7 if by == "L" else 1.9
    width, height = 7.4 + side, 5.3 + under
    with Look().applied():
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        for row, (label, curves) in enumerate(rows):
            for column, scale in enumerate(("linear", "log")):
                left, bottom = 0.55 + 3.7 * column, under + 0.42 + 2.62 * (1 - row)
                panel = figure.add_axes((left / width, bottom / height, 3.05 / width, 2.1 / height))
                _panel(panel, curves, scale, grey=published and row == 0 and by == "L")
                panel.set_xlabel(DIFFICULTIES[by] if row == 1 else "", labelpad=2)
                panel.set_ylabel(label if scale == "linear" else f"{label}, logarithmic", labelpad=3)
        figure.legend(
            handles=_legend(names, found, published and by == "L"), loc="upper left", fontsize=6.8, frameon=False,
            bbox_to_anchor=(7.45 / width, (height - 0.1) / height), handlelength=1.6, labelspacing=0.75,
        )  # fmt: skip
        for line, (text, warning) in enumerate(reversed(foot)):
            figure.text(
                0.12 / width, (0.08 + 0.135 * line) / height, text, fontsize=6.5,
                color="#a11a1a" if warning else "#444444",
            )  # fmt: skip
    return figure, found


def _panel(panel: Axes, curves: Sequence[Curve], scale: str, *, grey: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    right = max(level for each in curves for level, _ in each.points)
    left = min(level for each in curves for level, _ in each.points)
    margin = 0.06 * (right - left or 1.0)
    lowest = min(estimate.low or 0.0 for each in curves for _, estimate in each.points)
    least = 0.0 if scale == "linear" else next((each for each in _LEASTS if each <= lowest), _LEASTS[-1])
    smooth = np.linspace(max(left - margin, 1e-6), right + margin, 200)
    if grey:
        for depth in PUBLISHED_L0.values():
            panel.plot(smooth, np.exp(-smooth / depth), color="#c4c4c4", linewidth=0.8, zorder=1)
    for number, each in enumerate(curves):
        colour = _COLOURS[number]
        for decay, dashes in zip(each.decays, ("-", (0, (3, 2))), strict=False):
            panel.plot(smooth, decay(smooth), color=colour, linewidth=1.0, linestyle=dashes, alpha=0.8, zorder=2)
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (number - (len(curves) - 1) / 2) * 0.008 * (right - left or 1.0)
        _points(panel, each, colour, _MARKERS[number], shift, least)
    panel.set_xlim(left - margin, right + margin)
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(7, integer=right > 1, steps=[1, 2, 5, 10]))
    if scale == "log":
        panel.set_yscale("log")
        panel.set_ylim(least, 1.1)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if tick >= least]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    else:
        panel.set_ylim(0, 1.03)
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=7)
    panel.grid(color="#ececec", linewidth=0.5)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _points(panel: Axes, each: Curve, colour: str, marker: str, shift: float, least: float) -> None:
    """Means with their intervals, joined where no decay is drawn; `least` is where a logarithmic axis begins, or 0."""
    shown = [(level + shift, e) for level, e in each.points if e.value >= least]
    levels, values = [level for level, _ in shown], [e.value for _, e in shown]
    low = [e.value - max(e.low or 0.0, least / 10) for _, e in shown]
    high = [(1.0 if e.high is None else e.high) - e.value for _, e in shown]
    panel.errorbar(
        levels, values, yerr=[low, high], color=colour, marker=marker, markersize=3.6, linewidth=0.9,
        linestyle="none" if each.decays else "-", elinewidth=0.8, capsize=1.5, zorder=3,
    )  # fmt: skip
    for level, estimate in each.points:
        if estimate.value < least and estimate.high is not None and estimate.high > least:
            panel.annotate(
                "", (level + shift, max(estimate.high * 0.6, least)), (level + shift, estimate.high),
                arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.8},
            )  # fmt: skip


def _legend(names: Sequence[str], curves: Sequence[Curve], published: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for number, (name, each) in enumerate(zip(names, curves, strict=True)):
        lines = [name]
        if each.decays:
            one, free = each.decays
            lines.append(f"L0 {depth_text(one)}")
            lines.append(f"A = {free.amplitude:.2f}: L0 {depth_text(free)}")
        handles.append(
            Line2D([], [], color=_COLOURS[number], marker=_MARKERS[number], markersize=3.6, label="\n".join(lines))
        )
    if any(each.decays for each in curves):
        handles.append(Line2D([], [], color="#555555", linewidth=1.0, label="fit, amplitude 1"))
        handles.append(
            Line2D([], [], color="#555555", linewidth=1.0, linestyle=(0, (3, 2)), label="fit, free amplitude A")
        )
    if published:
        told = "\n".join(f"   {name} {depth}" for name, depth in PUBLISHED_L0.items())
        handles.append(Line2D([], [], color="#c4c4c4", label=f"published L0 (B = 2, N = 0),\nfrom above:\n{told}"))
    return handles


def depth_text(decay: Decay) -> str:
    """`40.2 (36.1–45.0)`, with ∞ where no decay is seen."""
    value, low, high = ("∞" if math.isinf(d) else f"{d:.1f}" for d in (decay.depth, decay.low, decay.high))
    return f"{value} ({low}–{high})"


def _foot(by: str, published: bool, notes: Sequence[Note]) -> list[FootLine]:
    lines = [
        "Points: means over problems with 95 % intervals clustered by problem"
        + (", in bins of about equally many problems." if by == "L" else "."),
    ]
    if by == "L":
        lines.append(
            "Lines: P(L) = A exp(-L / L0), maximum likelihood on single outcomes; in brackets the 95 % interval of L0."
        )
    return [*(FootLine(note.text, note.is_warning) for note in notes), *map(FootLine, lines)]
