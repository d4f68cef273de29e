"""Success and progress against difficulty, with fitted and published decays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvatlas.core import Estimate, KvatlasError, Note, NoteKind
from kvatlas.figures import colours, style
from kvatlas.figures.curves import LineEnd, line_panels, write_names
from kvatlas.figures.style import FigureOptions, finish_texts, line_axes
from kvatlas.stats.depth_curves import PUBLISHED_L0, DepthCurve, depth_curve, says
from kvatlas.stats.numerics.decay import Decay
from kvatlas.stats.systems import ModelSetting
from kvatlas.text import fixed, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIFFICULTIES: Mapping[str, str] = {
    "L": "Logical depth L (actions of the optimal plan)",
    "B": "Locked doors B",
    "N": "Noise ratio N",
    "S": "Shuffle ratio S",
    "n": "Problem size n",
}


def told_difficulty(systems: Sequence[ModelSetting]) -> str:
    """Return the difficulty that most problems of the systems tell; of equal ones the first."""
    counts = dict.fromkeys(DIFFICULTIES, 0)
    for system in systems:
        for by in DIFFICULTIES:
            counts[by] += sum(says(system, key, by) for key in system.outcomes)
    return max(counts, key=lambda by: counts[by])


def depth_figure(
    success: Sequence[ModelSetting],
    progress: Sequence[ModelSetting],
    names: Sequence[str],
    *,
    by: str | None = None,
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> tuple[Figure, list[DepthCurve]]:
    """Return success and progress against difficulty, and the success curves.

    By default the difficulty is the one that most problems tell. Against L, success comes with the fit exp(-L / L0),
    and with the published decays as grey lines. Lines end where the data end.
    """
    by = by or told_difficulty(success)
    if by not in DIFFICULTIES:
        raise KvatlasError(f"Unknown difficulty {by!r}; expected {', '.join(DIFFICULTIES)}.")
    most = len(colours.LINES)
    if len(success) > most:
        raise KvatlasError(f"{len(success)} systems are too many for one figure; at most {most} can be plotted.")
    options = options or FigureOptions()
    by_depth = by == "L"
    curves = [depth_curve(system, by, decay=by_depth) for system in success]
    short = [options.named(name) for name in names]
    labels = []
    for name, curve in zip(short, curves, strict=True):
        labels.append(f"{name}: L0 {decay_text(curve)}" if curve.decay else name)
    published = dict(PUBLISHED_L0) if by_depth else {}
    grey = [f"{name} {depth}" for name, depth in published.items()]

    benchmarks: dict[str, None] = {}
    for system in success:
        benchmarks |= dict.fromkeys(key[0] for key in system.outcomes if says(system, key, by))
    about = [", ".join(map(options.named, benchmarks)), "points: means over problems"]
    if by_depth:
        about[-1] = "points: means over problems, in bins of about equally many"
    if options.intervals is not False:
        about.append("bars: 95 % intervals")
    if by_depth:
        about.append("lines: exp(-L / L0), in brackets the 95 % interval of L0")
        about.append("grey: published L0 (B = 2, N = 0)")

    # The benchmarks of which the difficulty is unknown.
    unknown: dict[str, None] = {}
    for system in success:
        unknown |= dict.fromkeys(key[0] for key in system.outcomes if not says(system, key, by))
    if unknown:
        text = f"{', '.join(unknown)} left out: the problems do not tell {by}"
        notes = [*notes, Note(NoteKind.LEFT_OUT, text)]

    with options.applied():
        figure, panels, room = line_panels(
            options,
            [f"{options.named(name)}, %" for name in ("Pass@1", "Progress ratio")],
            [*labels, *grey],
            options.named(DIFFICULTIES[by]),
            title=_depth_title(by, short, curves),
            about=about,
            notes=notes,
        )
        progress_curves = [depth_curve(system, by) for system in progress]
        bottom = 0.0 if by_depth else _lowest([*curves, *progress_curves])
        strokes = _strokes(success, options)
        ends = _draw_depth(panels[0], curves, labels, strokes, bottom, options)
        # Published decays reach to the edge of the panel.
        smooth = np.linspace(max(panels[0].get_xlim()[0], 1e-6), panels[0].get_xlim()[1], 200)
        for name, depth in published.items():
            line = 100 * np.exp(-smooth / depth)
            panels[0].plot(smooth, line, color=options.colours.published, linewidth=0.8, zorder=1)
            ends.append(LineEnd(float(line[-1]), f"{name} {depth}", options.colours.soft))
        write_names(panels[0], ends, room)
        write_names(panels[1], _draw_depth(panels[1], progress_curves, short, strokes, bottom, options), room)
        finish_texts(figure, options)
    return figure, curves


def decay_text(curve: DepthCurve) -> str:
    """Return L0 with its interval, or that it lies beyond the depths of the data."""
    if curve.decay is None:
        return ""
    deepest = curve.points[-1][0]
    if curve.decay.depth > deepest:
        return f"beyond the data (L to {deepest:.0f})"
    return depth_text(curve.decay)


def _depth_title(by: str, names: Sequence[str], curves: Sequence[DepthCurve]) -> str:
    difficulty = DIFFICULTIES[by].partition(" (")[0]
    difficulty = f"{difficulty[:1].lower()}{difficulty[1:]}"
    if by != "L":
        # Systems whose intervals at the lowest and at the highest difficulty are apart.
        falls = []
        for name, curve in zip(names, curves, strict=True):
            first = curve.points[0][1]
            last = curve.points[-1][1]
            if (first.low or 0.0) > (1.0 if last.high is None else last.high):
                falls.append(f"{name} falls from {percent_text(first.value, 0)} to {percent_text(last.value, 0)} %")
        if not falls:
            return f"No fall of success with {difficulty} is seen"
        if len(falls) == 1:
            return f"{falls[0]} with {difficulty}"
        return f"Success of {len(falls)} of {len(names)} systems falls with {difficulty}"
    if len(names) > 2:
        return f"Success and progress by {difficulty}"
    decays = [curve.decay for curve in curves]
    deepest = max(curve.points[-1][0] for curve in curves)
    if all(decay is not None and decay.depth > deepest for decay in decays):
        return f"No fall of success to 37 % is seen up to {deepest:.0f} actions: L0 lies beyond the data"
    texts = [f"{name} {decay_text(curve)}" for name, curve in zip(names, curves, strict=True)]
    return f"Success falls to 37 % after L0 actions: {', '.join(texts)}"


class _Stroke(NamedTuple):
    """The strokes of a system: colour, marker, whether marks are filled, and the style of lines."""

    colour: str
    marker: str
    is_filled: bool
    line: str


def _strokes(systems: Sequence[ModelSetting], options: FigureOptions) -> list[_Stroke]:
    """Return the strokes of systems: those of their policies, hollow and dashed for a second model.

    By their order where policies do not tell the systems apart, and for more models.
    """
    models = list(dict.fromkeys(system.model for system in systems))
    policies = {system.setting.policy for system in systems}
    is_by_policy = len(policies) > 1 and len(models) <= 2
    is_by_policy = is_by_policy and len({(one.model, one.setting.policy) for one in systems}) == len(systems)

    strokes = []
    lines = options.colours.lines
    for order, system in enumerate(systems):
        colour, marker = colours.policy_identity(system.setting.policy) if is_by_policy else (order, order)
        is_first = not is_by_policy or system.model == models[0]
        name = colours.MARKERS[marker % len(colours.MARKERS)]
        strokes.append(_Stroke(lines[colour % len(lines)], name, is_first, "-" if is_first else "--"))
    return strokes


def _lowest(curves: Sequence[DepthCurve]) -> float:
    """Return the percentage at which the axis of curves begins: 0, or a multiple of 10 below all in its upper half."""
    points = chain.from_iterable(curve.points for curve in curves)
    lowest = min(estimate.low or 0.0 for _, estimate in points)
    return 0.0 if lowest < 0.5 else 10 * math.floor(10 * lowest - 1e-9)


def _draw_depth(
    panel: Axes,
    curves: Sequence[DepthCurve],
    names: Sequence[str],
    strokes: Sequence[_Stroke],
    bottom: float,
    options: FigureOptions,
) -> list[LineEnd]:
    """Draw the curves of a panel in percent; return where each line ends."""
    from matplotlib.ticker import MaxNLocator

    levels: list[float] = []
    for curve in curves:
        levels += [level for level, _ in curve.points]
    left = min(levels)
    right = max(levels)
    width = right - left or 1.0
    smooth = np.linspace(max(left, 1e-6), right, 200)
    ends = []
    for index, (curve, name, stroke) in enumerate(zip(curves, names, strokes, strict=True)):
        height = 100 * curve.points[-1][1].value
        if curve.decay:
            panel.plot(
                smooth, 100 * curve.decay(smooth), color=stroke.colour, lw=1.1, ls=stroke.line, alpha=0.8, zorder=2
            )
            height = 100 * float(curve.decay(smooth[-1:])[0])
        # A little apart, so that intervals of several systems at the same difficulty can be told apart.
        shift = (index - (len(curves) - 1) / 2) * 0.02 * width
        # Points are joined where there is no fitted line.
        estimates: list[Estimate] = [estimate for _, estimate in curve.points]
        low = [100 * (estimate.value - (estimate.low or 0.0)) for estimate in estimates]
        high = [100 * ((1.0 if estimate.high is None else estimate.high) - estimate.value) for estimate in estimates]
        panel.errorbar(
            [level + shift for level, _ in curve.points],
            [100 * estimate.value for estimate in estimates],
            yerr=None if options.intervals is False else [low, high],
            color=stroke.colour,
            marker=stroke.marker,
            markerfacecolor=stroke.colour if stroke.is_filled else options.colours.ground,
            markersize=3.6,
            linewidth=0.9,
            linestyle="none" if curve.decay else stroke.line,
            elinewidth=0.8,
            capsize=1.5,
            zorder=3,
        )
        ends.append(LineEnd(height, name, stroke.colour))
    line_axes(panel, options)
    panel.set_xlim(left - 0.06 * width, right + 0.06 * width)
    top = 100 + 0.03 * (100 - bottom)
    panel.set(ylim=(bottom, top), yticks=style.round_values(bottom, 100))
    # Depths and doors are whole numbers, ratios are not.
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=right > 1, steps=[1, 2, 5, 10]))
    return ends


def depth_text(decay: Decay) -> str:
    """Return a depth as `40.2 (36.1–45.0)`, in whole numbers from 100 on, with ∞ where no decay is seen."""
    return f"{_depth_number(decay.depth)} ({_depth_number(decay.low)}–{_depth_number(decay.high)})"


def _depth_number(depth: float) -> str:
    if math.isinf(depth):
        return "∞"
    return f"{depth:,.0f}" if depth >= 100 else fixed(depth)
