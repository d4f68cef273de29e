"""Loss against memory saved: a mark for each setting, the margin as a band, the offered setting with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.core import KvatlasError, Note, Setting, differing, mean_of
from kvatlas.figures import colours, style
from kvatlas.figures.curves import End, write_names
from kvatlas.figures.panels import margin_text
from kvatlas.figures.style import FigureOptions, Margins, line_axes, settle, sheet, text_width, wrapped, write_above
from kvatlas.stats.choice import Choice
from kvatlas.stats.losses import SettingLoss
from kvatlas.stats.run_data import shown_policies, whole_names
from kvatlas.text import axis_label, counted, guarded, model_name, percent_text

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
_WITHIN = {False: ("#d9efe0", "#1b6b3a"), True: ("#17382a", "#7fd6a3")}


class _Mark(NamedTuple):
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
        raise KvatlasError(
            "--loss-by-memory: no losses against a full cache; run one with the sweep, as `baseline: full`."
        )
    marks = [_marks(choice) for choice in drawn]
    series = list(dict.fromkeys(mark.series for mark in chain.from_iterable(marks)))
    marks = [sorted(of_model, key=lambda mark: mark.saved) for of_model in marks]
    with options.applied():
        names = [_panel_name(choice, drawn, options) for choice in drawn]
        figure, panels, room = _panels(options, names, series, title, _about(drawn, metric, options), notes)
        ends = list(chain.from_iterable(map(_offered_ends, drawn)))
        limits = _Limits.of(list(chain.from_iterable(marks)), [100 * drawn[0].margin, *ends])
        for panel, choice, of_model in zip(panels, drawn, marks, strict=True):
            limits.apply(panel)
            _draw_margin(panel, choice.margin, options)
            lines = _draw_marks(panel, of_model, series, options)
            _draw_offered(panel, choice, of_model, options)
            write_names(panel, lines, room)
        _write_labels(panels, metric, options)
        settle(figure, options)
        return figure


def _write_labels(panels: Sequence[Axes], metric: str, options: FigureOptions) -> None:
    """Write the labels of both axes, that of losses at the first panel of each row."""
    lost = f"{options.named(axis_label(metric))} lost, points"
    for panel in panels:
        panel.set_xlabel("KV memory saved, % of the full cache", fontsize=style.NAME_TYPE, labelpad=2)
    for panel in panels[:: _across(len(panels), options)]:
        panel.set_ylabel(lost, fontsize=style.NAME_TYPE, labelpad=2)


def _marks(choice: Choice) -> list[_Mark]:
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
        marks.append(_Mark(setting, series, 100 * (1 - choice.savings[id_].memory), loss))
    return marks


def _across(count: int, options: FigureOptions) -> int:
    return 1 if options.widest < _NARROW else min(count, 2)


def _panels(
    options: FigureOptions,
    names: Sequence[str],
    series: Sequence[str],
    title: str,
    about: Sequence[str],
    notes: Sequence[Note],
) -> tuple[Figure, list[Axes], float]:
    """Return the panels under their names, with room for the names of series at their right; and that room."""
    across = _across(len(names), options)
    width = options.inches or min(max(across * _PANEL_WIDTH, 5.0), options.widest)
    room = min(_NAMES, max(text_width(options.named(name)) for name in series) + 0.03)
    margins = Margins(_LEFT, room + 0.12, room + 0.12 + _LEFT, 0, 0)
    inner = margins.inner(width, across)
    lines = [style.text_lines(name, inner, style.NAME_TYPE, options.colours.ink, "bold") for name in names]
    margins = margins._replace(above=max(map(style.height_of, lines)) + 0.08, below=_BELOW)
    rows = math.ceil(len(names) / across)
    high = min(_PANEL_HEIGHT, (style.PAGE_HEIGHT - 0.6) / rows - margins.above - margins.below)
    figure, panels = sheet(
        options, (width, max(high, 0.9)), len(names), across, margins, title=title, about=about, notes=notes
    )
    for panel, of_panel in zip(panels, lines, strict=True):
        write_above(panel, of_panel)
    return figure, panels, room


def _panel_name(choice: Choice, choices: Sequence[Choice], options: FigureOptions) -> str:
    parts = [options.named(model_name(choice.model))]
    if len({other.benchmark for other in choices}) > 1:
        parts.append(options.named(choice.benchmark))
    return ", ".join(parts)


def _about(choices: Sequence[Choice], metric: str, options: FigureOptions) -> list[str]:
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


class _Limits(NamedTuple):
    """The ends of both axes: percent of memory saved, and points lost, of which 0 is on top."""

    left: float
    right: float
    top: float
    bottom: float

    @classmethod
    def of(cls, marks: Sequence[_Mark], losses: Sequence[float]) -> _Limits:
        """Return the limits that hold all marks, other losses in points, and a gap around them."""
        saved = [mark.saved for mark in marks]
        lost = [mark.lost for mark in marks]
        gap = 0.08 * (max(saved) - min(saved)) or 1.0
        most = max(*lost, *losses)
        least = min(*lost, *losses, 0.0)
        return cls(min(saved) - gap, max(saved) + gap, least - 0.06 * (most - least), most + 0.08 * (most - least))

    def apply(self, panel: Axes) -> None:
        """Set the limits of a panel."""
        panel.set(
            xlim=(self.left, self.right),
            ylim=(self.bottom, self.top),
            xticks=style.round_values(self.left, self.right),
            yticks=style.round_values(self.top, self.bottom),
        )


def _draw_margin(panel: Axes, margin: float, options: FigureOptions) -> None:
    """Draw the losses within the margin as a band, with its name."""
    band, ink = _WITHIN[options.dark]
    panel.axhspan(panel.get_ylim()[1], 100 * margin, color=band, linewidth=0, zorder=0)
    panel.axhline(0, color=options.colours.soft, linewidth=0.6, zorder=1)
    is_inside = _name_is_inside(panel, margin)
    panel.annotate(
        _margin_name(margin),
        (1, 100 * margin),
        (-3, 2 if is_inside else -3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=style.SMALL_TYPE,
        color=ink,
        ha="right",
        va="bottom" if is_inside else "top",
        zorder=2,
    )


def _name_is_inside(panel: Axes, margin: float) -> bool:
    """Return whether the name of the band fits into it; else it stands below."""
    bottom, top = panel.get_ylim()
    high = panel.get_position().height * panel.figure.get_figheight()  # type: ignore[union-attr]
    return high * 100 * margin / (bottom - top) > 1.6 * style.SMALL_TYPE * style.LINE


def _margin_name(margin: float) -> str:
    return f"within {margin_text(margin)} of the full cache"


def _draw_marks(panel: Axes, marks: Sequence[_Mark], series: Sequence[str], options: FigureOptions) -> list[End]:
    """Draw the settings of each series, and the line of their least losses; return where the lines end."""
    line_axes(panel, options)
    ends = []
    for index, name in enumerate(series):
        colour, marker = _stroke(name, index, options)
        series_marks = [mark for mark in marks if mark.series == name]
        if not series_marks:
            continue
        least = _least_losses(series_marks)
        panel.plot(
            [mark.saved for mark in least], [mark.lost for mark in least], color=colour, lw=1, alpha=0.6, zorder=2
        )
        for mark in series_marks:
            face = colour if mark.loss.is_kept else options.colours.ground
            panel.plot(mark.saved, mark.lost, marker, color=colour, mfc=face, ms=4, mew=1, zorder=3)
        ends.append(End(least[-1].lost, options.named(name), colour))
    return ends


def _stroke(name: str, index: int, options: FigureOptions) -> tuple[str, str]:
    """Return the colour and the marker of a series: those of its policy, or by its order if it names bits, too."""
    policy, _, bits = name.partition(", ")
    place, shape = (index, index) if bits else colours.identity(policy)
    return options.colours.lines[place % len(colours.LINES)], colours.MARKERS[shape % len(colours.MARKERS)]


def _least_losses(marks: Sequence[_Mark]) -> list[_Mark]:
    """Return the marks than which none saves as much memory and loses less, from the least memory saved."""
    least: list[_Mark] = []
    for mark in sorted(marks, key=lambda mark: (-mark.saved, mark.lost)):
        if not least or mark.lost < least[-1].lost:
            least.append(mark)
    return least[::-1]


def _draw_offered(panel: Axes, choice: Choice, marks: Sequence[_Mark], options: FigureOptions) -> None:
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
    title = "chosen" if choice.by_memory is not None else "safest"
    lines = [f"{title}: {_setting_text(mark.setting, marks)}", _loss_text(mark.loss)]
    _write_beside(panel, lines, (mark.saved, mark.lost), marks, choice.margin, options)


def _offered_ends(choice: Choice) -> tuple[float, ...]:
    """Return the ends of the interval of the offered setting's loss, in points."""
    loss = None if choice.offered is None else (choice.losses or {}).get(choice.offered.id)
    return () if loss is None else (100 * loss.low, 100 * loss.high)


def _loss_text(loss: SettingLoss) -> str:
    """Return `loses 10.4 points (5.6 to 15.5)`."""
    verb = "gains" if loss.value < 0 else "loses"
    ends = (loss.low, loss.high)
    if loss.value < 0:
        ends = (-loss.high, -loss.low)
    interval = " to ".join(map(percent_text, ends)).replace("-", "−")
    return f"{verb} {percent_text(abs(loss.value))} points ({interval})"


def _setting_text(setting: Setting, marks: Sequence[_Mark]) -> str:
    """Return a setting by the parameters that differ between the settings."""
    parameters = differing(mark.setting.values for mark in marks)
    # A value stays with its name.
    values = [f"{name}\u00a0{value}" for name, value in setting.parameters if name in parameters and value != ""]
    policies = shown_policies(mark.setting.policy for mark in marks)
    return ", ".join([policies[setting.policy], *values])


def _write_beside(
    panel: Axes,
    lines: Sequence[str],
    place: tuple[float, float],
    marks: Sequence[_Mark],
    margin: float,
    options: FigureOptions,
) -> None:
    """Write lines in the corner below the margin that covers the fewest marks, with a thin line to their place."""
    box = panel.get_position()
    size = panel.figure.get_size_inches()  # type: ignore[union-attr]
    wide = box.width * size[0]
    high = box.height * size[1]
    rows: list[str] = list(chain.from_iterable(wrapped(line, 0.72 * wide) for line in lines))
    width = max(map(text_width, rows)) / wide + 0.03
    height = len(rows) * style.SMALL_TYPE * style.LINE / high + 0.03
    left, right = panel.get_xlim()
    bottom, top = panel.get_ylim()
    points = [((mark.saved - left) / (right - left), (mark.lost - bottom) / (top - bottom)) for mark in marks]
    edge = (100 * margin - bottom) / (top - bottom)
    # The name of the band stands right, above or below its edge.
    name_height = 0.0 if _name_is_inside(panel, margin) else 1.6 * style.SMALL_TYPE * style.LINE / high
    name_left = 1 - text_width(_margin_name(margin)) / wide - 0.03
    corners = []
    for y in (edge - name_height - height, 0.03):
        corners += [(1 - width, y), (0.02, y)]

    def covered(corner: tuple[float, float]) -> int:
        """Return the marks under the lines; more than there are where the lines leave the panel or meet the name."""
        x, y = corner
        meets_name = x + width > name_left and y < edge and y + height > edge - name_height
        if y < 0.01 or meets_name:
            return len(points) + 1
        return sum(x <= mark_x <= x + width and y <= mark_y <= y + height for mark_x, mark_y in points)

    x, y = min(corners, key=covered)
    panel.text(
        x,
        y,
        "\n".join(rows),
        transform=panel.transAxes,
        fontsize=style.SMALL_TYPE,
        color=options.colours.ink,
        linespacing=1.25,
        va="bottom",
        zorder=5,
    )
    # The line comes from the side, or from above or below.
    end = (x - 0.01, y + 0.5 * height)
    if (place[0] - left) / (right - left) > x:
        is_above = (place[1] - bottom) / (top - bottom) > y
        end = (x + 0.2 * width, y + height - 0.02 if is_above else y)
    line = {"arrowstyle": "-", "color": options.colours.soft, "lw": 0.7, "shrinkA": 1, "shrinkB": 4}
    panel.annotate("", place, end, textcoords="axes fraction", arrowprops=line)


def data_csv(choices: Sequence[Choice]) -> str:
    """Return the marks as CSV: memory saved in percent, points lost with the 95 % interval, and what is proven."""
    header = ["model", "benchmark", "setting", "memory_saved", "lost", "low", "high", "within_margin", "loses_more"]
    rows: list[list[Any]] = [header]
    for choice in choices:
        marks = _marks(choice)
        settings = whole_names(mark.setting for mark in marks)
        for mark in marks:
            names = map(guarded, (choice.model, choice.benchmark, settings[mark.setting.id]))
            loss = mark.loss
            numbers = [round(value, 4) for value in (mark.saved, mark.lost, 100 * loss.low, 100 * loss.high)]
            rows.append([*names, *numbers, int(loss.is_kept), int(loss.is_broken)])
    return style.rows_csv(rows)
