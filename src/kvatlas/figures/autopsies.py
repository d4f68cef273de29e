"""The held-out test of autopsies: right answers by the number of tokens that are put back, for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import Estimate, KvatlasError
from kvatlas.figures import colours
from kvatlas.figures.curves import End, line_panels, write_names
from kvatlas.figures.style import FigureOptions, line_axes, rows_csv, save, settle
from kvatlas.stats.autopsies import Autopsy
from kvatlas.stats.autopsy_summary import ARMS, SizeGroup, by_size, tested_causes, whole_group
from kvatlas.text import interval_text, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The arms as a figure names them.
NAMES: Mapping[str, str] = {
    "nothing": "nothing put back",
    "random": "random tokens",
    "cause": "saving tokens",
    "no_compression": "no compression",
}
#: The places of the arms among the colours of lines: the cause is to be seen first.
_COLOURS: Mapping[str, int] = {"nothing": 6, "random": 4, "cause": 0, "no_compression": 2}
#: The distance between two arms of a group, whose middles are 1 apart.
_STEP = 0.17


def autopsy_figure(autopsies: Sequence[Autopsy], name: str = "", options: FigureOptions | None = None) -> Figure:
    """Return the share of right answers under held-out random numbers by the size of causes, a mark for each arm.

    `name` is that of the cell. Raises KvatlasError if no cause was tested.
    """
    options = options or FigureOptions(width=4.6)
    if not tested_causes(autopsies):
        raise KvatlasError("No lost answer has a cause that was tested, so there is nothing to draw.")
    groups = [*by_size(autopsies), whole_group(autopsies)]
    with options.applied():
        figure, (panel,), room = line_panels(
            options,
            [options.named(name)] if name else [""],
            [options.named(NAMES[arm]) for arm in ARMS],
            "tokens put back (lost answers)",
            title=_title(groups[-1]),
            about=_about(autopsies, options),
            notes=[],
        )
        for arm in ARMS:
            _draw_arm(panel, arm, groups, options)
        panel.axvline(len(groups) - 1.5, color=options.colours.soft, linewidth=0.5, zorder=1)
        line_axes(panel, options, "y")
        panel.set(xlim=(-0.5, len(groups) - 0.5), ylim=(0, 1.03), yticks=(0, 0.25, 0.5, 0.75, 1))
        panel.set_yticklabels(["0", "25", "50", "75", "100"])
        labels = [f"{group.name}\n({group.answers})" for group in groups[:-1]]
        panel.set_xticks(range(len(groups)), [*labels, f"all\n({groups[-1].answers})"])
        ends = [End(groups[-1].arms[arm].value, options.named(NAMES[arm]), _colour(arm, options)) for arm in ARMS]
        write_names(panel, ends, room)
        settle(figure, options)
    return figure


def _title(every: SizeGroup) -> str:
    cause = every.arms["cause"]
    others = every.arms["random"]
    return (
        f"{percent_text(cause.value, 0)} % of these lost answers are right with their saving tokens put back, "
        f"{percent_text(others.value, 0)} % with random ones"
    )


def _about(autopsies: Sequence[Autopsy], options: FigureOptions) -> list[str]:
    streams = len(tested_causes(autopsies)[0].held_out["nothing"])
    about = [f"right answers in % under {streams} random streams that the search did not use"]
    if options.intervals is not False:
        about.append("bars: 95 % intervals")
    return about


def _colour(arm: str, options: FigureOptions) -> str:
    return options.colours.lines[_COLOURS[arm]]


def _draw_arm(panel: Axes, arm: str, groups: Sequence[SizeGroup], options: FigureOptions) -> None:
    """Draw the mark of an arm in each group, a little apart from those of the others."""
    shift = _STEP * (ARMS.index(arm) - (len(ARMS) - 1) / 2)
    estimates = [group.arms[arm] for group in groups]
    panel.errorbar(
        [index + shift for index in range(len(groups))],
        [estimate.value for estimate in estimates],
        yerr=None if options.intervals is False else _reach(estimates),
        color=_colour(arm, options),
        marker=colours.MARKERS[ARMS.index(arm)],
        markersize=4.2 if arm == "cause" else 3.4,
        linestyle="none",
        elinewidth=0.8,
        capsize=1.5,
        zorder=3,
    )


def _reach(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of intervals below and above their values."""
    below = [estimate.value - (estimate.low or 0.0) for estimate in estimates]
    above = [(1.0 if estimate.high is None else estimate.high) - estimate.value for estimate in estimates]
    return [below, above]


def save_autopsies(autopsies: Sequence[Autopsy], path: Path, name: str = "") -> list[Path]:
    """Draw autopsies to a file, with their numbers as a CSV file next to it; return the paths written."""
    rows: list[Sequence[str | int]] = [["tokens", "answers", *ARMS]]
    for group in [*by_size(autopsies), whole_group(autopsies)]:
        shares = [f"{percent_text(group.arms[arm].value)} ({interval_text(group.arms[arm])})" for arm in ARMS]
        rows.append([group.name, group.answers, *shares])
    return save(autopsy_figure(autopsies, name), path, data=rows_csv(rows))
