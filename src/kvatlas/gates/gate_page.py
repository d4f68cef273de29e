"""A gate as one HTML page (verdict, figure, both texts of every changed problem) or as its figure alone."""

from __future__ import annotations

import base64
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvatlas.core import KvatlasError
from kvatlas.figures.forest import LossSpan, Row, RowPanel, forest_figure
from kvatlas.figures.marks import State, key_of
from kvatlas.figures.style import SUFFIXES, FigureOptions, rendered, save
from kvatlas.gates.gate_result import JudgedChange, difference_lines, gate_headline, gate_text, note_lines, task_rows
from kvatlas.gates.judgement import Verdict
from kvatlas.results.export import check_target, write_text
from kvatlas.text import margin_text, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Characters of texts on a page at most; further problems are named without them.
TEXTS_LIMIT = 8_000_000
#: Inches of the figure's width.
_WIDTH = 6.3
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

    columns, *rows = task_rows(result)

    # Question and both answers of each changed problem, as far as they are known and fit on a page.
    texts: list[tuple[str, str, str] | None] = []
    room = TEXTS_LIMIT
    for before, after in zip(*result.texts(result.changed), strict=True):
        of_problem = None
        if before is not None and after is not None:
            room -= len(before[0]) + len(before[1]) + len(after[1])
            if room >= 0:
                of_problem = (*before, after[1])
        texts.append(of_problem)

    return template.render(
        headline=gate_headline(result),
        verdict=result.verdict.split()[0],
        warnings=result.warnings,
        sentences=gate_text(result),
        columns=columns,
        rows=rows,
        figure=base64.b64encode(rendered(gate_figure(result), ".svg")).decode(),
        differences=difference_lines(result),
        notes=note_lines(result),
        changed=list(zip(result.changed, texts, strict=True)),
        with_texts=len(texts) - texts.count(None),
    )


# -- figure ------------------------------------------------------------------------------------------------------------


#: The states of the verdicts on a task.
_STATES = {Verdict.KEEPS: State.WITHIN, Verdict.LOSES: State.BEYOND, Verdict.CANNOT_TELL: State.OPEN}


def gate_figure(result: JudgedChange) -> Figure:
    """Return a row for each task, and one for their mean: what is lost with its limits, beside the margin."""
    judgement = result.judgement
    judged = [
        (task.pairs.task, task.pairs.changed, task.losses[judgement.claim], task.verdict)
        for task in judgement.tasks[:MOST_TASKS]
    ]
    if len(judged) == 1:
        judged = [(*judged[0][:3], judgement.verdict)]
    else:
        judged.insert(0, ("mean", judgement.changed, judgement.losses[judgement.claim], judgement.verdict))

    rows = []
    for name, (lost, gained), loss, verdict in judged:
        span = LossSpan(100 * loss.value, 100 * loss.low, 100 * loss.high)
        rows.append(Row((name, f"{lost:,}", f"{gained:,}"), span, _STATES[verdict]))
    margin = margin_text(judgement.margin)
    return forest_figure(
        [RowPanel("", ("task", "lost", "gained"), rows, 100 * judgement.margin)],
        "points lost after the change",
        reference="before",
        key=key_of({row.state for row in rows if row.state is not None}, margin),
        title=gate_headline(result),
        about=["lines: from the lower to the upper limit of the loss", "lost, gained: answers"],
        options=FigureOptions(width=_WIDTH),
    )
