"""The held-out test of autopsies: right answers by the number of tokens that are put back, for each arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.autopsy.autopsies import Autopsy
from kvatlas.autopsy.summary import ARMS, by_size, tested_causes, whole_group
from kvatlas.core import KvatlasError
from kvatlas.figures import colours
from kvatlas.figures.curves import LineEnd, line_panels, write_names
from kvatlas.figures.style import FigureOptions, finish_texts, line_axes, rows_csv, save
from kvatlas.text import interval_text, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The arms that a figure shows, by their names in it: in all of them tokens stay for good.
NAMES: Mapping[str, str] = {
    "nothing": "nothing put back",
    "random": "random tokens",
    "kind": "others of their kinds",
    "cause": "saving tokens",
    "no_compression": "no compression",
}
#: The places of the arms among the colours of lines: the cause is to be seen first.
_COLOURS: Mapping[str, int] = {"nothing": 6, "random": 4, "kind": 3, "cause": 0, "no_compression": 2}
#: The distance between two arms of a group, whose middles are 1 apart.
_STEP = 0.15


def autopsy_figure(cells: Mapping[str, Sequence[Autopsy]], options: FigureOptions | None = None) -> Figure:
    """Return the share of right answers under held-out random numbers by the size of causes, a mark for each arm.

    `cells` are the autopsies of each cell by its name, which stands over its panel; cells without a tested cause are
    left out. Raises KvatlasError if there is no other.
    """
    tested = {name: autopsies for name, autopsies in cells.items() if tested_causes(autopsies)}
    if not tested:
        raise KvatlasError("No lost answer has a cause that was tested, so there is nothing to draw.")
    if options is None:
        options = FigureOptions(width=4.6 if len(tested) == 1 else None)

    every = list(chain.from_iterable(tested.values()))
    shares = whole_group(every).arms
    streams = len(tested_causes(every)[0].held_out["nothing"])
    remarks = [f"right answers in % under {streams} random streams that the search did not use"]
    if options.intervals is not False:
        remarks.append("bars: 95 % intervals")

    with options.applied():
        figure, panels, room = line_panels(
            options,
            [options.named(name) for name in tested],
            list(map(options.named, NAMES.values())),
            "tokens put back (lost answers)",
            title=f"{percent_text(shares['cause'].value, 0)} % of these lost answers are right with saving tokens put "
            f"back, {percent_text(shares['kind'].value, 0)} % with others of their kinds",
            about=remarks,
            notes=[],
        )
        for panel, autopsies in zip(panels, tested.values(), strict=True):
            _draw_cell(panel, autopsies, room, options)
        finish_texts(figure, options)
    return figure


def _draw_cell(panel: Axes, autopsies: Sequence[Autopsy], room: float, options: FigureOptions) -> None:
    """Draw the groups of a cell, then all of it."""
    groups = [*by_size(autopsies), whole_group(autopsies)]
    arm_colours = {arm: options.colours.lines[place] for arm, place in _COLOURS.items()}

    # The marks of a group stand a little apart.
    for index, arm in enumerate(NAMES):
        shift = _STEP * (index - (len(NAMES) - 1) / 2)
        estimates = [group.arms[arm] for group in groups]
        below = [estimate.value - (estimate.low or 0.0) for estimate in estimates]
        above = [(1.0 if estimate.high is None else estimate.high) - estimate.value for estimate in estimates]
        panel.errorbar(
            [group_index + shift for group_index in range(len(groups))],
            [estimate.value for estimate in estimates],
            yerr=None if options.intervals is False else [below, above],
            color=arm_colours[arm],
            marker=colours.MARKERS[index],
            markersize=4.2 if arm == "cause" else 3.4,
            linestyle="none",
            elinewidth=0.8,
            capsize=1.5,
            zorder=3,
        )

    panel.axvline(len(groups) - 1.5, color=options.colours.soft, linewidth=0.5, zorder=1)
    line_axes(panel, options, "y")
    panel.set(xlim=(-0.5, len(groups) - 0.5), ylim=(0, 1.03), yticks=(0, 0.25, 0.5, 0.75, 1))
    panel.set_yticklabels(["0", "25", "50", "75", "100"])
    labels = [f"{group.name}\n({group.answers})" for group in groups[:-1]]
    panel.set_xticks(range(len(groups)), [*labels, f"all\n({groups[-1].answers})"])
    ends = [LineEnd(groups[-1].arms[arm].value, options.named(NAMES[arm]), arm_colours[arm]) for arm in NAMES]
    write_names(panel, ends, room)


def save_autopsies(cells: Mapping[str, Sequence[Autopsy]], path: Path) -> list[Path]:
    """Draw the autopsies of cells to a file, with the numbers as a CSV file next to it; return the paths written."""
    rows: list[Sequence[str | int]] = [["cell", "tokens", "answers", *ARMS]]
    figure = autopsy_figure(cells)
    for name, autopsies in cells.items():
        for group in [*by_size(autopsies), whole_group(autopsies)] if tested_causes(autopsies) else []:
            shares = [f"{percent_text(group.arms[arm].value)} ({interval_text(group.arms[arm])})" for arm in ARMS]
            rows.append([name, group.name, group.answers, *shares])
    return save(figure, path, data=rows_csv(rows))
