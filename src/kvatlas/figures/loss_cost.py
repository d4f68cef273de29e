"""Loss against cost: a mark for each setting by what it saves and what it loses, with both intervals."""

from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from kvatlas.core import Setting, telling_parameters
from kvatlas.figures import style
from kvatlas.figures.forest import LossAxis, LossSpan, draw_margin, tick_number
from kvatlas.figures.marks import RING, RING_SIZE, State, add_mark, draw_setting
from kvatlas.figures.setting_rows import ChoiceRow, about_choices, key_of_choices, nearest_words, rows_of_choice
from kvatlas.figures.style import FigureOptions, Margins, finish_texts, make_panels, text_width
from kvatlas.stats.choice import Choice
from kvatlas.stats.costs import MEMORY, RATE, SECONDS, CostRatio
from kvatlas.stats.run_data import setting_words, shown_policies
from kvatlas.text import axis_label, guarded, in_words, margin_text, model_name

#: Inches of a panel, and of the values left of it and below.
_WIDTH = 3.4
_HEIGHT = 2.2
_LEFT = 0.66
_BELOW = 0.36
#: The labels of costs, and the words of a title for an amount that is saved or made.
_LABELS = {
    MEMORY: "KV memory saved, %",
    SECONDS: "time per answer saved, %",
    RATE: "tokens per second, multiple of the full cache's",
}
_TITLES = {
    MEMORY: "saves {} % of KV memory",
    SECONDS: "saves {} % of the time per answer",
    RATE: "makes {} x the tokens",
}


class CostPoint(NamedTuple):
    """A setting on the chart: its name and its cost with the ends of that, and whether the cost recommends it."""

    name: str
    row: ChoiceRow
    cost: LossSpan
    is_picked: bool


def shown_cost(cost: str, ratio: CostRatio) -> LossSpan:
    """Return a cost as the chart shows it, more is better: percent that are saved, or a multiple of the rate."""
    ends = (ratio.low, ratio.high)
    if cost == RATE:
        return LossSpan(ratio.value, *ends)
    low, high = (None if end is None else 100 * (1 - end) for end in reversed(ends))
    return LossSpan(100 * (1 - ratio.value), low, high)


def picked_setting(choice: Choice, cost: str, ratios: Mapping[str, CostRatio]) -> Setting | None:
    """Return the setting that is recommended by a cost: by memory that of all sentences.

    By time it is the best one of those that are proven to keep the margin, and proven to be faster than the full cache.
    """
    if not choice.is_judged:
        return None
    if cost == MEMORY:
        return choice.recommended
    origin = 1.0 if cost == RATE else 0.0
    faster = []
    for setting, _ in choice.proven:
        shown = shown_cost(cost, ratios[setting.id])
        if shown.low is not None and shown.low > origin:
            faster.append((shown.value, setting))
    return max(faster, key=lambda pair: pair[0])[1] if faster else None


def cost_points(choice: Choice, cost: str, ratios: Mapping[str, CostRatio]) -> list[CostPoint]:
    """Return the settings of a choice that are no controls."""
    rows = rows_of_choice(choice)
    policies = shown_policies(row.setting.policy for row in rows)
    parameters = telling_parameters(row.setting for row in rows)
    picked = picked_setting(choice, cost, ratios)
    points = []
    for row in rows:
        setting = row.setting
        names = [policies[setting.policy]] if len(policies) > 1 or not parameters else []
        names += [style.tick_text(setting.values[name]) for name in parameters if name in setting.values]
        points.append(CostPoint(" / ".join(names), row, shown_cost(cost, ratios[setting.id]), setting == picked))
    return points


def cost_title(choices: Sequence[Choice], cost: str, picked: Sequence[CostPoint]) -> str:
    """Return what the picked settings save or make and what is proven of them; empty where some models have none."""
    if len(picked) < len(choices):
        is_slow = cost != MEMORY and not picked and any(choice.is_judged and choice.proven for choice in choices)
        return f"No setting within {margin_text(choices[0].margin)} is proven to be faster" if is_slow else ""
    amounts = [point.cost.value for point in picked]
    settings = [point.row.setting for point in picked]
    digits = 2 if cost == RATE else 0
    ends = dict.fromkeys(f"{amount:.{digits}f}" for amount in (min(amounts), max(amounts)))
    subject = " and ".join(shown_policies(setting.policy for setting in settings).values())
    if len(choices) == 1:
        subject = in_words(setting_words(settings[0], list(choices[0].settings.values())))
    proven = f"proven to lose at most {margin_text(choices[0].margin)}"
    every_proven = chain.from_iterable(choice.proven for choice in choices)
    if not all(loss.keeps_like for setting, loss in every_proven if setting in settings):
        proven += " on these problems"
    return f"{subject} {_TITLES[cost].format(' to '.join(ends))}, {proven}"


def cost_figure(
    choices: Sequence[Choice],
    cost: str,
    ratios: Mapping[str, Mapping[str, CostRatio]],
    metric: str,
    *,
    title: str = "",
    options: FigureOptions | None = None,
) -> Figure:
    """Return a panel for each model: what settings save, to the right, and what they lose, from 0 at the top down.

    `ratios` are the costs by model and setting id. The `title` stands where no setting is picked.
    """
    options = options or FigureOptions()
    panels = [cost_points(choice, cost, ratios[choice.model]) for choice in choices]
    every_point = list(chain.from_iterable(panels))
    with options.applied():
        across = style.panels_in_row(len(panels), 2 if options.widest >= 5 else 1)
        width = options.inches or min(across * (_WIDTH + _LEFT), options.widest)
        parameters = telling_parameters(point.row.setting for point in every_point)
        about = [f"beside the marks: {' / '.join(options.named(axis_label(name)) for name in parameters)}"]
        if any(point.cost.low is not None for point in every_point):
            about.append("costs: of these problems on this machine")
        margin = 100 * choices[0].margin
        axis = LossAxis.of([point.row.points for point in every_point], margin)
        # What is recommended by memory may save no time.
        key = key_of_choices(choices, RING)
        picked = [point for point in every_point if point.is_picked]
        margins = Margins(_LEFT, 0.1, _LEFT + 0.06, 0.1, _BELOW)
        inner = margins.inner(width, across)
        heads = []
        for choice in choices:
            name = options.named(model_name(choice.model))
            lines = style.text_lines(name, inner, style.NAME_TYPE, options.colours.ink, "bold")
            nearest = options.in_words(nearest_words(choice))
            heads.append([*lines, *style.text_lines(nearest, inner, style.SMALL_TYPE, options.colours.soft)])
        above = margins.above + max(map(style.height_of, heads))
        figure, grid = make_panels(
            options,
            (width, _HEIGHT),
            len(choices),
            across,
            margins._replace(above=above),
            title=cost_title(choices, cost, picked) or title,
            about=[*about_choices(choices), *about, axis.words],
            key=key if picked else [entry for entry in key if entry.kind != RING],
        )
        label = f"points of {options.named(axis_label(metric))} lost"
        for panel, points, head in zip(grid, panels, heads, strict=True):
            style.write_above(panel, head)
            _draw_points(panel, points, margin, cost, axis, options)
            panel.set_ylabel(label, fontsize=style.NAME_TYPE, labelpad=2)
            panel.set_xlabel(_LABELS[cost], fontsize=style.NAME_TYPE, labelpad=2)
        finish_texts(figure, options)
        return figure


def _draw_points(
    panel: Axes, points: Sequence[CostPoint], margin: float, cost: str, axis: LossAxis, options: FigureOptions
) -> None:
    """Draw the settings of a model beside its full cache, the margin as a band, and a line down from the pick."""
    palette = options.colours
    origin = 1.0 if cost == RATE else 0.0
    every_end = chain.from_iterable(point.cost for point in points)
    costs = [end for end in every_end if end is not None]
    # From the full cache on, where that does not press all settings into a corner.
    has_origin = min(costs) - origin < 1.5 * (max(costs) - min(costs)) or min(costs) < origin
    shown = [origin, *costs] if has_origin else costs
    room = 0.08 * (max(shown) - min(shown)) or 1.0
    low = min(shown) - room
    high = max(shown) + room
    panel.set_yscale("function", functions=(axis.forward, axis.inverse))
    panel.set(xlim=(low, high), ylim=(axis.high, axis.low), xticks=style.round_values(low, high))
    panel.minorticks_off()
    ticks = [tick for tick in axis.ticks(_HEIGHT) if _HEIGHT * abs(axis.place(tick) - axis.place(margin)) > 0.12]
    panel.set_yticks([*ticks, margin], [*map(tick_number, ticks), f"margin {margin:g}"])
    panel.tick_params(length=2, width=0.5, pad=2, labelsize=style.SMALL_TYPE)
    panel.spines[["top", "right"]].set_visible(False)
    is_proven = any(point.row.state is State.WITHIN for point in points)
    colour = draw_margin(panel, axis, margin, is_proven, palette, is_vertical=True)
    panel.get_yticklabels()[-1].set_color(colour)
    if has_origin:
        panel.plot(origin, 0, "D", color=palette.ink, markersize=4.5, zorder=4)
    with_ends = options.intervals is not False
    for point in points:
        x = point.cost.value
        y = point.row.points.value
        horizontal = _ends(point.cost) if with_ends else None
        vertical = _ends(point.row.points) if with_ends else None
        draw_setting(panel, (x, y), point.row.state, palette, horizontal, vertical)
        if point.is_picked:
            add_mark(panel, (x, y), RING, palette, RING_SIZE)
            panel.plot((x, x), (y, axis.high), color=palette.picked, linewidth=0.8, linestyle=":", zorder=1)
    _write_names(panel, points, (low, high), axis, options)
    if has_origin:
        panel.annotate("full", (origin, 0), (5, 3), textcoords="offset points", fontsize=style.SMALL_TYPE)


def _ends(span: LossSpan) -> tuple[float, float]:
    """Return the ends of an interval; the value itself without one."""
    return (span.value, span.value) if span.low is None or span.high is None else (span.low, span.high)


def _write_names(
    panel: Axes, points: Sequence[CostPoint], ends: tuple[float, float], axis: LossAxis, options: FigureOptions
) -> None:
    """Write the names of settings beside their marks, else above or below their intervals, where nothing is covered."""
    width = panel.get_position().width * panel.figure.get_figwidth()  # type: ignore[union-attr]
    line = style.SMALL_TYPE * style.LINE
    places = []
    for point in points:
        x = (point.cost.value - ends[0]) / (ends[1] - ends[0]) * width
        losses = (point.row.points.value, *_ends(point.row.points))
        places.append((x, *((1 - axis.place(loss)) * _HEIGHT for loss in losses)))
    # Middles and halves of what is not covered: marks, intervals, and the names that are written.
    taken = [(x, y, 0.06, 0.06) for x, y, _, _ in places]
    taken += [(x, (top + bottom) / 2, 0.02, (top - bottom) / 2) for x, _, top, bottom in places]
    for point, (x, y, top, bottom) in sorted(zip(points, places, strict=True), key=lambda pair: pair[1]):
        half = text_width(point.name, bold=point.is_picked) / 2
        step = half + (0.11 if point.is_picked else 0.08)
        sideways = product((0, 0.7, -0.7, 1.4, -1.4), (step, -step))
        candidates = [(x + right, y + rise * line) for rise, right in sideways]
        candidates += [(x, top + line / 2), (x, bottom - line / 2)]
        inside = [
            (left, up)
            for left, up in candidates
            if half <= left <= width - half and line / 2 <= up <= _HEIGHT - line / 2
        ]
        free = (place for place in inside if not _covers(place, (half, 0.45 * line), taken))
        chosen = next(free, candidates[0])
        taken.append((*chosen, half, 0.45 * line))
        panel.annotate(
            point.name, (chosen[0] / width, chosen[1] / _HEIGHT), xycoords="axes fraction", va="center", ha="center",
            fontsize=style.SMALL_TYPE, fontweight="bold" if point.is_picked else "normal", zorder=6,
            color=options.colours.picked if point.is_picked else options.colours.ink,
            path_effects=[withStroke(linewidth=2, foreground=options.colours.ground, alpha=0.7)],
        )  # fmt: skip


def _covers(
    place: tuple[float, float], half: tuple[float, float], taken: Sequence[tuple[float, float, float, float]]
) -> bool:
    """Return whether a box around a place covers a taken one; of taken ones these are middles and halves."""
    return any(abs(place[0] - x) < half[0] + wide and abs(place[1] - y) < half[1] + high for x, y, wide, high in taken)


def cost_csv(choices: Sequence[Choice], cost: str, ratios: Mapping[str, Mapping[str, CostRatio]]) -> str:
    """Return cost and loss of each setting with their ends, its state, and whether it is recommended by this cost."""
    rows: list[list[Any]] = [
        ["model", "setting", cost, "cost_low", "cost_high", "loses", "low", "high", "state", "recommended"]
    ]
    for choice in choices:
        for point in cost_points(choice, cost, ratios[choice.model]):
            numbers = ["" if end is None else round(end, 4) for end in (*point.cost, *point.row.points)]
            names = map(guarded, (choice.model, str(point.row.setting)))
            rows.append([*names, *numbers, str(point.row.state), int(point.is_picked)])
    return style.rows_csv(rows)
