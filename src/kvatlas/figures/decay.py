"""Depth curves: success and progress against L, B, N, S or n, on linear and logarithmic axes, with fitted decays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import Estimate, KvatlasError, Note, NoteKind
from kvatlas.figures import style
from kvatlas.figures.look import Look, canvas, settle, wrapped
from kvatlas.stats.decay import PUBLISHED_L0, Decay, fit
from kvatlas.stats.intervals import pass_at_1
from kvatlas.stats.systems import System
from kvatlas.stats.table import ProblemKey

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
    "n": "Definitions n of the chain",
}
_BINS = 8
_GREY = ("#c4c4c4", "#525c66")
#: Of the fit with amplitude 1, and of the one with a free amplitude.
_DASHES: tuple[Any, ...] = ("-", (0, (3, 2)))
#: Where a logarithmic axis may begin. What lies below is plotted as an arrow down from its upper limit.
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
    """Estimates in up to 8 bins of equally many problems (for L), or at each value, of the problems that say theirs.

    Raises KvatlasError where none does.
    """
    levels = {key: float(system.about[key][by]) for key in system.outcomes if _says(system, key, by)}
    if not levels:
        names = ", ".join(dict.fromkeys(benchmark for benchmark, _ in system.outcomes))
        raise KvatlasError(f"No benchmark of {system.model} says the {by} of its problems; there are: {names}.")
    outcomes = {key: list(system.outcomes[key].values()) for key in levels}
    points = [
        (math.fsum(levels[key] for key in keys) / len(keys), pass_at_1({str(key): outcomes[key] for key in keys}))
        for keys in _bins(levels)
    ]
    return Curve(tuple(points), tuple(fit(outcomes, levels, free=free) for free in (False, True)) if decay else ())


def _says(system: System, key: ProblemKey, by: str) -> bool:
    return system.about.get(key, {}).get(by) is not None


def _left_out(systems: Sequence[System], by: str) -> list[Note]:
    """A note on benchmarks that do not say how hard their problems are."""
    names = dict.fromkeys(key[0] for system in systems for key in system.outcomes if not _says(system, key, by))
    return [Note(NoteKind.LEFT_OUT, f"{', '.join(names)} left out: no {by} of its problems is known")] if names else []


def _bins(levels: Mapping[ProblemKey, float]) -> list[list[ProblemKey]]:
    """Problems with the same value together; where there are many values, in bins of about equal size."""
    values = sorted(set(levels.values()))
    size = 0 if len(values) <= _BINS + 2 else len(levels) / _BINS
    bins: list[list[ProblemKey]] = []
    for value in values:
        if not bins or sum(map(len, bins)) >= size * len(bins):
            bins.append([])
        bins[-1] += [key for key, level in levels.items() if level == value]
    return bins


def curves_figure(
    success: Sequence[System],
    progress: Sequence[System],
    names: Sequence[str],
    *,
    by: str = "L",
    published: bool = True,
    notes: Sequence[Note] = (),
    look: Look | None = None,
) -> tuple[Figure, list[Curve]]:
    """Success above, progress below; left on a linear, right on a logarithmic axis. Returns the success curves, too.

    Against L, success comes with both fits, and with the published decays as grey lines if `published`.
    """
    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; valid are {', '.join(DIFFICULTIES)}.")
    most = len(style.LINES)
    if len(success) > most:
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {most} can be plotted.")
    look = look or Look()
    names = [look.named(name) for name in names]
    curves = [curve(system, by, decay=by == "L") for system in success]
    rows = {"Pass@1": curves, "Progress ratio": [curve(system, by) for system in progress]}
    across = look.across(4, 1 if look.columns == 1 else 2)
    wide = look.widest
    with look.applied():
        handles = _legend(names, curves, published and by == "L", look)
        in_row = min(len(handles), max(1, int(wide / 2.1)))
        down = math.ceil(len(handles) / in_row)
        lines = [handle.get_label().count("\n") + 1.4 for handle in handles]
        legend = 0.115 * max(sum(lines[n : n + down]) for n in range(0, len(lines), down))
        size = (wide, math.ceil(4 / across) * max(1.7, 0.62 * wide / across) + legend)
        figure, panels = canvas(
            size, 4, across, look.foot([*notes, *_left_out(success, by)], _about(by, look), size[0])
        )
        for number, panel in enumerate(panels):
            label, scale = list(rows)[number // 2], ("linear", "log")[number % 2]
            _panel(panel, rows[label], scale, look, grey=published and number < 2 and by == "L")
            panel.set_xlabel(look.named(DIFFICULTIES[by]) if number >= 4 - across else "", labelpad=2, fontsize=7.5)
            metric = look.named(label)
            panel.set_ylabel(metric if scale == "linear" else f"{metric}, logarithmic", labelpad=3, fontsize=7.5)
        figure.legend(
            handles=handles, loc="outside upper left", fontsize=6.5, ncols=in_row, frameon=False, handlelength=1.6,
            labelspacing=0.5, columnspacing=1.2,
        )  # fmt: skip
        settle(figure, look)
    return figure, curves


def _panel(panel: Axes, curves: Sequence[Curve], scale: str, look: Look, *, grey: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    levels = [level for curve in curves for level, _ in curve.points]
    left, right = min(levels), max(levels)
    margin = 0.06 * (right - left or 1.0)
    lowest = min(estimate.low or 0.0 for curve in curves for _, estimate in curve.points)
    least = 0.0 if scale == "linear" else next((least for least in _LEASTS if least <= lowest), _LEASTS[-1])
    smooth = np.linspace(max(left - margin, 1e-6), right + margin, 200)
    if grey:
        for depth in PUBLISHED_L0.values():
            panel.plot(smooth, np.exp(-smooth / depth), color=_GREY[look.dark], linewidth=0.8, zorder=1)
    for number, curve in enumerate(curves):
        for decay, dashes in zip(curve.decays, _DASHES, strict=False):
            panel.plot(smooth, decay(smooth), color=look.lines[number], lw=1.0, ls=dashes, alpha=0.8, zorder=2)
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (number - (len(curves) - 1) / 2) * 0.008 * (right - left or 1.0)
        _points(panel, curve, number, shift, least, look)
    panel.set_xlim(left - margin, right + margin)
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(7, integer=right > 1, steps=[1, 2, 5, 10]))
    panel.set_ylim(0, 1.03)
    if scale == "log":
        panel.set_yscale("log")
        panel.set_ylim(least, 1.1)
        ticks = [tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if tick >= least]
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=7)
    panel.grid(color=look.soft, alpha=0.25, linewidth=0.5)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _points(panel: Axes, curve: Curve, number: int, shift: float, least: float, look: Look) -> None:
    """Means with their intervals, joined where no decay is; `least` is where a logarithmic axis begins, or 0."""
    colour = look.lines[number]
    shown = [(level + shift, e) for level, e in curve.points if e.value >= least]
    low = [e.value - max(e.low or 0.0, least / 10) for _, e in shown]
    high = [(1.0 if e.high is None else e.high) - e.value for _, e in shown]
    bars = [low, high] if look.intervals else None
    panel.errorbar(
        [level for level, _ in shown], [e.value for _, e in shown], yerr=bars, color=colour,
        marker=style.MARKERS[number], markersize=3.6, linewidth=0.9, linestyle="none" if curve.decays else "-",
        elinewidth=0.8, capsize=1.5, zorder=3,
    )  # fmt: skip
    for level, estimate in curve.points:
        if estimate.value < least and estimate.high is not None and estimate.high > least:
            panel.annotate(
                "", (level + shift, max(estimate.high * 0.6, least)), (level + shift, estimate.high),
                arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.8},
            )  # fmt: skip


def _legend(names: Sequence[str], curves: Sequence[Curve], published: bool, look: Look) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for number, (name, curve, marker) in enumerate(zip(names, curves, style.MARKERS, strict=False)):
        lines, colour = wrapped(name, 1.7), look.lines[number]
        if curve.decays:
            fitted, free = curve.decays
            lines += [f"L0 {depth_text(fitted)}", f"A = {style.fixed(free.amplitude, 2)}: L0 {depth_text(free)}"]
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=3.6, label="\n".join(lines)))
    if any(curve.decays for curve in curves):
        for dashes, text in zip(_DASHES, ("fit, amplitude 1", "fit, free amplitude A"), strict=True):
            handles.append(Line2D([], [], color=look.soft, linewidth=1.0, linestyle=dashes, label=text))
    if published:
        depths = "\n".join(f"   {name} {depth}" for name, depth in PUBLISHED_L0.items())
        handles.append(
            Line2D([], [], color=_GREY[look.dark], label=f"published L0 (B = 2, N = 0),\nfrom above:\n{depths}")
        )
    return handles


def depth_text(decay: Decay) -> str:
    """`40.2 (36.1–45.0)`, with ∞ where no decay is seen."""
    value, low, high = ("∞" if math.isinf(d) else style.fixed(d) for d in (decay.depth, decay.low, decay.high))
    return f"{value} ({low}–{high})"


def _about(by: str, look: Look) -> list[str]:
    points = "Points: means over problems"
    points += " with 95 % intervals clustered by problem" if look.intervals else ""
    if by != "L":
        return [f"{points}."]
    return [
        f"{points}, in bins of about equally many problems.",
        "Lines: P(L) = A exp(-L / L0), maximum likelihood on single outcomes; in brackets the 95 % interval of L0.",
    ]
