"""The held-out test of autopsies: right answers with saving tokens and with others of their kinds put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.autopsy.summary import ARMS
from kvatlas.core import KvatlasError
from kvatlas.figures import style
from kvatlas.figures.style import FigureOptions, Margins, finish_texts, line_axes, make_panels, text_width
from kvatlas.text import counted, fixed, guarded, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The marks of the arms that are drawn, with their names and their places among the colours of lines.
_MARKS: Mapping[str, tuple[str, str, int]] = {
    "kind": ("s", "others of their kinds", 6),
    "cause": ("D", "saving tokens", 0),
    "no_compression": ("|", "no compression", 2),
}
#: The marks as characters of the legend.
_SIGNS: Mapping[str, str] = {"s": "■", "D": "◆", "|": "|"}
#: How far the marks of an arm stand above the middle of their row; rows are 1 apart.
_PLACES: Mapping[str, float] = {"kind": -0.14, "cause": 0.14}
#: Inches of a row, between the panels, and below them.
_ROW = 0.42
_GAP = 0.22
_BELOW = 0.34
_LABEL = "saving − others, points"
#: Inches of a figure whose legend begins at its edge.
_NARROW = 5.0
#: The width of the panel of differences, as a share of that of both.
_DIFFERENCES = 0.34
#: Inches of the names of rows, at most as a share of the figure.
_MOST_NAMES = 0.34

#: The held-out test of a cell, as `kvatlas.autopsy.summary.summarise` gives it under `held_out`.
HeldOut = Mapping[str, Any]


class _Row(NamedTuple):
    """A cell with its name in lines, and its test."""

    lines: Sequence[str]
    test: HeldOut


def autopsy_figure(tests: Mapping[str, HeldOut | None], options: FigureOptions | None = None) -> Figure:
    """Return the share of right answers under held-out random numbers, a row for each cell with two arms.

    The difference of the arms stands beside them. `tests` has the held-out test of each cell by its name; cells without
    one are left out. Raises KvatlasError if there is no other.
    """
    tested = {name: test for name, test in tests.items() if test is not None}
    if not tested:
        raise KvatlasError("No lost answer has a cause that was tested, so there is nothing to draw.")
    options = options or FigureOptions()

    with options.applied():
        # Names of cells, as `tiny-llama | CHAIN8-12`, and the number of answers below them.
        width = options.widest
        room = _MOST_NAMES * width
        rows = []
        for name, test in tested.items():
            model, _, benchmark = options.named(name).partition(" | ")
            about = ", ".join(filter(None, [benchmark, counted(test["answers"], "answer")]))
            rows.append(_Row([*style.wrapped(model, room), *style.wrapped(about, room)], test))
        names_width = max(map(text_width, chain.from_iterable(row.lines for row in rows)))
        most_lines = max(len(row.lines) for row in rows)
        row_height = max(_ROW, (most_lines + 0.5) * style.SMALL_TYPE * style.LINE)

        # The shares left, the differences right.
        left = style.EDGE + names_width + 0.08
        both = width - left - _GAP - 0.12
        label = style.wrapped(_LABEL, _DIFFERENCES * both, style.NAME_TYPE)
        below = _BELOW + (len(label) - 1) * style.NAME_TYPE * style.LINE
        above = style.SMALL_TYPE * style.LINE + 0.1
        figure, (shares,) = make_panels(
            options,
            (width, row_height * len(rows)),
            1,
            1,
            Margins(left, width - left - (1 - _DIFFERENCES) * both, 0, above, below),
            title=_title([row.test for row in rows]),
            about=_about([row.test for row in rows], options),
        )
        box = shares.get_position()
        start = box.x1 + _GAP / width
        differences = figure.add_axes((start, box.y0, _DIFFERENCES * both / width, box.height))

        _draw_shares(shares, rows, options)
        _draw_differences(differences, rows, options)
        differences.set_xlabel("\n".join(label), fontsize=style.NAME_TYPE, labelpad=2)
        _write_legend(figure, shares, options)
        finish_texts(figure, options)
    return figure


def _title(tests: Sequence[HeldOut]) -> str:
    """Return the finding: of one cell the shares, of several in how many the difference is proven."""
    proven = sum(test["cause_over_kind"]["low"] > 0 for test in tests)
    if not proven:
        return "Saving tokens are not proven to bring back more lost answers than others of their kinds"
    if len(tests) > 1:
        where = f"proven in {proven} of {len(tests)} cells"
        return f"Saving tokens bring back more lost answers than others of their kinds, {where}"
    saving, others = (fixed(tests[0]["right"][arm]["value"], 0) for arm in ("cause", "kind"))
    return f"Saving tokens make {saving} % of these lost answers right, others of their kinds {others} %, proven"


def _about(tests: Sequence[HeldOut], options: FigureOptions) -> list[str]:
    """Return the clauses about both panels."""
    streams = tests[0]["streams"]
    about = [
        f"lost answers that are right under {streams} random streams that the search did not use",
        f"at most {tests[0]['most_tokens']} tokens put back at equal budget",
    ]
    if options.intervals is not False:
        about.append("lines: 95 % intervals")
    return about


def _draw_shares(panel: Axes, rows: Sequence[_Row], options: FigureOptions) -> None:
    """Draw the arms of each cell: two marks with their intervals and numbers, and a stroke without compression."""
    _draw_rows(panel, rows, options)
    highest = 0.0
    for index, row in enumerate(rows):
        for arm, (marker, _, place) in _MARKS.items():
            share = row.test["right"][arm]
            colour = options.colours.lines[place]
            highest = max(highest, share["value"])
            if arm not in _PLACES:
                panel.plot([share["value"]] * 2, [index - 0.2, index + 0.2], color=colour, lw=1.6, zorder=2.5)
                continue

            # Rows are counted downwards.
            y = index - _PLACES[arm]
            if options.intervals is not False:
                highest = max(highest, share["high"])
                panel.plot([share["low"], share["high"]], [y, y], color=colour, lw=1, alpha=0.7, zorder=2)
            panel.plot(share["value"], y, marker, color=colour, ms=4.5, zorder=3)
            is_above = _PLACES[arm] > 0
            panel.annotate(
                fixed(share["value"], 0),
                (share["value"], y),
                (0, 3.5 if is_above else -3.5),
                textcoords="offset points",
                ha="center",
                va="bottom" if is_above else "top",
                fontsize=style.SMALL_TYPE,
                color=colour,
            )

    right = min(1.06 * highest, 103.0)
    panel.set(xlim=(0, right), xticks=style.round_values(0, right))
    panel.set_xlabel("right, %", fontsize=style.NAME_TYPE, labelpad=2)
    for index, row in enumerate(rows):
        panel.annotate(
            "\n".join(row.lines),
            (0, index),
            (-5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=style.SMALL_TYPE,
            linespacing=1.15,
        )


def _draw_differences(panel: Axes, rows: Sequence[_Row], options: FigureOptions) -> None:
    """Draw the difference of the arms of each cell with its interval; filled marks differ from 0."""
    _draw_rows(panel, rows, options)
    ink = options.colours.ink
    ends = [0.0]
    for row in rows:
        ends += [row.test["cause_over_kind"][name] for name in ("low", "high")]

    for index, row in enumerate(rows):
        difference = row.test["cause_over_kind"]
        limits = [difference["low"], difference["high"]]
        if options.intervals is not False:
            panel.plot(limits, [index, index], color=ink, lw=1.2, zorder=2)
        is_proven = difference["low"] > 0 or difference["high"] < 0
        is_near_0 = abs(difference["value"]) < 0.15 * (max(ends) - min(ends))
        panel.plot(difference["value"], index, "o", color=ink, mfc=ink if is_proven else options.colours.ground, ms=4.5)
        panel.annotate(
            signed(difference["value"]),
            (difference["value"], index),
            # The line of 0 would strike through a number above it.
            (3, 3.5) if is_near_0 else (0, 3.5),
            textcoords="offset points",
            ha="left" if is_near_0 else "center",
            va="bottom",
            fontsize=style.SMALL_TYPE,
        )

    gap = 0.08 * (max(ends) - min(ends))
    left = min(ends) - gap
    right = max(ends) + gap
    panel.axvline(0, color=ink, lw=0.8, zorder=1)
    panel.set(xlim=(left, right), xticks=style.round_values(left, right))


def _draw_rows(panel: Axes, rows: Sequence[_Row], options: FigureOptions) -> None:
    """Give a panel its rows, with a pale band on every second one."""
    line_axes(panel, options)
    # Numbers stand on the marks, and lines of a grid would strike them through.
    panel.grid(False)
    for index in range(0, len(rows), 2):
        panel.axhspan(index - 0.5, index + 0.5, color=options.colours.soft, alpha=0.07, linewidth=0, zorder=0)
    panel.set(ylim=(len(rows) - 0.5, -0.5), yticks=[])
    panel.spines["left"].set_visible(False)


def _write_legend(figure: Figure, panel: Axes, options: FigureOptions) -> None:
    """Write the names of the arms in their colours above the left panel, from the edge of a narrow figure."""
    box = panel.get_position()
    width, height = figure.get_size_inches()
    x = style.EDGE if width < _NARROW else box.x0 * width
    for marker, name, place in _MARKS.values():
        text = f"{_SIGNS[marker]} {name}"
        figure.text(
            x / width,
            box.y1 + 4 / 72 / height,
            text,
            fontsize=style.SMALL_TYPE,
            color=options.colours.lines[place],
        )
        x += text_width(text) + 0.16


def save_autopsies(summaries: Mapping[str, Mapping[str, Any]], path: Path) -> list[Path]:
    """Draw the summaries of cells to a file, with the numbers as a CSV file next to it; return the paths written.

    The data has all arms, by the number of tokens put back, too.
    """
    tests: dict[str, HeldOut | None] = {name: summary["held_out"] for name, summary in summaries.items()}
    figure = autopsy_figure(tests)
    rows: list[Sequence[Any]] = [["cell", "tokens", "answers", *ARMS, "saving_minus_others"]]
    for name, test in tests.items():
        if test is None:
            continue
        for tokens, group in test["by_size"].items():
            rows.append([guarded(name), tokens, group["answers"], *(_limits(group[arm]) for arm in ARMS), ""])
        shares = [_limits(test["right"][arm]) for arm in ARMS]
        rows.append([guarded(name), "all", test["answers"], *shares, _limits(test["cause_over_kind"])])
    return style.save(figure, path, data=style.rows_csv(rows))


def _limits(values: Mapping[str, float]) -> str:
    """Return a value with its interval: `41.3 (31.4 to 52.4)`."""
    value, low, high = (fixed(values[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
