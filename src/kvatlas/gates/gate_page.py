"""A gate as one HTML page (verdict, figure, both texts of every changed problem) or as its figure alone."""

from __future__ import annotations

import base64
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvatlas.core import KvatlasError
from kvatlas.figures.style import (
    SMALL_TYPE,
    SUFFIXES,
    FigureOptions,
    Margins,
    finish_texts,
    line_axes,
    make_panels,
    rendered,
    save,
)
from kvatlas.gates.gate_result import JudgedChange, difference_lines, gate_headline, gate_text, note_lines, task_table
from kvatlas.results.export import check_target, write_text
from kvatlas.text import percent_text, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvatlas.gates.outcomes import AnswerName
    from kvatlas.gates.pairing import TaskPairs

#: Characters of texts on a page at most; further problems are named without them.
TEXTS_LIMIT = 8_000_000
#: Width of the figure and height of a panel, in inches.
_SIZE = (6.3, 0.75)
#: There is room for so many bars at least, so that a few are not wide.
_LEAST_BARS = 40
#: The most tasks that are drawn.
MOST_TASKS = 8


def write_gate(result: JudgedChange, path: Path) -> Path:
    """Write the page or the figure, by the suffix."""
    check_out(path)
    if _is_page(path):
        write_text(gate_page(result), path)
    else:
        save(gate_figure(result), path)
    return path


def check_out(path: Path) -> None:
    """Raise KvatlasError for a path that is no page and no figure, or cannot be written."""
    if not _is_page(path) and path.suffix.lower() not in SUFFIXES:
        raise KvatlasError(f"--out: {path.name!r} must end in .html (a page) or {', '.join(SUFFIXES)} (the figure).")
    check_target(path)


def _is_page(path: Path) -> bool:
    return path.suffix.lower() in (".html", ".htm")


def gate_page(result: JudgedChange) -> str:
    """Return the HTML of a gate."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    template = environment.from_string((resources.files("kvatlas.gates") / "page.html").read_text("utf-8"))

    # The cells of the Markdown table, without the line below its head.
    table = []
    for line in task_table(result).split("\n"):
        cells = line.strip("|").split(" | ")
        table.append([cell.strip().replace("\\|", "|") for cell in cells])

    changed, with_texts = _changed_rows(result)
    return template.render(
        headline=gate_headline(result),
        verdict=result.verdict.split()[0],
        warnings=result.warnings,
        sentences=gate_text(result),
        columns=table[0],
        rows=table[2:],
        figure=base64.b64encode(rendered(gate_figure(result), ".svg")).decode(),
        differences=difference_lines(result),
        notes=note_lines(result),
        changed=changed,
        with_texts=with_texts,
        left_out=with_texts < len(changed),
    )


def _changed_rows(result: JudgedChange) -> tuple[list[dict[str, Any]], int]:
    """Return the changed problems, and the number of those with texts."""
    names: list[AnswerName] = []
    for problem in result.changed:
        names += problem.names
    first, second = result.texts(names)

    rows = []
    room = TEXTS_LIMIT
    with_texts = 0
    for problem in result.changed:
        row: dict[str, Any] = {
            "name": f"{problem.task} {problem.problem}",
            "before": f"{problem.before:g}",
            "after": f"{problem.after:g}",
            "samples": problem.samples,
            "question": "",
            "texts": None,
        }
        before = first.get(problem.names[0])
        after = second.get(problem.names[1])
        if before is not None and after is not None:
            room -= len(before[0]) + len(before[1]) + len(after[1])
            if room >= 0:
                row["question"] = before[0]
                row["texts"] = (before[1], after[1])
                with_texts += 1
        rows.append(row)
    return rows, with_texts


# -- figure ------------------------------------------------------------------------------------------------------------


def gate_figure(result: JudgedChange, options: FigureOptions | None = None) -> Figure:
    """Return a panel for the limits and one for each task with its changed problems, from lost to gained."""
    options = options or FigureOptions(width=_SIZE[0])
    tasks = result.pairs.tasks[:MOST_TASKS]
    margins = Margins(left=1.3, between=0.0, right=0.15, above=0.22, below=0.2, first=-0.15)
    with options.applied():
        margin = f"{100 * result.judgement.margin:g}"
        about = [
            f"dots: points lost, with limits; red line: the margin of {margin}",
            "bars: share of a problem's answers that were lost (down) or gained (up)",
        ]
        figure, panels = make_panels(
            options, _SIZE, len(tasks) + 1, 1, margins, title=gate_headline(result), about=about
        )
        _draw_limits(panels[0], result, options)
        for panel, task in zip(panels[1:], tasks, strict=True):
            _draw_changed_problems(panel, task, options)
        finish_texts(figure, options)
    return figure


def _draw_limits(panel: Axes, result: JudgedChange, options: FigureOptions) -> None:
    """Draw the loss of each task and of the mean with its limits, and the margin."""
    judgement = result.judgement
    rows = [(task.pairs.task, task.losses[judgement.claim]) for task in judgement.tasks[:MOST_TASKS]]
    if len(rows) > 1:
        rows.insert(0, ("mean", judgement.losses[judgement.claim]))
    rows.reverse()
    for place, (_, loss) in enumerate(rows):
        reach = [[100 * (loss.value - loss.low)], [100 * (loss.high - loss.value)]]
        colour = options.colours.ink
        panel.errorbar([100 * loss.value], [place], xerr=reach, color=colour, marker="o", markersize=3.5, capsize=2)

    panel.axvline(0, color=options.colours.soft, linewidth=0.5)
    panel.axvline(100 * judgement.margin, color=options.colours.warning, linewidth=1)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=SMALL_TYPE)
    panel.set(ylim=(-0.6, len(rows) - 0.4))
    line_axes(panel, options, "x")


def _draw_changed_problems(panel: Axes, task: TaskPairs, options: FigureOptions) -> None:
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
