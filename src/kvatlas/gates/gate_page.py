"""The page of a gate: one HTML file with the verdict, the figure, and both texts of every problem that changed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvatlas.figures.style import SUFFIXES, rendered, save
from kvatlas.gates import sentences
from kvatlas.gates.gate_figure import gate_figure
from kvatlas.results.export import check_target, write_text
from kvatlas.text import visible

if TYPE_CHECKING:
    from kvatlas.gates.gate_result import ChangedProblem, Judged

#: Characters of texts on a page at most; further problems are named without them.
TEXTS_LIMIT = 8_000_000


def is_page(path: Path) -> bool:
    """Return whether a path is that of a page."""
    return path.suffix.lower() in (".html", ".htm")


def check_out(path: Path) -> None:
    """Raise KvatlasError for a path that is no page and no figure, or cannot be written."""
    from kvatlas.core import KvatlasError

    if not is_page(path) and path.suffix.lower() not in SUFFIXES:
        raise KvatlasError(f"--out: {path.name!r} must end in .html (a page) or {', '.join(SUFFIXES)} (the figure).")
    check_target(path)


def write(judged: Judged, path: Path) -> Path:
    """Write the page or the figure, by the suffix."""
    check_out(path)
    if is_page(path):
        write_text(page(judged), path)
    else:
        save(gate_figure(judged), path)
    return path


def page(judged: Judged) -> str:
    """Return the HTML of a gate."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=visible
    )
    template = environment.from_string((resources.files("kvatlas.gates") / "page.html").read_text("utf-8"))
    table = [line.strip("|").split(" | ") for line in sentences.task_table(judged.judgement).split("\n")]
    changed, with_texts = _changed(judged)
    return template.render(
        headline=sentences.headline(judged),
        verdict=judged.verdict.split()[0],
        sentences=" ".join(sentences.sentences(judged)),
        columns=[cell.strip() for cell in table[0]],
        rows=[_cells(row) for row in table[2:]],
        figure=base64.b64encode(rendered(gate_figure(judged), ".svg")).decode(),
        differences=sentences.difference_lines(judged),
        notes=sentences.note_lines(judged),
        changed=changed,
        with_texts=with_texts,
        left_out=with_texts < len(changed),
    )


def _cells(row: Sequence[str]) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in row]


def _changed(judged: Judged) -> tuple[list[dict[str, Any]], int]:
    """Return the changed problems, and the number of those with texts."""
    problems = judged.changed
    first, second = judged.texts(list(chain.from_iterable(problem.names for problem in problems)))
    rows = []
    room = TEXTS_LIMIT
    with_texts = 0
    for problem in problems:
        row = _row(problem)
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


def _row(problem: ChangedProblem) -> dict[str, Any]:
    return {
        "name": f"{problem.task} {problem.problem}",
        "before": f"{problem.before:g}",
        "after": f"{problem.after:g}",
        "samples": problem.samples,
        "question": "",
        "texts": None,
    }
