"""Finding traces of a run by what they came to and by their text, in steps that take part of a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvatlas.core import KvatlasError
from kvatlas.report.page_json import MISSING, RIGHT, TRUNCATED
from kvatlas.results.store import Store
from kvatlas.view.run_view import RunView

#: Seconds and hits after which a search answers, and goes on when it is asked again.
SECONDS, HITS = 0.4, 50
#: Characters of a trace that are shown on either side of what was found.
AROUND = 60
FILTERS = ("", "lost", "right", "wrong", "truncated")


@dataclass(frozen=True)
class Query:
    """What is looked for: a text, case ignored, and a filter, in the whole run, one table, or one cell of it.

    `lost` is wrong where the full cache is right.
    """

    text: str = ""
    filter: str = ""
    table: int | None = None
    cell: int | None = None

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise KvatlasError(f"There is no filter {self.filter!r}; valid are: {', '.join(FILTERS[1:])}.")


def find(view: RunView, query: Query, start: int = 0) -> dict[str, Any]:
    """The traces from the `start`-th place on that fit: `hits` are [cell, problem, sample, mark, text around it].

    `next` is where to go on, None at the end; `seen` of `total` places were looked at.
    """
    cells = _cells(view, query)
    total = sum(len(view.marks[number]) for number in cells)
    wanted, until = query.text.lower(), time.monotonic() + SECONDS
    hits: list[list[Any]] = []
    with Store.open(view.folder) as store:
        for index, number, at in _places(view, cells, start):
            if time.monotonic() > until or len(hits) >= HITS:
                return {"hits": hits, "next": index, "seen": index, "total": total}
            if not _fits(view, query, number, at):
                continue
            around = ""
            if wanted:
                text = store.text(view.key(number, *view.split(number, at)))
                position = text.lower().find(wanted)
                if position < 0:
                    continue
                around = text[max(0, position - AROUND) : position + len(wanted) + AROUND]
            hits.append([number, *view.split(number, at), view.marks[number][at], around])
    return {"hits": hits, "next": None, "seen": total, "total": total}


def _cells(view: RunView, query: Query) -> list[int]:
    if query.cell is not None:
        return [query.cell]
    tables = view.tables if query.table is None else [view.tables[query.table]]
    return [number for table in tables for number in table.rows]


def _places(view: RunView, cells: list[int], start: int) -> Iterator[tuple[int, int, int]]:
    """(place among all, cell, place in the cell) of every trace that is there, from `start` on."""
    before = 0
    for number in cells:
        marks = view.marks[number]
        for at in range(max(0, start - before), len(marks)):
            if marks[at] != MISSING:
                yield before + at, number, at
        before += len(marks)


def _fits(view: RunView, query: Query, number: int, at: int) -> bool:
    mark = view.marks[number][at]
    if query.filter == "lost":
        return view.lost(number, at)
    return {"": True, "right": mark == RIGHT, "wrong": mark != RIGHT, "truncated": mark == TRUNCATED}[query.filter]
