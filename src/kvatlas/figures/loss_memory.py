"""Loss against memory saved: a mark for each setting, the margin as a band, the offered setting with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvatlas.core import KvatlasError, Note, Setting, differing, mean_of
from kvatlas.figures import colours, style
from kvatlas.figures.curves import LineEnd, write_names
from kvatlas.figures.style import (
    FigureOptions,
    Margins,
    finish_texts,
    line_axes,
    text_width,
    wrapped,
)
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import SettingLoss
from kvatlas.stats.numerics.arrays import Floats
from kvatlas.stats.run_data import shown_policies, whole_names
from kvatlas.text import axis_label, counted, guarded, margin_text, model_name, percent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches of a panel with its margins and of its height.
_PANEL_WIDTH = 3.4
_PANEL_HEIGHT = 2.0
#: Inches of the values left of a panel and below it.
_LEFT = 0.42
_BELOW = 0.44
#: Inches of the names of lines, at most.
_NAMES = 1.0
#: Inches of a figure with one panel in a row.
_NARROW = 5.0
#: The distance of lines of a text, as a multiple of its type.
_SPACING = 1.25
#: Inches from a text to its mark that need no line, and between a line and other marks.
_NEAR = 0.05
_CLEAR = 0.06
_WITHIN = {False: ("#d9efe0", "#1b6b3a"), True: ("#17382a", "#7fd6a3")}


class _SettingMark(NamedTuple):
    """A setting: its series, the percent of memory that it saves, and its loss."""

    setting: Setting
    series: str
    saved: float
    loss: SettingLoss

    @property
    def lost(self) -> float:
        """The points lost."""
        return 100 * self.loss.value


def has_losses(choices: Sequence[Choice]) -> bool:
    """Return whether losses and memory of settings are known of a model."""
    return any(choice.losses and choice.savings for choice in choices)


def loss_figure(
    choices: Sequence[Choice],
    metric: str,
    *,
    title: str = "",
    notes: Sequence[Note] = (),
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each model: the points that settings lose against the full cache by the memory they save.

    A shape and a colour for each policy, and for each number of bits. Filled: proven to stay within the margin. Lines
    join the settings of least loss. Raises KvatlasError without losses and costs.
    """
    options = options or FigureOptions()
    drawn = [choice for choice in choices if choice.losses and choice.savings]
    if not drawn:
        raise KvatlasError("--by-memory: no losses against a full cache; run one with the sweep, as `baseline: full`.")
    marks = [_marks_of_choice(choice) for choice in drawn]
    series = list(dict.fromkeys(mark.series for mark in chain.from_iterable(marks)))
    marks = [sorted(of_model, key=lambda mark: mark.saved) for of_model in marks]
    with options.applied():
        names = []
        for choice in drawn:
            parts = [options.named(model_name(choice.model))]
            if len({other.benchmark for other in drawn}) > 1:
                parts.append(options.named(choice.benchmark))
            names.append(", ".join(parts))

        # Panels have room for the names of series at their right.
        across = 1 if options.widest < _NARROW else min(len(names), 2)
        room = min(_NAMES, max(text_width(options.named(name)) for name in series) + 0.03)
        figure, panels = style.named_panels(
            options,
            names,
            options.inches or min(max(across * _PANEL_WIDTH, 5.0), options.widest),
            across,
            Margins(_LEFT, room + 0.12, room + 0.12 + _LEFT, 0.08, _BELOW),
            (0.9, _PANEL_HEIGHT),
            title=title,
            about=_about_losses(drawn, metric, options),
            notes=notes,
        )

        # The axes of all panels hold all marks, the margin, and the intervals of the settings that are named.
        losses = [100 * drawn[0].margin]
        for choice in drawn:
            loss = None if choice.offered is None else (choice.losses or {}).get(choice.offered.id)
            if loss is not None:
                losses += (100 * loss.low, 100 * loss.high)
        _set_axes(panels, list(chain.from_iterable(marks)), losses)
        for panel, choice, of_model in zip(panels, drawn, marks, strict=True):
            obstacles = _obstacles(panel, of_model)
            name_box = _draw_margin(panel, choice, obstacles, options)
            lines = _draw_marks(panel, of_model, series, options)
            _draw_offered(panel, choice, of_model, np.concatenate([obstacles, name_box]), options)
            write_names(panel, lines, room)
            panel.set_xlabel(f"KV memory saved, % of {choice.reference}", fontsize=style.NAME_TYPE, labelpad=2)
        for panel in panels[::across]:
            label = f"{options.named(axis_label(metric))} lost, points"
            panel.set_ylabel(label, fontsize=style.NAME_TYPE, labelpad=2)
        finish_texts(figure, options)
        return figure


def _marks_of_choice(choice: Choice) -> list[_SettingMark]:
    """Return the marks of a model's settings in their order."""
    losses = choice.losses or {}
    settings = [choice.settings[id_] for id_ in losses]
    has_bits = len({setting.values.get("kv_bits", 16) for setting in settings}) > 1
    shown = shown_policies(setting.policy for setting in settings)

    marks = []
    for id_, loss in losses.items():
        if id_ not in choice.savings:
            continue
        setting = choice.settings[id_]
        series = shown[setting.policy]
        if has_bits:
            series = f"{series}, {setting.values.get('kv_bits', 16)} bits"
        marks.append(_SettingMark(setting, series, 100 * (1 - choice.savings[id_].memory), loss))
    return marks


def _about_losses(choices: Sequence[Choice], metric: str, options: FigureOptions) -> list[str]:
    """Return the clauses about all panels."""
    about = [f"a mark: one setting; {options.named(axis_label(metric))}"]
    benchmarks = {choice.benchmark for choice in choices}
    if len(benchmarks) == 1:
        benchmark = benchmarks.pop()
        is_mean = benchmark == mean_of(len(choices[0].family.sizes) if choices[0].family else 0)
        about.append(f"{benchmark} benchmarks" if is_mean else options.named(benchmark))
    problems = {sum(choice.family.sizes) for choice in choices if choice.family and choice.family.sizes}
    if len(problems) == 1:
        about.append(counted(problems.pop(), "problem"))

    about.append(f"filled: proven to stay within {margin_text(choices[0].margin)}")
    about.append("lines join the least losses")
    if options.intervals is not False:
        about.append("bar: 95 % interval of the named setting")
    return about


def _set_axes(panels: Sequence[Axes], marks: Sequence[_SettingMark], losses: Sequence[float]) -> None:
    """Set the limits of all panels, which hold all marks, and other losses in points; a loss of 0 is on top."""
    saved = [mark.saved for mark in marks]
    lost = [*(mark.lost for mark in marks), *losses]
    # The full cache, which saves and loses nothing, is in the picture.
    gap = 0.04 * (max(*saved, 0.0) - min(*saved, 0.0)) or 1.0
    left = min(*saved, 0.0) - gap
    right = max(*saved, 0.0) + gap
    most = max(lost)
    least = min(*lost, 0.0)
    top = least - 0.06 * (most - least)
    bottom = most + 0.08 * (most - least)

    for panel in panels:
        panel.set(
            xlim=(left, right),
            ylim=(bottom, top),
            xticks=style.round_values(left, right),
            yticks=style.round_values(top, bottom),
        )


def _draw_margin(panel: Axes, choice: Choice, obstacles: Floats, options: FigureOptions) -> Floats:
    """Draw the losses within the margin as a band with its name, at the side that has fewer obstacles.

    Returns points on the name, as shares of the panel.
    """
    margin = choice.margin
    band, ink = _WITHIN[options.dark]
    panel.axhspan(panel.get_ylim()[1], 100 * margin, color=band, linewidth=0, zorder=0)
    panel.axhline(0, color=options.colours.soft, linewidth=0.6, zorder=1)

    # The name fits into the band, else it stands below.
    name = f"within {margin_text(margin)} of {choice.reference}"
    wide, high = style.panel_inches(panel)
    edge = _in_panel(panel, [(0, 100 * margin)])[0][1]
    zero = _in_panel(panel, [(0, 0)])[0][1]
    width = text_width(name) / wide + 0.02
    height = style.SMALL_TYPE * style.LINE / high + 0.02
    is_inside = zero - edge > height
    bottom = edge if is_inside else edge - height

    boxes = [(left, bottom, left + width, bottom + height) for left in (0.01, 0.99 - width)]
    box = min(boxes, key=lambda one: _count_inside(obstacles, one))
    panel.text(
        box[0] + 0.01,
        (box[1] + box[3]) / 2,
        name,
        transform=panel.transAxes,
        fontsize=style.SMALL_TYPE,
        color=ink,
        va="center",
        zorder=1.8,
        bbox={"facecolor": band if is_inside else options.colours.ground, "edgecolor": "none", "pad": 0.5},
    )
    across, up = np.meshgrid(np.linspace(box[0], box[2], 30), np.linspace(box[1], box[3], 4))
    return np.column_stack([across.ravel(), up.ravel()])


def _draw_marks(
    panel: Axes, marks: Sequence[_SettingMark], series: Sequence[str], options: FigureOptions
) -> list[LineEnd]:
    """Draw the settings of each series, and the line of their least losses; return where the lines end."""
    line_axes(panel, options)
    ends = []
    for index, name in enumerate(series):
        series_marks = [mark for mark in marks if mark.series == name]
        if not series_marks:
            continue
        # Those of its policy, or by its order if the series names bits, too.
        policy, _, bits = name.partition(", ")
        place, shape = (index, index) if bits else colours.policy_identity(policy)
        colour = options.colours.lines[place % len(colours.LINES)]
        marker = colours.MARKERS[shape % len(colours.MARKERS)]

        least = _least_losses(series_marks)
        panel.plot(
            [mark.saved for mark in least], [mark.lost for mark in least], color=colour, lw=1, alpha=0.6, zorder=2
        )
        for mark in series_marks:
            face = colour if mark.loss.is_kept else options.colours.ground
            panel.plot(mark.saved, mark.lost, marker, color=colour, mfc=face, ms=4, mew=1, zorder=3)
        ends.append(LineEnd(least[-1].lost, options.named(name), colour))
    return ends


def _least_losses(marks: Sequence[_SettingMark]) -> list[_SettingMark]:
    """Return the marks than which none saves as much memory and loses less, from the least memory saved."""
    least: list[_SettingMark] = []
    for mark in sorted(marks, key=lambda mark: (-mark.saved, mark.lost)):
        if not least or mark.lost < least[-1].lost:
            least.append(mark)
    return least[::-1]


def _draw_offered(
    panel: Axes, choice: Choice, marks: Sequence[_SettingMark], obstacles: Floats, options: FigureOptions
) -> None:
    """Draw the interval of the setting that is chosen, or else of the safest one, and name it."""
    offered = choice.offered
    mark = next((mark for mark in marks if offered is not None and mark.setting.id == offered.id), None)
    if mark is None:
        return
    low = 100 * mark.loss.low
    high = 100 * mark.loss.high
    ink = options.colours.ink
    if options.intervals is not False:
        panel.errorbar(
            mark.saved, mark.lost, [[mark.lost - low], [high - mark.lost]], color=ink, lw=1, capsize=2, zorder=2.5
        )

    # The setting by the parameters that differ between the settings; a value stays with its name.
    parameters = differing(other.setting.values for other in marks)
    values = [f"{name}\u00a0{value}" for name, value in mark.setting.parameters if name in parameters and value != ""]
    policies = shown_policies(other.setting.policy for other in marks)
    setting = ", ".join([policies[mark.setting.policy], *values])

    # As in `loses 10.4 points (5.6 to 15.5)`.
    verb = "loses"
    ends = (mark.loss.low, mark.loss.high)
    if mark.loss.value < 0:
        verb = "gains"
        ends = (-mark.loss.high, -mark.loss.low)
    interval = " to ".join(map(percent_text, ends)).replace("-", "−")
    title = "chosen" if choice.by_memory is not None else "safest"
    lines = [f"{title}: {setting}", f"{verb} {percent_text(abs(mark.loss.value))} points ({interval})"]
    interval_points = _in_panel(panel, [(mark.saved, lost) for lost in np.linspace(low, high, 25).tolist()])
    _write_beside(panel, lines, mark, obstacles, interval_points, options)


def _write_beside(
    panel: Axes,
    lines: Sequence[str],
    named: _SettingMark,
    obstacles: Floats,
    interval: Floats,
    options: FigureOptions,
) -> None:
    """Write lines about a mark near it where they and a thin line to it meet the fewest obstacles, below the margin.

    The thin line may run along the `interval` of the mark, the text may not.
    """
    wide, high = style.panel_inches(panel)
    rows: list[str] = list(chain.from_iterable(wrapped(line, 0.72 * wide) for line in lines))
    width = max(map(text_width, rows)) / wide + 0.02
    height = len(rows) * style.SMALL_TYPE * _SPACING / 72 / high
    target = _in_panel(panel, [(named.saved, named.lost)])[0]
    inches = np.array([wide, high])

    # The nearest of the places that meet the least, as multiples of a small share of the panel.
    places = []
    for x in np.linspace(0.02, max(1 - width, 0.02), 12):
        for y in np.linspace(0.02, max(1 - height - 0.02, 0.02), 20):
            near = np.clip(target, (x, y), (x + width, y + height))
            leader = near + (target - near) * np.linspace(0, 1, 30)[:, None]
            length = float(np.hypot(*((target - near) * inches)))
            # Marks are larger than their points.
            border = _NEAR / wide
            box = (x - border, y - _NEAR / high, x + width + border, y + height + _NEAR / high)
            met = _count_inside(obstacles, box) + _count_inside(interval, box)
            # A line may end at its mark, which is an obstacle of others.
            distances = np.hypot(*((leader[:, None] - obstacles[None]) * inches).transpose(2, 0, 1))
            far = np.hypot(*((obstacles - target) * inches).T) > _NEAR
            met += int((distances[:, far] < _CLEAR).any(0).sum())
            too_near = length < 2 * _NEAR
            places.append((met, too_near, length, float(x), float(y), near))
    *_, x, y, near = min(places, key=itemgetter(0, 1, 2))

    panel.text(
        x,
        y,
        "\n".join(rows),
        transform=panel.transAxes,
        fontsize=style.SMALL_TYPE,
        color=options.colours.ink,
        linespacing=_SPACING,
        va="bottom",
        zorder=1.8,
        # Hides the lines of the grid.
        bbox={"facecolor": options.colours.ground, "edgecolor": "none", "pad": 1},
    )
    line = {"arrowstyle": "-", "color": options.colours.soft, "lw": 0.7, "shrinkA": 1, "shrinkB": 3}
    panel.annotate("", (named.saved, named.lost), tuple(near), textcoords="axes fraction", arrowprops=line)


def _in_panel(panel: Axes, points: Sequence[tuple[float, float]]) -> Floats:
    """Return points of (saved, lost) as shares of the panel, from its lower left corner."""
    left, right = panel.get_xlim()
    bottom, top = panel.get_ylim()
    shares: Floats = (np.array(points) - (left, bottom)) / (right - left, top - bottom)
    return shares


def _count_inside(points: Floats, box: tuple[float, float, float, float]) -> int:
    """Return how many points lie in a box (left, bottom, right, top)."""
    left, bottom, right, top = box
    x, y = points.T
    return int(((x >= left) & (x <= right) & (y >= bottom) & (y <= top)).sum())


def _obstacles(panel: Axes, marks: Sequence[_SettingMark]) -> Floats:
    """Return points on the marks of a panel and on the lines of least losses, as shares of the panel."""
    points = [(mark.saved, mark.lost) for mark in marks]
    for name in dict.fromkeys(mark.series for mark in marks):
        least = _least_losses([mark for mark in marks if mark.series == name])
        for start, end in pairwise(least):
            steps = np.linspace(0, 1, 25)
            saved = start.saved + (end.saved - start.saved) * steps
            lost = start.lost + (end.lost - start.lost) * steps
            points += list(zip(saved.tolist(), lost.tolist(), strict=True))
    return _in_panel(panel, points)


def losses_csv(choices: Sequence[Choice]) -> str:
    """Return the marks as CSV: memory saved in percent, points lost with the 95 % interval, and what is proven."""
    header = ["model", "benchmark", "setting", "memory_saved", "lost", "low", "high", "within_margin", "loses_more"]
    rows: list[list[Any]] = [header]
    for choice in choices:
        marks = _marks_of_choice(choice)
        settings = whole_names(mark.setting for mark in marks)
        for mark in marks:
            names = map(guarded, (choice.model, choice.benchmark, settings[mark.setting.id]))
            loss = mark.loss
            numbers = [round(value, 4) for value in (mark.saved, mark.lost, 100 * loss.low, 100 * loss.high)]
            rows.append([*names, *numbers, int(loss.is_kept), int(loss.is_broken)])
    return style.rows_csv(rows)
