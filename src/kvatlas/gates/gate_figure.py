"""The figure of a gate: the problems that lost and gained answers, task by task, and the limits against the margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvatlas.figures.style import SMALL_TYPE, FigureOptions, Margins, finish_texts, line_axes, make_panels
from kvatlas.gates.sentences import headline
from kvatlas.text import percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvatlas.gates.gate_result import Judged
    from kvatlas.gates.pairing import TaskPairs

#: Width of the figure and height of a panel, in inches.
_SIZE = (6.3, 0.75)
#: There is room for so many bars at least, so that a few are not wide.
_LEAST_BARS = 40
#: The most tasks that are drawn.
MOST_TASKS = 8


def gate_figure(judged: Judged, options: FigureOptions | None = None) -> Figure:
    """Return a panel for the limits and one for each task with its changed problems, from lost to gained."""
    options = options or FigureOptions(width=_SIZE[0])
    tasks = judged.pairs.tasks[:MOST_TASKS]
    margins = Margins(left=1.3, between=0.0, right=0.15, above=0.22, below=0.2, first=-0.15)
    with options.applied():
        margin = f"{100 * judged.judgement.margin:g}"
        about = [
            f"dots: points lost, with limits; red line: the margin of {margin}",
            "bars: share of a problem's answers that were lost (down) or gained (up)",
        ]
        figure, panels = make_panels(options, _SIZE, len(tasks) + 1, 1, margins, title=headline(judged), about=about)
        _draw_limits(panels[0], judged, options)
        for panel, task in zip(panels[1:], tasks, strict=True):
            _draw_task(panel, task, options)
        finish_texts(figure, options)
    return figure


def _draw_limits(panel: Axes, judged: Judged, options: FigureOptions) -> None:
    """Draw the loss of each task and of the mean with its limits, and the margin."""
    judgement = judged.judgement
    rows = [(task.task, task.limits[judgement.claim]) for task in judgement.tasks[:MOST_TASKS]]
    if len(rows) > 1:
        rows.insert(0, ("mean", judgement.limits[judgement.claim]))
    rows.reverse()
    for place, (_, limits) in enumerate(rows):
        reach = [[100 * (limits.loss - limits.low)], [100 * (limits.high - limits.loss)]]
        colour = options.colours.ink
        panel.errorbar([100 * limits.loss], [place], xerr=reach, color=colour, marker="o", markersize=3.5, capsize=2)
    panel.axvline(0, color=options.colours.soft, linewidth=0.5)
    panel.axvline(100 * judgement.margin, color=options.colours.warning, linewidth=1)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=SMALL_TYPE)
    panel.set(ylim=(-0.6, len(rows) - 0.4))
    line_axes(panel, options, "x")


def _draw_task(panel: Axes, task: TaskPairs, options: FigureOptions) -> None:
    """Draw a bar for each changed problem, the greatest loss first."""
    losses = task.losses
    changes = np.where(np.isnan(losses), 0.0, -losses).mean(1)
    changed = np.sort(changes[changes != 0])
    colours = [options.colours.lines[1] if change < 0 else options.colours.lines[2] for change in changed]
    panel.bar(np.arange(len(changed)), 100 * changed, color=colours, width=0.9, linewidth=0)
    panel.axhline(0, color=options.colours.ink, linewidth=0.5)
    lost = int((changed < 0).sum())
    gained = int((changed > 0).sum())
    unchanged = len(changes) - lost - gained
    text = f"{task.task}: {lost:,} problems lost, {gained:,} gained, {unchanged:,} unchanged"
    panel.set_title(text, fontsize=SMALL_TYPE, loc="left", color=options.colours.ink)
    panel.set(xlim=(-0.7, max(len(changed), _LEAST_BARS) - 0.3), ylim=(-105, 105), yticks=(-100, 0, 100), xticks=())
    panel.set_yticklabels([percent_text(-1, 0), "0", percent_text(1, 0)])
    line_axes(panel, options, "y")
